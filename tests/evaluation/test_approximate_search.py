"""What an index loses, against searches by loops."""

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.evaluation import index_recall, least_effort
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import build_index
from tfdml.retrieval.faiss_index import KINDS, GalleryIndex

# Enough to search every list, or keep every image of the small galleries here.
EVERYTHING = 10_000


def made(count=400, dim=16, classes=40):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    return (rng.normal(size=(classes, dim))[labels] + 0.9 * rng.normal(size=(count, dim))).astype(np.float32), labels


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
    results = list(index_recall(index, gallery, k=4, efforts=[1, 3, 30], sample=EVERYTHING))
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
        next(index_recall(index, gallery[1:]))
    with pytest.raises(UserError, match="sample must be at least 1"):
        next(index_recall(index, gallery, sample=0))
    with pytest.raises(UserError, match="dimensions"):
        next(index_recall(index, gallery, np.zeros((3, 4))))
    with pytest.raises(UserError, match="dimensions"):
        index.add(np.zeros((3, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_effort_reaches_the_recall_and_half_of_it_does_not(gallery, kind):
    index = build_index(gallery, kind=kind, lists=40)
    found = least_effort(index, gallery, 0.9, k=5, sample=200)
    assert found.recall >= 0.9
    assert found == next(index_recall(index, gallery, k=5, efforts=[found.effort], sample=200))
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
