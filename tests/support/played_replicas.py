"""Replicas played one after another in one process: what a distributed step computes, without a
second device."""

from unittest import mock

import numpy as np
import tensorflow as tf

from tfdml import replicas


class _Context:
    """What `tfdml.replicas` asks of a replica's context."""

    def __init__(self, count):
        self.num_replicas_in_sync = count
        self.replica_id_in_sync_group = 0
        self.given, self.known = [[] for _ in range(count)], None

    def all_gather(self, x, axis):
        """What all gave at this turn of the round before; in the first round, its own in the place
        of the others."""
        assert axis == 0
        given = self.given[self.replica_id_in_sync_group]
        given.append(x)
        if self.known is None:
            return tf.concat([x] * self.num_replicas_in_sync, 0)
        return tf.concat([others[len(given) - 1] for others in self.known], 0)

    def is_settled(self):
        """Whether all gave in this round what they gave in the one before."""
        if self.known is None:
            return False
        turns = [
            turn
            for now, before in zip(self.given, self.known, strict=True)
            for turn in zip(now, before, strict=True)
        ]
        return all(a.shape == b.shape and np.array_equal(a, b) for a, b in turns)


def play(function, *parts):
    """`[function(*part) for part in parts]`, each called as if on a replica of its own, all at
    once.

    In each round every call notes what it gives to the others, and takes what they gave in the
    round before, until that changes no more: what is gathered may depend on what was gathered
    earlier. Under one gradient tape the gradient of the results' sum is what a distribution
    strategy's optimizer gets.
    """
    context = _Context(len(parts))
    with mock.patch.object(replicas, "_context", return_value=context):
        while True:
            results = []
            for number, part in enumerate(parts):
                context.replica_id_in_sync_group = number
                results.append(function(*part))
            if context.is_settled():
                return results
            context.given, context.known = [[] for _ in parts], context.given


@tf.autograph.experimental.do_not_convert
def sum_and_gradient(function, arrays, sizes):
    """The sum of what replicas of these sizes compute from their rows, and its gradient to the last
    array.

    Args:
        function: From rows of the arrays to a scalar.
        arrays: Arrays (N, ...) of one length; the last is float32.
        sizes: How many rows each replica has; `[N]` is a single device.
    """
    *others, x = arrays
    with tf.GradientTape() as tape:
        x = tf.constant(x)
        tape.watch(x)
        parts = list(
            zip(*(tf.split(tf.constant(array), sizes) for array in (*others, x)), strict=True)
        )
        total = tf.add_n(play(function, *parts)) if len(sizes) > 1 else function(*parts[0])
    return total.numpy(), tape.gradient(total, x).numpy()
