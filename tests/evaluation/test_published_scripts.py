"""Graded relevance and confidence: against slow references, and against the scripts that others have published."""

import numpy as np
import pytest

from tests.evaluation.peers import run_peer
from tfdml.errors import UserError
from tfdml.evaluation import Relevance, evaluate_retrieval, retrieval_per_query
from tfdml.evaluation.metrics import (
    average_set_intersection,
    global_average_precision,
    hierarchical_average_precision,
    ndcg,
    population_relevances,
)

TINY = 1e-9


def rankings(count=20, size=60, depth=3, seed=0):
    """Rankings as the levels that each place shares with the query, 0 for none; no two levels of one relevance."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        levels = rng.integers(0, depth + 1, size) * (rng.random(size) < 0.6)
        relevances = population_relevances(levels[levels > 0], depth)
        if len(set(relevances[np.unique(levels)])) == len(np.unique(levels)) > 1:
            found.append(levels)
    return np.array(found)


def reference(levels, relevances):
    """H-AP, ASI and nDCG of one ranking, place by place, from the formulas."""
    relevance = relevances[levels]
    h_ap = 0.0
    for k in range(len(levels)):
        h_ap += sum(min(relevance[j], relevance[k]) for j in range(k + 1)) / (k + 1)
    best, places = sorted(levels, reverse=True), int((levels > 0).sum())
    asi = 0.0
    for k in range(1, places + 1):
        found, remaining = 0, list(best[:k])
        for level in levels[:k]:
            if level in remaining:
                remaining.remove(level)
                found += 1
        asi += found / k
    gain = [sum((2.0**level - 1) / np.log2(2 + i) for i, level in enumerate(order)) for order in (levels, best)]
    return h_ap / relevance.sum(), asi / places, gain[0] / gain[1]


def test_one_level_is_average_precision_and_a_perfect_ranking_is_1():
    ranks = np.array([2, 3, 7, 11])
    assert hierarchical_average_precision(ranks) == pytest.approx(np.mean(np.arange(1, 5) / ranks))
    for metric in (hierarchical_average_precision, average_set_intersection, ndcg):
        assert metric([1, 2, 3, 4], [3, 2, 2, 1]) == pytest.approx(1)
        assert metric([1]) == 1
        assert metric([1, 2, 3, 4], [1, 2, 2, 3]) < 1
    # Two levels of one relevance are one level.
    assert hierarchical_average_precision([1, 2], [1, 2], [0.0, 0.5, 0.5]) == 1


@pytest.mark.parametrize("roles", [False, True], ids=["all to all", "gallery"])
def test_graded_values_of_embeddings(roles):
    rng = np.random.default_rng(1)
    fine = rng.integers(0, 12, 70)
    levels = np.stack([fine, fine // 3, fine // 6], axis=1)
    points = rng.normal(size=(70, 4)) + levels[:, 2:]
    sides = (points[:20], points[20:]) if roles else (points, None)
    relevance = Relevance.levels(levels[:20], levels[20:]) if roles else Relevance.levels(levels)
    metrics = ["h_ap", "asi", "ndcg", "map"]
    values = retrieval_per_query(sides[0], gallery=sides[1], relevance=relevance, metrics=metrics, memory_budget=5_000)
    for query in range(0, len(sides[0]), 3):
        others = np.arange(20, 70) if roles else np.delete(np.arange(70), query)
        order = others[np.argsort(((points[others] - points[query]) ** 2).sum(axis=1), kind="stable")]
        shared = (levels[order] == levels[query]).sum(axis=1)
        expected = reference(shared, population_relevances(shared[shared > 0], 3, itself=not roles))
        for name, value in zip(metrics, expected, strict=False):
            assert values[name][query] == pytest.approx(value, rel=TINY)
        for level in range(3):
            binary = (levels[order, level] == levels[query, level]).astype(int)
            if not binary.any():
                assert np.isnan(values[f"asi/{level}"][query])
                continue
            expected = reference(binary, np.array([0.0, 1.0]))
            for name, value in zip(metrics, expected, strict=False):
                assert values[f"{name}/{level}"][query] == pytest.approx(value, rel=TINY)
            assert values[f"map/{level}"][query] == pytest.approx(values[f"h_ap/{level}"][query])
    means = evaluate_retrieval(
        sides[0], gallery=sides[1], relevance=relevance, metrics=["h_ap"], intervals="classes" if not roles else None
    )
    assert means["h_ap"] == pytest.approx(np.nanmean(values["h_ap"]))
    assert roles or set(means["intervals"]) == {"h_ap", "h_ap/0", "h_ap/1", "h_ap/2"}


def test_gap_is_average_precision_over_all_predictions():
    rng = np.random.default_rng(2)
    correct, confidences = rng.random(50) < 0.4, rng.random(50)
    order = np.argsort(-confidences)
    hits, total = 0, 0.0
    for place, query in enumerate(order, 1):
        hits += correct[query]
        total += hits / place * correct[query]
    assert global_average_precision(correct, confidences, answerable=30) == pytest.approx(total / 30, rel=TINY)
    assert global_average_precision([False, False], [1, 2]) == 0
    for wrong in (([True], [1, 2]), ([[True]], [[1]]), ([True], [1], 0)):
        with pytest.raises(UserError, match="queries with an answer"):
            global_average_precision(*wrong)


def test_gap_of_embeddings_counts_queries_without_an_answer_as_wrong():
    gallery = np.array([[0.0], [10.0], [20.0]])
    queries = np.array([[0.1], [10.2], [20.05], [9.7], [50.0]])
    labels = [0, 1, -1, 2, -1]  # right, right, no answer, wrong, no answer; the third is the surest
    found = evaluate_retrieval(queries, labels, gallery, [0, 1, 2], metrics=["gap", "gap_known", "recall@1"])
    assert found["gap"] == pytest.approx((1 / 2 + 2 / 3) / 3)
    assert found["gap_known"] == pytest.approx((1 + 2 / 2) / 3)
    assert found["recall@1"] == pytest.approx(2 / 3)
    # The nearest image leaves the ranking, and the next one is wrong.
    relevance = Relevance.lists([[0], [1], [], [2], []], ignored=[[], [], [2], [], [2]])
    assert evaluate_retrieval(queries, gallery=gallery, relevance=relevance, metrics=["gap"])["gap"] == pytest.approx(
        (1 + 2 / 2) / 3
    )


def market(seed=3):
    """Points, identities and cameras of queries and gallery, with queries that cannot be answered."""
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
        "cmc, ap, inp = peer.evaluate_rank(*(given[name] for name in names), max_rank=20, use_cython=False)\n"
        "result.update(cmc=cmc, ap=ap, inp=inp)",
        tmp_path,
        distances=distances,
        ids=ids,
        gallery_ids=gallery_ids,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
    )
    relevance = Relevance.classes(ids, gallery_ids, not_same=cameras, gallery_not_same=gallery_cameras)
    values = retrieval_per_query(queries, gallery=gallery, relevance=relevance, metrics=["map", "minp"])
    answered = ~np.isnan(values["map"])
    np.testing.assert_allclose(values["map"][answered], found["ap"], atol=TINY)
    np.testing.assert_allclose(values["minp"][answered], found["inp"], atol=TINY)
    ks = range(1, 21)
    recalls = evaluate_retrieval(queries, gallery=gallery, relevance=relevance, ks=ks, metrics=["recall"])
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
        "inputs = dict(sorted_target=levels, sorted_rel=torch.gather(relevances, 1, levels), relevances=relevances)\n"
        "for name in ('hap', 'ndcg'):\n"
        "    result[name] = getattr(peer, name)(**inputs, reduce=False).numpy()\n"
        "result['asi'] = torch.cat([peer.asi(row[None], reduce=False) for row in levels]).numpy()\n"
        "result['binary'] = peer.asi((levels > 0).long(), reduce=False).numpy()",
        tmp_path,
        stand_ins=["happier"],
        levels=levels,
        relevances=relevances,
    )
    for row, of_levels, h_ap, gain, asi, binary in zip(
        levels, relevances, found["hap"], found["ndcg"], found["asi"], found["binary"], strict=True
    ):
        ranks, shared = 1 + np.flatnonzero(row), row[row > 0]
        assert hierarchical_average_precision(ranks, shared, of_levels) == pytest.approx(h_ap, abs=TINY)
        assert ndcg(ranks, shared) == pytest.approx(gain, abs=TINY)
        assert average_set_intersection(ranks, shared) == pytest.approx(asi, abs=TINY)
        assert average_set_intersection(ranks) == pytest.approx(binary, abs=TINY)


def test_gap_equals_met(tmp_path):
    rng = np.random.default_rng(7)
    similarities = -np.sort(-rng.uniform(-1, 1, (40, 6)), axis=1)
    neighbors, labels = rng.integers(0, 9, (40, 6)), np.where(rng.random(40) < 0.3, -1, rng.integers(0, 9, 40))
    found = run_peer(
        "met/code/classifiers/knn_classifier.py",
        "classifier = peer.KNN_Classifier(K=6, t=5.0)\n"
        "classifier.n, classifier.train_labels = 9, given['neighbors'].ravel()\n"
        "places = np.arange(given['neighbors'].size).reshape(given['neighbors'].shape)\n"
        "classifier.index = unittest.mock.Mock(search=lambda queries, k: (given['similarities'], places))\n"
        "predicted, confidences = classifier.predict(np.zeros((40, 1)))\n"
        "result.update(predicted=predicted, confidences=confidences)",
        tmp_path,
        stand_ins=["faiss", "code"],
        similarities=similarities,
        neighbors=neighbors,
    )
    np.testing.assert_array_equal(found["predicted"], neighbors[:, 0])
    confidences = found["confidences"]
    measured = run_peer(
        "met/code/utils/utils.py",
        "values = peer.evaluate(given['predicted'], given['confidences'], given['labels'], verbose=False)\n"
        "result['values'] = np.array(values)",
        tmp_path,
        stand_ins=["torch", "code"],
        predicted=neighbors[:, 0],
        confidences=confidences,
        labels=labels,
    )
    known, correct = labels >= 0, neighbors[:, 0] == labels
    ours = [
        global_average_precision(correct, confidences, int(known.sum())),
        global_average_precision(correct[known], confidences[known]),
        correct[known].mean(),
    ]
    np.testing.assert_allclose(ours, measured["values"], rtol=TINY)


def listed(seed=8):
    """Queries, a gallery, and per query the rows that are right and those that are ignored; some have none."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(3, size=(20, 50), p=[0.75, 0.15, 0.1])
    kinds[4][kinds[4] == 1] = 0
    points = rng.normal(size=(70, 5))
    right, ignored = ([np.flatnonzero(row == kind).tolist() for row in kinds] for kind in (1, 2))
    return points[:20], points[20:], right, ignored


