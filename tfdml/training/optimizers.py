"""Optimizers with a rate per part of the learner, weight decay and clipping; schedules of rates.

Adam and AdamW are also here as PyTorch computes them, `pytorch_adam` and `pytorch_adamw`. With r the rate, t the step
from 1 and e epsilon:

| optimizer | Keras, TensorFlow and Caffe | PyTorch |
|---|---|---|
| Adam, AdamW | r sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + e) | r / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + e) |

PyTorch's epsilon is that of Kingma and Ba's algorithm 1; elsewhere it is the "epsilon hat" of their section 2, which
counts 1 / sqrt(1 - b2^t) times as much: 32 times in the first step. It does not show at 1e-8 and does at 0.01.
"""

import dataclasses
from collections.abc import Sequence

import keras
from keras import ops

from tfdml import workarounds
from tfdml.errors import UserError, check_choice

SCHEDULES = ("step", "cosine")


def step_schedule(learning_rate: float, drop_steps: list[int], factor: float):
    """Return a rate that is multiplied by `factor` at each of the steps given; a plain number when there is none.

    Args:
        learning_rate: The rate at step 0.
        drop_steps: Ascending optimizer steps; from each on, the rate is lower.
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


def rate_schedule(
    kind: str,
    learning_rate: float,
    total_steps: int,
    warm_up_steps: int = 0,
    drop_steps: list[int] | tuple[int, ...] = (),
    drop_factor: float = 0.1,
):
    """Return the base rate of a run: a number, or a Keras schedule.

    With w the steps of a warm-up, T those of the run, and u = (t - w) / (T - w):

        step     rate drop_factor^(drops at or before t)
        cosine   rate t / w up to w, then rate (1 + cos(pi u)) / 2     Loshchilov and Hutter, "SGDR", ICLR 2017, eq. 5

    Args:
        kind: One of `SCHEDULES`.
        learning_rate: The highest rate.
        total_steps: T, the steps of the whole run.
        warm_up_steps: w, the steps in which the rate of a cosine rises evenly from 0; 0 for none.
        drop_steps: For `"step"`, ascending steps of the run from each of which on the rate is lower.
        drop_factor: For `"step"`, what each drop multiplies by.

    Raises:
        UserError: The kind is unknown, or the warm-up leaves no step or is not that of a cosine.

    Example:
        >>> schedule = rate_schedule("cosine", 1.0, total_steps=110, warm_up_steps=10)
        >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    check_choice("`kind`", kind, SCHEDULES)
    if warm_up_steps and (kind != "cosine" or warm_up_steps >= total_steps):
        raise UserError(f"a warm-up of {warm_up_steps} steps needs a longer cosine, not {total_steps} steps of {kind}")
    if kind == "step":
        return step_schedule(learning_rate, list(drop_steps), drop_factor)
    length = max(total_steps - warm_up_steps, 1)
    if not warm_up_steps:
        return keras.optimizers.schedules.CosineDecay(learning_rate, length)
    return keras.optimizers.schedules.CosineDecay(0.0, length, warmup_target=learning_rate, warmup_steps=warm_up_steps)


@dataclasses.dataclass(frozen=True)
class PartSettings:
    """What an optimizer with `PartRates` does for each variable and part. Variables are known by their index.

    Args:
        factors: The rate of each variable as a multiple of the base rate; empty for the base rate.
        coupled_decay: Weight decay that is added to the gradient.
        decoupled_decay: Weight decay at the variable's own rate.
        norm: The largest norm of the gradient; None for any.
    """

    factors: Sequence[float] = ()
    coupled_decay: float = 0.0
    decoupled_decay: float = 0.0
    norm: float | None = None


