"""Training in two phases: steps of the embedder, and between them steps of what objectives learn about it.

`alternating_optimizer` prepares what `MetricLearner.compile` is given, and `AlternatingFunction` runs the steps. A step
itself is `MetricLearner.train_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from tfdml.saving import restore
from tfdml.workarounds import schedule_of, trained_by

EMBEDDER, STATISTICS = "embedder", "statistics"


class EmbedderLoss(keras.metrics.Mean):
    """The mean loss over the steps of the embedder."""

    muted = False

    def update_state(self, values, sample_weight=None):
        """Count a loss, unless it is that of the statistics."""
        if not self.muted:
            super().update_state(values, sample_weight=sample_weight)


class AlternatingFunction:
    """A Keras train function that runs, of every k + 1 steps, first one of the embedder, then k of the statistics.

    Each phase has a compiled function, so that the one of the statistics has no backward pass through the embedder.

    Args:
        learner: A compiled `MetricLearner` with a statistics phase.
        functions: The compiled step of each phase, by its name.
    """

    def __init__(self, learner: Any, functions: dict[str, Callable]):
        self.learner, self.functions, self.steps_taken = learner, functions, 0

    def __call__(self, *args):
        """Run one step."""
        phase = STATISTICS if self.steps_taken % (self.learner.statistics_steps + 1) else EMBEDDER
        with self.learner.in_phase(phase):
            result = self.functions[phase](*args)
        self.steps_taken += 1
        return result

    def read_step(self) -> None:
        """Continues at the optimizer's step, as after a checkpoint is restored."""
        self.steps_taken = int(ops.convert_to_numpy(self.learner.optimizer.iterations))


def constants(function: Callable[[], dict], variables: Iterable) -> dict:
    """Return the tensors that `function()` returns, without a gradient; what it changes of the variables is dropped."""
    present = [(variable, variable.value) for variable in variables]
    with keras.StatelessScope(present, initialize_variables=False):
        found = function()
    return {name: ops.stop_gradient(value) for name, value in found.items()}


def alternating_optimizer(learner: Any, optimizer: Any, options: dict) -> AlternatingOptimizer:
    """Return an optimizer for both phases of a learner, from what `compile` is given.

    Args:
        learner: A `MetricLearner` with a statistics phase.
        optimizer: As `compile` takes it; one that does not alternate yet becomes one for each phase.
        options: The other arguments of `compile`; changed in place, so that Keras leaves the optimizer as it is.

    Raises:
        ValueError: An option does not go with alternating phases.
    """
    if options.get("steps_per_execution", 1) != 1:
        raise ValueError("steps_per_execution must be 1 where an objective has a statistics phase")
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, AlternatingOptimizer):
        optimizer = AlternatingOptimizer(optimizer)

    def in_statistics(variable) -> bool:
        # TensorFlow's optimizers see their own variables as well as Keras's.
        return any(variable is own or variable is own.value for own in learner.statistics_variables)

    optimizer.in_statistics = in_statistics
    if learner.dtype_policy.name == "mixed_float16" and options.get("auto_scale_loss", True):
        if keras.backend.backend() == "jax":
            raise ValueError("mixed_float16 is not supported with alternating phases on JAX: use mixed_bfloat16")
        inner = optimizer.embedder_optimizer
        if not isinstance(inner, keras.optimizers.LossScaleOptimizer):
            optimizer.embedder_optimizer = keras.optimizers.LossScaleOptimizer(inner)
    # What the statistics learn is float32: Keras must not scale that phase too.
    options["auto_scale_loss"] = False
    return optimizer


