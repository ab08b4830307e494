"""Fills the marked places of the pages with measured numbers from `docs/numbers/NAME.json`, the only source of each.

    python -m tools.numbers             fill the pages
    python -m tools.numbers --check     print the pages that differ, as `make lint` does
    python -m benchmarks.losses --json=docs/numbers/losses.json    measure again

A place is text between `<!--=NAME/KEY-->` and `<!--=-->`, on one line or around a block. A key leads through objects
by name, and through a table by the first cell of a row and the name of a column: `training/table/MAP@R/tfdml`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUMBERS = ROOT / "docs" / "numbers"
PLACE = re.compile(r"<!--=(?P<key>[^>]+)-->(?P<text>.*?)<!--=-->", re.DOTALL)


def pages() -> list[pathlib.Path]:
    """Return the pages that may hold numbers."""
    return [ROOT / "README.md", ROOT / "export" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def lookup(key: str, folder: pathlib.Path = NUMBERS) -> Any:
    """Return the value of a key.

    Raises:
        KeyError: There is none.
    """
    name, *parts = key.split("/")
    path = folder / f"{name}.json"
    if not path.is_file():
        raise KeyError(f"{key}: no {path.name}")
    value: Any = json.loads(path.read_text(encoding="utf-8"))
    for part in parts:
        if isinstance(value, dict) and "columns" in value:
            rows = {row[0]: dict(zip(value["columns"], row, strict=True)) for row in value["rows"]}
            value = rows
        if not isinstance(value, dict) or part not in value:
            raise KeyError(f"{key}: no {part!r}")
        value = value[part]
    return value


def render(value: Any) -> str:
    """Return a value as Markdown: a number with separators, a table, or text as it is."""
    if isinstance(value, dict):
        lines = [value["columns"], ["---"] * len(value["columns"]), *value["rows"]]
        table = ["|" + "".join(f" {render(cell)}".rstrip() + " |" for cell in line) for line in lines]
        table[1] = table[1].replace(" ", "")
        return "\n\n" + "\n".join(table) + "\n\n"
    return f"{value:,}" if isinstance(value, int) else str(value)


def filled(text: str, folder: pathlib.Path = NUMBERS) -> str:
    """Return a page with its places filled."""
    return PLACE.sub(lambda place: f"<!--={place['key']}-->{render(lookup(place['key'], folder))}<!--=-->", text)


def faults() -> Iterator[str]:
    """Yield the pages that differ from the numbers, a line each, and the numbers of no page."""
    used = set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        used |= {place["key"].partition("/")[0] for place in PLACE.finditer(text)}
        try:
            if filled(text) != text:
                yield f"{page.relative_to(ROOT)}: differs from docs/numbers; run python -m tools.numbers"
        except KeyError as error:
            yield f"{page.relative_to(ROOT)}: {error.args[0]}"
        for line in re.findall(r"^ {0,3}<!--=[^>]+-->[^\n]+", text, re.MULTILINE):
            yield f"{page.relative_to(ROOT)}: a paragraph ends before a line that begins with a number: {line[:60]}"
    yield from (f"docs/numbers/{path.name}: on no page" for path in NUMBERS.glob("*.json") if path.stem not in used)


def command_line(text: str) -> argparse.ArgumentParser:
    """Return the command line of a module that measures, with `--json`, described by its docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", default="", help="also write the tables, as in docs/numbers")
    return parser


class Results:
    """Tables and single values that are printed and written one after another, a table row by row.

    Args:
        path: The file of `--json`; empty to print only.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.values: dict[str, Any] = {}

    def value(self, key: str, value: Any) -> None:
        """Add a single value."""
        print(f"{key}: {value}", flush=True)
        self._add(key, value)

    def _add(self, key: str, value: Any) -> None:
        self.values[key] = value
        if self.path:
            write(self.path, self.values)

    def table(self, key: str, *columns: str) -> Callable[..., None]:
        """Begin a table, and return the function that adds the cells of a row."""
        rows: list[list[str]] = []
        print(f"\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)

        def add(*cells: object) -> None:
            rows.append([str(cell) for cell in cells])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
            self._add(key, {"columns": list(columns), "rows": rows})

        return add


def write(path: str | os.PathLike, values: dict) -> None:
    """Write values as JSON, with the command, the machine, the versions and the date."""
    spec, packages = sys.modules["__main__"].__spec__, ("tfdml", "keras", "tensorflow", "numpy")
    words = [word for word in sys.argv[1:] if not word.startswith("--json")]
    about = {
        "command": shlex.join(["python", "-m", spec.name if spec else sys.argv[0], *words]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages),
        "date": datetime.date.today().isoformat(),
    }
    text = json.dumps({**about, **values}, indent=1, ensure_ascii=False)
    # A row of a table is a line.
    text = re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda found: "[" + re.sub(r"\n\s+", " ", found[1]) + "]", text)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        print("\n".join(differ := list(faults())))
        sys.exit(bool(differ))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
