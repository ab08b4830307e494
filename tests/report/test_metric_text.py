from tfdml.evaluation.intervals import Interval
from tfdml.report.metric_text import (
    metric_change,
    metric_name,
    metric_order,
    metric_value,
    numbers,
    plain_intervals,
)


def test_metrics_in_print():
    assert [metric_name(k) for k in ("recall@10", "precision@1", "map@10", "map@r", "map", "density")] == [
        *("Recall@10", "Precision@1", "MAP@10", "MAP@R", "mAP", "density")
    ]
    assert metric_order(["f1", "x", "recall@8", "num_queries", "recall@10", "map@r"]) == [
        *("recall@8", "recall@10", "map@r", "f1", "x")
    ]
    assert metric_value("recall@1", None) == "–"
    assert [metric_value("ami", value) for value in (-0.0003, -0.012, 0.0)] == ["0.0", "−1.2", "0.0"]
    assert metric_value("lambda", -2.5) == "−2.5"
    # As the printed values differ: 57.4 and 57.5, though the difference is 0.02.
    assert metric_change("recall@1", 0.57449, 0.57451) == "+0.1"
    assert metric_change("recall@1", 0.57451, 0.57449) == "−0.1"
    assert metric_change("recall@1", 0.5744, 0.5741) == "+0.0"
    assert metric_change("recall@1", None, 0.5) == "–"
    assert metric_change("density", 1.0, 0.5) == "−0.5"


def test_intervals_come_in_three_forms():
    metrics = {"recall@1": 0.5, "intervals": {"recall@1": Interval(0.5, 0.4, 0.6, 0.05)}}
    assert plain_intervals(None, metrics) == {"recall@1": (0.4, 0.6)}
    assert plain_intervals({"nmi": [0.1, 0.2]}, metrics) == {"nmi": (0.1, 0.2)}
    assert plain_intervals(None, {"recall@1": 0.5}) == {}
    assert numbers(metrics) == {"recall@1": 0.5}
