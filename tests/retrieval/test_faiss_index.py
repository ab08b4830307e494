"""The approximate search: exact where all is searched, honest about what it misses, and safe on disk."""

import faiss
import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import build_index, exact, faiss_index, load_index, nearest_neighbors, rescore

FACTORIES = ("Flat", "IVF8,Flat", "HNSW16")


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
    expected = nearest_neighbors(queries, gallery, k=7, distance=distance, own_rows=own_rows)
    for factory, parameters in (("Flat", ""), ("IVF12,Flat", "nprobe=12")):
        index = build_index(gallery, factory, distance=distance, parameters=parameters)
        rows, distances = index.search(queries, k=7, own_rows=own_rows)
        assert rows.dtype == np.int64
        assert distances.dtype == np.float32
        np.testing.assert_array_equal(rows, expected[0])
        # A distance to itself of 0 is the root of a difference of float32 squares, or 1 less a float32 product.
        np.testing.assert_allclose(distances, expected[1], rtol=1e-5, atol=1e-6)


def test_equally_near_images_are_ordered_by_row():
    points = np.zeros((40, 3), np.float32)
    points[20:] = 1
    rows, distances = build_index(points).search(points[25:26], k=30)
    assert rows[0].tolist() == [*range(20, 40), *range(10)]
    assert (distances[0, :20] == 0).all()
    three = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    rows, distances = build_index(three, distance="cosine").search([[2.0, 0]], k=3)
    assert (rows[0].tolist(), distances[0].tolist()) == ([1, 0, 2], [0.0, 1.0, 2.0])
    four = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    rows, distances = rescore([[1.0, 0.0]], four, [[-1, 2, 3, 0]], k=4, distance="cosine")
    assert (rows.tolist(), distances.tolist()) == ([[0, 2, 3, -1]], [[0.0, 0.0, 1.0, np.inf]])


def test_more_lists_miss_fewer_and_lists_that_hold_too_few_say_so(gallery):
    index = build_index(gallery, "IVF100,Flat", distance="cosine")
    expected, _ = nearest_neighbors(gallery, gallery, k=4, distance="cosine")
    recalls = []
    for lists in (1, 10, 100):
        index.tune(f"nprobe={lists}")
        rows, _ = index.search(gallery, k=4)
        recalls.append(np.mean([np.isin(one, other).mean() for one, other in zip(expected, rows, strict=True)]))
    assert recalls[0] < recalls[1] <= recalls[2] == 1
    index.tune("nprobe=1")
    rows, distances = index.search(gallery[:5], k=100)
    missing = rows == -1
    assert missing.any()
    assert np.isinf(distances[missing]).all()
    assert np.isfinite(distances[~missing]).all()
    assert not (missing[:, :-1] & ~missing[:, 1:]).any()  # all at the end of their row


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_saved_index_searches_as_before(gallery, factory, tmp_path):
    index = build_index(gallery, factory, distance="cosine")
    if factory.startswith("IVF"):
        index.tune("nprobe=3")
    index.save(tmp_path / "cars.index")
    loaded = load_index(tmp_path / "cars.index")
    assert [entry.name for entry in tmp_path.iterdir()] == ["cars.index"]
    assert (loaded.distance, len(loaded), loaded.dimension) == ("cosine", 600, 12)
    for expected, values in zip(index.search(gallery, k=5), loaded.search(gallery, k=5), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert faiss.read_index(str(tmp_path / "cars.index")).ntotal == 600
    loaded.add(gallery[:7])
    assert set(loaded.search(gallery[:1], k=2)[0][0].tolist()) == {0, 600}


def test_damaged_files_are_refused(gallery, tmp_path):
    path = tmp_path / "x.index"
    with pytest.raises(UserError, match="No such file"):
        load_index(path)
    build_index(gallery).save(path)
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


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_gallery_on_disk_is_added_block_by_block(gallery, factory, tmp_path, monkeypatch):
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
        built = build_index(disk, factory)
        assert sizes[-3:] == [250, 250, 100]
        whole = build_index(gallery, factory)
    finally:
        faiss.omp_set_num_threads(threads)
    np.testing.assert_array_equal(built.search(gallery, k=4)[0], whole.search(gallery, k=4)[0])


@pytest.mark.parametrize("dim", [1, 7, 8, 10, 100])
def test_binary_codes_are_compared_by_the_bits_that_differ(dim):
    rng = np.random.default_rng(dim)
    gallery, queries = rng.normal(size=(300, dim)), rng.normal(size=(20, dim))
    gallery[0] = 0  # all signs count as positive
    index = build_index(gallery, "LSH", distance="cosine")
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
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rescoring_all_images_is_the_exact_search(gallery, distance, dtype, tmp_path):
    np.save(tmp_path / "gallery.npy", gallery.astype(dtype))
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    index = build_index(gallery, "LSH", distance=distance)
    rows, _ = index.search(gallery[:40], k=len(gallery))
    rescored = rescore(gallery[:40], mapped, rows, k=7, distance=distance)
    expected = nearest_neighbors(gallery[:40], np.asarray(mapped, np.float32), k=7, distance=distance)
    np.testing.assert_array_equal(rescored[0], expected[0])
    np.testing.assert_allclose(rescored[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factory": "tree"}, "`factory=tree` of 600 images: .*could not parse index string tree"),
        ({"factory": "IVF601,Flat"}, "`factory=IVF601,Flat` of 600 images: "),
        ({"parameters": "lists=3"}, "`parameters=lists=3`: "),
    ],
)
def test_arguments_of_an_index_that_cannot_be_are_refused(gallery, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        build_index(**{"gallery": gallery, **arguments})
    assert "\n" not in str(error.value)


def test_searches_that_cannot_be_are_refused(gallery, monkeypatch):
    index = build_index(gallery)
    rescored = {"queries": [[1.0, 0.0]], "gallery": np.eye(4, 2), "rows": [[0, 1]], "k": 1}
    bad = gallery.copy()
    bad[530, 2] = np.nan
    monkeypatch.setattr(faiss_index, "_BLOCK_BYTES", 4 * 12 * 250)
    for call, message in (
        (lambda: index.search(np.zeros((3, 5)), k=1), "5 dimensions, the index 12"),
        (lambda: index.search(np.zeros((3, 12)), k=601), "k must be in 1 .. 600"),
        (lambda: build_index(bad), r"gallery rows 500 .. 599, .* 1 of 100 rows .* is row 30"),
        (lambda: rescore(**{**rescored, "rows": [[0, 4]]}), "rows below 4, not 4"),
    ):
        with pytest.raises(UserError, match=message):
            call()
