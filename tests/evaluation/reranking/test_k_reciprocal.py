"""k-reciprocal re-ranking against the paper's sets, and Jaccard distances written out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.reranking import references
from tests.evaluation.reranking.test_expansion import made
from tfdml.errors import UserError
from tfdml.evaluation.reranking import k_reciprocal_neighbours
from tfdml.evaluation.reranking import searched as searched_module
from tfdml.evaluation.reranking.k_reciprocal import encode
from tfdml.evaluation.reranking.searched import searched
from tfdml.evaluation.reranking.steps import AugmentGallery, ExpandQueries, RerankReciprocal, Sources


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
    expected = references.reranked(queries, gallery, min(k1, len(points) - 1), min(k2, len(points)), weight)
    depth = 9 if roles else len(points) - 1
    rows, distances = k_reciprocal_neighbours(queries, gallery, k=depth, k1=k1, k2=k2, weight=weight, top=len(points))
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
    plain = searched(queries, gallery).neighbours(30)[0]
    rows, distances = k_reciprocal_neighbours(queries, gallery, k=30, k1=8, k2=3, top=12)
    np.testing.assert_array_equal(np.sort(rows[:, :12], axis=1), np.sort(plain[:, :12], axis=1))
    np.testing.assert_allclose(distances[:, :12], np.take_along_axis(expected, rows[:, :12], axis=1), atol=2e-5)
    assert (np.diff(distances[:, :12], axis=1) >= 0).all()
    np.testing.assert_array_equal(rows[:, 12:], plain[:, 12:])
    assert np.isinf(distances[:, 12:]).all()
    # Fewer neighbours than are re-ranked are the first of these.
    np.testing.assert_array_equal(k_reciprocal_neighbours(queries, gallery, k=3, k1=8, k2=3, top=12)[0], rows[:, :3])


@pytest.mark.parametrize("k1", [1, 3, 5, 7, 20])
def test_half_of_k1_is_rounded_as_in_the_authors_code(k1):
    points = made(60, seed=6)
    vectors = references.reciprocal_vectors(points, k1, 1)
    codes = encode(references.unit(points).astype(np.float32), k1, 1).codes.toarray()
    for row, vector in enumerate(vectors):
        assert set(np.flatnonzero(codes[row])) == set(vector)
        np.testing.assert_allclose(codes[row, list(vector)], list(vector.values()), atol=1e-6)


def test_blocks_give_what_the_whole_gives(monkeypatch):
    points = made(70, seed=4)
    whole = k_reciprocal_neighbours(points, k=20, k1=9, k2=4)
    monkeypatch.setattr(searched_module, "_GATHERED_AT_ONCE", 1)
    for part, expected in zip(k_reciprocal_neighbours(points, k=20, k1=9, k2=4), whole, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_degenerate_galleries():
    same = np.ones((7, 3))
    rows, distances = k_reciprocal_neighbours(same, k=6, k1=3, k2=2)
    assert np.isfinite(distances).all()
    assert sorted(rows[3].tolist()) == [0, 1, 2, 4, 5, 6]
    rows, distances = k_reciprocal_neighbours(np.eye(2), k=20)
    assert rows.tolist() == [[1], [0]]
    expected = references.reranked(np.eye(2), None, 1, 2, 0.3)
    np.testing.assert_allclose(distances.ravel(), [expected[0, 1], expected[1, 0]], atol=1e-6)
    assert k_reciprocal_neighbours(np.eye(2)[:1], np.eye(2)[1:], k=3)[0].tolist() == [[0]]
    assert np.isfinite(k_reciprocal_neighbours(np.zeros((5, 2)), k=4, k1=2, k2=2)[1]).all()
    assert encode(np.eye(4, dtype=np.float32), 1, 1).codes.shape == (4, 4)


def test_where_the_queries_are_the_gallery_both_must_be_what_they_were():
    for step in (ExpandQueries(2), AugmentGallery(2)):
        changed = step.apply(searched(made(12)), Sources(), None)
        with pytest.raises(UserError, match="cannot follow"):
            RerankReciprocal().apply(changed, Sources(), None)
        roles = step.apply(searched(made(12), made(9, seed=1)), Sources(), None)
        assert RerankReciprocal(k1=3, k2=2).apply(roles, Sources(), None).neighbours(4)[0].shape == (12, 4)
