"""What an index and a quantised gallery lose, against searches by loops."""

import json

import numpy as np
import pytest

from tests.cli import commands
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval, index_recall, least_effort, quantised_recall
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import build_index
from tfdml.retrieval.faiss_index import KINDS, GalleryIndex

# Enough to search every list, or keep every image of the small galleries here.
EVERYTHING = 10_000


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


@pytest.fixture(scope="module")
def gallery():
    """Sixty classes of ten images, of unequal length."""
    rng = np.random.default_rng(0)
    points = np.repeat(rng.normal(size=(60, 12)), 10, axis=0) + 0.4 * rng.normal(size=(600, 12))
    return (points * rng.uniform(0.5, 2, size=(600, 1))).astype(np.float32)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_recall_of_a_thorough_search_is_nearly_one(gallery, kind, distance):
    """A graph of inner products finds a little less: the longest images are everybody's neighbours."""
    index = build_index(gallery, kind=kind, distance=distance)
    (result,) = index_recall(index, gallery, k=5, efforts=[EVERYTHING], sample=150)
    assert result.recall >= (1.0 if kind == "ivf" else 0.95)
    assert (result.queries, result.k, result.effort) == (150, 5, EVERYTHING)


def test_recall_by_a_slow_reference(gallery):
    """Counted query by query in float64, the query itself left out; more effort never finds less of a list."""
    index = build_index(gallery, lists=30)
    results = index_recall(index, gallery, k=4, efforts=[1, 3, 30], sample=EVERYTHING)
    for result in results:
        found, _ = index.search(gallery, k=4, effort=result.effort, own_rows=np.arange(600))
        shares = []
        for query in range(600):
            far = ((gallery.astype(np.float64) - gallery[query]) ** 2).sum(axis=1)
            far[query] = np.inf
            truth = set(np.argsort(far)[:4].tolist())
            shares.append(len(truth & set(found[query].tolist())) / 4)
        assert result.recall == pytest.approx(np.mean(shares), abs=1e-12)
        assert result.standard_error == pytest.approx(np.std(shares, ddof=1) / np.sqrt(600), abs=1e-12)
        assert result.queries == 600
    assert results[0].recall < results[1].recall < results[2].recall == 1.0


@pytest.mark.parametrize("distance", DISTANCES)
def test_equally_near_images_count_as_found(distance):
    """Fifty copies are the neighbours of each other, in any choice of them."""
    rng = np.random.default_rng(1)
    points = np.concatenate([np.tile(rng.normal(size=(1, 9)), (50, 1)), rng.normal(size=(80, 9)) - 1])
    points = points.astype(np.float32)
    index = build_index(points, kind="hnsw", distance=distance)
    (result,) = index_recall(index, points, points[:20], k=3, efforts=[EVERYTHING], sample=20)
    assert result.recall == 1.0


def test_queries_beside_the_gallery(gallery):
    queries = gallery[:50] + np.float32(0.01)
    index = build_index(gallery, lists=12)
    (result,) = index_recall(index, gallery, queries, k=1, sample=20, efforts=[12])
    assert (result.recall, result.queries) == (1.0, 20)


def test_standard_error_of_one_query_is_unknown(gallery):
    (result,) = index_recall(build_index(gallery, lists=5), gallery, k=1, sample=1)
    assert np.isnan(result.standard_error)
    assert result.effort == 1


def test_recall_needs_the_gallery_of_the_index(gallery):
    index = build_index(gallery, lists=4)
    assert isinstance(index, GalleryIndex)
    with pytest.raises(UserError, match="the index holds 600 images, the gallery 599"):
        index_recall(index, gallery[1:])
    with pytest.raises(UserError, match="sample must be at least 1"):
        index_recall(index, gallery, sample=0)
    with pytest.raises(UserError, match="dimensions"):
        index_recall(index, gallery, np.zeros((3, 4)))
    with pytest.raises(UserError, match="dimensions"):
        index.add(np.zeros((3, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_effort_reaches_the_recall_and_half_of_it_does_not(gallery, kind):
    index = build_index(gallery, kind=kind, lists=40)
    found = least_effort(index, gallery, 0.9, k=5, sample=200)
    assert found.recall >= 0.9
    assert found == index_recall(index, gallery, k=5, efforts=[found.effort], sample=200)[0]
    if kind == "ivf":
        (less,) = index_recall(index, gallery, k=5, efforts=[found.effort // 2], sample=200)
        assert less.recall < 0.9


def test_the_greatest_effort_is_exact_and_one_image_has_nothing_to_find(gallery):
    index = build_index(gallery, lists=40)
    found = least_effort(index, gallery, 1.0, k=5)
    assert (found.recall, found.k) == (1.0, 5)
    assert found.effort <= 40
    alone = least_effort(build_index(gallery[:1]), gallery[:1], 1.0)
    assert (alone.recall, alone.effort) == (1.0, 1)
    for recall in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="must be a fraction above 0"):
            least_effort(index, gallery, recall)
