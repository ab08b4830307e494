"""Losses that approximate a measure of ranking."""

import numpy as np
import pytest

from tests.mathematics import assert_close, random_batch
from tfdml.losses import FastAPLoss, HistogramLoss, RecallAtKLoss, SmoothAPLoss
from tfdml.losses.ranking import soft_histograms


def test_soft_histograms_share_between_neighbors_and_keep_the_mass():
    positions = np.array([[0.25, 1.0, 2.0], [1.5, 9.0, -1.0]], "float32")
    mask = np.array([[True, True, False], [True, True, True]])
    np.testing.assert_allclose(soft_histograms(positions, mask, 2), [[0.75, 1.25, 0.0], [1.0, 0.5, 1.5]])


def test_histogram_loss_is_the_probability_of_a_reversed_pair():
    generator = np.random.default_rng(0)
    angles = generator.uniform(0, np.pi, 40)
    x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
    labels = generator.integers(0, 4, 40)
    cosines, upper = x @ x.T, np.triu(np.ones((40, 40), bool), 1)
    same = labels[:, None] == labels[None]
    reversed_pairs = np.mean(cosines[upper & same][:, None] <= cosines[upper & ~same][None])
    assert_close(HistogramLoss(bins=2000)(labels, x), reversed_pairs, 0.01)


@pytest.mark.parametrize(("first", "expected"), [(0.9, 0.0), (-0.9, 0.5)])
def test_fast_ap_is_one_minus_the_average_precision(first, expected):
    """One positive, ranked before or after the one negative: an average precision of 1 or of 1/2."""
    others = [[first, np.sqrt(1 - first**2)], [0.0, 1.0]]
    value = FastAPLoss(bins=200).call([0, 0, 1], np.array([[1.0, 0.0], *others], "float32"))
    assert_close(value[0] * 2 / 3, expected, floor=1e-5)


def test_smooth_ap_of_a_small_temperature_is_one_minus_the_average_precision():
    labels, x = random_batch(6, 20, 4, 5)
    order = np.argsort(-x @ x.T, axis=1)[:, 1:]
    hits = labels[order] == labels[:, None]
    precisions = np.cumsum(hits, axis=1) / np.arange(1, 20)
    exact = 1 - (precisions * hits).sum(1) / hits.sum(1)
    np.testing.assert_allclose(SmoothAPLoss(temperature=1e-6).call(labels, x), exact, atol=1e-5)


def test_recall_of_small_temperatures_is_one_minus_the_recall():
    labels, x = random_batch(6, 20, 4, 5)
    order = np.argsort(-x @ x.T, axis=1)[:, 1:]
    hits = labels[order] == labels[:, None]
    # Of a positive at rank k one half is found.
    found = hits[:, :2].sum(1) + 0.5 * hits[:, 2]
    exact = 1 - found / np.minimum(3, hits.sum(1))
    np.testing.assert_allclose(RecallAtKLoss([3], 1e-6, 1e-2).call(labels, x), exact, atol=1e-4)
