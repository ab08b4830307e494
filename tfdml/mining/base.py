"""What a loss is composed of: a `Miner`, a `Distance` and a `Relation`.

Each keeps its arguments in the attributes of their names, by which it is saved. `tfdml.register`
gives it a name and lets a loss with it be loaded. A function of the same arguments works too.
"""

import inspect
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml.arguments import integer, number
from tfdml.registry import find, register, registered
from tfdml.saving import Composed, restore


class Distance(Composed):
    """Computes how far apart embeddings are, for the `distance` of a loss; a subclass defines
    `__call__`.

    A loss also compares each vector with itself and does not use the value. The gradient must be
    finite there (`tfdml.pairwise.safe_sqrt`).

    Attributes:
        larger_is_closer: Whether it is a similarity. The loss and its margin then use its negative.

    Example:
        >>> @tfdml.register("distance", name="l1")
        ... class Manhattan(tfdml.mining.Distance):
        ...     def __call__(self, a, b):
        ...         return tfdml.pairwise.absolute_distances(a, b)
        >>> loss = tfdml.losses.ContrastiveLoss(margin=3.0, distance=Manhattan())
        >>> float(loss([0, 0, 1], [[0.0, 1.0], [0.0, 2.0], [2.0, 1.0]]))  # 1 + (3 - 2)
        2.0
    """

    larger_is_closer = False

    def __call__(self, a, b):
        """Compute the matrix of distances: (N, d), (M, d) -> (N, M), float32."""
        raise TypeError(f"{type(self).__name__} must define __call__(a, b)")


class Miner(Composed):
    """Chooses the pairs that a loss learns from, for its `mining`; a subclass defines `__call__`.

    Every replica calls it, so its result must depend on the pairs alone.

    Attributes:
        whole_batch: Whether it needs all anchors of the batch, for example to find the hardest
            pairs of all. By default it chooses for each anchor alone.

    Example:
        >>> @tfdml.register("miner")
        ... class Near(tfdml.mining.Miner):
        ...     def __call__(self, pairs):
        ...         return pairs.keep(pairs.positives, pairs.distances() < 0.5)
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, mining="near")
        >>> float(loss([0, 0, 1], embeddings))  # 0.8 + (1 - 0.4)
        1.4
    """

    whole_batch = False

    def __call__(self, pairs):
        """Return the pairs to keep.

        Args:
            pairs: `tfdml.pairs.Pairs`, through which no gradient flows. `pairs.distances()` are
                those of the loss's `distance`, smaller is more alike; for losses on cosines s, 1 -
                s. `pairs.distances("sqeuclidean")` and the other names are computed from the
                embeddings.

        Returns:
            Pairs with fewer positives and negatives: `pairs.keep(positives, negatives)`.
        """
        raise TypeError(f"{type(self).__name__} must define __call__(pairs)")


class Relation(Composed):
    """Decides which images belong together, for the `positives` of a loss; a subclass defines
    `__call__`.

    Example:
        >>> @tfdml.register("relation")
        ... class Near(tfdml.mining.Relation):
        ...     def __init__(self, most=1):
        ...         self.most = most
        ...
        ...     def __call__(self, a, b):
        ...         return keras.ops.abs(a[:, 0][:, None] - b[:, 0][None, :]) <= self.most
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, positives=Near())
        >>> float(loss([4, 5, 7], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # 0.8 + (1 - 0.4)
        1.4

    Attributes:
        threshold: From which similarity on a pair is a positive, where it returns similarities.
    """

    threshold = 0.5

    def __call__(self, a, b):
        """Return whether each image of `a` and each image of `b` belong together; the order must
        not matter.

        Args:
            a: (N, L) integers, the labels of each image; L = 1 where it has a single one.
            b: (M, L).

        Returns:
            (N, M) booleans; or floats, similarities: pairs of at least `threshold` are positives,
            those below are negatives, and those of which it is not known (NaN) are neither. The
            value of an image with itself is not used.
        """
        raise TypeError(f"{type(self).__name__} must define __call__(a, b)")


