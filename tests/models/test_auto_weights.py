"""Weights that the first steps measure, against gradients by finite differences of a network written in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.marks import first_quick
from tests.mathematics import assert_close, finite_differences
from tests.models.networks import SIZE, Taking, colored_batch, config_of, tiny_embedder, values
from tests.objectives import references_classes
from tfdml import losses
from tfdml.errors import UserError
from tfdml.models import Embedder, MetricLearner
from tfdml.models.auto_weights import PARTS, AutoWeights, WeightMeasurement, weights
from tfdml.objectives import (
    AutoWeight,
    CrossBatchMemory,
    EnergyConfusion,
    EntropySpread,
    GlobalOrthogonal,
    HighOrderMomentLoss,
    MetricLoss,
    ProxyLoss,
    RankMI,
)

NAMES = ("energy_confusion", "entropy_spread")


def terms(share=0.3, steps=100):
    """A base of two terms with numbers; one that the backbone does not learn from, and one that all does."""
    return [
        MetricLoss(losses.BinomialDevianceLoss(), weight=2.0),
        EnergyConfusion("log_of_mean", "projection", weight=AutoWeight(share, steps)),
        GlobalOrthogonal(weight=0.5),
        EntropySpread(weight=AutoWeight(0.2, steps)),
    ]


def made(objectives, rate=0.01, **options):
    learner = MetricLearner(tiny_embedder(batch_norm="statistics"), objectives)
    learner.build((None, SIZE, SIZE, 3))
    # Compiling takes longer than the few steps.
    options = {"run_eagerly": True, "optimizer": keras.optimizers.SGD(rate), **options}
    learner.compile(**options)
    return learner


class Logs(keras.callbacks.Callback):
    """The logs of the last step."""

    def on_train_batch_end(self, batch, logs=None):
        self.last = dict(logs)


def one_step(learner, x, labels, callbacks=None):
    """A step on a batch; what it logs."""
    logs = Logs()
    callbacks = AutoWeights.of(learner) if callbacks is None else callbacks
    learner.fit(x, labels, batch_size=len(labels), verbose=0, shuffle=False, callbacks=[*callbacks, logs])
    return logs.last


def train(learner, steps, first=0, size=12):
    """Some steps, each on a batch of its own; what each of them logs."""
    batches = map(colored_batch, range(first, first + steps))
    return [one_step(learner, x[:size], labels[:size]) for labels, x in batches]


# The rule, of lists of numbers


def rule(ratios, shares):
    """`WeightMeasurement`, term by term, in plain Python."""
    found = []
    for term, share in enumerate(shares):
        largest = 0.0
        for part in range(len(ratios[0][0])):
            counted = sorted(sample[term][part] for sample in ratios if sample[term][part] > 0)
            if counted:
                middle = len(counted) // 2
                median = counted[middle] if len(counted) % 2 else (counted[middle - 1] + counted[middle]) / 2
                largest = max(largest, median)
        found.append(share / largest if largest else 0.0)
    return found


@pytest.mark.parametrize("samples", [1, 2, 7, 10])
def test_the_weight_is_the_share_by_the_median_of_the_part_with_the_largest_ratio(samples):
    generator = np.random.default_rng(samples)
    ratios = generator.lognormal(0, 2, (samples, 3, 2)).astype("float32")
    ratios[generator.random(ratios.shape) < 0.3] = 0.0
    ratios[:, 2] = 0.0
    shares = [0.3, 1.5, 0.1]
    np.testing.assert_allclose(weights(ratios, shares), rule(ratios.tolist(), shares), rtol=1e-12)
    assert weights(ratios, shares)[2] == 0.0


# Against a network in NumPy


class Small:
    """A convolution and a dense layer in float64, and the same as an `Embedder`."""

    size = 8

    def __init__(self):
        keras.utils.set_random_seed(1)
        x = inputs = keras.Input((None, None, 3))
        x = keras.layers.Conv2D(2, 3, strides=2, activation="tanh", bias_initializer="normal")(x)
        self.embedder = Embedder(keras.Model(inputs, x, name="small"), embedding_dim=3, image_size=self.size)
        self.embedder.build((None, self.size, self.size, 3))

    def weights(self):
        return [np.asarray(value, "float64") for value in values(self.embedder.trainable_variables)]

    def __call__(self, images, kernel, bias, dense, shift):
        """The projections."""
        scaled = np.asarray(images, "float64") / 127.5 - 1
        patches = np.lib.stride_tricks.sliding_window_view(scaled, (3, 3), axis=(1, 2))[:, ::2, ::2]
        features = np.tanh(np.einsum("bhwcij,ijcf->bhwf", patches, kernel) + bias)
        return features.mean((1, 2)) @ dense + shift


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def expected_ratios(network, labels, images):
    """(terms, parts), by central differences."""
    arrays = network.weights()

    def base(*arrays):
        x = unit(network(images, *arrays))
        return 2.0 * references.binomial(labels, x) + 0.5 * references_classes.global_orthogonal(labels, x)

    def energy(dense, shift):
        # Features are constants to it.
        x = network(images, *arrays[:2], dense, shift)
        return references_classes.energy_confusion(labels, x, "log_of_mean")

    def spread(*arrays):
        return references_classes.entropy_of_pairs(labels, unit(network(images, *arrays)))

    def lengths(gradients):
        return [np.sqrt(sum(np.sum(np.square(g)) for g in part)) for part in (gradients[:-2], gradients[-2:])]

    of_base = lengths(finite_differences(base, *arrays))
    found = [lengths(finite_differences(energy, *arrays[2:])), lengths(finite_differences(spread, *arrays))]
    return np.array(found) / of_base


@pytest.fixture(scope="module")
def measured():
    """What is expected of three batches on a network that does not move."""
    network = Small()
    generator = np.random.default_rng(0)
    labels = np.array([0, 1, 1, 2, 0])
    images = [generator.integers(0, 256, (5, network.size, network.size, 3)).astype("uint8") for _ in range(3)]
    return network, labels, images, np.stack([expected_ratios(network, labels, x) for x in images])


@pytest.mark.parametrize("mode", first_quick(["eager", "graph", "xla"]))
def test_the_ratios_and_the_weights_equal_finite_differences(measured, mode):
    network, labels, images, ratios = measured
    learner = MetricLearner(network.embedder, terms(steps=3))
    learner.compile(keras.optimizers.SGD(0.0), run_eagerly=mode == "eager", jit_compile=mode == "xla")
    assert learner.term_weights() == {
        "binomial_deviance_loss": 2.0, "energy_confusion": 0.0, "global_orthogonal": 0.5, "entropy_spread": 0.0
    }  # fmt: skip
    callbacks = AutoWeights.of(learner)
    for step, x in enumerate(images, 1):
        before = learner.term_weights()
        logs = one_step(learner, x, labels, callbacks)
        # A step uses what was known before it.
        assert_close(logs["loss"], sum(factor * logs[name] for name, factor in before.items()), 1e-5)
        # The newest sample counts at first, and in the end all.
        counted = ratios if step == 3 else ratios[step - 1 : step]
        for name, weight in zip(NAMES, rule(counted.tolist(), [0.3, 0.2]), strict=True):
            assert_close(logs[f"{name}_weight"], before[name])
            assert_close(learner.term_weights()[name], weight, 1e-4)
    assert PARTS == ("backbone", "projection")
    assert_close(learner.auto_weights.ratios, ratios, 1e-4)
    assert not np.any(values([learner.auto_weights.ratios])[0][:, 0, 0])


# Steps


def test_measured_steps_are_a_tenth_apart_and_the_weights_stay_after_the_last():
    measurement = WeightMeasurement(terms(steps=25))
    seen, due = [measurement.values()], []
    for step in range(40):
        if measurement.due:
            due.append(step)
            newest = keras.ops.full((1, 2, 2), 1.0 + step)
            measurement.ratios.assign(keras.ops.concatenate([measurement.ratios[1:], newest]))
        measurement.count()
        seen.append(measurement.values())
    assert due == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]
    assert [step for step in range(40) if seen[step] != seen[step + 1]] == [*due, 24]
    for step in due:
        newest = {"energy_confusion": 0.3 / (1 + step), "entropy_spread": 0.2 / (1 + step)}
        assert seen[step + 1] == pytest.approx(newest)
    assert seen[-1] == pytest.approx({"energy_confusion": 0.3 / 12, "entropy_spread": 0.2 / 12})
    assert measurement.describe()["entropy_spread"] == {"weight": seen[-1][NAMES[1]], "share": 0.2, "steps": 25}
    measurement.read()
    assert not measurement.due


@pytest.mark.slow
def test_an_interrupted_fit_does_not_count_steps_twice():
    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    learner = made(terms(steps=4))
    labels, x = colored_batch()
    with pytest.raises(KeyboardInterrupt):
        one_step(learner, x, labels, [AutoWeights(), Interrupting()])
    train(learner, 2)
    assert learner.auto_weights.describe()["energy_confusion"]["steps"] == 3


@pytest.mark.parametrize("due", first_quick([True, False]))
def test_the_update_is_that_of_the_same_numbers(due):
    """Both of a step that is measured and of one that is not."""
    learner = made(terms(steps=100), optimizer=Taking())
    learner.auto_weights.factors.assign([0.7, 0.4])
    learner.auto_weights.taken.assign(10 if due else 11)
    numbers = terms()
    numbers[1].weight, numbers[3].weight = 0.7, 0.4
    plain = made(numbers, optimizer=Taking())
    for model in (learner, plain):
        # A penalty of the network's own counts in the update all the same.
        model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    logs, expected = (train(model, 1)[0] for model in (learner, plain))
    assert (np.count_nonzero(values([learner.auto_weights.ratios])[0]) > 0) == due
    for name, value in expected.items():
        assert_close(logs[name], value, floor=1e-6)
    largest = max(np.abs(gradient).max() for gradient in values(plain.trainable_variables))
    assert largest > 1e-3
    for one, other in zip(values(learner.trainable_variables), values(plain.trainable_variables), strict=True):
        assert_close(one, other, 1e-5, floor=1e-6 * largest)


def test_half_precision_measures_the_same():
    """Gradients that would vanish in half precision are scaled."""
    found = []
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        try:
            base = MetricLoss(losses.BinomialDevianceLoss(), weight=1e-6)
            learner = made([base, EntropySpread(weight=AutoWeight(0.2))], rate=0.0)
        finally:
            keras.config.set_dtype_policy("float32")
        # The first scale is larger than these gradients can bear.
        learner.optimizer.built or learner.optimizer.build(learner.trainable_variables)
        if policy == "mixed_float16":
            learner.optimizer.dynamic_scale.assign(1024.0)
        train(learner, 1)
        found.append(learner.term_weights()["entropy_spread"])
    assert 0 < found[0] < 1e-3
    assert_close(found[1], found[0], 0.02)


def test_moments_count_in_the_backbone_and_their_own_projections_nowhere():
    moments = HighOrderMomentLoss(losses.BinomialDevianceLoss(), 2, 8, weight=AutoWeight())
    proxies = ProxyLoss(losses.AMSoftmaxLoss(), 3, weight=0.1)
    learner = made([proxies, moments])
    train(learner, 1)
    ((backbone, projection),) = values([learner.auto_weights.ratios])[0][-1]
    assert backbone > 0
    assert projection == 0
    assert_close(learner.term_weights()[moments.name], 0.03 / backbone)


# Saving


@pytest.mark.slow
def test_goes_on_after_loading_in_the_midst_as_if_never_saved(tmp_path):
    uninterrupted, stopped = made(terms(steps=4), rate=0.05), made(terms(steps=4), rate=0.05)
    train(uninterrupted, 5)
    train(stopped, 2)
    stopped.save(tmp_path / "learner.keras")
    loaded = keras.saving.load_model(tmp_path / "learner.keras")
    assert loaded.term_weights() == stopped.term_weights()
    assert loaded.term_weights() != uninterrupted.term_weights()
    assert loaded.run_eagerly
    train(loaded, 3, first=2)
    assert loaded.auto_weights.describe() == uninterrupted.auto_weights.describe()
    for one, other in zip(values(loaded.variables), values(uninterrupted.variables), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_frozen_weight_stays_with_a_new_optimizer(tmp_path):
    learner = made(terms(steps=2))
    train(learner, 2)
    learner.save(tmp_path / "learner.keras")
    loaded = keras.saving.load_model(tmp_path / "learner.keras", compile=False)
    assert [o.weight.share for o in loaded.objectives if o.name in NAMES] == [0.3, 0.2]
    loaded.compile("adam", run_eagerly=True)
    train(loaded, 1)
    assert loaded.term_weights() == learner.term_weights()
    assert repr(loaded.objectives[1]) == repr(learner.objectives[1])
    assert "weight=AutoWeight(share=0.3, steps=2)" in repr(loaded.objectives[1])
    assert config_of(loaded) == config_of(learner)


# What cannot be


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        (lambda: [EntropySpread(weight=AutoWeight())], "relative to terms whose weights are numbers: give one"),
        (lambda: [MetricLoss(losses.ContrastiveLoss(), weight=0.0), *terms()[1::2]], "give one a number"),
        (lambda: [*terms()[:2], EntropySpread(weight=AutoWeight(steps=7))], r"the same steps, not \[7, 100\]"),
        (lambda: [RankMI(), EntropySpread(weight=AutoWeight())], "do not go with the statistics of rank_mi"),
        (lambda: [CrossBatchMemory(losses.ContrastiveLoss()), terms()[1]], "do not go with the memory of"),
        (lambda: [*terms(), ProxyLoss(losses.AMSoftmaxLoss(), 3, name="entropy_spread_weight")], "two objectives"),
    ],
)
def test_what_cannot_be_measured_is_refused(objectives, message):
    with pytest.raises(ValueError, match=message):
        MetricLearner(tiny_embedder(), objectives())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0}, "share must be positive, not 0"),
        ({"share": float("nan")}, "share must be a finite number"),
        ({"share": "loud"}, "share must be a number, not 'loud'"),
        ({"steps": 0}, "steps must be a positive integer, not 0"),
        ({"steps": 2.5}, "steps must be a positive integer, not 2.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        AutoWeight(**arguments)


def test_steps_that_cannot_be_measured_one_by_one_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="do not go with `gradient_cache=4`"):
        MetricLearner(tiny_embedder(), terms(), gradient_cache=4)
    labels, x = colored_batch()
    with pytest.raises(ValueError, match="steps_per_execution must be 1 where auto weights"):
        made(terms(), steps_per_execution=2).fit(x, labels, verbose=0, callbacks=[AutoWeights()])
    with pytest.raises(UserError, match=r"has an AutoWeight.*AutoWeights\(\)"):
        made(terms()).fit(x, labels, verbose=0)
    with pytest.raises(ValueError, match="no objective has an AutoWeight"):
        made(terms()[::2]).fit(x, labels, verbose=0, callbacks=[AutoWeights()])
    learner = made(terms())
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="auto weights need Keras's TensorFlow backend, and this is jax"):
        learner.auto_weights.check_backend()


def test_a_term_without_a_gradient_has_weight_0_and_stops_the_training_after_its_steps():
    # Of one class no two are to be confused.
    learner = made([MetricLoss(losses.ContrastiveLoss()), EnergyConfusion(weight=AutoWeight(steps=3))])
    logs = train(learner, 2, size=4)
    assert [log["energy_confusion_weight"] for log in logs] == [0, 0]
    with pytest.raises(UserError, match="weight of energy_confusion cannot be measured, as gradients were 0"):
        train(learner, 1, size=4)


@pytest.mark.slow
def test_batches_in_which_a_term_has_no_gradient_do_not_count():
    learner = made([MetricLoss(losses.ContrastiveLoss()), EnergyConfusion(weight=AutoWeight(steps=3))], rate=0.0)
    train(learner, 1)
    assert learner.term_weights()["energy_confusion"] > 0
    train(learner, 1, size=4)
    assert learner.term_weights()["energy_confusion"] == 0
    train(learner, 1, size=4)
    ratios = values([learner.auto_weights.ratios])[0][:, 0, 1]
    assert list(ratios[1:]) == [0, 0]
    assert_close(learner.term_weights()["energy_confusion"], 0.03 / ratios[0])


def test_a_gradient_that_is_not_finite_does_not_count():
    # Leaves out such a step, as in half precision.
    learner = made(terms(steps=3), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0)))
    labels, x = colored_batch()
    broken = tf.cast(x, "float32") * np.nan
    one_step(learner, broken, labels)
    assert learner.term_weights()["entropy_spread"] == 0
    train(learner, 1)
    assert np.isfinite(learner.term_weights()["entropy_spread"])
    assert learner.term_weights()["entropy_spread"] > 0
