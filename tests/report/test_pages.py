import base64
import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests.report.pages import EVIL, Page, check_page, embedded, made, pictures_read, rows_of
from tfdml.errors import UserError
from tfdml.evaluation import (
    Interval,
    QueryValues,
    accepted_rates,
    calibrate,
    evaluate_retrieval,
    identification_rates,
    recall_by_size,
    verification,
)
from tfdml.report import Run, pages, write_comparison, write_report
from tfdml.report.pages import Paired, drawn_classes, sampled_images, verification_html
from tfdml.report.queries import choose_examples, confusions, rank_queries
from tfdml.report.runs import read_run, read_runs


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    embeddings, labels = embedded()
    dataset = made(labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)})
    after = evaluate_retrieval(embeddings, labels)
    before = {**after, "recall@1": 0.1234}
    history = [{"epoch": e, "test": {"recall@1": v}} for e, v in enumerate((0.31, 0.475, 0.42))]
    run = Run(
        f"Toys {EVIL}",
        {
            "metrics": after,
            "metrics_before": before,
            "intervals": {"recall@1": (0.25, 0.5)},
            "selection": "the best epoch on held-out classes " + EVIL,
        },
        [*history, {"epoch": 3, "test": {"loss": 1.0}}, {"epoch": 4}],
        flags={"note": EVIL, "rates": {"backbone": 1e-4}, EVIL: 1},
        environment={"tensorflow": "2.21.0"},
    )
    path = tmp_path_factory.mktemp("run") / "report" / "index.html"
    write_report(path, run, dataset, embeddings, interval_name="90% " + EVIL)
    text = path.read_text("utf-8")
    return {"path": path, "text": text, "page": check_page(text), "after": after, "data": (embeddings, labels)}


def part(report, name):
    """The elements of one section."""
    elements = report["page"].elements
    starts = [i for i, e in enumerate(elements) if e["tag"] == "section" and "id" in e] + [len(elements)]
    (found,) = [i for i, start in enumerate(starts[:-1]) if elements[start]["id"] == name]
    return elements[starts[found] : starts[found + 1]]


