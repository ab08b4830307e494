"""Relations, which decide which images belong together where labels are sets or levels of a hierarchy."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import integer
from tfdml.mining.composing import Composed, checked
from tfdml.saving import restore


class Relation(Composed):
    """Decides which images belong together, for `PairLoss.with_positives`; a subclass defines `__call__`.

    It keeps its arguments in the attributes of their names, by which it is saved. Register it with
    `keras.saving.register_keras_serializable`, so that a loss with it can be loaded. A function of the same arguments
    works too.

    Example:
        >>> @keras.saving.register_keras_serializable("mine")
        ... class Near(tfdml.mining.Relation):
        ...     def __init__(self, most=1):
        ...         self.most = most
        ...
        ...     def __call__(self, a, b):
        ...         return keras.ops.abs(a[:, 0][:, None] - b[:, 0][None, :]) <= self.most
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0).with_positives(Near())
        >>> float(loss([4, 5, 7], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # 0.8 + (1 - 0.4)
        1.4
    """

    def __call__(self, a, b):
        """Returns whether each image of `a` and each image of `b` belong together; the order must not matter.

        Args:
            a: (N, L) integers, the labels of each image; L = 1 where it has a single one.
            b: (M, L).

        Returns:
            (N, M) booleans. The value of an image with itself is not used.
        """
        raise TypeError(f"{type(self).__name__} must define __call__(a, b)")


@keras.saving.register_keras_serializable("tfdml")
class SameLabel(Relation):
    """Images with the same label in one column of (B, L): a level of a hierarchy.

    Args:
        column: Which; 0 is the first. Of single labels (B,) it is what losses do without.

    Raises:
        ValueError: `column` is no integer from 0.

    Example:
        >>> model_and_make = [[0, 0], [1, 0], [2, 1]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0).with_positives(SameLabel(column=1))
        >>> float(loss(model_and_make, [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # 0.8 + (1 - 0.4)
        1.4
    """

    def __init__(self, column=0):
        self.column = integer("column", column, at_least=0)

    def __call__(self, a, b):
        """Whether the labels are the same: (N, L), (M, L) -> (N, M)."""
        if a.shape[1] is not None and self.column >= a.shape[1]:
            raise ValueError(f"column={self.column}, but the labels have {a.shape[1]} columns, from 0")
        return a[:, self.column][:, None] == b[:, self.column][None, :]


@keras.saving.register_keras_serializable("tfdml")
def shares_a_label(a, b):
    """Whether two images have a label in common, of label sets as rows of 0 and 1: (N, L), (M, L) -> (N, M).

    Example:
        >>> sets = [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0).with_positives(tfdml.mining.shares_a_label)
        >>> float(loss(sets, [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # (0.8 + 0.4) / 2; the others are beyond the margin
        0.6
    """
    a, b = ops.cast(a > 0, "float32"), ops.cast(b > 0, "float32")
    return ops.matmul(a, ops.transpose(b)) > 0


def as_relation(positives):
    """Returns the argument of `with_positives`, an object or a function, or restores it from what was saved.

    Raises:
        ValueError: It is neither.
    """
    return checked("positives", restore(positives), (), "(a, b)", Relation)
