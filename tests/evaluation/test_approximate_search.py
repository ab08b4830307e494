"""Recall@1 in quantised galleries against a search by loops over what the quantiser keeps."""

import json

import numpy as np
import pytest

from tests.cli import commands
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval
from tfdml.evaluation.approximate_search import quantised_recall


def made(count=400, dim=16, classes=40):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    return (rng.normal(size=(classes, dim))[labels] + 0.9 * rng.normal(size=(count, dim))).astype(np.float32), labels


def by_hand(queries, labels, gallery, targets, own, distance):
    """Recall@1 in float64, with loops."""
    hits = []
    for row, query in enumerate(queries.astype(np.float64)):
        best, found = np.inf, None
        for column, image in enumerate(gallery.astype(np.float64)):
            if own and row == column:
                continue
            if distance == "dot":
                far = -query @ image
            elif distance == "cosine":
                far = -(query @ image) / np.linalg.norm(query)
            else:
                far = ((query - image) ** 2).sum()
            if far < best:
                best, found = far, column
        hits.append(targets[found] == labels[row])
    return np.mean(hits)


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("roles", [False, True])
def test_int8_is_a_search_among_rounded_vectors(distance, roles):
    embeddings, labels = made()
    queries, gallery = (embeddings[:100], embeddings[100:]) if roles else (embeddings, embeddings)
    asked, targets = (labels[:100], labels[100:]) if roles else (labels, labels)
    sides = (queries, asked, gallery, targets) if roles else (queries, asked)
    found = quantised_recall(*sides, kinds=["int8"], distance=distance)
    placed = gallery / np.linalg.norm(gallery, axis=1, keepdims=True) if distance == "cosine" else gallery
    # faiss's own decoder maps code c of 0 .. 255 to low + (c + 0.5) / 255 (high - low).
    low, high = placed.min(axis=0), placed.max(axis=0)
    codes = np.clip(((placed - low) / (high - low) * 255).astype(int), 0, 255)
    kept = low + (codes + 0.5) / 255 * (high - low)
    expected = by_hand(queries, asked, kept, targets, not roles, distance)
    assert found["int8"]["recall@1"] == pytest.approx(expected, abs=1.5 / len(queries))
    exact = evaluate_retrieval(*sides, metrics=["recall@1"], distance=distance)["recall@1"]
    assert found["float32"] == {"recall@1": exact, "bytes": 64, "lost": 0.0}
    assert found["int8"]["bytes"] == 16
    assert found["int8"]["lost"] == pytest.approx(exact - found["int8"]["recall@1"])


def test_fewer_bytes_lose_more():
    embeddings, labels = made(1200)
    found = quantised_recall(embeddings, labels, kinds=["pq16", "pq", "pq1"])
    assert [found[kind]["bytes"] for kind in ("pq16", "pq", "pq1")] == [16, 2, 1]
    assert found["pq16"]["lost"] < found["pq"]["lost"] < found["pq1"]["lost"]
    assert found == quantised_recall(embeddings, labels, kinds=["pq16", "pq", "pq1"])


def test_the_quantiser_is_fitted_to_a_sample_of_all_classes():
    """Codes fitted to the first rows alone would give all other classes the same code."""
    targets = np.repeat([0, 1, 2, 3, 4, 5], [66_000, 50, 50, 50, 50, 50])
    gallery = np.stack([10.0 * targets, np.zeros(len(targets))], axis=1)
    labels = np.array([1, 2, 3, 4, 5])
    queries = np.stack([10.0 * labels + 0.1, np.zeros(5)], axis=1)
    found = quantised_recall(queries, labels, gallery, targets, kinds=["int8"])
    assert found["int8"]["recall@1"] == found["float32"]["recall@1"] == 1


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
def test_the_command_quantises_under_its_distance(distance, tmp_path):
    embeddings, labels = made()
    embeddings *= np.linspace(0.2, 3, len(embeddings), dtype=np.float32)[:, None]
    np.savez(tmp_path / "x.npz", embeddings=embeddings, labels=labels)
    flags = [f"--distance={distance}", "--quantised=int8", "--metrics=recall@1", f"--json={tmp_path}/x.json"]
    status, _, error = commands.run("evaluate", f"--model={tmp_path}/x.npz", *flags)
    assert status == 0, error
    measured = json.loads((tmp_path / "x.json").read_text())["quantised"]
    assert measured == quantised_recall(embeddings, labels, kinds=["int8"], distance=distance)
    others = {"euclidean", "cosine", "dot"} - {distance}
    assert all(measured != quantised_recall(embeddings, labels, kinds=["int8"], distance=other) for other in others)


@pytest.mark.parametrize(
    ("kinds", "says"),
    [(["int4"], "unknown quantisation 'int4'"), (["pq5"], "5 does not divide the 16"), (["pq0"], "unknown")],
)
def test_kinds_that_are_none(kinds, says):
    with pytest.raises(UserError, match=says):
        quantised_recall(*made(), kinds=kinds)


def test_too_few_images_for_product_quantisation():
    with pytest.raises(UserError, match="there are 100"):
        quantised_recall(*made(100), kinds=["pq"])
