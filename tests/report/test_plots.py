"""Figures: what is drawn, that it shows the numbers, and that it can be read without color and without seeing."""

import re

import numpy as np
import pytest

from tests.report.pages import EVIL, Page, check_page, embedded, made, rows_of
from tfdml.evaluation import evaluate_retrieval
from tfdml.evaluation.verification import PairHistogram
from tfdml.report import Run, write_report
from tfdml.report.plots import (
    curves_html,
    histogram_html,
    objectives_html,
    recall_curves,
    training_curves,
    watched_html,
)

RECORDS = [
    {"epoch": 0, "generalization": {"lambda": 1.7, "h_divergence": 0.6, "seen_d_avg_mean": 0.4}},
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
        "generalization": {"lambda": 1.2, "h_divergence": 0.7, "seen_d_avg_mean": 0.3, "unseen_d_avg_mean": 0.5},
    },
]


def counted(positive, negative):
    """Histograms of given distances."""
    both = np.concatenate([positive, negative])
    edges = np.linspace(both.min(), both.max() + 1e-9, 4801)
    counts = [np.histogram(distances, edges)[0] for distances in (positive, negative)]
    return PairHistogram(edges, *counts, float(np.mean(positive)), float(np.mean(negative)))


def test_figures_of_degenerate_data_are_finite():
    for figure in (
        curves_html("n", {"a": {3: 50.0}}, "epoch", "y"),
        curves_html("n", {"a": {3: 50.0}}, "K", "y", log_x=True, percent=True, best=True),
        curves_html("n", {"a": {1: 0.0, 2: 0.0}}, "epoch", "y", percent=True),
        curves_html("n", {"a": {1: 100.0, 2: 100.0}}, "epoch", "y", percent=True),
        histogram_html(counted(np.zeros(4), np.zeros(4)), "cosine"),
        histogram_html(counted(-np.ones(4), -np.ones(2)), "dot", threshold=-1.0),
    ):
        assert Page(figure).all("svg", role="img")
        assert "nan" not in figure
        assert "inf" not in figure
        places = [float(x) for x in re.findall(r' x="([-\d.]+)"', figure)]
        assert max(places) <= 480
        assert min(places) >= 0


def test_colors_are_those_of_the_style_sheet_and_ids_are_unique():
    x = np.random.default_rng(0).random(50)
    figures = curves_html("a", {"x": {0: 1, 1: 2}, EVIL: {0: 2, 1: 1}}, "epoch", "y")
    figures += curves_html("b", {"x": {0: 1, 1: 2}, EVIL: {0: 2, 1: 1}}, "epoch", "y")
    figures += histogram_html(counted(x, x + 1), "cosine", "one")
    figures += histogram_html(counted(x, x + 1), "cosine", "two")
    page = Page(figures)
    assert not re.search(r": #[0-9a-f]{6}", figures)
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r"(?:href=\"|url\()#(\w+)", figures)) <= set(ids)
    # A name is text in the key, where the end of a long one is left out, and in the table.
    assert [e["text"] for e in page.all("text") if "script" in e["text"]] == [EVIL[:49] + "…"] * 2
    assert [e["text"] for e in page.all("th") if "script" in e["text"]] == [EVIL] * 2
    assert "<script>" not in figures


def test_curves_skip_what_is_missing():
    history = [{"epoch": 0, "recall@1": 0.1}, {"epoch": 1}, {"epoch": 2, "recall@1": None}, {"recall@1": 0.4}]
    history += [{"epoch": 3, "recall@1": float("nan")}, {"epoch": 4, "recall@1": 0.2}]
    page = Page(training_curves({"a": history, "b": []}))
    assert [e["text"] for e in page.all("th", scope="row")] == ["0", "4"]
    assert "Nothing was measured" in training_curves({"a": []})
    assert "No query has an image" in recall_curves({"a": np.zeros(0)})


