"""Communication between replicas, so that pairs are those of the global batch.

Outside a `tf.distribute` strategy, or on another backend (where arrays are global already), every
function here is the identity of a single replica. TensorFlow is imported only when it is the
backend.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from tfdml import workarounds
from tfdml.errors import UserError


def _context() -> Any:
    """Return the replica context if there is more than one replica, else None."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    # Keras also traces models outside any replica; there is nothing to gather then.
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def count() -> int:
    """Return the number of replicas that share the batch."""
    context = _context()
    return 1 if context is None else context.num_replicas_in_sync


def data_devices() -> int:
    """Return among how many devices of JAX, or rows of them, each step's batch is divided."""
    distribution = keras.distribution.distribution()
    return 1 if distribution is None else distribution.num_model_replicas


_EMPTY = "a batch has fewer images than there are replicas"
_UNEQUAL = "of type AddN must have the same size and shape"
# What errors of TensorFlow and our own say, and what to do about them.
_ADVICE = {
    _EMPTY: f"{_EMPTY} (the last one of an epoch?): leave it out, by batch(size, "
    "drop_remainder=True) or a number of images that the batch size divides",
    # Of Keras, which adds up the replicas' images where it looks at the first batch.
    _UNEQUAL: "the first batch cannot be split equally among the replicas: choose a batch size "
    "that they can share",
    "Shape mismatch in the collective instance": "one tf.distribute strategy serves a whole "
    "process: make one and train every model of the process within it",
}


def require_images(images):
    """Return `images`, and checks within the step that this replica has at least one."""
    if _context() is None:
        return images
    import tensorflow as tf

    if images.shape[0] == 0:
        raise UserError(_EMPTY)
    with tf.control_dependencies(
        [tf.debugging.assert_greater(tf.shape(images)[0], 0, message=_EMPTY)]
    ):
        return tf.identity(images)


@contextlib.contextmanager
def explaining_empty_replicas() -> Iterator[None]:
    """Explains the errors of batches that replicas cannot share, raised in this block.

    Raises:
        UserError: A replica had no image; the first batch has not as many for each; or a process
            has two strategies.
    """
    try:
        yield
    except Exception as error:
        for symptom, advice in _ADVICE.items():
            if symptom in str(error):
                raise UserError(advice) from error
        raise


def gather(x):
    """Gathers the rows of `x` (n, ...) of every replica, in replica order: (N, ...).

    Differentiable: the gradient that reaches the local rows is the sum of what every replica sends
    to them. Replicas may hold different numbers of rows.
    """
    context = _context()
    if context is None:
        return x
    return context.all_gather(workarounds.with_device(x), 0)


def first_row(num_local):
    """Return where this replica's rows begin in what `gather` returns: 0 with a single replica.

    Args:
        num_local: How many rows this replica has.
    """
    context = _context()
    if context is None:
        return 0
    counts = gather(ops.reshape(ops.cast(num_local, "int32"), (1,)))
    index = ops.cast(context.replica_id_in_sync_group, "int32")
    return ops.sum(ops.where(ops.arange(context.num_replicas_in_sync) < index, counts, 0))


def local_rows(x, num_local):
    """Return this replica's own rows (num_local, ...) of a gathered tensor (N, ...)."""
    if count() == 1:
        return x
    first = first_row(num_local)
    return x[first : first + num_local]
