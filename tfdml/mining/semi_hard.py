"""Semi-hard negatives: the nearest that is further from the anchor than the positive is."""

from __future__ import annotations

from keras import ops


def semi_hard_negatives(pairs):
    """Finds for every (anchor, positive) the column of its negative: integers (b, B).

    The nearest negative with d_an > d_ap; where there is none, the furthest negative. At columns that are not
    positives the index is that of the same rule; in rows without any negative it means nothing.

    Costs O(B^2) memory and O(B^2 log B) time: negatives and positives are ranked together, and the number of
    negatives that come before a positive is the rank, among negatives, of the one to choose.

    Args:
        pairs: `tfdml.pairs.Pairs`, of which `pairs.distances()` decide.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[0.0], [0.5], [0.4], [0.7], [0.9]], labels=[0, 0, 1, 1, 2])
        >>> int(semi_hard_negatives(pairs)[0, 1])  # 0.7 is the first beyond 0.5
        3

    Source: Schroff, Kalenichenko, Philbin, "FaceNet", CVPR 2015, sec. 3.2; with the rule of TensorFlow Addons for the
    case that there is none.
    """
    distances, negatives = ops.stop_gradient(pairs.distances()), pairs.negatives
    size = distances.shape[1] or ops.shape(distances)[1]
    others_last = ops.where(negatives, distances, float("inf"))
    by_distance = ops.argsort(others_last, axis=1)
    # Negatives stand first: argsort is stable, so one at the positive's own distance is not taken to be further.
    order = ops.argsort(ops.concatenate([others_last, distances], axis=1), axis=1)
    is_negative = ops.concatenate([negatives, ops.zeros_like(negatives)], axis=1)
    seen = ops.cumsum(ops.cast(ops.take_along_axis(is_negative, order, axis=1), "int32"), axis=1)
    place = ops.argsort(order, axis=1)[:, size:]
    not_further = ops.take_along_axis(seen, place, axis=1)
    last = ops.maximum(ops.sum(ops.cast(negatives, "int32"), axis=1, keepdims=True) - 1, 0)
    return ops.take_along_axis(by_distance, ops.minimum(not_further, last), axis=1)
