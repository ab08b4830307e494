"""A gallery on disk, searched chunk by chunk, gives what a search in memory gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.evaluation import evaluate_retrieval, nearest_neighbours, neighbour_blocks
from tfdml.evaluation.search.exact import DISTANCES, check_embeddings, is_memory_mapped


def mapped(array, folder, name="x"):
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("budget", [1, 3000, 40_000])
def test_the_same_bits_as_in_memory(distance, budget, tmp_path):
    rng = np.random.default_rng(0)
    gallery = rng.normal(size=(211, 6)).astype(np.float32) * 7 + 3
    gallery[50:60] = gallery[150:160]  # copies in different chunks
    gallery[77] = 0
    queries = rng.normal(size=(13, 6)).astype(np.float32) * 7 + 3
    for arguments in ({}, {"own_rows": np.arange(100, 113)}):
        expected = nearest_neighbours(queries, gallery, k=9, distance=distance, **arguments)
        found = nearest_neighbours(
            queries, mapped(gallery, tmp_path), k=9, distance=distance, memory_budget=budget, **arguments
        )
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(2, 40),
    k=st.integers(1, 39),
    budget=st.sampled_from([1, 200, 1500]),
)
def test_ties_across_chunks_follow_gallery_order(seed, size, k, budget, tmp_path_factory):
    k = min(k, size - 1)
    points = np.random.default_rng(seed).integers(-2, 3, size=(size, 2)).astype(np.float32)
    expected = nearest_neighbours(points, k=k, distance="sqeuclidean")
    found = nearest_neighbours(
        mapped(points, tmp_path_factory.mktemp("ties")), k=k, distance="sqeuclidean", memory_budget=budget
    )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_all_metrics_are_those_of_the_search_in_memory(tmp_path):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 12, size=150)
    points = (rng.normal(size=(12, 5))[labels] + 0.5 * rng.normal(size=(150, 5))).astype(np.float32)
    disk = mapped(points, tmp_path)
    # Means are added up block by block, so that their last digit may differ; counts are equal.
    same = pytest.approx(evaluate_retrieval(points, labels), rel=1e-14)
    assert evaluate_retrieval(disk, labels, memory_budget=2000) == same
    queries = (disk[:40], labels[:40], disk[40:], labels[40:])
    in_memory = (points[:40], labels[:40], points[40:], labels[40:])
    same = pytest.approx(evaluate_retrieval(*in_memory), rel=1e-14)
    assert evaluate_retrieval(*queries, memory_budget=2000) == same


def test_what_counts_as_mapped(tmp_path):
    """The check of the embeddings and slices of them keep the mapping; what was copied is in memory."""
    disk = mapped(np.ones((6, 3), np.float32), tmp_path)
    assert is_memory_mapped(disk)
    assert is_memory_mapped(check_embeddings(disk)[2:5])
    assert not is_memory_mapped(disk[[0, 1]].copy())
    assert not is_memory_mapped(check_embeddings(disk.astype(np.float64)))


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path):
    """Neither the gallery nor a transformed copy of it is ever held whole."""
    import tracemalloc

    gallery = mapped(np.random.default_rng(2).normal(size=(200_000, 16)).astype(np.float32), tmp_path)
    tracemalloc.start()
    try:
        for _ in neighbour_blocks(gallery[:4], gallery, k=3, memory_budget=2**18):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < gallery.nbytes / 3
