"""Steps on batches whose activations do not fit the memory: gradient caching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdml import replicas
from tfdml.models.row_blocks import RowBlocks


class GradientCache:
    """A mixin of `keras.Model` whose training step keeps the activations of a few images at a time.

    1. Represents the images in chunks, without a gradient.
    2. Computes the loss of the whole batch, and its gradient with respect to the representations that objectives read
       (and to the weights that they use there). Objectives that do not need the whole batch compute their matrices of
       pairs for a chunk of anchors at a time.
    3. Represents the images again, chunk by chunk, and propagates that gradient to the weights. The sum over chunks is
       the gradient of the batch, and the optimiser makes one step with it.

    Layers with a random state, such as dropout, draw the same in both passes. A chunk updates moving statistics once.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021.
    """

    #: Images of a chunk; 0 for plain steps.
    gradient_cache = 0

    def train_step(self, *args):
        """Keras's step, or the one above."""
        if not self.gradient_cache:
            return super().train_step(*args)  # type: ignore[misc]
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"gradient_cache={self.gradient_cache} works on Keras's TensorFlow backend, not on "
                f"{keras.backend.backend()}"
            )
        images, y, sample_weight = keras.utils.unpack_x_y_sample_weight(args[0])
        size = images.shape[0]
        if size is not None and size <= self.gradient_cache:
            return super().train_step(*args)  # type: ignore[misc]
        return _cached_step(self, images, y, sample_weight)

    def row_blocks(self, labels) -> RowBlocks | None:
        """Returns the blocks of anchors that pairs of a batch with these labels are computed in; None: all at once.

        Replicas have no blocks: the anchors of each are its own images.
        """
        total = keras.ops.shape(labels)[0]
        if not self.gradient_cache or replicas.count() > 1 or keras.backend.backend() != "tensorflow":
            return None
        if isinstance(total, int) and total <= self.gradient_cache:
            return None
        return RowBlocks(total, self.gradient_cache)


def _cached_step(learner: Any, images, y, sample_weight):
    import tensorflow as tf

    images = tf.convert_to_tensor(images)
    if not learner.built:
        # Before the chunks, within which no variable can be created.
        learner.build(images.shape)
    chunks = _Chunks(learner, images, learner.gradient_cache)
    representations = chunks.represent()
    trained = learner.trainable_variables
    with tf.GradientTape() as tape:
        tape.watch(list(representations.values()))
        loss = learner.loss_of(representations, learner._labels(y, sample_weight), training=True)
        learner._loss_tracker.update_state(loss * replicas.count(), sample_weight=tf.shape(images)[0])
        loss = learner.optimizer.scale_loss(loss)
    direct, upstream = tape.gradient(loss, [trained, representations])
    through = chunks.gradients({name: value for name, value in upstream.items() if value is not None})
    gradients = [_sum(*pair) for pair in zip(direct, through, strict=True)]
    learner.optimizer.apply_gradients(zip(gradients, trained, strict=True))
    return learner.compute_metrics(images, y, representations)


def _sum(a, b):
    """Of two gradients, either of which may be None: not connected."""
    if a is None or b is None:
        return a if b is None else b
    import tensorflow as tf

    return tf.convert_to_tensor(a) + b


