"""Figures of a run's records: what is drawn, where, and that it says the numbers."""

import re

import numpy as np
import pytest

from tests.report.pages import EVIL, Page, check_page, embedded, made, rows_of
from tfdml.evaluation import evaluate_retrieval
from tfdml.report import Run, write_report
from tfdml.report.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from tfdml.report.paper_figures import objectives_html, statistics_html

RECORDS = [
    {"epoch": 0, "generalisation": {"lambda": 1.7, "h_divergence": 0.6, "seen_d_avg_mean": 0.4}},
    {
        "epoch": 1,
        "train": {
            "loss": 1.0,
            "density": 0.1,
            "density_d_avg": 0.42,
            "density_target": 0.5,
            "ecaml": 2.0,
            "ecaml_energy": 1.25,
            "rank_mi": 0.1,
            "rank_mi_jsd": 0.2,
            "rank_mi_beta": 0.9,
        },
    },
    {
        "epoch": 2,
        "train": {
            "density": 0.1,
            "density_d_avg": 0.36,
            "density_target": 0.52,
            "ecaml_energy": 1.5,
            "rank_mi_jsd": 0.3,
            "rank_mi_beta": 0.8,
        },
        "generalisation": {"lambda": 1.2, "h_divergence": 0.7, "seen_d_avg_mean": 0.3, "unseen_d_avg_mean": 0.5},
    },
]
DISTANCES = np.linspace(0, 2, 21)
STATISTICS = {
    "objective": "rank_mi",
    "epoch": 2,
    "margin": 0.2,
    "beta": 0.8,
    "has_root": True,
    "distances": DISTANCES.tolist(),
    "v": (3 * (0.8 - DISTANCES)).tolist(),
    "positive_loss": (np.logaddexp(0, 3 * (DISTANCES - 0.8)) - np.log(2)).tolist(),
    "negative_loss": (np.logaddexp(0, 3 * (0.8 - DISTANCES)) - np.log(2)).tolist(),
    "pairs": {
        "test": {
            "edges": [0.0, 0.5, 1.0, 2.0],
            "positive": [6, 2, 0],
            "negative": [0, 10, 30],
            "mean_positive": 0.41,
            "mean_negative": 1.3,
            "statistics_loss": -0.5,
            "jsd": 0.25,
            "embedder_loss": 0.125,
        }
    },
}


def test_every_figure_has_its_numbers_as_a_table():
    body = str(objectives_html(RECORDS))
    page = Page(body)
    assert [e["text"] for e in page.all("h3")] == [
        "Density of the classes in training batches density",
        "Energy between classes in training batches ecaml",
        "Divergence of d⁺ and d⁻ in training batches rank_mi",
        "Where V is zero rank_mi",
        "λ and the H-divergence",
        "Density of the classes, all images",
    ]
    assert len(page.all("svg", role="img")) == 6
    assert rows_of(body, "Density of the classes in training batches, density, per epoch") == [
        ["1", "0.42", "0.5"],
        ["2", "0.36", "0.52"],
    ]
    assert rows_of(body, "Energy between classes in training batches, ecaml, per epoch") == [
        ["1", "1.25"],
        ["2", "1.5"],
    ]
    assert rows_of(body, "λ and the H-divergence per epoch") == [["0", "1.7", "0.6"], ["2", "1.2", "0.7"]]
    assert rows_of(body, "Density of the classes, all images per epoch") == [["0", "–", "0.4"], ["2", "0.5", "0.3"]]
    places = [float(x) for x in re.findall(r' (?:x|x1|cx)="([-\d.]+)"', body)]
    assert min(places) >= 0
    assert max(places) <= WIDTH


def test_what_a_run_has_not_is_not_drawn():
    assert objectives_html([]) == statistics_html({}) == ""
    plain = [{"epoch": 0}, {"epoch": 1, "train": {"loss": 1.0, "my_energy_d_avg": 2.0, "d_pos": 0.1}}]
    assert objectives_html(plain) == ""
    text = objectives_html([{"epoch": 0, "generalisation": {"unseen_d_avg_mean": 0.5}}])
    assert [e["text"] for e in Page(text).all("h3")] == ["Density of the classes, all images"]


