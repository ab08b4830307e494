"""Replicas played one after another in one process: what a distributed step computes, without a second device."""

from unittest import mock

import tensorflow as tf

from tfdml import replicas


class _Context:
    """What `tfdml.replicas` asks of a replica's context."""

    def __init__(self, count):
        self.num_replicas_in_sync = count
        self.replica_id_in_sync_group = 0
        self.given = [[] for _ in range(count)]
        self.answered = None

    def all_gather(self, x, axis):
        """Every replica's tensor of this turn; while they are still being noted, its own in the place of the others."""
        assert axis == 0
        if self.answered is None:
            self.given[self.replica_id_in_sync_group].append(x)
            return tf.concat([x] * self.num_replicas_in_sync, 0)
        self.answered += 1
        return tf.concat([given[self.answered - 1] for given in self.given], 0)


def play(function, *parts):
    """`[function(*part) for part in parts]`, each called as if on a replica of its own, all at once.

    Every call runs twice: first to note what it gives to the others, then with what they gave. So what is gathered must
    not depend on an earlier gathering. Under one gradient tape the gradient of the results' sum is what a distribution
    strategy's optimiser gets.
    """
    context = _Context(len(parts))
    results = []
    with mock.patch.object(replicas, "_context", return_value=context):
        for replaying in (False, True):
            for number, part in enumerate(parts):
                context.replica_id_in_sync_group = number
                context.answered = 0 if replaying else None
                result = function(*part)
                if replaying:
                    assert context.answered == len(context.given[number])
                    results.append(result)
    return results


def sum_and_gradient(function, arrays, sizes):
    """The sum of what replicas of these sizes compute from their rows, and its gradient to the last array.

    Args:
        function: From rows of the arrays to a scalar.
        arrays: Arrays (N, ...) of one length; the last is float32.
        sizes: How many rows each replica has; `[N]` is a single device.
    """
    *others, x = arrays
    with tf.GradientTape() as tape:
        x = tf.constant(x)
        tape.watch(x)
        parts = list(zip(*(tf.split(tf.constant(array), sizes) for array in (*others, x)), strict=True))
        total = tf.add_n(play(function, *parts)) if len(sizes) > 1 else function(*parts[0])
    return total.numpy(), tape.gradient(total, x).numpy()
