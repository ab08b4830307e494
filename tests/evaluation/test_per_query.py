"""The values of each query: whose they are, NaN where there is nothing to find, and their means."""

import dataclasses

import numpy as np
import pytest
from sklearn import metrics as sk

from tests.report import pages
from tfdml.errors import UserError
from tfdml.evaluation import QueryValues, Relevance, evaluate_retrieval, per_query, retrieval_per_query
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import nearest_neighbors

ALL = ("recall", "precision@3", "map@5", "map@r", "r_precision", "map")


def made(classes=7, per_class=9, spread=0.8, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), per_class))
    return rng.normal(size=(classes, 5))[labels] + spread * rng.normal(size=(len(labels), 5)), labels


def ranked_hits(points, labels, query):
    """Whether the nearest, the second nearest ... of the others shares the query's class, in float64."""
    distances = ((points - points[query]) ** 2).sum(axis=1)
    others = sorted((i for i in range(len(points)) if i != query), key=lambda i: (distances[i], i))
    return np.array([labels[i] == labels[query] for i in others])


def test_each_query_has_its_own_value():
    points, labels = made()
    values = retrieval_per_query(points, labels, ks=(1, 4), metrics=ALL)
    assert all(column.shape == labels.shape and column.dtype == np.float64 for column in values.values())
    for query in range(len(labels)):
        hits = ranked_hits(points, labels, query)
        found = {name: column[query] for name, column in values.items()}
        assert found["recall@1"] == hits[0]
        assert found["recall@4"] == hits[:4].any()
        assert found["precision@3"] == pytest.approx(hits[:3].mean())
        assert found["r_precision"] == pytest.approx(hits[:8].mean())
        precision = hits.cumsum() / np.arange(1, len(hits) + 1)
        assert found["map@5"] == pytest.approx((precision * hits)[:5].sum() / 5)
        assert found["map@r"] == pytest.approx((precision * hits)[:8].sum() / 8)
        assert found["map"] == pytest.approx(precision[hits].mean())


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("counted", [0, 64])
def test_full_ranking_agrees_with_scikit_learn(distance, counted, monkeypatch):
    """Its average precision of the same scores, where none are tied; whether rows are counted or sorted."""
    monkeypatch.setattr(per_query, "_COUNTED", counted)
    points, labels = made(classes=4, per_class=30)
    found = retrieval_per_query(points, labels, metrics=["map"], distance=distance, memory_budget=10_000)["map"]
    for query in range(0, len(labels), 5):
        others = np.arange(len(labels)) != query
        if distance in ("dot", "cosine"):
            lengths = 1 if distance == "dot" else np.linalg.norm(points, axis=1) * np.linalg.norm(points[query])
            scores = points @ points[query] / lengths
        else:
            scores = -((points - points[query]) ** 2).sum(axis=1)
        expected = sk.average_precision_score((labels == labels[query])[others], scores[others])
        assert found[query] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("counted", [0, 64])
def test_full_ranking_orders_copies_by_row(counted, monkeypatch):
    """A product may give copies results that differ in the last bit, by where their columns stand."""
    monkeypatch.setattr(per_query, "_COUNTED", counted)
    rng = np.random.default_rng(1)
    which = rng.integers(0, 23, 301)
    distinct = rng.normal(size=(23, 37)).astype(np.float32)
    distinct[0] = 0
    points = distinct[which]
    points[::2][which[::2] == 0] *= -1  # zeros of both signs are one vector
    labels = rng.integers(0, 3, 301)
    found = retrieval_per_query(points, labels, metrics=["map"], memory_budget=100_000)["map"]
    for query in range(0, 301, 3):
        hits = ranked_hits(distinct[which].astype(np.float64), labels, query)
        assert found[query] == pytest.approx(np.mean(np.arange(1, hits.sum() + 1) / (1 + np.flatnonzero(hits))))


@pytest.mark.parametrize("counted", [0, 64])
def test_full_ranking_orders_equal_distances_by_row(counted, monkeypatch):
    """Small integers, whose products are exact: different images at one distance, and copies among them."""
    monkeypatch.setattr(per_query, "_COUNTED", counted)
    rng = np.random.default_rng(1)
    points, labels = rng.integers(-3, 4, size=(301, 2)), rng.integers(0, 3, 301)
    found = retrieval_per_query(points, labels, metrics=["map"], memory_budget=100_000)["map"]
    for query in range(0, 301, 3):
        hits = ranked_hits(points, labels, query)
        assert found[query] == pytest.approx(np.mean(np.arange(1, hits.sum() + 1) / (1 + np.flatnonzero(hits))))


def test_collapsed_embeddings_are_ranked_by_row():
    points = np.full((40, 16), 0.1234567, np.float32)
    labels = np.arange(40) % 2
    found = retrieval_per_query(points, labels, metrics=["map", "map@r"])["map"]
    for query in (0, 1, 20, 39):
        hits = ranked_hits(np.zeros((40, 1)), labels, query)
        assert found[query] == pytest.approx(np.mean(np.arange(1, 20) / (1 + np.flatnonzero(hits))))


def test_queries_with_nothing_to_find_are_nan_everywhere():
    points, labels = made()
    labels[[3, 20]] = 100, 101  # classes of one image
    values = retrieval_per_query(points, labels, metrics=ALL)
    result = evaluate_retrieval(points, labels, metrics=ALL)
    for name, column in values.items():
        assert np.flatnonzero(np.isnan(column)).tolist() == [3, 20]
        assert result[name] == pytest.approx(np.nanmean(column), abs=1e-15)
    assert result["queries_without_match"] == 2


