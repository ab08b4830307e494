"""Expanded queries and augmented galleries against sums written out, and what a query may not see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.reranking import references
from tfdml.errors import UserError
from tfdml.evaluation.reranking import augment_gallery, expand_queries
from tfdml.evaluation.reranking import searched as searched_module
from tfdml.evaluation.reranking.searched import searched
from tfdml.evaluation.reranking.steps import AugmentGallery, ExpandQueries, Sources


def made(count=40, dim=6, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(classes, dim))[np.arange(count) % classes] + rng.normal(size=(count, dim))).astype(
        "float32"
    )


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
    found = expand_queries(queries, gallery, k=k, alpha=alpha)
    np.testing.assert_allclose(found, references.expansion(queries, gallery, k, alpha), atol=2e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("alpha", [0, 3])
@pytest.mark.parametrize("k", [1, 4, 60])
def test_a_gallery_is_augmented_as_by_hand(k, alpha):
    points = made()
    expected = references.augmentation(points, k, alpha)
    found = augment_gallery(points, k=k, alpha=alpha).vectors
    np.testing.assert_allclose(found, [expected[row] for row in range(len(points))], atol=2e-5)


@pytest.mark.parametrize(("k", "count"), [(1, 30), (3, 30), (8, 9), (50, 12)])
def test_in_leave_one_out_the_gallery_has_not_seen_the_query(k, count, monkeypatch):
    monkeypatch.setattr(searched_module, "_GATHERED_AT_ONCE", 300)
    points = made(count, seed=3)
    queries = references.unit(points)
    what = AugmentGallery(k, 3.0).apply(searched(points), Sources(), None)
    depth = min(6, count - 1)
    expected = references.searched_without_own(points, queries, k, 3.0, depth)
    rows, similarities = what.neighbours(depth)
    np.testing.assert_array_equal(rows, expected)
    for own in range(count):
        vectors = references.augmentation(points, k, 3.0, {own})
        np.testing.assert_allclose(similarities[own], [queries[own] @ vectors[row] for row in rows[own]], atol=2e-6)
    # Expanded by those vectors, and not by those that its own image has moved.
    expanded = ExpandQueries(2, 1.0).apply(what, Sources(), None).queries
    for own in range(count):
        vectors = references.augmentation(points, k, 3.0, {own})
        near = np.array([vectors[row] for row in rows[own, :2]])
        np.testing.assert_allclose(
            expanded[own], references.moved(queries[own], near, range(len(near)), 1.0), atol=2e-5
        )


def test_what_the_own_image_is_does_not_matter_to_a_query():
    """The same search, were the query's image somewhere else in the gallery."""
    points = made(20)
    gallery = np.concatenate([points[1:], points[:1]])
    alone = searched(points[:1], points[1:])
    chain = (AugmentGallery(3, 3.0), ExpandQueries(4, 3.0))
    among = searched(gallery)
    for step in chain:
        alone, among = (step.apply(what, Sources(), None) for what in (alone, among))
    np.testing.assert_allclose(among.queries[-1], alone.queries[0], atol=1e-5)
    np.testing.assert_array_equal(among.neighbours(12)[0][-1], alone.neighbours(12)[0][0])


@pytest.mark.parametrize("budget", [1, 500])
def test_blocks_give_what_the_whole_gives(budget, monkeypatch):
    points = made(50)
    chain = (AugmentGallery(4, 3.0), ExpandQueries(5, 2.0))

    def answer():
        what = searched(points)
        for step in chain:
            what = step.apply(what, Sources(), None)
        return what.queries, *what.neighbours(9)

    whole = answer()
    monkeypatch.setattr(searched_module, "_GATHERED_AT_ONCE", budget)
    for part, expected in zip(answer(), whole, strict=True):
        np.testing.assert_allclose(part, expected, atol=1e-6)


@pytest.mark.parametrize("alpha", [0, 3])
def test_degenerate_galleries_give_finite_vectors(alpha):
    same = np.ones((6, 3))
    np.testing.assert_allclose(expand_queries(same, k=3, alpha=alpha), references.unit(same), atol=1e-6)
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]])
    assert np.isfinite(expand_queries(opposite, k=3, alpha=alpha)).all()
    zeros = np.zeros((4, 2))
    assert not augment_gallery(zeros, k=2, alpha=alpha).vectors.any()
    two = AugmentGallery(3, alpha).apply(searched(made(2)), Sources(), None)
    assert two.neighbours(5)[0].tolist() == [[1], [0]]
    # Of two images, each is by itself where the other is the query.
    np.testing.assert_allclose(
        two.vectors(slice(0, 2), np.array([[1], [0]]))[:, 0], references.unit(made(2))[::-1], atol=1e-6
    )


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="no other"):
        searched(np.ones((1, 2)))
    with pytest.raises(ValueError, match="k must be a positive integer"):
        expand_queries(np.eye(3), k=0)
    with pytest.raises(ValueError, match="alpha must not be negative"):
        augment_gallery(np.eye(3), alpha=-1)
