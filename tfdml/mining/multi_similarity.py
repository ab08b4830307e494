"""Multi-similarity mining: pairs that violate, or nearly violate, the order of their anchor's other pairs."""

from __future__ import annotations

from keras import ops

from tfdml import pairwise


def multi_similarity_pairs(similarities, labels, epsilon=0.1):
    """The pairs worth learning from: (B, B), (B,) -> masks (B, B) of positives and of negatives.

    A negative is kept if it is more similar than the anchor's least similar positive minus `epsilon`; a positive if
    it is less similar than the anchor's most similar negative plus `epsilon`. So an anchor without a positive, or
    without a negative, keeps nothing.

    Args:
        similarities: (B, B), larger is more alike.
        labels: Class labels (B,).
        epsilon: The slack.

    Example:
        >>> similarities = [[1.0, 0.8, 0.75, 0.1]] * 4
        >>> positives, negatives = multi_similarity_pairs(similarities, [0, 0, 1, 2], epsilon=0.1)
        >>> np.array(positives)[0].tolist(), np.array(negatives)[0].tolist()
        ([False, True, False, False], [False, False, True, False])

    Source: Wang et al., "Multi-Similarity Loss with General Pair Weighting", CVPR 2019, sec. 4.
    """
    similarities = ops.stop_gradient(ops.convert_to_tensor(similarities, "float32"))
    labels = pairwise.as_labels(labels)
    positives, negatives = pairwise.positive_mask(labels), pairwise.negative_mask(labels)
    # The minimum of no positive is +inf and the maximum of no negative -inf: nothing passes then.
    infinity = float("inf")
    least_similar = ops.min(ops.where(positives, similarities, infinity), axis=1, keepdims=True, initial=infinity)
    most_similar = ops.max(ops.where(negatives, similarities, -infinity), axis=1, keepdims=True, initial=-infinity)
    kept_positives = ops.logical_and(positives, similarities - epsilon < most_similar)
    kept_negatives = ops.logical_and(negatives, similarities + epsilon > least_similar)
    return kept_positives, kept_negatives
