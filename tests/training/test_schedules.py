"""Warm-up, cosine and line: by their formulas, and saved."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.errors import UserError
from tfdml.training.schedules import WarmUp, rate_schedule
from tfdml.training.settings import OptimizationSettings


def reference(kind, rate, total, warm_up, drops, factor, final, step):
    if step < warm_up:
        return rate * (step + 1) / warm_up
    if kind == "step":
        return rate * factor ** sum(1 for drop in drops if step >= drop)
    share = (step - warm_up) / (total - warm_up)
    falling = (1 + np.cos(np.pi * share)) / 2 if kind == "cosine" else 1 - share
    return rate * (final + (1 - final) * falling)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["step", "cosine", "linear"]),
    st.integers(2, 200),
    st.floats(0, 0.99),
    st.lists(st.integers(1, 200), max_size=3, unique=True),
    st.floats(0, 0.9),
    st.floats(0, 1),
)
def test_every_step_is_the_formulas(kind, total, part, drops, final, where):
    warm_up, step = int(part * total), int(where * total)
    schedule = rate_schedule(kind, 0.3, total, warm_up, sorted(drops), 0.1, final)
    value = float(schedule(step)) if callable(schedule) else schedule
    assert value == pytest.approx(reference(kind, 0.3, total, warm_up, drops, 0.1, final, step), rel=1e-4, abs=1e-7)


def test_a_constant_rate_stays_a_number():
    assert rate_schedule("step", 0.3, 100) == 0.3


@pytest.mark.parametrize("kind", ["step", "cosine", "linear"])
def test_it_is_saved_with_its_optimizer(kind):
    schedule = rate_schedule(kind, 0.3, 100, 10, [50], 0.1, 0.2)
    optimizer = keras.optimizers.SGD(schedule)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))._learning_rate
    assert isinstance(again, WarmUp)
    for step in (0, 9, 10, 49, 50, 99):
        assert float(again(step)) == float(schedule(step))


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(UserError, match="known are step, cosine, linear"):
        rate_schedule("sine", 0.1, 10)
    with pytest.raises(UserError, match="leaves none of the 10"):
        rate_schedule("cosine", 0.1, 10, warm_up_steps=10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "cosine", "drop_epochs": "2"}, "--drop_epochs=2 goes with --schedule=step"),
        ({"final_rate": 0.1}, "--final_rate=0.1 goes with --schedule=cosine"),
        ({"epochs": 4, "warm_up_epochs": 4.0}, "--warm_up_epochs=4 leaves none of --epochs=4"),
        ({"unfreeze_epochs": "2,1"}, "--unfreeze_epochs=2,1: the epochs must ascend"),
        ({"schedule": "sine"}, "--schedule=sine: must be one of"),
        ({"layer_decay": 0.0}, "--layer_decay=0.0: out of range"),
        ({"ema": 1.0}, "--ema=1.0: out of range"),
    ],
)
def test_flags_that_contradict_one_another_are_refused(values, message):
    with pytest.raises(UserError) as error:
        OptimizationSettings(**values)
    assert str(error.value).startswith(message)


def test_the_flags_make_the_schedule():
    schedule = OptimizationSettings(
        schedule="cosine", epochs=4, warm_up_epochs=0.5, learning_rate=1.0, final_rate=0.1
    ).rate_schedule(steps_per_epoch=10)
    assert [round(float(schedule(step)), 3) for step in (0, 4, 5, 40)] == [0.2, 1.0, 1.0, 0.1]
