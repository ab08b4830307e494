"""Expanded queries against sums written out, and k-reciprocal re-ranking against the paper's
sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.retrieval import references
from tests.retrieval.references import unit
from tfdml.errors import UserError
from tfdml.retrieval import (
    expand_queries,
    fit_whitening,
    k_reciprocal_neighbors,
    nearest_neighbors,
    reranking,
)
from tfdml.retrieval.reranking import encode


def made(count=40, dim=6, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(classes, dim))[np.arange(count) % classes] + rng.normal(size=(count, dim))
    ).astype("float32")


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(2, 30),
    k=st.integers(1, 40),
    alpha=st.sampled_from([0, 0.5, 1, 3]),
    roles=st.booleans(),
    seed=st.integers(0, 100),
)
def test_queries_are_expanded_as_by_hand(count, k, alpha, roles, seed):
    points = made(count + 7, seed=seed)
    queries, gallery = (points[:count], points[count:]) if roles else (points, None)
    expanded = expand_queries(queries, gallery, k=k, alpha=alpha)
    np.testing.assert_allclose(
        expanded, references.expansion(queries, gallery, k, alpha), atol=2e-5
    )
    assert expanded.dtype == np.float32


@pytest.mark.parametrize("alpha", [0, 3])
def test_degenerate_galleries_give_finite_vectors(alpha):
    same = np.ones((6, 3))
    np.testing.assert_allclose(
        expand_queries(same, k=3, alpha=alpha), references.unit(same), atol=1e-6
    )
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]])
    assert np.isfinite(expand_queries(opposite, k=3, alpha=alpha)).all()
    assert not expand_queries(np.zeros((4, 2)), k=2, alpha=alpha).any()


@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(3, 28),
    k1=st.integers(1, 12),
    k2=st.integers(1, 5),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    roles=st.booleans(),
    seed=st.integers(0, 50),
)
def test_the_whole_re_ranking_is_that_of_the_paper(count, k1, k2, weight, roles, seed):
    points = made(count + 9, seed=seed)
    queries, gallery = (points[:count], points[count:]) if roles else (points, None)
    expected = references.reranked(
        queries, gallery, min(k1, len(points) - 1), min(k2, len(points)), weight
    )
    depth = 9 if roles else len(points) - 1
    rows, distances = k_reciprocal_neighbors(
        queries, gallery, k=depth, k1=k1, k2=k2, weight=weight, top=len(points)
    )
    np.testing.assert_allclose(distances, np.take_along_axis(expected, rows, axis=1), atol=2e-5)
    np.testing.assert_allclose(distances, np.sort(expected, axis=1)[:, :depth], atol=2e-5)
    assert all(len(set(row)) == depth for row in rows.tolist())
    if not roles:
        assert not (rows == np.arange(len(points))[:, None]).any()


@pytest.mark.parametrize("roles", [False, True])
def test_of_the_top_each_distance_is_exact_and_the_rest_stays_behind(roles):
    points = made(60, seed=2)
    queries, gallery = (points[:20], points[20:]) if roles else (points, None)
    expected = references.reranked(queries, gallery, 8, 3, 0.3)
    plain = nearest_neighbors(queries, gallery, k=30, distance="cosine")[0]
    rows, distances = k_reciprocal_neighbors(queries, gallery, k=30, k1=8, k2=3, top=12)
    np.testing.assert_array_equal(np.sort(rows[:, :12], axis=1), np.sort(plain[:, :12], axis=1))
    np.testing.assert_allclose(
        distances[:, :12], np.take_along_axis(expected, rows[:, :12], axis=1), atol=2e-5
    )
    assert (np.diff(distances[:, :12], axis=1) >= 0).all()
    np.testing.assert_array_equal(rows[:, 12:], plain[:, 12:])
    assert np.isinf(distances[:, 12:]).all()
    # Fewer neighbors than are re-ranked are the first of these.
    np.testing.assert_array_equal(
        k_reciprocal_neighbors(queries, gallery, k=3, k1=8, k2=3, top=12)[0], rows[:, :3]
    )


def test_blocks_of_k_reciprocal_give_what_the_whole_gives(monkeypatch):
    points = made(70, seed=4)
    whole = k_reciprocal_neighbors(points, k=20, k1=9, k2=4)
    monkeypatch.setattr(reranking, "_GATHERED_AT_ONCE", 1)
    for part, expected in zip(k_reciprocal_neighbors(points, k=20, k1=9, k2=4), whole, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_reranking_degenerate_galleries():
    same = np.ones((7, 3))
    rows, distances = k_reciprocal_neighbors(same, k=6, k1=3, k2=2)
    assert np.isfinite(distances).all()
    assert sorted(rows[3].tolist()) == [0, 1, 2, 4, 5, 6]
    rows, distances = k_reciprocal_neighbors(np.eye(2), k=20)
    assert rows.tolist() == [[1], [0]]
    expected = references.reranked(np.eye(2), None, 1, 2, 0.3)
    np.testing.assert_allclose(distances.ravel(), [expected[0, 1], expected[1, 0]], atol=1e-6)
    assert k_reciprocal_neighbors(np.eye(2)[:1], np.eye(2)[1:], k=3)[0].tolist() == [[0]]
    assert np.isfinite(k_reciprocal_neighbors(np.zeros((5, 2)), k=4, k1=2, k2=2)[1]).all()
    assert encode(np.eye(4, dtype=np.float32), 1, 1).codes.shape == (4, 4)


def whitened_by_hand(train, rows, dim, power, shrinkage):
    train, rows = unit(train), unit(rows)
    mean = train.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(train.T))
    order = np.argsort(-values)
    values, vectors = values[order], vectors[:, order]
    values = (1 - shrinkage) * values + shrinkage * values.mean()
    return unit((rows - mean) @ vectors[:, :dim] / values[:dim] ** (power / 2))


@pytest.mark.parametrize(
    ("power", "shrinkage", "dim"), [(1, 0, 0), (0, 0.3, 3), (0.5, 0.3, 0), (0.5, 1, 3)]
)
def test_whitening_equals_the_eigendecomposition(power, shrinkage, dim):
    train, rows = made(90, seed=1) * 3, made(20, seed=2)
    whitened = fit_whitening(train, dim, power=power, shrinkage=shrinkage)(rows)
    expected = whitened_by_hand(train, rows, dim or 6, power, shrinkage)
    np.testing.assert_allclose(
        whitened @ whitened.T, expected @ expected.T, atol=2e-5
    )  # signs are free
    assert whitened.shape == (20, dim or 6)
    # A direction without variance stays without weight.
    twice = np.repeat(made(30), 2, axis=1)
    assert np.abs(fit_whitening(twice, 12, power=power or 1)(twice)[:, 6:]).max() < 1e-4
    with pytest.raises(UserError, match="fewer components"):
        fit_whitening(made(5), 5)
    with pytest.raises(UserError, match="embeddings have 5 dimensions, the whitening 6"):
        fit_whitening(made(), 2)(np.ones((2, 5)))