@keras.saving.register_keras_serializable("tfdml")
class GlobalStepSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that counts the steps of both phases, where the optimizer that follows it counts its own alone.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.
    """

    def __init__(self, schedule):
        self.schedule = restore(schedule)
        self.iterations: Any = None

    def __call__(self, step):
        """Return the rate at the present step of the `AlternatingOptimizer`."""
        return self.schedule(step if self.iterations is None else self.iterations)

    def get_config(self):
        """Return the arguments."""
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}


@keras.saving.register_keras_serializable("tfdml")
class AlternatingOptimizer(keras.optimizers.Optimizer):
    """One optimizer for each phase, with its own moments and step count, as if the other phase's steps were not there.

    Momentum and weight decay move a variable whenever its optimizer makes a step, even if its gradient is 0. Here a
    step touches the variables of its phase alone. `iterations` counts the steps of both phases, and schedules go by it.
    A `MetricLearner` with an objective that has a statistics phase wraps the optimizer it is compiled with in this one;
    give it one yourself for different optimizers:

        learner.compile(AlternatingOptimizer(keras.optimizers.Adam(1e-5), keras.optimizers.Adam(1e-3)))

    Args:
        embedder: The optimizer of everything but the objectives' `statistics_variables`, as `compile` takes it.
        statistics: The optimizer of those; by default another like `embedder`.
        name: Its name.

    Raises:
        ValueError: An optimizer accumulates gradients over steps.
    """

    def __init__(self, embedder, statistics=None, name="alternating_optimizer"):
        super().__init__(learning_rate=0.0, name=name)
        self.embedder_optimizer = keras.optimizers.get(embedder)
        if statistics is None:
            statistics = type(self.embedder_optimizer).from_config(self.embedder_optimizer.get_config())
        self.statistics_optimizer = keras.optimizers.get(statistics)
        self.phase = EMBEDDER
        self.in_statistics = lambda variable: False
        for optimizer in (self.embedder_optimizer, self.statistics_optimizer):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if inner.gradient_accumulation_steps:
                raise ValueError("gradients cannot be accumulated over steps of alternating phases")
            schedule = schedule_of(inner)
            if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
                if not isinstance(schedule, GlobalStepSchedule):
                    schedule = GlobalStepSchedule(schedule)
                    inner.learning_rate = schedule
                schedule.iterations = self.iterations

    @property
    def current(self):
        """The optimizer of the present phase."""
        return self.statistics_optimizer if self.phase == STATISTICS else self.embedder_optimizer

    @property
    def variables(self):
        """Its own, then those of both optimizers."""
        return [*super().variables, *self.embedder_optimizer.variables, *self.statistics_optimizer.variables]

    @property
    def learning_rate(self):
        """The embedder's; setting it changes that of the statistics in proportion."""
        return self.embedder_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        old = float(ops.convert_to_numpy(self.learning_rate))
        other = float(ops.convert_to_numpy(self.statistics_optimizer.learning_rate))
        self.embedder_optimizer.learning_rate = value
        self.statistics_optimizer.learning_rate = other * float(value) / old if old else value

    def build(self, variables):
        """Create the slots of both optimizers, each for its own of the variables."""
        optimizers = ((self.embedder_optimizer, False), (self.statistics_optimizer, True))
        for optimizer, statistics in optimizers:
            if not optimizer.built:
                optimizer.build([v for v in variables if self.in_statistics(v) == statistics])
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        """Update the variables of the present phase; the gradients of the others are ignored."""
        variables = list(trained_by(self) if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        statistics = self.phase == STATISTICS
        chosen = [(g, v) for g, v in zip(grads, variables, strict=True) if self.in_statistics(v) == statistics]
        self.current.apply([g for g, _ in chosen], [v for _, v in chosen])
        self.iterations.assign_add(1)

    def scale_loss(self, loss):
        """Return the loss as the present phase's optimizer scales it, in mixed precision."""
        return self.current.scale_loss(loss)

    def finalize_variable_values(self, var_list):
        """Do what the optimizers do at the end of training, such as to set averaged weights."""
        for optimizer in (self.embedder_optimizer, self.statistics_optimizer):
            optimizer.finalize_variable_values(trained_by(optimizer))

    def save_own_variables(self, store):
        """Save the step count; Keras saves the two optimizers as parts of this one."""
        store["iterations"] = ops.convert_to_numpy(self.iterations)

    def load_own_variables(self, store):
        """Load the step count."""
        self.iterations.assign(store["iterations"])

    def get_config(self):
        """Return the arguments."""
        return {
            "name": self.name,
            "embedder": keras.saving.serialize_keras_object(self.embedder_optimizer),
            "statistics": keras.saving.serialize_keras_object(self.statistics_optimizer),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the optimizer that `get_config` describes."""
        return cls(restore(config["embedder"]), restore(config["statistics"]), config["name"])