def test_nothing_is_loaded_and_only_its_own_script_may_run(report):
    text = report["text"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    (policy,) = [e["content"] for e in report["page"].all("meta") if "content" in e and "default-src" in e["content"]]
    assert policy.startswith("default-src 'none';")
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert len(text) < 3 * 2**20


def test_table_holds_the_metrics_in_percent(report):
    rows = {row[0]: row[1:] for row in rows_of(report["text"], "Metrics of the embeddings")}
    recall = f"{100 * report['after']['recall@1']:.1f}"
    assert rows["Recall@1"] == ["12.3", recall, "25.0 – 50.0", f"{float(recall) - 12.3:+.1f}"]
    for key, name in (("map@r", "MAP@R"), ("nmi", "NMI"), ("recall@8", "Recall@8")):
        value = f"{100 * report['after'][key]:.1f}"
        assert rows[name] == [value, value, "–", "+0.0"]
    assert f"{len(report['data'][1])} queries, each compared with 41 images." in report["page"].section("results")
    assert "90% " + EVIL in report["page"].section("results")
    (tiles,) = report["page"].all("dl", class_="tiles")
    assert f"{recall}%" in tiles["text"]
    assert "25.0 – 50.0" in tiles["text"]


def test_recall_is_drawn_for_every_k(report):
    embeddings, labels = report["data"]
    ks = (1, 2, 4, 8, 10, 16, 20, 32)
    measured = evaluate_retrieval(embeddings, labels, ks=ks, metrics=["recall"])
    rows = {row[0]: row[1:] for row in rows_of(report["text"], "Recall@K, in percent")}
    for k in ks:
        assert rows[str(k)][0] == f"{100 * measured[f'recall@{k}']:.1f}"
    assert rows["41"] == ["100.0", "–"]
    assert rows["1"][1] == "12.3"  # before training, only what was measured


def test_training_is_a_figure_and_a_table(report):
    labels = {e.get("aria-label", "") for e in report["page"].all("svg", role="img")}
    assert any("31.0 at epoch 0, highest 47.5 at 1, last 42.0" in label for label in labels)
    assert rows_of(report["text"], "Recall@1 per epoch, in percent") == [["0", "31.0"], ["1", "47.5"], ["2", "42.0"]]


def test_hits_and_misses_are_marked_as_they_are(report):
    embeddings, labels = report["data"]
    ranked = rank_queries(embeddings, labels)
    queries = [query for chosen in choose_examples([ranked], labels, 10).values() for query in chosen]
    assert len(queries) == 10
    elements = part(report, "retrieval")
    items = [e for e in elements if e["tag"] == "li" and e.get("class") in ("hit", "miss")]
    shown = items[2:]  # the first two are the key
    hits = ranked.hits[queries].ravel()
    assert [e["class"] == "hit" for e in shown] == hits.tolist()
    assert ["✓" in e["text"] for e in shown] == hits.tolist()
    assert ["✗" in e["text"] for e in shown] == (~hits).tolist()
    assert 0 < hits.sum() < len(hits)
    distances = ranked.distances[queries].ravel()
    assert all(f"{d:.3f}" in e["text"] for d, e in zip(distances, shown, strict=True))
    verdicts = [e["alt"].split(", ")[1].split(":")[0] for e in elements if "Neighbor" in e.get("alt", "")]
    assert verdicts == np.where(hits, "hit", "miss").tolist()


def test_pictures_are_those_of_the_neighbors(report):
    """Gray value 5 i shows which image a thumbnail was made of."""
    embeddings, labels = report["data"]
    ranked, expected = rank_queries(embeddings, labels), []
    for chosen in choose_examples([ranked], labels, 10).values():
        for query in chosen:
            expected += [query, *ranked.rows[query]]
    pictured = set()
    for pair in confusions(ranked, labels, labels):
        # A pair of classes is pictured one way round, the more frequent one.
        if len(pictured) < 12 and (pair.taken_for, pair.label) not in pictured:
            pictured.add((pair.label, pair.taken_for))
            expected += [pair.query, pair.neighbor]
    values = []
    for name in ("retrieval", "confusions"):
        for image in (e for e in part(report, name) if e["tag"] == "img"):
            with Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1]))) as picture:
                assert picture.size == (30, 20)
                values.append(np.asarray(picture).mean() / 5)
    np.testing.assert_allclose(values, expected, atol=0.3)


def test_every_section_can_be_reached(report):
    page = report["page"]
    listed = [e["href"][1:] for e in page.all("a") if "download" not in e]
    assert listed[0] == "results"  # the link that skips to the results
    assert {
        "results",
        "recall",
        "retrieval",
        "map-of-images",
        "same-or-different",
        "smaller-embeddings",
        "classes",
        "confusions",
        "settings",
    } == set(listed)
    assert all(e.get("aria-label") and e["tabindex"] == "0" for e in page.all("div", role="region"))


def test_recall_by_dimensions_and_precision(report):
    embeddings, labels = report["data"]
    expected = []
    for row in recall_by_size(embeddings, labels):
        expected += [str(row["dim"]), row["precision"], str(row["bytes"])]
        expected += [f"{100 * row[name]:.1f}" for name in ("recall@1", "recall@1_rescored")]
    cells = [e["text"] for e in part(report, "smaller-embeddings") if e["tag"] in ("th", "td")]
    assert cells[5:] == expected


