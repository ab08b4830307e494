"""Optimizers have a rate per part, decay, clip and average as the formulas say, on one device and
several."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.networks import images, shallow, tiny_embedder, values
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import (
    DensityAdaptivity,
    LearnedMargin,
    ProxyLoss,
    SigmoidAcrossViews,
    SoftmaxAcrossViews,
    SphereFace2,
)
from tfdml.training import optimizers
from tfdml.training.optimizers import (
    OPTIMIZERS,
    averaged,
    build_optimizer,
    rate_schedule,
    step_schedule,
)


def make_embedder():
    return Embedder(shallow(), embedding_dim=4, image_size=16, batch_norm="train")


def make_learner(embedder=None):
    keras.utils.set_random_seed(0)
    learner = MetricLearner(embedder or make_embedder(), [ProxyLoss(AMSoftmaxLoss(), 3)])
    learner.build((None, 16, 16, 3))
    return learner


ALL_SETTINGS = {
    "learning_rates": {"projection": 0.02},
    "weight_decay": 0.01,
    "clip_norm": 0.5,
    "ema": 0.9,
}


def trained_on(learner, steps):
    """Make steps on noise; the trainable weights and the averages after them."""
    for seed in steps:
        images = np.random.default_rng(seed).integers(0, 255, (6, 16, 16, 3), "uint8")
        learner.train_on_batch(images, np.arange(6) % 3)
    with averaged(learner):
        means = values(learner.trainable_variables)
    return values(learner.trainable_variables), means


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learner_is_loaded_with_its_optimizer_and_continues(name, tmp_path):
    learner, rate = make_learner(), rate_schedule("cosine", 0.01, 20, 2)
    learner.compile(build_optimizer(name, learner, rate, **ALL_SETTINGS), run_eagerly=True)
    trained_on(learner, range(3))
    learner.save(tmp_path / "learner.keras")
    loaded = keras.saving.load_model(tmp_path / "learner.keras")
    assert type(loaded.optimizer) is type(learner.optimizer)
    assert loaded.optimizer.get_config() == learner.optimizer.get_config()
    for one, other in zip(trained_on(learner, [7, 8]), trained_on(loaded, [7, 8]), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


#: What learned scales, offsets, boundaries and targets are called.
UNDECAYED = {"log_scale", "bias", "beta", "target_density", "power"}


def scales_and_offsets():
    """A learner of all of them, whose gradients are 0."""
    views = {"views": ("projection", "embedding"), "weight": 0.0}
    terms = [
        SoftmaxAcrossViews(**views),
        SigmoidAcrossViews(**views),
        DensityAdaptivity(3, constraint=None, weight=0.0),
        LearnedMargin(3, weight=0.0),
        SphereFace2(3, weight=0.0),
    ]
    embedder = Embedder(
        shallow(), 4, image_size=16, pooling="gem", batch_norm="train", projection_bias=False
    )
    return MetricLearner(embedder, terms)


def check_decay(model, labels):
    """A step without a gradient changes matrices, and no scale or offset."""
    if not model.built:
        model.build((None, 16, 16, 3))
    before = {variable.path: values([variable])[0] for variable in model.trainable_variables}
    x = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3), "uint8")
    model.train_on_batch(x, labels)
    after = {variable.path: values([variable])[0] for variable in model.trainable_variables}
    kept = {path for path in before if path.rpartition("/")[2] in UNDECAYED and "_bn/" not in path}
    for path in kept:
        np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    for path in before:
        if path.endswith("kernel"):
            np.testing.assert_allclose(after[path], 0.95 * before[path], rtol=1e-5)
    return {path.rpartition("/")[2] for path in kept}


@pytest.mark.parametrize("optimizer", ["keras", "loaded", "adamw", "sgd"])
def test_learned_scales_and_offsets_take_no_weight_decay(optimizer, tmp_path):
    learner = scales_and_offsets()
    if optimizer in OPTIMIZERS:
        made = build_optimizer(optimizer, learner, 0.1, weight_decay=0.5)
    else:
        made = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    learner.compile(made, run_eagerly=True)
    if optimizer == "loaded":
        check_decay(learner, np.arange(6) % 3)
        learner.save(tmp_path / "learner.keras")
        learner = keras.saving.load_model(tmp_path / "learner.keras")
    assert check_decay(learner, np.arange(6) % 3) == UNDECAYED


def test_the_power_of_an_embedder_takes_no_weight_decay():
    embedder = scales_and_offsets().embedder
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    embedder.compile(optimizer, loss=ContrastiveLoss(0.0), run_eagerly=True)
    assert check_decay(embedder, np.arange(6)) == {"power"}


def weights(learner):
    return values(learner.trainable_variables)


def test_averages_follow_the_formula_and_go_after_the_block():
    keras.utils.set_random_seed(1)
    learner = MetricLearner(tiny_embedder(), ContrastiveLoss(1.3, "euclidean"))
    learner.build((None, 12, 12, 3))
    learner.compile(build_optimizer("sgd", learner, 0.05, {}, ema=0.9))
    x, start = images(1, 6, "uint8"), weights(learner)
    with averaged(learner):  # before the first step nothing changes
        assert all(map(np.array_equal, weights(learner), start))
    expected = None
    for step in range(14):
        learner.train_on_batch(x, np.arange(6) % 3)
        kept = 0.0 if step == 0 else min(0.9, (1 + step) / (10 + step))
        now = [value.astype(np.float64) for value in weights(learner)]
        old = now if expected is None else expected
        expected = [kept * a + (1 - kept) * w for a, w in zip(old, now, strict=True)]
    trained = weights(learner)
    with averaged(learner):
        for value, mean in zip(weights(learner), expected, strict=True):
            np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-6)
        assert any((a != b).any() for a, b in zip(weights(learner), trained, strict=True))
    for value, before in zip(weights(learner), trained, strict=True):
        np.testing.assert_array_equal(value, before)


def reference(kind, rate, total, warm_up, drops, factor, final, step):
    if step < warm_up:
        return rate * (step + 1) / warm_up
    if kind == "step":
        return rate * factor ** sum(1 for drop in drops if step >= drop)
    share = (step - warm_up) / (total - warm_up)
    return rate * (final + (1 - final) * (1 + np.cos(np.pi * share)) / 2)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["step", "cosine"]),
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
    assert value == pytest.approx(
        reference(kind, 0.3, total, warm_up, drops, 0.1, final, step), rel=1e-4, abs=1e-7
    )


def adam(form, x, gradients, rate, epsilon, decay=0.0, amsgrad=False):
    """The variable after each step, one number at a time."""
    m = v = largest = 0.0
    for t, g in enumerate(gradients, start=1):
        x -= rate(t) * decay * x
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        largest = max(largest, v) if amsgrad else v
        first, second = 1 - 0.9**t, 1 - 0.999**t
        if form == "pytorch":
            x -= rate(t) * (m / first) / (math.sqrt(largest / second) + epsilon)
        else:
            x -= rate(t) * math.sqrt(second) / first * m / (math.sqrt(largest) + epsilon)
        yield x


CASES = {
    "adam": {"epsilon": 0.01},
    "adam, amsgrad": {"epsilon": 0.01, "amsgrad": True},
    "adamw": {"epsilon": 0.01, "weight_decay": 0.1},
}
CLASSES = {
    "keras": (keras.optimizers.Adam, keras.optimizers.AdamW),
    "pytorch": (optimizers.PyTorchAdam, optimizers.PyTorchAdamW),
}


def walk(optimizer, start, gradients):
    """The variable after each step that a Keras optimizer makes."""
    variable = keras.Variable(start)
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        yield keras.ops.convert_to_numpy(variable).copy()


@pytest.mark.parametrize("form", CLASSES)
@pytest.mark.parametrize("case", CASES)
def test_every_step_in_both_forms_is_the_formulas(case, form):
    generator = np.random.default_rng(0)
    start = generator.normal(size=3).astype("float32")
    gradients = (generator.normal(size=(30, 3)) * [1.0, 1e-2, 1e-3] + [0.0, 0.01, 0.002]).astype(
        "float32"
    )
    # The rate drops to a tenth from the eleventh step on.
    optimizer = CLASSES[form][case == "adamw"](step_schedule(0.02, [10], 0.1), **CASES[case])
    named = {"decay" if key == "weight_decay" else key: value for key, value in CASES[case].items()}

    def column(i):
        def rate(step):
            return 0.02 if step <= 10 else 0.002

        return list(adam(form, float(start[i]), gradients[:, i].astype(float), rate, **named))

    expected = np.stack([column(i) for i in range(3)], axis=1)
    np.testing.assert_allclose(
        list(walk(optimizer, start, gradients)), expected, rtol=2e-5, atol=2e-6
    )


def test_weights_of_which_a_batch_reads_some_rows_train_too():
    """Targets of the classes in the batch: their gradient may be sparse."""
    learner = MetricLearner(make_embedder(), [DensityAdaptivity(num_classes=5, constraint=None)])
    learner.build((None, 16, 16, 3))
    optimizer = build_optimizer(
        "pytorch_adam", learner, 0.01, {}, weight_decay=0.001, clip_norm=10.0
    )
    learner.compile(optimizer, run_eagerly=True)
    trained_on(learner, range(2))
    targets = keras.ops.convert_to_numpy(learner.objectives[0].target_density)
    assert np.all(targets[:3] != 0.5)
    assert np.all(np.isfinite(targets))


@pytest.mark.parametrize(
    "schedule",
    [
        rate_schedule("cosine", 0.01, total_steps=20, warm_up_steps=2),
        keras.optimizers.schedules.CosineDecay(1e-5, 20, warmup_target=0.01, warmup_steps=2),
        keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=1, decay_rate=0.5),
    ],
)
def test_rates_of_parts_are_those_of_the_start_or_of_the_end_of_a_warm_up(schedule):
    optimizer = build_optimizer("sgd", make_learner(), schedule, {"projection": 0.1})
    assert {round(factor, 6) for factor in optimizer.part_settings.factors} == {1.0, 10.0}
