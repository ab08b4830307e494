"""Losses of a positive against all negatives of its anchor."""

import numpy as np

from tests.losses import references
from tests.mathematics import assert_close, random_batch
from tfdml.losses import (
    AngularLoss,
    LiftedStructureLoss,
    NPairLoss,
    NTXentLoss,
    SupConLoss,
    TupletMarginLoss,
)


def test_angular_at_65_degrees_keeps_opposite_negatives():
    # The negatives of each end of the pair are nearest to one and furthest from the other: the smallest products.
    x = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], "float32")
    assert_close(AngularLoss(65.0)([0, 0, 1, 2], x), references.angular([0, 0, 1, 2], x, 65.0))


def test_n_pair_with_two_images_per_class_is_eq_9_of_ecaml():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    expected = 0.0
    for i in range(6):
        others = [j for j in range(6) if j // 2 != i // 2]
        expected += np.log(1 + sum(np.exp(x[i] @ x[j] - x[i] @ x[i ^ 1]) for j in others))
    assert_close(NPairLoss(reduction="sum")([0, 0, 1, 1, 2, 2], x), expected)


def test_the_scaled_mean_is_that_of_the_ecaml_authors():
    """Per image: softmax over its partner and all images of other classes, of unit vectors times 10; then the mean."""
    x = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")
    unit = 10 * x.astype("float64") / np.linalg.norm(x, axis=1, keepdims=True)
    expected = []
    for i in range(6):
        exponents = np.array([unit[i] @ unit[i ^ 1], *(unit[i] @ unit[j] for j in range(6) if j // 2 != i // 2)])
        expected.append(np.log(np.exp(exponents - exponents.max()).sum()) + exponents.max() - exponents[0])
    assert_close(NPairLoss(scale=10.0)([0, 0, 1, 1, 2, 2], x), np.mean(expected))


def test_nt_xent_is_n_pair_of_one_length_and_sup_con_where_classes_have_two_images():
    labels, x = random_batch(3, 12, 4, 5)
    assert_close(NTXentLoss(0.25)(labels, x), NPairLoss(scale=2.0)(labels, x))
    assert float(NTXentLoss(0.25)(labels, x)) < float(SupConLoss(0.25)(labels, x))
    pairs = np.repeat(np.arange(6), 2)
    assert_close(NTXentLoss(0.25)(pairs, x), SupConLoss(0.25)(pairs, x))


def test_a_positive_within_the_slack_is_pushed_outwards():
    angles = np.radians([0.0, 3.0, 40.0])
    x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
    further = np.stack([np.cos(angles), np.sin(angles + np.radians([0, 2, 0]))], 1).astype("float32")
    loss = TupletMarginLoss(margin_degrees=10, scale=8.0, variance_weight=0.0)
    assert loss.call([0, 0, 1], further)[0] < loss.call([0, 0, 1], x)[0]


def test_small_angles_follow_the_formula_without_a_jump():
    values = []
    for angle in np.geomspace(1e-4, 1e-2, 41):
        angles = np.array([0.0, angle, 0.2])
        x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
        values.append(float(TupletMarginLoss(variance_weight=0.0)([0, 0, 1], x)))
        exact = references.tuplet_margin([0, 0, 1], np.stack([np.cos(angles), np.sin(angles)], 1), scale=32.0)
        assert_close(values[-1], exact, 2e-3)
    # The formula's value falls by less than 0.2 % from one angle to the next up to the last few.
    assert np.max(np.abs(np.diff(values[:25])) / values[0]) < 1.5e-3


def test_lifted_structure_is_tensorflow_addons():
    labels, x = random_batch(8, 9, 3, 4)
    distances = np.sqrt(((x[:, None] - x[None]).astype("float64") ** 2).sum(-1))
    same = labels[:, None] == labels[None]
    push = np.where(same, 0, np.exp(1.0 - distances)).sum(1)
    hinged = np.maximum(np.log(push[:, None] + push[None]) + distances, 0) ** 2
    positive = same & ~np.eye(9, dtype=bool)
    assert_close(LiftedStructureLoss(1.0)(labels, x), 0.25 * hinged[positive].sum() / (positive.sum() / 2))