def test_query_gallery_without_before_or_history(tmp_path, monkeypatch):
    embeddings, labels = (np.concatenate(pair) for pair in zip(embedded(1), embedded(2), strict=True))
    asked = np.random.default_rng(0).permutation(84) < 42
    after = evaluate_retrieval(
        embeddings[asked],
        labels[asked],
        embeddings[~asked],
        labels[~asked],
        metrics=["recall", "map@r"],
        intervals="queries",
    )
    after["parts"] = {"recall@1": [0.25, 0.125, 0.375, 0.05]}
    after["generalization"] = {"density": 1.5, "note": "text"}
    seen = pictures_read(monkeypatch)
    write_report(
        tmp_path / "r.html",
        Run("Shop", {"metrics": after}),
        made(labels, "shop", is_query=asked),
        embeddings,
        num_queries=4,
        distance="cosine",
    )
    text = (tmp_path / "r.html").read_text("utf-8")
    page = check_page(text)
    assert seen == {int(e["title"].split(".")[0]) for e in page.all("img")}
    assert len([e for e in page.all("img") if "Neighbor" in e["alt"]]) == 4 * 8
    # A name shows which image it is, of both roles. Pairs of images are of any.
    pictures = [e for e in page.all("img") if not e["alt"].startswith("Image of class")]
    roles = {
        (e["alt"].split()[0], bool(asked[int(e["title"].split(".")[0])]))
        for e in pictures
        if e["alt"] and not e["alt"].startswith("Image")
    }
    assert roles == {("Query", True), ("Neighbor", False), ("Its", False)}
    assert "During training" not in text  # there was none
    assert "Before" not in page.section("results")
    assert "before training" not in page.section("recall")
    described = "shop, test split: 42 images of 6 classes as queries against a gallery of 42, by cosine distance"
    assert described in page.all("header")[0]["text"]
    assert "84 images of 6 classes" in page.section("map-of-images")
    assert rows_of(text, "Means over disjoint parts of the images, in percent") == [["Recall@1", "25.0", "12.5 – 37.5"]]
    assert rows_of(text, "Generalization to the unseen classes") == [["density", "1.5"]]
    # The intervals come with the metrics.
    low, high = after["intervals"]["map@r"].low, after["intervals"]["map@r"].high
    rows = {row[0]: row[1:] for row in rows_of(text, "Metrics of the embeddings")}
    assert rows["MAP@R"][1] == f"{100 * low:.1f} – {100 * high:.1f}"


def test_a_page_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    embeddings, labels = embedded()
    path = tmp_path / "index.html"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(path, Run("t", {"metrics": {"recall@1": 0.5}}), made(labels), embeddings)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["index.html"]


@pytest.mark.slow
def test_the_same_arguments_give_the_same_page(tmp_path):
    embeddings, labels = embedded(classes=20)
    pages = []
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, Run("t", {"metrics": {"recall@1": 0.5}}), made(labels), embeddings)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_classes_of_one_image_give_a_page_that_says_so(tmp_path):
    labels = np.arange(5)
    write_report(tmp_path / "r.html", Run("t", {"metrics": {"nmi": 1.0}}), made(labels), np.eye(5))
    page = check_page((tmp_path / "r.html").read_text("utf-8"))
    assert "No query has another image of its class" in page.section("retrieval")
    assert "No query has an image of its class" in page.section("recall")
    assert "There are not both pairs" in page.section("same-or-different")
    assert "class 0" in page.section("classes")


