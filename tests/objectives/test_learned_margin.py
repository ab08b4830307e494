"""The margin loss with learned boundaries, and SoftTriple with its regulariser."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.losses.references_ranking import draw_probabilities
from tests.mathematics import assert_close, finite_differences, random_batch
from tests.models.networks import coloured_batch, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_config,
    check_degenerate,
    check_formula,
    check_large,
    check_saved_with_its_learner,
    check_symmetries,
    total_loss,
)
from tfdml import losses, models
from tfdml.objectives import LearnedMargin, RegularizedSoftTriple
from tfdml.training.terms import build_objectives

BETA = [1.2, 0.9, 1.0, 1.1, 0.8, 1.3, 0.7, 1.0, 1.1]
CASES = {"mean": {}, "sum": {"reduction": "sum"}, "nu": {"nu": 0.3}, "nu sum": {"nu": 0.3, "reduction": "sum"}}
every_case = pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)


def margin(beta=BETA, **arguments):
    objective = LearnedMargin(len(beta), **arguments)
    objective.build({})
    objective.beta.assign(beta)
    return objective


def on_embedding(objective):
    return lambda labels, x: objective({"embedding": x}, labels)


def gradients(objective, labels, x, weight, mode):
    """The value, and its gradients by the vectors and by the objective's weight."""

    @tf.function(jit_compile=mode == "xla", autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = objective({"embedding": x}, labels)
        return value, tape.gradient(value, [x, weight.value])

    tf.config.run_functions_eagerly(mode == "eager")
    try:
        return run(tf.constant(x))
    finally:
        tf.config.run_functions_eagerly(False)


@every_case
def test_margin_equals_the_formula(arguments):
    reference = functools.partial(references.learned_margin, beta=BETA, **arguments)
    check_formula(on_embedding(margin(**arguments)), reference)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_margin_gradients_equal_finite_differences(arguments, mode):
    labels, x = random_batch(11, 8, 3, 4)
    objective = margin(BETA[:3], **arguments)
    start, drawn = np.asarray(objective.beta), draw_probabilities(labels, x)
    value, actual = gradients(objective, labels, x, objective.beta, mode)
    assert_close(value, references.learned_margin(labels, x, start, **arguments))
    expected = finite_differences(
        lambda e, b: references.learned_margin(labels, e, b, probabilities=drawn, **arguments), x, start
    )
    for found, wanted in zip(actual, expected, strict=True):
        # By beta, the gradient of a mean of as many pulls as pushes may vanish; by x it does not.
        assert_close(found, wanted, floor=1e-6)
    assert np.any(expected[0])


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_margin_of_degenerate_batches(mode):
    reference = functools.partial(references.learned_margin, beta=BETA, nu=0.3)
    check_degenerate(on_embedding(margin(nu=0.3)), reference, mode)


def test_a_boundary_that_is_not_moved_is_the_margin_loss():
    labels, x = random_batch(3, 12, 4, 6)
    value = LearnedMargin(4)({"embedding": x}, labels)
    assert_close(value, losses.MarginLoss()(labels, x), 1e-6)


def test_nu_draws_the_boundaries_inwards():
    labels, x = np.arange(12) % 4, random_batch(3, 12, 4, 6)[1]
    objective = margin(BETA[:4], nu=10.0)
    _, (_, gradient) = gradients(objective, labels, x, objective.beta, "eager")
    assert np.all(np.asarray(gradient) > 0)


def test_margin_symmetries():
    check_symmetries(on_embedding(margin()), relabelling=False)


@pytest.mark.slow
def test_margin_of_a_batch_of_two_thousand():
    check_large(on_embedding(LearnedMargin(100)), size=2048)


@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_a_label_without_a_boundary_is_not_a_number(label):
    labels, x = random_batch(3, 6, 3, 4)
    labels[2] = label
    assert np.isnan(margin(BETA[:3])({"embedding": x}, labels))


def soft_triple(reduction="sum_over_batch_size", centres=3, tau=0.2):
    objective = RegularizedSoftTriple(4, centres, scale=5.0, tau=tau, reduction=reduction)
    objective.build({"embedding": (None, 4)})
    return objective


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("tau", [0.2, 0.0])
def test_soft_triple_equals_the_formula(mode, tau):
    labels, x = random_batch(5, 7, 4, 4, unit=False)
    objective = soft_triple(tau=tau)
    proxies = objective.class_proxies.proxies
    start = values([proxies])[0]

    def reference(x, centres):
        return references.regularized_soft_triple(labels, x, centres, tau, scale=5.0)

    value, actual = gradients(objective, labels, x, proxies, mode)
    assert_close(value, reference(x, start))
    for found, wanted in zip(actual, finite_differences(reference, x, start), strict=True):
        assert_close(found, wanted)


def test_soft_triple_as_a_sum_is_its_mean_times_the_images():
    labels, x = random_batch(5, 7, 4, 4)
    total, mean = soft_triple("sum"), soft_triple()
    total.class_proxies.proxies.assign(mean.class_proxies.proxies)
    assert_close(total({"embedding": x}, labels), 7 * float(mean({"embedding": x}, labels)), 1e-6)


def test_centres_that_coincide_are_finite_and_cost_nothing():
    labels, x = random_batch(5, 7, 4, 4)
    objective = soft_triple()
    one = np.random.default_rng(0).normal(size=(4, 1, 4))
    objective.class_proxies.proxies.assign(np.repeat(one, 3, axis=1))
    assert objective.regularizer() == 0.0
    _, (_, gradient) = gradients(objective, labels, x, objective.class_proxies.proxies, "eager")
    assert np.all(np.isfinite(gradient))


def test_one_centre_has_no_regulariser():
    labels, x = random_batch(5, 7, 4, 4)
    objective = soft_triple(centres=1)
    assert objective.regularizer() == 0.0
    assert np.isfinite(objective({"embedding": x}, labels))


def test_the_regulariser_merges_centres():
    objective = soft_triple()
    before = float(objective.regularizer())
    with tf.GradientTape() as tape:
        value = objective.regularizer()
    proxies = objective.class_proxies.proxies
    gradient = tape.gradient(value, proxies.value)
    proxies.assign(proxies - 0.1 * gradient)
    assert float(objective.regularizer()) < before


@pytest.mark.slow
def test_learner_trains_boundaries_and_centres_and_is_saved_with_them(tmp_path):
    labels, x = coloured_batch()
    terms = [LearnedMargin(3, beta=1.0), RegularizedSoftTriple(3, 2)]
    learner = models.MetricLearner(tiny_embedder(batch_norm="statistics"), terms)
    learner.build((None, 12, 12, 3))
    before = values(learner.parts()["objectives"])
    learner.compile(optimizer=keras.optimizers.Adam(0.01))
    history = learner.fit(x, labels, batch_size=len(x), epochs=3, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    after = values(learner.parts()["objectives"])
    assert [array.shape for array in after] == [(3,), (3, 2, 5)]
    assert np.any(after[1] != before[1])
    check_saved_with_its_learner(learner, tmp_path / "learner.keras", lambda m: total_loss(m, labels, x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    labels, x = random_batch(5, 7, 3, 4)
    for objective in (margin(), soft_triple()):
        value = objective({"embedding": keras.ops.cast(x, dtype)}, labels)
        assert value.dtype == "float32"
        assert np.isfinite(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearnedMargin(0), "num_classes must be a positive integer"),
        (lambda: LearnedMargin(3, alpha=-0.1), "alpha must not be negative"),
        (lambda: LearnedMargin(3, reduction="max"), "'mean' or 'sum'"),
        (lambda: RegularizedSoftTriple(3, tau=-1.0), "tau must not be negative"),
        (lambda: RegularizedSoftTriple(0), "num_classes must be a positive integer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configuration():
    check_config(LearnedMargin(7, 0.3, 1.1, 0.2, "projection", "sum", 0.5, "mine"))
    check_config(RegularizedSoftTriple(7, 4, 10.0, 0.2, 0.05, 0.3, "sum", weight=0.5, name="mine"))


def test_command_line_names_them_and_gives_them_the_classes():
    centres, boundaries = build_objectives("learned_margin(nu=0.1) + regularized_soft_triple(proxies_per_class=2)", 98)
    assert isinstance(boundaries, LearnedMargin)
    assert isinstance(centres, RegularizedSoftTriple)
    assert (boundaries.num_classes, boundaries.nu) == (98, 0.1)
    assert (centres.class_proxies.num_classes, centres.class_proxies.proxies_per_class) == (98, 2)
