"""How the learning rate changes along a run."""

from __future__ import annotations

import keras
from keras import ops
from typing_extensions import override

from tfdml.errors import UserError
from tfdml.saving import restore

SCHEDULES = ("step", "cosine", "linear")


def step_schedule(learning_rate: float, drop_steps: list[int], factor: float):
    """Return a rate that is multiplied by `factor` at each of the steps given; a plain number when there is none.

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
        shift: How many steps later than the run the schedule begins: the warm-up where it has its own length, as a
            cosine has, 0 where it goes by the steps of the run.

    Example:
        >>> schedule = WarmUp(0.1, steps=4, peak=0.1)
        >>> [round(float(schedule(step)), 3) for step in range(6)]
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    """

    def __init__(self, schedule, steps, peak, shift=0):
        self.schedule = restore(schedule)
        self.steps, self.peak, self.shift = int(steps), float(peak), int(shift)

    def __call__(self, step):
        """Return the rate at a step."""
        step = ops.cast(step, "float32")
        rising = self.peak * (step + 1.0) / self.steps
        later = ops.maximum(step - self.shift, 0.0)
        after = self.schedule(later) if callable(self.schedule) else self.schedule
        return ops.where(step < self.steps, rising, ops.cast(after, "float32"))

    @override
    def get_config(self):
        callable_schedule = callable(self.schedule)
        schedule = keras.saving.serialize_keras_object(self.schedule) if callable_schedule else self.schedule
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
        cosine   rate (f + (1 - f) (1 + cos(pi u)) / 2)        Loshchilov and Hutter, "SGDR", ICLR 2017, eq. 5
        linear   rate (f + (1 - f) (1 - u))

    Args:
        kind: One of `SCHEDULES`.
        learning_rate: The highest rate.
        total_steps: T, the steps of the whole run.
        warm_up_steps: w, the steps in which the rate rises evenly; 0 for none.
        drop_steps: For `"step"`, ascending steps of the run from each of which on the rate is lower.
        drop_factor: For `"step"`, what each drop multiplies by.
        final: For the others, f, which share of the rate is left at the end.

    Raises:
        UserError: The kind is unknown, or the warm-up leaves no step.

    Example:
        >>> schedule = rate_schedule("cosine", 1.0, total_steps=110, warm_up_steps=10)
        >>> [round(float(schedule(step)), 3) for step in (0, 9, 10, 60, 110)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    if kind not in SCHEDULES:
        raise UserError(f"`kind={kind!r}`: known are {', '.join(SCHEDULES)}")
    if warm_up_steps and warm_up_steps >= total_steps:
        raise UserError(f"the warm-up of {warm_up_steps} steps leaves none of the {total_steps} of the run")
    length = max(total_steps - warm_up_steps, 1)
    if kind == "step":
        schedule, shift = step_schedule(learning_rate, list(drop_steps), drop_factor), 0
    elif kind == "cosine":
        schedule, shift = keras.optimizers.schedules.CosineDecay(learning_rate, length, alpha=final), warm_up_steps
    else:
        end = final * learning_rate
        schedule, shift = keras.optimizers.schedules.PolynomialDecay(learning_rate, length, end), warm_up_steps
    return WarmUp(schedule, warm_up_steps, learning_rate, shift) if warm_up_steps else schedule