@pytest.mark.slow
def test_one_image_one_class_and_equal_images_give_pages(tmp_path):
    for embeddings, labels in (
        (np.ones((1, 3)), np.zeros(1, int)),
        (np.ones((9, 3)), np.arange(9) // 3),
        (np.random.default_rng(0).normal(size=(12, 1)), np.zeros(12, int)),
        (np.zeros((8, 2)), np.arange(8) // 2),
    ):
        write_report(tmp_path / "r.html", Run("t", {"metrics": {}}), made(labels), embeddings, distance="cosine")
        page = check_page((tmp_path / "r.html").read_text("utf-8"))
        assert "nan" not in page.all("main")[0]["text"].lower()
        assert "Nothing was measured" in page.section("results")


@pytest.mark.slow
def test_parts_that_grow_with_the_data_are_bounded(tmp_path, monkeypatch):
    """11,316 classes make no longer tables than 1,200 do."""
    rng = np.random.default_rng(0)
    labels = np.arange(3600) // 3
    embeddings = rng.normal(size=(1200, 8))[labels] + 0.8 * rng.normal(size=(3600, 8))
    names = {c: f"class {c} " + "x" * 60 for c in range(1200)}
    noise = rng.integers(0, 256, size=(50, 80, 80, 3), dtype=np.uint8)
    dataset = made(labels, names=names, pixels=noise[np.arange(3600) % 50])
    # Where the points lie does not change the size.
    monkeypatch.setattr("tfdml.report.embedding_map.lay_out", lambda x, **_: rng.random((len(x), 2)))
    path = tmp_path / "r.html"
    write_report(path, Run("t", {"metrics": {}}), dataset, embeddings)
    text = path.read_text("utf-8")
    page = check_page(text)
    assert len(rows_of(text, "Classes, those found worst first")) == 100
    assert "Of 1,200 classes, the 50 found worst and the 50 found best" in page.section("classes")
    assert len(rows_of(text, "Confusions, the most frequent first")) == 50
    # Noise is what compresses worst.
    assert path.stat().st_size < 10e6
    assert "1,998 images of 666 classes" in page.section("map-of-images")


def test_bad_arguments(tmp_path):
    embeddings, labels = embedded()
    with pytest.raises(UserError, match="41 rows for the 42 images of toys"):
        write_report(tmp_path / "r.html", Run("t", {"metrics": {}}), made(labels), embeddings[:41])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium")
def test_script_runs_in_a_browser(report, tmp_path):
    """The page's policy lets its own script run: heads become buttons."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", report["path"].as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert dom.count("<button>") == 5  # the columns of the classes


def percent(interval):
    return [f"{100 * interval.mean:.3g}", f"{100 * interval.low:.3g} – {100 * interval.high:.3g}"]


def test_a_threshold_of_held_out_classes_on_the_test_images():
    embeddings, labels = embedded()
    held_out = embedded(3, classes=9)
    text = str(verification_html(embeddings, made(labels), "cosine", held_out, {"fpir": 0.05}))
    calibration = calibrate(*held_out, fpir=0.05, distance="cosine")
    measured = verification(embeddings, labels, distance="cosine")
    rates = identification_rates(embeddings, labels, calibration.threshold, distance="cosine")
    page = Page(text)
    assert (
        f"The threshold is a cosine distance of {calibration.threshold:.4g}, calibrated to a false positive "
        "identification rate of at most 5 %" in (page.all("p")[0]["text"])
    )
    assert "on 63 images of 9 held-out classes. Below are 6 classes of the test images." in page.all("p")[0]["text"]
    assert rows_of(text, "Rates at the threshold") == [
        [name, *percent(calibration.rates[kind]), *percent(rates[kind])]
        for name, kind in (
            ("Queries of unknown classes that find something (FPIR)", "fpir"),
            ("Queries of known classes that are answered right (TPIR)", "tpir"),
        )
    ]
    assert rows_of(text, "True accept rates by false accept rate") == [
        [f"{100 * far:g}", *percent(point.tar), f"{point.threshold:.4g}"] for far, point in measured.points.items()
    ]
    rates = f"AUC {measured.auc:.4f}. Equal error rate {100 * measured.eer:.2f}%"
    assert rates in "".join(p["text"] for p in page.all("p"))
    roc, histogram = (e["aria-label"] for e in page.all("svg", role="img"))
    assert "true accept rate by false accept rate" in roc
    assert histogram.endswith(f"threshold {calibration.threshold:.3g}")


def test_without_held_out_classes_half_of_them_calibrate():
    embeddings, labels = embedded(classes=8)
    text = str(verification_html(embeddings, made(labels), "euclidean", target={"precision": 0.5}))
    half = np.isin(labels, drawn_classes(labels)[::2])
    calibration = calibrate(embeddings[half], labels[half], precision=0.5, distance="euclidean")
    rates = accepted_rates(embeddings[~half], labels[~half], calibration.threshold, distance="euclidean")
    assert "a precision of at least 50 % on 28 images of 4 of the classes, drawn at random" in text
    assert rows_of(text, "Rates at the threshold")[2] == [
        "Precision",
        *percent(calibration.rates["precision"]),
        *percent(rates.precision),
    ]


def test_few_pairs_have_no_calibrated_threshold():
    embeddings, labels = embedded(classes=3, per_class=3)
    text = str(verification_html(embeddings, made(labels), "cosine"))
    assert "There are too few images to calibrate one on other classes" in text
    assert len(rows_of(text, "Rates at the threshold")[0]) == 3
    alone = verification_html(embeddings, made(np.arange(9)), "cosine")
    assert "There are not both pairs of one class and pairs of different classes" in alone


def test_of_many_images_whole_classes_are_drawn(monkeypatch):
    monkeypatch.setattr(pages, "_MOST_IMAGES", 20)
    labels = np.random.default_rng(0).permutation(np.repeat([3, 5, 8, 9], [4, 7, 6, 30]))
    for seed in range(5):
        monkeypatch.setattr(
            pages, "drawn_classes", lambda x, s=seed: np.random.default_rng(s).permutation(np.unique(x))
        )
        kept = sampled_images(labels)
        classes = np.unique(labels[kept])
        assert kept.sum() == np.isin(labels, classes).sum()
        assert len(classes) == 2 or kept.sum() <= 20
    monkeypatch.undo()
    embeddings, labels = embedded()
    monkeypatch.setattr(pages, "_MOST_IMAGES", 21)
    text = str(verification_html(embeddings, made(labels), "cosine", embedded(3, classes=9), {"fpir": 0.1}))
    assert "Their classes are a random sample" in text
    assert re.search(r"Below are 3 classes", text)


PROTOCOL = "zero-shot: trained on 98 classes, evaluated all-to-all on 98 classes never seen in training"


LABELS = np.repeat(np.arange(12), 5)


def run_folder(path, recalls=(0.25, 0.5), flags=None, **result):
    """A run whose Recall@1 per epoch is `recalls`."""
    path.mkdir(parents=True)
    flags = {"run_dir": path, "dataset": "cars196", "objectives": "am_softmax + jrs", "seed": 0, **(flags or {})}
    (path / "flags.txt").write_text("".join(f"--{name}={value}\n" for name, value in flags.items()))
    (path / "environment.json").write_text(json.dumps({"tfdml": "0.1", "packages": {"keras": "3.15"}}))
    lines = [
        {"epoch": e, "test": {"recall@1": r}, "train": {"d_pos": 0.5 + e, "d_neg": 1.25}} for e, r in enumerate(recalls)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {"recall@1": recalls[-1], "recall@2": 0.6, "nmi": 0.3, "num_queries": 100, "num_gallery": 99}
    stored = {"dataset": "cars196", "metrics": metrics, "protocol": PROTOCOL, "selection": "the last epoch", "epoch": 1}
    (path / "result.json").write_text(json.dumps({**stored, "train_seconds": 59.6, **result}))
    return path


def compared(tmp_path, *runs, **options):
    write_comparison(tmp_path / "out" / "c.html", runs, **options)
    text = (tmp_path / "out" / "c.html").read_text("utf-8")
    return text, check_page(text)


def test_metrics_differences_intervals_and_the_best(tmp_path):
    first = run_folder(tmp_path / "jrd")
    metrics = {"recall@1": 0.6, "recall@2": 0.6, "map@r": 0.1, "num_queries": 100, "num_gallery": 99}
    metrics["intervals"] = {"recall@1": [0.6, 0.55, 0.65, 0.02]}
    second = run_folder(tmp_path / "am", (0.2, 0.3, 0.6), {"objectives": "am_softmax", "margin": 2}, metrics=metrics)
    text, page = compared(tmp_path, first, second)
    assert page.all("h1")[0]["text"] == "jrd and am"
    assert rows_of(text, "Metrics of the runs") == [
        ["Recall@1", "50.0", "best 60.0+10.055.0 – 65.0"],
        ["Recall@2", "60.0", "60.0+0.0"],
        ["MAP@R", "–", "10.0–"],
        ["NMI", "30.0", "–"],
    ]
    curves = rows_of(text, "Recall@1 per epoch, in percent")
    assert curves == [["0", "25.0", "20.0"], ["1", "50.0", "30.0"], ["2", "–", "60.0"]]
    assert rows_of(text, "Flags that differ") == [
        ["objectives", "am_softmax + jrs", "am_softmax"],
        ["margin", "–", "2"],
    ]
    assert rows_of(text, "Flags that are the same") == [["dataset", "cars196"], ["seed", "0"]]
    assert "The same versions, machine and devices" in page.section("environment")
    assert rows_of(text, "The runs")[0] == [
        "jrd",
        "cars196",
        "am_softmax + jrs",
        "the last epoch",
        "1",
        "–",
        "60 s",
        "–",
    ]
    assert "do not compare" not in text


def test_runs_that_do_not_compare_are_shown_with_a_warning(tmp_path):
    runs = [
        run_folder(tmp_path / "a"),
        run_folder(
            tmp_path / "b", dataset="cub200", protocol="closed set", selection="the best epoch on the test classes"
        ),
        run_folder(tmp_path / "c", metrics={"recall@1": 0.5, "num_queries": 7, "num_gallery": 6}),
    ]
    text, page = compared(tmp_path, *runs)
    assert rows_of(text, "Metrics of the runs")[0] == ["Recall@1", "50.0", "50.0", "50.0"]
    assert "no run is called the best" in page.section("results")
    warning = page.all("div", class_="warning")[0]["text"]
    assert "do not compare" in warning
    assert "Different data sets. a: cars196; b: cub200; c: cars196." in warning
    assert "Different protocols." in warning
    assert "Different numbers of images. a: 100 queries, each compared with 99; b: 100" in warning
    assert "Different ways to select the embedder." in warning
    assert "options of the data set" not in warning
    assert not compared(tmp_path, runs[0], run_folder(tmp_path / "d"))[1].all("div", class_="warning")


def test_embeddings_add_curves_histograms_and_queries(tmp_path):
    embeddings, labels = embedded(3, classes=20, per_class=5)
    worse = np.pad(embeddings + np.random.default_rng(1).normal(size=embeddings.shape), ((0, 0), (0, 3)))
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    text, page = compared(tmp_path, *runs, dataset=made(labels), embeddings=[embeddings, worse], num_queries=6)
    rows = {row[0]: row[1:] for row in rows_of(text, "Recall@K, in percent")}
    for column, x in enumerate((embeddings, worse)):
        measured = evaluate_retrieval(x, labels, ks=(1, 8), metrics=["recall"])
        assert rows["1"][column] == f"{100 * measured['recall@1']:.1f}"
        assert rows["8"][column] == f"{100 * measured['recall@8']:.1f}"
    assert len([e for e in page.all("svg") if "Histogram" in e.get("aria-label", "")]) == 2
    lists = [e["aria-label"] for e in page.all("ol")]
    assert len(lists) == 2 * 6
    assert [label.split(":")[0] for label in lists] == ["a", "b"] * 6
    assert [e["text"].split("  ")[0].split(" ")[0] for e in page.all("h3")][-3:] == ["Typical", "Better", "Worse"]
    assert len(page.all("img")) == 6 * (1 + 2 * 8)


def test_embeddings_of_queries_and_gallery(tmp_path, monkeypatch):
    embeddings, labels = embedded(3, classes=10, per_class=6)
    asked = np.arange(60) % 3 == 0
    seen = pictures_read(monkeypatch)
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    dataset = made(labels, is_query=asked)
    text, page = compared(tmp_path, *runs, dataset=dataset, embeddings=[embeddings, -embeddings])
    measured = evaluate_retrieval(
        embeddings[asked], labels[asked], embeddings[~asked], labels[~asked], ks=[4], metrics=["recall"]
    )
    rows = {row[0]: row[1:] for row in rows_of(text, "Recall@K, in percent")}
    assert rows["4"] == [f"{100 * measured['recall@4']:.1f}"] * 2
    queries = [e["title"] for e in page.all("img") if e["alt"].startswith("Query")]
    found = [e["title"] for e in page.all("img") if e["alt"].startswith("Neighbor")]
    # Names within the halves do not matter, the rows that were read do.
    assert all(asked[int(name.split(".")[0])] for name in queries)
    assert not any(asked[int(name.split(".")[0])] for name in found)
    assert {int(name.split(".")[0]) for name in queries + found} == seen


def test_folders_that_are_no_finished_runs(tmp_path):
    good = run_folder(tmp_path / "good")
    cases = {"missing": "is no folder", "empty": "is not the folder of a run", "open": "has not ended.*resume it"}
    (tmp_path / "empty").mkdir()
    run_folder(tmp_path / "open")
    (tmp_path / "open" / "result.json").unlink()
    for name, file, content, message in (
        ("torn", "result.json", '{"metrics": {"recall', "result.json is damaged"),
        ("list", "result.json", "[]", "it is no JSON object"),
        ("other", "result.json", "{}", "its key metrics must be"),
        ("line", "metrics.jsonl", '{"epoch": 0}\n{"epo', "metrics.jsonl, line 2, is damaged"),
        ("bytes", "flags.txt", b"\xff\xfe", "flags.txt cannot be read"),
    ):
        run_folder(tmp_path / name)
        (tmp_path / name / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        cases[name] = message
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            write_comparison(tmp_path / "c.html", [good, tmp_path / name])
    assert not (tmp_path / "c.html").exists()


def test_a_result_alone_is_a_run(tmp_path):
    for name in ("a", "b"):
        run_folder(tmp_path / name)
        for file in ("flags.txt", "environment.json", "metrics.jsonl"):
            (tmp_path / name / file).unlink()
    page = compared(tmp_path, tmp_path / "a", tmp_path / "b")[1]
    assert "No flags are stored" in page.section("flags")
    assert "No environment is stored" in page.section("environment")
    assert "Nothing was measured during training" in page.section("training")
    assert list(read_run(tmp_path / "a").history) == []


def test_bad_arguments_of_a_comparison(tmp_path):
    runs = [run_folder(tmp_path / str(i)) for i in range(9)]
    embeddings, labels = embedded()
    for arguments, options, message in (
        (runs[:1], {}, "2 to 8 runs; got 1"),
        (runs, {}, "2 to 8 runs; got 9"),
        ([runs[0], tmp_path / "." / "0"], {}, "named twice"),
        (runs[:2], {"names": ["a"]}, "1 names for 2 runs"),
        (runs[:2], {"names": ["a", "a"]}, "different names"),
        (runs[:2], {"dataset": made(labels)}, "go together"),
        (runs[:2], {"dataset": made(labels), "embeddings": [embeddings]}, "embeddings of 1 runs for 2"),
        (runs[:2], {"dataset": made(labels), "embeddings": [embeddings, embeddings[1:]]}, "run 2: 41 rows for the 42"),
    ):
        with pytest.raises(UserError, match=message):
            write_comparison(tmp_path / "c.html", arguments, **options)
    assert not (tmp_path / "c.html").exists()


def test_folders_of_one_name_are_told_apart(tmp_path):
    page = compared(tmp_path, run_folder(tmp_path / "x" / "run"), run_folder(tmp_path / "y" / "run"))[1]
    assert page.all("h1")[0]["text"] == "x/run and y/run"


# Query by query


def answered(share, seed=0):
    hits = (np.random.default_rng(seed).random(60) < share).astype(float)
    return QueryValues.of(made(LABELS), {"recall@1": hits, "map@r": 0.5 * hits})


def stored(path, share=0.5, seed=0, **result):
    folder = run_folder(path, **result)
    answered(share, seed).write(folder / "queries.npz")
    return folder


def of_seeds(path, share, seeds):
    for seed in seeds:
        stored(path / f"seed_{seed}", share, seed)
    (path / "result.json").write_text(
        '{"metrics": {}, "runs": [' + ", ".join(f'{{"run": "seed_{s}"}}' for s in seeds) + "]}"
    )
    return path


def test_differences_on_the_page(tmp_path):
    runs = [stored(tmp_path / "am", 0.2), stored(tmp_path / "jrd", 0.9), run_folder(tmp_path / "old")]
    text, page = compared(tmp_path, *runs)
    section = page.section("paired")
    assert "old and am are not compared query by query: old has no queries.npz" in section
    (recall, _) = rows_of(text, "Differences on the same queries")
    found = write_comparison(None, runs[:2])[0].classes["recall@1"]
    assert recall[0] == "Recall@1"
    assert recall[1] == f"+{100 * found.mean:.1f}{100 * found.low:.1f} to {100 * found.high:.1f} over classes"


def test_embeddings_stand_in_for_what_was_not_stored(tmp_path):
    embeddings, labels = embedded(3, classes=8, per_class=5)
    worse = embeddings + np.random.default_rng(1).normal(size=embeddings.shape)
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    text, _ = compared(tmp_path, *runs, dataset=made(labels), embeddings=[embeddings, worse])
    assert rows_of(text, "Differences on the same queries")[0][1].startswith("−")


def test_other_queries_are_refused(tmp_path):
    first, second = stored(tmp_path / "a"), run_folder(tmp_path / "b")
    other = QueryValues.of(made(LABELS[:50]), {"recall@1": np.ones(50)})
    other.write(second / "queries.npz")
    pair = write_comparison(None, [first, second])[0]
    assert pair.refused == "their queries are not the same: 50 queries and 60"
    dataclasses.replace(answered(0.5), values={"nmi": np.ones(60)}).write(second / "queries.npz")
    assert write_comparison(None, [first, second])[0].refused == "the runs have no metric in common to compare"
    (second / "queries.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"queries\.npz cannot be read"):
        write_comparison(None, [first, second])


def test_several_seeds_on_both_sides(tmp_path):
    first = of_seeds(tmp_path / "first", 0.2, [0, 1, 2])
    second = of_seeds(tmp_path / "second", 0.9, [4, 7])
    runs = read_runs([first, second])
    assert [one.name for one in runs[1].seeds] == ["seed 4", "seed 7"]
    assert runs[0].measured == [{"epoch": 0, "recall@1": 0.25}, {"epoch": 1, "recall@1": 0.5}]
    pair = write_comparison(None, [first, second])[0]
    assert pair.counts == (2, 3)
    recalls = [[np.mean(answered(share, s).values["recall@1"]) for s in seeds] for share, seeds in
               ((0.9, (4, 7)), (0.2, (0, 1, 2)))]  # fmt: skip
    expected = np.mean(recalls[0]) - np.mean(recalls[1])
    assert pair.classes["recall@1"].mean == pytest.approx(expected, rel=1e-12)
    assert pair.seeds["recall@1"].mean == pytest.approx(expected, rel=1e-12)
    over_classes, over_seeds = pair.intervals("recall@1")
    assert over_classes.endswith(" over classes")
    assert over_seeds.endswith(" over 2 and 3 seeds")
    text, _ = compared(tmp_path, first, second)
    cell = pair.change("recall@1") + over_classes + over_seeds
    assert rows_of(text, "Differences on the same queries")[0] == ["Recall@1", cell]
    mixed = write_comparison(None, [stored(tmp_path / "single"), first])[0]
    assert not mixed.seeds
    assert len(mixed.intervals("recall@1")) == 1


def test_a_difference_is_told_apart_where_no_interval_holds_0():
    def told_apart(mean, low, high, seeds=None):
        over_seeds = {} if seeds is None else {"map@r": Interval(mean, *seeds, 0.1)}
        return Paired("b", "a", "", {"map@r": Interval(mean, low, high, 0.01)}, over_seeds).told_apart("map@r")

    assert told_apart(0.024, 0.011, 0.036)
    assert told_apart(-0.024, -0.036, -0.011)
    assert not told_apart(0.024, -0.01, 0.05)
    # Sure of these networks, not of others with other seeds.
    assert not told_apart(0.024, 0.011, 0.036, (-0.01, 0.05))
