"""Distances and similarities between vectors, masks and masked reductions.

Everything is computed in float32 whatever the dtype policy, on GPUs too, costs O(B^2) memory for B images, and has
finite values and gradients for duplicates, zero vectors and empty masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml.errors import REASON, UserError, user_errors

DISTANCES = ("euclidean", "sqeuclidean", "cosine", "dot")


# The share of |x|^2 + |y|^2 from which on |x - y|^2 is that of float32 products, to about 1e-4.
_OF_PRODUCTS = 2.0**-10


def integer_labels(labels: Any, what: str = "labels", rows: bool = False) -> np.ndarray:
    """Convert class ids to a NumPy vector of integers, for training and evaluation.

    Args:
        labels: (N,) or (N, 1) integers or booleans, or floats that are whole numbers.
        what: Their name in the message.
        rows: Whether (N, L) is accepted, too: label sets or levels.

    Returns:
        (N,) int64; with `rows` (N, L) where there are several.

    Raises:
        UserError: Names, numbers that are not whole, floats so large that ids merge, rows of several labels (one-hot or
            multi-hot), or beyond int64.

    Example:
        >>> integer_labels([[3.0], [1.0]])
        array([3, 1])
        >>> integer_labels(["cat", "dog", "cat"])
        Traceback (most recent call last):
        tfdml.errors.UserError: labels must be integers, not names such as 'cat': np.unique(labels, ...
    """
    array = _as_array(labels, what)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 and not (rows and array.ndim == 2):
        raise UserError(_wrong_shape(what, array))
    return _whole_numbers(array, what)


def image_rows(rows: Any, what: str, size: int | None = None) -> np.ndarray:
    """Convert given pairs (G, 2) or triplets (G, 3) of rows of images to int64.

    Args:
        rows: They.
        what: Their name in the message.
        size: The number of images, where it is known.

    Raises:
        UserError: They have another shape, or one is no row of the images.

    Example:
        >>> image_rows([[0, -1]], "pairs", 8)
        Traceback (most recent call last):
        tfdml.errors.UserError: pairs: row 0 is [0, -1], but the images have the rows 0 to 7
    """
    array = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iu":
        kind = f"{array.dtype} of shape {array.shape}"
        raise UserError(f"{what} must be integers (G, 2) or (G, 3), pairs or triplets of rows of images, not {kind}")
    end = np.iinfo(np.int64).max if size is None else size
    outside = np.flatnonzero(((array < 0) | (array >= end)).any(axis=1))
    if len(outside):
        place = int(outside[0])
        raise UserError(f"{what}: row {place} is {array[place].tolist()}, but the images have the rows 0 to {end - 1}")
    return array.astype(np.int64)


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
        tfdml.errors.UserError: training needs images of two classes or more; all 12 are of class 0: check how ...
    """
    if len(labels) and (labels == labels[0]).all():
        count = f"all {len(labels)} are of class {labels[0]}"
        raise UserError(f"{use} needs images of two classes or more; {count}: check how the classes are read")


def _as_array(labels, what) -> np.ndarray:
    with user_errors(ValueError, f"{what} must have shape (B,) or (B, 1), one label for each image: {REASON}"):
        array = np.asarray(labels)
    # A column of objects, as pandas may hold integers in.
    return np.asarray(array.tolist()) if array.dtype.kind == "O" else array


def _whole_numbers(array: np.ndarray, what: str) -> np.ndarray:
    if array.dtype.kind not in "iubf":
        value = next((value for value in array.flat if not isinstance(value, int | float | np.number)), "")
        raise UserError(f"{what} must be integers, not names such as {str(value)[:40]!r}: {_numbered(what)}")
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.rint(array))
        if not whole.all():
            fraction = array[~whole].flat[0]
            raise UserError(f"{what} must be integers; {fraction:g} is not a whole number: {_numbered(what)}")
        limit = 2.0 ** min(np.finfo(array.dtype).nmant + 1, 63)
        if np.abs(array).max(initial=0) >= limit:
            merged = f"as {array.dtype} different ids from {limit:,.0f} on become one"
            raise UserError(f"{what} must be integers; {merged}: give them as int64 from the start")
    return array.astype(np.int64)


def _numbered(what: str) -> str:
    return f"np.unique({what}, return_inverse=True)[1] numbers them"


