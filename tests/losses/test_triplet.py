"""Triplet and quadruplet loss."""

import numpy as np
import pytest

from tests.losses import references
from tests.mathematics import MODES, assert_close, random_batch, value_and_gradients
from tfdml.losses import QuadrupletLoss, TripletLoss


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
        hinges.append(np.maximum(squared[i, near][:, None] - squared[i, far][None, :] + 0.1, 0).ravel())
    hinges = np.concatenate(hinges)
    assert_close(TripletLoss(margin=0.1)(labels, x), hinges.sum() / np.count_nonzero(hinges), 1e-6)
    assert_close(TripletLoss(margin=0.1, average="all")(labels, x), hinges.mean(), 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_hinge_of_exactly_zero_is_not_active(mode):
    # d_ap = 1, d_an = 2 and a margin of 1: the only violated triplet is that of the second anchor.
    x = np.array([[0.0], [1.0], [2.0]])
    loss = TripletLoss(margin=1.0, distance="euclidean")
    value, (gradient,) = value_and_gradients(lambda e: loss([0, 0, 1], e), x, mode=mode)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [[-1.0], [2.0], [-1.0]])


def test_a_thousand_images_lose_no_digits():
    labels, x = np.arange(600) % 200, np.random.default_rng(3).normal(size=(600, 16)).astype("float32")
    d = np.linalg.norm(x[:, None].astype("float64") - x[None], axis=2)
    same = labels[:, None] == labels
    far = np.sort(d[~same])
    expected = np.mean([np.maximum(p + 0.1 - far, 0.0).mean() for p in d[same & ~np.eye(600, dtype=bool)]])
    assert_close(QuadrupletLoss(margin=-100.0)(labels, x), expected, 1e-5)