class PartRates(workarounds.WholeGradients):
    """Mixed into a Keras optimizer: a rate and weight decay for each variable, clipping over replicas.

    A Keras optimizer has one learning rate. Settings of a variable are found by its index in the list that `build`
    takes, so that they work with every backend and under a distribution strategy, and can be saved with the optimizer.
    """

    #: Set it before `build`.
    part_settings = PartSettings()

    def get_config(self):
        """Return Keras's config, with the fields of `part_settings` as `part_rates`."""
        return {**super().get_config(), "part_rates": dataclasses.asdict(self.part_settings)}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the optimizer of `get_config`, not built yet."""
        config = dict(config)
        settings = PartSettings(**config.pop("part_rates", {}))
        optimizer = super().from_config(config, custom_objects)  # type: ignore[misc]
        optimizer.part_settings = settings
        return optimizer

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update, at its own rate."""
        index = workarounds.index_in(self, variable)
        coupled, decoupled = self.part_settings.coupled_decay, self.part_settings.decoupled_decay
        if coupled:
            gradient = gradient + ops.cast(coupled, variable.dtype) * ops.cast(variable, gradient.dtype)
        factors = self.part_settings.factors
        rate = learning_rate * factors[index] if factors else learning_rate
        if decoupled:
            self.assign_sub(variable, variable * ops.cast(rate * decoupled, variable.dtype))  # type: ignore[attr-defined]
        super().update_step(gradient, variable, rate)  # type: ignore[misc]

    def clipped(self, grads: list) -> list:
        """Return the gradients of the global batch, scaled so that their norm is not above the largest."""
        largest = self.part_settings.norm
        if largest is None:
            return grads
        squares = (ops.sum(ops.square(ops.cast(grad, "float32"))) for grad in grads if grad is not None)
        scale = largest / ops.maximum(ops.sqrt(sum(squares, ops.zeros(()))), largest)
        return [None if grad is None else grad * ops.cast(scale, grad.dtype) for grad in grads]