def test_trapezoidal_map_and_mp_equal_revisitop(tmp_path):
    queries, gallery, right, ignored = listed()
    ranks = np.argsort(((gallery[:, None] - queries[None]) ** 2).sum(axis=2), axis=0)
    found = run_peer(
        "revisitop/python/evaluate.py",
        "rows = zip(given['right'], given['ignored'])\n"
        "truth = [{'ok': np.flatnonzero(ok), 'junk': np.flatnonzero(junk)} for ok, junk in rows]\n"
        "_, result['ap'], _, result['precision'] = peer.compute_map(given['ranks'], truth, [1, 5, 10])",
        tmp_path,
        ranks=ranks,
        right=[np.isin(np.arange(50), rows) for rows in right],
        ignored=[np.isin(np.arange(50), rows) for rows in ignored],
    )
    names = ["map_trapezoidal", "mp@1", "mp@5", "mp@10"]
    values = retrieval_per_query(queries, gallery=gallery, relevance=Relevance.lists(right, ignored), metrics=names)
    np.testing.assert_allclose(values["map_trapezoidal"], found["ap"], atol=TINY)
    np.testing.assert_allclose(np.stack([values[name] for name in names[1:]], axis=1), found["precision"], atol=TINY)


def test_map_at_k_equals_ilias(tmp_path):
    queries, gallery, right, _ = listed()
    distances = ((queries[:, None] - gallery[None]) ** 2).sum(axis=2)
    found = run_peer(
        "ilias/evaluation/src/dataset.py",
        "benchmark = peer.ILIAS.__new__(peer.ILIAS)\n"
        "ids = np.array([f'image_{i}' for i in range(50)])\n"
        "benchmark.gt = {query: set(ids[rows]) for query, rows in enumerate(given['right'])}\n"
        "similarity, ranks = -given['distances'], np.arange(50)\n"
        "found = [benchmark._compute_AP(query, ids, row, ranks, 10)[0] for query, row in enumerate(similarity)]\n"
        "result['ap'] = np.array(found)",
        tmp_path,
        distances=distances,
        right=[np.isin(np.arange(50), rows) for rows in right],
    )
    values = retrieval_per_query(queries, gallery=gallery, relevance=Relevance.lists(right), metrics=["map@10"])[
        "map@10"
    ]
    answered = [bool(rows) for rows in right]
    np.testing.assert_allclose(values[answered], found["ap"][answered], atol=TINY)


