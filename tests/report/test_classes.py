import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from tests.report.pages import embedded
from tfdml.evaluation import evaluate_retrieval
from tfdml.report.classes import class_rows, confusions, most_confused
from tfdml.report.queries import rank_queries


def test_classes_against_evaluation_class_by_class():
    embeddings, labels = embedded(5, classes=9, per_class=6, spread=1.2)
    labels[-1] = 500  # alone in its class
    found = rank_queries(embeddings, labels)
    rows = {row.label: row for row in class_rows(found, labels, labels)}
    assert list(rows)[-1] == 500
    assert np.isnan(rows[500].recall)
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
