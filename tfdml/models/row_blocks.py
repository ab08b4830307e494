"""Values over the pairs of a large batch, in the memory of some of its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from tfdml import pairwise, replicas


class RowBlocks:
    """Values over all pairs of a batch, worked out a block of rows after another.

    Within `pairwise.only_rows` an objective that divides gives the part of its value that these rows make up, and asks
    by `replicas.summed` for what it has to know of all rows, such as how many pairs count. Several replicas tell each
    other; here there is one pass over the blocks for each sum, in which those before it are known, and one for the
    value. The gradient goes the same way back: what reaches a sum is carried on by a pass of its own.

    Random numbers are those of one call on the whole batch, and their states move once. On Keras's TensorFlow backend.

    Args:
        total: The images of the batch, B: a number, or a scalar in a graph of unknown batch size.
        size: Rows of a block.

    Example:
        >>> x, labels = keras.ops.array([[0.0], [1.0], [3.0], [4.0]]), keras.ops.array([0, 0, 1, 1])
        >>> loss = tfdml.losses.ContrastiveLoss()
        >>> blocks = RowBlocks(total=4, size=3)
        >>> float(blocks.sum_of(lambda x: loss.of_batch(labels, x), [x])), float(loss(labels, x))
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
        """What `part(*tensors)` gives of each block, summed; with a gradient.

        Args:
            part: A tensor, of which each block makes up a part.
            tensors: What it is a function of.
            variables: Keras variables that it may learn, besides.
            states: Those that it reads, and that may be others when the gradient is asked for.
        """
        import tensorflow as tf

        @tf.custom_gradient
        def summed(*inputs):
            given = _Given(part, inputs, variables, [(state, tf.convert_to_tensor(state.value)) for state in states])
            known: list = []
            while True:
                found, first = self._pass(given, known)
                if first.is_value:
                    break
                known.append(found)
            for variable, value in first.updates:
                variable.assign(value)
            return found, lambda upstream: self._backward(given, known, upstream)

        return summed(*(tf.convert_to_tensor(x) for x in [*tensors, *(variable.value for variable in variables)]))

    def same_of_each(self, values: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """`values(*tensors)` where they are made of sums over all rows, so that every block has the same; constants."""
        import tensorflow as tf

        given = _Given(values, [tf.stop_gradient(x) for x in tensors], (), ())
        known: list = []
        while True:
            first = given.run(self._first, known)
            if first.is_value:
                return first.wanted
            known.append(self._pass(given, known)[0])

    def _pass(self, given: _Given, known: Sequence[Any]) -> tuple[Any, _Run]:
        """Of the first that is asked for and not known, else of the value: the sum over blocks; the first one's run."""
        runs: list[_Run] = []

        def step(rows):
            runs.append(given.run(rows, known))
            return [runs[-1].wanted]

        return self._over_blocks(step)[0], runs[0]

    def _backward(self, given: _Given, known: Sequence[Any], upstream: Any) -> list:
        """The gradient with respect to the inputs, of that with respect to the value."""
        reached = [*[None] * len(known), upstream]
        into: list = [None] * len(given.inputs)
        # From the value to the sums, the last of which may depend on those before it.
        for i in reversed(range(len(reached))):
            if reached[i] is None:
                continue
            found = self._over_blocks(functools.partial(given.gradients, known=known[:i], upstream=reached[i]))
            into = [_plus(*pair) for pair in zip(into, found[: len(into)], strict=True)]
            reached[:i] = [_plus(*pair) for pair in zip(reached[:i], found[len(into) :], strict=True)]
        return into

    @property
    def _first(self) -> pairwise.Rows:
        """The first block, which has the rows that fill no whole one."""
        import tensorflow as tf

        rest = self.total % self.size
        if isinstance(rest, int):
            return pairwise.Rows(0, rest or min(self.size, self.total), self.total)
        return pairwise.Rows(0, tf.where(rest > 0, rest, tf.minimum(self.size, self.total)), self.total)

    def _over_blocks(self, step: Callable[[pairwise.Rows], list]) -> list:
        """The sums of what `step(rows)` gives for each block; None where the first gives None."""
        import tensorflow as tf

        first = self._first
        found = step(first)
        there = [i for i, value in enumerate(found) if value is not None]
        count = (self.total - first.count) // self.size

        def body(i, *sums):
            more = step(pairwise.Rows(first.count + i * self.size, self.size, self.total))
            return i + 1, *(_plus(total, more[j]) for j, total in zip(there, sums, strict=True))

        # One at a time, or the memory would be that of several.
        begin = (tf.constant(0), *(tf.convert_to_tensor(found[j]) for j in there))
        _, *sums = tf.while_loop(lambda i, *_: i < count, body, begin, parallel_iterations=1)
        for j, total in zip(there, sums, strict=True):
            found[j] = total
        return found


class _Run(NamedTuple):
    """What a block gave: the first sum's part that is not known, or the value's, and the states that it moved."""

    wanted: Any
    is_value: bool
    updates: list


class _Given(NamedTuple):
    """A function of tensors and of variables, whose values are the last of `inputs`; and the values of states."""

    part: Callable[..., Any]
    inputs: Sequence[Any]
    variables: Sequence[Any]
    states: Sequence[tuple[Any, Any]]

    def run(self, rows: pairwise.Rows, known: Sequence[Any], inputs: Sequence[Any] | None = None) -> _Run:
        """The function of one block."""
        inputs = self.inputs if inputs is None else inputs
        sums = _Sums(known)
        tensors, values = inputs[: len(inputs) - len(self.variables)], inputs[len(inputs) - len(self.variables) :]
        with (
            _Updates([*zip(self.variables, values, strict=True), *self.states], initialize_variables=False) as scope,
            pairwise.only_rows(rows),
            replicas.sums_by(sums),
        ):
            value = self.part(*tensors)
        is_value = len(sums.parts) == len(known)
        return _Run(value if is_value else sums.parts[len(known)], is_value, scope.updates)

    def gradients(self, rows: pairwise.Rows, known: Sequence[Any], upstream: Any) -> list:
        """Of what `run` wants of one block, with respect to the inputs and to what is known."""
        import tensorflow as tf

        own = [tf.identity(x) for x in [*self.inputs, *known]]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(own)
            wanted = self.run(rows, own[len(self.inputs) :], own[: len(self.inputs)]).wanted
        found = tape.gradient(wanted, own, upstream)
        # A gradient of gathered rows lists the rows.
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]


class _Sums:
    """Answers `replicas.summed`, in the order of asking: by what is known of all blocks, else by the block's part."""

    def __init__(self, known: Sequence[Any]):
        self.known = known
        self.parts: list = []

    def __call__(self, part):
        self.parts.append(part)
        return self.known[len(self.parts) - 1] if len(self.parts) <= len(self.known) else part


class _Updates(keras.StatelessScope):
    """What is assigned to variables within it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates: list = []

    def add_update(self, update):
        """Keras's hook."""
        super().add_update(update)
        self.updates.append(update)


def _plus(a, b):
    """The sum of two, either of which may be None: nothing."""
    if a is None or b is None:
        return a if b is None else b
    return a + b
