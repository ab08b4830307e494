import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from tests.report.pages import embedded
from tfdml.evaluation import evaluate_retrieval
from tfdml.report.runs import confusions, rank_queries


def slow(queries, labels, gallery=None, gallery_labels=None):
    """Every query's ranking, one at a time: (rows, hits) lists."""
    searched, targets = (queries, labels) if gallery is None else (gallery, gallery_labels)
    rankings = []
    for i, query in enumerate(queries):
        rows = [j for j in range(len(searched)) if gallery is not None or j != i]
        rows.sort(key=lambda j: (np.sum((searched[j] - query) ** 2), j))
        rankings.append((rows, [targets[j] == labels[i] for j in rows]))
    return rankings


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 1000]),
)
def test_one_search_against_rankings_one_by_one(count, classes, separate, seed, depth):
    """Small integers: many ties and copies."""
    rng = np.random.default_rng(seed)
    queries, labels = (
        rng.integers(0, 4, (count, 2)).astype(np.float32),
        rng.integers(0, classes, count),
    )
    gallery = gallery_labels = None
    if separate:
        gallery, gallery_labels = (
            rng.integers(0, 4, (33, 2)).astype(np.float32),
            rng.integers(0, classes, 33),
        )
    found = rank_queries(queries, labels, gallery, gallery_labels, depth=depth)
    rankings = slow(queries, labels, gallery, gallery_labels)
    for i, (rows, hits) in enumerate(rankings):
        assert found.matches[i] == sum(hits)
        assert found.rows[i].tolist() == rows[: min(depth, 8)]
        assert found.hits[i].tolist() == hits[: min(depth, 100)]
    assert rank_queries(np.ones((1, 2)), np.zeros(1, int)) is None  # one image has no neighbor
    if found.answerable.any():
        expected = [
            np.mean([any(hits[:k]) for rows, hits in rankings if any(hits)])
            for k in range(1, found.hits.shape[1] + 1)
        ]
        np.testing.assert_allclose(found.recall(), expected)
    else:
        assert len(found.recall()) == 0


def test_confusions_are_those_of_the_nearest_image():
    embeddings, labels = embedded(7, classes=8, per_class=9, spread=1.5)
    labels[-1] = 500  # cannot be found, so it is not confused
    found = rank_queries(embeddings, labels)
    pairs = confusions(found, labels, labels)
    classes = np.unique(labels[found.answerable])
    predicted = labels[found.rows[:, 0]]
    keep = found.answerable & (predicted != 500)
    expected = confusion_matrix(labels[keep], predicted[keep], labels=classes)
    counts = np.zeros_like(expected)
    for pair in pairs:
        if pair.taken_for != 500:
            counts[
                np.searchsorted(classes, pair.label), np.searchsorted(classes, pair.taken_for)
            ] = pair.count
        assert labels[pair.query] == pair.label
        assert pair.neighbor == found.rows[pair.query, 0]
        assert labels[pair.neighbor] == pair.taken_for
        of_pair = found.answerable & (labels == pair.label) & (predicted == pair.taken_for)
        assert pair.distance == found.distances[of_pair, 0].min()
        assert pair.queries == (labels == pair.label).sum()
    np.testing.assert_array_equal(counts, expected - np.diag(np.diag(expected)))
    assert [p.count for p in pairs] == sorted((p.count for p in pairs), reverse=True)
    recall = evaluate_retrieval(embeddings, labels, ks=[1], metrics=["recall"])["recall@1"]
    assert sum(p.count for p in pairs) == pytest.approx((1 - recall) * found.answerable.sum())