def test_a_gallery_of_other_images():
    points, labels = made()
    rows = np.arange(0, len(labels), 3)
    rest = np.setdiff1d(np.arange(len(labels)), rows)
    apart = retrieval_per_query(points[rows], labels[rows], points[rest], labels[rest], metrics=ALL)
    assert all(len(column) == len(rows) for column in apart.values())
    whole = retrieval_per_query(points, labels, metrics=ALL)
    part = retrieval_per_query(points[rows], labels[rows], points, labels, metrics=ALL, own_rows=rows)
    for name, column in part.items():
        np.testing.assert_allclose(column, whole[name][rows], atol=1e-12)
    assert not np.array_equal(part["map"], apart["map"])


def test_clustering_has_no_value_per_query():
    points, labels = made()
    with pytest.raises(UserError, match="unknown metric 'nmi'; one of recall, precision@1, map@r"):
        retrieval_per_query(points, labels, metrics=["nmi"])


def test_neighbors_of_another_search_are_measured():
    """Those of one that loses every second neighbor."""
    points, labels = made()
    rows = nearest_neighbors(points, k=8)[0]
    rows[:, 1::2] = -1
    metrics = ["recall@1", "recall@2", "precision@4", "map@r", "r_precision"]
    values = retrieval_per_query(points, labels, metrics=metrics, neighbors=rows)
    found = {name: column.mean() for name, column in values.items()}
    hits = np.array([ranked_hits(points, labels, query) for query in range(len(labels))])
    hits[:, 1::2] = False
    assert found["recall@1"] == found["recall@2"] == hits[:, 0].mean()
    assert found["precision@4"] == pytest.approx(hits[:, :4].mean())
    assert found["r_precision"] == pytest.approx(hits[:, :8].mean())
    precision = np.cumsum(hits[:, :8], axis=1) / np.arange(1, 9)
    assert found["map@r"] == pytest.approx((precision * hits[:, :8]).sum(axis=1).mean() / 8)
    for wrong, changes, message in (
        ("map", rows, "map ranks the whole gallery"),
        ("map@r", rows[:, :7], r"k at least 8 for these metrics; got int64 \(63, 7\)"),
        ("map@r", rows * 1.0, "must be gallery rows"),
        ("map@r", rows + 63, r"must lie in 0 \.\. 62"),
        ("map@r", np.maximum(rows, 0), "have a gallery row twice"),
        ("recall@1", np.arange(63)[:, None], "query 0 have the query itself"),
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


LABELS = np.repeat([4, 9, 2], 4)


def values(count=12, **columns):
    return {"recall@1": np.arange(count) % 2.0, "map@r": np.linspace(0, 1, count), **columns}


def test_what_is_written_is_read(tmp_path):
    answers = values()
    answers["recall@1"][3] = answers["map@r"][3] = np.nan
    one = QueryValues.of(pages.made(LABELS), answers)
    one.write(tmp_path / "queries.npz")
    read = QueryValues.read(tmp_path / "queries.npz")
    assert read.difference_to(one) == one.difference_to(read) == ""
    assert (read.images, list(read.values)) == (one.images, ["recall@1", "map@r"])
    np.testing.assert_array_equal(read.values["recall@1"], answers["recall@1"])
    np.testing.assert_allclose(read.values["map@r"], answers["map@r"], atol=1e-7)
    assert not list(tmp_path.glob(".*"))


def test_with_roles_the_queries_alone_count():
    asked = np.arange(12) % 3 == 0
    one = QueryValues.of(pages.made(LABELS, is_query=asked), values(4))
    assert one.labels.tolist() == LABELS[asked].tolist()
    other = QueryValues.of(pages.made(LABELS), values())
    assert set(one.ids) < set(other.ids)


def test_why_queries_are_not_the_same():
    one = QueryValues.of(pages.made(LABELS), values())
    relabeled = QueryValues.of(pages.made(np.where(LABELS == 4, 5, LABELS)), values())
    fewer = QueryValues.of(pages.made(LABELS[:8]), values(8))
    ids = one.ids.copy()
    ids[0] = 1
    for other, reason in (
        (fewer, "12 queries and 8"),
        (dataclasses.replace(one, ids=one.ids[::-1]), "the same queries in another order"),
        (dataclasses.replace(one, ids=ids), "of 12 queries 11 are the same images"),
        (relabeled, "the same queries with other classes"),
        (dataclasses.replace(one, images="sha256:0"), "the same queries, searched among other images"),
    ):
        assert one.difference_to(other) == reason


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "queries.npz"
    one = QueryValues.of(pages.made(LABELS), values())
    arrays = {"ids": one.ids, "labels": LABELS, "images": np.array("x")}
    for content in (
        {"ids": one.ids},
        {**arrays, "recall@1": np.ones(11)},
        {**arrays, "recall@1": np.ones((2, 12))},
        {**arrays, "recall@1": np.array(["x"] * 12)},
        {**arrays, "recall@1": np.array([None] * 12)},
    ):
        np.savez(path, **content)
        with pytest.raises(UserError):
            QueryValues.read(path)
    path.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"queries\.npz cannot be read"):
        QueryValues.read(path)