def _wrong_shape(what: str, labels: Any) -> str:
    return (
        f"{what} must have shape (B,) or (B, 1), not {tuple(labels.shape)}: {what}.argmax(axis=1) makes such of "
        "one-hot rows; a loss with positives=tfdml.mining.shares_a_label trains on rows of several labels; evaluation "
        "on them is not offered"
    )


def as_labels(labels, rows=False):
    """Convert class labels to a vector of integers (B,); with `rows` to rows of them (B, L).

    Accepts (B,) or (B, 1) integers, booleans, or floats that are whole numbers; see `integer_labels`. In a graph, where
    values are not known yet, floats are refused. On a backend without 64-bit integers, concrete ids that need them are
    renumbered within the batch, so they never collide.

    Args:
        labels: The labels.
        rows: Whether each image has several, as label sets and hierarchies do; a vector then becomes (B, 1).

    Raises:
        UserError: The labels are not a vector (with `rows`, neither a vector nor a matrix), or not whole numbers.
    """
    if not (ops.is_tensor(labels) or isinstance(labels, keras.KerasTensor)):
        labels = _as_array(labels, "labels")
    # A TensorFlow graph that has seen both forms knows no rank.
    if getattr(labels.shape, "rank", 1) is None:
        labels = ops.reshape(labels, (ops.shape(labels)[0], -1) if rows else (-1,))
    shape = tuple(labels.shape)
    if rows and len(shape) not in (1, 2):
        raise UserError(f"labels must have shape (B,) or (B, L), not {shape}")
    if rows:
        labels = labels[:, None] if len(shape) == 1 else labels
    elif len(shape) == 2 and shape[1] == 1:
        labels = labels[:, 0]
    elif len(shape) != 1:
        raise UserError(_wrong_shape("labels", labels))
    if not isinstance(labels, np.ndarray):
        # TensorFlow's type is not hashable, nor a string of NumPy's.
        kind = "string" if "string" in str(labels.dtype) else keras.backend.standardize_dtype(labels.dtype)
        if "int" in kind or kind == "bool":
            return ops.cast(labels, "int32") if kind == "bool" else labels
        try:
            labels = np.asarray(ops.convert_to_numpy(labels))
        except Exception as error:  # each backend has its own type for a tensor without values
            raise UserError(
                f"labels reach the loss as {kind}: give integers, such as labels.astype('int64')"
            ) from error
    labels = _whole_numbers(labels, "labels")
    if keras.backend.backend() == "jax" and np.abs(labels).max(initial=0) > np.iinfo(np.int32).max:
        labels = np.unique(labels, return_inverse=True)[1].reshape(labels.shape).astype(np.int32)
    return ops.convert_to_tensor(labels)


def check_counts(what, labels, vectors) -> None:
    """Refuse labels of another number than there are images, where both are known: one label alone would be of all.

    Args:
        what: What computes with them, to begin the message.
        labels: Tensor (B, ...).
        vectors: Tensor (B, ...).

    Raises:
        UserError: Their first dimensions differ.
    """
    counts = labels.shape[0], vectors.shape[0]
    if None not in counts and counts[0] != counts[1]:
        raise UserError(f"{what} needs a label for each image: got {counts[0]:,} labels for {counts[1]:,} images")


def l2_normalize(x, axis=-1):
    """Compute x / |x| in float32; a zero vector stays zero and gets a zero gradient."""
    x = ops.cast(x, "float32")
    squared = ops.sum(ops.square(x), axis=axis, keepdims=True)
    nonzero = squared > 1e-16
    return x * ops.where(nonzero, ops.rsqrt(ops.where(nonzero, squared, 1.0)), 0.0)


def custom_gradient(function: Callable) -> Callable:
    """Return `keras.ops.custom_gradient` of a function whose gradient takes what comes from above alone.

    On PyTorch Keras gives it the arguments, too.
    """

    @ops.custom_gradient
    def with_gradient(*args):
        value, grad = function(*args)
        return value, lambda *args, upstream=None: grad(args[0] if upstream is None else upstream)

    # TensorFlow takes copies alone where a variable is given.
    return functools.wraps(function)(lambda *args: with_gradient(*map(ops.copy, args)))


