"""CSLS against its definition with loops."""

import numpy as np
import pytest

from tests.evaluation.reranking.references import unit
from tests.evaluation.reranking.test_expansion import made
from tfdml.evaluation.reranking import csls_densities
from tfdml.evaluation.reranking.searched import searched
from tfdml.evaluation.reranking.steps import ScaleLocally, Sources


def by_hand(queries, gallery, k):
    own = gallery is None
    queries = unit(queries)
    gallery = queries if own else unit(gallery)

    def density(vector, others, row):
        cosines = sorted((vector @ other for i, other in enumerate(others) if not (own and i == row)), reverse=True)
        return np.mean(cosines[:k])

    of_queries = [density(query, gallery, row) for row, query in enumerate(queries)]
    of_gallery = [density(image, queries, row) for row, image in enumerate(gallery)]
    scores = 2 * queries @ gallery.T - np.array(of_queries)[:, None] - np.array(of_gallery)
    if own:
        np.fill_diagonal(scores, -np.inf)
    return np.array(of_queries), np.array(of_gallery), scores


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_equals_the_definition(roles, k):
    points = made(33, seed=1)
    queries, gallery = (points[:20], points[20:]) if roles else (points, None)
    of_queries, of_gallery, scores = by_hand(queries, gallery, k)
    found = csls_densities(queries, gallery, k=k)
    np.testing.assert_allclose(found[0], of_queries, atol=2e-6)
    np.testing.assert_allclose(found[1], of_gallery, atol=2e-6)
    rows, near = ScaleLocally(k).apply(searched(queries, gallery), Sources(), None).neighbours(10)
    np.testing.assert_array_equal(rows, np.argsort(-scores, axis=1, kind="stable")[:, :10])
    in_full = 2 * near - of_queries[:, None]
    np.testing.assert_allclose(in_full, np.take_along_axis(scores, rows, axis=1), atol=5e-6)


def test_degenerate_galleries():
    assert csls_densities(np.ones((4, 2)), k=2)[1].tolist() == [1, 1, 1, 1]
    assert csls_densities(np.eye(2)[:1], np.eye(2)[1:], k=9)[0].tolist() == [0]
    with pytest.raises(ValueError, match="k must be a positive integer"):
        csls_densities(np.eye(3), k=0)
