"""Losses that are a softmax over the pairs of an anchor: its positives among its negatives."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.losses.base import PairLoss
from tfdml.mining.composing import as_distance, as_miner


@keras.saving.register_keras_serializable("tfdml")
class NTXentLoss(PairLoss):
    """Normalised temperature-scaled cross-entropy (InfoNCE) on cosines s, with one term for each positive pair.

    L = -(1/|P|) sum over positive pairs (a, p) of
        ln( exp(s_ap / t) / ( exp(s_ap / t) + sum over negatives n of a of exp(s_an / t) ) )

    over ordered pairs. Equals pytorch-metric-learning's `NTXentLoss`; with two views of each image as a class, it is
    SimCLR's loss. `SupConLoss` has the anchor's other positives in the denominator too, so that they push each other
    away, and weighs anchors alike where this loss weighs pairs alike. `NPairLoss(scale=t ** -0.5)` is the same function
    of all pairs. A pair whose anchor has no negative costs nothing. Takes O(B^2) memory: 4,096 images at once are well
    possible.

    Args:
        temperature: t. SimCLR takes 0.1 on ImageNet.
        reduction: `"sum"` gives the plain sum over ordered positive pairs.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(NTXentLoss(temperature=1.0)([0, 0, 1], embeddings))  # ln(1 + 1 / e)
        0.3132617

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020, eq. 1; van
    den Oord, Li, Vinyals, "Representation Learning with Contrastive Predictive Coding", 2018, eq. 4.
    """

    distance = "cosine"

    def __init__(self, temperature=0.07, reduction="sum_over_batch_size", name="nt_xent_loss", mining="all"):
        super().__init__(reduction=reduction, name=name)
        self.temperature = number("temperature", temperature, above=0)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        logits = cosines / self.temperature
        # Relative to each positive, so that a sure pair keeps its digits.
        relative = pairwise.masked_logsumexp(logits, negatives, axis=1)[:, None] - logits
        return self.over_pairs(pairs, ops.softplus(relative), positives)


@keras.saving.register_keras_serializable("tfdml")
class SoftNearestNeighborLoss(PairLoss):
    """Soft nearest neighbour loss: how likely an anchor's neighbour, drawn by distance, is of another class.

    L_a = -ln( sum over positives p of exp(-d_ap / T) / sum over all j != a of exp(-d_aj / T) )

    averaged over the anchors that have a positive; others are 0. One near positive is enough for an anchor, so that a
    class may be made of several groups. (`NTXentLoss` asks it of every positive.) Takes O(B^2) memory: 4,096 images at
    once are well possible.

    Args:
        temperature: T, in units of `distance`: for squared distances of unit vectors twice what it is for cosines. The
            authors' code starts at 100 and learns T by gradient descent, on features of any length. Squared distances
            of unit vectors are at most 4, which T = 100 makes all alike. So T is fixed here, at 0.2, which on cosines
            is SimCLR's 0.1.
        distance: `"sqeuclidean"` (the paper's), `"euclidean"`, `"cosine"` or `"dot"`; or an object, a
            `tfdml.mining.Distance`.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `temperature` is not positive, or `distance` none of these.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(SoftNearestNeighborLoss(temperature=2.0)([0, 0, 1], embeddings))  # ln(1 + e^(-2 / 2))
        0.3132617

    Source: Frosst, Papernot, Hinton, "Analyzing and Improving Representations with the Soft Nearest Neighbor Loss",
    ICML 2019, sec. 2.
    """

    def __init__(
        self,
        temperature=0.2,
        distance="sqeuclidean",
        reduction="sum_over_batch_size",
        name="soft_nearest_neighbor_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.temperature = number("temperature", temperature, above=0)
        self.distance = as_distance(distance)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        logits = -distances / self.temperature
        # ln(1 + others / positives), which keeps its digits where the anchor is sure.
        values = ops.softplus(
            pairwise.masked_logsumexp(logits, negatives, 1) - pairwise.masked_logsumexp(logits, positives, 1)
        )
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])


@keras.saving.register_keras_serializable("tfdml")
class TupletMarginLoss(PairLoss):
    """Tuplet margin loss: a positive, brought nearer by an angle, among all negatives of its anchor; on cosines.

    L = (1/|P|) sum over positive pairs (a, p) of
          ln(1 + sum over negatives n of a of exp(s (cos(theta_an) - cos(theta_ap - margin))))
        + variance_weight ( (1/|P|) sum over P of [(1 - e) mean_P - cos]_+^2
                          + (1/|N|) sum over N of [cos - (1 + e) mean_N]_+^2 )

    over ordered pairs, with mean_P and mean_N the mean cosines of the batch's positive and negative pairs, which carry
    a gradient. The margin is slack and no demand: a positive within it is pushed outwards, so that hard
    positives do not make classes collapse. The first line is pytorch-metric-learning's `TupletMarginLoss`, the second
    the sum of the two parts of its `IntraPairVarianceLoss`. The paper's tuplets hold one image of each other class;
    here, as there, all images of other classes are negatives. Takes O(B^2) memory: 4,096 images at once are well
    possible.

    Args:
        margin_degrees: The slack angle, 0 to 90; 5.73 is the paper's 0.1.
        scale: s. The paper uses 32 on CUB-200 and Cars-196 (default), and 64 on the larger data sets, which is
            pytorch-metric-learning's default.
        variance_weight: The weight of the intra-pair variance, 0.5 as in the paper; 0 leaves it out.
        variance_slack: e, how far from the mean a pair may be at no cost, as a share of the mean.
        reduction: `"sum"` gives the plain sums over ordered pairs.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `scale` is not positive, a weight is negative, or an argument is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> loss = TupletMarginLoss(margin_degrees=60, scale=1.0, variance_weight=0.0)
        >>> float(loss([0, 0, 1], embeddings))  # ln(1 + e^(0 - 1 / 2))
        0.4740770

    Source: Yu and Tao, "Deep Metric Learning with Tuplet Margin Loss", ICCV 2019, sec. 3.
    """

    distance = "cosine"

    def __init__(
        self,
        margin_degrees=5.73,
        scale=32.0,
        variance_weight=0.5,
        variance_slack=0.01,
        reduction="sum_over_batch_size",
        name="tuplet_margin_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.margin_degrees = number("margin_degrees", margin_degrees, at_least=0, at_most=90)
        self.scale = number("scale", scale, above=0)
        self.variance_weight = number("variance_weight", variance_weight, at_least=0)
        self.variance_slack = number("variance_slack", variance_slack, at_least=0, at_most=1)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        push = pairwise.masked_logsumexp(self.scale * cosines, negatives, axis=1)
        rows = self.over_pairs(pairs, ops.softplus(push[:, None] - self.scale * self._with_slack(pairs)), positives)
        return rows + self.variance_weight * self._variance(pairs)

    @property
    def whole_batch(self):
        """Whether the mean cosines of the batch count, which carry a gradient."""
        return self.variance_weight > 0

    def _with_slack(self, pairs):
        """cos(theta - margin)."""
        margin = math.radians(self.margin_degrees)
        unit = pairs.map(pairwise.l2_normalize)
        anchors, references = (ops.any(vectors != 0, axis=1) for vectors in (unit.anchors, unit.references))
        # 1 - cos as half a squared distance, which is exactly 0 for duplicates: the sine is steep there.
        nonzero = ops.logical_and(anchors[:, None], references[None, :])
        apart = ops.where(nonzero, 0.5 * unit.distances("sqeuclidean"), pairs.distances("cosine"))
        sines = pairwise.safe_sqrt(apart * (2.0 - apart))
        return (1.0 - apart) * math.cos(margin) + sines * math.sin(margin)

    def _variance(self, pairs):
        if not self.variance_weight:
            return 0.0
        cosines, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        least = (1.0 - self.variance_slack) * pairwise.masked_mean(cosines, positives)
        most = (1.0 + self.variance_slack) * pairwise.masked_mean(cosines, negatives)
        pull = self.over_pairs(pairs, ops.square(ops.relu(least - cosines)), positives)
        return pull + self.over_pairs(pairs, ops.square(ops.relu(cosines - most)), negatives)
