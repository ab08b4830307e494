"""Checks of class ids, in NumPy alone: whole numbers, rows of images, more than one class."""

from typing import Any

import numpy as np

from tfdml.errors import ERROR_TEXT, UserError, user_errors


def integer_labels(labels: Any, what: str = "labels", rows: bool = False) -> np.ndarray:
    """Convert class ids to a NumPy vector of integers, for training and evaluation.

    Args:
        labels: (N,) or (N, 1) integers or booleans, or floats that are whole numbers.
        what: Their name in the message.
        rows: Whether (N, L) is accepted, too: label sets or levels.

    Returns:
        (N,) int64; with `rows` (N, L) where there are several.

    Raises:
        UserError: Names, numbers that are not whole, floats so large that ids merge, rows of
            several labels (one-hot or multi-hot), or beyond int64.

    Example:
        >>> integer_labels([[3.0], [1.0]])
        array([3, 1])
        >>> integer_labels(["cat", "dog", "cat"])
        Traceback (most recent call last):
        tfdml.errors.UserError: labels must be integers, not names such as 'cat': ...
    """
    array = as_array(labels, what)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 and not (rows and array.ndim == 2):
        raise UserError(wrong_shape(what, array))
    return whole_numbers(array, what)


def image_rows(rows: Any, what: str, size: int | None = None) -> np.ndarray:
    """Convert given pairs (G, 2) or triplets (G, 3) of rows of images to int64.

    Args:
        rows: The pairs or triplets.
        what: Their name in the message.
        size: The number of images, where it is known.

    Raises:
        UserError: They have another shape, or one is no row of the images.

    Example:
        >>> image_rows([[0, -1]], "pairs")
        Traceback (most recent call last):
        tfdml.errors.UserError: pairs: row 0 is [0, -1]: give whole numbers from 0 on, ...
    """
    with user_errors(
        ValueError,
        f"{what} must be (G, 2) pairs or (G, 3) triplets of rows of images: {ERROR_TEXT}",
    ):
        array = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iuf":
        kind = f"{array.dtype} of shape {array.shape}"
        raise UserError(
            f"{what} must be (G, 2) pairs or (G, 3) triplets of rows of images, not {kind}"
        )
    num_images = np.iinfo(np.int64).max if size is None else size
    # Written so that NaN fails, too.
    is_row = (array == np.rint(array)) & (array >= 0) & (array < num_images)
    if not is_row.all():
        first = int(np.flatnonzero(~is_row.all(axis=1))[0])
        span = "from 0 on" if size is None else f"from 0 to {size - 1}"
        raise UserError(
            f"{what}: row {first} is {array[first].tolist()}: give whole numbers {span}, the rows "
            "of the images"
        )
    return array.astype(np.int64)


def true_or_false(values: Any, what: str, count: int) -> np.ndarray:
    """Convert answers of yes or no, such as whether each pair is of one class, to booleans.

    Args:
        values: (count,) booleans, or 0 and 1 of any dtype.
        what: Their name in the message.
        count: How many there are.

    Returns:
        (count,) booleans.

    Raises:
        UserError: There are as many others, or one is neither, such as -1 or NaN.

    Example:
        >>> true_or_false([1, 0], "same", 2)
        array([ True, False])
        >>> true_or_false([1, -1], "same", 2)
        Traceback (most recent call last):
        tfdml.errors.UserError: same: value 1 is -1: give true or false, or 1 or 0
    """
    with user_errors(ValueError, f"{what} must be {count} of true or false: {ERROR_TEXT}"):
        array = np.asarray(values)
    if array.shape != (count,):
        raise UserError(f"{what} must be {count} of true or false, not of shape {array.shape}")
    known = array.dtype.kind in "biuf"
    neither = np.ones(count, bool) if not known else (array != 0) & (array != 1)
    if neither.any():
        row = int(np.argmax(neither))
        raise UserError(
            f"{what}: value {row} is {array[row].item()!r}: give true or false, or 1 or 0"
        )
    return array.astype(bool)


def require_classes(labels: np.ndarray, use: str) -> None:
    """Refuse labels (N,) of a single class, among which no image is wrong.

    Args:
        labels: As `integer_labels` returns them.
        use: What they are for, to begin the message.

    Raises:
        UserError: All are equal.

    Example:
        >>> require_classes(np.zeros(12, np.int64), "training")
        Traceback (most recent call last):
        tfdml.errors.UserError: training needs images of two classes or more; all ... class 0: ...
    """
    if len(labels) and (labels == labels[0]).all():
        count = f"all {len(labels)} are of class {labels[0]}"
        raise UserError(
            f"{use} needs images of two classes or more; {count}: check how the classes are read"
        )


def as_array(labels, what) -> np.ndarray:
    """Return labels as an array; Python's numbers among objects as int64 or float64."""
    with user_errors(
        ValueError, f"{what} must have shape (B,) or (B, 1), one label for each image: {ERROR_TEXT}"
    ):
        array = np.asarray(labels)
    if array.dtype.kind == "O":
        for kind, numbers in ((np.int64, (int, np.integer)), (np.float64, (int, float, np.number))):
            if all(isinstance(value, numbers) for value in array.flat):
                with user_errors(
                    (OverflowError, TypeError), f"{what} must fit int64: {ERROR_TEXT}"
                ):
                    return array.astype(kind)
    return array


def whole_numbers(array: np.ndarray, what: str) -> np.ndarray:
    """Return numbers as int64, where no id is lost by that."""
    if array.dtype.kind not in "iubf":
        value = next(
            (value for value in array.flat if not isinstance(value, int | float | np.number)), ""
        )
        raise UserError(
            f"{what} must be integers, not names such as {str(value)[:40]!r}: {numbered(what)}"
        )
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{what} must fit int64; the largest is {array.max()}")
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.rint(array))
        if not whole.all():
            fraction = array[~whole].flat[0]
            raise UserError(
                f"{what} must be integers; {fraction:g} is not a whole number: {numbered(what)}"
            )
        limit = 2.0 ** min(np.finfo(array.dtype).nmant + 1, 63)
        if np.abs(array).max(initial=0) >= limit:
            merged = merging(array.dtype, limit)
            raise UserError(f"{what} must be integers; {merged}: give them as int64 from the start")
    return array.astype(np.int64)


def numbered(what: str) -> str:
    """Return the advice on names in place of integers."""
    return f"np.unique({what}, return_inverse=True)[1] numbers them"


def merging(dtype, limit: float) -> str:
    """Return what happens to ids that a type of floats cannot tell apart."""
    return f"as {dtype} different ids from {limit:,.0f} on become one"


def wrong_shape(what: str, labels: Any) -> str:
    """Return the message on labels that are no vector."""
    return (
        f"{what} must have shape (B,) or (B, 1), not {tuple(labels.shape)}: {what}.argmax(axis=1) "
        "makes such of "
        "one-hot rows; a loss with positives=tfdml.mining.shares_a_label trains on rows of several "
        "labels; evaluation "
        "on them is not offered"
    )
