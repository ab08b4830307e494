"""Losses that approximate a measure of ranking: histogram, average precision, recall."""

from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number
from tfdml.losses.base import CosinePairLoss
from tfdml.losses.triplet import compare_with_positives
from tfdml.registry import register


def soft_histograms(positions, mask, bins):
    """Return a histogram per row, each value split linearly between two neighboring nodes: (B, B')
    -> (B, bins + 1).

    Args:
        positions: (B, B') in units of a bin: node r stands at r. Values outside [0, bins] count at
            its ends.
        mask: (B, B') the values that count.
        bins: The number of intervals between nodes.

    Example:
        >>> np.array(soft_histograms(keras.ops.array([[0.25, 1.0]]), keras.ops.array([[True,
        ...     True]]), bins=2))
        array([[0.75, 1.25, 0.  ]], dtype=float32)
    """
    positions = ops.clip(positions, 0.0, float(bins))
    below = ops.stop_gradient(ops.clip(ops.floor(positions), 0.0, bins - 1.0))
    upper_share = ops.where(mask, positions - below, 0.0)
    lower_share = ops.where(mask, below + 1.0 - positions, 0.0)
    size = mask.shape[0] or ops.shape(mask)[0]
    segments = ops.arange(size, dtype="int32")[:, None] * (bins + 1) + ops.cast(below, "int32")
    shares = ops.concatenate(
        [ops.reshape(lower_share, (-1,)), ops.reshape(upper_share, (-1,))], axis=0
    )
    nodes = ops.concatenate(
        [ops.reshape(segments, (-1,)), ops.reshape(segments + 1, (-1,))], axis=0
    )
    return ops.reshape(
        ops.segment_sum(shares, nodes, num_segments=size * (bins + 1)), (size, bins + 1)
    )


@register("loss")
class HistogramLoss(CosinePairLoss):
    """Histogram loss: the probability that a random negative pair is more similar than a random
    positive pair.

    L = sum over nodes r of p-_r (p+_1 + ... + p+_r)

    with p+ and p- the soft histograms of the cosines of all positive and all negative pairs, on
    `bins` + 1 nodes evenly spaced over [-1, 1]. An anchor's value is the share of its own negative
    pairs. 0 where the batch has no positive or no negative pair.

    `bins` is pytorch-metric-learning's `n_bins`. The paper counts nodes, R = `bins` + 1.

    Args:
        bins: The number of intervals.
        reduction: `"sum"` gives the sum over ordered negative pairs of the probability that each
            exceeds a positive.

    Raises:
        ValueError: `bins` is not a positive integer.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(HistogramLoss(bins=2)([0, 0, 1],
        ...     embeddings))  # negatives at 1 and at 0; the positive is at 0
        1.0

    Source: Ustinova and Lempitsky, "Learning Deep Embeddings with Histogram Loss", NIPS 2016, sec.
    3.
    """

    whole_batch = True

    def __init__(self, bins=100, **kwargs):
        super().__init__(**kwargs)
        self.bins = integer("bins", bins, at_least=1)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        positions = (pairs.cosines() + 1.0) * (0.5 * self.bins)
        positives, negatives = pairs.positives, pairs.negatives
        positive_nodes = ops.sum(soft_histograms(positions, positives, self.bins), axis=0)
        num_positives = pairwise.masked_count(positives)
        cumulative = ops.cumsum(positive_nodes) / ops.maximum(num_positives, 1.0)
        rows = pairwise.matmul(
            soft_histograms(positions, negatives, self.bins), cumulative[:, None]
        )[:, 0]
        return self.mean_over(pairs, rows, pairwise.masked_count(negatives))


@register("loss")
class FastAPLoss(CosinePairLoss):
    """FastAP: 1 minus the average precision of each anchor's ranking, with soft histograms for
    ranks.

    L_i = 1 - (1/|P_i|) sum over nodes r of h+_r H+_r / H_r

    with h+ and h the soft histograms of the squared distances 2 - 2 cos of the anchor's positives
    and of all other images, on `bins` + 1 nodes evenly spaced over [0, 4], and H+ and H their
    cumulative sums. Averaged over the anchors that have a positive, as the authors' code and
    pytorch-metric-learning (`num_bins`) do; others are 0.

    Args:
        bins: The number of intervals.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: `bins` is not a positive integer.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(FastAPLoss(bins=2)([0, 0, 1],
        ...     embeddings))  # 1 - 1/2 and, with both others at distance 2, 1 - 1/2
        0.5

    Source: Cakir et al., "Deep Metric Learning to Rank", CVPR 2019.
    """

    def __init__(self, bins=10, **kwargs):
        super().__init__(**kwargs)
        self.bins = integer("bins", bins, at_least=1)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
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


