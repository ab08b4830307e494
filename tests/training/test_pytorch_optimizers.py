"""Each optimiser, in the form of Keras and in that of PyTorch, step by step against float64 references."""

import math

import keras
import numpy as np
import pytest

from tests.training import runs
from tests.training.test_optimizers import make_learner
from tfdml.errors import UserError
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import DensityAdaptivity
from tfdml.training import pytorch_optimizers
from tfdml.training.optimizers import build_optimizer, step_schedule

PAIRS = {
    "adam": (keras.optimizers.Adam, pytorch_optimizers.PyTorchAdam),
    "adamw": (keras.optimizers.AdamW, pytorch_optimizers.PyTorchAdamW),
    "sgd": (keras.optimizers.SGD, pytorch_optimizers.PyTorchSGD),
    "rmsprop": (keras.optimizers.RMSprop, pytorch_optimizers.PyTorchRMSprop),
}
FORMS = ("keras", "pytorch")


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


def sgd(form, x, gradients, rate, momentum, nesterov=False):
    total = 0.0
    for t, g in enumerate(gradients, start=1):
        step = g if form == "pytorch" else rate(t) * g
        total = momentum * total + step
        step = step + momentum * total if nesterov else total
        x -= rate(t) * step if form == "pytorch" else step
        yield x


def rmsprop(form, x, gradients, rate, epsilon, rho, momentum=0.0, centered=False):
    v = mean = total = 0.0
    for t, g in enumerate(gradients, start=1):
        v = rho * v + (1 - rho) * g**2
        mean = rho * mean + (1 - rho) * g if centered else 0.0
        if form == "pytorch":
            total = momentum * total + g / (math.sqrt(v - mean**2) + epsilon)
            x -= rate(t) * total
        else:
            total = momentum * total + rate(t) * g / math.sqrt(v - mean**2 + epsilon)
            x -= total
        yield x


