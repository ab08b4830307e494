"""Pages state the numbers of `docs/numbers`: those of results are written whole, others are compared."""

import json
import re

import pytest

from tools import numbers

TABLE = {"columns": ["", "ours", "theirs"], "rows": [["a step, ms", "210", "411"], ["MAP@R", "", "7.4"]]}
GAINS = [
    f"table/{row}/{column}"
    for row in ("+ JRS", "+ HORDE", "+ ECAML", "+ DML-DA", "RankMI")
    for column in ("gain", "over seeds")
]
# Which numbers a page states.
PAGES = {
    "README.md": [
        *(f"{study}/{part}" for study in ("ten_cars196", "ten_omniglot") for part in GAINS),
        "training/table/a step, ms, in turns/tfdml",
        "training/table/a step, ms, in turns/PyTorch",
        "losses/shares/4,096/most",
        "losses/shares/128/least",
        "losses/shares/128/most",
        "evaluation/exact/`recall` at 1, 2, 4, 8/seconds",
        "first_result/steps/together/seconds",
        "verification/table/Cars-196, classes 99 to 196/FAR in its interval",
    ],
    "export/README.md": [
        "serving/load",
        "serving_soak/requests",
        "serving_soak/wrong answers",
        "serving_soak/failed requests",
        "serving_soak/median, ms",
        "serving_soak/99th percentile, ms",
        "serving_soak/longest, ms",
        "serving_soak/memory",
        "serving_load/table",
    ],
    "docs/audit.md": [
        "audit/labels",
        "audit/identical",
        "audit/conflicting",
        "audit/count",
        "audit/cpu_seconds",
        "audit/mb",
    ],
    "docs/evaluation.md": [
        "evaluation/exact",
    ],
    "docs/export.md": [
        "phones/table",
    ],
    "docs/generalization.md": [
        "generalization/table",
    ],
    "docs/install.md": [
        "first_result/steps",
        "first_result/installed/all/MB",
        "first_result/installed/tensorflow/MB",
    ],
    "docs/labels.md": [
        "label_noise/table",
    ],
    "docs/reranking.md": [
        "reranking_cars196/table",
    ],
    "docs/two_hosts.md": [
        "two_processes/table/one process/Recall@1",
        "two_processes/table/two processes/Recall@1",
    ],
    "docs/verification.md": [
        "verification/table",
    ],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps({"table": TABLE, "images": 60502}))
    return tmp_path


@pytest.mark.parametrize("template", sorted(numbers.TEMPLATES.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_of_results_is_written_from_its_numbers(template):
    page = numbers.ROOT / "docs" / template.name
    assert page.read_text() == numbers.page(template), "run python -m tools.numbers"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_measured_numbers(page):
    text = (numbers.ROOT / page).read_text()
    for key in PAGES[page]:
        assert numbers.render(numbers.lookup(key)) in text, key


def test_every_number_is_on_a_page():
    keys = [key for keys in PAGES.values() for key in keys]
    keys += [key for path in numbers.TEMPLATES.glob("*.md") for key in numbers.KEY.findall(path.read_text())]
    pages = (numbers.ROOT / "docs").glob("*.md")
    links = {name for page in pages for name in re.findall(r"numbers/(\w+).json", page.read_text())}
    assert {path.stem for path in numbers.NUMBERS.glob("*.json")} == {key.partition("/")[0] for key in keys} | links


def test_a_value_is_rendered(folder):
    assert numbers.lookup("speed/table/a step, ms/ours", folder) == "210"
    assert numbers.render(numbers.lookup("speed/images", folder)) == "60,502"
    assert "| MAP@R | | 7.4 |" in numbers.render(TABLE)


@pytest.mark.parametrize("key", ["none/table", "speed/none", "speed/table/MAP@R/none", "speed/images/more"])
def test_a_key_without_a_number_is_an_error(folder, key):
    with pytest.raises(KeyError):
        numbers.lookup(key, folder)


def test_tables_are_printed_and_written_as_pages_read_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks/speed.py", "--rounds=3", "--json=speed.json"])
    add = numbers.Results(tmp_path / "speed.json").table("table", *TABLE["columns"])
    for row in TABLE["rows"]:
        add(*row)
    written = json.loads((tmp_path / "speed.json").read_text())
    assert list(written) == ["command", "machine", "versions", "date", "table"]
    assert written["table"] == TABLE
    assert "| a step, ms | 210 | 411 |" in capsys.readouterr().out
