"""Pages are filled from `docs/numbers`, and the data of the studies are compared with their checksums."""

import json
import re

import pytest

from tools import numbers

TABLE = {"columns": ["", "ours", "theirs"], "rows": [["a step, ms", "210", "411"], ["MAP@R", "", "7.4"]]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps({"table": TABLE, "images": 60502}))
    return tmp_path


def test_pages_have_the_numbers_of_their_files():
    assert list(numbers.faults()) == []


def test_a_number_that_would_end_its_paragraph_is_refused(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    monkeypatch.setattr(numbers, "pages", lambda: [page])
    for before, faults in [("It has ", 0), ("It has\n", 1), ("- It has\n  ", 1)]:
        page.write_text(numbers.filled(f"{before}<!--=audit/identical--><!--=--> of\n\n<!--=audit/labels--><!--=-->\n"))
        assert sum("a paragraph ends before" in fault for fault in numbers.faults()) == faults


def test_no_file_is_larger_than_a_page_needs():
    assert max(path.stat().st_size for path in numbers.NUMBERS.glob("*")) < 100_000


def test_places_are_filled_again_and_again(folder):
    page = "It takes <!--=speed/table/a step, ms/ours-->1<!--=--> ms for <!--=speed/images--><!--=--> images."
    once = numbers.filled(page, folder)
    assert ">210<" in once
    assert ">60,502<" in once
    assert numbers.filled(once, folder) == once


def test_a_table_is_rendered(folder):
    assert "| MAP@R | | 7.4 |" in numbers.filled("<!--=speed/table--><!--=-->", folder)


@pytest.mark.parametrize("key", ["none/table", "speed/none", "speed/table/MAP@R/none", "speed/images/more"])
def test_a_key_without_a_number_is_an_error(folder, key):
    with pytest.raises(KeyError):
        numbers.lookup(key, folder)


def test_tables_are_printed_and_written_as_pages_read_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks/speed.py", "--rounds=3", "--json=speed.json"])
    add = numbers.Results(tmp_path / "speed.json").table("table", *TABLE["columns"])
    for row in TABLE["rows"]:
        add(*row)
    found = json.loads((tmp_path / "speed.json").read_text())
    assert list(found) == ["command", "machine", "versions", "date", "table"]
    assert found["command"].endswith("--rounds=3")
    assert found["table"] == TABLE
    assert "| a step, ms | 210 | 411 |" in capsys.readouterr().out
    assert numbers.lookup("speed/table/a step, ms/ours", tmp_path) == "210"


def test_a_benchmark_writes_the_tables_that_pages_show():
    for path in numbers.NUMBERS.glob("*.json"):
        stored = json.loads(path.read_text())
        if found := re.search(r"-m (benchmarks|tools)\.(\w+)", stored["command"]):
            source = "".join(file.read_text() for file in (numbers.ROOT / found[1]).glob(f"{found[2]}*.py"))
            if not source:  # measured by a script that is not kept
                continue
            assert not [key for key, value in stored.items() if isinstance(value, dict) and f'"{key}"' not in source]
