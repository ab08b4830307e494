"""What one replica sees of the others, so that pairs are those of the global batch.

Outside a `tf.distribute` strategy, or on another backend (where arrays are global already), every function
here is the identity of a single replica. TensorFlow is imported only when it is the backend.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from tfdml import pairwise


def _context() -> Any:
    """The replica context if there is more than one replica, else None."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    # Keras also traces models outside any replica; there is nothing to gather then.
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def count() -> int:
    """The number of replicas that work on the present batch."""
    context = _context()
    return 1 if context is None else context.num_replicas_in_sync


_EMPTY = "a batch has fewer images than there are replicas"
# Of Keras, which adds up the replicas' images where it looks at the first batch.
_UNEQUAL = "must have the same size and shape"


def require_images(images):
    """Return `images`, after a check within the step that this replica has at least one."""
    if _context() is None:
        return images
    import tensorflow as tf

    with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(images)[0], 0, message=_EMPTY)]):
        return tf.identity(images)


@contextlib.contextmanager
def explaining_empty_replicas() -> Iterator[None]:
    """A block in which batches that replicas cannot share end with one clear error.

    Raises:
        ValueError: A replica had no image; or the first batch has not as many for each.
    """
    try:
        yield
    except Exception as error:
        if "AddN" in str(error) and _UNEQUAL in str(error):
            raise ValueError(
                "the first batch cannot be split equally among the replicas: choose a batch size that they can share"
            ) from error
        if _EMPTY not in str(error):
            raise
        raise ValueError(
            f"{_EMPTY} (the last one of an epoch?): leave it out, by batch(size, drop_remainder=True) or a number of "
            "images that the batch size divides"
        ) from error


def gather(x):
    """The rows of `x` (n, ...) of every replica, in replica order: (N, ...).

    Differentiable: the gradient that reaches the local rows is the sum of what every replica sends to them.
    Replicas may hold different numbers of rows.
    """
    context = _context()
    return x if context is None else _all_gather(context, x)


def local_rows(x, num_local):
    """The rows of a gathered tensor (N, ...) that are this replica's own: (num_local, ...)."""
    context = _context()
    if context is None:
        return x
    first = _first_row(context, num_local)
    return x[first : first + num_local]


def own_rows(num_local, total):
    """A block in which matrices over the pairs of the gathered batch have this replica's rows alone.

    See `tfdml.pairwise.only_rows`. With a single replica matrices stay whole.

    Args:
        num_local: How many images this replica has.
        total: How many all replicas have.
    """
    context = _context()
    if context is None:
        return contextlib.nullcontext()
    return pairwise.only_rows(pairwise.Rows(_first_row(context, num_local), num_local, total))


_sums: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("sums", default=None)


@contextlib.contextmanager
def sums_by(answer: Callable) -> Iterator[None]:
    """A block in which `answer(x)` says what `summed(x)` is, for rows that are worked out one block after another."""
    token = _sums.set(answer)
    try:
        yield
    finally:
        _sums.reset(token)


def summed(x):
    """The sum over replicas of what each has of its own rows; x itself where matrices are whole. Differentiable."""
    if pairwise.present_rows() is None:
        return x
    answer = _sums.get()
    return ops.sum(gather(ops.expand_dims(x, 0)), axis=0) if answer is None else answer(x)


def total(tensors: list) -> list:
    """The sum over replicas of each tensor, which have it in one shape. Not differentiable."""
    context = _context()
    return tensors if context is None else context.all_reduce("SUM", tensors)


def all_rows(x):
    """The values (N, ...) of all images, of those that each replica has for its own rows. Differentiable."""
    rows = pairwise.present_rows()
    if rows is None or _sums.get() is None:
        return x if rows is None else gather(x)
    # A sum in which every block has its values in their places.
    index = ops.arange(rows.total)
    places = ops.cast(index[:, None] == pairwise.own(index)[None, :], "float32")
    flat = ops.reshape(ops.cast(x, "float32"), (ops.shape(x)[0], math.prod(x.shape[1:])))
    return ops.cast(ops.reshape(summed(ops.matmul(places, flat)), (-1, *x.shape[1:])), x.dtype)


def mean_of(values, mask):
    """As `pairwise.masked_mean`, over the rows of all replicas: the same on each."""
    return summed(pairwise.masked_sum(values, mask)) / ops.maximum(summed(pairwise.masked_count(mask)), 1.0)


def part_of_mean(values, mask):
    """As `pairwise.masked_mean`; within `own_rows` the part of it that these rows make up."""
    return pairwise.masked_sum(values, mask) / ops.maximum(summed(pairwise.masked_count(mask)), 1.0)


def share_of_rows():
    """The share of the batch whose rows this replica works on, a number or scalar; 1 where matrices are whole."""
    rows = pairwise.present_rows()
    return 1.0 if rows is None else ops.cast(rows.count, "float32") / ops.cast(rows.total, "float32")


def _first_row(context, num_local):
    counts = gather(ops.reshape(ops.cast(num_local, "int32"), (1,)))
    index = ops.cast(context.replica_id_in_sync_group, "int32")
    return ops.sum(ops.where(ops.arange(context.num_replicas_in_sync) < index, counts, 0))


def _all_gather(context, x):
    import tensorflow as tf

    # Several workers gather to the device of what they gather, and an argument of a traced function has none.
    return context.all_gather(tf.identity(x), 0)
