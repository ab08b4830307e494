"""What works around Keras, TensorFlow and other libraries, or reads what they keep private.

Each item names the version that needs it and the reason. `tests/test_workarounds.py` fails where a
newer version makes one unnecessary.
"""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops, tree
from keras.src.models.functional import Functional


def layers_of(model: keras.Model) -> list:
    """Return a model and all its layers, those within other layers too.

    Keras 3.15: `Model.layers` has the outermost alone, and a layer does not show those that it is
    made of.
    """
    return model._flatten_layers()


def follows_its_graph(layer: Any) -> bool:
    """Whether a layer is a model that computes what its graph of layers says.

    Keras 3.15: a subclass of `Model` with inputs and outputs has a graph, and may have a `call` of
    its own; the class of functional models is private.
    """
    is_usual = getattr(type(layer), "call", None) in (Functional.call, keras.Sequential.call)
    return is_usual and bool(getattr(layer, "outputs", None))


def freeze_new_weights(model: keras.Model) -> None:
    """Freeze the weights of a model's frozen layers, those too that were created after the layer
    was frozen.

    Keras 3.15: these train.
    """
    for layer in layers_of(model):
        if not layer.trainable:
            for weight in layer._trainable_variables:
                weight.trainable = False


def frozen_weights(model: keras.Model) -> list[int]:
    """Return the places among a model's weights of those that are frozen.

    Keras 3.15: only private attributes distinguish them from moving statistics, which never train.
    """
    can_train = _weights_that_can_train(model)
    weights = enumerate(model.weights)
    return [place for place, weight in weights if id(weight) in can_train and not weight.trainable]


def set_frozen_weights(model: keras.Model, places: list[int]) -> None:
    """Freeze the weights in these places, as `frozen_weights` returns them; all others train."""
    can_train = _weights_that_can_train(model)
    for place, weight in enumerate(model.weights):
        if id(weight) in can_train:
            weight.trainable = place not in places


def _weights_that_can_train(model: keras.Model) -> set[int]:
    weights: set[int] = set()
    for layer in layers_of(model):
        weights.update(map(id, layer._trainable_variables))
    return weights


def producer_of(tensor: keras.KerasTensor) -> tuple[Any, list]:
    """Return the operation that made a symbolic tensor, and the tensors that it was called with.

    Keras 3.15: an operation may have been called several times, and only private attributes
    distinguish the calls.
    """
    operation, node, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node].input_tensors


def inputs_of(layer: Any) -> list:
    """Return the symbolic tensors that a layer was called with.

    Keras 3.15: `layer.input` is refused where there were several calls.
    """
    return tree.flatten([node.input_tensors for node in layer._inbound_nodes])


def forget_layout(variable: keras.Variable) -> None:
    """Let a variable live on one device, after JAX's processes have parted.

    Keras 3.15: a variable keeps the layout of the distribution that it was made in, and there is no
    way to change it.
    """
    variable._layout = None


def loss_tracker(model: keras.Model) -> Any:
    """Return the metric that logs a compiled model's loss.

    Keras 3.15: a `train_step` of one's own updates it, and it is private.
    """
    return model._loss_tracker


def scope_of(model: keras.Model) -> Any:
    """Return the scope of the strategy that a model trains with, to create variables in; elsewhere
    an empty one.

    Keras 3.15: a model has a strategy on its TensorFlow backend alone.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


class _State:
    """The variables whose values a step of JAX has taken, in groups, and their newest values."""

    def __init__(self, groups: list, values: Any):
        self.groups, self.values = groups, values

    def give_back(self) -> None:
        """Give the values to the variables that lack theirs."""
        for variables, values in zip(self.groups, self.values, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if variable._value is None or variable._value.is_deleted():
                    variable._value = value


@contextlib.contextmanager
def _keeping_values(model: Any) -> Iterator[None]:
    """Enter a block that a model's variables leave with values, whatever ends it."""
    try:
        yield
    except BaseException:
        if (state := model.state_of_step) is not None:
            state.give_back()
        raise
    finally:
        if model.state_of_step is not None:
            # An old state would overwrite what is assigned to the variables later.
            model.state_of_step = model._jax_state = None
            model._jax_state_synced = True


def _keeping(name: str) -> Callable[..., Any]:
    """Return a method of `keras.Model` that keeps the values of the variables."""
    method = getattr(keras.Model, name)

    @functools.wraps(method)
    def entrance(self, *args, **kwargs):
        with _keeping_values(self):
            return getattr(super(InterruptibleModel, self), name)(*args, **kwargs)

    return entrance


