"""The values of each query: NaN where there is nothing to find, whole rankings, and neighbors of
another search."""

import numpy as np
import pytest

from tests.evaluation.rankings import ranked_hits
from tfdml.errors import UserError
from tfdml.evaluation import Relevance, retrieval, retrieval_per_query
from tfdml.retrieval import nearest_neighbors


def made(classes=7, per_class=9, spread=0.8, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), per_class))
    return rng.normal(size=(classes, 5))[labels] + spread * rng.normal(
        size=(len(labels), 5)
    ), labels


def hits_of(points, labels, query):
    """Whether the nearest, the second nearest ... of the others shares the query's class, in
    float64."""
    same = lambda query, row: labels[row] == labels[query]  # noqa: E731
    return ranked_hits(points, query, points, same, lambda row: row == query)


@pytest.mark.parametrize("counted", [0, 64])
def test_full_ranking_orders_copies_by_row(counted, monkeypatch):
    """A product may give copies results that differ in the last bit, by where their columns
    stand."""
    monkeypatch.setattr(retrieval, "_COUNTED", counted)
    rng = np.random.default_rng(1)
    which = rng.integers(0, 23, 301)
    distinct = rng.normal(size=(23, 37)).astype(np.float32)
    distinct[0] = 0
    points = distinct[which]
    points[::2][which[::2] == 0] *= -1  # zeros of both signs are one vector
    labels = rng.integers(0, 3, 301)
    found = retrieval_per_query(points, labels, metrics=["map"], memory_budget=100_000)["map"]
    for query in range(0, 301, 3):
        hits = np.array(hits_of(distinct[which].astype(np.float64), labels, query))
        assert found[query] == pytest.approx(
            np.mean(np.arange(1, hits.sum() + 1) / (1 + np.flatnonzero(hits)))
        )


def test_neighbors_of_another_search_are_measured():
    """Those of one that loses every second neighbor."""
    points, labels = made()
    rows = nearest_neighbors(points, k=8)[0]
    rows[:, 1::2] = -1
    metrics = ["recall@1", "recall@2", "precision@4", "map@r", "r_precision"]
    values = retrieval_per_query(points, labels, metrics=metrics, neighbors=rows)
    found = {name: column.mean() for name, column in values.items()}
    hits = np.array([hits_of(points, labels, query) for query in range(len(labels))])
    hits[:, 1::2] = False
    assert found["recall@1"] == found["recall@2"] == hits[:, 0].mean()
    assert found["precision@4"] == pytest.approx(hits[:, :4].mean())
    assert found["r_precision"] == pytest.approx(hits[:, :8].mean())
    precision = np.cumsum(hits[:, :8], axis=1) / np.arange(1, 9)
    assert found["map@r"] == pytest.approx((precision * hits[:, :8]).sum(axis=1).mean() / 8)
    for wrong, changes, message in (
        ("map", rows, "map ranks the whole gallery"),
        ("map@r", rows[:, :7], r"k at least 8 for these metrics; got int64 \(63, 7\)"),
        ("map@r", np.maximum(rows, 0), "have a gallery row twice"),
        (
            "recall@1",
            np.arange(63)[:, None],
            "query 0 have a gallery row twice, or the query itself",
        ),
    ):
        with pytest.raises(UserError, match=message):
            retrieval_per_query(points, labels, metrics=[wrong], neighbors=changes)


def test_neighbors_that_are_ignored_take_no_place():
    points, labels = made()
    relevance = Relevance.classes(labels, not_same=np.arange(63) % 5)
    names = ["recall@2", "map@r"]
    rows = nearest_neighbors(points, k=62)[0]
    expected = retrieval_per_query(points, relevance=relevance, metrics=names)
    measured = retrieval_per_query(points, relevance=relevance, metrics=names, neighbors=rows)
    for name in names:
        np.testing.assert_array_equal(measured[name], expected[name])
    with pytest.raises(UserError, match="k at least"):
        retrieval_per_query(points, relevance=relevance, metrics=names, neighbors=rows[:, :8])
