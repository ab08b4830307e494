"""What one replica sees of the others, so that pairs are those of the global batch.

Outside a `tf.distribute` strategy, or on another backend (where arrays are global already), every function
here is the identity of a single replica. TensorFlow is imported only when it is the backend.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


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
    counts = _all_gather(context, ops.reshape(ops.cast(num_local, "int32"), (1,)))
    index = ops.cast(context.replica_id_in_sync_group, "int32")
    first = ops.sum(ops.where(ops.arange(context.num_replicas_in_sync) < index, counts, 0))
    return x[first : first + num_local]


def _all_gather(context, x):
    import tensorflow as tf

    # Several workers gather to the device of what they gather, and an argument of a traced function has none.
    return context.all_gather(tf.identity(x), 0)