class InterruptibleModel(keras.Model):
    """A `keras.Model` whose variables have values after a step that fails or is interrupted: those
    of the last step that ended.

    Keras 3.15: on JAX `fit`, `evaluate` and `predict` take the values out of the variables, and a
    compiled step uses up its inputs. The values return only where all goes well.
    """

    #: What the step has taken, while one of the methods below runs.
    state_of_step: _State | None = None

    fit = _keeping("fit")
    evaluate = _keeping("evaluate")
    predict = _keeping("predict")
    train_on_batch = _keeping("train_on_batch")
    test_on_batch = _keeping("test_on_batch")
    predict_on_batch = _keeping("predict_on_batch")

    def _get_jax_state(self, purge_model_variables=False, **groups):
        variables = {
            "trainable_variables": self.trainable_variables,
            "non_trainable_variables": self.non_trainable_variables,
            "optimizer_variables": getattr(getattr(self, "optimizer", None), "variables", ()),
            "metrics_variables": self.metrics_variables,
        }
        values = super()._get_jax_state(**groups)
        taken = [list(variables[name]) for name in variables if groups.get(name)]
        self.state_of_step = _State(taken, values)
        if purge_model_variables:
            self._purge_model_variables(**groups)
        return values

    def _make_function(self, step_function, *args, **kwargs):
        if keras.backend.backend() != "jax":
            return super()._make_function(step_function, *args, **kwargs)

        def step(state, data):
            results: list = []
            try:
                # Without bytecode of Python, so that no interrupt comes between a step and its
                # result.
                results.extend(map(step_function, (state,), (data,)))
            finally:
                if results and self.state_of_step is not None:
                    self.state_of_step.values = results[0][1]
            return results[0]

        return super()._make_function(step, *args, **kwargs)


def trained_by(optimizer: Any) -> list:
    """Return the variables that an optimizer was built for.

    Keras 3.15: it shows its own variables alone.
    """
    return optimizer._trainable_variables


def index_in(optimizer: Any, variable: Any) -> int:
    """Return the place of a variable among those that an optimizer was built for.

    Keras 3.15: on TensorFlow an update gets the backend's variable, by which the list cannot be
    searched.
    """
    return optimizer._get_variable_index(variable)


def add_undecayed_weight(layer: keras.layers.Layer, **options: Any) -> Any:
    """Add a weight to a layer that takes no weight decay: a learned scale, power, offset or target,
    which decay would pull toward 0.

    Keras 3.15: optimizers leave variables out by a list or by name, and a layer cannot ask for it.

    Args:
        layer: The layer.
        **options: Those of its `add_weight`.
    """
    weight = layer.add_weight(**options)
    weight.takes_decay = False
    return weight


def takes_decay(variable: Any) -> bool:
    """Whether weight decay applies to a variable, as to all but those of `add_undecayed_weight`."""
    return getattr(variable, "takes_decay", True)


