"""Distances, similarities, masks and masked reductions over the pairs of a batch.

Everything is computed in float32 whatever the dtype policy, costs O(B^2) memory for B images, and has finite
values and gradients for duplicates, zero vectors and empty masks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfdml.arguments import one_of
from tfdml.errors import UserError

DISTANCES = ("euclidean", "sqeuclidean", "cosine", "dot")


class Rows(NamedTuple):
    """The rows `first` to `first + count - 1` of `total`.

    There may be more columns than rows: vectors that no row belongs to stand behind the others. `counted`, (columns,)
    boolean, says which of them are there at all; one that is not makes no pair, in its column nor in its row. None: all
    are. With `constant_columns` no gradient reaches a vector through its column.
    """

    first: Any
    count: Any
    total: Any
    counted: Any = None
    constant_columns: bool = False


# Of a sum of products in float32, whatever their order.
_ROUNDING = 8.0 * float(np.finfo(np.float32).eps)
_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def only_rows(rows: Rows) -> Iterator[None]:
    """A block in which what is (B, B) here has these rows alone, (b, B): distances, similarities, and masks.

    So each of several replicas works on the pairs of its own images with all. Matrices of two arguments stay whole.

    Example:
        >>> with only_rows(Rows(1, 2, 3)):
        ...     tuple(squared_distances(keras.ops.ones((3, 5))).shape)
        (2, 3)
    """
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def present_rows() -> Rows | None:
    """The rows of the surrounding `only_rows`; None where matrices are whole."""
    return _rows.get()


def own(x):
    """Of x (B, ...) what belongs to the rows of the surrounding `only_rows`; all of it outside."""
    rows = _rows.get()
    if rows is None:
        return x
    if not isinstance(rows.count, int):
        return x[rows.first : rows.first + rows.count]
    # So that the size stays known where the first row is not.
    others = ops.shape(x)[1:]
    return ops.slice(x, (rows.first, *[0] * len(others)), (rows.count, *others))


def _columns(x):
    """X (B, ...) as what the columns are made of."""
    rows = _rows.get()
    return x if rows is None or not rows.constant_columns else ops.stop_gradient(x)


_relation: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("relation", default=None)


@contextlib.contextmanager
def positives_by(relation: Callable | None) -> Iterator[None]:
    """A block in which `relation` says which images belong together, in the place of the equality of labels.

    Labels are rows (B, L) in it. None changes nothing.

    Args:
        relation: From rows (N, L) and (M, L) to booleans (N, M), see `tfdml.mining.Relation`.

    Example:
        >>> with positives_by(tfdml.mining.shares_a_label):
        ...     np.array(positive_mask(as_labels([[1, 1, 0], [0, 1, 1], [0, 0, 1]]))).astype(int)
        array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    """
    token = _relation.set(relation or _relation.get())
    try:
        yield
    finally:
        _relation.reset(token)


def integer_labels(labels: Any, what: str = "labels") -> np.ndarray:
    """Class ids as a NumPy vector of integers: what training and evaluation both take.

    Args:
        labels: (N,) or (N, 1) integers or booleans, or floats that are whole numbers.
        what: What to call them in the message.

    Returns:
        (N,) int64.

    Raises:
        UserError: Names, numbers that are not whole, rows of several labels (one-hot or multi-hot), or beyond int64.

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
    if array.ndim != 1:
        raise UserError(_not_a_vector(what, array))
    return _whole_numbers(array, what)


def _as_array(labels, what) -> np.ndarray:
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise UserError(f"{what} must have shape (B,) or (B, 1), one label for each image: {error}") from error
    if array.dtype.kind == "O" and all(isinstance(value, int | np.integer) for value in array.flat):
        array = array.astype(np.int64)
    return array