def safe_sqrt(x):
    """Compute the square root of x >= 0, with gradient 0 at 0; NaN stays NaN."""
    nothing = x <= 0
    return ops.where(nothing, 0.0, ops.sqrt(ops.where(nothing, 1.0, x)))


def matmul(x, y):
    """Compute the product of matrices in full float32: (..., N, D), (..., D, M) -> (..., N, M).

    By default TensorFlow and JAX let a GPU round the factors to 10 bits (TF32). What that does to losses:
    docs/backends.md.
    """
    if keras.backend.backend() == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            return ops.matmul(x, y)
    if keras.backend.backend() == "tensorflow" and _tensorflow_rounds_factors():
        # TensorFlow allows or forbids TF32 for the process as a whole, the network included.
        return ops.cast(ops.matmul(ops.cast(x, "float64"), ops.cast(y, "float64")), "float32")
    return ops.matmul(x, y)


def _tensorflow_rounds_factors() -> bool:
    import tensorflow as tf

    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    return allowed and bool(tf.config.list_physical_devices("GPU"))


def dot_products(x, y=None):
    """Compute the matrix of x_i . y_j: (B, D), (B', D) -> (B, B'); `y` defaults to `x`."""
    x = ops.cast(x, "float32")
    return _gram(x) if y is None else matmul(x, ops.transpose(ops.cast(y, "float32")))


@custom_gradient
def _gram(x):
    """Compute x @ x^T, whose gradient (G + G^T) x is one product where that of two matrices is two."""

    def grad(upstream):
        return matmul(upstream + ops.transpose(upstream), x)

    return matmul(x, ops.transpose(x)), grad


def squared_distances(x, y=None, itself=None):
    """Compute the matrix of |x_i - y_j|^2: (B, D), (B', D) -> (B, B'); `y` defaults to `x`.

    By one product of matrices, after both sides are shifted by the mean of `y`, which changes no distance. A product
    loses distances that are small compared with |x_i|^2 + |y_j|^2: in clusters that are far apart, or of all others
    where one vector is far away. Pairs with less than a 1,000th of that sum are computed from x_i - y_j instead, their
    gradient too, so that no vector blurs the distances of others and duplicates are at exactly 0. That costs O(B^2 D)
    operations in batches that hold such a pair, and nothing in others.

    Args:
        x: (B, D).
        y: (B', D).
        itself: (B, B') booleans, the pairs of an image with itself, which are at 0. Without `y` it is the diagonal.
    """
    x = ops.cast(x, "float32")
    others = x if y is None else ops.cast(y, "float32")
    center = ops.stop_gradient(ops.mean(others, axis=0, keepdims=True))
    left = x - center
    right = left if y is None else others - center
    sums = ops.sum(ops.square(left), axis=1)[:, None] + ops.sum(ops.square(right), axis=1)[None, :]
    squared = sums - 2.0 * dot_products(left, None if y is None else right)
    itself = identity_mask(ops.shape(x)[0]) if y is None else itself
    # Not less or equal, so that sums beyond float32 count as close too.
    close = ops.logical_not(squared > _OF_PRODUCTS * sums)
    if itself is not None:
        close = ops.logical_and(close, ops.logical_not(itself))

    def with_differences():
        exact = _by_differences(x, others, ops.square, lambda difference: 2.0 * difference)
        return ops.where(close, exact, squared)

    squared = ops.cond(ops.any(close), with_differences, lambda: squared)
    return squared if itself is None else ops.where(itself, 0.0, squared)


def absolute_distances(x, y=None):
    """Compute the matrix of L1 distances sum_d |x_id - y_jd|: (B, D), (B', D) -> (B, B')."""
    x = ops.cast(x, "float32")
    return _by_differences(x, x if y is None else ops.cast(y, "float32"), ops.abs, ops.sign)


def _by_differences(x, y, function, slope):
    """Compute the matrix of sum_d function(x_id - y_jd), of a function with this slope.

    Computed anchor by anchor in both directions, so that memory stays O(B^2 + B D) and not O(B^2 D).
    """

    @custom_gradient
    def compute(x, y):
        # Cut off from any tape: an eager one would keep the B^2 D differences although grad() never asks for them.
        x, y = ops.stop_gradient(x), ops.stop_gradient(y)
        value = ops.map(lambda row: ops.sum(function(row[None, :] - y), axis=1), x)

        def grad(upstream):
            grad_x = ops.map(lambda r: matmul(r[1][None, :], slope(r[0][None, :] - y))[0], (x, upstream))
            grad_y = ops.map(lambda r: matmul(r[1][None, :], slope(r[0][None, :] - x))[0], (y, ops.transpose(upstream)))
            return grad_x, grad_y

        return value, grad

    return compute(x, y)


