"""Losses as their authors and measures have them, and where a formula loses digits."""

import numpy as np
import pytest

from tests.losses import references
from tests.support.mathematics import MODES, assert_close, random_batch, value_and_gradients
from tfdml.losses import (
    NTXentLoss,
    QuadrupletLoss,
    RecallAtKLoss,
    SmoothAPLoss,
    ThresholdConsistentMarginLoss,
    TripletLoss,
    TupletMarginLoss,
    VICRegLoss,
)


def test_the_default_weights_are_those_of_the_authors_code_on_two_views():
    views = np.random.default_rng(3).normal(size=(2, 5, 3)) * 0.5
    views[1] = views[0]  # with equal views, both batches have the statistics of one

    def statistics(z):
        covariances = np.cov(z.T)
        shortfall = np.mean(np.maximum(1 - np.sqrt(np.diag(covariances) + 1e-4), 0))
        return shortfall, (np.sum(covariances**2) - np.sum(np.diag(covariances) ** 2)) / z.shape[1]

    deviations, squares = zip(*map(statistics, views), strict=True)
    authors = 25 * np.mean((views[0] - views[1]) ** 2) + 25 * sum(deviations) / 2 + 1 * sum(squares)
    # Of 10 images in place of 5, a variance is divided by 9 and not by 8.
    batch = np.concatenate(views) * np.sqrt(9 / 8)
    assert_close(VICRegLoss()(np.tile(np.arange(5), 2), batch.astype("float32")), authors)


def test_small_angles_follow_the_formula_without_a_jump():
    values = []
    for angle in np.geomspace(1e-4, 1e-2, 41):
        angles = np.array([0.0, angle, 0.2])
        x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
        values.append(float(TupletMarginLoss(variance_weight=0.0)([0, 0, 1], x)))
        exact = references.tuplet_margin(
            [0, 0, 1], np.stack([np.cos(angles), np.sin(angles)], 1), scale=32.0
        )
        assert_close(values[-1], exact, 2e-3)
    # The formula's value falls by less than 0.2 % from one angle to the next up to the last few.
    assert np.max(np.abs(np.diff(values[:25])) / values[0]) < 1.5e-3


def test_losses_of_small_temperatures_are_one_minus_the_average_precision_and_the_recall():
    labels, x = random_batch(6, 20, 4, 5)
    order = np.argsort(-x @ x.T, axis=1)[:, 1:]
    hits = labels[order] == labels[:, None]
    precisions = np.cumsum(hits, axis=1) / np.arange(1, 20)
    exact = 1 - (precisions * hits).sum(1) / hits.sum(1)
    np.testing.assert_allclose(SmoothAPLoss(temperature=1e-6).call(labels, x), exact, atol=1e-5)
    # Of a positive at rank k one half is found.
    found = hits[:, :2].sum(1) + 0.5 * hits[:, 2]
    exact = 1 - found / np.minimum(3, hits.sum(1))
    np.testing.assert_allclose(RecallAtKLoss([3], 1e-6, 1e-2).call(labels, x), exact, atol=1e-4)


def test_the_distance_is_that_of_the_source_by_default():
    labels, x = random_batch(3, 9, 3, 4)
    # Schroff et al.'s squared distances; Hermans et al.'s soft margin on plain ones.
    hinges = references.triplet(labels, x, margin=0.1, mining="all", kind="sqeuclidean")
    assert_close(TripletLoss()(labels, x), hinges)
    soft = references.triplet(labels, x, margin="soft", mining="hard", kind="euclidean")
    assert_close(TripletLoss("soft", "hard")(labels, x), soft)


def test_all_triplets_keep_their_digits_in_a_batch_of_hundreds():
    labels, x = random_batch(4, 300, 20, 32)
    squared = np.maximum(2 - 2 * x.astype("float64") @ x.T.astype("float64"), 0)
    same = labels[:, None] == labels[None, :]
    hinges = []
    for i in range(300):
        near, far = same[i] & (np.arange(300) != i), ~same[i]
        hinges.append(
            np.maximum(squared[i, near][:, None] - squared[i, far][None, :] + 0.1, 0).ravel()
        )
    hinges = np.concatenate(hinges)
    assert_close(TripletLoss(margin=0.1)(labels, x), hinges.sum() / np.count_nonzero(hinges), 1e-6)
    assert_close(TripletLoss(margin=0.1, average="all")(labels, x), hinges.mean(), 1e-6)


def test_a_pair_at_its_margin_counts_as_hard_and_costs_nothing():
    # Zhang et al. count s <= 0.9 and s >= 0.5. Cosines of 0.5 and 1 of the negatives, 0.5 and 0.5
    # of the positives.
    x = np.array([[1, 0, 0, 0], [0.5, 0.5, 0.5, 0.5], [1, 0, 0, 0]], "float32")
    labels = [0, 0, 1]
    hard = ThresholdConsistentMarginLoss(0.5, 0.5)
    assert_close(hard(labels, x), 0.5 / 2)
    wrong = ThresholdConsistentMarginLoss(0.75, 0.5, positive_weight=3, negative_weight=0)
    assert_close(wrong(labels, x), 3 * 0.25)


@pytest.mark.parametrize("mode", MODES)
def test_a_hinge_of_exactly_zero_is_not_active(mode):
    # d_ap = 1, d_an = 2 and a margin of 1: the only violated triplet is that of the second anchor.
    x = np.array([[0.0], [1.0], [2.0]])
    loss = TripletLoss(margin=1.0, distance="euclidean")
    value, (gradient,) = value_and_gradients(lambda e: loss([0, 0, 1], e), x, mode=mode)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [[-1.0], [2.0], [-1.0]])


def test_a_thousand_images_lose_no_digits():
    labels, x = (
        np.arange(600) % 200,
        np.random.default_rng(3).normal(size=(600, 16)).astype("float32"),
    )
    d = np.linalg.norm(x[:, None].astype("float64") - x[None], axis=2)
    same = labels[:, None] == labels
    far = np.sort(d[~same])
    expected = np.mean(
        [np.maximum(p + 0.1 - far, 0.0).mean() for p in d[same & ~np.eye(600, dtype=bool)]]
    )
    assert_close(QuadrupletLoss(margin=-100.0)(labels, x), expected, 1e-5)


def test_nt_xent_of_two_views_of_each_image_is_the_loss_of_simclr():
    """Equation 1 of the paper, image by image, where view 2k - 1 and 2k are those of image k."""
    temperature, views = 0.1, np.random.default_rng(4).normal(size=(12, 5))
    views /= np.linalg.norm(views, axis=1, keepdims=True)
    values = []
    for i, view in enumerate(views):
        j = i + 1 if i % 2 == 0 else i - 1
        others = [np.exp(view @ views[k] / temperature) for k in range(12) if k != i]
        values.append(-np.log(np.exp(view @ views[j] / temperature) / sum(others)))
    images = np.repeat(np.arange(6), 2)
    assert_close(NTXentLoss(temperature)(images, views.astype("float32")), np.mean(values))
