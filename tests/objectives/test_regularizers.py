"""Density adaptivity, energy confusion, entropy, orthogonality, intra-class."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import colored_batch, images, tiny_embedder
from tests.objectives import references_classes as references
from tests.objectives.cases import DENSITIES, FORMS, TARGETS, built, density
from tests.support.mathematics import assert_close, random_batch
from tfdml import losses, models
from tfdml.objectives import (
    DensityAdaptivity,
    EnergyConfusion,
    MetricLoss,
)
from tfdml.objectives.regularizers import class_densities, means_and_spreads
from tfdml.pairs import pairs_by_name


def test_a_large_offset_costs_no_digits():
    labels, x = random_batch(3, 11, 4, 6)
    x = np.round(x * 1024) / 1024
    _, expected = means_and_spreads(x, tf.constant(labels))
    _, spreads = means_and_spreads(x + 1000.0, tf.constant(labels))
    assert_close(spreads, expected, 1e-4)


def test_a_normalized_reference_has_no_scale():
    labels, x = random_batch(3, 10, 4, 5)
    given = np.array(DENSITIES)
    scaled = given / given[given > 0].mean()
    for factor in (1.0, 1000.0):
        objective = DensityAdaptivity(
            len(given), reference_density=given * factor, normalize_reference=True
        )
        built(objective, target_density=TARGETS)
        assert_close(
            objective({"embedding": x}, labels),
            references.density_adaptivity(labels, x, TARGETS, scaled),
        )


@pytest.mark.parametrize("label", [-1, 9, 2**40])
@pytest.mark.parametrize("constraint", ["soft", "hard", None])
def test_a_label_without_a_target_is_not_a_number(label, constraint):
    labels, x = random_batch(3, 6, 3, 4)
    labels[2] = label
    assert np.isnan(density(constraint=constraint).objective({"embedding": x}, labels))


@pytest.mark.parametrize(
    "labels", [np.arange(3).repeat(4), np.array([0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 4])]
)
def test_reference_densities_are_those_of_the_classes(labels):
    x = 100.0 + random_batch(3, len(labels), 1, 6, unit=False)[1]
    order = np.random.default_rng(0).permutation(len(labels))
    densities = class_densities(x[order], labels[order], 5)
    assert densities.dtype == np.float32
    present = references.classes_of(labels)
    expected = [references.density(labels, x, c) if c in present else 0.0 for c in range(5)]
    assert_close(densities, expected, 1e-6)
    np.testing.assert_array_equal(class_densities(x[:0], labels[:0], 2), [0.0, 0.0])


@pytest.mark.parametrize("label", [-1, 5])
def test_reference_densities_are_of_known_classes(label):
    with pytest.raises(ValueError, match=f"must lie in 0 .. 4, but reach .*{label}"):
        class_densities(np.zeros((2, 3)), np.array([2, label]), 5)


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


def energy_learner(objectives, **options):
    learner = models.MetricLearner(tiny_embedder(batch_norm="statistics", **options), objectives)
    learner.build((None, 12, 12, 3))
    return learner


def gradients(learner, labels, x):
    """Of the learner's loss, by part; None where there is no path."""
    parts = learner.parts()
    with tf.GradientTape() as tape:
        loss = learner.compute_loss(
            x, tf.constant(labels), learner(x, training=True), training=True
        )
    return tape.gradient(
        loss, {part: [v.value for v in variables] for part, variables in parts.items()}
    )


@pytest.mark.parametrize("representation", ["embedding", "projection"])
def test_the_gradient_reaches_the_projection_and_no_other_layer(representation):
    labels, x = colored_batch()
    learner = energy_learner([EnergyConfusion(representation=representation)])
    parts = gradients(learner, labels, x)
    assert len(parts["backbone"]) > 0
    for gradient in parts["backbone"]:
        assert gradient is None or not np.any(gradient)
    assert np.any(parts["projection"][0])


def test_next_to_a_base_loss_the_backbone_sees_the_base_alone():
    labels, x = np.arange(12) % 3, images(size=12)
    base = MetricLoss(losses.TripletLoss(margin=0.1, reduction="sum"))
    alone = gradients(energy_learner([base]), labels, x)
    both = gradients(
        energy_learner([base, EnergyConfusion(reduction="sum", weight=0.02)]), labels, x
    )
    for before, after in zip(alone["backbone"], both["backbone"], strict=True):
        assert np.any(before)
        assert_close(after, before, 1e-5)
    assert np.any(np.abs(both["projection"][0] - alone["projection"][0]) > 1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_observes_the_mean_energy_of_pairs_of_classes(form):
    for size, classes in ((13, 4), (5, 1)):
        labels, x = random_batch(4, size, classes, 5)
        objective = EnergyConfusion(form)
        ((total, count),) = objective.observe(
            pairs_by_name({"detached_embedding": x}, labels)
        ).values()
        assert_close(
            total / max(float(count), 1.0), references.energy_confusion(labels, x, "plain")
        )
        assert count == len(references.class_pairs(labels))