def _whole_numbers(array: np.ndarray, what: str) -> np.ndarray:
    if array.dtype.kind in "OUS":
        raise UserError(
            f"{what} must be integers, not names such as {str(array.flat[0])[:40]!r}: "
            f"np.unique({what}, return_inverse=True)[1] numbers them"
        )
    if array.dtype.kind not in "iubf":
        raise UserError(f"{what} must be integers; got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{what} must fit int64; the largest is {array.max()}")
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.rint(array)) & (np.abs(array) < 2.0**63)
        if not whole.all():
            raise UserError(
                f"{what} must be integers; {array[~whole].flat[0]:g} is not a whole number: "
                f"np.unique({what}, return_inverse=True)[1] numbers classes that have such ids"
            )
    return array.astype(np.int64)


def _not_a_vector(what: str, labels: Any) -> str:
    """Why labels (N, L) are refused, and what to do: `labels` is an array, or a tensor whose values are not known."""
    message = f"{what} must have shape (B,) or (B, 1), not {tuple(labels.shape)}"
    if len(labels.shape) != 2:
        return message
    one_hot = f"of one-hot rows {what}.argmax(axis=1) makes such"
    several = (
        "a loss's with_positives(tfdml.mining.shares_a_label) trains on rows of several labels; evaluation on them is "
        "not offered"
    )
    if not isinstance(labels, np.ndarray):
        return f"{message}: {one_hot}; {several}"
    flags = labels.dtype.kind in "biuf" and bool(np.isin(labels, (0, 1)).all())
    return f"{message}: {one_hot if flags and (labels.sum(axis=1) == 1).all() else several}"


def as_labels(labels):
    """Class labels as a vector of integers (B,); within `positives_by` rows of them (B, L).

    Accepts (B,) or (B, 1) integers, booleans, or floats that are whole numbers; see `integer_labels`. Where values are
    not known yet, in a graph, floats are rounded to the nearest integer. On a backend without 64-bit integers, concrete
    ids that need them are renumbered within the batch, so they never collide.

    Raises:
        ValueError: The labels are not a vector (within `positives_by`, neither a vector nor a matrix), or concrete
            values are not whole numbers.
    """
    if not (ops.is_tensor(labels) or isinstance(labels, keras.KerasTensor)):
        labels = _as_array(labels, "labels")
    rows = _relation.get() is not None
    # A TensorFlow graph that has seen both forms knows no rank.
    if getattr(labels.shape, "rank", 1) is None:
        labels = ops.reshape(labels, (ops.shape(labels)[0], -1) if rows else (-1,))
    shape = tuple(labels.shape)
    if rows and len(shape) == 1:
        labels = labels[:, None]
    elif rows and len(shape) != 2:
        raise ValueError(f"labels must have shape (B,) or (B, L), not {shape}")
    elif rows:
        pass
    elif len(shape) == 2 and shape[1] == 1:
        labels = labels[:, 0] if isinstance(labels, np.ndarray) else ops.squeeze(labels, 1)
    elif len(shape) != 1:
        raise UserError(_not_a_vector("labels", labels))
    labels = _known_whole_numbers(labels)
    if isinstance(labels, np.ndarray):
        if keras.backend.backend() == "jax" and labels.size and np.abs(labels).max() > np.iinfo(np.int32).max:
            labels = np.unique(labels, return_inverse=True)[1].reshape(labels.shape).astype(np.int32)
        return ops.convert_to_tensor(labels)
    if "int" in keras.backend.standardize_dtype(labels.dtype):
        return labels
    dtype = "int32" if keras.backend.backend() == "jax" else "int64"
    return ops.cast(labels if keras.backend.standardize_dtype(labels.dtype) == "bool" else ops.round(labels), dtype)


def _known_whole_numbers(labels):
    """Labels whose values are known, as whole numbers in NumPy; integer tensors and those of a graph as they are."""
    if not isinstance(labels, np.ndarray):
        # TensorFlow's type is not hashable, nor a string of NumPy's.
        kind = "string" if "string" in str(labels.dtype) else keras.backend.standardize_dtype(labels.dtype)
        if "int" in kind:
            return labels
        try:
            labels = np.asarray(ops.convert_to_numpy(labels))
        except Exception:  # each backend has its own type for a tensor without values
            if kind == "string":
                raise UserError(
                    "labels must be integers, not names: np.unique(labels, return_inverse=True)[1] numbers them"
                ) from None
            return labels
    return _whole_numbers(labels, "labels")


