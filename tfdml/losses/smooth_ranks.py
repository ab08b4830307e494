"""Losses on ranks that are counted by sigmoids: each anchor ranks all other images of the batch."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number
from tfdml.losses.base import PairLoss
from tfdml.losses.comparing import compare_with_positives


def _ahead(similarities, positives, others, temperature):
    """How many of an anchor's `others` are more similar to it than each of its positives, a positive itself as 1/2."""

    def smooth_step(z):
        return ops.sigmoid(z / temperature)

    def slope(z):
        step = smooth_step(z)
        return step * (1.0 - step) / temperature

    return compare_with_positives(similarities, positives, others, smooth_step, slope)


@keras.saving.register_keras_serializable("tfdml")
class SmoothAPLoss(PairLoss):
    """Smooth-AP: 1 minus the average precision of each anchor's ranking, its ranks counted by sigmoids of cosines s.

    L_i = 1 - (1/|P_i|) sum over positives j of (1 + sum over positives k != j of g(s_ik - s_ij))
                                              / (1 + sum over all others k != j of g(s_ik - s_ij)),
    g(z) = 1 / (1 + e^(-z / t))

    averaged over the anchors that have a positive; others are 0. The anchor is no part of its ranking, as in the paper.
    The authors' code and pytorch-metric-learning count it as a positive of its own, at rank 1, and ask for classes of
    one size, which this loss does not. Takes O(B^2) memory and O(B^2 P) time for classes of at most P + 1 images: 4,096
    images at once are well possible.

    Args:
        temperature: t: what is nearer than this counts for a part.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(SmoothAPLoss()([0, 0, 1], embeddings))  # ranks 2 and, with the other at the same cosine, 1.5
        0.4166667

    Source: Brown et al., "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval", ECCV 2020, eq. 7.
    """

    def __init__(self, temperature=0.01, reduction="sum_over_batch_size", name="smooth_ap_loss"):
        super().__init__(reduction=reduction, name=name)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        among_positives = 0.5 + _ahead(cosines, positives, positives, self.temperature)
        rank = among_positives + _ahead(cosines, positives, negatives, self.temperature)
        values = 1.0 - pairwise.masked_mean(among_positives / rank, positives, axis=1)
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])


@keras.saving.register_keras_serializable("tfdml")
class RecallAtKLoss(PairLoss):
    """Recall@k surrogate: 1 minus a smooth recall among the first k of each anchor's ranking, averaged over several k.

    L_i = mean over k of 1 - min(sum over positives j of g_r(k - r_ij), k) / min(k, |P_i|),
    r_ij = 1 + sum over all others a != j of g_s(s_ia - s_ij),   g_t(z) = 1 / (1 + e^(-z / t))

    on cosines s, averaged over the anchors that have a positive; others are 0. A positive at rank k counts 1/2, so that
    the loss stays above 0 where all are found. The anchor is no part of its ranking, as in the paper; the authors' code
    counts it in every rank. Their mixtures of similarities (SiMix) are left out. Takes O(B^2) memory and O(B^2 P) time
    for classes of at most P + 1 images: 4,096 images at once, the paper's size of batches, are well possible.

    Args:
        k: The numbers of images among which positives are looked for.
        rank_temperature: t of g_s, by which ranks are counted.
        recall_temperature: t of g_r, by which ranks are compared with k.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.

    Raises:
        ValueError: A temperature is not positive, or `k` no list of positive integers.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(RecallAtKLoss(k=[1])([0, 0, 1], embeddings))  # ranks 2 and 1.5: 1 - (0.2689 + 0.3775) / 2
        0.6767589

    Source: Patel, Tolias, Matas, "Recall@k Surrogate Loss with Large Batches and Similarity Mixup", CVPR 2022.
    """

    def __init__(
        self,
        k=(1, 2, 4, 8, 16),
        rank_temperature=0.01,
        recall_temperature=1.0,
        reduction="sum_over_batch_size",
        name="recall_at_k_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        if not isinstance(k, (list, tuple)) or not k:
            raise ValueError(f"k must be a list of positive integers such as [1, 2, 4], not {k!r}")
        self.k = tuple(integer("k", value, at_least=1) for value in k)
        self.rank_temperature = number("rank_temperature", rank_temperature, above=0)
        self.recall_temperature = number("recall_temperature", recall_temperature, above=0)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives = pairs.positives
        others = ops.logical_or(positives, pairs.negatives)
        ranks = 0.5 + _ahead(cosines, positives, others, self.rank_temperature)
        num_positives = ops.maximum(pairwise.masked_count(positives, axis=1), 1.0)
        recalls = ops.zeros_like(num_positives)
        for k in self.k:
            found = pairwise.masked_sum(ops.sigmoid((k - ranks) / self.recall_temperature), positives, axis=1)
            recalls = recalls + ops.minimum(found, float(k)) / ops.minimum(num_positives, float(k))
        values = 1.0 - recalls / len(self.k)
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])
