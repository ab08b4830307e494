"""Measured numbers: benchmarks write them to `docs/numbers/NAME.json`, the only source of each.

    python -m benchmarks.losses --json=docs/numbers/losses.json    measure again
    python -m tools.numbers                                        write the pages of results

Where a command no longer exists, `commit` names the last commit that has it.

A page of results is `benchmarks/pages/NAME.md` with each `{{NAME/KEY}}` replaced. A key leads
through objects by name, and through a table by the first cell of a row and the name of a column:
`training/table/MAP@R/tfdml`.
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
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUMBERS = ROOT / "docs" / "numbers"
TEMPLATES = ROOT / "benchmarks" / "pages"
KEY = re.compile(r"\{\{([^{}]+)\}\}")


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
            value = {row[0]: dict(zip(value["columns"], row, strict=True)) for row in value["rows"]}
        if not isinstance(value, dict) or part not in value:
            raise KeyError(f"{key}: no {part!r}")
        value = value[part]
    return value


def render(value: Any) -> str:
    """Return a value as Markdown: a number with separators, a table, or text as it is."""
    if isinstance(value, dict):
        lines = [value["columns"], ["---"] * len(value["columns"]), *value["rows"]]
        table = [
            "|" + "".join(f" {render(cell)}".rstrip() + " |" for cell in line) for line in lines
        ]
        table[1] = table[1].replace(" ", "")
        return "\n".join(table)
    return f"{value:,}" if isinstance(value, int) else str(value)


def page(template: pathlib.Path) -> str:
    """Return the text of a page of results."""
    return KEY.sub(lambda match: render(lookup(match[1])), template.read_text(encoding="utf-8"))


def command_line(text: str) -> argparse.ArgumentParser:
    """Return the command line of a module that measures, with `--json`, described by its
    docstring."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", metavar="FILE", default="", help="also write the tables, as in docs/numbers"
    )
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
    text = re.sub(
        r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda row: "[" + re.sub(r"\n\s+", " ", row[1]) + "]", text
    )
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for source in sorted(TEMPLATES.glob("*.md")):
        (ROOT / "docs" / source.name).write_text(page(source), encoding="utf-8")
