"""Hubness against counts with loops."""

import numpy as np
import pytest

from tests.evaluation.reranking.references import ranking, unit
from tests.evaluation.reranking.test_expansion import made
from tfdml.evaluation.reranking import hubness


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("k", [1, 4, 300])
def test_equals_counts_by_hand(roles, k):
    points = unit(made(50, seed=5))
    queries, gallery = (points[:30], points[30:]) if roles else (points, None)
    images = points if gallery is None else gallery
    counts = [0] * len(images)
    for row, query in enumerate(queries):
        for found in ranking(query, images, () if roles else {row})[:k]:
            counts[found] += 1
    mean = sum(counts) / len(counts)
    second, third = (sum((count - mean) ** power for count in counts) / len(counts) for power in (2, 3))
    found = hubness(queries, gallery, k=k)
    assert found["k"] == min(k, len(images) - (not roles))
    assert found["skewness"] == pytest.approx(third / second**1.5 if second else 0.0, abs=1e-9)
    assert found["orphans"] == counts.count(0) / len(counts)
    assert found["largest_hub"] == max(counts)


def test_copies_and_stars():
    assert hubness(np.zeros((5, 2)), k=4)["skewness"] == 0
    star = np.concatenate([np.zeros((1, 8)), np.eye(8)])
    assert hubness(star, k=1) == {
        "k": 1,
        "skewness": pytest.approx(6 * 56**-0.5 * 3),
        "orphans": 7 / 9,
        "largest_hub": 8,
    }
    with pytest.raises(ValueError, match="k must be a positive integer"):
        hubness(star, k=0)
