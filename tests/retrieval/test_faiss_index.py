"""The approximate search: exact where all is searched, honest about what it misses, and safe on disk."""

import faiss
import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import build_index, exact, faiss_index, load_index, nearest_neighbors, rescore
from tfdml.retrieval.faiss_index import KINDS, index_recall

# Enough to search every list, or keep every image of the small galleries here.
EVERYTHING = 10_000


@pytest.fixture(scope="module")
def gallery():
    """Sixty classes of ten images, of unequal length."""
    rng = np.random.default_rng(0)
    points = np.repeat(rng.normal(size=(60, 12)), 10, axis=0) + 0.4 * rng.normal(size=(600, 12))
    return (points * rng.uniform(0.5, 2, size=(600, 1))).astype(np.float32)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("own", [False, True])
def test_all_lists_give_the_exact_neighbors(gallery, distance, own):
    own_rows = np.arange(100, 140) if own else None
    queries = gallery[100:140]
    index = build_index(gallery, distance=distance, lists=12)
    rows, distances = index.search(queries, k=7, effort=EVERYTHING, own_rows=own_rows)
    expected = nearest_neighbors(queries, gallery, k=7, distance=distance, own_rows=own_rows)
    assert rows.dtype == np.int64
    assert distances.dtype == np.float32
    np.testing.assert_array_equal(rows, expected[0])
    # A distance to itself of 0 is the root of a difference of float32 squares, or 1 less a float32 product.
    np.testing.assert_allclose(distances, expected[1], rtol=1e-5, atol=1e-6)


def test_equally_near_images_are_ordered_by_row_and_any_of_them_counts_as_found():
    points = np.zeros((40, 3), np.float32)
    points[20:] = 1
    for kind in KINDS:
        index = build_index(points, kind=kind, lists=1)
        if kind != "hnsw":  # a graph need not reach every copy
            rows, distances = index.search(points[25:26], k=30, effort=EVERYTHING)
            assert rows[0].tolist() == [*range(20, 40), *range(10)]
            assert (distances[0, :20] == 0).all()
        (result,) = index_recall(index, points, points[:30], k=3, efforts=[EVERYTHING])
        assert result.recall == 1.0
    rows, distances = build_index(np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), distance="cosine", lists=1).search(
        [[2.0, 0]], k=3
    )
    assert (rows[0].tolist(), distances[0].tolist()) == ([1, 0, 2], [0.0, 1.0, 2.0])
    rows, distances = rescore(
        [[1.0, 0.0]],
        np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]),
        [[-1, 2, 3, 0]],
        k=4,
        distance="cosine",
    )
    assert (rows.tolist(), distances.tolist()) == ([[0, 2, 3, -1]], [[0.0, 0.0, 1.0, np.inf]])


def test_lists_that_hold_too_few_say_so(gallery):
    index = build_index(gallery, lists=200, distance="cosine")
    rows, distances = index.search(gallery[:5], k=100, effort=1)
    missing = rows == -1
    assert missing.any()
    assert np.isinf(distances[missing]).all()
    assert np.isfinite(distances[~missing]).all()
    assert not (missing[:, :-1] & ~missing[:, 1:]).any()  # all at the end of their row
    (result,) = index_recall(index, gallery, k=100, efforts=[1], sample=20)
    assert 0 < result.recall < 1


