"""Graded relevance and re-identification, against slow references and against scripts that others
have published."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdml.evaluation import Relevance, evaluate_retrieval, retrieval_per_query
from tfdml.evaluation.metrics import (
    hierarchical_average_precision,
    ndcg,
    population_relevances,
)

TINY = 1e-9
# What a script imports and does not need for its metrics is replaced by a stand-in, and names that
# NumPy has dropped since are given back. A single-precision cast of the script becomes a
# double-precision one.
_PRELUDE = """
import importlib.abc, importlib.machinery, importlib.util, sys, unittest.mock
import numpy as np
np.in1d = getattr(np, "in1d", np.isin)
np.Inf = np.inf
class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {stand_ins}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = unittest.mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__all__ = [], spec, []
        return module
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, StandIns())
spec = importlib.util.spec_from_file_location("peer", {script!r})
peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer)
given = dict(np.load({folder!r} + "/given.npz"))
result = {{}}
"""


def run_peer(script, code, folder, stand_ins=(), **given):
    """Run code after a published script, in a process of its own, or skip where there is none.

    Args:
        script: Its path in the folder that TFDML_PEERS names.
        code: What to run: `peer` is the script, `given` the arrays; it fills `result`.
        folder: For files.
        stand_ins: Packages that the script imports and the code does not need.
        **given: Arrays.

    Returns:
        `result`, as a dictionary of arrays.
    """
    peers = os.environ.get("TFDML_PEERS")
    if not peers or not (path := Path(peers).resolve() / script).is_file():
        pytest.skip(f"no {script}: set TFDML_PEERS to a folder with the peers' repositories")
    np.savez(folder / "given.npz", **given)
    prelude = _PRELUDE.format(
        script=str(path), folder=str(folder), stand_ins=set(stand_ins) or "()"
    )
    program = f"{prelude}\n{code}\nnp.savez({str(folder)!r} + '/result.npz', **result)"
    environment = {**os.environ, "PYTHONPATH": str(Path(peers).resolve() / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True
    )
    if "No module named 'torch'" in done.stderr:
        pytest.skip("PyTorch is not installed, here or in the folder `site` of TFDML_PEERS")
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "result.npz"))


def rankings(count=20, size=60, depth=3, seed=0):
    """Rankings as the levels that each place shares with the query, 0 for none; no two levels of
    one relevance."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        levels = rng.integers(0, depth + 1, size) * (rng.random(size) < 0.6)
        relevances = population_relevances(levels[levels > 0], depth)
        if len(set(relevances[np.unique(levels)])) == len(np.unique(levels)) > 1:
            found.append(levels)
    return np.array(found)


def reference(levels, relevances):
    """H-AP and nDCG of one ranking, place by place, from the formulas."""
    relevance = relevances[levels]
    h_ap = 0.0
    for k in range(len(levels)):
        h_ap += sum(min(relevance[j], relevance[k]) for j in range(k + 1)) / (k + 1)
    best = sorted(levels, reverse=True)
    gain = [
        sum((2.0**level - 1) / np.log2(2 + i) for i, level in enumerate(order))
        for order in (levels, best)
    ]
    return h_ap / relevance.sum(), gain[0] / gain[1]