def exclude_from_decay(optimizer: Any, variables: list) -> None:
    """Leave the weights of `add_undecayed_weight` out of the weight decay of a Keras optimizer.

    Keras 3.15: `exclude_from_weight_decay` forgets what was excluded before, is refused by an
    optimizer that is built, and is not saved.

    Args:
        optimizer: The optimizer, built or not.
        variables: Those that it trains.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    for variable in variables:
        if not takes_decay(variable):
            excluded.add(optimizer._var_key(variable))
    optimizer._exclude_from_weight_decay = excluded
    optimizer._exclude_from_weight_decay_cache = {}


class SavedSeed(keras.random.SeedGenerator):
    """A generator of random seeds whose state is a weight of a layer.

    Keras 3.15: the state of an ordinary one is not saved with the layer.

    Args:
        state: (2,) integers, a weight that begins with `SavedSeed.start()`.
    """

    def __init__(self, state: keras.Variable):
        self.state = state

    @staticmethod
    def start() -> Any:
        """Return a new seed and the number of draws, as NumPy in the dtype of the backend's
        seeds."""
        return ops.convert_to_numpy(keras.random.SeedGenerator().state)

    def next(self, ordered=True):
        """Return the seed of the next draw."""
        del ordered
        seed = ops.convert_to_tensor(self.state) * 1
        self.state.assign(seed + ops.convert_to_tensor([0, 1], dtype=self.state.dtype))
        return seed


class VariableRows:
    """Rows of a variable, which an optimizer reads and changes as it would the variable.

    Keras 3.15 makes a gradient of rows dense, and changes a variable and its state as a whole. On
    TensorFlow.

    Args:
        variable: A variable of Keras or TensorFlow (N, ...).
        rows: (n,) integers, all different.
    """

    def __init__(self, variable: Any, rows: Any):
        self.variable = variable.value if isinstance(variable, keras.Variable) else variable
        self.rows = rows
        self.dtype = self.variable.dtype
        self.shape = (None, *self.variable.shape[1:])

    def __tf_tensor__(self, dtype=None, name=None):
        import tensorflow as tf

        del dtype, name
        return tf.gather(self.variable, self.rows)

    def __mul__(self, factor):
        return ops.convert_to_tensor(self) * factor

    __rmul__ = __mul__

    def assign(self, value):
        """Set the rows."""
        self.variable.scatter_update(self._slices(value))

    def assign_add(self, value):
        """Add to the rows."""
        self.variable.scatter_add(self._slices(value))

    def assign_sub(self, value):
        """Subtract from the rows."""
        self.variable.scatter_sub(self._slices(value))

    def _slices(self, value):
        import tensorflow as tf

        return tf.IndexedSlices(ops.convert_to_tensor(value), self.rows)


def of_rows(optimizer: Any, index: int, rows: Any) -> Any:
    """Return an optimizer whose state of one of its variables is that of these rows.

    Keras 3.15: each class of optimizers keeps its state in lists of its own, by the index of the
    variable.
    """
    attributes = dict(vars(optimizer))
    count = len(trained_by(optimizer))
    for name, slots in vars(optimizer).items():
        is_state = isinstance(slots, list) and len(slots) == count
        if is_state and isinstance(slots[index], keras.Variable):
            attributes[name] = {index: VariableRows(slots[index], rows)}

    def index_of(variable: Any) -> int:
        return index

    copied = object.__new__(type(optimizer))
    vars(copied).update(attributes, _get_variable_index=index_of)
    return copied


class WholeGradients:
    """Mixed into a Keras optimizer: calls `clipped(gradients)` with the gradients of the global
    batch.

    Keras 3.15 clips before it sums over replicas, and its weight decay goes at the base rate, where
    `update_step` knows the variable's own.
    """

    def _apply_weight_decay(self, variables):
        del variables

    def _all_reduce_sum_gradients(self, grads_and_vars):
        import tensorflow as tf

        pairs = list(grads_and_vars)
        # All replicas sample the same rows, so that their values add up.
        of_rows = {}
        for index, (gradient, variable) in enumerate(pairs):
            if isinstance(gradient, tf.IndexedSlices) and self.has_sampled_rows(variable):
                of_rows[index] = gradient
                pairs[index] = gradient.values, variable
        reduced = super()._all_reduce_sum_gradients(pairs)  # type: ignore[misc]
        clipped = self.clipped([gradient for gradient, _ in reduced])
        for index, gradient in of_rows.items():
            clipped[index] = tf.IndexedSlices(
                clipped[index], gradient.indices, gradient.dense_shape
            )
        return list(zip(clipped, [variable for _, variable in reduced], strict=True))

    def _clip_gradients(self, grads):
        # Elsewhere than on TensorFlow gradients are of the global batch already, and the hook above
        # is not called.
        grads = super()._clip_gradients(grads)  # type: ignore[misc]
        return grads if keras.backend.backend() == "tensorflow" else self.clipped(grads)

    def clipped(self, grads: list) -> list:
        """Return the gradients, some of which may be None, as they are applied."""
        return grads

    def has_sampled_rows(self, variable: Any) -> bool:
        """Whether steps use sampled rows of a variable alone, each once and the same on all
        replicas."""
        del variable
        return False


def _dividing(name: str) -> Callable[..., Any]:
    """Return a method of `InterruptibleModel` that takes a batch, and divides it among the
    replicas."""
    method = getattr(InterruptibleModel, name)
    signature = inspect.signature(method)

    @functools.wraps(method)
    def entrance(self, *args, **kwargs):
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        given = ("x", "y", "sample_weight")
        names = [argument for argument in given if arguments.get(argument) is not None]
        batch = {argument: arguments[argument] for argument in names}
        shares = _shares(self, batch)
        result = method(self, **{**arguments, **shares})
        if shares is batch or name == "predict_on_batch":
            return result
        # Keras's are the mean over replicas, however many rows each has.
        logs = {key: float(value) for key, value in self.get_metrics_result().items()}
        return logs if isinstance(result, dict) else self._flatten_metrics_in_order(logs)

    return entrance


def _shares(model: Any, batch: dict) -> dict:
    """Return a batch as `fit` gives it to the replicas of a model: each has some of the rows."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return batch
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensors(batch)
    return next(iter(strategy.experimental_distribute_dataset(batches)))


class SharedBatchModel(InterruptibleModel):
    """A model whose methods `..._on_batch` divide the batch among replicas, as `fit` does.

    Keras 3.15 gives each replica of a strategy the whole batch.
    """

    train_on_batch = _dividing("train_on_batch")
    test_on_batch = _dividing("test_on_batch")
    predict_on_batch = _dividing("predict_on_batch")

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if data_batch is not None:
            strategy: Any = self.distribute_strategy
            data_batch = tree.map_structure(
                lambda x: strategy.experimental_local_results(x)[0], data_batch
            )
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)