def l2_normalize(x, axis=-1):
    """X / |x| in float32; a zero vector stays zero and gets a zero gradient."""
    x = ops.cast(x, "float32")
    squared = ops.sum(ops.square(x), axis=axis, keepdims=True)
    nonzero = squared > 1e-16
    return x * ops.where(nonzero, ops.rsqrt(ops.where(nonzero, squared, 1.0)), 0.0)


def safe_sqrt(x):
    """The square root of x >= 0, with gradient 0 at 0; NaN stays NaN."""
    zero = x <= 0
    return ops.where(zero, 0.0, ops.sqrt(ops.where(zero, 1.0, x)))


def dot_products(x, y=None):
    """The matrix of x_i . y_j: (B, D), (B', D) -> (B, B'); `y` defaults to `x`."""
    x = ops.cast(x, "float32")
    x, y = (own(x), _columns(x)) if y is None else (x, ops.cast(y, "float32"))
    return ops.matmul(x, ops.transpose(y))


def cosine_similarities(x, y=None):
    """The matrix of cosines: (B, D), (B', D) -> (B, B'); a zero vector has cosine 0 with everything."""
    return dot_products(l2_normalize(x), None if y is None else l2_normalize(y))


def squared_distances(x, y=None):
    """The matrix of |x_i - y_j|^2, clamped at 0: (B, D), (B', D) -> (B, B'); `y` defaults to `x`.

    Without `y` the diagonal is exactly 0, and so is what rounding cannot tell from it: below 8 units of float32's
    rounding of |x_i|^2 + |x_j|^2. On some processors the product of duplicates depends on where they are in the matrix.
    Both sides are first shifted by the mean of `x`, which changes no distance and keeps the rounding error small for
    features that share a large offset.
    """
    x = ops.cast(x, "float32")
    centre = ops.stop_gradient(ops.mean(x, axis=0, keepdims=True))
    x = x - centre
    if y is None:
        products = dot_products(x)
        # Norms from the same product, so that they round alike; some rows hold only some of them.
        norms = ops.diagonal(products) if present_rows() is None else ops.sum(ops.square(x), axis=1)
        sums = own(norms)[:, None] + _columns(norms)[None, :]
        squared = sums - 2.0 * products
        zero = ops.logical_or(identity_mask(ops.shape(x)[0]), squared <= _ROUNDING * sums)
        squared = ops.where(zero, 0.0, squared)
    else:
        y = ops.cast(y, "float32") - centre
        x_norms, y_norms = ops.sum(ops.square(x), axis=1), ops.sum(ops.square(y), axis=1)
        squared = x_norms[:, None] + y_norms[None, :] - 2.0 * ops.matmul(x, ops.transpose(y))
    return ops.maximum(squared, 0.0)


def distances(x, y=None, distance="euclidean"):
    """The matrix of dissimilarities: (B, D), (B', D) -> (B, B').

    Args:
        x: (B, D).
        y: (B', D); defaults to `x`.
        distance: `"euclidean"`: |x - y|; `"sqeuclidean"`: |x - y|^2; `"cosine"`: 1 - cos(x, y);
            `"dot"`: -x.y (smaller is more alike, and it may be negative).

    Raises:
        ValueError: `distance` is none of these.
    """
    one_of("distance", distance, DISTANCES)
    if distance == "cosine":
        return 1.0 - cosine_similarities(x, y)
    if distance == "dot":
        return -dot_products(x, y)
    squared = squared_distances(x, y)
    return squared if distance == "sqeuclidean" else safe_sqrt(squared)