CASES = {
    "adam": (adam, {"epsilon": 0.01}),
    "adam, small epsilon": (adam, {"epsilon": 1e-8}),
    "adam, amsgrad": (adam, {"epsilon": 0.01, "amsgrad": True}),
    "adamw": (adam, {"epsilon": 0.01, "weight_decay": 0.1}),
    "sgd": (sgd, {"momentum": 0.9}),
    "sgd, plain": (sgd, {"momentum": 0.0}),
    "sgd, nesterov": (sgd, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (rmsprop, {"epsilon": 0.01, "rho": 0.99}),
    "rmsprop, momentum": (rmsprop, {"epsilon": 0.01, "rho": 0.9, "momentum": 0.5}),
    "rmsprop, centered": (rmsprop, {"epsilon": 0.01, "rho": 0.9, "centered": True}),
}


def walk(optimizer, start, gradients):
    """The variable after each step that a Keras optimiser makes."""
    variable = keras.Variable(start)
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        yield keras.ops.convert_to_numpy(variable).copy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_the_formulas(case, form):
    reference, arguments = CASES[case]
    generator = np.random.default_rng(0)
    start = generator.normal(size=3).astype("float32")
    gradients = (generator.normal(size=(30, 3)) * [1.0, 1e-2, 1e-3] + [0.0, 0.01, 0.002]).astype("float32")
    # The rate drops to a tenth from the eleventh step on.
    optimizer = PAIRS[case.split(",")[0]][FORMS.index(form)](step_schedule(0.02, [10], 0.1), **arguments)
    named = {"decay" if key == "weight_decay" else key: value for key, value in arguments.items()}

    def column(i):
        def rate(step):
            return 0.02 if step <= 10 else 0.002

        return list(reference(form, float(start[i]), gradients[:, i].astype(float), rate, **named))

    expected = np.stack([column(i) for i in range(3)], axis=1)
    np.testing.assert_allclose(list(walk(optimizer, start, gradients)), expected, rtol=2e-5, atol=2e-6)


def test_a_large_epsilon_is_another_optimiser_in_keras_form():
    """At |g| = 1e-3 and epsilon 0.01 Keras's step is 0.035 of PyTorch's at first, and 0.26 of it after 58."""
    gradients = np.full(58, 1e-3, "float32")
    moved = {}
    for form, cls in zip(FORMS, PAIRS["adam"], strict=True):
        path = [0.0, *(float(x) for x in walk(cls(1.0, epsilon=0.01), 0.0, gradients))]
        moved[form] = -np.diff(path)
    ratio = moved["keras"] / moved["pytorch"]
    np.testing.assert_allclose(ratio[[0, 57]], [0.035, 0.26], rtol=0.02)
    np.testing.assert_allclose(moved["pytorch"], 1 / 11, rtol=1e-3)


def test_a_drop_of_the_rate_takes_hold_of_all_momentum_in_pytorch_form():
    rates = {}
    for form, cls in zip(FORMS, PAIRS["sgd"], strict=True):
        optimizer = cls(step_schedule(1.0, [50], 0.1), momentum=0.9)
        path = [0.0, *(float(x) for x in walk(optimizer, 0.0, np.ones(51, "float32")))]
        rates[form] = -np.diff(path)[[49, 50]]
    np.testing.assert_allclose(rates["pytorch"], [9.95, 0.995], rtol=1e-3)
    np.testing.assert_allclose(rates["keras"], [9.95, 0.9 * 9.95 + 0.1], rtol=1e-3)


@pytest.mark.parametrize("cls", [pair[1] for pair in PAIRS.values()])
def test_a_configuration_restores_it(cls):
    optimizer = cls(0.5, **({} if cls is pytorch_optimizers.PyTorchSGD else {"epsilon": 0.25}))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is cls
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_the_form_reaches_the_learners_optimiser(name, form):
    learner = make_learner()
    optimizer = build_optimizer(name, learner, 0.01, {"projection": 0.005}, epsilon=0.125, form=form)
    assert isinstance(optimizer, PAIRS[name][FORMS.index(form)])
    variable = learner.parts()["projection"][0]
    before = keras.ops.convert_to_numpy(variable).astype(float).ravel()[0]
    optimizer.apply([keras.ops.full(v.shape, 0.001) for v in learner.trainable_variables])
    after = keras.ops.convert_to_numpy(variable).ravel()[0]
    reference, arguments = {
        "adam": (adam, {"epsilon": 0.125}),
        "adamw": (adam, {"epsilon": 0.125}),
        "sgd": (sgd, {"momentum": 0.9}),
        "rmsprop": (rmsprop, {"epsilon": 0.125, "rho": 0.99 if form == "pytorch" else 0.9}),
    }[name]
    (expected,) = reference(form, before, [0.001], lambda t: 0.005, **arguments)
    np.testing.assert_allclose(after - before, expected - before, rtol=1e-2, atol=1e-7)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", PAIRS)
def test_weights_of_which_a_batch_reads_some_rows_train_too(name):
    """Targets of the classes in the batch: their gradient may be sparse."""
    learner = MetricLearner(
        Embedder("conv4", embedding_dim=4, image_size=16, batch_norm="train"),
        [DensityAdaptivity(num_classes=5, constraint=None)],
    )
    learner.build((None, 16, 16, 3))
    learner.compile(build_optimizer(name, learner, 0.01, {}, weight_decay=0.001, clip_norm=10.0, form="pytorch"))
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3)).astype(np.uint8)
    learner.fit(images, np.arange(6) % 3, batch_size=6, epochs=2, verbose=0)
    targets = keras.ops.convert_to_numpy(learner.objectives[0].target_density)
    assert np.all(targets[:3] != 0.5)
    assert np.all(np.isfinite(targets))


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match=r"`form='tensorflow'`.*keras, pytorch"):
        build_optimizer("adam", make_learner(), 0.1, {}, form="tensorflow")


@pytest.mark.parametrize(
    ("cls", "defaults"),
    [
        ("PyTorchAdam", {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "weight_decay": None}),
        (
            "PyTorchAdamW",
            {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01},
        ),
        ("PyTorchSGD", {"learning_rate": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": None}),
        ("PyTorchRMSprop", {"learning_rate": 1e-2, "rho": 0.99, "epsilon": 1e-8, "momentum": 0.0, "centered": False}),
    ],
)
def test_the_defaults_are_those_of_torch_optim(cls, defaults):
    config = getattr(pytorch_optimizers, cls)().get_config()
    assert {name: config[name] for name in defaults} == pytest.approx(defaults)


@pytest.mark.parametrize(("form", "epsilon"), [("keras", 1e-7), ("pytorch", 1e-8)])
def test_the_default_epsilon_of_a_run_is_that_of_its_form(form, epsilon):
    settings = runs.experiment("unused", optimizer="adam", optimizer_form=form)
    assert runs.learner(settings, 3).optimizer.epsilon == epsilon
    settings = runs.experiment("unused", optimizer="adam", optimizer_form=form, epsilon=0.5)
    assert runs.learner(settings, 3).optimizer.epsilon == 0.5
