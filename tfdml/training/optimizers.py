"""Optimizers with a rate per part of the learner, weight decay, clipping and averages; schedules of
rates.

Adam and AdamW are also here as PyTorch computes them, `pytorch_adam` and `pytorch_adamw`, where
Keras computes something else. With r the rate, t the step from 1 and e epsilon:

| optimizer | Keras, TensorFlow and Caffe | PyTorch |
|---|---|---|
| Adam, AdamW | r sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + e) | r / (1 - b1^t) m / (sqrt(v / (1 -
b2^t)) + e) |

PyTorch's epsilon is that of Kingma and Ba's algorithm 1; elsewhere it is the "epsilon hat" of their
section 2, which counts 1 / sqrt(1 - b2^t) times as much: 32 times in the first step. It does not
show at 1e-8 and does at 0.01.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from tfdml import workarounds
from tfdml.errors import UserError, check_choice
from tfdml.saving import restore
from tfdml.training.settings import OPTIMIZERS, SCHEDULES
from tfdml.workarounds import takes_decay


def step_schedule(learning_rate: float, drop_steps: list[int], factor: float):
    """Return a rate that is multiplied by `factor` at each of the steps given; a plain number when
    there is none.

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
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [step - 1 for step in drop_steps], values
    )


@keras.saving.register_keras_serializable("tfdml")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Raises the rate evenly over the first steps, and follows another schedule from there.

    With w the warm-up and s the schedule, at step t from 0:

        rate(t) = peak (t + 1) / w         for t < w
                  s(t - shift)             from there on

    Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2.

    Args:
        schedule: A number, or a `keras.optimizers.schedules.LearningRateSchedule`.
        steps: The warm-up w.
        peak: The rate at its end.
        shift: How many steps later than the run the schedule begins: the warm-up where it has its
            own length, as a cosine has, 0 where it goes by the steps of the run.

    Example:
        >>> schedule = WarmUp(0.1, steps=4, peak=0.1)
        >>> [round(float(schedule(step)), 3) for step in range(6)]
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    """

    def __init__(self, schedule, steps, peak, shift=0):
        self.schedule = restore(schedule)
        self.steps = int(steps)
        self.peak = float(peak)
        self.shift = int(shift)

    def __call__(self, step):
        """Return the rate at a step."""
        step = ops.cast(step, "float32")
        rising = self.peak * (step + 1.0) / self.steps
        later = ops.maximum(step - self.shift, 0.0)
        after = self.schedule(later) if callable(self.schedule) else self.schedule
        return ops.where(step < self.steps, rising, ops.cast(after, "float32"))

    def get_config(self):
        """Return the arguments."""
        schedule = self.schedule
        if callable(schedule):
            schedule = keras.saving.serialize_keras_object(schedule)
        return {"schedule": schedule, "steps": self.steps, "peak": self.peak, "shift": self.shift}


def rate_schedule(
    kind: str,
    learning_rate: float,
    total_steps: int,
    warm_up_steps: int = 0,
    drop_steps: list[int] | tuple[int, ...] = (),
    drop_factor: float = 0.1,
    final: float = 0.0,
):
    """Return the base rate of a run: a number, or a Keras schedule.

    After w warm-up steps of T in all, with f the final share and u = (t - w) / (T - w):

        step     rate drop_factor^(drops at or before t)
        cosine   rate (f + (1 - f) (1 + cos(pi u)) / 2)   Loshchilov, Hutter, "SGDR", 2017, eq. 5

    Args:
        kind: One of `SCHEDULES`.
        learning_rate: The highest rate.
        total_steps: T, the steps of the whole run.
        warm_up_steps: w, the steps in which the rate rises evenly; 0 for none.
        drop_steps: For `"step"`, ascending steps of the run from each of which on the rate is
            lower.
        drop_factor: For `"step"`, what each drop multiplies by.
        final: For `"cosine"`, f, which share of the rate is left at the end.

    Raises:
        UserError: The kind is unknown, or the warm-up leaves no step.

    Example:
        >>> schedule = rate_schedule("cosine", 1.0, total_steps=110, warm_up_steps=10)
        >>> [round(float(schedule(step)), 3) for step in (0, 9, 10, 60, 110)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    check_choice("kind", kind, SCHEDULES)
    if warm_up_steps and warm_up_steps >= total_steps:
        raise UserError(
            f"the warm-up of {warm_up_steps} steps leaves none of the {total_steps} of the run"
        )
    length = max(total_steps - warm_up_steps, 1)
    if kind == "step":
        schedule = step_schedule(learning_rate, list(drop_steps), drop_factor)
        shift = 0
    else:
        schedule = keras.optimizers.schedules.CosineDecay(learning_rate, length, alpha=final)
        shift = warm_up_steps
    return WarmUp(schedule, warm_up_steps, learning_rate, shift) if warm_up_steps else schedule


@dataclasses.dataclass(frozen=True)
class PartSettings:
    """What an optimizer with `PartRates` does for each variable and part. Variables are known by
    their index.

    Args:
        factors: The rate of each variable as a multiple of the base rate; empty for the base rate.
        coupled_decay: Weight decay that is added to the gradient.
        decoupled_decay: Weight decay at the variable's own rate.
        norm: The largest norm of the gradient; None for any.
        ema: The share of the old value in the average of each variable; 0 for no averages.
        row_sampled: The variables of which each step uses sampled rows alone.
        undecayed: The variables that take no weight decay.
    """

    factors: Sequence[float] = ()
    coupled_decay: float = 0.0
    decoupled_decay: float = 0.0
    norm: float | None = None
    ema: float = 0.0
    row_sampled: Sequence[int] = ()
    undecayed: Sequence[int] = ()


class PartRates(workarounds.WholeGradients):
    """Mixed into a Keras optimizer: a rate, weight decay and an average for each variable, clipping
    over replicas.

    A Keras optimizer has one learning rate. Settings of a variable are found by its index in the
    list that `build` takes, so that they work with every backend and under a distribution strategy,
    and can be saved with the optimizer.
    """

    #: Set it before `build`.
    part_settings = PartSettings()
    averages: Sequence[Any] = ()

    def build(self, variables):
        """Create the optimizer's state for these variables, their averages included."""
        if self.built:  # type: ignore[attr-defined]
            return
        super().build(variables)  # type: ignore[misc]
        if self.part_settings.ema:
            self.averages = [self.add_variable_from_reference(v, name="average") for v in variables]  # type: ignore[attr-defined]

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
        sampled = self.has_sampled_rows(variable)
        sampled_rows = getattr(gradient, "indices", None) if sampled else None
        if sampled_rows is not None:
            if self.averages:
                average = self.averages[index]
                # Averages of rows that are sampled later begin with the first step, too.
                ops.cond(self.iterations == 0, lambda: self.assign(average, variable), lambda: None)  # type: ignore[attr-defined]
            rows = workarounds.VariableRows(variable, sampled_rows)
            optimizer = workarounds.of_rows(self, index, sampled_rows)
            optimizer.update_step(gradient.values, rows, learning_rate)
            return
        coupled, decoupled = self._decays(index)
        if coupled:
            gradient = gradient + ops.cast(coupled, variable.dtype) * ops.cast(
                variable, gradient.dtype
            )
        factors = self.part_settings.factors
        rate = learning_rate * factors[index] if factors else learning_rate
        if decoupled:
            self.assign_sub(variable, variable * ops.cast(rate * decoupled, variable.dtype))  # type: ignore[attr-defined]
        super().update_step(gradient, variable, rate)  # type: ignore[misc]
        if self.averages:
            self._average(self.averages[index], variable)

    def _decays(self, index: int) -> tuple[float, float]:
        """Return the coupled and the decoupled weight decay of a variable."""
        settings = self.part_settings
        if index in settings.undecayed:
            return 0.0, 0.0
        return settings.coupled_decay, settings.decoupled_decay

    def has_sampled_rows(self, variable):
        """Whether a step uses sampled rows of a variable alone."""
        return workarounds.index_in(self, variable) in self.part_settings.row_sampled

    def _average(self, average, variable):
        # Early on the average follows fast: it must not keep what the weights were before training.
        step = ops.cast(self.iterations, "float32")  # type: ignore[attr-defined]
        kept = ops.minimum(self.part_settings.ema, (1.0 + step) / (10.0 + step))
        kept = ops.cast(ops.where(step > 0, kept, 0.0), variable.dtype)
        self.assign(average, kept * average + (1.0 - kept) * variable)  # type: ignore[attr-defined]

    def clipped(self, grads: list) -> list:
        """Return the gradients of the global batch, scaled so that their norm is not above the
        largest."""
        largest = self.part_settings.norm
        if largest is None:
            return grads
        squares = (
            ops.sum(ops.square(ops.cast(grad, "float32"))) for grad in grads if grad is not None
        )
        scale = largest / ops.maximum(ops.sqrt(sum(squares, ops.zeros(()))), largest)
        return [None if grad is None else grad * ops.cast(scale, grad.dtype) for grad in grads]


@contextlib.contextmanager
def averaged(learner) -> Iterator[None]:
    """Enter a block in which the learner has the averages of its weights, where its optimizer keeps
    them.

    With a share m, after step t from 0 a weight w has the average a:

        a_0 = w_0,    a_t = m_t a_(t-1) + (1 - m_t) w_t,    m_t = min(m, (1 + t) / (10 + t))

    Polyak and Juditsky, 1992; the shorter memory of the first steps as in TensorFlow's
    `ExponentialMovingAverage`. What is not trained, such as the statistics of BatchNorm, is as
    training left it.

    Args:
        learner: Compiled with an optimizer of `build_optimizer`.

    Example:
        >>> learner.compile(build_optimizer("adam", learner, 1e-3, ema=0.999))
        >>> history = learner.fit(batches, steps_per_epoch=2, verbose=0)
        >>> with averaged(learner):
        ...     learner.embedder.save("embedder.keras")
    """
    # It may be within Keras's LossScaleOptimizer.
    optimizer = getattr(learner.optimizer, "inner_optimizer", learner.optimizer)
    averages = getattr(optimizer, "averages", ())
    pairs: list[tuple] = []
    # Before the first step there are none.
    if averages and int(ops.convert_to_numpy(optimizer.iterations)):
        pairs = list(zip(workarounds.trained_by(optimizer), averages, strict=True))
    trained = [ops.convert_to_numpy(variable) for variable, _ in pairs]
    for variable, average in pairs:
        variable.assign(average)
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, trained, strict=True):
            variable.assign(value)


