"""The table of metrics: what is added to it works wherever ours do."""

import numpy as np
import pytest

from tfdml import register
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval, retrieval_per_query
from tfdml.evaluation.metrics import METRICS, metric, metric_names

POINTS = np.random.default_rng(0).normal(size=(40, 4))
LABELS = np.arange(40) % 5


@pytest.fixture(autouse=True)
def table():
    before = set(METRICS)
    yield
    for name in set(METRICS) - before:
        del METRICS[name]


def test_metrics_of_a_user_are_measured_as_ours():
    @metric("hits@K", "neighbors", title="Hits@K")
    def hits(hits, matches):
        return hits.mean(axis=1)

    @metric("mine", "neighbors")
    def mine(hits, matches):
        return METRICS["map@r"].compute(hits, matches)

    @register("metric", name="near@K")
    def near(hits, matches):
        return hits.any(axis=1)

    metric("first", "ranking")(lambda ranks: 1 / ranks[0])
    metric("pure", "clusters")(METRICS["nmi"].compute)
    pairs = {
        "hits@3": "precision@3",
        "near@2": "recall@2",
        "mine": "map@r",
        "first": "mrr",
        "pure": "nmi",
    }
    found = evaluate_retrieval(
        POINTS, LABELS, metrics=[*pairs, *pairs.values()], intervals="classes"
    )
    assert all(found[name] == found[same] for name, same in pairs.items())
    assert found["intervals"]["hits@3"] == found["intervals"]["precision@3"]
    values = retrieval_per_query(POINTS, LABELS, metrics=["hits@3", "precision@3"])
    np.testing.assert_array_equal(values["hits@3"], values["precision@3"])


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: metric("map@r", "neighbors")(np.mean), "map@r"),
        (lambda: metric_names(["recal@1"]), "recal@1"),
        (lambda: metric_names(["recall"], ks=5), "ks"),
    ],
)
def test_names_that_are_none_are_refused(act, says):
    with pytest.raises(UserError, match=says):
        act()