@register("relation")
class SameLabel(Relation):
    """Images with the same label in one column of (B, L): a level of a hierarchy.

    Args:
        column: Which; 0 is the first. Of single labels (B,) it is what losses do without.

    Raises:
        ValueError: `column` is no integer from 0.

    Example:
        >>> model_and_make = [[0, 0], [1, 0], [2, 1]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, positives=SameLabel(column=1))
        >>> float(loss(model_and_make, [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # 0.8 + (1 - 0.4)
        1.4
    """

    def __init__(self, column=0):
        self.column = integer("column", column, at_least=0)

    def __call__(self, a, b):
        """Whether the labels are the same: (N, L), (M, L) -> (N, M)."""
        if a.shape[1] is not None and self.column >= a.shape[1]:
            raise ValueError(
                f"column={self.column}, but the labels have {a.shape[1]} columns, from 0"
            )
        return a[:, self.column][:, None] == b[:, self.column][None, :]


@register("relation")
@keras.saving.register_keras_serializable("tfdml")
def shares_a_label(a, b):
    """Whether two images have a label in common, of label sets as rows of 0 and 1: (N, L), (M, L)
    -> (N, M).

    Example:
        >>> sets = [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, positives=tfdml.mining.shares_a_label)
        >>> float(loss(sets, [[1.0, 0.0], [0.6, 0.8], [0.0,
        ...     1.0]]))  # (0.8 + 0.4) / 2; the others are beyond the margin
        0.6
    """
    a, b = ops.cast(a > 0, "float32"), ops.cast(b > 0, "float32")
    return ops.matmul(a, ops.transpose(b)) > 0


@register("relation")
@keras.saving.register_keras_serializable("tfdml")
def same_label_or_text(a, b):
    """Whether two items agree in a column, such as their label or the number of their text: (N, L),
    (M, L) -> (N, M).

    Example:
        >>> label_and_text = keras.ops.array([[0, 7], [0, 8], [1, 8], [2, 9]])
        >>> np.array(tfdml.mining.same_label_or_text(label_and_text, label_and_text))[1].tolist()
        [True, True, True, False]
    """
    return ops.any(a[:, None, :] == b[None, :, :], axis=2)


@register("relation")
class Jaccard(Relation):
    """How much two label sets overlap, |A and B| / |A or B|, of rows of 0 and 1.

    Args:
        threshold: From which overlap on a pair is a positive.

    Raises:
        ValueError: `threshold` is not from 0 to 1.

    Example:
        >>> sets = keras.ops.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]])
        >>> np.array(tfdml.mining.Jaccard(threshold=0.5)(sets, sets))[0].round(3)
        array([1.   , 0.667, 0.   ], dtype=float32)
    """

    def __init__(self, threshold=0.5):
        self.threshold = number("threshold", threshold, at_least=0, at_most=1)

    def __call__(self, a, b):
        """Compute the overlaps: (N, L), (M, L) -> (N, M) float32; 0 of two empty sets."""
        a, b = ops.cast(a > 0, "float32"), ops.cast(b > 0, "float32")
        intersections = ops.matmul(a, ops.transpose(b))
        unions = ops.sum(a, axis=1)[:, None] + ops.sum(b, axis=1)[None, :] - intersections
        return intersections / ops.maximum(unions, 1.0)


