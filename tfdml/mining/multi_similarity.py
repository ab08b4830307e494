"""Multi-similarity mining: pairs that violate, or nearly violate, the order of their anchor's other pairs."""

from __future__ import annotations

from keras import ops


def multi_similarity_pairs(pairs, epsilon=0.1):
    """Keeps the pairs that are worth learning from, by their cosines.

    A negative is kept if it is more similar than the anchor's least similar positive minus `epsilon`; a positive if
    it is less similar than the anchor's most similar negative plus `epsilon`. So an anchor without a positive, or
    without a negative, keeps nothing.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        epsilon: The slack.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[1.0, 0.0], [0.8, 0.6], [0.75, 0.66], [0.1, 1.0]], labels=[0, 0, 1, 2])
        >>> kept = multi_similarity_pairs(pairs, epsilon=0.1)
        >>> np.array(kept.positives)[0].tolist(), np.array(kept.negatives)[0].tolist()
        ([False, True, False, False], [False, False, True, False])

    Source: Wang et al., "Multi-Similarity Loss with General Pair Weighting", CVPR 2019, sec. 4.
    """
    similarities = ops.stop_gradient(pairs.cosines())
    # The minimum of no positive is +inf and the maximum of no negative -inf: nothing passes then.
    infinity = float("inf")
    positives = ops.where(pairs.positives, similarities, infinity)
    negatives = ops.where(pairs.negatives, similarities, -infinity)
    least_similar = ops.min(positives, axis=1, keepdims=True, initial=infinity)
    most_similar = ops.max(negatives, axis=1, keepdims=True, initial=-infinity)
    return pairs.keep(similarities - epsilon < most_similar, similarities + epsilon > least_similar)