def _like(variable, value):
    # Dense: the gradient of a row of a table may come as its rows alone.
    return ops.cast(ops.convert_to_tensor(value), variable.dtype)


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdam(keras.optimizers.Adam):
    """Adam whose epsilon is added after the bias correction: algorithm 1 of Kingma and Ba, and
    `torch.optim.Adam`.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2
    x = x - rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

    where `keras.optimizers.Adam` adds epsilon to sqrt(v) and corrects the quotient. With `amsgrad`
    v is its maximum so far.

    Args: those of `keras.optimizers.Adam`, with PyTorch's defaults: rate 0.001 and epsilon 1e-8
    (Keras: 1e-7).

    Example:
        >>> x = keras.Variable([1.0])
        >>> PyTorchAdam(learning_rate=1.0, epsilon=0.01).apply([keras.ops.array([0.001])], [x])
        >>> float(x[0])  # 1 - 0.001 / (0.001 + 0.01); Keras's Adam gives 0.9969
        0.9090909
    """

    def __init__(self, learning_rate=0.001, *, epsilon=1e-8, **arguments):
        super().__init__(learning_rate=learning_rate, epsilon=epsilon, **arguments)

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update."""
        gradient, rate = _like(variable, gradient), _like(variable, learning_rate)
        step = _like(variable, self.iterations + 1)
        index = workarounds.index_in(self, variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        self.assign_add(momentum, (1.0 - self.beta_1) * (gradient - momentum))
        self.assign_add(velocity, (1.0 - self.beta_2) * (ops.square(gradient) - velocity))
        if self.amsgrad:
            largest = self._velocity_hats[index]
            self.assign(largest, ops.maximum(largest, velocity))
            velocity = largest
        first = 1.0 - ops.power(_like(variable, self.beta_1), step)
        second = 1.0 - ops.power(_like(variable, self.beta_2), step)
        self.assign_sub(
            variable, rate * momentum / (first * (ops.sqrt(velocity / second) + self.epsilon))
        )


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdamW(PyTorchAdam, keras.optimizers.AdamW):
    """AdamW with the epsilon of `PyTorchAdam`; its decay, x = x - rate decay x before the step, is
    alike in both.

    The arguments are those of `keras.optimizers.AdamW`, with PyTorch's defaults: rate 0.001, decay
    0.01 (Keras: 0.004) and epsilon 1e-8.
    """

    def __init__(self, learning_rate=0.001, *, weight_decay=0.01, **arguments):
        super().__init__(learning_rate, weight_decay=weight_decay, **arguments)


PARTS = ("backbone", "projection", "objectives")


def _with_part_rates(base: type) -> type:
    """Return an optimizer with `PartRates`: of Adam `PartAdam`, as which it is saved."""
    cls = type(f"Part{base.__name__}", (PartRates, base), {})
    return keras.saving.register_keras_serializable("tfdml")(cls)


#: By name. The decay of AdamW is decoupled and goes at the rate of each part.
_CLASSES: dict[str, type] = {
    "adam": _with_part_rates(keras.optimizers.Adam),
    "adamw": _with_part_rates(keras.optimizers.AdamW),
    "sgd": _with_part_rates(keras.optimizers.SGD),
    "pytorch_adam": _with_part_rates(PyTorchAdam),
    "pytorch_adamw": _with_part_rates(PyTorchAdamW),
}


def build_optimizer(
    name: str,
    learner,
    learning_rate,
    learning_rates: dict[str, float] | None = None,
    weight_decay: float = 0.0,
    epsilon: float | None = None,
    momentum: float = 0.9,
    clip_norm: float = 0.0,
    ema: float = 0.0,
):
    """Return an optimizer, built on the learner's variables, with a rate per part.

    It is saved with the learner, with its rates and its state: `keras.saving.load_model` and
    `ModelCheckpoint` work.

    Args:
        name: One of `OPTIMIZERS`; `adam` and `pytorch_adam` differ by the formulas at the top of
            this module.
        learner: A `MetricLearner`, which is built if it is not.
        learning_rate: A number or schedule, the base rate.
        learning_rates: The rates of `PARTS`, or of `learner.parts()`, that have one of their own,
            at the first step, or at the end of a warm-up; where the base rate is a schedule they
            follow it in proportion.
        weight_decay: Coupled (added to the gradient, as in PyTorch's Adam) for adam and sgd;
            decoupled, at each variable's own rate, for adamw. Learned scales, offsets, boundaries
            and targets take none (CLIP and GeM train theirs so). 0 by default for all, whereas
            AdamW's own default is 0.004 in Keras and 0.01 in PyTorch: a decay is part of the recipe
            that the caller states.
        epsilon: Adam's; None for its default: 1e-7 in Keras, 1e-8 in PyTorch.
        momentum: SGD's.
        clip_norm: The largest norm of the gradient over all replicas; 0 for none.
        ema: With 0.999, say, `averages` of the weights are kept: see `averaged`. 0 for none.

    Raises:
        UserError: The name or a part is unknown, or the base rate is 0.

    Example:
        >>> rates = {"projection": 1e-2, "objectives": 1e-2}
        >>> learner.compile(build_optimizer("adam", learner, 3e-4, rates))
    """
    check_choice("name", name, OPTIMIZERS)
    if not learner.built:
        learner.build(learner.view_shape)
    parts = learner.parts()
    factor_by_part = _factor_by_part(learning_rate, learning_rates or {}, (*PARTS, *parts))
    factor_by_id: dict[int, float] = {}
    for part, members in parts.items():
        for variable in members:
            factor_by_id[id(variable)] = factor_by_part[part]
    variables = learner.trainable_variables
    sampled_ids = learner.row_sampled_weight_ids
    row_sampled = [index for index, variable in enumerate(variables) if id(variable) in sampled_ids]
    undecayed = [index for index, variable in enumerate(variables) if not takes_decay(variable)]
    options = {}
    if name == "sgd":
        options["momentum"] = momentum
    elif epsilon is not None:
        options["epsilon"] = epsilon
    # Without Keras's weight decay: see `PartRates`.
    optimizer = _CLASSES[name](learning_rate, **options)
    is_decoupled = isinstance(optimizer, keras.optimizers.AdamW)
    decay_field = "decoupled_decay" if is_decoupled else "coupled_decay"
    optimizer.part_settings = PartSettings(
        factors=[factor_by_id.get(id(variable), 1.0) for variable in variables],
        norm=clip_norm or None,
        ema=ema,
        row_sampled=row_sampled,
        undecayed=undecayed,
        **{decay_field: weight_decay},
    )
    optimizer.build(variables)
    return optimizer


def _factor_by_part(
    learning_rate, learning_rates: dict[str, float], parts: Sequence[str]
) -> dict[str, float]:
    """Return the rate of each part as a multiple of the base rate."""
    unknown = sorted(set(learning_rates) - set(parts))
    if unknown:
        names = ", ".join(dict.fromkeys(parts))
        raise UserError(
            f"there is no part {unknown[0]!r}; the parts are {names}", learning_rates=...
        )
    if isinstance(learning_rate, keras.optimizers.schedules.PiecewiseConstantDecay):
        base = learning_rate.values[0]
    elif isinstance(learning_rate, WarmUp):
        base = learning_rate.peak
    elif getattr(learning_rate, "warmup_target", None):  # Keras's cosine
        base = learning_rate.warmup_target
    elif isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        base = float(ops.convert_to_numpy(learning_rate(0)))
    else:
        base = float(learning_rate)
    if learning_rates and base <= 0:
        raise UserError(
            f"must be positive where parts have rates of their own, not {base:g}", learning_rate=...
        )
    # The backbones of two views share a rate, and so do their projections, unless they have their
    # own.
    rates = {
        part: learning_rates.get(part, learning_rates.get(part.rpartition(" ")[2]))
        for part in parts
    }
    return {part: 1.0 if rate is None else rate / base for part, rate in rates.items()}