@register("relation")
class GivenPairs(Relation):
    """Pairs that are listed one by one, of images whose labels are their ids. Pairs that are not
    listed are unknown.

    Memory and time of a batch are O(B^2 log P), so that a million pairs cost little more than a
    thousand. Each copy of the loss that is saved holds them all.

    Args:
        pairs: (P, 3) rows `(a, b, similarity)`: two ids, integers from 0 to 2^31 - 1, and 1 for
            similar or 0 for not, or any finite number. The order of the two does not matter.
        threshold: From which similarity on a pair is a positive.

    Raises:
        ValueError: Not such rows, or a pair has two similarities.

    Example:
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, positives=GivenPairs([(7, 8, 1), (8, 9,
        ...     0)]))
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(loss([7, 8, 9], embeddings))  # 0.8 + (1 - 0.4); nothing of 7 and 9
        1.4
    """

    def __init__(self, pairs, threshold=0.5):
        self.threshold = number("threshold", threshold)
        rows = _checked_pairs(pairs)
        # By both ends, once each: the partners of an image follow one another, in ascending order.
        ordered_pairs = np.unique(np.concatenate([rows, rows[:, [1, 0, 2]]]), axis=0)
        _refuse_two_similarities(ordered_pairs)
        images, partners, similarities = ordered_pairs.T
        self.pairs = ordered_pairs[images <= partners]
        self._ids, starts = np.unique(images.astype(np.int32), return_index=True)
        # The last entries are those of an image without any pair.
        self._starts = np.append(starts, [len(ordered_pairs)] * 2).astype(np.int32)
        self._partners = np.append(partners, -1).astype(np.int32)
        self._similarities = np.append(similarities, np.nan).astype(np.float32)

    def __call__(self, a, b):
        """Look the pairs up: (N, 1), (M, 1) ids -> (N, M) float32, NaN where a pair is not
        listed."""
        a, b = ops.cast(a[:, 0], "int32"), ops.cast(b[:, 0], "int32")
        index = ops.clip(ops.searchsorted(self._ids, a), 0, len(self._ids) - 1)
        index = ops.where(ops.take(self._ids, index) == a, index, len(self._ids))
        low = ops.take(self._starts, index)[:, None]
        high = end = ops.take(self._starts, index + 1)[:, None]
        # Each image of b among the partners of each of a, by bisection.
        for _ in range(int(np.diff(self._starts).max()).bit_length()):
            middle = (low + high) // 2
            before = ops.logical_and(low < high, ops.take(self._partners, middle) < b[None, :])
            low, high = ops.where(before, middle + 1, low), ops.where(before, high, middle)
        is_listed = ops.logical_and(low < end, ops.take(self._partners, low) == b[None, :])
        return ops.where(is_listed, ops.take(self._similarities, low), float("nan"))


def _checked_pairs(pairs):
    """Return pairs as an array (P, 3)."""
    rows = np.asarray(pairs, np.float64)
    is_table = rows.ndim == 2 and rows.shape[1] == 3 and len(rows) > 0
    if not is_table or not np.isfinite(rows).all():
        raise ValueError(
            f"pairs must be (P, 3) finite numbers (a, b, similarity), not of shape {rows.shape}"
        )
    ids = rows[:, :2]
    is_whole = (ids.astype(np.int64) == ids).all()
    if not is_whole or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError("the ids of pairs must be integers from 0 to 2^31 - 1")
    return rows


def _refuse_two_similarities(ordered_pairs):
    same_ids = (ordered_pairs[1:, :2] == ordered_pairs[:-1, :2]).all(axis=1)
    duplicates = np.flatnonzero(same_ids)
    if len(duplicates):
        a, b, similarity = ordered_pairs[duplicates[0]]
        raise ValueError(
            f"the pair of {a:.0f} and {b:.0f} has two similarities, {similarity:g} and others"
        )


# The kinds of what a loss is composed of, and how messages say that they are called.
_CALLED_WITH = {"distance": "(a, b)", "miner": "(pairs)", "relation": "(a, b)"}


def component(kind: str, value: Any, argument: str, names: tuple[str, ...] = ()) -> Any:
    """Return what a loss is composed of: one of its own `names`, or an object or function.

    Args:
        kind: `"distance"`, `"miner"` or `"relation"`.
        value: One of `names`, a registered name, an object or function, or the serialized form of
            one.
        argument: The name of the loss's argument, for the message.
        names: What the loss itself knows.

    Raises:
        ValueError: It is none of these, or could not be saved.
    """
    value = restore(value)
    if isinstance(value, str) and value in names:
        return value
    if isinstance(value, str) and value in registered(kind):
        value = find(kind, value)
        value = value() if inspect.isclass(value) else value
    saved = inspect.isfunction(value) or hasattr(value, "get_config")
    if inspect.isclass(value) or not callable(value) or not saved:
        choices = ", ".join((*names, *registered(kind)))
        raise ValueError(
            f"{argument} must be one of {choices}, or a function or an object (of a subclass of "
            f"tfdml.mining.{kind.capitalize()}) that is called with {_CALLED_WITH[kind]}, not "
            f"{value!r}"
        )
    return value