class _Chunks:
    """What a learner makes of each image alone, by chunks of the batch.

    Args:
        learner: A `MetricLearner`.
        images: The batch (B, H, W, 3).
        size: Images of a chunk; the last one may have fewer.
    """

    def __init__(self, learner: Any, images: Any, size: int):
        self.learner, self.images, self.size = learner, images, size
        #: What chunks may change: moving statistics and random states.
        self.states: list = list(learner.non_trainable_variables)
        self.changed: set[int] = set()
        self.outputs = self._outputs()
        self.before = _values(self.states)

    def represent(self) -> dict:
        """The representations of the batch that the loss needs; leaves in place what the chunks have changed."""
        after, representations = self._over_chunks(
            lambda take, states: self._run(take(self.images), states), self.before, self.outputs
        )
        for i in sorted(self.changed):
            self.states[i].assign(after[i])
        return representations

    def gradients(self, upstream: dict) -> list:
        """The gradient of every trained variable, from that of the representations; None where there is none."""
        import tensorflow as tf

        variables = self.learner.trainable_variables
        if not upstream:
            return [None] * len(variables)
        names = list(upstream)
        # A gradient of gathered rows lists the rows.
        given = [tf.convert_to_tensor(upstream[name]) for name in names]
        weights = _values(variables)
        reached: set[int] = set()

        def step(take, carried):
            states, sums = carried[: len(self.states)], carried[len(self.states) :]
            own = [tf.identity(weight) for weight in weights]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(own)
                representations, states = self._run(take(self.images), states, zip(variables, own, strict=True))
            found = tape.gradient([representations[name] for name in names], own, [take(value) for value in given])
            reached.update(i for i, gradient in enumerate(found) if gradient is not None)
            return {}, [*states, *map(_sum, found, sums)]

        # From the same states as the first pass; where this one ends is known.
        carried, _ = self._over_chunks(step, [*self.before, *map(tf.zeros_like, weights)], {})
        sums = carried[len(self.states) :]
        return [total if i in reached else None for i, total in enumerate(sums)]

    def _run(self, images, states: Sequence[Any], weights=()) -> tuple[dict, list]:
        """The representations of some images, and the states after them."""
        mapping = [*zip(self.states, states, strict=True), *weights]
        with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False) as scope:
            given = [scope.get_current_value(variable) for variable in self.states]
            representations = self.learner.represent_images(images, training=True)
            after = [scope.get_current_value(variable) for variable in self.states]
        if scope.losses:
            raise ValueError("gradient_cache does not go with layers that add losses of their own, by add_loss()")
        self.changed.update(i for i, (old, new) in enumerate(zip(given, after, strict=True)) if new is not old)
        return representations, after

    def _outputs(self) -> dict:
        """The dtypes and shapes of the representations of a chunk, in a graph; finds out which states change."""
        import tensorflow as tf

        if tf.executing_eagerly():
            return {}
        size = None if self.images.shape[0] is None else self.size
        spec = tf.TensorSpec((size, *self.images.shape[1:]), self.images.dtype)
        run = tf.function(lambda images: self._run(images, _values(self.states))[0], autograph=False)
        outputs = run.get_concrete_function(spec).structured_outputs
        # The others need not go from chunk to chunk.
        self.states = [self.states[i] for i in sorted(self.changed)]
        self.changed = set()
        return outputs

    def _over_chunks(self, step: Callable[..., Any], carried: list, outputs: dict) -> tuple[list, dict]:
        """`step(take, carried)` for each chunk in turn, where `take` cuts its rows out of a tensor of the batch.

        Args:
            step: Gives outputs by name, and what is carried to the next chunk.
            carried: Tensors, what the first chunk is given.
            outputs: What the outputs will be, in a graph: dtypes and shapes by name.

        Returns:
            What the last chunk carries, and the outputs of all.
        """
        import tensorflow as tf

        size, total = self.size, self.images.shape[0]
        if tf.executing_eagerly():
            parts = []
            for first in range(0, total, size):
                found, carried = step(lambda x, first=first: x[first : first + size], carried)
                parts.append(found)
            return carried, {name: tf.concat([part[name] for part in parts], 0) for name in parts[0]}
        if total is None:
            count = (tf.shape(self.images)[0] + size - 1) // size
            return _loop(step, carried, outputs, count, lambda x, i: x[i * size : (i + 1) * size])
        # Chunks of a known size are what XLA takes; the rest of the images is one by itself.
        carried, found = _loop(step, carried, outputs, total // size, lambda x, i: _rows(x, i * size, size))
        if total % size:
            last, carried = step(lambda x: x[total - total % size :], carried)
            found = {name: tf.concat([value, last[name]], 0) for name, value in found.items()}
        return carried, found


def _loop(step: Callable[..., Any], carried: list, outputs: dict, count, take) -> tuple[list, dict]:
    """`step` for chunks 0 .. count - 1 in a graph."""
    import tensorflow as tf

    def body(i, arrays, carried):
        found, carried = step(lambda x: take(x, i), carried)
        return i + 1, {name: array.write(i, found[name]) for name, array in arrays.items()}, list(carried)

    arrays = {
        name: tf.TensorArray(spec.dtype, size=count, infer_shape=False, element_shape=spec.shape)
        for name, spec in outputs.items()
    }
    # One chunk at a time, or the memory would be that of several.
    _, arrays, carried = tf.while_loop(
        lambda i, *_: i < count, body, (tf.constant(0), arrays, list(carried)), parallel_iterations=1
    )
    return list(carried), {name: _joined(array, outputs[name].shape) for name, array in arrays.items()}


def _joined(array, shape):
    """The rows of all elements of a `tf.TensorArray`, each of this shape."""
    import tensorflow as tf

    if shape[0] is None:
        joined = array.concat()
    else:
        stacked = array.stack()
        joined = tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], 0))
    joined.set_shape((None, *shape[1:]))
    return joined


def _rows(x, first, count: int):
    """`count` rows of x from a tensor `first` on, of a size that is known beforehand."""
    import tensorflow as tf

    begin = tf.concat([[first], tf.zeros(len(x.shape) - 1, "int32")], 0)
    rows = tf.slice(x, begin, tf.concat([[count], tf.shape(x)[1:]], 0))
    rows.set_shape((count, *x.shape[1:]))
    return rows


def _values(variables: Sequence[Any]) -> list:
    """What the variables hold now."""
    import tensorflow as tf

    return [tf.convert_to_tensor(variable.value) for variable in variables]
