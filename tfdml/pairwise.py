"""Distances and similarities between vectors, masks and masked reductions.

Everything is computed in float32 whatever the dtype policy, on GPUs too, costs O(B^2) memory for B
images, and has finite values and gradients for duplicates, zero vectors and empty masks.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml.errors import UserError
from tfdml.labels import as_array, merging, numbered, whole_numbers, wrong_shape

# The share of |x|^2 + |y|^2 from which on |x - y|^2 is that of float32 products, to about 1e-4.
_OF_PRODUCTS = 2.0**-10


def refuse_outside(numbers: Any, count: int, message: str, kind: str) -> None:
    """Refuse integers outside 0 .. `count` - 1: at once where their values are known, else when the
    graph runs.

    Neither is possible with `jit_compile=True`, as XLA leaves TensorFlow's assertions out, nor in a
    program of JAX, where a check would have every step wait for the host.

    Args:
        numbers: Integers of any shape.
        count: How many numbers there are to choose from.
        message: What is wrong, and what to do about it.
        kind: What each number is, to name the first that is outside.

    Raises:
        UserError: One is outside. (With the same message, `tf.errors.InvalidArgumentError` in a
            graph.)

    Example:
        >>> refuse_outside([0, 7], 5, "token ids must be below 5", "id")
        Traceback (most recent call last):
        tfdml.errors.UserError: token ids must be below 5; got id 7
    """
    try:
        values = np.asarray(ops.convert_to_numpy(numbers))
    except Exception:  # each backend has its own type for a tensor without values
        # Of TensorFlow whatever the backend is: so are the batches of a tf.data.Dataset.
        if type(numbers).__module__.startswith("tensorflow"):
            import tensorflow as tf

            inside = tf.logical_and(numbers >= 0, numbers < count)
            tf.debugging.Assert(tf.reduce_all(inside), [message, kind, numbers], summarize=8)
        return
    outside = values[(values < 0) | (values >= count)]
    if outside.size:
        raise UserError(f"{message}; got {kind} {outside[0]}")


def as_labels(labels, rows=False):
    """Convert class labels to a vector of integers (B,); with `rows` to rows of them (B, L).

    Accepts (B,) or (B, 1) integers, booleans, or floats that are whole numbers; see
    `integer_labels`. In a graph, where values are not known yet, a float that `integer_labels`
    would refuse becomes a label of which `nan_if_no_label` is NaN, and TensorFlow raises unless XLA
    compiles the step. On a backend without 64-bit integers, concrete ids that need them are
    renumbered within the batch, so they never collide.

    Args:
        labels: The labels.
        rows: Whether each image has several, as label sets and hierarchies do; a vector then
            becomes (B, 1).

    Raises:
        UserError: The labels are not a vector (with `rows`, neither a vector nor a matrix), or
            concrete values are not whole numbers.
    """
    if not (ops.is_tensor(labels) or isinstance(labels, keras.KerasTensor)):
        labels = as_array(labels, "labels")
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
        raise UserError(wrong_shape("labels", labels))
    if not isinstance(labels, np.ndarray):
        # TensorFlow's type is not hashable, nor a string of NumPy's.
        kind = (
            "string"
            if "string" in str(labels.dtype)
            else keras.backend.standardize_dtype(labels.dtype)
        )
        if "int" in kind:
            return labels
        try:
            labels = np.asarray(ops.convert_to_numpy(labels))
        except Exception:  # each backend has its own type for a tensor without values
            return _checked_in_graph(labels, kind)
    labels = whole_numbers(labels, "labels")
    if keras.backend.backend() == "jax" and np.abs(labels).max(initial=0) > np.iinfo(np.int32).max:
        labels = np.unique(labels, return_inverse=True)[1].reshape(labels.shape).astype(np.int32)
    return ops.convert_to_tensor(labels)


def check_counts(what, labels, vectors) -> None:
    """Refuse labels of another number than there are images, where both are known: one label alone
    would be of all.

    Args:
        what: What computes with them, to begin the message.
        labels: Tensor (B, ...).
        vectors: Tensor (B, ...).

    Raises:
        UserError: Their first dimensions differ.
    """
    counts = labels.shape[0], vectors.shape[0]
    if None not in counts and counts[0] != counts[1]:
        raise UserError(
            f"{what} needs a label for each image: got {counts[0]:,} labels for {counts[1]:,} "
            "images"
        )


def nan_if_no_label(labels):
    """Return NaN where a label of `as_labels` was not a whole number, and 0 elsewhere; a scalar.

    Example:
        >>> float(nan_if_no_label(as_labels([3.0, 1.0])))
        0.0
    """
    if keras.backend.standardize_dtype(labels.dtype) != _integer_type():
        return ops.zeros(())
    return ops.where(ops.any(labels == np.iinfo(_integer_type()).min), float("nan"), 0.0)


def _integer_type() -> str:
    return "int32" if keras.backend.backend() == "jax" else "int64"


def _checked_in_graph(labels, kind: str):
    """Return labels without values as integers; the lowest one in place of a float that is not a
    whole number."""
    if kind == "bool":
        return ops.cast(labels, _integer_type())
    digits = {"float16": 11, "float32": 24, "float64": 53}
    if kind not in digits:
        raise UserError(
            f"labels must be integers, not names or other values of dtype {kind}: "
            f"{numbered('labels')}"
        )
    limit = min(2.0 ** digits[kind], -float(np.iinfo(_integer_type()).min))
    whole = ops.logical_and(labels == ops.round(labels), ops.abs(labels) < limit)
    if keras.backend.backend() == "tensorflow" and not isinstance(labels, keras.KerasTensor):
        import tensorflow as tf

        message = f"labels must be integers; fractions have no class, and {merging(kind, limit)}"
        message = f"{message}: {numbered('labels')}; got"
        tf.debugging.Assert(tf.reduce_all(whole), [message, labels], summarize=8)
    # Neither XLA nor JAX can raise.
    needs = f"whole numbers below {limit:,.0f}, or the loss of a compiled step is NaN"
    warnings.warn(
        f"labels reach the loss as {kind}: they must be {needs}; give integers", stacklevel=2
    )
    integers = ops.cast(ops.where(whole, labels, 0), _integer_type())
    return ops.where(whole, integers, np.iinfo(_integer_type()).min)


def l2_normalize(x, axis=-1):
    """Compute x / |x| in float32; a zero vector stays zero and gets a zero gradient."""
    x = ops.cast(x, "float32")
    squared = ops.sum(ops.square(x), axis=axis, keepdims=True)
    nonzero = squared > 1e-16
    return x * ops.where(nonzero, ops.rsqrt(ops.where(nonzero, squared, 1.0)), 0.0)


def custom_gradient(function: Callable) -> Callable:
    """Return `keras.ops.custom_gradient` of a function whose gradient takes what comes from above
    alone.

    On PyTorch Keras gives it the arguments, too.
    """

    @ops.custom_gradient
    def with_gradient(*args):
        value, grad = function(*args)
        return value, lambda *args, upstream=None: grad(args[0] if upstream is None else upstream)

    # TensorFlow takes copies alone where a variable is given.
    return functools.wraps(function)(lambda *args: with_gradient(*map(ops.copy, args)))


@custom_gradient
def safe_sqrt(x):
    """Compute the square root of x >= 0, with gradient 0 at 0; NaN stays NaN."""

    def grad(upstream):
        return ops.divide_no_nan(0.5 * upstream, safe_sqrt(x))

    return ops.sqrt(ops.maximum(x, 0.0)), grad


def matmul(x, y):
    """Compute the product of matrices in full float32: (..., N, D), (..., D, M) -> (..., N, M).

    By default TensorFlow and JAX let a GPU round the factors to 10 bits (TF32). What that does to
    losses: docs/backends.md.
    """
    if keras.backend.backend() == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            return ops.matmul(x, y)
    if keras.backend.backend() == "tensorflow" and _tensorflow_rounds_factors():
        return _matmul_in_parts(x, y)
    return ops.matmul(x, y)


def _tensorflow_rounds_factors() -> bool:
    import tensorflow as tf

    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    return allowed and bool(tf.config.list_physical_devices("GPU"))


@custom_gradient
def _matmul_in_parts(x, y):
    """Compute x @ y from factors of 10 bits; the product of the last bits of both is below
    float32's rounding.

    TensorFlow allows or forbids TF32 for the process as a whole, the network included.
    """
    (x_high, x_low), (y_high, y_low) = _parts(x), _parts(y)
    small = ops.matmul(x_high, y_low) + ops.matmul(x_low, y_high)

    def grad(upstream):
        return _matmul_in_parts(upstream, _transposed(y)), _matmul_in_parts(
            _transposed(x), upstream
        )

    return small + ops.matmul(x_high, y_high), grad


def _parts(x):
    """Return x in two parts: its first 10 bits, and the rest."""
    import tensorflow as tf

    high = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), -(2**13)), tf.float32)
    return high, x - high


def _transposed(x):
    return ops.swapaxes(x, -1, -2)


def dot_products(x, y=None):
    """Compute the matrix of x_i . y_j: (B, D), (B', D) -> (B, B'); `y` defaults to `x`."""
    x = ops.cast(x, "float32")
    return _gram(x) if y is None else matmul(x, ops.transpose(ops.cast(y, "float32")))


@custom_gradient
def _gram(x):
    """Compute x @ x^T, whose gradient (G + G^T) x is one product where that of two matrices is
    two."""

    def grad(upstream):
        return matmul(upstream + ops.transpose(upstream), x)

    return matmul(x, ops.transpose(x)), grad


@custom_gradient
def _squared_by_product(x):
    """Compute the matrix of |x_i - x_j|^2 by one product, and its gradient by one more."""

    def grad(upstream):
        both = upstream + ops.transpose(upstream)
        return 2.0 * (ops.sum(both, axis=1, keepdims=True) * x - matmul(both, x))

    doubled = dot_products(x, 2.0 * x)
    # Norms from the same product, so that they round alike.
    norms = 0.5 * ops.diagonal(doubled)
    return norms[:, None] + norms[None, :] - doubled, grad


def squared_distances(x, y=None, itself=None):
    """Compute the matrix of |x_i - y_j|^2: (B, D), (B', D) -> (B, B'); `y` defaults to `x`.

    By one product of matrices, after both sides are shifted by the mean of `y`, which changes no
    distance. A product loses distances that are small compared with |x_i|^2 + |y_j|^2: in clusters
    that are far apart, or of all others where one vector is far away. Pairs with less than a
    1,000th of that sum are computed from x_i - y_j instead, their gradient too, so that no vector
    blurs the distances of others and duplicates are at exactly 0. That costs O(B^2 D) operations in
    batches that hold such a pair, and nothing in others.

    Args:
        x: (B, D).
        y: (B', D).
        itself: (B, B') booleans, the pairs of an image with itself, which are at 0. Without `y` it
            is the diagonal.
    """
    x = ops.cast(x, "float32")
    others = x if y is None else ops.cast(y, "float32")
    center = ops.stop_gradient(ops.mean(others, axis=0, keepdims=True))
    left = x - center
    right = left if y is None else others - center
    norms_left = ops.sum(ops.square(left), axis=1)
    norms_right = ops.sum(ops.square(right), axis=1)
    sums = norms_left[:, None] + norms_right[None, :]
    if y is None:
        squared, itself = _squared_by_product(left), identity_mask(ops.shape(x)[0])
    else:
        squared = sums - 2.0 * dot_products(left, right)
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

    Computed anchor by anchor in both directions, so that memory stays O(B^2 + B D) and not O(B^2
    D).
    """

    @custom_gradient
    def compute(x, y):
        # Cut off from any tape: an eager one would keep the B^2 D differences although grad() never
        # asks for them.
        x, y = ops.stop_gradient(x), ops.stop_gradient(y)
        value = ops.map(lambda row: ops.sum(function(row[None, :] - y), axis=1), x)

        def gradient(row, others, weights):
            return matmul(weights[None, :], slope(row[None, :] - others))[0]

        def grad(upstream):
            columns = ops.transpose(upstream)
            grad_x = ops.map(lambda anchor: gradient(anchor[0], y, anchor[1]), (x, upstream))
            grad_y = ops.map(lambda other: gradient(other[0], x, other[1]), (y, columns))
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
    """Return (N, M), whether images of labels `a` and `b` belong together: booleans, or float32
    similarities.

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
        raise ValueError(
            "a relation must return a matrix (N, M) for labels (N, L) and (M, L), not "
            f"{found.shape}"
        )
    graded = "float" in keras.backend.standardize_dtype(found.dtype)
    return ops.cast(found, "float32" if graded else "bool")


def mean(x):
    """Compute the mean of all values; 0 where there is none."""
    return ops.sum(x) / ops.maximum(ops.cast(ops.size(x), "float32"), 1.0)


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
    """Return the index of the largest value of each row, the first among equals: (N, M) -> (N,);
    also for N = M = 0.

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

    Where it is true nowhere the result is about -1e30 and not -inf: its softplus is 0 with gradient
    0, and sums and differences with it stay numbers.
    """
    return ops.logsumexp(ops.where(mask, values, -1e30), axis=axis)


def softmax_costs(logits, positives, negatives):
    """Compute for each positive of a row -ln of its softmax over all positives and negatives.

    It is ln(1 + the sum over the others of exp(their logit - its own)). The positive of the largest
    logit is left out of this sum, so that a sure row keeps its digits; for any other positive the
    sum is at least 1.

    Args:
        logits: (N, M).
        positives: (N, M) booleans.
        negatives: (N, M) booleans, none of them positive.

    Returns:
        (N, M), whose values mean nothing where there is no positive.

    Example:
        >>> softmax_costs(keras.ops.array([[40.0, 0.0]]), keras.ops.array([[True, False]]),
        ...     keras.ops.array([[False, True]]))[0, 0].numpy().item()  # e^-40
        4.248354e-18
    """
    compared = ops.logical_or(positives, negatives)
    largest = index_of_largest(ops.where(positives, logits, -1e30))
    columns = ops.arange(ops.shape(logits)[1], dtype=largest.dtype)
    is_largest = ops.logical_and(positives, columns[None] == largest[:, None])
    others = ops.logical_and(compared, ops.logical_not(is_largest))
    relative = masked_logsumexp(logits, others, axis=1)[:, None] - logits
    whole = masked_logsumexp(logits, compared, axis=1)[:, None] - logits
    return ops.where(is_largest, ops.softplus(relative), whole)


def fold_over_positives(step, state, positives):
    """Return `state` after `step(state, chosen)` for the first, the second, ... positive of all
    rows at once.

    A function of (anchor, positive, other) then takes O(B^2) memory, and time in proportion to the
    most positives that a row has. No gradient flows through.

    Args:
        step: From the state and a mask (B, B), with at most one true value in each row, to the next
            state.
        state: A tensor, or a tuple of them.
        positives: (B, B) booleans.

    Example:
        >>> positives = keras.ops.array([[True, False, True], [False, True, False]])
        >>> float(fold_over_positives(lambda count, chosen: count + masked_count(chosen), 0.0,
        ...     positives))  # 2 + 1
        3.0
    """
    ordinals = ops.where(positives, ops.cumsum(ops.cast(positives, "int32"), axis=1), 0)
    last = ops.max(ordinals, initial=0)
    first = ops.ones((), "int32")
    state = keras.tree.map_structure(ops.convert_to_tensor, state)

    def turn(number, state):
        return number + 1, step(state, ordinals == number)

    return ops.while_loop(lambda number, _: number <= last, turn, (first, state))[1]