def identity_mask(count, size=None, first=0):
    """Return (count, size) booleans, true where the row and the column are the same image.

    Args:
        count: The number of rows.
        size: The number of columns; by default as many.
        first: The column of the first row's image.
    """
    rows = first + ops.arange(count)
    return rows[:, None] == ops.arange(count if size is None else size, dtype=rows.dtype)[None, :]


def together(a, b, relation: Callable | None = None):
    """Return (N, M), whether images of labels `a` and `b` belong together: booleans, or float32 similarities.

    Args:
        a: (N,) integers, or rows (N, L).
        b: (M,), or (M, L).
        relation: A `tfdml.mining.Relation`; None for equal labels.

    Raises:
        ValueError: The relation does not return a matrix.
    """
    if relation is None:
        return a[:, None] == b[None, :]
    rows = [labels[:, None] if len(labels.shape) == 1 else labels for labels in (a, b)]
    found = ops.convert_to_tensor(relation(*rows))
    if len(found.shape) != 2:
        raise ValueError(f"a relation must return a matrix (N, M) for labels (N, L) and (M, L), not {found.shape}")
    graded = "float" in keras.backend.standardize_dtype(found.dtype)
    return ops.cast(found, "float32" if graded else "bool")


def masked_sum(values, mask, axis=None):
    """Compute the sum of `values` where `mask` is true; 0 where it is true nowhere."""
    return ops.sum(ops.where(mask, values, 0.0), axis=axis)


def masked_count(mask, axis=None):
    """Count how often `mask` is true, as float32."""
    return ops.sum(ops.cast(mask, "float32"), axis=axis)


def masked_mean(values, mask, axis=None):
    """Compute the mean of `values` where `mask` is true; 0 where it is true nowhere."""
    return masked_sum(values, mask, axis) / ops.maximum(masked_count(mask, axis), 1.0)


def index_of_largest(values):
    """Return the index of the largest value of each row, the first among equals: (N, M) -> (N,); also for N = M = 0.

    Example:
        >>> np.array(index_of_largest(keras.ops.array([[1.0, 3.0, 3.0]]))).tolist()
        [1]
    """
    if not values.shape[1]:
        # Behind a column that is never chosen, as no backend has an argmax of no columns.
        values = ops.pad(values, ((0, 0), (0, 1)), constant_values=float("-inf"))
    return ops.argmax(values, axis=1)


def masked_logsumexp(values, mask, axis):
    """Compute the log of the sum of exp(values) where `mask` is true.

    Where it is true nowhere the result is about -1e30 and not -inf: its softplus is 0 with gradient 0, and sums and
    differences with it stay numbers.
    """
    return ops.logsumexp(ops.where(mask, values, -1e30), axis=axis)


def fold_over_positives(step, state, positives):
    """Return `state` after `step(state, chosen)` for the first, the second, ... positive of all rows at once.

    A function of (anchor, positive, other) then takes O(B^2) memory, and time in proportion to the most positives that
    a row has. No gradient flows through.

    Args:
        step: From the state and a mask (B, B), with at most one true value in each row, to the next state.
        state: A tensor, or a tuple of them.
        positives: (B, B) booleans.

    Example:
        >>> positives = keras.ops.array([[True, False, True], [False, True, False]])
        >>> float(fold_over_positives(lambda count, chosen: count + masked_count(chosen), 0.0, positives))  # 2 + 1
        3.0
    """
    ordinals = ops.where(positives, ops.cumsum(ops.cast(positives, "int32"), axis=1), 0)
    last = ops.max(ordinals, initial=0)
    first = ops.ones((), "int32")
    state = keras.tree.map_structure(ops.convert_to_tensor, state)

    def turn(number, state):
        return number + 1, step(state, ordinals == number)

    return ops.while_loop(lambda number, _: number <= last, turn, (first, state))[1]
