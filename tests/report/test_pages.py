"""Reports taken apart: what they show is what was measured, nothing is loaded, and names from
outside are text."""

import base64
import dataclasses
import io
import os
import re
import types

import numpy as np
import pytest
from matplotlib.lines import Line2D
from PIL import Image

import tfdml
from tests.report.pages import EVIL, check_page, embedded, made, rows_of
from tfdml.errors import UserError
from tfdml.evaluation import (
    accepted_rates,
    calibrate,
    evaluate_retrieval,
    identification,
    identification_rates,
)
from tfdml.report import Run, pages, write_report, write_run_report
from tfdml.report.figures import QUERIES, draw, lay_out
from tfdml.report.pages import drawn_classes, thresholds
from tfdml.report.runs import choose_examples, confusions, rank_queries
from tfdml.run_folder import RunFolder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    embeddings, labels = embedded()
    dataset = made(labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)})
    after = evaluate_retrieval(embeddings, labels)
    before = {**after, "recall@1": 0.1234}
    history = [
        {"epoch": e, "test": {"recall@1": v}, "train": {f"x{EVIL}": v, f"x{EVIL}_pos": 0.5}}
        for e, v in enumerate((0.31, 0.475, 0.42))
    ]
    intervals = {"recall@1": (0.25, 0.5)}
    result = {
        "metrics": after,
        "metrics_before": before,
        "metrics_features": {"recall@1": 0.2},
        "intervals": intervals,
        "selection": "the best epoch " + EVIL,
    }
    run = Run(
        f"Toys {EVIL}",
        result,
        [*history, {"epoch": 3, "test": {"loss": 1.0}}, {"epoch": 4}],
        flags={"note": EVIL, "rates": {"backbone": 1e-4}, EVIL: 1},
        environment={"tensorflow": "2.21.0"},
        watch={"alarms": [{"line": f"step 3 {EVIL}"}], "samples": []},
    )
    path = tmp_path_factory.mktemp("run") / "report" / "index.html"
    write_report(path, run, dataset, embeddings, interval_name="90% " + EVIL)
    text = path.read_text("utf-8")
    return {
        "path": path,
        "text": text,
        "page": check_page(text),
        "after": after,
        "data": (embeddings, labels),
    }


def part(report, name):
    """The elements of one section."""
    elements = report["page"].elements
    starts = [i for i, e in enumerate(elements) if e["tag"] == "section" and "id" in e] + [
        len(elements)
    ]
    (found,) = [i for i, start in enumerate(starts[:-1]) if elements[start]["id"] == name]
    return elements[starts[found] : starts[found + 1]]


def test_nothing_is_loaded_and_no_script_may_run(report):
    text = report["text"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text)
    (policy,) = [
        e["content"]
        for e in report["page"].all("meta")
        if "content" in e and "default-src" in e["content"]
    ]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert len(text) < 3 * 2**20


def test_table_holds_the_metrics_in_percent(report):
    rows = {row[0]: row[1:] for row in rows_of(report["text"], "Metrics of the embeddings")}
    recall = f"{100 * report['after']['recall@1']:.1f}"
    assert rows["Recall@1"] == [
        "20.0",
        "12.3",
        recall,
        "25.0 – 50.0",
        f"{float(recall) - 12.3:+.1f}",
    ]
    for key, name in (("map@r", "MAP@R"), ("nmi", "NMI"), ("recall@8", "Recall@8")):
        value = f"{100 * report['after'][key]:.1f}"
        assert rows[name] == ["–", value, value, "–", "+0.0"]
    assert f"{len(report['data'][1])} queries, each compared with 41 images." in report[
        "page"
    ].section("results")
    assert "90% " + EVIL in report["page"].section("results")
    (tiles,) = report["page"].all("dl", class_="tiles")
    assert f"{recall}%" in tiles["text"]
    assert "25.0 – 50.0" in tiles["text"]


def test_each_rate_at_the_threshold_has_a_row_of_three_numbers(tmp_path):
    embeddings, labels = embedded(classes=8)
    run = Run("toys", {"metrics": {}})
    write_report(tmp_path / "r.html", run, made(labels), embeddings, target={"fpir": 0.2})
    text = (tmp_path / "r.html").read_text("utf-8")
    rows = rows_of(text, "Rates at the threshold")
    images = ("expected", "these images")
    assert [row[0] for row in rows] == [
        f"{rate}, {of}" for rate in ("FPIR", "TPIR") for of in images
    ]
    assert {len(row) for row in rows} == {4}
    assert "Expected: on the images" in check_page(text).section("same-or-different")


