"""Optimisers with a learning rate per part of the learner, coupled weight decay and clipping of the global gradient."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.errors import UserError
from tfdml.models.alternating_optimizer import AlternatingOptimizer
from tfdml.training.pytorch_optimizers import PyTorchAdam, PyTorchAdamW, PyTorchRMSprop, PyTorchSGD

PARTS = ("backbone", "projection", "objectives")


class _PartRates:
    """Mixed into a Keras optimiser: scales the rate of each variable, adds coupled weight decay, clips globally.

    A Keras optimiser has one learning rate. The factors are looked up by the variable's index, so they work with every
    backend and under a distribution strategy.
    """

    def configure(self, factors: dict[int, float], coupled_decay: float, global_norm: float | None) -> None:
        """Set what is applied in each update; call it after `build`."""
        self._tfdml_factors = dict(factors)
        self._tfdml_decay = float(coupled_decay)
        self._tfdml_norm = global_norm

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update, at its part's own rate."""
        if self._tfdml_decay:
            gradient = gradient + ops.cast(self._tfdml_decay, variable.dtype) * ops.cast(variable, gradient.dtype)
        factor = self._tfdml_factors.get(self._get_variable_index(variable), 1.0)  # type: ignore[attr-defined]
        super().update_step(gradient, variable, learning_rate * factor)  # type: ignore[misc]

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # Keras clips before it sums over replicas; the norm that counts is that of the sum.
        reduced = super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return list(zip(self._globally_clipped([g for g, _ in reduced]), [v for _, v in reduced], strict=True))

    def _clip_gradients(self, grads):
        # Elsewhere than on TensorFlow gradients are of the global batch already, and the hook above is not called.
        grads = super()._clip_gradients(grads)  # type: ignore[misc]
        return grads if keras.backend.backend() == "tensorflow" else self._globally_clipped(grads)

    def _globally_clipped(self, grads: list) -> list:
        if self._tfdml_norm is None:
            return grads
        total = sum(ops.sum(ops.square(ops.cast(g, "float32"))) for g in grads if g is not None)
        scale = self._tfdml_norm / ops.maximum(ops.sqrt(total), self._tfdml_norm)
        return [g if g is None else g * ops.cast(scale, g.dtype) for g in grads]


class PartAdam(_PartRates, keras.optimizers.Adam):
    """Adam with a rate per part."""


class PartAdamW(_PartRates, keras.optimizers.AdamW):
    """AdamW with a rate per part; its decoupled decay uses the base rate."""


class PartSGD(_PartRates, keras.optimizers.SGD):
    """SGD with a rate per part."""


class PartRMSprop(_PartRates, keras.optimizers.RMSprop):
    """RMSprop with a rate per part."""


class PartPyTorchAdam(_PartRates, PyTorchAdam):
    """PyTorch's Adam with a rate per part."""


class PartPyTorchAdamW(_PartRates, PyTorchAdamW):
    """PyTorch's AdamW with a rate per part; its decoupled decay uses the base rate."""


class PartPyTorchSGD(_PartRates, PyTorchSGD):
    """PyTorch's SGD with a rate per part."""


class PartPyTorchRMSprop(_PartRates, PyTorchRMSprop):
    """PyTorch's RMSprop with a rate per part."""


_CLASSES: dict[str, dict[str, type]] = {
    "keras": {"adam": PartAdam, "adamw": PartAdamW, "sgd": PartSGD, "rmsprop": PartRMSprop},
    "pytorch": {
        "adam": PartPyTorchAdam,
        "adamw": PartPyTorchAdamW,
        "sgd": PartPyTorchSGD,
        "rmsprop": PartPyTorchRMSprop,
    },
}
FORMS = tuple(_CLASSES)
OPTIMIZERS = tuple(_CLASSES["keras"])


def step_schedule(learning_rate: float, drop_steps: list[int], factor: float):
    """A rate that is multiplied by `factor` at each of the steps given; a plain number when there is none.

    Args:
        learning_rate: The rate at step 0.
        drop_steps: Ascending optimiser steps; from each on, the rate is lower.
        factor: What each drop multiplies by.

    Example:
        >>> schedule = step_schedule(1e-2, [640], 0.1)
        >>> float(schedule(639)), float(schedule(640))
        (0.01, 0.001)
    """
    if not drop_steps:
        return learning_rate
    values = [learning_rate * factor**i for i in range(len(drop_steps) + 1)]
    # Keras keeps the old value at the boundary itself.
    return keras.optimizers.schedules.PiecewiseConstantDecay([step - 1 for step in drop_steps], values)


