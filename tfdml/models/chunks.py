"""Gradient caching: a step on a batch whose activations do not fit the memory.

On Keras's TensorFlow backend:

1. `Chunks.represent` embeds the images in chunks, without keeping activations.
2. `MetricLearner` computes the loss of the whole batch, with the gradient with respect to the
   representations that objectives read (and to the weights that they use there).
3. `Chunks.gradients` embeds the images again, chunk by chunk, and propagates that gradient to the
   weights. The sum over chunks is the gradient of the batch.

On JAX, which differentiates the step as a whole, `represent_in_chunks` does 1, and its gradient 3.

Layers with a random state, such as dropout, draw the same in both passes. A chunk updates moving
statistics once.

Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
RepL4NLP 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfdml.pairs import take_rows

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def _sum(a, b):
    """Of two gradients, either of which may be None: not connected."""
    if a is None or b is None:
        return a if b is None else b
    return tf.convert_to_tensor(a) + b


class Chunks:
    """The representations of a batch and the gradient through them, a chunk of the images at a
    time.

    Args:
        learner: A `MetricLearner`.
        images: The batch (B, H, W, 3), or a dict of batches by view.
        size: Images of a chunk; the last one may have fewer.
    """

    def __init__(self, learner: Any, images: Any, size: int):
        self.learner, self.size = learner, size
        self.images = tf.nest.map_structure(tf.convert_to_tensor, images)
        first = tf.nest.flatten(self.images)[0]
        #: How many images there are: a number where it is known, and within the graph.
        self.total, self.count = first.shape[0], tf.shape(first)[0]
        if not learner.built:
            # Before the chunks, within which no variable can be created.
            learner.build(tf.nest.map_structure(lambda x: x.shape, self.images))
        #: What chunks may change: moving statistics and random states.
        self.states: list = list(learner.non_trainable_variables)
        self.changed: set[int] = set()
        self.outputs = self._outputs()
        self.before = _values(self.states)

    def represent(self, tape) -> dict:
        """Return the representations of the batch that objectives read; leaves in place what the
        chunks have changed.

        Args:
            tape: Records the loss of them, but not how they are computed.
        """
        with tape.stop_recording():
            after, self.representations = self._over_chunks(
                lambda take, states: self._run(self._take(take), states), self.before, self.outputs
            )
            for i in sorted(self.changed):
                self.states[i].assign(after[i])
        tape.watch(list(self.representations.values()))
        return self.representations

    def gradients(self, tape, loss, variables: list) -> list:
        """Return the gradient of a loss that the tape has recorded for each variable; None where
        there is none."""
        direct, upstream = tape.gradient(loss, [variables, self.representations])
        upstream = {name: value for name, value in upstream.items() if value is not None}
        # Objectives read the rows that they sample after the representations.
        row_sampled = self.learner.row_sampled_weight_ids
        read_whole = [variable for variable in variables if id(variable) not in row_sampled]
        through = dict(zip(map(id, read_whole), self._through(upstream, read_whole), strict=True))
        return [
            _sum(gradient, through.get(id(variable)))
            for gradient, variable in zip(direct, variables, strict=True)
        ]

    def _through(self, upstream: dict, variables: list) -> list:
        """Return the gradients through the representations, from those with respect to them."""
        if not upstream:
            return [None] * len(variables)
        names = list(upstream)
        # A gradient of gathered rows lists the rows.
        upstream_values = [tf.convert_to_tensor(upstream[name]) for name in names]
        weights = _values(variables)
        reached: set[int] = set()

        def step(take, carried):
            states, sums = carried[: len(self.states)], carried[len(self.states) :]
            watched = [tf.identity(weight) for weight in weights]
            mapping = list(zip(variables, watched, strict=True))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                representations, states = self._run(self._take(take), states, mapping)
            outputs = [representations[name] for name in names]
            gradients = tape.gradient(outputs, watched, list(map(take, upstream_values)))
            reached.update(i for i, gradient in enumerate(gradients) if gradient is not None)
            return {}, [*states, *map(_sum, gradients, sums)]

        # From the same states as the first pass; where this one ends is known.
        carried, _ = self._over_chunks(step, [*self.before, *map(tf.zeros_like, weights)], {})
        sums = carried[len(self.states) :]
        return [total if i in reached else None for i, total in enumerate(sums)]

    def _run(self, images, states: Sequence[Any], weights=()) -> tuple[dict, list]:
        """Return the representations of some images, and the states after them."""
        mapping = [*zip(self.states, states, strict=True), *weights]
        representations, after, changed = _represent(self.learner, images, self.states, mapping)
        self.changed |= changed
        return representations, after

    def _take(self, take: Callable[..., Any]) -> Any:
        """Return the rows of a chunk of every view."""
        return tf.nest.map_structure(take, self.images)

    def _outputs(self) -> dict:
        """Return the dtypes and shapes of the representations of a chunk, in a graph; finds out
        which states change."""
        if tf.executing_eagerly():
            return {}
        size = None if self.total is None else self.size
        spec = tf.nest.map_structure(
            lambda x: tf.TensorSpec((size, *x.shape[1:]), x.dtype), self.images
        )
        run = tf.function(
            lambda images: self._run(images, _values(self.states))[0], autograph=False
        )
        outputs = run.get_concrete_function(spec).structured_outputs
        # The others need not go from chunk to chunk.
        self.states = [self.states[i] for i in sorted(self.changed)]
        self.changed = set()
        return outputs

    def _over_chunks(
        self, step: Callable[..., Any], carried: list, outputs: dict
    ) -> tuple[list, dict]:
        """`step(take, carried)` for each chunk in turn, where `take` cuts its rows out of a tensor
        of the batch.

        Args:
            step: Gives outputs by name, and what is carried to the next chunk.
            carried: Tensors, what the first chunk is given.
            outputs: What the outputs will be, in a graph: dtypes and shapes by name.

        Returns:
            What the last chunk carries, and the outputs of all.
        """
        size, total = self.size, self.total
        if tf.executing_eagerly():
            parts = []
            for first in range(0, total, size):
                part, carried = step(lambda x, first=first: x[first : first + size], carried)
                parts.append(part)
            return carried, _concatenated(parts)
        if total is None:
            count = (self.count + size - 1) // size
            return _loop(step, carried, outputs, count, lambda x, i: x[i * size : (i + 1) * size])
        # Chunks of a known size are what XLA takes; the rest of the images is one by itself.
        carried, part = _loop(
            step, carried, outputs, total // size, lambda x, i: take_rows(x, i * size, size)
        )
        if total % size:
            last, carried = step(lambda x: x[total - total % size :], carried)
            part = _concatenated([part, last])
        return carried, part


def _concatenated(parts: Sequence[dict]) -> dict:
    """Return the outputs of some chunks one after another."""
    outputs = {}
    for name in parts[0]:
        outputs[name] = tf.concat([part[name] for part in parts], 0)
    return outputs


def represent_in_chunks(learner: Any, images: Any, size: int, devices: int) -> dict:
    """Return the representations of a batch that objectives read, on JAX; their gradient embeds
    each chunk again.

    Args:
        learner: A `MetricLearner`.
        images: The batch (B, H, W, 3), or a dict of batches by view.
        size: Images of a chunk on each device; the last one may have fewer.
        devices: How many devices share the batch.
    """
    import jax

    states = list(learner.non_trainable_variables)
    values = [(variable, variable.value) for variable in learner.variables]
    changed: set[int] = set()

    def run(carried, chunk):
        carried_values = [(states[i], value) for i, value in carried.items()]
        mapping = [*values, *carried_values]
        representations, after, indices = _represent(learner, chunk, states, mapping)
        changed.update(indices)
        return {i: after[i] for i in carried}, representations

    share = keras.tree.flatten(images)[0].shape[0] // devices
    count, rest = divmod(share, size)
    cut = _DeviceChunks(devices, count, rest, size)
    chunks = keras.tree.map_structure(cut.whole, images)
    # What no chunk changes need not go from chunk to chunk.
    jax.eval_shape(run, {}, keras.tree.map_structure(lambda x: x[0], chunks))
    run_again = jax.checkpoint(run)
    before = {i: states[i].value for i in sorted(changed)}
    carried, representations = jax.lax.scan(run_again, before, chunks)
    parts = [representations]
    if rest:
        carried, last = run_again(carried, keras.tree.map_structure(cut.last, images))
        parts.append(last)
    for i, value in carried.items():
        states[i].assign(value)
    return keras.tree.map_structure(cut.join, *parts)


@dataclasses.dataclass(frozen=True)
class _DeviceChunks:
    """How a batch that devices share is cut into chunks, each of as many images of every device.

    Args:
        devices: How many devices there are.
        count: How many whole chunks there are.
        rest: Images of each device in the last chunk; 0: there is none.
        size: Images of each device in a whole chunk.
    """

    devices: int
    count: int
    rest: int
    size: int

    def _by_device(self, x):
        return ops.reshape(x, (self.devices, -1, *x.shape[1:]))

    def whole(self, x):
        """Return the whole chunks of a batch, (count, devices * size, ...)."""
        of_devices = self._by_device(x)[:, : self.count * self.size]
        shape = (self.devices, self.count, self.size, *of_devices.shape[2:])
        of_chunks = ops.swapaxes(ops.reshape(of_devices, shape), 0, 1)
        # (chunks, devices, rows, ...) to (chunks, devices x rows, ...).
        return _merged(of_chunks, 1)

    def last(self, x):
        """Return the last chunk of a batch, (devices * rest, ...)."""
        return _merged(self._by_device(x)[:, self.count * self.size :], 0)

    def join(self, whole, *last):
        """Return the rows of all chunks in the order of the batch."""
        whole = ops.reshape(whole, (self.count, self.devices, self.size, *whole.shape[2:]))
        rows = [_merged(ops.swapaxes(whole, 0, 1), 1), *map(self._by_device, last)]
        return _merged(ops.concatenate(rows, axis=1), 0)


def _merged(x, axis: int):
    """Return x with an axis and the one after it as one."""
    length = x.shape[axis] * x.shape[axis + 1]
    return ops.reshape(x, (*x.shape[:axis], length, *x.shape[axis + 2 :]))


def _represent(
    learner: Any, images: Any, states: list, mapping: list
) -> tuple[dict, list, set[int]]:
    """Embed some images, without changing any variable.

    Args:
        learner: A `MetricLearner`.
        images: A chunk of a batch.
        states: Variables.
        mapping: Variables and their values.

    Returns:
        The representations, the states after them, and the indices of those that have changed.
    """
    with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False) as scope:
        before = [scope.get_current_value(variable) for variable in states]
        all_representations = learner(images, training=True)
        # The rest needs the labels of the batch.
        representations = {
            name: all_representations[name] for name in learner.reads if name in all_representations
        }
        after = [scope.get_current_value(variable) for variable in states]
    if scope.losses:
        raise ValueError(
            "gradient_cache does not go with layers that add losses of their own, by add_loss()"
        )
    changed = {i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}
    return representations, after, changed


def _loop(step: Callable[..., Any], carried: list, outputs: dict, count, take) -> tuple[list, dict]:
    """`step` for chunks 0 .. count - 1 in a graph."""

    def body(i, arrays, carried):
        part, carried = step(lambda x: take(x, i), carried)
        return (
            i + 1,
            {name: array.write(i, part[name]) for name, array in arrays.items()},
            list(carried),
        )

    arrays = {
        name: tf.TensorArray(spec.dtype, size=count, infer_shape=False, element_shape=spec.shape)
        for name, spec in outputs.items()
    }
    # One chunk at a time, or the memory would be that of several.
    _, arrays, carried = tf.while_loop(
        lambda i, *_: i < count,
        body,
        (tf.constant(0), arrays, list(carried)),
        parallel_iterations=1,
    )
    return list(carried), {
        name: _joined(array, outputs[name].shape) for name, array in arrays.items()
    }


def _joined(array, shape):
    """Return the rows of all elements of a `tf.TensorArray`, each of this shape."""
    if shape[0] is None:
        joined = array.concat()
    else:
        stacked = array.stack()
        joined = tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], 0))
    joined.set_shape((None, *shape[1:]))
    return joined


def _values(variables: Sequence[Any]) -> list:
    """Return what the variables hold now."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]
