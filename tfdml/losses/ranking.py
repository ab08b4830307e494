"""Losses on soft histograms of similarities, which stand in for ranks."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer
from tfdml.losses.base import PairLoss


def soft_histograms(positions, mask, bins):
    """A histogram per row, each value split linearly between its two neighbouring nodes: (B, B') -> (B, bins + 1).

    Args:
        positions: (B, B') in units of a bin: node r stands at r. Values outside [0, bins] count at its ends.
        mask: (B, B') the values that count.
        bins: The number of intervals between nodes.

    Example:
        >>> np.array(soft_histograms(keras.ops.array([[0.25, 1.0]]), keras.ops.array([[True, True]]), bins=2))
        array([[0.75, 1.25, 0.  ]], dtype=float32)
    """
    positions = ops.clip(positions, 0.0, float(bins))
    below = ops.stop_gradient(ops.clip(ops.floor(positions), 0.0, bins - 1.0))
    upper_share = ops.where(mask, positions - below, 0.0)
    lower_share = ops.where(mask, below + 1.0 - positions, 0.0)
    size = mask.shape[0] or ops.shape(mask)[0]
    segments = ops.arange(size, dtype="int32")[:, None] * (bins + 1) + ops.cast(below, "int32")
    shares = ops.concatenate([ops.reshape(lower_share, (-1,)), ops.reshape(upper_share, (-1,))], axis=0)
    nodes = ops.concatenate([ops.reshape(segments, (-1,)), ops.reshape(segments + 1, (-1,))], axis=0)
    return ops.reshape(ops.segment_sum(shares, nodes, num_segments=size * (bins + 1)), (size, bins + 1))


@keras.saving.register_keras_serializable("tfdml")
class HistogramLoss(PairLoss):
    """Histogram loss: the probability that a random negative pair is more similar than a random positive pair.

    L = sum over nodes r of p-_r (p+_1 + ... + p+_r)

    with p+ and p- the soft histograms of the cosines of all positive and all negative pairs, on `bins` + 1 nodes evenly
    spaced over [-1, 1]. An anchor's value is the share of its own negative pairs. 0 where the batch has no positive or
    no negative pair.

    `bins` is pytorch-metric-learning's `n_bins`. The paper counts nodes, R = `bins` + 1.

    Args:
        bins: The number of intervals.
        reduction: `"sum"` gives the sum over ordered negative pairs of the probability that each exceeds a positive.
        name: The loss's name in logs.

    Raises:
        ValueError: `bins` is not a positive integer.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(HistogramLoss(bins=2)([0, 0, 1], embeddings))  # negatives at 1 and at 0; the positive is at 0
        1.0

    Source: Ustinova and Lempitsky, "Learning Deep Embeddings with Histogram Loss", NIPS 2016, sec. 3.
    """

    whole_batch = True

    def __init__(self, bins=100, reduction="sum_over_batch_size", name="histogram_loss"):
        super().__init__(reduction=reduction, name=name)
        self.bins = integer("bins", bins, at_least=1)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        positions = (pairs.cosines() + 1.0) * (0.5 * self.bins)
        positives, negatives = pairs.positives, pairs.negatives
        positive_nodes = ops.sum(soft_histograms(positions, positives, self.bins), axis=0)
        num_positives = pairwise.masked_count(positives)
        cumulative = ops.cumsum(positive_nodes) / ops.maximum(num_positives, 1.0)
        rows = ops.matmul(soft_histograms(positions, negatives, self.bins), cumulative)
        if not self.averages_pairs:
            return rows
        return pairs.scale_to_mean(rows, pairwise.masked_count(negatives))


@keras.saving.register_keras_serializable("tfdml")
class FastAPLoss(PairLoss):
    """FastAP: 1 minus the average precision of each anchor's ranking, with soft histograms for ranks.

    L_i = 1 - (1/|P_i|) sum over nodes r of h+_r H+_r / H_r

    with h+ and h the soft histograms of the squared distances 2 - 2 cos of the anchor's positives and of all other
    images, on `bins` + 1 nodes evenly spaced over [0, 4], and H+ and H their cumulative sums. Averaged over the anchors
    that have a positive, as the authors' code and pytorch-metric-learning (`num_bins`) do; others are 0.

    Args:
        bins: The number of intervals.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.

    Raises:
        ValueError: `bins` is not a positive integer.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(FastAPLoss(bins=2)([0, 0, 1], embeddings))  # 1 - 1/2 and, with both others at distance 2, 1 - 1/2
        0.5

    Source: Cakir et al., "Deep Metric Learning to Rank", CVPR 2019.
    """

    def __init__(self, bins=10, reduction="sum_over_batch_size", name="fast_ap_loss"):
        super().__init__(reduction=reduction, name=name)
        self.bins = integer("bins", bins, at_least=1)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        positions = (1.0 - pairs.cosines()) * (0.5 * self.bins)
        positives = pairs.positives
        relevant = soft_histograms(positions, positives, self.bins)
        irrelevant = soft_histograms(positions, pairs.negatives, self.bins)
        relevant_within = ops.cumsum(relevant, axis=1)
        all_within = relevant_within + ops.cumsum(irrelevant, axis=1)
        reached = all_within > 0
        precision = ops.where(reached, relevant_within / ops.where(reached, all_within, 1.0), 0.0)
        num_positives = pairwise.masked_count(positives, axis=1)
        values = 1.0 - ops.sum(relevant * precision, axis=1) / ops.maximum(num_positives, 1.0)
        return self.over_pairs(pairs, values[:, None], num_positives[:, None] > 0)
