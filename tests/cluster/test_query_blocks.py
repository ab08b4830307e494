"""Exact evaluation over several processes: bit for bit the numbers of one."""

import json

import numpy as np
import pytest

from tests.cli import commands as in_this_process
from tfdml.cluster import query_blocks
from tfdml.cluster.query_blocks import values_over_ray
from tfdml.cluster.ray_session import ray_session
from tfdml.errors import UserError
from tfdml.evaluation import Relevance, evaluate_retrieval
from tfdml.evaluation.per_query import retrieval_task, search_depth, values_per_query

METRICS = ["recall@1", "recall@4", "precision@2", "map@3", "mp@5", "mmp@5", "map@r", "r_precision", "map", "minp"]


def made(count=700, dim=12, classes=40, seed=0):
    """Embeddings with copies and near-copies among them, and a class of one image."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    labels[5] = classes
    embeddings = (rng.normal(size=(classes + 1, dim))[labels] + rng.normal(size=(count, dim))).astype(np.float32)
    embeddings[50:90] = embeddings[10:50]
    return embeddings, labels


def relevances():
    """By name: what is relevant, and what is ignored, for 700 queries all-to-all, or 300 in a gallery of 400."""
    _, labels = made()
    rng = np.random.default_rng(1)
    cameras, coarse = rng.integers(0, 3, 700), np.stack([labels, labels // 8], axis=1)
    of = {"query": labels[:300], "gallery": labels[300:]}
    lists = [np.flatnonzero(of["gallery"] == label) for label in of["query"]]
    ignored = [np.setdiff1d(rng.integers(0, 400, 30), right) for right in lists]
    junk = rng.random(400) < 0.05
    groups = {"not_same": cameras[:300], "gallery_not_same": cameras[300:]}
    return {
        "classes": (False, Relevance.classes(labels)),
        "roles": (True, Relevance.classes(of["query"], of["gallery"])),
        "cameras": (False, Relevance.classes(labels, not_same=cameras)),
        "cameras and junk": (True, Relevance.classes(of["query"], of["gallery"], **groups, junk=junk)),
        "lists": (True, Relevance.lists(lists, ignored)),
        "levels": (False, Relevance.levels(coarse)),
    }


def arguments(name):
    embeddings, _ = made()
    roles, relevance = relevances()[name]
    sides = (embeddings[:300], embeddings[300:]) if roles else (embeddings, None)
    return {"embeddings": sides[0], "gallery": sides[1], "relevance": relevance}


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("name", "distance"), [*((name, "euclidean") for name in relevances()), ("cameras", "cosine"), ("cameras", "dot")]
)
def test_blocks_of_queries_give_the_values_of_all(name, distance):
    task = retrieval_task(**arguments(name))
    metrics = [*METRICS, *(["h_ap", "asi", "ndcg"] if name == "levels" else [])]
    whole = values_per_query(task, metrics, distance, 2**28)
    depth = search_depth(task, metrics)
    for block in (slice(0, 1), slice(5, 6), slice(40, 104), slice(1, len(task.queries))):
        found = values_per_query(task.part(block), metrics, distance, 2**28, depth=depth)
        assert found.keys() == whole.keys()
        for metric, values in found.items():
            np.testing.assert_array_equal(values, whole[metric][block], err_msg=metric)


def test_every_query_is_in_one_block(monkeypatch):
    monkeypatch.setattr(query_blocks, "_LEAST_QUERIES", 10)
    for count, workers in ((1, 4), (7, 2), (1000, 3), (39, 4)):
        rows = [row for block in query_blocks._blocks(count, workers) for row in range(block.start, block.stop)]
        assert rows == list(range(count))


@pytest.mark.slow
def test_over_ray_the_numbers_are_those_of_one_process(tmp_path, monkeypatch):
    """Two workers, of arrays and of a mapped file, with ignored images, and by the command; and what is refused."""
    pytest.importorskip("ray", reason="pip install 'tfdml[ray]'")
    monkeypatch.setattr(query_blocks, "_LEAST_QUERIES", 100)
    embeddings, labels = made()
    np.save(tmp_path / "all.npy", np.concatenate([embeddings[:3], embeddings]))
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")[3:]
    with ray_session("local", cpus=2, object_store_bytes=2**27):
        over = values_over_ray("local", 2)
        for name in relevances():
            options = {**arguments(name), "metrics": METRICS, "intervals": "queries"}
            found = evaluate_retrieval(**options, per_query=over)
            assert found == evaluate_retrieval(**options)
        options = {"metrics": ["recall", "map@r"]}
        found = evaluate_retrieval(mapped, labels, **options, per_query=over)
        assert found == evaluate_retrieval(embeddings, labels, **options)
        with pytest.raises(UserError, match="unknown distance"):
            evaluate_retrieval(embeddings, labels, distance="far", metrics=["recall"], per_query=over)
        with pytest.raises(UserError, match="recall@900 needs 900"):
            evaluate_retrieval(embeddings, labels, metrics=["recall@900"], per_query=over)

        np.savez(tmp_path / "x.npz", embeddings=embeddings, labels=labels)
        monkeypatch.chdir(tmp_path)
        flags = ["--model=x.npz", "--metrics=recall,map@r,gap", "--json=x.json"]
        printed = {}
        for command in ((), ("--cluster=local", "--workers=2")):
            status, said, errors = in_this_process.run("evaluate", *flags, *command)
            assert status == 0, errors
            printed[command] = said, json.loads((tmp_path / "x.json").read_text())
        one, many = printed.values()
        assert many == one