@pytest.mark.parametrize("itself", [True, False], ids=["all to all", "gallery"])
def test_mmp_equals_uned_to_its_three_digits(tmp_path, itself):
    rng = np.random.default_rng(9)
    labels = np.repeat(np.arange(20), [2, 3, 5, 9] * 5)
    points = rng.normal(size=(20, 8))[labels] + rng.normal(size=(len(labels), 8))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    rows = np.arange(len(labels))
    queries, gallery = (rows, rows) if itself else (rows[rows % 3 == 0], rows[rows % 3 > 0])
    kept = np.isin(labels[queries], labels[gallery])
    found = run_peer(
        "Universal-Image-Embeddings/universal_embedding/knn_utils.py",
        "def top(scores, k):\n"
        "    order = np.argsort(-scores, axis=-1, kind='stable')[..., :k]\n"
        "    return np.take_along_axis(scores, order, -1), order\n"
        "peer.jnp, peer.jax.lax.top_k, peer.jax.local_device_count = np, top, lambda: 1\n"
        "peer.jax.pmap = lambda run: lambda query_descrs: tuple(x[None] for x in run(query_descrs=query_descrs[0]))\n"
        "evaluator = peer.KNNEvaluator.__new__(peer.KNNEvaluator)\n"
        "evaluator.knn_query_batch_size = 7\n"
        "config = unittest.mock.Mock(save_neighbors=False)\n"
        "def domains(labels): return np.zeros(len(labels), int)\n"
        "asked, searched = given['query_labels'].tolist(), given['gallery_labels'].tolist()\n"
        "values = evaluator.compute_knn_metrics('key', [given['queries']], [given['gallery']], None, None,\n"
        "    bool(given['itself']), 5, config, asked, searched, domains(asked), domains(searched))\n"
        "result['values'] = np.array(values[:3])",
        tmp_path,
        stand_ins=["clu", "flax", "jax", "tensorflow", "universal_embedding"],
        queries=points[queries[kept]],
        gallery=points[gallery],
        query_labels=labels[queries[kept]],
        gallery_labels=labels[gallery],
        itself=itself,
    )
    sides = {} if itself else {"gallery": points[gallery], "gallery_labels": labels[gallery]}
    names = ["recall@1", "mmp@5", "map@5"]
    ours = evaluate_retrieval(points[queries[kept]], labels[queries[kept]], **sides, metrics=names)
    np.testing.assert_allclose([ours[name] for name in names], found["values"], atol=5.001e-4)
