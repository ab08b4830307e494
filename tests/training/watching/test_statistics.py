"""Statistics of a batch against slow loops in float64."""

import math

import numpy as np
import pytest

from tfdml.training.watching.statistics import (
    distances,
    gradient_shares,
    hardest_triplets,
    nearest_proxies,
    pair_distances,
    spread,
)


def batch(seed=0, size=12, dim=5, classes=4):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, dim)) * np.arange(1, dim + 1)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), rng.integers(0, classes, size)


def looped_distances(x):
    return np.array(
        [[math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(r, s, strict=True))) for s in x] for r in x]
    )


@pytest.mark.parametrize(("size", "dim"), [(12, 5), (4, 9)])
def test_spread_is_that_of_the_covariance(size, dim):
    x = batch(size=size, dim=dim)[0].astype(np.float64)
    centre = [sum(float(row[j]) for row in x) / size for j in range(dim)]
    covariance = np.zeros((dim, dim))
    for row in x:
        for i in range(dim):
            for j in range(dim):
                covariance[i, j] += (row[i] - centre[i]) * (row[j] - centre[j]) / size
    values = [value for value in np.linalg.eigvalsh(covariance) if value > 1e-15]
    total = sum(values)
    entropy = -sum(value / total * math.log(value / total) for value in values)
    found = spread(x)
    assert found["variance"] == pytest.approx(np.trace(covariance), rel=1e-9)
    assert found["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-6)
    assert found["participation_ratio"] == pytest.approx(total**2 / sum(v**2 for v in values), rel=1e-6)
    assert 1 <= found["participation_ratio"] <= found["effective_rank"] <= min(size - 1, dim)
    # Of unit vectors half the mean squared distance.
    assert found["variance"] == pytest.approx((looped_distances(x) ** 2).mean() / 2, rel=1e-6)


@pytest.mark.parametrize("x", [np.ones((5, 3)), np.zeros((4, 2)), np.ones((1, 3)), np.full((8, 3), 1 / 3, np.float32)])
def test_a_point_has_no_spread(x):
    assert spread(x) == {"variance": pytest.approx(0, abs=1e-12), "effective_rank": 1.0, "participation_ratio": 1.0}


def test_distances_of_pairs_each_once():
    x, labels = batch()
    x[3] = x[7]
    matrix = looped_distances(x)
    np.testing.assert_allclose(distances(x), matrix, atol=1e-7)
    positive, negative = [], []
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            (positive if labels[i] == labels[j] else negative).append(matrix[i, j])
    found = pair_distances(matrix, labels)
    np.testing.assert_allclose(sorted(found[0]), sorted(positive))
    np.testing.assert_allclose(sorted(found[1]), sorted(negative))


def test_the_hardest_triplets_are_those_that_loops_find():
    x, labels = batch(1)
    matrix = looped_distances(x)
    expected = []
    for a in range(len(x)):
        own = [(matrix[a, p], p) for p in range(len(x)) if p != a and labels[p] == labels[a]]
        others = [(matrix[a, n], n) for n in range(len(x)) if labels[n] != labels[a]]
        if own and others:
            (d_pos, p), (d_neg, n) = max(own), min(others)
            expected.append((d_pos - d_neg, a, p, n))
    expected.sort(reverse=True)
    found = hardest_triplets(matrix, labels, 3)
    assert [(t.anchor, t.positive, t.negative) for t in found] == [row[1:] for row in expected[:3]]
    assert [t.violation for t in found] == pytest.approx([row[0] for row in expected[:3]])


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [0]])
def test_no_triplets_without_positives_or_negatives(labels):
    x = np.eye(3)[: len(labels)]
    assert hardest_triplets(distances(x), np.array(labels), 5) == []


def test_nearest_proxies_by_cosine():
    x, _ = batch(2)
    proxies = np.random.default_rng(3).normal(size=(6, 5)) * [[9], [1], [1], [1], [1], [0]]
    expected = []
    for row in x:
        cosines = [sum(a * b for a, b in zip(row, p, strict=True)) / max(math.hypot(*p), 1e-12) for p in proxies]
        expected.append(cosines.index(max(cosines)))
    assert nearest_proxies(x, proxies).tolist() == expected


def test_shares_add_up_and_tell_a_conflict():
    gradients = np.random.default_rng(0).normal(size=(3, 20))
    gram, total = gradients @ gradients.T, gradients.sum(axis=0)
    shares = gradient_shares(gram)
    assert shares == pytest.approx([sum(g * total) / sum(total**2) for g in gradients])
    assert shares.sum() == pytest.approx(1)
    assert gradient_shares(np.array([[4.0, -2.0], [-2.0, 1.0]])) == pytest.approx([2, -1])
    assert gradient_shares(np.array([[1.0, -1.0], [-1.0, 1.0]])).tolist() == [0, 0]
