import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.pages import Page
from tfdml.evaluation.generalisation import overlap_coefficient
from tfdml.report.axes import WIDTH, Axes, log_ticks, ticks
from tfdml.report.curves import recall_curves, training_curves
from tfdml.report.figures import (
    STYLES,
    Series,
    distance_histogram,
    histogram_html,
    legend,
    line_chart,
    marker,
    pair_counts,
)
from tfdml.report.metric_text import (
    metric_change,
    metric_name,
    metric_order,
    metric_value,
    numbers,
    plain_intervals,
)


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(31.2, 47.9) == [35.0, 40.0, 45.0]
    assert ticks(2, 2) == [2]
    assert log_ticks(1, 1000) == [1, 10, 100, 1000]
    assert log_ticks(1, 41) == [1, 2, 5, 10, 20]
    assert log_ticks(1, 1) == [1]


def test_logarithmic_axis_has_equal_ratios_equally_far_apart():
    axes = Axes((1, 1000), (0, 1), log_x=True)
    places = [axes.x(k) for k in (1, 10, 100, 1000)]
    np.testing.assert_allclose(np.diff(places), np.diff(places)[0], atol=0.11)


def test_figures_of_degenerate_data_are_finite():
    one = [Series("a", [(3, 50.0)])]
    for svg in (
        line_chart(one, name="n", x_label="epoch", y_label="y"),
        line_chart(one, name="n", x_label="K", y_label="y", log_x=True),
        line_chart([Series("a", [(1, 0.0), (2, 0.0)])], name="n", x_label="epoch", y_label="y"),
        line_chart([Series("a", [(1, 100.0), (2, 100.0)])], name="n", x_label="epoch", y_label="y"),
        distance_histogram(np.zeros(4), np.zeros(4), name="n", x_label="x"),
        distance_histogram(-np.ones(4), -np.ones(2), name="n", x_label="x"),
    ):
        Page(svg)
        assert "nan" not in svg
        assert "inf" not in svg
        places = [float(x) for x in re.findall(r' (?:x|x1|cx)="([-\d.]+)"', svg)]
        assert max(places) <= WIDTH
        assert min(places) >= 0


def test_curves_differ_without_colour():
    series = [Series(f"run {i}", [(0, i), (1, 2 * i)], i) for i in range(STYLES)]
    assert len({re.sub(r"[\d.]+ [\d.]+", "", marker(i, 100, 100), count=1) for i in range(STYLES)}) == STYLES
    key = Page(legend(series))
    assert [e["text"] for e in key.all("li")] == [f"run {i}" for i in range(STYLES)]
    chart = line_chart(series, name="n", x_label="epoch", y_label="y")
    assert all(f'"curve s{i}"' in chart for i in range(STYLES))
    label = Page(chart).all("svg")[0]["aria-label"]
    assert all(f"run {i}: {i}.0 at epoch 0" in label for i in range(STYLES))


def test_curves_skip_what_is_missing():
    history = [{"epoch": 0, "recall@1": 0.1}, {"epoch": 1}, {"epoch": 2, "recall@1": None}, {"recall@1": 0.4}]
    history += [{"epoch": 3, "recall@1": float("nan")}, {"epoch": 4, "recall@1": 0.2}]
    page = Page(training_curves({"a": history, "b": []}, "recall@1"))
    assert [e["text"] for e in page.all("th", scope="row")] == ["0", "4"]
    assert "Nothing was measured" in training_curves({"a": []}, "recall@1")
    assert "No query has an image" in recall_curves({"a": np.zeros(0)})


def test_recall_curves_of_different_depths():
    text = recall_curves(
        {"short": np.array([0.5, 1.0]), "long": np.linspace(0.1, 1, 10)}, {"before": {"recall@8": 0.25}}
    )
    cells = Page(text).all("td")
    heads = [e["text"] for e in Page(text).all("th", scope="row")]
    assert heads == ["1", "2", "4", "8", "10"]
    table = np.array([e["text"] for e in cells]).reshape(5, 3)
    assert table[:, 0].tolist() == ["50.0", "100.0", "–", "–", "–"]
    assert table[:, 1].tolist() == ["10.0", "20.0", "40.0", "80.0", "100.0"]
    assert table[:, 2].tolist() == ["–", "–", "–", "25.0", "–"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
)
def test_every_pair_is_in_the_bin_of_its_distance(positive, negative):
    positive, negative = np.array(positive, np.float32), np.array(negative, np.float32)
    edges, counts = pair_counts(positive, negative, bins=60)
    assert edges[0] == 0  # however far the nearest pair is
    overlap = sum(min((positive == v).mean(), (negative == v).mean()) for v in range(7))
    assert overlap_coefficient(*counts) == pytest.approx(overlap, abs=1e-9)
    for distances, count in zip((positive, negative), counts, strict=True):
        for low, high, n in zip(edges[:-1], edges[1:], count, strict=True):
            inside = (distances >= low) & ((distances < high) | (high == edges[-1]))
            assert n == inside.sum()


def test_figures_of_equal_and_of_separate_distances():
    x = np.random.default_rng(0).random(1000)
    said = [[b["text"] for b in Page(histogram_html(x, y, "cosine")).all("b")] for y in (x, x + 2)]
    assert said == [["100.0%", "50.0%"], ["0.0%", "100.0%"]]
    assert "not both pairs" in histogram_html(x, x[:0], "cosine")


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
    from tfdml.evaluation.intervals import Interval

    metrics = {"recall@1": 0.5, "intervals": {"recall@1": Interval(0.5, 0.4, 0.6, 0.05)}}
    assert plain_intervals(None, metrics) == {"recall@1": (0.4, 0.6)}
    assert plain_intervals({"nmi": [0.1, 0.2]}, metrics) == {"nmi": (0.1, 0.2)}
    assert plain_intervals(None, {"recall@1": 0.5}) == {}
    assert numbers(metrics) == {"recall@1": 0.5}