@pytest.mark.parametrize("roles", [False, True], ids=["all to all", "gallery"])
def test_graded_values_of_embeddings(roles):
    rng = np.random.default_rng(1)
    fine = rng.integers(0, 12, 70)
    levels = np.stack([fine, fine // 3, fine // 6], axis=1)
    points = rng.normal(size=(70, 4)) + levels[:, 2:]
    sides = (points[:20], points[20:]) if roles else (points, None)
    relevance = Relevance.levels(levels[:20], levels[20:]) if roles else Relevance.levels(levels)
    metrics = ["h_ap", "ndcg", "map"]
    values = retrieval_per_query(
        sides[0], gallery=sides[1], relevance=relevance, metrics=metrics, memory_budget=5_000
    )
    for query in range(0, len(sides[0]), 3):
        others = np.arange(20, 70) if roles else np.delete(np.arange(70), query)
        order = others[
            np.argsort(((points[others] - points[query]) ** 2).sum(axis=1), kind="stable")
        ]
        shared = (levels[order] == levels[query]).sum(axis=1)
        expected = reference(shared, population_relevances(shared[shared > 0], 3, itself=not roles))
        for name, value in zip(metrics, expected, strict=False):
            assert values[name][query] == pytest.approx(value, rel=TINY)
        for level in range(3):
            binary = (levels[order, level] == levels[query, level]).astype(int)
            if not binary.any():
                assert np.isnan(values[f"ndcg/{level}"][query])
                continue
            expected = reference(binary, np.array([0.0, 1.0]))
            for name, value in zip(metrics, expected, strict=False):
                assert values[f"{name}/{level}"][query] == pytest.approx(value, rel=TINY)
            assert values[f"map/{level}"][query] == pytest.approx(values[f"h_ap/{level}"][query])
    means = evaluate_retrieval(
        sides[0],
        gallery=sides[1],
        relevance=relevance,
        metrics=["h_ap"],
        intervals="classes" if not roles else None,
    )
    assert means["h_ap"] == pytest.approx(np.nanmean(values["h_ap"]))
    assert roles or set(means["intervals"]) == {"h_ap", "h_ap/0", "h_ap/1", "h_ap/2"}


def market(seed=3):
    """Points, identities and cameras of queries and gallery, with queries that cannot be
    answered."""
    rng = np.random.default_rng(seed)
    ids, cameras = rng.integers(0, 15, 100), rng.integers(0, 3, 100)
    points = rng.normal(size=(15, 6))[ids] + 1.2 * rng.normal(size=(100, 6))
    return [(values[:25], values[25:]) for values in (points, ids, cameras)]


def test_cmc_map_and_minp_equal_fast_reid(tmp_path):
    (queries, gallery), (ids, gallery_ids), (cameras, gallery_cameras) = market()
    distances = ((queries[:, None] - gallery[None]) ** 2).sum(axis=2)
    found = run_peer(
        "fast-reid/fastreid/evaluation/rank.py",
        "names = ('distances', 'ids', 'gallery_ids', 'cameras', 'gallery_cameras')\n"
        "cmc, ap, inp = peer.evaluate_rank(*(given[name] for name in names), max_rank=20, "
        "use_cython=False)\n"
        "result.update(cmc=cmc, ap=ap, inp=inp)",
        tmp_path,
        distances=distances,
        ids=ids,
        gallery_ids=gallery_ids,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
    )
    relevance = Relevance.classes(
        ids, gallery_ids, not_same=cameras, gallery_not_same=gallery_cameras
    )
    values = retrieval_per_query(
        queries, gallery=gallery, relevance=relevance, metrics=["map", "minp"]
    )
    answered = ~np.isnan(values["map"])
    np.testing.assert_allclose(values["map"][answered], found["ap"], atol=TINY)
    np.testing.assert_allclose(values["minp"][answered], found["inp"], atol=TINY)
    ks = range(1, 21)
    recalls = evaluate_retrieval(
        queries, gallery=gallery, relevance=relevance, ks=ks, metrics=["recall"]
    )
    curve = np.array([recalls[f"recall@{k}"] for k in ks])
    # The script adds up its curve in single precision.
    np.testing.assert_allclose(curve, found["cmc"], atol=1e-6)
    assert round(found["cmc"][0] * answered.sum()) == round(curve[0] * answered.sum())


def test_graded_metrics_equal_happier(tmp_path):
    levels = rankings(count=30, seed=5)
    relevances = np.stack([population_relevances(row[row > 0], 3) for row in levels])
    found = run_peer(
        "HAPPIER/happier/engine/metrics.py",
        "import torch\n"
        "torch.set_default_dtype(torch.float64)\n"
        "torch.Tensor.float = torch.Tensor.double\n"
        "levels, relevances = torch.tensor(given['levels']), torch.tensor(given['relevances'])\n"
        "inputs = dict(sorted_target=levels, sorted_rel=torch.gather(relevances, 1, levels), "
        "relevances=relevances)\n"
        "for name in ('hap', 'ndcg'):\n"
        "    result[name] = getattr(peer, name)(**inputs, reduce=False).numpy()",
        tmp_path,
        stand_ins=["happier"],
        levels=levels,
        relevances=relevances,
    )
    for row, of_levels, h_ap, gain in zip(
        levels, relevances, found["hap"], found["ndcg"], strict=True
    ):
        ranks, shared = 1 + np.flatnonzero(row), row[row > 0]
        assert hierarchical_average_precision(ranks, shared, of_levels) == pytest.approx(
            h_ap, abs=TINY
        )
        assert ndcg(ranks, shared) == pytest.approx(gain, abs=TINY)