@pytest.mark.parametrize("storage", ["float16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_vectors_give_near_distances(gallery, kind, storage):
    """A distance moves by no more than the rounding moves a vector: half a unit of the last place, or half a step.

    What `ivf` rounds is the difference from a center, whose length and range are at most twice the gallery's.
    """
    index = build_index(gallery, kind=kind, storage=storage, lists=8)
    rows, distances = index.search(gallery[:30], k=3, effort=EVERYTHING)
    true = np.linalg.norm(gallery[:30, None].astype(np.float64) - gallery[rows], axis=2)
    longest = np.linalg.norm(gallery, axis=1).max()
    bound = 2 * (2**-11 * longest if storage == "float16" else 0.5 * np.linalg.norm(np.ptp(gallery, axis=0) / 255))
    assert np.abs(distances - true).max() <= bound + 1e-6
    assert len(faiss.serialize_index(index.index)) < len(faiss.serialize_index(build_index(gallery, kind=kind).index))


@pytest.mark.parametrize(("kind", "mapped"), [("ivf", False), ("ivf", True), ("hnsw", True), ("flat", False)])
def test_a_saved_index_searches_as_before(gallery, kind, mapped, tmp_path):
    index = build_index(gallery, kind=kind, distance="cosine")
    index.save(tmp_path / "cars.index")
    loaded = load_index(tmp_path / "cars.index", mapped=mapped)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cars.index"]
    assert (loaded.distance, loaded.kind, len(loaded), loaded.dimension) == ("cosine", kind, 600, 12)
    for expected, values in zip(index.search(gallery, k=5), loaded.search(gallery, k=5), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert faiss.read_index(str(tmp_path / "cars.index")).ntotal == 600
    if mapped and kind == "ivf":  # faiss would end the process
        with pytest.raises(UserError, match="mapped=False"):
            loaded.add(gallery)
    else:
        loaded.add(gallery[:7])
        assert set(loaded.search(gallery[:1], k=2, effort=EVERYTHING)[0][0].tolist()) == {0, 600}


def test_damaged_files_are_refused(gallery, tmp_path):
    path = tmp_path / "x.index"
    with pytest.raises(UserError, match="No such file"):
        load_index(path)
    build_index(gallery, lists=4).save(path)
    whole = path.read_bytes()
    for damaged, message in [
        (b"hello", "not an index"),
        (whole[:-10], "is damaged"),
        (whole[: len(whole) // 2], "not an index"),
        (whole[len(whole) // 2 :], "cannot be read"),
        (whole.replace(b'"count": 600', b'"count": 599'), "600 images of 599"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=message) as error:
            load_index(path)
        assert "\n" not in str(error.value)
    faiss.write_index(faiss.IndexFlatL2(3), str(path))
    with pytest.raises(UserError, match="not an index that was saved here"):
        load_index(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gallery_on_disk_is_added_block_by_block(gallery, kind, tmp_path, monkeypatch):
    """The index is that of the array in memory, and no more than a block of the file is read at once."""
    np.save(tmp_path / "g.npy", gallery)
    disk = np.load(tmp_path / "g.npy", mmap_mode="r")
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # the order in which a graph grows is then the same
    try:
        monkeypatch.setattr(faiss_index, "_BLOCK_BYTES", 4 * 12 * 250)
        sizes = []
        plain = exact.check_embeddings
        monkeypatch.setattr(exact, "check_embeddings", lambda rows, what: sizes.append(len(rows)) or plain(rows, what))
        built = build_index(disk, kind=kind, lists=3)
        assert sizes[-3:] == [250, 250, 100]
        whole = build_index(gallery, kind=kind, lists=3)
    finally:
        faiss.omp_set_num_threads(threads)
    np.testing.assert_array_equal(built.search(gallery, k=4)[0], whole.search(gallery, k=4)[0])
    assert list(index_recall(built, disk, k=4, sample=50)) == list(index_recall(whole, gallery, k=4, sample=50))


def test_ivf_and_hnsw_search_what_they_were_built_as_and_no_more(gallery):
    """faiss reports the structure, and how many distances a search computes."""
    lists = build_index(gallery, kind="ivf", lists=24)
    assert type(lists.index) is faiss.IndexIVFFlat
    assert (lists.index.nlist, lists.lists) == (24, 24)
    faiss.cvar.indexIVF_stats.reset()
    lists.search(gallery[:10], k=3, effort=2)
    assert faiss.cvar.indexIVF_stats.nlist == 2 * 10
    graph = build_index(gallery, kind="hnsw", links=6)
    assert type(graph.index) is faiss.IndexHNSWFlat
    assert (graph.index.hnsw.nb_neighbors(1), graph.index.hnsw.nb_neighbors(0)) == (6, 12)
    compared = []
    for effort in (4, 64):
        faiss.cvar.hnsw_stats.reset()
        graph.search(gallery[:10], k=3, effort=effort)
        compared.append(faiss.cvar.hnsw_stats.ndis)
    assert 0 < compared[0] < compared[1] < 10 * len(gallery) / 2


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_recall_of_a_thorough_search_is_nearly_one(gallery, kind, distance):
    """A graph of inner products finds a little less: the longest images are everybody's neighbors."""
    index = build_index(gallery, kind=kind, distance=distance)
    (result,) = index_recall(index, gallery, k=5, efforts=[EVERYTHING], sample=150)
    assert result.recall >= (1.0 if kind == "ivf" else 0.95)
    assert (result.queries, result.k, result.effort) == (150, 5, EVERYTHING)


def test_recall_by_a_slow_reference(gallery):
    """Counted query by query in float64, the query itself left out; more effort never finds less of a list."""
    index = build_index(gallery, lists=30)
    results = list(index_recall(index, gallery, k=4, efforts=[1, 3, 30], sample=EVERYTHING))
    for result in results:
        rows, _ = index.search(gallery, k=4, effort=result.effort, own_rows=np.arange(600))
        shares = []
        for query in range(600):
            far = ((gallery.astype(np.float64) - gallery[query]) ** 2).sum(axis=1)
            far[query] = np.inf
            truth = set(np.argsort(far)[:4].tolist())
            shares.append(len(truth & set(rows[query].tolist())) / 4)
        assert result.recall == pytest.approx(np.mean(shares), abs=1e-12)
        assert result.standard_error == pytest.approx(np.std(shares, ddof=1) / np.sqrt(600), abs=1e-12)
        assert result.queries == 600
    assert results[0].recall < results[1].recall < results[2].recall == 1.0


@pytest.mark.parametrize("dim", [1, 7, 8, 10, 100])
def test_binary_codes_are_compared_by_the_bits_that_differ(dim):
    rng = np.random.default_rng(dim)
    gallery, queries = rng.normal(size=(300, dim)), rng.normal(size=(20, dim))
    gallery[0] = 0  # all signs count as positive
    index = build_index(gallery, kind="flat", storage="binary", distance="cosine")
    own_rows = rng.integers(300, size=20)
    for own in (None, own_rows):
        rows, distances = index.search(queries, k=9, own_rows=own)
        bits = ((queries[:, None] >= 0) != (gallery[None] >= 0)).sum(axis=2).astype(float)
        np.testing.assert_array_equal(np.take_along_axis(bits, rows, 1), distances)
        if own is not None:
            bits[np.arange(20), own] = np.inf
        np.testing.assert_array_equal(np.sort(bits, axis=1)[:, :9], distances)
    assert index.index.code_size == -(-dim // 8)


@pytest.mark.parametrize("distance", DISTANCES)
def test_int8_codes_are_the_nearest_of_256_steps_of_each_dimension(gallery, distance):
    index = build_index(gallery, kind="flat", storage="int8", distance=distance)
    kept = gallery / np.linalg.norm(gallery, axis=1, keepdims=True) if distance == "cosine" else gallery
    low, step = kept.min(axis=0), np.ptp(kept, axis=0) / 255
    vectors = index.index.reconstruct_n(0, len(index))
    codes = (vectors - low) / step
    np.testing.assert_allclose(codes % 1, 0.5, atol=1e-3)  # the middle of a step
    assert np.abs(codes - (kept - low) / step).max() <= 0.5 + 1e-3
    distances = index.search(gallery[:30], k=5)[1]
    reference = build_index(vectors, kind="flat", distance="dot" if distance == "cosine" else distance)
    expected = reference.search(kept[:30], k=5)[1] + (1 if distance == "cosine" else 0)
    np.testing.assert_allclose(distances, np.maximum(expected, 0) if distance == "cosine" else expected, atol=1e-5)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rescoring_all_images_is_the_exact_search(gallery, distance, dtype, tmp_path):
    np.save(tmp_path / "gallery.npy", gallery.astype(dtype))
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    index = build_index(gallery, kind="flat", storage="binary", distance=distance)
    rows, _ = index.search(gallery[:40], k=len(gallery))
    rescored = rescore(gallery[:40], mapped, rows, k=7, distance=distance)
    expected = nearest_neighbors(gallery[:40], np.asarray(mapped, np.float32), k=7, distance=distance)
    np.testing.assert_array_equal(rescored[0], expected[0])
    np.testing.assert_allclose(rescored[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gallery": np.zeros(4)}, r"shape \(4,\)"),
        ({"kind": "tree"}, "unknown kind 'tree'; one of ivf, hnsw"),
        ({"distance": "manhattan"}, "unknown distance 'manhattan'"),
        ({"storage": "bits"}, "unknown storage 'bits'; one of float32"),
        ({"lists": 601}, "lists must be in 1 .. 600"),
        ({"kind": "hnsw", "links": 1}, "links must be in 2 .. 256"),
        ({"kind": "hnsw", "storage": "binary"}, "storage 'binary' goes with kind 'flat', not 'hnsw'"),
    ],
)
def test_arguments_of_an_index_that_cannot_be_are_refused(gallery, arguments, message):
    with pytest.raises(UserError, match=message):
        build_index(**{"gallery": gallery, **arguments})


def test_searches_that_cannot_be_are_refused(gallery, monkeypatch):
    index = build_index(gallery, lists=4)
    rescored = {"queries": [[1.0, 0.0]], "gallery": np.eye(4, 2), "rows": [[0, 1]], "k": 1}
    bad = gallery.copy()
    bad[530, 2] = np.nan
    monkeypatch.setattr(faiss_index, "_BLOCK_BYTES", 4 * 12 * 250)
    for call, message in (
        (lambda: index.search(np.zeros((3, 5)), k=1), "5 dimensions, the index 12"),
        (lambda: index.search(np.full((3, 12), np.inf), k=1), "3 of 3 rows"),
        (lambda: index.search(np.zeros((3, 12)), k=601), "k must be in 1 .. 600"),
        (lambda: index.search(np.zeros((3, 12)), k=600, own_rows=[0, 1, 2]), "1 .. 599"),
        (lambda: index.search(np.zeros((3, 12)), k=1, effort=0), "`effort` must be at least 1"),
        (lambda: index.add(np.zeros((3, 4))), "dimensions"),
        (lambda: next(index_recall(index, gallery[1:])), "the index holds 600 images, the gallery 599"),
        (lambda: build_index(bad, kind="hnsw"), r"gallery rows 500 .. 599, .* 1 of 100 rows .* is row 30"),
        (lambda: rescore(**{**rescored, "k": 3}), "k=3 must be in 1 .. 2"),
        (lambda: rescore(**{**rescored, "rows": [[0, 4]]}), "rows below 4, not 4"),
        (lambda: rescore(**{**rescored, "queries": [[1.0]]}), "must go together"),
        (lambda: rescore(**{**rescored, "gallery": np.full((4, 2), np.nan)}), "gallery embeddings hold NaN"),
    ):
        with pytest.raises(UserError, match=message):
            call()