def _like(variable, value):
    """Return a value as a tensor of the variable's type; a schedule's rate has its own."""
    return ops.cast(ops.convert_to_tensor(value), variable.dtype)


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdam(keras.optimizers.Adam):
    """Adam as `torch.optim.Adam` computes it; see the module for what differs from Keras's.

    Args:
        learning_rate: A number or a schedule.
        epsilon: Added to the square root of the second moment after its correction.
        **arguments: Of `keras.optimizers.Adam`.
    """

    def __init__(self, learning_rate=0.001, *, epsilon=1e-8, **arguments):
        super().__init__(learning_rate=learning_rate, epsilon=epsilon, **arguments)
        if self.amsgrad:
            raise ValueError("amsgrad=True is of keras.optimizers.Adam alone")

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update."""
        gradient, rate = _like(variable, gradient), _like(variable, learning_rate)
        step = _like(variable, self.iterations + 1)
        index = workarounds.index_in(self, variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        self.assign_add(momentum, (1.0 - self.beta_1) * (gradient - momentum))
        self.assign_add(velocity, (1.0 - self.beta_2) * (ops.square(gradient) - velocity))
        first = 1.0 - ops.power(_like(variable, self.beta_1), step)
        second = 1.0 - ops.power(_like(variable, self.beta_2), step)
        self.assign_sub(variable, rate * momentum / (first * (ops.sqrt(velocity / second) + self.epsilon)))


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdamW(PyTorchAdam, keras.optimizers.AdamW):
    """AdamW as `torch.optim.AdamW` computes it; see the module for what differs from Keras's.

    Args:
        learning_rate: A number or a schedule.
        weight_decay: Of each step, times the rate; PyTorch's default.
        **arguments: Of `PyTorchAdam`.
    """

    def __init__(self, learning_rate=0.001, *, weight_decay=0.01, **arguments):
        super().__init__(learning_rate, weight_decay=weight_decay, **arguments)


PARTS = ("backbone", "projection", "objectives")


def _with_part_rates(base: type) -> type:
    """Return an optimizer with `PartRates`: of Adam `PartAdam`, as which it is saved."""
    cls = type(f"Part{base.__name__}", (PartRates, base), {})
    return keras.saving.register_keras_serializable("tfdml")(cls)


#: By name. The decay of AdamW, Lion and Muon is decoupled and goes at the rate of each part.
_CLASSES: dict[str, type] = {
    "adam": _with_part_rates(keras.optimizers.Adam),
    "adamw": _with_part_rates(keras.optimizers.AdamW),
    "sgd": _with_part_rates(keras.optimizers.SGD),
    "pytorch_adam": _with_part_rates(PyTorchAdam),
    "pytorch_adamw": _with_part_rates(PyTorchAdamW),
}
OPTIMIZERS = tuple(_CLASSES)


def build_optimizer(
    name: str,
    learner,
    learning_rate,
    learning_rates: dict[str, float] | None = None,
    weight_decay: float = 0.0,
    epsilon: float | None = None,
    momentum: float = 0.9,
    clip_norm: float = 0.0,
):
    """Return an optimizer, built on the learner's variables, with a rate per part.

    It is saved with the learner, with its rates and its state: `keras.saving.load_model` and `ModelCheckpoint` work.

    Args:
        name: One of `OPTIMIZERS`; `adam` and `pytorch_adam` differ by the formulas at the top of this module.
        learner: A `MetricLearner`, which is built if it is not.
        learning_rate: A number or schedule, the base rate.
        learning_rates: The rates of `PARTS`, or of `learner.parts()`, that have one of their own, at the first step, or
            at the end of a warm-up; where the base rate is a schedule they follow it in proportion.
        weight_decay: Coupled (added to the gradient, as in PyTorch's Adam) for adam and sgd; decoupled, at each
            variable's own rate, for adamw. 0 by default for all, whereas AdamW's own default is 0.004 in Keras and 0.01
            in PyTorch: a decay is part of the recipe that the caller states.
        epsilon: Adam's; None for its default: 1e-7 in Keras, 1e-8 in PyTorch.
        momentum: SGD's.
        clip_norm: The largest norm of the gradient over all replicas; 0 for none.

    Raises:
        UserError: The name or a part is unknown, or the base rate is 0.

    Example:
        >>> rates = {"projection": 1e-2, "objectives": 1e-2}
        >>> learner.compile(build_optimizer("adam", learner, 3e-4, rates))
    """
    check_choice("`name`", name, OPTIMIZERS)
    if not learner.built:
        learner.build(learner.view_shape)
    parts = learner.parts()
    factors = _factors(learning_rate, learning_rates or {}, (*PARTS, *parts))
    by_id = {id(variable): factors[part] for part, members in parts.items() for variable in members}
    variables = learner.trainable_variables
    options = {"momentum": momentum} if name == "sgd" else {}
    options |= {"epsilon": epsilon} if epsilon is not None and name != "sgd" else {}
    # Without Keras's weight decay: see `PartRates`.
    optimizer = _CLASSES[name](learning_rate, **options)
    decoupled = isinstance(optimizer, keras.optimizers.AdamW)
    optimizer.part_settings = PartSettings(
        factors=[by_id.get(id(variable), 1.0) for variable in variables],
        coupled_decay=0.0 if decoupled else weight_decay,
        decoupled_decay=weight_decay if decoupled else 0.0,
        norm=clip_norm or None,
    )
    optimizer.build(variables)
    return optimizer


def _factors(learning_rate, learning_rates: dict[str, float], parts: Sequence[str]) -> dict[str, float]:
    """Return what each part's rate is of the base rate."""
    unknown = sorted(set(learning_rates) - set(parts))
    if unknown:
        names = ", ".join(dict.fromkeys(parts))
        raise UserError(f"`learning_rates`: there is no part {unknown[0]!r}; the parts are {names}")
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        at_once = float(ops.convert_to_numpy(learning_rate(0)))
        base = getattr(learning_rate, "warmup_target", None) or at_once
    else:
        base = float(learning_rate)
    if learning_rates and base <= 0:
        raise UserError(f"`learning_rate` must be positive where parts have rates of their own, not {base:g}")
    # The backbones of two views share a rate, and so do their projections, unless they have their own.
    rates = {part: learning_rates.get(part, learning_rates.get(part.rpartition(" ")[2])) for part in parts}
    return {part: 1.0 if rate is None else rate / base for part, rate in rates.items()}
