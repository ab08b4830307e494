"""Training in two phases: steps of the embedder, and between them steps of what objectives learn about its state."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
from keras import ops

from tfdml import replicas
from tfdml.models.alternating_optimizer import EMBEDDER, STATISTICS, AlternatingOptimizer
from tfdml.models.learner import MetricLearner
from tfdml.objectives import WithStatistics
from tfdml.pairs import pairs_by_name


class _EmbedderLoss(keras.metrics.Mean):
    """The mean loss over the steps of the embedder."""

    muted = False

    def update_state(self, values, sample_weight=None):
        if not self.muted:
            super().update_state(values, sample_weight=sample_weight)


@keras.saving.register_keras_serializable("tfdml")
class AlternatingLearner(MetricLearner):
    """A `MetricLearner` that trains in turn the embedder and what the objectives learn about it.

    Of every k + 1 steps, the first is the embedder's. The other k train the objectives' `statistics_variables`, with k
    their `statistics_steps`. Each step has a batch of its own. The phase follows from `optimizer.iterations`, so that a
    resumed run continues with the same phase. Each phase is a compiled function of its own, so that the one of the
    statistics has no backward pass through the embedder.

    In a step of the statistics the embedder runs forward only, normalised as in training, and nothing of it changes,
    BatchNorm's moving statistics included; `loss` and the terms are reported over the embedder's steps.

    Args:
        embedder: See `MetricLearner`, as for the arguments that follow.
        objectives: At least one has a statistics phase, such as `RankMI`.

    Raises:
        ValueError: None has; two want different numbers of steps of their statistics; or as `MetricLearner`.
    """

    train_function: Any
    phase = EMBEDDER

    def __init__(self, embedder, objectives, name="metric_learner", **kwargs):
        super().__init__(embedder, objectives, name=name, **kwargs)
        steps = {objective.statistics_steps for objective in self._with_statistics}
        if len(steps) != 1:
            found = f"those of {sorted(steps)} steps cannot alternate together" if steps else "none of them has one"
            raise ValueError(f"objectives with different statistics_steps or without a statistics phase: {found}")

    @classmethod
    def suits(cls, objectives) -> bool:
        """Whether an objective has a statistics phase."""
        return any(isinstance(objective, WithStatistics) for objective in objectives)

    @property
    def _with_statistics(self) -> list:
        return [objective for objective in self.objectives if isinstance(objective, WithStatistics)]

    @property
    def statistics_steps(self) -> int:
        """The number of steps of the statistics for each step of the embedder."""
        return self._with_statistics[0].statistics_steps

    def _in_statistics_phase(self, training) -> bool:
        """Whether this is a training step of the statistics."""
        return bool(training) and self.phase == STATISTICS

    def compile(self, optimizer="rmsprop", loss=None, **options):
        """As in Keras; an optimiser for both phases becomes one for each, see `AlternatingOptimizer`.

        Raises:
            ValueError: An option does not go with alternating phases.
        """
        if options.get("steps_per_execution", 1) != 1:
            raise ValueError("steps_per_execution must be 1 where an objective has a statistics phase")
        super().compile(self._alternating(keras.optimizers.get(optimizer), options), loss, **options)
        # Untracked, as Keras keeps its own, which this one replaces: a built model takes no new state.
        object.__setattr__(self, "_loss_tracker", _EmbedderLoss(name="loss"))

    def call(self, images, training=None):
        """The representations of the images; in a step of the statistics as constants."""
        if not self._in_statistics_phase(training):
            return super().call(images, training=training)
        present = [(variable, variable.value) for variable in self.embedder.variables]
        # What the scope would change, such as BatchNorm's moving statistics, is dropped.
        with keras.StatelessScope(present, initialize_variables=False):
            representations = self.embedder.represent(images, training=True, detached=self._reads_detached)
        return {name: ops.stop_gradient(value) for name, value in representations.items()}

    def _with_those_of_objectives(self, representations, training):
        # Statistics are of what the embedder gives.
        if self._in_statistics_phase(training):
            return representations
        return super()._with_those_of_objectives(representations, training)

    def loss_of(self, representations, labels, training=True):
        """As of `MetricLearner`; in a step of the statistics, the loss of these over the global batch."""
        if not self._in_statistics_phase(training):
            return super().loss_of(representations, labels, training)
        self._track_distances(representations["embedding"], labels)
        names = sorted({name for objective in self._with_statistics for name in objective.reads})
        gathered, labels = {name: replicas.gather(representations[name]) for name in names}, replicas.gather(labels)
        pairs = pairs_by_name(gathered, labels)
        return sum(objective.statistics_step(pairs) for objective in self._with_statistics) / replicas.count()

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

    def evaluate(self, *args, return_dict=False, **kwargs):
        """As in Keras, without the metrics of steps of the statistics, as there are none in evaluation."""
        logs = super().evaluate(*args, return_dict=True, **kwargs)
        trackers = [tracker for o in self.objectives for tracker in getattr(o, "trackers", {}).values()]
        logs = {name: value for name, value in logs.items() if name not in {tracker.name for tracker in trackers}}
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def make_train_function(self, force=False):
        """Keras's hook: what runs one step."""
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
