"""Losses on single pairs: each pair is judged alone, by its distance or similarity."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import number, one_of
from tfdml.losses.base import PairLoss
from tfdml.mining.composing import as_distance, as_miner


@keras.saving.register_keras_serializable("tfdml")
class ContrastiveLoss(PairLoss):
    """Contrastive loss: positives are pulled together, negatives pushed beyond a margin.

    L = (1/|P|) sum over positives of d_ij + (1/|N|) sum over negatives of [margin - d_ij]_+

    over ordered pairs of different images. With `distance="sqeuclidean"` and `reduction="sum"` this is eq. 2 of the
    DML-DA paper (each unordered pair counted from both ends); with `distance="euclidean"` it is the form of
    pytorch-metric-learning with its defaults, save that positives at distance 0 count in |P|.

    Args:
        margin: Negatives further apart than this are left alone; in units of `distance`, and not negative save for
            `"dot"` and for an object.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` (1 - cos) or `"dot"` (-x.y, for which the positive term
            has no lower bound unless the embeddings are normalised); or an object, a `tfdml.mining.Distance`.
        average: |N| counts the `"active"` negatives only (those inside the margin, as HORDE does; the push keeps its
            strength when few are left) or `"all"` of them.
        reduction: `"sum"` gives the plain sums over ordered pairs.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(ContrastiveLoss(margin=1.0)([0, 0, 1], embeddings))  # 0.8 + (1 - 0.4)
        1.4

    Source: Hadsell, Chopra, LeCun, CVPR 2006; Li et al., "Deep Metric Learning with Density Adaptivity", eq. 2.
    """

    def __init__(
        self,
        margin=1.0,
        distance="sqeuclidean",
        average="active",
        reduction="sum_over_batch_size",
        name="contrastive_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.distance = as_distance(distance)
        self.mining = as_miner(mining)
        # -x.y is negative where vectors are alike, as may be what an object gives; no other distance is below 0.
        may_be_negative = self.distance == "dot" or not isinstance(self.distance, str)
        self.margin = number("margin", margin, at_least=None if may_be_negative else 0)
        one_of("average", average, ("active", "all"))
        self.average = average

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        hinge = ops.relu(self.margin - distances)
        counted = ops.logical_and(negatives, hinge > 0) if self.average == "active" else negatives
        return self.over_pairs(pairs, distances, positives) + self.over_pairs(pairs, hinge, counted)


@keras.saving.register_keras_serializable("tfdml")
class CosineContrastiveLoss(PairLoss):
    """Contrastive loss on cosine similarities s_ij, squared in the positives and linear in the negatives.

    L = (1/|P|) sum over positives of (s_ij - 1)^2 / 2 + (1/|N|) sum over negatives of [s_ij - margin]_+ / 2

    over ordered pairs of different images, with N the active negatives, those above the margin.

    Args:
        margin: The cosine up to which negatives are left alone.
        reduction: `"sum"` gives the plain sums over ordered pairs.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `margin` is not a cosine.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(CosineContrastiveLoss(margin=0.5)([0, 0, 1], embeddings))  # (0.6 - 1)^2 / 2 + (0.8 - 0.5) / 2
        0.23

    Source: the contrastive loss of the public code of Jacob et al., "Metric Learning With HORDE", ICCV 2019.
    """

    distance = "cosine"

    def __init__(self, margin=0.5, reduction="sum_over_batch_size", name="cosine_contrastive_loss", mining="all"):
        super().__init__(reduction=reduction, name=name)
        self.margin = number("margin", margin, at_least=-1, at_most=1)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        hinge = ops.relu(cosines - self.margin)
        active = ops.logical_and(negatives, hinge > 0)
        pull = self.over_pairs(pairs, ops.square(cosines - 1.0), positives)
        return 0.5 * (pull + self.over_pairs(pairs, hinge, active))


@keras.saving.register_keras_serializable("tfdml")
class BinomialDevianceLoss(PairLoss):
    """Binomial deviance on cosine similarities s_ij.

    L = (1/|P|) sum over positives of ln(1 + exp(-alpha (s_ij - beta)))
      + (1/|N|) sum over negatives of ln(1 + exp(alpha C (s_ij - beta)))

    over ordered pairs of different images, with C = `negative_cost` inside the exponent. `reduction="sum"` gives
    eq. 10 of the ECAML paper, the plain sum over i, j (without i = j).

    Args:
        alpha: Scale of the similarities.
        beta: The similarity at which a pair costs ln 2.
        negative_cost: C, how much steeper negatives are than positives.
        reduction: `"sum"` gives the plain sums over ordered pairs.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `alpha` or `negative_cost` is not positive.

    Example:
        >>> loss = BinomialDevianceLoss(alpha=2.0, beta=0.5, negative_cost=25.0)
        >>> float(loss([0, 0], [[1.0, 0.0], [1.0, 0.0]]))  # ln(1 + exp(-1))
        0.3132617

    Source: Yi, Lei, Li, "Deep Metric Learning for Practical Person Re-Identification", 2014; Chen and Deng, "Energy
    Confused Adversarial Metric Learning", AAAI 2019, eq. 10.
    """

    distance = "cosine"

    def __init__(
        self,
        alpha=2.0,
        beta=0.5,
        negative_cost=25.0,
        reduction="sum_over_batch_size",
        name="binomial_deviance_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.alpha = number("alpha", alpha, above=0)
        self.beta = number("beta", beta)
        self.negative_cost = number("negative_cost", negative_cost, above=0)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        logits = self.alpha * (cosines - self.beta)
        pull = self.over_pairs(pairs, ops.softplus(-logits), positives)
        return pull + self.over_pairs(pairs, ops.softplus(self.negative_cost * logits), negatives)
