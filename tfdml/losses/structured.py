"""Losses that judge all pairs of an anchor together, by log-sum-exp over its positives and its negatives."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.losses.base import PairLoss
from tfdml.mining import multi_similarity_pairs
from tfdml.mining.composing import as_distance, as_miner


@keras.saving.register_keras_serializable("tfdml")
class MultiSimilarityLoss(PairLoss):
    """Multi-similarity loss on cosines s, with its mining of pairs.

    L = (1/B) sum over anchors i of (1/alpha) ln(1 + sum over mined positives of exp(-alpha (s_ik - base)))
                                  + (1/beta) ln(1 + sum over mined negatives of exp(beta (s_ik - base)))

    The mean is over all anchors, mined or not, as in the paper's equation and the authors' code. The pairs are those of
    `tfdml.mining.multi_similarity_pairs`. pytorch-metric-learning has the same loss with its miner given apart.

    Args:
        alpha: Steepness for positives.
        beta: Steepness for negatives.
        base: lambda, the similarity that separates positives from negatives.
        mining_epsilon: The miner's slack; None takes all pairs.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.
        mining: An object that chooses the pairs in the place of the paper's mining: a `tfdml.mining.Miner`.

    Raises:
        ValueError: `alpha` or `beta` is not positive.

    Example:
        >>> loss = MultiSimilarityLoss(mining_epsilon=None)
        >>> float(loss([0, 0], [[1.0, 0.0], [1.0, 0.0]]))  # ln(1 + exp(-1)) / 2
        0.1566308

    Source: Wang et al., "Multi-Similarity Loss with General Pair Weighting", CVPR 2019, sec. 4.
    """

    distance = "cosine"

    def __init__(
        self,
        alpha=2.0,
        beta=50.0,
        base=0.5,
        mining_epsilon=0.1,
        reduction="sum_over_batch_size",
        name="multi_similarity_loss",
        mining=None,
    ):
        super().__init__(reduction=reduction, name=name)
        self.alpha = number("alpha", alpha, above=0)
        self.beta = number("beta", beta, above=0)
        self.base = number("base", base)
        self.mining_epsilon = None if mining_epsilon is None else number("mining_epsilon", mining_epsilon, at_least=0)
        self.mining = None if mining is None else as_miner(mining, ())

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        similarities, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        if self.mining is None and self.mining_epsilon is not None:
            kept = multi_similarity_pairs(pairs, self.mining_epsilon)
            positives, negatives = kept.positives, kept.negatives
        offsets = similarities - self.base
        pull = ops.softplus(pairwise.masked_logsumexp(-self.alpha * offsets, positives, axis=1)) / self.alpha
        push = ops.softplus(pairwise.masked_logsumexp(self.beta * offsets, negatives, axis=1)) / self.beta
        return pull + push


@keras.saving.register_keras_serializable("tfdml")
class LiftedStructureLoss(PairLoss):
    """Lifted structured loss on Euclidean distances.

    L = (1 / 2|P|) sum over positive pairs (i, j) of [J_ij]_+^2,
    J_ij = d_ij + ln( sum over negatives k of i, exp(margin - d_ik) + sum over negatives l of j, exp(margin - d_jl) )

    Equals TensorFlow Addons' `lifted_struct_loss` wherever that is defined. A pair without any negative costs nothing.

    Args:
        margin: Negatives count from about this distance on.
        reduction: `"sum"` gives half the sum over ordered pairs, that is the sum over unordered ones.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `margin` is negative.

    Example:
        >>> embeddings = [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        >>> float(LiftedStructureLoss(margin=1.0)([0, 0, 1], embeddings))  # (ln 2)^2 / 2
        0.2402265

    Source: Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016, eq. 4.
    """

    whole_batch = within_batch = True

    def __init__(self, margin=1.0, reduction="sum_over_batch_size", name="lifted_structure_loss", mining="all"):
        super().__init__(reduction=reduction, name=name)
        self.margin = number("margin", margin, at_least=0)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        push = pairwise.masked_logsumexp(self.margin - distances, negatives, axis=1)
        violation = ops.relu(distances + ops.logaddexp(push[:, None], push[None, :]))
        return self.over_pairs(pairs, 0.5 * ops.square(violation), positives)


@keras.saving.register_keras_serializable("tfdml")
class GeneralizedLiftedStructureLoss(PairLoss):
    """Lifted structured loss with all positives of an anchor at once, "batch all lifted" with a smooth maximum.

    L = mean over anchors a of [ ln(sum over positives p of exp(d_ap - positive_margin))
                               + ln(sum over negatives n of exp(margin - d_an)) ]_+

    over the anchors that have a positive and a negative; others are 0. (pytorch-metric-learning counts an anchor that
    lacks one of them too, with its logarithm as 0.) Takes O(B^2) memory: 4,096 images at
    once are well possible.

    Args:
        margin: How much further than positives negatives are to be; in units of `distance`.
        positive_margin: The distance up to which positives hardly count.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`; or an object, a `tfdml.mining.Distance`.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: A margin is negative, or `distance` none of these.

    Example:
        >>> embeddings = [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        >>> float(GeneralizedLiftedStructureLoss(margin=1.5)([0, 0, 1], embeddings))  # 0 + (1.5 - 1)
        0.5

    Source: Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017, sec. 2.
    """

    def __init__(
        self,
        margin=1.0,
        positive_margin=0.0,
        distance="euclidean",
        reduction="sum_over_batch_size",
        name="generalized_lifted_structure_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.margin = number("margin", margin, at_least=0)
        self.positive_margin = number("positive_margin", positive_margin, at_least=0)
        self.distance = as_distance(distance)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        pull = pairwise.masked_logsumexp(distances - self.positive_margin, positives, axis=1)
        push = pairwise.masked_logsumexp(self.margin - distances, negatives, axis=1)
        counted = ops.logical_and(ops.any(positives, axis=1), ops.any(negatives, axis=1))
        return self.over_pairs(pairs, ops.relu(pull + push)[:, None], counted[:, None])


@keras.saving.register_keras_serializable("tfdml")
class CircleLoss(PairLoss):
    """Circle loss on cosines s: each pair is weighted by how far it is from its optimum.

    L_i = ln(1 + sum over positives of exp(-gamma [1 + m - s_p]_+ (s_p - 1 + m))
               * sum over negatives of exp(gamma [s_n + m]_+ (s_n - m)))

    averaged over the anchors that have a positive and a negative (others are 0), as pytorch-metric-learning does by
    leaving zeros out. The weights [.]_+ carry no gradient, as in the paper.

    Args:
        margin: m, in [-1, 1]. The paper's fine-grained retrieval uses 0.4, its face recognition 0.25.
        gamma: The scale: 80 and 256.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: `gamma` is not positive or `margin` is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(CircleLoss(margin=0.4, gamma=1.0)([0, 0, 1], embeddings))  # (ln(1 + e^-0.16) + ln(1 + e^0.48)) / 2
        0.7890093

    Source: Sun et al., "Circle Loss", CVPR 2020, sec. 3.
    """

    distance = "cosine"

    def __init__(self, margin=0.4, gamma=80.0, reduction="sum_over_batch_size", name="circle_loss", mining="all"):
        super().__init__(reduction=reduction, name=name)
        self.margin = number("margin", margin, at_least=-1, at_most=1)
        self.gamma = number("gamma", gamma, above=0)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        similarities, positives, negatives = pairs.cosines(), pairs.positives, pairs.negatives
        positive_weight = ops.stop_gradient(ops.relu(1.0 + self.margin - similarities))
        negative_weight = ops.stop_gradient(ops.relu(similarities + self.margin))
        pull = -self.gamma * positive_weight * (similarities - 1.0 + self.margin)
        push = self.gamma * negative_weight * (similarities - self.margin)
        values = ops.softplus(
            pairwise.masked_logsumexp(pull, positives, axis=1) + pairwise.masked_logsumexp(push, negatives, axis=1)
        )
        counted = ops.logical_and(ops.any(positives, axis=1), ops.any(negatives, axis=1))
        return self.over_pairs(pairs, values[:, None], counted[:, None])


@keras.saving.register_keras_serializable("tfdml")
class SupConLoss(PairLoss):
    """Supervised contrastive loss on cosines s.

    L_i = -(1/|P_i|) sum over positives p of ln( exp(s_ip / t) / sum over all a != i of exp(s_ia / t) )

    averaged over the anchors that have a positive, as in pytorch-metric-learning; others are 0. This is the paper's
    L_out. The authors' code multiplies by t / 0.07 as well.

    Args:
        temperature: t.
        reduction: `"sum"` gives the sum over anchors, as the paper writes it.
        name: The loss's name in logs.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(SupConLoss(temperature=1.0)([0, 0, 1], embeddings))  # ln(1 + 1 / e)
        0.3132617

    Source: Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, eq. 2.
    """

    def __init__(self, temperature=0.1, reduction="sum_over_batch_size", name="sup_con_loss"):
        super().__init__(reduction=reduction, name=name)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        logits = pairs.cosines() / self.temperature
        positives = pairs.positives
        others = ops.logical_or(positives, pairs.negatives)
        has_positive = ops.any(positives, axis=1)
        # Relative to each positive, so that a sure anchor keeps its digits.
        values = pairwise.masked_mean(
            pairwise.masked_logsumexp(logits, others, axis=1)[:, None] - logits, positives, axis=1
        )
        return self.over_pairs(pairs, values[:, None], has_positive[:, None])
