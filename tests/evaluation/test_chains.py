"""Chains: rows of plain and of each step, their order, and what is refused."""

import numpy as np
import pytest

from tests.retrieval.references import unit
from tests.retrieval.test_reranking import made
from tfdml.embeddings.backends import Views
from tfdml.errors import UserError
from tfdml.evaluation import Sources, evaluate_retrieval, measure_chains, steps_of
from tfdml.retrieval import expand_queries, fit_whitening, k_reciprocal_neighbors

LABELS = np.arange(60) % 5
POINTS = unit(made(60, seed=6)).astype("float32")
TRAIN = made(80, seed=7)


def test_a_row_for_plain_and_one_for_each_step():
    chain = [("whitening", {"dim": 4, "power": 0.5}), ("query_expansion", {"k": 5})]
    seen = []
    sources = Sources(train=lambda views: seen.append(views) or TRAIN)
    rows = measure_chains(POINTS, LABELS, chains=[steps_of(chain), steps_of(chain[:1])], sources=sources, ks=[1])
    names = ["whitening(dim=4, power=0.5)", "query_expansion(k=5)"]
    assert [row["step"] for row in rows] == ["plain", *(" + ".join(names[:count]) for count in (1, 2))]
    assert seen[0] is None
    plain = evaluate_retrieval(POINTS, LABELS, ks=[1], metrics=["recall", "map@r"])
    assert rows[0]["metrics"] == {name: plain[name] for name in ("recall@1", "map@r")}
    assert rows[0]["gain"] == {"recall@1": 0, "map@r": 0}
    whitened = fit_whitening(TRAIN, 4, power=0.5)(POINTS)
    expanded = expand_queries(whitened, k=5)
    for row, queries in ((rows[1], whitened), (rows[2], expanded)):
        found = evaluate_retrieval(
            queries, LABELS, whitened, LABELS, ks=[1], metrics=["recall", "map@r"], own_rows=np.arange(60)
        )
        for name, value in row["metrics"].items():
            assert value == pytest.approx(found[name], abs=1e-12)
            assert row["gain"][name] == pytest.approx(found[name] - plain[name], abs=1e-12)
    assert all(row["seconds"] >= 0 for row in rows)


def test_queries_and_gallery_apart():
    steps = steps_of([("query_expansion", {"k": 4, "alpha": 0}), ("k_reciprocal", {"k1": 5, "k2": 2, "top": 25})])
    rows = measure_chains(POINTS[:20], LABELS[:20], POINTS[20:], LABELS[20:], chains=[steps], ks=[1, 2])
    found, _ = k_reciprocal_neighbors(
        expand_queries(POINTS[:20], POINTS[20:], k=4, alpha=0), POINTS[20:], k=1, k1=5, k2=2, top=25
    )
    hits = LABELS[20:][found[:, 0]] == LABELS[:20]
    assert rows[-1]["metrics"]["recall@1"] == pytest.approx(hits.mean())


def test_one_class_and_fewer_images_than_any_k():
    chains = [steps_of([(name, {})]) for name in ("query_expansion", "k_reciprocal")]
    sides = (POINTS[:3], np.zeros(3, int), POINTS[3:5], np.zeros(2, int))
    for row in measure_chains(*sides, chains=chains, metrics=["recall@2", "map@r"]):
        assert row["metrics"] == {"recall@2": 1, "map@r": 1}
    apart = measure_chains(POINTS[:2], np.zeros(2, int), POINTS[2:3], np.zeros(1, int), chains=chains, ks=[1])
    assert {row["metrics"]["recall@1"] for row in apart} == {1}


def test_embeddings_of_other_lengths_have_a_row_for_that():
    rows = measure_chains(POINTS * 3, LABELS, chains=[steps_of([("k_reciprocal", {})])], metrics=["recall@1"])
    assert [row["step"] for row in rows] == ["plain", "length 1", "k_reciprocal"]


def test_views_come_from_what_embeds():
    views = steps_of([("views", {"crops": 5}), ("whitening", {})])
    seen, mixed = [], np.random.default_rng(0).permutation(60)
    sources = Sources(
        train=lambda views: seen.append(views) or TRAIN, embed=lambda views: seen.append(views) or (POINTS[mixed], None)
    )
    rows = measure_chains(POINTS, LABELS, chains=[views], sources=sources)
    assert seen[0] == seen[1] == Views(crops=5)
    assert rows[1]["metrics"] != rows[0]["metrics"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([], "needs a step"),
        ([("qe", {})], "unknown step 'qe'; one of views, whitening"),
        ([("k_reciprocal", {"alpha": 1})], "k_reciprocal has no argument 'alpha'; it has k1, k2"),
        ([("query_expansion", {"k": 0})], "query_expansion: k must be a positive integer"),
        ([("query_expansion", {"alpha": "much"})], "query_expansion: alpha must be a number"),
        ([("k_reciprocal", {"weight": 2})], "k_reciprocal: weight must be at least 0 and at most 1"),
        ([("views", {"crops": 3})], "views: crops must be 1 or 5, not 3"),
        ([("whitening", {}), ("views", {})], "views embeds the images again: it must be the first step"),
        ([("k_reciprocal", {}), ("whitening", {})], "k_reciprocal must be the last step"),
    ],
)
def test_chains_that_cannot_be_are_refused(calls, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        steps_of(calls)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("calls", "options", "message"),
    [
        ([("whitening", {})], {}, "embed them too, `split='all'`"),
        ([("views", {})], {}, "views needs the images"),
        ([("query_expansion", {}), ("k_reciprocal", {})], {}, "cannot follow query_expansion all-to-all"),
        ([("k_reciprocal", {})], {"metrics": ["map"]}, "choose map@r or map@K"),
        ([("k_reciprocal", {})], {"ks": [60]}, "recall@60 needs 60"),
    ],
)
def test_what_a_step_lacks_is_said(calls, options, message):
    with pytest.raises(UserError, match=message):
        measure_chains(POINTS, LABELS, chains=[steps_of(calls)], **options)
