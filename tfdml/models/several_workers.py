"""What Keras 3.15 and TensorFlow 2.21 lack for `fit` under `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops, tree


class SeveralWorkers:
    """A mixin of `keras.Model` whose `fit` and `evaluate` also run on several workers; elsewhere it changes nothing.

    Keras 3.15 builds a model from the mean of the workers' batches, which may have unequal shapes, and averages the
    metrics of a step along an axis that scalars do not have. Here a model is built from a worker's own batch, and the
    metrics of a step are vectors of one element.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None and _several(self):
            strategy: Any = self.distribute_strategy  # type: ignore[attr-defined]
            for _, _, batches in iterator:
                data_batch = tree.map_structure(lambda x: strategy.experimental_local_results(x)[0], next(batches))
                break
            iterator = None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)  # type: ignore[misc]

    def train_step(self, *args):
        """Keras's step, with metrics that can be averaged over workers."""
        return _averageable(self, super().train_step(*args))  # type: ignore[misc]

    def test_step(self, *args):
        """Keras's step, with metrics that can be averaged over workers."""
        return _averageable(self, super().test_step(*args))  # type: ignore[misc]


def multi_worker_strategy() -> Any:
    """A `tf.distribute.MultiWorkerMirroredStrategy` by TF_CONFIG; to be made before TensorFlow does anything else.

    The first values of a variable are those of worker 0, and TensorFlow cannot send integers of less than 32 bits, as
    moments' random projections are; here they are sent as int32.

    Example:
        >>> strategy = multi_worker_strategy()  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     learner = MetricLearner(embedder, objectives)
    """
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    sent = strategy.extended._get_variable_creator_initial_value

    def first_value(replica_id, device, primary_var, **options):
        dtype = tf.as_dtype(options.get("dtype") or "float32")
        if replica_id or not dtype.is_integer or dtype.size >= 4:
            return sent(replica_id=replica_id, device=device, primary_var=primary_var, **options)
        given = options["initial_value"]

        def wide():
            return tf.cast(given() if callable(given) else given, "int32")

        options.update(initial_value=wide, dtype=tf.int32)
        receive = sent(replica_id=replica_id, device=device, primary_var=primary_var, **options)
        return lambda: tf.cast(receive(), dtype)

    strategy.extended._get_variable_creator_initial_value = first_value
    return strategy


def _several(model: Any) -> bool:
    """Whether the model's strategy has workers in other processes."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    strategy = model.distribute_strategy
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def _averageable(model: Any, metrics: dict) -> dict:
    if not _several(model):
        return metrics
    return tree.map_structure(lambda value: ops.reshape(value, (-1,)), metrics)
