import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from tests.report.pages import embedded
from tfdml.evaluation import evaluate_retrieval
from tfdml.report.classes import class_rows, confusions, most_confused, within_class_distances
from tfdml.report.queries import rank_queries


def test_classes_against_evaluation_class_by_class():
    embeddings, labels = embedded(5, classes=9, per_class=6, spread=1.2)
    labels[-1] = 500  # alone in its class
    found = rank_queries(embeddings, labels)
    rows = {row.label: row for row in class_rows(found, labels, labels, embeddings, labels, "euclidean")}
    assert list(rows)[-1] == 500
    assert np.isnan(rows[500].recall)
    assert np.isnan(rows[500].spread)
    recalls = [row.recall for row in rows.values()][:-1]
    assert recalls == sorted(recalls)
    gaps = np.linalg.norm(embeddings[:, None] - embeddings[None], axis=-1)
    for label, row in rows.items():
        own = np.flatnonzero(labels == label)
        assert row.images == len(own)
        first_wrong = []
        for i in own:
            order = [j for j in np.argsort(gaps[i], kind="stable") if labels[j] != label]
            first_wrong.append(labels[order[0]])
        assert row.nearest_share == max(first_wrong.count(c) for c in first_wrong) / len(own)
        assert first_wrong.count(row.nearest) / len(own) == row.nearest_share
        if label == 500:
            continue
        measured = evaluate_retrieval(
            embeddings[own], labels[own], embeddings, labels, ks=[1], metrics=["recall", "map@r"], own_rows=own
        )
        assert row.recall == pytest.approx(measured["recall@1"])
        assert row.map_at_r == pytest.approx(measured["map@r"])
        inside = gaps[np.ix_(own, own)][np.triu_indices(len(own), 1)]
        assert row.spread == pytest.approx(inside.mean(), rel=1e-5)


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine", "dot"])
def test_distances_within_classes(distance):
    embeddings, labels = embedded(6, classes=3, per_class=8)
    embeddings[1] = embeddings[0]
    spread = within_class_distances(embeddings, labels, distance)
    for label, value in spread.items():
        x = embeddings[labels == label]
        pairs = []
        for i in range(len(x)):
            for j in range(i):
                cosine = x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j])
                squared = np.sum((x[i] - x[j]) ** 2)
                measures = {"euclidean": squared**0.5, "sqeuclidean": squared, "cosine": 1 - cosine}
                pairs.append(measures.get(distance, -(x[i] @ x[j])))
        assert value == pytest.approx(np.mean(pairs), rel=1e-5)


def test_large_classes_are_sampled():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 4))
    exact = np.linalg.norm(x[:300, None] - x[None, :300], axis=-1)[np.triu_indices(300, 1)].mean()
    assert within_class_distances(x, np.zeros(3000, int), "euclidean")[0] == pytest.approx(exact, rel=0.1)


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
            counts[np.searchsorted(classes, pair.label), np.searchsorted(classes, pair.taken_for)] = pair.count
        assert labels[pair.query] == pair.label
        assert pair.neighbour == found.rows[pair.query, 0]
        assert labels[pair.neighbour] == pair.taken_for
        of_pair = found.answerable & (labels == pair.label) & (predicted == pair.taken_for)
        assert pair.distance == found.distances[of_pair, 0].min()
        assert pair.queries == (labels == pair.label).sum()
        assert pair.reverse == sum(p.count for p in pairs if (p.label, p.taken_for) == (pair.taken_for, pair.label))
    np.testing.assert_array_equal(counts, expected - np.diag(np.diag(expected)))
    assert [p.count for p in pairs] == sorted((p.count for p in pairs), reverse=True)
    recall = evaluate_retrieval(embeddings, labels, ks=[1], metrics=["recall"])["recall@1"]
    assert sum(p.count for p in pairs) == pytest.approx((1 - recall) * found.answerable.sum())
    assert most_confused(pairs, 4)[:2] == [pairs[0].label, pairs[0].taken_for]
    assert len(most_confused(pairs, 5)) <= 5