class SeveralWorkersModel(SharedBatchModel):
    """A model whose `fit` and `evaluate` also run on several workers; elsewhere it is an ordinary
    one.

    Keras 3.15 builds a model from the mean of the workers' batches, which may have unequal shapes.
    It averages the metrics of a step along an axis that scalars do not have. Here a model is built
    from a worker's own batch, and the metrics of a step are vectors of one element.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None and _several(self):
            strategy: Any = self.distribute_strategy
            for _, _, batches in iterator:
                data_batch = tree.map_structure(
                    lambda x: strategy.experimental_local_results(x)[0], next(batches)
                )
                break
            iterator = None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Keras's metrics of a step, which can be averaged over workers."""
        metrics = super().compute_metrics(x, y, y_pred, sample_weight)
        return (
            tree.map_structure(lambda value: ops.reshape(value, (-1,)), metrics)
            if _several(self)
            else metrics
        )


def multi_worker_strategy() -> Any:
    """Make a `tf.distribute.MultiWorkerMirroredStrategy` by TF_CONFIG, before TensorFlow does
    anything else.

    TensorFlow 2.21: the first values of a variable are those of worker 0, and integers of less than
    32 bits, as moments' random projections are, cannot be sent. Here they are sent as int32.

    Example:
        >>> strategy = multi_worker_strategy()  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     learner = tfdml.models.MetricLearner(embedder, objectives)
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


def with_device(x: Any) -> Any:
    """Return a tensor that replicas can gather.

    TensorFlow 2.21: several workers gather to the device of the tensor, and an argument of a traced
    function has none.
    """
    import tensorflow as tf

    return tf.identity(x)


def bound_waiting(meeting_seconds: float, silence_seconds: float) -> None:
    """Bound how long TensorFlow waits for the other workers of TF_CONFIG. Call it before it does
    anything else.

    TensorFlow 2.21: a strategy waits for an hour, and takes no other time.

    Args:
        meeting_seconds: How long workers wait for each other at the start.
        silence_seconds: After how long a worker that is not heard of is lost.
    """
    import tensorflow as tf
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.distribute import multi_worker_util
    from tensorflow.python.eager import context

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    jobs = []
    for name in ("chief", "worker"):
        if name in cluster.jobs:
            tasks = cluster.num_tasks(name)
            jobs.append(coordination_config_pb2.CoordinatedJob(name=name, num_tasks=tasks))
    leader = multi_worker_util.coordination_leader(cluster)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=int(1000 * meeting_seconds),
        heartbeat_timeout_in_ms=int(1000 * silence_seconds),
        coordinated_jobs=jobs,
    )


def sum_gradients_in_order() -> None:
    """Sum the gradients of a tensor in the order of its readers, in this process from now on.

    TensorFlow 2.21: `AddN` begins with the gradient whose memory is free, which depends on the
    order of the operations before. That order differs between processes, and changes after some 100
    steps, when TensorFlow knows which operations are cheap. The last bit of a sum of three or more
    changes with it.
    """
    import tensorflow as tf
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    def aggregate(gradients):
        dense = all(isinstance(one, tf.Tensor) and one.dtype.is_floating for one in gradients)
        if len(gradients) < 3 or not dense:
            return backprop._aggregate_grads(gradients)
        return tf.reduce_sum(tf.stack(gradients), axis=0)

    pywrap_tfe.TFE_Py_RegisterVSpace(backprop._default_vspace._replace(aggregate_fn=aggregate))


def frozen(function: Any) -> Any:
    """Return a concrete function with its variables as constants.

    TensorFlow 2.21: the only way to it is private.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    return convert_variables_to_constants_v2(function)


def gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """Return the gradient of a scalar function at x, a tensor or a list of tensors, on the backend
    in use.

    Keras 3.15: there is no operation for it.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)(x)
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


def litert_schema() -> Any:
    """Return the classes of a .tflite file's parts.

    TensorFlow 2.21: `tf.lite` does not show them.
    """
    from tensorflow.lite.python import schema_py_generated

    return schema_py_generated


@contextlib.contextmanager
def own_symbols_first() -> Iterator[None]:
    """Enter a block in which a library that is imported finds its own symbols before those of
    TensorFlow.

    TensorFlow 2.21 makes the symbols of its BoringSSL global. A library with an OpenSSL of its own
    that is imported later, as psycopg is, calls into both, and the process ends at the first
    certificate. An allocator of `LD_PRELOAD` does not go together with this, and the order is left
    as it is there.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        yield
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