def test_neighbors_have_their_pictures_distances_and_marks(report):
    """Gray value 5 i shows which image a thumbnail was made of."""
    embeddings, labels = report["data"]
    ranked = rank_queries(embeddings, labels)
    queries = [query for chosen in choose_examples(ranked, labels, 10).values() for query in chosen]
    items = [
        e
        for e in part(report, "retrieval")
        if e["tag"] == "li" and e.get("class") in ("hit", "miss")
    ]
    shown, hits = items[2:], ranked.hits[queries, :8].ravel()  # the first two are the key
    assert (
        [e["class"] == "hit" for e in shown]
        == ["✗" not in e["text"] for e in shown]
        == hits.tolist()
    )
    assert 0 < hits.sum() < len(hits)
    assert all(
        f"{d:.3f}" in e["text"]
        for d, e in zip(ranked.distances[queries].ravel(), shown, strict=True)
    )
    expected = [row for query in queries for row in (query, *ranked.rows[query])]
    for pair in confusions(ranked, labels, labels)[:12]:
        expected += [pair.query, pair.neighbor]
    values = []
    for image in (
        e for name in ("retrieval", "confusions") for e in part(report, name) if e["tag"] == "img"
    ):
        with Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1]))) as picture:
            assert picture.size == (30, 20)
            values.append(np.asarray(picture).mean() / 5)
    np.testing.assert_allclose(values, expected, atol=0.3)


def test_query_gallery_without_before_or_history(tmp_path):
    embeddings, labels = (
        np.concatenate(pair) for pair in zip(embedded(1), embedded(2), strict=True)
    )
    asked = np.random.default_rng(0).permutation(84) < 42
    sides = (embeddings[asked], labels[asked], embeddings[~asked], labels[~asked])
    after = evaluate_retrieval(*sides, metrics=["recall", "map@r"], intervals="queries")
    after["generalization"] = {"density": 1.5, "note": "text"}
    run, dataset = Run("Shop", {"metrics": after}), made(labels, "shop", is_query=asked)
    write_report(tmp_path / "r.html", run, dataset, embeddings, num_queries=4, distance="cosine")
    text = (tmp_path / "r.html").read_text("utf-8")
    page = check_page(text)
    assert len([e for e in page.all("img") if "Neighbor" in e["alt"]]) == 4 * 8
    # A name shows which image it is, of both roles. Pairs of images are of any.
    roles = {
        (e["alt"].split()[0], bool(asked[int(e["title"].split(".")[0])]))
        for e in page.all("img")
        if e["alt"]
    }
    assert roles == {("Query", True), ("Neighbor", False), ("Its", False)}
    assert "Before" not in page.section("results")
    assert rows_of(text, "Generalization to the unseen classes") == [["density", "1.5"]]
    # The intervals come with the metrics.
    low, high = after["intervals"]["map@r"].low, after["intervals"]["map@r"].high
    rows = {row[0]: row[1:] for row in rows_of(text, "Metrics of the embeddings")}
    assert rows["MAP@R"][1] == f"{100 * low:.1f} – {100 * high:.1f}"


def test_a_run_has_the_report_that_it_asks_for_once(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(pages, "read_run", lambda path: path.name)
    monkeypatch.setattr(
        pages, "write_report", lambda path, run, **more: written.append((run, more))
    )
    pictures = {split: types.SimpleNamespace(labels=split) for split in ("test", "validation")}

    def run(name, wanted=True, runs=()):
        ended = types.SimpleNamespace(
            experiment=types.SimpleNamespace(report=wanted),
            folder=RunFolder(tmp_path / name),
            splits=types.SimpleNamespace(**pictures),
            embeddings={"test": [1]},
            embed=lambda split: f"embedded {split}",
            runs=runs,
        )
        ended.folder.report.parent.mkdir(parents=True)
        return ended

    write_run_report(run("both", runs=[run("one"), run("other", wanted=False)]))
    (one, options), (both, plain) = written
    assert (one, both, [*plain]) == ("one", "both", ["interval_name"])
    assert (options["dataset"], options["embeddings"]) == (pictures["test"], {"test": [1]})
    assert options["held_out"] == ("embedded validation", "validation")
    old = run("old")
    old.folder.report.touch()
    write_run_report(old)
    assert len(written) == 2


def test_a_page_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path, run = tmp_path / "index.html", Run("t", {"metrics": {"recall@1": 0.5}})
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match="disk full"):
        write_report(path, dataclasses.replace(run, seeds=[run]))
    embeddings, labels = embedded()
    with pytest.raises(UserError, match="41 embeddings for the 42 images of toys"):
        write_report(path, run, made(labels), embeddings[:41])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["index.html"]


