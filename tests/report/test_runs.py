import pytest

from tfdml.report.rendering import render
from tfdml.report.runs import Run

ORDERS = {
    "1": {"recall@1": 0.581, "recall@2": 0.7, "num_queries": 9},
    "2": {"recall@1": 0.559, "recall@2": 0.677},
    "all": {"recall@1": 0.594, "recall@2": 0.71},
}


def test_figures_of_a_run():
    result = {"metrics": {"recall@1": 0.5, "note": "text", "intervals": {"recall@1": [0.5, 0.4, 0.6, 0.05]}}}
    run = Run("r", result, [{"epoch": 0, "test": {"recall@1": 0.25}, "train": {"loss": 1.0}}, {"epoch": 1}])
    assert run.metrics == {"recall@1": 0.5}
    assert run.before is None
    assert run.intervals == {"recall@1": (0.4, 0.6)}
    assert run.measured == [{"epoch": 0, "recall@1": 0.25}, {"epoch": 1}]
    beside = Run("r", {**result, "intervals": {"nmi": (0.1, 0.2)}, "metrics_before": {"nmi": 0, "note": "text"}})
    assert beside.before == {"nmi": 0}
    assert beside.intervals == {"nmi": (0.1, 0.2)}


def test_orders_have_a_row_each_and_a_column_per_k():
    html = render("results.html", run=Run("r", {"metrics": {}, "metrics_orders": ORDERS}), interval_name="")
    for text in ("1, the embedding", "order 2", "all, side by side", "Recall@1", "Recall@2", "58.1", "67.7", "59.4"):
        assert text in html
    assert "num_queries" not in html
    assert "Each order" not in render("results.html", run=Run("r", {"metrics": {"recall@1": 0.5}}), interval_name="")


def test_histories_are_those_of_the_orders_beyond_the_embedding():
    history = [
        {"epoch": 0, "test": {"recall@1": 0.4}, "orders": ORDERS},
        {"epoch": 1},
        {"epoch": 2, "test": {"recall@1": 0.5}, "orders": {**ORDERS, "2": {"recall@1": 0.6}}},
    ]
    found = Run("r", {"metrics": {}}, history).histories
    assert list(found) == ["this run", "order 2", "all, side by side"]
    assert found["this run"] == [{"epoch": 0, "recall@1": 0.4}, {"epoch": 1}, {"epoch": 2, "recall@1": 0.5}]
    assert [(entry["epoch"], entry["recall@1"]) for entry in found["order 2"]] == [(0, 0.559), (2, 0.6)]


def test_seen_classes_are_a_history_of_their_own():
    history = [{"epoch": 0, "test": {"recall@1": 0.4}, "seen": {"recall@1": 0.5}}, {"epoch": 1}]
    found = Run("r", {"metrics": {}}, history).histories
    assert found == {
        "unseen classes": [{"epoch": 0, "recall@1": 0.4}, {"epoch": 1}],
        "seen classes": [{"epoch": 0, "recall@1": 0.5}],
    }


@pytest.mark.parametrize(
    "result", [{"metrics": {"generalization": {"a": 1, "b": "x"}}}, {"metrics": {}, "generalization": {"a": 1}}]
)
def test_measures_of_generalization_are_among_the_metrics_or_beside_them(result):
    assert Run("r", result).generalization == {"a": 1}