def test_recall_curves_of_different_depths():
    text = recall_curves({"short": np.array([0.5, 1.0]), "long": np.linspace(0.1, 1, 10)}, {"recall@8": 0.25})
    cells = Page(text).all("td")
    heads = [e["text"] for e in Page(text).all("th", scope="row")]
    assert heads == ["1", "2", "4", "8", "10"]
    table = np.array([e["text"] for e in cells]).reshape(5, 3)
    assert table[:, 0].tolist() == ["50.0", "100.0", "–", "–", "–"]
    assert table[:, 1].tolist() == ["10.0", "20.0", "40.0", "80.0", "100.0"]
    assert table[:, 2].tolist() == ["–", "–", "–", "25.0", "–"]


def test_figures_of_equal_and_of_separate_distances():
    x = np.random.default_rng(0).random(1000)
    said = [[b["text"] for b in Page(histogram_html(counted(x, y), "cosine", "run")).all("b")] for y in (x, x + 2)]
    assert said == [["100.0%", "50.0%"], ["0.0%", "100.0%"]]
    assert "not both pairs" in histogram_html(None, "cosine")


def test_every_figure_has_its_numbers_as_a_table():
    body = str(objectives_html(RECORDS))
    page = Page(body)
    assert [e["text"] for e in page.all("h3")] == [
        "Values of the objectives",
        "density_d_avg",
        "density_target",
        "ecaml_energy",
        "rank_mi_jsd",
        "rank_mi_beta",
        "λ and the H-divergence",
        "Density of the classes, all images",
    ]
    assert len(page.all("svg", role="img")) == 8
    assert rows_of(body, "density_d_avg per epoch") == [["1", "0.42"], ["2", "0.36"]]
    assert rows_of(body, "ecaml_energy per epoch") == [["1", "1.25"], ["2", "1.5"]]
    assert rows_of(body, "λ and the H-divergence per epoch") == [["0", "1.7", "0.6"], ["2", "1.2", "0.7"]]
    assert rows_of(body, "Density of the classes, all images per epoch") == [["0", "–", "0.4"], ["2", "0.5", "0.3"]]


def test_what_a_run_has_not_is_not_drawn():
    assert objectives_html([]) == ""
    plain = [{"epoch": 0}, {"epoch": 1, "train": {"loss": 1.0, "my_energy_d_avg": 2.0, "d_pos": 0.1}}]
    assert [e["text"] for e in Page(str(objectives_html(plain))).all("h3")] == ["Values of the objectives"]
    assert "d_pos" not in objectives_html(plain)
    text = objectives_html([{"epoch": 0, "generalization": {"unseen_d_avg_mean": 0.5}}])
    assert [e["text"] for e in Page(text).all("h3")] == ["Density of the classes, all images"]


@pytest.mark.slow
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
    write_report(path, Run("t", {"metrics": after}, history), made(labels), embeddings)
    text = path.read_text("utf-8")
    page = check_page(text)
    assert rows_of(text, "Recall@1 per epoch, in percent") == [
        ["0", "20.0", "25.0"],
        ["1", "30.0", "–"],
        ["2", "40.0", "75.0"],
    ]
    assert "#objectives" in {e["href"] for e in page.all("a")}
    assert "What the objectives did" in page.section("objectives")
    assert "seen classes" in page.section("training")


def test_alarms_and_samples_of_a_watched_run():
    sample = {
        "step": 2,
        "gradient_norm": {"backbone": 0.5, "projection": 0.25},
        "gradient_share": {"am_softmax": 0.75, "jrs": 0.25},
        "effective_rank": 7.5,
        "participation_ratio": 3.5,
        "variance": 0.125,
    }
    watch = {"samples": [sample, {**sample, "step": 4, "variance": 0.25}], "alarms": []}
    text = str(watched_html(watch))
    assert "No alarm in 2 sampled batches." in text
    assert [e["text"] for e in Page(text).all("h3")] == [
        "Directions of a batch of embeddings",
        "Variance of a batch of embeddings",
        "Gradient norms",
        "Terms of the embedder's gradient",
    ]
    assert rows_of(text, "Variance of a batch of embeddings per step") == [["2", "0.125"], ["4", "0.25"]]
    text = watched_html({**watch, "alarms": [{"line": "collapse at step 4: <b>"}]})
    assert "<li>collapse at step 4: &lt;b&gt;</li>" in text
