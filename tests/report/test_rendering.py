"""Names from outside are text on every page, whatever is in them."""

import csv
import dataclasses
import io
import json
import re
import urllib.parse

import numpy as np
import pytest
from markupsafe import Markup

from tests.report.pages import EVIL, Page, check_page, embedded, made
from tfdml.report import Run, write_comparison, write_report
from tfdml.report.rendering import csv_link, render, write_page


def hostile_dataset(**fields):
    embeddings, labels = embedded(3, classes=6, per_class=6)
    names = {int(c): f"class {c} {EVIL}" for c in np.unique(labels)}
    dataset = made(labels, name=f"data {EVIL}", names=names, **fields)
    images = dataclasses.replace(dataset.images, names=tuple(f"file {i} {EVIL}" for i in range(len(labels))))
    return dataclasses.replace(dataset, images=images), embeddings


def hostile_run(name, **changes):
    result = {
        "metrics": {"recall@1": 0.5, f"metric {EVIL}": 0.5, "generalization": {f"measure {EVIL}": 1.5}},
        "metrics_orders": {f"order {EVIL}": {"recall@1": 0.5}},
        **{key: f"{key} {name} {EVIL}" for key in ("dataset", "protocol", "selection")},
    }
    record = {"test": {"recall@1": 0.5}, "train": {f"{EVIL}_energy": 1.0}, "orders": {EVIL: {"recall@1": 0.25}}}
    history = [{"epoch": epoch, **record} for epoch in range(2)]
    flags = {"objectives": EVIL, f"flag {EVIL}": f"value {name} {EVIL}"}
    return Run(f"{name} {EVIL}", result, history, flags, {f"package {EVIL}": f"version {name} {EVIL}"})


def report(path, **fields):
    dataset, embeddings = hostile_dataset(**fields)
    write_report(path, hostile_run("run"), dataset, embeddings, interval_name=EVIL, num_queries=4)


def comparison(path, with_embeddings):
    folders = []
    for name in ("a", "b"):
        run, folder = hostile_run(name), path.parent / name
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(run.result))
        (folder / "environment.json").write_text(json.dumps(run.environment))
        (folder / "flags.txt").write_text("".join(f"--{flag}={value}\n" for flag, value in run.flags.items()))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run.history))
        folders.append(folder)
    options = {}
    if with_embeddings:
        dataset, embeddings = hostile_dataset()
        options = {"dataset": dataset, "embeddings": [embeddings, -embeddings[:, :2]]}
    write_comparison(path, folders, names=[f"{name} {EVIL}" for name in ("a", "b")], **options)


PAGES = {
    "report": report,
    "report of queries and gallery": lambda path: report(path, is_query=np.arange(36) % 2 == 0),
    "comparison": lambda path: comparison(path, False),
    "comparison with embeddings": lambda path: comparison(path, True),
}
# What every page shows, and what those with images show besides; `embedded` numbers classes 0, 11, ...
SHOWN = ("run", "dataset", "protocol", "value")
IMAGES = ("class 11", "file")


@pytest.mark.one_quick_case
@pytest.mark.parametrize("kind", PAGES)
def test_hostile_names_are_text_on_every_page(kind, tmp_path):
    path = tmp_path / "page.html"
    PAGES[kind](path)
    text = path.read_text("utf-8")
    page = check_page(text)  # as many scripts as ever, no attribute that runs one
    assert "alert" not in "".join(e["text"] for e in page.all("script") if "type" not in e)
    # `title` of the page itself is not looked up.
    assert EVIL in page.all("title")[0]["text"]
    said = [value for e in page.elements for value in e.values() if value]
    for word in SHOWN + (() if kind == "comparison" else IMAGES):
        holding = [value for value in said if re.search(rf"{word}\b[^<]*{re.escape(EVIL)}", value, re.IGNORECASE)]
        assert holding, f"{word} is not shown"
    # Outside the page's own script, the only one with such text in it would be one that was let through.
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "<script>" not in outside
    assert "<!--" not in outside


def test_markup_is_taken_as_it_is_and_text_is_escaped():
    groups = [("<i>", {"<b>": "\"'&", "kept": Markup("<b>bold</b>")})]
    text = render("settings.html", groups=groups)
    assert "<summary>&lt;i&gt;</summary>" in text
    assert '<th scope="row">&lt;b&gt;</th><td>&#34;&#39;&amp;</td>' in text
    assert "<td><b>bold</b></td>" in text


def test_what_a_template_lacks_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(Exception, match="is undefined"):
        write_page(tmp_path / "page.html", "report.html")
    assert not list(tmp_path.iterdir())


def test_values_of_plots_are_saved_without_formulas():
    rows = [["=1+1", -0.5], ['@x,"y"', 2], [" +3", ""], ["a-b", None]]
    page = Page(csv_link("Recall@K, in percent", ["K", "=run"], rows))
    (link,) = page.all("a")
    assert link["download"] == "recall_k_in_percent.csv"
    text = urllib.parse.unquote(link["href"].removeprefix("data:text/csv;charset=utf-8,"))
    read = list(csv.reader(io.StringIO(text)))
    assert read == [["K", "'=run"], ["'=1+1", "-0.5"], ['\'@x,"y"', "2"], ["' +3", ""], ["a-b", ""]]
