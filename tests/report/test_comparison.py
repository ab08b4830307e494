import dataclasses
import json

import numpy as np
import pytest

from tests.report.pages import check_page, embedded, made, pictures_read, rows_of
from tfdml.errors import UserError
from tfdml.evaluation import Interval, QueryValues, evaluate_retrieval
from tfdml.report import write_comparison
from tfdml.report.comparison import Paired
from tfdml.report.runs import read_run, read_runs

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
    found = [e["title"] for e in page.all("img") if e["alt"].startswith("Neighbour")]
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
        ("list", "result.json", "[]", "an object is expected, not a list"),
        ("other", "result.json", "{}", "it has no key metrics"),
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


def test_bad_arguments(tmp_path):
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
    assert "jrd is better than am by " in section
    assert "points of Recall@1 (95 % interval over classes " in section
    assert "old and am are not compared query by query: old has no queries.npz" in section
    (recall, _) = rows_of(text, "Differences on the same queries")
    found = write_comparison(None, runs[:2])[0].classes["recall@1"]
    assert recall[0] == "Recall@1"
    assert recall[1].startswith(f"+{100 * found.mean:.1f}{100 * found.low:.1f} to ")


def test_embeddings_stand_in_for_what_was_not_stored(tmp_path):
    embeddings, labels = embedded(3, classes=8, per_class=5)
    worse = embeddings + np.random.default_rng(1).normal(size=embeddings.shape)
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    page = compared(tmp_path, *runs, dataset=made(labels), embeddings=[embeddings, worse])[1]
    assert "b is worse than a by " in page.section("paired")


def test_other_queries_are_refused(tmp_path):
    first, second = stored(tmp_path / "a"), run_folder(tmp_path / "b")
    other = QueryValues.of(made(LABELS[:50]), {"recall@1": np.ones(50)})
    other.write(second / "queries.npz")
    pair = write_comparison(None, [first, second])[0]
    assert pair.refused == "their queries are not the same: 50 queries and 60"
    dataclasses.replace(answered(0.5), values={"nmi": np.ones(60)}).write(second / "queries.npz")
    assert write_comparison(None, [first, second])[0].refused == "they have no metric in common"
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
    assert ", over 2 and 3 seeds " in pair.sentence("recall@1")
    mixed = write_comparison(None, [stored(tmp_path / "single"), first])[0]
    assert not mixed.seeds
    assert mixed.sentence("recall@1").endswith("; one of them has one seed)")


def test_what_is_said_of_a_difference():
    def said(mean, low, high, seeds=None):
        over_seeds = {} if seeds is None else {"map@r": Interval(mean, *seeds, 0.1)}
        counts = (1, 1) if seeds is None else (3, 3)
        return Paired("b", "a", "", {"map@r": Interval(mean, low, high, 0.01)}, over_seeds, counts).sentence("map@r")

    assert said(0.024, 0.011, 0.036) == (
        "b is better than a by 2.4 points of MAP@R (95 % interval over classes 1.1 to 3.6; one seed each)"
    )
    assert said(-0.024, -0.036, -0.011).startswith(
        "b is worse than a by 2.4 points of MAP@R (95 % interval over classes"
    )
    assert "classes 1.1 to 3.6;" in said(-0.024, -0.036, -0.011)
    unsure = "b and a are not distinguished by MAP@R: the difference is +2.4 points (95 % interval over classes "
    assert said(0.024, -0.01, 0.05) == f"{unsure}−1.0 to 5.0; one seed each)"
    # Sure of these networks, not of others with other seeds.
    assert said(0.024, 0.011, 0.036, (-0.01, 0.05)) == f"{unsure}1.1 to 3.6, over 3 and 3 seeds −1.0 to 5.0)"