def test_a_name_of_an_objective_is_no_markup():
    records = [{"epoch": 1, "train": {EVIL: 0.5, f"{EVIL}_energy": 1.0}}]
    page = Page(objectives_html(records))
    assert page.all("h3")[0]["text"] == f"Energy between classes in training batches {EVIL}"
    assert f"training batches, {EVIL}, per epoch" in page.all("svg", role="img")[0]["aria-label"]
    assert not page.all("script")


def test_losses_cross_and_histograms_stand_over_the_same_distances():
    page = Page(statistics_html(STATISTICS))
    losses, histogram = page.all("svg", role="img")
    assert "cost the same at 0.8" in losses["aria-label"]
    assert "mean d⁺ 0.41, mean d⁻ 1.3, β 0.8" in histogram["aria-label"]
    # β stands at 0.8 of 0 .. 2, in both.
    across = WIDTH - LEFT - RIGHT
    at = LEFT + 0.4 * across
    assert [float(line["x1"]) for line in page.all("line", class_="axis mean")] == pytest.approx([at, at], abs=0.06)
    thin = [float(e["x1"]) for e in page.all("line", class_="axis") if float(e["y1"]) == TOP]
    assert thin == pytest.approx([LEFT + 0.3 * across, LEFT + 0.5 * across], abs=0.06)
    # The curves cross there: 0.8 is a point of both.
    places = [
        [tuple(map(float, point.split(","))) for point in e["points"].split()]
        for e in page.all("polyline")
        if e["class"].startswith("curve")
    ]
    heights = [dict(curve)[round(at, 1)] for curve in places]
    assert heights[0] == heights[1]
    # The negatives' densities: 0, 10 / 40 in half a unit, 30 / 40 in one.
    (negative,) = page.all("polygon", class_="negative")
    corners = [tuple(map(float, point.split(","))) for point in negative["points"].split()]
    assert [x for x, _ in corners[::2]] == pytest.approx([LEFT + e * across / 2 for e in (0, 0.5, 1, 2)], abs=0.06)
    bottom = HEIGHT - BOTTOM
    heights = [bottom - y for _, y in corners[1::2]]
    # The highest bar is the positives': 6 / 8 in half a unit, 1.5, at 1 / 1.12 of the height.
    unit = (bottom - TOP) / (1.12 * 1.5)
    assert heights == pytest.approx([0, 0.5 * unit, 0.75 * unit, 0], abs=0.06)
    text = "".join(e["text"] for e in page.all("p"))
    assert "0.250 nats" in text
    assert "within the margins: 0.125" in text
    assert "no root" not in text
    assert "V had no root in the end" in statistics_html({**STATISTICS, "has_root": False})


def test_they_are_on_the_page_of_a_run(tmp_path):
    embeddings, labels = embedded()
    after = evaluate_retrieval(embeddings, labels)
    metrics = [
        {"test": {"recall@1": 0.2}, "seen": {"recall@1": 0.25}},
        {"test": {"recall@1": 0.3}},
        {"test": {"recall@1": 0.4}, "seen": {"recall@1": 0.75}},
    ]
    history = [{**record, **measured} for record, measured in zip(RECORDS, metrics, strict=True)]
    path = tmp_path / "index.html"
    write_report(path, Run("t", {"metrics": after}, history, statistics=STATISTICS), made(labels), embeddings)
    text = path.read_text("utf-8")
    page = check_page(text)
    assert rows_of(text, "Recall@1 per epoch, in percent") == [
        ["0", "20.0", "25.0"],
        ["1", "30.0", "–"],
        ["2", "40.0", "75.0"],
    ]
    assert {"#objectives", "#statistics"} <= {e["href"] for e in page.all("a")}
    assert "What the objectives did" in page.section("objectives")
    assert "seen classes" in page.section("training")
