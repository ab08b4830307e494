"""One optimiser for each of two phases: the steps of the embedder, and those of what objectives learn about it."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from typing_extensions import override

from tfdml.saving import restore

EMBEDDER, STATISTICS = "embedder", "statistics"


@keras.saving.register_keras_serializable("tfdml")
class GlobalStepSchedule(keras.optimizers.schedules.LearningRateSchedule):
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

    @override
    def get_config(self):
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
                if not isinstance(schedule, GlobalStepSchedule):
                    schedule = GlobalStepSchedule(schedule)
                    inner.learning_rate = schedule
                schedule.iterations = self._iterations
            # For `tfdml.training.optimizers.part_rates`. A function, as Keras would track a variable.
            inner.clock = lambda: self._iterations

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

    @override
    def get_config(self):
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