def build_optimizer(
    name: str,
    learner,
    learning_rate,
    learning_rates: dict[str, float] | None = None,
    weight_decay: float = 0.0,
    epsilon: float | None = None,
    momentum: float = 0.9,
    clip_norm: float = 0.0,
    form: str = "keras",
):
    """An optimiser, built on the learner's variables, with a rate per part; one for each phase if there are two.

    Args:
        name: One of `OPTIMIZERS`.
        learner: A built `MetricLearner`.
        learning_rate: A number or schedule, the base rate.
        learning_rates: The rates of `PARTS` that have one of their own, at the first step; where the base rate is a
            schedule they follow it in proportion.
        weight_decay: Coupled (added to the gradient, as in PyTorch's Adam) for adam, sgd and rmsprop; decoupled for
            adamw.
        epsilon: Adam's and RMSprop's; None for Keras's default.
        momentum: SGD's.
        clip_norm: The largest norm of the whole gradient over all replicas; 0 for none.
        form: `"keras"` or `"pytorch"`: whose convention epsilon and momentum follow; the formulas stand side by side in
            `tfdml.training.pytorch_optimizers`.

    Raises:
        UserError: The name, the form or a part is unknown, or the base rate is 0.

    Example:
        >>> rates = {"projection": 1e-2, "objectives": 1e-2}
        >>> learner.compile(build_optimizer("adam", learner, 3e-4, rates))
    """
    if name not in OPTIMIZERS:
        raise UserError(f"--optimizer={name!r}: known are {', '.join(OPTIMIZERS)}")
    if form not in FORMS:
        raise UserError(f"--optimizer_form={form!r}: known are {', '.join(FORMS)}")
    own = {id(variable) for variable in learner.statistics_variables}
    factors = _factors(learning_rate, learning_rates or {})
    by_id = {id(variable): factors[part] for part, members in learner.parts().items() for variable in members}

    def build(variables):
        optimizer, coupled = _make(_CLASSES[form][name], learning_rate, weight_decay, epsilon, momentum)
        optimizer.build(variables)
        rates = {i: by_id[id(variable)] for i, variable in enumerate(variables) if id(variable) in by_id}
        optimizer.configure(rates, coupled, clip_norm or None)
        return optimizer

    embedder = build([variable for variable in learner.trainable_variables if id(variable) not in own])
    if not own:
        return embedder
    optimizer = AlternatingOptimizer(embedder, build([v for v in learner.trainable_variables if id(v) in own]))
    optimizer.in_statistics = lambda variable: id(variable) in own
    optimizer.build(learner.trainable_variables)
    return optimizer


def _factors(learning_rate, learning_rates: dict[str, float]) -> dict[str, float]:
    """What each part's rate is of the base rate."""
    unknown = sorted(set(learning_rates) - set(PARTS))
    if unknown:
        raise UserError(f"learning_rates: there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if isinstance(learning_rate, keras.optimizers.schedules.PiecewiseConstantDecay):
        base = learning_rate.values[0]
    elif isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        base = float(ops.convert_to_numpy(learning_rate(0)))
    else:
        base = float(learning_rate)
    if learning_rates and base <= 0:
        raise UserError(f"learning_rate must be positive where parts have rates of their own, not {base:g}")
    return {part: learning_rates[part] / base if part in learning_rates else 1.0 for part in PARTS}


def _make(cls: type, learning_rate, weight_decay: float, epsilon: float | None, momentum: float):
    """The optimiser, and the coupled weight decay that it leaves to its variables' steps."""
    if issubclass(cls, keras.optimizers.SGD):
        return cls(learning_rate, momentum=momentum), weight_decay
    extra = {} if epsilon is None else {"epsilon": epsilon}
    if issubclass(cls, keras.optimizers.AdamW):
        return cls(learning_rate, weight_decay=weight_decay, **extra), 0.0
    return cls(learning_rate, **extra), weight_decay
