"""Values over the pairs of a large batch, in the memory of some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from tfdml.pairs import Rows


class RowBlocks:
    """Sums over the pairs of a batch, computed one block of anchors after another.

    What a block has to know of all anchors, such as how many pairs count, it asks by `Pairs.total`. There is one pass
    over the blocks for each total, in which those before it are known, and one for the value. Totals carry no gradient,
    so that the gradient takes one pass more.

    Random numbers are those of one call on the whole batch, and their states move once. On Keras's TensorFlow backend.

    Args:
        total: The images of the batch, B: a number, or a scalar in a graph of unknown batch size.
        size: Anchors of a block.

    Example:
        >>> x, labels = keras.ops.array([[0.0], [1.0], [3.0], [4.0]]), keras.ops.array([0, 0, 1, 1])
        >>> loss = tfdml.losses.ContrastiveLoss()
        >>> def part(rows, total, x):
        ...     return loss.of_pairs(tfdml.pairs.Pairs.of_batch(x, labels, rows=rows, total=total))
        >>> float(RowBlocks(total=4, size=3).sum_of(part, [x])), float(loss(labels, x))
        (1.0, 1.0)
    """

    def __init__(self, total: Any, size: int):
        self.total, self.size = total, size

    def sum_of(
        self,
        part: Callable[..., Any],
        tensors: Sequence[Any],
        variables: Sequence[Any] = (),
        states: Sequence[Any] = (),
    ) -> Any:
        """Sums what `part(rows, total, *tensors)` returns of each block, with a gradient.

        Args:
            part: A function of the block's `Rows`, of what its `Pairs` take as `total`, and of the tensors.
            tensors: What it is a function of.
            variables: Keras variables that it may learn, besides.
            states: Those that it reads, and that may be others when the gradient is asked for.
        """
        import tensorflow as tf

        fixed = [(state, tf.convert_to_tensor(state.value)) for state in states]

        def run(rows, totals, inputs) -> _Run:
            asked = _Totals(totals)
            values = zip(variables, inputs[len(tensors) :], strict=True)
            with _Updates([*values, *fixed], initialize_variables=False) as scope:
                value = part(rows, asked, *inputs[: len(tensors)])
            found = asked.unknown
            return _Run(value if found is None else found, found is None, scope.updates)

        @tf.custom_gradient
        def summed(*inputs):
            totals: list = []
            while True:
                first, found = self._over_blocks(lambda rows: run(rows, totals, inputs))
                if first.is_value:
                    break
                totals.append(found)
            for variable, value in first.updates:
                variable.assign(value)

            def gradient(upstream):
                return self._gradients(lambda rows, own: run(rows, totals, own).result, inputs, upstream)

            return found, gradient

        return summed(*(tf.convert_to_tensor(x) for x in [*tensors, *(variable.value for variable in variables)]))

    def _gradients(self, run: Callable, inputs: Sequence[Any], upstream: Any) -> list:
        import tensorflow as tf

        connected: list[int] = []

        def of_block(rows):
            own = [tf.identity(x) for x in inputs]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(own)
                value = run(rows, own)
            found = tape.gradient(value, own, upstream)
            connected[:] = [i for i, gradient in enumerate(found) if gradient is not None]
            # A gradient of gathered rows lists the rows.
            return _Run([tf.convert_to_tensor(found[i]) for i in connected], True, [])

        _, sums = self._over_blocks(of_block)
        found = dict(zip(connected, sums, strict=True))
        return [found.get(i) for i in range(len(inputs))]

    def _over_blocks(self, run: Callable[[Rows], _Run]) -> tuple[_Run, Any]:
        """What `run` returns of the first block, and the sum over all blocks of its results."""
        import tensorflow as tf

        # The first block has the rows that fill no whole one.
        count = self.total % self.size
        if isinstance(count, int):
            count = count or min(self.size, self.total)
        else:
            count = tf.where(count > 0, count, tf.minimum(self.size, self.total))
        first = run(Rows(0, count))
        more = (self.total - count) // self.size

        def body(i, sums):
            result = run(Rows(count + i * self.size, self.size)).result
            return i + 1, tf.nest.map_structure(tf.add, sums, result)

        # One at a time, or the memory would be that of several.
        begin = (tf.constant(0), tf.nest.map_structure(tf.convert_to_tensor, first.result))
        return first, tf.while_loop(lambda i, _: i < more, body, begin, parallel_iterations=1)[1]


class _Run(NamedTuple):
    """What a block returned: the part of the first total that is not known, or of the value; the states it moved."""

    result: Any
    is_value: bool
    updates: list


class _Totals:
    """A `total` for `Pairs`, in the order of asking: those known of all blocks, then the block's own part."""

    def __init__(self, known: Sequence[Any]):
        self.known = known
        self.parts: list = []

    def __call__(self, part):
        self.parts.append(part)
        return self.known[len(self.parts) - 1] if len(self.parts) <= len(self.known) else part

    @property
    def unknown(self):
        """The part of the first total that is not known; None where all are."""
        return self.parts[len(self.known)] if len(self.parts) > len(self.known) else None


class _Updates(keras.StatelessScope):
    """Collects what is assigned to variables within it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates: list = []

    def add_update(self, update):
        """Keras's hook."""
        super().add_update(update)
        self.updates.append(update)