def _ahead(similarities, positives, others, temperature):
    """How many of an anchor's `others` are more similar to it than each of its positives, a
    positive itself as 1/2."""

    def smooth_step(z):
        return ops.sigmoid(z / temperature)

    def slope(z):
        step = smooth_step(z)
        return step * (1.0 - step) / temperature

    return compare_with_positives(similarities, positives, others, smooth_step, slope)


@register("loss")
class SmoothAPLoss(CosinePairLoss):
    """Smooth-AP: 1 minus the average precision of each anchor's ranking, its ranks counted by
    sigmoids of cosines s.

    L_i = 1 - (1/|P_i|) sum over positives j of (1 + sum over positives k != j of g(s_ik - s_ij))
                                              / (1 + sum over all others k != j of g(s_ik - s_ij)),
    g(z) = 1 / (1 + e^(-z / t))

    averaged over the anchors that have a positive; others are 0. The anchor is no part of its
    ranking, as in the paper. The authors' code and pytorch-metric-learning count it as a positive
    of its own, at rank 1, and ask for classes of one size, which this loss does not. Takes O(B^2)
    memory and O(B^2 P) time for classes of at most P + 1 images: 4,096 images at once are well
    possible.

    Args:
        temperature: t: what is nearer than this counts for a part.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(SmoothAPLoss()([0, 0, 1],
        ...     embeddings))  # ranks 2 and, with the other at the same cosine, 1.5
        0.4166667

    Source: Brown et al., "Smooth-AP: Smoothing the Path Toward Large-Scale Image Retrieval", ECCV
    2020, eq. 7.
    """

    def __init__(self, temperature=0.01, **kwargs):
        super().__init__(**kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        among_positives = 0.5 + _ahead(cosines, positives, positives, self.temperature)
        rank = among_positives + _ahead(cosines, positives, negatives, self.temperature)
        values = 1.0 - pairwise.masked_mean(among_positives / rank, positives, axis=1)
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])


@register("loss")
class RecallAtKLoss(CosinePairLoss):
    """Recall@k surrogate: 1 minus a smooth recall among the first k of each anchor's ranking,
    averaged over several k.

    L_i = mean over k of 1 - min(sum over positives j of g_r(k - r_ij), k) / min(k, |P_i|),
    r_ij = 1 + sum over all others a != j of g_s(s_ia - s_ij),   g_t(z) = 1 / (1 + e^(-z / t))

    on cosines s, averaged over the anchors that have a positive; others are 0. A positive at rank k
    counts 1/2, so that the loss stays above 0 where all are found. The anchor is no part of its
    ranking, as in the paper; the authors' code counts it in every rank. Their mixtures of
    similarities (SiMix) are left out. Takes O(B^2) memory and O(B^2 P) time for classes of at most
    P + 1 images: 4,096 images at once, the paper's size of batches, are well possible.

    Args:
        k: The numbers of images among which positives are looked for.
        rank_temperature: t of g_s, by which ranks are counted.
        recall_temperature: t of g_r, by which ranks are compared with k.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: A temperature is not positive, or `k` no list of positive integers.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> float(RecallAtKLoss(k=[1])([0, 0, 1],
        ...     embeddings))  # ranks 2 and 1.5: 1 - (0.2689 + 0.3775) / 2
        0.6767589

    Source: Patel, Tolias, Matas, "Recall@k Surrogate Loss with Large Batches and Similarity Mixup",
    CVPR 2022.
    """

    def __init__(self, k=(1, 2, 4, 8, 16), rank_temperature=0.01, recall_temperature=1.0, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(k, (list, tuple)) or not k:
            raise ValueError(f"k must be a list of positive integers such as [1, 2, 4], not {k!r}")
        self.k = tuple(integer("k", value, at_least=1) for value in k)
        self.rank_temperature = number("rank_temperature", rank_temperature, above=0)
        self.recall_temperature = number("recall_temperature", recall_temperature, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives = pairs.positives
        others = ops.logical_or(positives, pairs.negatives)
        ranks = 0.5 + _ahead(cosines, positives, others, self.rank_temperature)
        num_positives = ops.maximum(pairwise.masked_count(positives, axis=1), 1.0)
        recalls = ops.zeros_like(num_positives)
        for k in self.k:
            within_k = pairwise.masked_sum(
                ops.sigmoid((k - ranks) / self.recall_temperature), positives, axis=1
            )
            recalls = recalls + ops.minimum(within_k, float(k)) / ops.minimum(
                num_positives, float(k)
            )
        values = 1.0 - recalls / len(self.k)
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])
