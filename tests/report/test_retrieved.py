import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from tests.report.pages import Page, embedded, made
from tfdml.evaluation import evaluate_retrieval
from tfdml.report.classes import class_rows, within_class_distances
from tfdml.report.confusions import confusions, confusions_html, most_confused
from tfdml.report.retrieved import retrieve
from tfdml.report.thumbnails import Pictures


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
@given(st.integers(2, 40), st.integers(1, 8), st.booleans(), st.integers(0, 10**6), st.sampled_from([1, 3, 1000]))
def test_one_search_against_rankings_one_by_one(count, classes, separate, seed, depth):
    """Small integers: many ties and copies."""
    rng = np.random.default_rng(seed)
    queries, labels = rng.integers(0, 4, (count, 2)).astype(np.float32), rng.integers(0, classes, count)
    gallery = gallery_labels = None
    if separate:
        gallery, gallery_labels = rng.integers(0, 4, (33, 2)).astype(np.float32), rng.integers(0, classes, 33)
    found = retrieve(queries, labels, gallery, gallery_labels, depth=depth)
    rankings = slow(queries, labels, gallery, gallery_labels)
    for i, (rows, hits) in enumerate(rankings):
        r = sum(hits)
        assert found.matches[i] == r
        assert found.nearest[i] == rows[0]
        assert found.first_hit[i] == (hits.index(True) + 1 if True in hits[: found.depth] else 0)
        wrong = [row for row, hit in zip(rows, hits, strict=True) if not hit]
        if found.wrong[i] >= 0:
            assert found.wrong[i] == wrong[0]
        else:
            assert not wrong or hits.index(False) >= found.depth
        if 0 < r <= found.depth:
            precision = [hits[k] * sum(hits[: k + 1]) / (k + 1) for k in range(r)]
            assert found.average_precision[i] == pytest.approx(sum(precision) / r)
        else:
            assert np.isnan(found.average_precision[i])
    if found.answerable.any():
        expected = [np.mean([any(hits[:k]) for rows, hits in rankings if any(hits)]) for k in range(1, found.depth + 1)]
        np.testing.assert_allclose(found.recall(), expected)
    else:
        assert len(found.recall()) == 0


def test_queries_without_an_early_hit_are_searched_deeper():
    """The first image of the class is the 150th nearest, far beyond what is looked at of every query."""
    points = np.arange(300.0)[:, None]
    labels = np.arange(300) + 10
    labels[[0, 150]] = 1
    found = retrieve(points, labels)
    assert found.first_hit[0] == 150
    assert found.depth == 299
    assert found.answerable.sum() == 2


def test_one_image_has_no_neighbour():
    assert retrieve(np.ones((1, 2)), np.zeros(1, int)) is None


def test_classes_against_evaluation_class_by_class():
    embeddings, labels = embedded(5, classes=9, per_class=6, spread=1.2)
    labels[-1] = 500  # alone in its class
    found = retrieve(embeddings, labels)
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
    found = retrieve(embeddings, labels)
    pairs = confusions(found, labels, labels)
    classes = np.unique(labels[found.answerable])
    predicted = labels[found.nearest]
    keep = found.answerable & (predicted != 500)
    expected = confusion_matrix(labels[keep], predicted[keep], labels=classes)
    counts = np.zeros_like(expected)
    for pair in pairs:
        if pair.taken_for != 500:
            counts[np.searchsorted(classes, pair.label), np.searchsorted(classes, pair.taken_for)] = pair.count
        assert labels[pair.query] == pair.label
        assert pair.neighbour == found.nearest[pair.query]
        assert labels[pair.neighbour] == pair.taken_for
        of_pair = found.answerable & (labels == pair.label) & (predicted == pair.taken_for)
        assert pair.distance == found.nearest_distance[of_pair].min()
        assert pair.queries == (labels == pair.label).sum()
        assert pair.reverse == sum(p.count for p in pairs if (p.label, p.taken_for) == (pair.taken_for, pair.label))
    np.testing.assert_array_equal(counts, expected - np.diag(np.diag(expected)))
    assert [p.count for p in pairs] == sorted((p.count for p in pairs), reverse=True)
    recall = evaluate_retrieval(embeddings, labels, ks=[1], metrics=["recall"])["recall@1"]
    assert sum(p.count for p in pairs) == pytest.approx((1 - recall) * found.answerable.sum())
    assert most_confused(pairs, 4)[:2] == [pairs[0].label, pairs[0].taken_for]
    assert len(most_confused(pairs, 5)) <= 5


def test_matrix_of_confusions_adds_up():
    embeddings, labels = embedded(7, classes=40, per_class=5, spread=1.5)
    found = retrieve(embeddings, labels)
    pairs = confusions(found, labels, labels)
    pictures = Pictures(made(labels))
    text = str(confusions_html(pairs, found, labels, pictures, pictures))
    matrix = text.split('<table class="matrix">')[1].split("</table>")[0]
    for row in matrix.split("<tbody>")[1].split("<tr>")[1:]:
        cells = [e["text"] for e in Page("<tr>" + row.replace("</tbody>", "")).all("td")]
        assert sum(int(cell or 0) for cell in cells) == 5
    assert "The nearest image of every query is of its own class" in confusions_html(
        [], found, labels, pictures, pictures
    )
