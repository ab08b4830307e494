"""How a graph fails a request: on its first fault, by name."""

from __future__ import annotations

import tensorflow as tf


def refuse(faults: tf.Tensor, name: str) -> tf.Operation:
    """Fail on the first fault: `embedding[2] of 5: has length 0; bad in all: 1`.

    Args:
        faults: (B,) strings, what is wrong with each item; empty for nothing.
        name: Of the input that holds the items.
    """
    bad = tf.where(faults != "")[:, 0]

    def message() -> tf.Tensor:
        of = tf.strings.format("] of {}: ", tf.size(faults))
        rest = tf.strings.format("; bad in all: {}", tf.size(bad))
        return tf.strings.join([f"{name}[", tf.strings.as_string(bad[0]), of, faults[bad[0]], rest])

    text = tf.cond(tf.size(bad) > 0, message, lambda: tf.constant(""))
    return tf.debugging.Assert(tf.size(bad) == 0, [text])
