"""Exact evaluation over several processes: bit for bit the numbers of one."""

import types

import numpy as np
import pytest

from tfdml.cluster import query_blocks
from tfdml.cluster.query_blocks import part_of_task, values_over_ray
from tfdml.cluster.ray_session import ray_session
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval
from tfdml.evaluation.per_query import retrieval_task, search_depth, values_per_query

METRICS = ["recall@1", "recall@4", "precision@2", "map@r", "r_precision", "map"]


def made(count=700, dim=12, classes=40, seed=0):
    """Embeddings with copies and near-copies among them, and a class of one image."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    labels[5] = classes
    embeddings = (rng.normal(size=(classes + 1, dim))[labels] + rng.normal(size=(count, dim))).astype(np.float32)
    embeddings[50:90] = embeddings[10:50]
    return embeddings, labels


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("roles", [False, True])
def test_blocks_of_queries_give_the_values_of_all(distance, roles):
    embeddings, labels = made()
    sides = (embeddings[:300], labels[:300], embeddings[300:], labels[300:]) if roles else (embeddings, labels)
    task = retrieval_task(*sides)
    whole = values_per_query(task, METRICS, distance, 2**28)
    for size in (1, 64, 299):
        starts = range(0, len(task.labels), size)
        blocks = [slice(start, min(start + size, len(task.labels))) for start in starts][:40]
        depth = search_depth(task, METRICS)
        parts = [values_per_query(part_of_task(task, block), METRICS, distance, 2**28, depth=depth) for block in blocks]
        for name in METRICS:
            found = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(found, whole[name][: len(found)], err_msg=name)


def test_every_query_is_in_one_block(monkeypatch):
    monkeypatch.setattr(query_blocks, "_LEAST_QUERIES", 10)
    for count, workers in ((1, 4), (7, 2), (1000, 3), (39, 4)):
        rows = [row for block in query_blocks._blocks(count, workers) for row in range(block.start, block.stop)]
        assert rows == list(range(count))


def test_workers_map_a_file_only_if_it_has_a_name(tmp_path):
    values = np.memmap(tmp_path / "values", np.float32, "w+", shape=(4, 3))
    values[:] = np.arange(12).reshape(4, 3)
    ray = types.SimpleNamespace(put=lambda value: value)
    np.testing.assert_array_equal(query_blocks._shared(ray, values[1:]).open(), values[1:])
    (tmp_path / "values").unlink()  # as `tfdml.embeddings.parquet` does with the file of large embeddings
    shared = query_blocks._shared(ray, values[1:])
    assert type(shared) is np.ndarray
    np.testing.assert_array_equal(shared, values[1:])


@pytest.mark.slow
def test_over_ray_the_numbers_are_those_of_one_process(tmp_path, monkeypatch):
    """Two workers, in memory and mapped; what one of them refuses, and what is refused before."""
    pytest.importorskip("ray", reason="pip install 'tfdml[ray]'")
    monkeypatch.setattr(query_blocks, "_LEAST_QUERIES", 100)
    embeddings, labels = made()
    np.save(tmp_path / "all.npy", np.concatenate([embeddings[:3], embeddings]))
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")[3:]
    options = {"metrics": [*METRICS, "nmi"], "intervals": "queries"}
    seen = []
    with ray_session("local", cpus=2, object_store_bytes=2**27):
        over = values_over_ray("local", 2)
        expected = evaluate_retrieval(embeddings, labels, **options)
        found = evaluate_retrieval(embeddings, labels, **options, per_query=over, progress=lambda *x: seen.append(x))
        assert found == expected
        assert ("neighbours", 700, 700) in seen
        assert evaluate_retrieval(mapped, labels, metrics=["recall", "map@r"], per_query=over) == evaluate_retrieval(
            embeddings, labels, metrics=["recall", "map@r"]
        )
        sides = (embeddings[:300], labels[:300], embeddings[300:], labels[300:])
        assert evaluate_retrieval(*sides, metrics=METRICS, per_query=over) == evaluate_retrieval(
            *sides, metrics=METRICS
        )
        with pytest.raises(UserError, match="unknown distance"):
            evaluate_retrieval(embeddings, labels, distance="far", metrics=["recall"], per_query=over)
        with pytest.raises(UserError, match="recall@900 needs 900"):
            evaluate_retrieval(embeddings, labels, metrics=["recall@900"], per_query=over)
