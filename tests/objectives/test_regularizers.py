"""Density adaptivity, energy confusion, entropy, orthogonality, intra-class."""

import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, random_batch
from tests.models.networks import colored_batch, images, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.cases import CASES, DENSITIES, FORMS, TARGETS, built, density
from tests.objectives.checks import (
    check_labels,
    check_symmetries,
)
from tfdml import losses, models
from tfdml.objectives import (
    DensityAdaptivity,
    EnergyConfusion,
    MetricLoss,
)
from tfdml.objectives.regularizers import class_densities, means_and_spreads, of_own_class
from tfdml.pairs import pairs_by_name

ENERGIES = [f"energy {form} mean" for form in FORMS]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", ["density soft", *ENERGIES, "pairs mean", "nearest mean", "orthogonal", "penalty sum"])
def test_symmetries_and_labels(name):
    objective = CASES[name].objective

    def function(labels, x):
        return objective(dict.fromkeys(objective.reads, x), labels)

    check_symmetries(function, relabeling=not name.startswith("density"))
    check_labels(function)
    if not name.startswith("density"):
        labels, x = random_batch(2, 12, 3, 6)
        np.testing.assert_array_equal(function(labels + 2**53, x), function(labels, x))


def test_a_large_offset_costs_no_digits():
    labels, x = random_batch(3, 11, 4, 6)
    x = np.round(x * 1024) / 1024
    _, expected = means_and_spreads(x, tf.constant(labels))
    _, spreads = means_and_spreads(x + 1000.0, tf.constant(labels))
    assert_close(spreads, expected, 1e-4)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_values_of_the_own_class_have_a_dense_gradient(dtype):
    labels = tf.constant([2, 0, 2, 1, 3, -1], dtype)
    variable = tf.Variable([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        values = of_own_class(variable, labels)
        total = tf.reduce_sum(values[:4])
    np.testing.assert_array_equal(values, [3.0, 1.0, 3.0, 2.0, np.nan, np.nan])
    gradient = tape.gradient(total, variable)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient, [1.0, 1.0, 2.0])


def test_the_hard_constraint_holds_exactly():
    objective = density(constraint="hard", eta=0.5).objective
    targets, given = values([objective.targets()])[0], np.array(DENSITIES)
    known = given > 0
    assert_close(targets[known] / targets[0], np.sqrt(given[known] / given[0]), 1e-6)
    assert_close(targets[known].mean(), TARGETS[0], 1e-6)
    assert_close(targets[~known], [TARGETS[0]], 1e-6)


def test_a_normalized_reference_has_no_scale():
    labels, x = random_batch(3, 10, 4, 5)
    given = np.array(DENSITIES)
    scaled = given / given[given > 0].mean()
    for factor in (1.0, 1000.0):
        objective = DensityAdaptivity(len(given), reference_density=given * factor, normalize_reference=True)
        built(objective, target_density=TARGETS)
        assert_close(objective({"embedding": x}, labels), references.density_adaptivity(labels, x, TARGETS, scaled))


@pytest.mark.parametrize("label", [-1, 9, 2**40])
@pytest.mark.parametrize("constraint", ["soft", "hard", None])
def test_a_label_without_a_target_is_not_a_number(label, constraint):
    labels, x = random_batch(3, 6, 3, 4)
    labels[2] = label
    assert np.isnan(density(constraint=constraint).objective({"embedding": x}, labels))


@pytest.mark.parametrize("labels", [np.arange(3).repeat(4), np.array([0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 4])])
def test_reference_densities_are_those_of_the_classes(labels):
    x = 100.0 + random_batch(3, len(labels), 1, 6, unit=False)[1]
    order = np.random.default_rng(0).permutation(len(labels))
    densities = class_densities(x[order], labels[order], 5)
    assert densities.dtype == np.float32
    present = references.classes_of(labels)
    expected = [references.density(labels, x, c) if c in present else 0.0 for c in range(5)]
    assert_close(densities, expected, 1e-6)
    np.testing.assert_array_equal(class_densities(x[:0], labels[:0], 2), [0.0, 0.0])


@pytest.mark.parametrize("constraint", ["soft", "hard", None])
def test_observes_the_mean_density_and_target_of_the_classes_of_a_batch(constraint):
    objective = density(constraint=constraint).objective
    labels, x = random_batch(4, 13, 4, 5)
    observed = objective.observe(pairs_by_name({"embedding": x}, labels))
    present = references.classes_of(labels)
    assert set(observed) == set(objective.observes)
    expected = {
        "d_avg": np.mean([references.density(labels, x, c) for c in present]),
        "target": np.mean([float(objective.targets()[c]) for c in present]),
    }
    for key, (total, count) in observed.items():
        assert_close(total / count, expected[key])
        assert count == len(present)


# Energy confusion

every_form = pytest.mark.parametrize("form", FORMS)
# The paper's, as it writes them: sums.
ENERGY_BASES = {
    "triplet": lambda: MetricLoss(losses.TripletLoss(margin=0.1, reduction="sum")),
    "n pair": lambda: MetricLoss(losses.NPairLoss(reduction="sum"), "projection"),
    "binomial": lambda: MetricLoss(losses.BinomialDevianceLoss(2.0, 0.5, 25.0, reduction="sum")),
}
WEIGHTS = {"triplet": 0.02, "n pair": 0.3, "binomial": 0.13}


def energy_learner(objectives, **options):
    learner = models.MetricLearner(tiny_embedder(batch_norm="statistics", **options), objectives)
    learner.build((None, 12, 12, 3))
    return learner


def gradients(learner, labels, x):
    """Of the learner's loss, by part; None where there is no path."""
    parts = learner.parts()
    with tf.GradientTape() as tape:
        loss = learner.compute_loss(x, tf.constant(labels), learner(x, training=True), training=True)
    return tape.gradient(loss, {part: [v.value for v in variables] for part, variables in parts.items()})


@pytest.mark.parametrize("representation", ["embedding", "projection"])
def test_the_gradient_reaches_the_projection_and_no_other_layer(representation):
    labels, x = colored_batch()
    learner = energy_learner([EnergyConfusion(representation=representation)])
    parts = gradients(learner, labels, x)
    assert len(parts["backbone"]) > 0
    for gradient in parts["backbone"]:
        assert gradient is None or not np.any(gradient)
    assert np.any(parts["projection"][0])


@pytest.mark.parametrize("base", ENERGY_BASES)
def test_beside_a_base_loss_the_backbone_sees_the_base_alone(base):
    labels, x = np.arange(12) % 3, images(size=12)
    alone = gradients(energy_learner([ENERGY_BASES[base]()]), labels, x)
    both = gradients(
        energy_learner([ENERGY_BASES[base](), EnergyConfusion(reduction="sum", weight=WEIGHTS[base])]), labels, x
    )
    for before, after in zip(alone["backbone"], both["backbone"], strict=True):
        assert np.any(before)
        assert_close(after, before, 1e-5)
    assert np.any(np.abs(both["projection"][0] - alone["projection"][0]) > 1e-4)


@every_form
def test_observes_the_mean_energy_of_pairs_of_classes(form):
    for size, classes in ((13, 4), (5, 1)):
        labels, x = random_batch(4, size, classes, 5)
        objective = EnergyConfusion(form)
        ((total, count),) = objective.observe(pairs_by_name({"detached_embedding": x}, labels)).values()
        assert_close(total / max(float(count), 1.0), references.energy_confusion(labels, x, "plain"))
        assert count == len(references.class_pairs(labels))