def absolute_distances(x, y=None):
    """The matrix of L1 distances sum_d |x_id - y_jd|: (B, D), (B', D) -> (B, B').

    Computed anchor by anchor in both directions, so that memory stays O(B^2 + B D) and not O(B^2 D).
    """
    x = ops.cast(x, "float32")
    return _absolute_distances(*((own(x), _columns(x)) if y is None else (x, ops.cast(y, "float32"))))


@ops.custom_gradient
def _absolute_distances(x, y):
    # Cut off from any tape: an eager one would keep the B^2 D differences although grad() never asks for them.
    x, y = ops.stop_gradient(x), ops.stop_gradient(y)
    value = ops.map(lambda row: ops.sum(ops.abs(row[None, :] - y), axis=1), x)

    def grad(*args, upstream=None):
        if upstream is None:
            (upstream,) = args
        grad_x = ops.map(lambda r: ops.matmul(r[1], ops.sign(r[0][None, :] - y)), (x, upstream))
        grad_y = ops.map(lambda r: ops.matmul(r[1], ops.sign(r[0][None, :] - x)), (y, ops.transpose(upstream)))
        return grad_x, grad_y

    return value, grad


def identity_mask(size):
    """(B, B) boolean, true on the diagonal: an image paired with itself."""
    index = ops.arange(size)
    return own(index)[:, None] == index[None, :]


def positive_mask(labels):
    """(B, B) boolean: pairs of different images of the same class; of those that belong together in `positives_by`."""
    return _counted(ops.logical_and(_together(labels), ops.logical_not(identity_mask(ops.shape(labels)[0]))))


def negative_mask(labels):
    """(B, B) boolean: pairs of images of different classes; of those that do not belong together in `positives_by`."""
    apart = ops.logical_not(_together(labels))
    if _relation.get() is None:
        return _counted(apart)
    # An image without any label belongs to none, not even to itself.
    return _counted(ops.logical_and(apart, ops.logical_not(identity_mask(ops.shape(labels)[0]))))


def _counted(mask):
    rows = _rows.get()
    if rows is None or rows.counted is None:
        return mask
    return ops.logical_and(mask, ops.logical_and(own(rows.counted)[:, None], rows.counted[None, :]))


def _together(labels):
    relation = _relation.get()
    if relation is None:
        return own(labels)[:, None] == labels[None, :]
    rows = labels[:, None] if len(labels.shape) == 1 else labels
    together = ops.convert_to_tensor(relation(own(rows), rows))
    if len(together.shape) != 2:
        raise ValueError(f"positives must give a matrix (N, M) for labels (N, L) and (M, L), not {together.shape}")
    return ops.cast(together, "bool")


def mean(x):
    """The mean of all values; 0 where there is none."""
    return ops.sum(x) / ops.maximum(ops.cast(ops.size(x), "float32"), 1.0)


def masked_sum(values, mask, axis=None):
    """The sum of `values` where `mask` is true; 0 where it is true nowhere."""
    return ops.sum(ops.where(mask, values, 0.0), axis=axis)


def masked_count(mask, axis=None):
    """How often `mask` is true, as float32."""
    return ops.sum(ops.cast(mask, "float32"), axis=axis)


def masked_mean(values, mask, axis=None):
    """The mean of `values` where `mask` is true; 0 where it is true nowhere."""
    return masked_sum(values, mask, axis) / ops.maximum(masked_count(mask, axis), 1.0)


def index_of_largest(values):
    """The index of the largest value of each row, the first among equals: (N, M) -> (N,); also where N = M = 0.

    Example:
        >>> np.array(index_of_largest(keras.ops.array([[1.0, 3.0, 3.0]]))).tolist()
        [1]
    """
    # Behind a column that is never chosen, as no backend has an argmax of no columns.
    return ops.argmax(ops.pad(values, ((0, 0), (0, 1)), constant_values=float("-inf")), axis=1)


def fold_over_positives(step, state, positives):
    """`state` after `step(state, chosen)` for the first, the second, ... positive of all rows at once.

    So that what depends on (anchor, positive, other) takes O(B^2) memory, and time in proportion to the most positives
    that a row has. No gradient flows through.

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
