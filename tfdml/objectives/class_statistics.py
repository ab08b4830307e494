"""Statistics of the classes of a batch, for objectives that compare distributions and not images.

Without a tensor whose size depends on how many classes the batch has: what belongs to a class stands at each of its
images, so that shapes are static.
"""

from keras import ops


def averaging_matrix(labels):
    """(B, B) float32: row i is 1/n at the n images of the class of i, and 0 elsewhere.

    Example:
        >>> np.array(averaging_matrix(keras.ops.array([0, 0, 1]))).tolist()
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    same = ops.cast(labels[:, None] == labels[None, :], "float32")
    return same / ops.sum(same, axis=1, keepdims=True)


def class_index(labels):
    """Numbers the classes of a batch from 0, and marks the first image of each.

    Returns:
        (B,) integers below B, and (B,) booleans.

    Example:
        >>> index, first = class_index(keras.ops.array([4, 4, 1]))
        >>> np.array(index).tolist(), np.array(first).tolist()
        ([1, 1, 0], [True, False, True])
    """
    # Stable: the first of a class in the order of the batch is its first in this order.
    order = ops.argsort(labels)
    ordered = ops.take(labels, order)
    starts = ops.concatenate([ops.ones((1,), "bool"), ordered[1:] != ordered[:-1]], axis=0)[: ops.shape(labels)[0]]
    back = ops.argsort(order)
    return ops.take(ops.cumsum(ops.cast(starts, "int32")) - 1, back), ops.take(starts, back)


def class_pairs(pairs):
    """(b, B) booleans, true once for every ordered pair of different classes of the batch."""
    first = class_index(pairs.labels)[1]
    return ops.logical_and(ops.logical_and(pairs.of_anchors(first)[:, None], first[None, :]), pairs.negatives)


def means_and_spreads(x, labels):
    """Compute the mean of each image's class, and the class's mean squared distance to it, in O(B D) memory.

    Args:
        x: (B, D).
        labels: Class labels (B,).

    Returns:
        (B, D) float32, the means, and (B,) float32, the spreads.

    Example:
        >>> means, spreads = means_and_spreads(keras.ops.array([[0.0], [2.0], [5.0]]), keras.ops.array([0, 0, 1]))
        >>> np.array(spreads).tolist()
        [1.0, 1.0, 0.0]
    """
    x = ops.cast(x, "float32")
    index, _ = class_index(labels)

    def mean_of_class(values):
        size = ops.shape(values)[0]
        sums, counts = (ops.segment_sum(part, index, size) for part in (values, ops.ones_like(values[:, :1])))
        return ops.take(sums / ops.maximum(counts, 1.0), index, axis=0)

    means = mean_of_class(x)
    # Twice, as the sums of features that share a large offset are rounded.
    rest = x - means
    missed = mean_of_class(rest)
    return means + missed, mean_of_class(ops.sum(ops.square(rest - missed), axis=1, keepdims=True))[:, 0]


def of_own_class(values, labels):
    """Return the value of each image's class: (C,), (B,) -> (B,); NaN for a label outside 0 .. C - 1.

    Example:
        >>> np.array(of_own_class(keras.ops.array([0.5, 2.0]), keras.ops.array([1, 1, 0]))).tolist()
        [2.0, 2.0, 0.5]
    """
    size = values.shape[0]
    inside = ops.logical_and(labels >= 0, labels < size)
    index = ops.cast(ops.where(inside, labels, ops.zeros_like(labels)), "int32")
    # Through a product the gradient is dense: weight decay and clipping take no sparse one.
    return ops.where(inside, ops.take(values * 1.0, index, axis=0), float("nan"))
