"""Training in two phases: steps of the embedder, and between them steps of what objectives learn about its state."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
from keras import ops

from tfdml.objectives.base import restore

EMBEDDER, STATISTICS = "embedder", "statistics"


@keras.saving.register_keras_serializable("tfdml")
class StepsOfBothPhases(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that counts the steps of both phases, where the optimiser that follows it counts its own alone.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.
    """

    def __init__(self, schedule):
        self.schedule = restore(schedule)
        self.iterations: Any = None

    def __call__(self, step):
        """The rate at the present step of the `AlternatingOptimizer`."""
        return self.schedule(step if self.iterations is None else self.iterations)

    def get_config(self):
        """The arguments that make this schedule anew."""
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}


@keras.saving.register_keras_serializable("tfdml")
class AlternatingOptimizer(keras.optimizers.Optimizer):
    """One optimiser for each phase, with its own moments and step count, as if the other phase's steps were not there.

    Momentum and weight decay move a variable whenever its optimiser makes a step, even if its gradient is 0. Here a
    step touches the variables of its phase alone. `iterations` counts the steps of both phases, and schedules go by it.
    A `MetricLearner` with an objective that has a statistics phase wraps the optimiser it is compiled with in this one;
    give it one yourself for different optimisers:

        learner.compile(AlternatingOptimizer(keras.optimizers.Adam(1e-5), keras.optimizers.Adam(1e-3)))

    Args:
        embedder: The optimiser of everything but the objectives' `statistics_variables`, as `compile` takes it.
        statistics: The optimiser of those; by default another like `embedder`.
        name: Its name.

    Raises:
        ValueError: An optimiser accumulates gradients over steps.
    """

    def __init__(self, embedder, statistics=None, name="alternating_optimizer"):
        super().__init__(learning_rate=0.0, name=name)
        self.embedder_optimizer = keras.optimizers.get(embedder)
        if statistics is None:
            statistics = type(self.embedder_optimizer).from_config(self.embedder_optimizer.get_config())
        self.statistics_optimizer = keras.optimizers.get(statistics)
        self.phase = EMBEDDER
        self.in_statistics = _never
        for optimizer in (self.embedder_optimizer, self.statistics_optimizer):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if inner.gradient_accumulation_steps:
                raise ValueError("gradients cannot be accumulated over steps of alternating phases")
            schedule = inner._learning_rate
            if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
                if not isinstance(schedule, StepsOfBothPhases):
                    schedule = StepsOfBothPhases(schedule)
                    inner.learning_rate = schedule
                schedule.iterations = self._iterations

    @property
    def current(self):
        """The optimiser of the present phase."""
        return self.statistics_optimizer if self.phase == STATISTICS else self.embedder_optimizer

    @property
    def variables(self):
        """Its own, then those of both optimisers."""
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
        """Create the slots of both optimisers, each for its own of the variables."""
        optimizers = ((self.embedder_optimizer, False), (self.statistics_optimizer, True))
        for optimizer, statistics in optimizers:
            if not optimizer.built:
                optimizer.build([v for v in variables if self.in_statistics(v) == statistics])
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        """Update the variables of the present phase; the gradients of the others are ignored."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        statistics = self.phase == STATISTICS
        chosen = [(g, v) for g, v in zip(grads, variables, strict=True) if self.in_statistics(v) == statistics]
        self.current.apply([g for g, _ in chosen], [v for _, v in chosen])
        self._iterations.assign_add(1)

    def scale_loss(self, loss):
        """The loss as the present phase's optimiser scales it, in mixed precision."""
        return self.current.scale_loss(loss)

    def finalize_variable_values(self, var_list):
        """What the optimisers do at the end of training, such as to set averaged weights."""
        del var_list
        for optimizer in (self.embedder_optimizer, self.statistics_optimizer):
            optimizer.finalize_variable_values(optimizer._trainable_variables)

    def save_own_variables(self, store):
        """Save the step count; Keras saves the two optimisers as parts of this one."""
        store["iterations"] = ops.convert_to_numpy(self._iterations)

    def load_own_variables(self, store):
        """Load the step count."""
        self._iterations.assign(store["iterations"])

    def get_config(self):
        """The arguments that make this optimiser anew."""
        return {
            "name": self.name,
            "embedder": keras.saving.serialize_keras_object(self.embedder_optimizer),
            "statistics": keras.saving.serialize_keras_object(self.statistics_optimizer),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The optimiser that `get_config` describes."""
        return cls(restore(config["embedder"]), restore(config["statistics"]), config["name"])


def _never(variable) -> bool:
    del variable
    return False


class _EmbedderLoss(keras.metrics.Mean):
    """The mean loss over the steps of the embedder."""

    muted = False

    def update_state(self, values, sample_weight=None):
        if not self.muted:
            super().update_state(values, sample_weight=sample_weight)


class AlternatingModel(keras.Model):
    """A model with `objectives` that trains in turn the embedder and what the objectives learn about it.

    Of every k + 1 steps, the first is the embedder's and k are those of the objectives' `statistics_variables`, each on
    a batch of its own, with k their `statistics_steps`. Which one is due follows from `optimizer.iterations`, so that a
    resumed run goes on where it was. Each phase is a compiled function of its own, so that the one of the statistics
    has no backward pass through the embedder. Without such objectives it trains as any Keras model.

    A subclass asks `in_statistics_phase` in its `call` and `compute_loss`.
    """

    objectives: list
    train_function: Any
    phase = EMBEDDER

    @property
    def statistics_steps(self) -> int:
        """k; 0 where no objective has a statistics phase."""
        return max((objective.statistics_steps for objective in self.objectives), default=0)

    @property
    def statistics_variables(self) -> list:
        """The variables that the statistics phase trains."""
        return [variable for objective in self.objectives for variable in objective.statistics_variables]

    def in_statistics_phase(self, training) -> bool:
        """Whether this is a training step of the statistics."""
        return bool(training) and self.phase == STATISTICS

    def compile(self, optimizer="rmsprop", **options):
        """As in Keras; an optimiser for both phases becomes one for each, see `AlternatingOptimizer`.

        Raises:
            ValueError: An option does not go with alternating phases.
        """
        if self.statistics_steps:
            if options.get("steps_per_execution", 1) != 1:
                raise ValueError("steps_per_execution must be 1 where an objective has a statistics phase")
            optimizer = self._alternating(keras.optimizers.get(optimizer), options)
        super().compile(optimizer=optimizer, **options)
        if self.statistics_steps:
            # Untracked, as Keras keeps its own, which this one replaces: a built model takes no new state.
            object.__setattr__(self, "_loss_tracker", _EmbedderLoss(name="loss"))

    def _alternating(self, optimizer, options: dict) -> AlternatingOptimizer:
        if not isinstance(optimizer, AlternatingOptimizer):
            optimizer = AlternatingOptimizer(optimizer)
        optimizer.in_statistics = self._trains_in_statistics
        half = self.dtype_policy.name == "mixed_float16"
        if half and options.get("auto_scale_loss", True):
            if keras.backend.backend() == "jax":
                raise ValueError("mixed_float16 is not supported with alternating phases on JAX: use mixed_bfloat16")
            inner = optimizer.embedder_optimizer
            if not isinstance(inner, keras.optimizers.LossScaleOptimizer):
                optimizer.embedder_optimizer = keras.optimizers.LossScaleOptimizer(inner)
        # What the statistics learn is float32: Keras must not scale that phase too.
        options["auto_scale_loss"] = False
        return optimizer

    def _trains_in_statistics(self, variable) -> bool:
        # TensorFlow's optimisers see their own variables as well as Keras's.
        return any(variable is own or variable is own._value for own in self.statistics_variables)

    def compile_from_config(self, config):
        """Compile a loaded model as it was."""
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config)
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, force=False):
        """Keras's hook: what runs one step."""
        if not self.statistics_steps:
            super().make_train_function(force)
            return
        if self.train_function is None or force:
            functions = {}
            for phase in (EMBEDDER, STATISTICS):
                # JAX compiles equal methods once; as two objects they are not equal.
                self.__dict__["train_step"] = functools.partial(self.train_step)
                super().make_train_function(force=True)
                functions[phase] = self.train_function
                del self.__dict__["train_step"]
            self.train_function = self._one_step_of(functions)
        self._steps_taken = int(ops.convert_to_numpy(self.optimizer.iterations))

    def _one_step_of(self, functions: dict):
        def step(*args):
            phase = STATISTICS if self._steps_taken % (self.statistics_steps + 1) else EMBEDDER
            with self._in(phase):
                result = functions[phase](*args)
            self._steps_taken += 1
            return result

        return step

    @contextlib.contextmanager
    def _in(self, phase: str):
        self._set_phase(phase)
        try:
            yield
        finally:
            self._set_phase(EMBEDDER)

    def _set_phase(self, phase: str) -> None:
        self.phase = self.optimizer.phase = phase
        self._loss_tracker.muted = phase == STATISTICS
