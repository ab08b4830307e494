"""Statistics of the classes of a batch, for objectives that compare distributions and not images.

Within `pairwise.only_rows` each replica works out those of its own rows, and gathers the others'.

Without a tensor whose size depends on how many classes the batch has: what belongs to a class stands at each of its
images, so that shapes are static.
"""

from __future__ import annotations

from keras import ops

from tfdml import pairwise, replicas


def averaging_matrix(labels):
    """(B, B) float32 (the present rows): row i is 1/n at the n images of the class of i, and 0 elsewhere.

    Example:
        >>> np.array(averaging_matrix(keras.ops.array([0, 0, 1]))).tolist()
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    same = ops.cast(pairwise.own(labels)[:, None] == labels[None, :], "float32")
    return same / ops.sum(same, axis=1, keepdims=True)


def one_per_class(labels):
    """(B,) boolean, true at the first image of each class.

    Example:
        >>> np.array(one_per_class(keras.ops.array([4, 4, 1]))).tolist()
        [True, False, True]
    """
    index = ops.arange(ops.shape(labels)[0])
    same = pairwise.own(labels)[:, None] == labels[None, :]
    seen_before = ops.logical_and(same, index[None, :] < pairwise.own(index)[:, None])
    # Integers, as not everything gathers booleans.
    return replicas.all_rows(ops.cast(ops.any(seen_before, axis=1), "int32")) == 0


def class_pairs(labels):
    """(B, B) boolean (the present rows), true once for every ordered pair of different classes."""
    first = one_per_class(labels)
    both = ops.logical_and(pairwise.own(first)[:, None], first[None, :])
    return ops.logical_and(both, pairwise.negative_mask(labels))


def means_and_spreads(x, labels):
    """The mean of each image's class, and the class's mean squared distance to it.

    Args:
        x: (B, D).
        labels: Class labels (B,).

    Returns:
        (B, D) float32, the means, all shifted by one common vector, and (B,) float32, the spreads.

    Example:
        >>> means, spreads = means_and_spreads(keras.ops.array([[0.0], [2.0], [5.0]]), keras.ops.array([0, 0, 1]))
        >>> np.array(spreads).tolist()
        [1.0, 1.0, 0.0]
    """
    x = ops.cast(x, "float32")
    # The shift changes no distance, and keeps the rounding small for features that share a large offset.
    x = x - ops.stop_gradient(ops.mean(x, axis=0, keepdims=True))
    averaging = averaging_matrix(labels)
    means = replicas.all_rows(ops.matmul(averaging, x))
    squared = ops.sum(ops.square(x - means), axis=1, keepdims=True)
    return means, replicas.all_rows(ops.matmul(averaging, squared)[:, 0])


def of_own_class(values, labels):
    """The value of each image's class: (C,), (B,) -> (B,); NaN for a label outside 0 .. C - 1.

    Example:
        >>> np.array(of_own_class(keras.ops.array([0.5, 2.0]), keras.ops.array([1, 1, 0]))).tolist()
        [2.0, 2.0, 0.5]
    """
    size = values.shape[0]
    inside = ops.logical_and(labels >= 0, labels < size)
    index = ops.cast(ops.where(inside, labels, ops.zeros_like(labels)), "int32")
    # Through a product the gradient is dense: weight decay and clipping take no sparse one.
    return ops.where(inside, ops.take(values * 1.0, index, axis=0), float("nan"))