def test_data_of_which_little_can_be_measured_gives_a_page(tmp_path):
    for embeddings, labels in (
        (np.eye(5), np.arange(5)),
        (np.ones((1, 3)), np.zeros(1, int)),
        (np.ones((9, 3)), np.arange(9) // 3),
        (np.random.default_rng(0).normal(size=(12, 1)), np.zeros(12, int)),
        (np.zeros((8, 2)), np.arange(8) // 2),
    ):
        write_report(
            tmp_path / "r.html",
            Run("t", {"metrics": {}}),
            made(labels),
            embeddings,
            distance="cosine",
        )
        page = check_page((tmp_path / "r.html").read_text("utf-8"))
        assert "nan" not in page.all("main")[0]["text"].lower()


def test_several_seeds_have_means_and_a_row_each(tmp_path):
    result = {
        "metrics": {"recall@1": 0.5},
        "metrics_before": {"recall@1": 0.25},
        "intervals": {"recall@1": (0.4, 0.6)},
    }
    history = [{"epoch": e, "test": {"recall@1": 0.25 * e}} for e in range(3)]
    seeds = [
        Run(f"seed {seed}", {"metrics": {"recall@1": 0.4 + 0.2 * seed}}, history)
        for seed in range(2)
    ]
    run = Run(
        f"Toys {EVIL}",
        {**result, "intervals_runs": {"recall@1": [0.5, 0.1, 0.9, 0.2]}},
        seeds=seeds,
    )
    write_report(tmp_path / "r.html", run)
    text = (tmp_path / "r.html").read_text("utf-8")
    check_page(text)
    assert rows_of(text, "Metrics of the embeddings") == [
        ["Recall@1", "25.0", "50.0", "40.0 – 60.0", "10.0 – 90.0", "+25.0"]
    ]
    assert [row[0::2] for row in rows_of(text, "Metrics of each seed")] == [
        ["seed 0", "40.0"],
        ["seed 1", "60.0"],
    ]


def test_a_threshold_of_held_out_classes_on_the_test_images():
    embeddings, labels = embedded()
    held_out = embedded(3, classes=9)
    values = thresholds(embeddings, made(labels), "cosine", held_out, {"fpir": 0.05})
    calibration = calibrate(*held_out, fpir=0.05, distance="cosine")
    assert values["threshold"] == values["calibration"].threshold == calibration.threshold
    searches = identification(embeddings, labels, distance="cosine")
    assert values["searches"].points == searches.points
    assert searches.points[0.1][1]["fpir"].mean <= 0.1
    # Of searches alone, as the threshold is: no rate of pairs.
    assert "measured" not in values
    assert "TPIR" in values["curve"]
    assert "known queries" in values["histogram"]
    assert values["rates"] == identification_rates(
        embeddings, labels, calibration.threshold, distance="cosine"
    )
    # By hand: the tenth of the classes of which most, or fewest, are within it.
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    far = 1 - units @ units.T
    np.fill_diagonal(far, np.inf)
    same = labels[:, None] == labels
    nearest = np.where(same, np.inf, far).min(axis=1)
    hits = {
        "fpir": nearest <= values["threshold"],
        "tpir": (far.min(axis=1) <= values["threshold"]) & (far.min(axis=1) < nearest),
    }
    for name, hit in hits.items():
        rates = np.sort([hit[labels == label].mean() for label in np.unique(labels)])
        number = -(-len(rates) // 10)
        expected = (rates[-number:] if name == "fpir" else rates[:number]).mean()
        assert values["worst"][name] == pytest.approx(expected)
        assert searches.points[0.1][2].keys() == values["worst"].keys()
    assert not values["halved"]
    assert f'threshold {calibration.threshold:.3g}"' in values["histogram"]
    for name in (*QUERIES[:2], f"threshold {calibration.threshold:.3g}"):
        assert f">{name}</text>" in values["histogram"]  # in the legend


def test_without_held_out_classes_half_of_them_calibrate():
    embeddings, labels = embedded(classes=8)
    values = thresholds(embeddings, made(labels), "euclidean", target={"precision": 0.5})
    half = np.isin(labels, drawn_classes(labels)[::2])
    calibration = calibrate(embeddings[half], labels[half], precision=0.5, distance="euclidean")
    rates = accepted_rates(
        embeddings[~half], labels[~half], calibration.threshold, distance="euclidean"
    )
    assert values["halved"]
    assert values["threshold"] == calibration.threshold
    assert values["rates"]["precision"] == rates.precision
    assert values["worst"] == rates.worst


def test_a_figure_fills_its_view_box():
    def diagonal(figure):
        figure.add_artist(Line2D([0, 1], [0, 1]))

    drawn = draw(diagonal, "a diagonal", (300, 100))
    assert 'viewBox="0 0 300 100"' in drawn
    assert re.search(r"M 0 100\s+L 300 0\b", drawn)


def test_the_map_keeps_groups_together_and_is_repeatable():
    embeddings, labels = embedded(1, classes=4, per_class=30, spread=0.05)
    places = lay_out(embeddings)
    assert places.shape == (120, 2)
    np.testing.assert_array_equal(places, lay_out(embeddings))
    assert rank_queries(places, labels).hits[:, :8].all()
    assert lay_out(np.ones((40, 3))) is None
    assert lay_out(np.eye(4)) is None
    assert np.isfinite(lay_out(np.random.default_rng(0).normal(size=(9, 1)))).all()


def test_a_notebook_map_has_every_image_and_names_the_frequent_classes():
    embeddings, labels = embedded(0, classes=10, per_class=5)
    x, y = np.concatenate([embeddings, embeddings[:5] + 0.01]), np.concatenate([labels, labels[:5]])
    figure = tfdml.report.map(x, y, class_names={0: "zero"})
    drawn = figure.axes[0].lines
    assert [len(points.get_xdata()) for points in drawn] == [10, 10, *[5] * 7]
    assert drawn[1].get_label() == "zero"
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="one class id"):
        tfdml.report.map(x, y[:5])
