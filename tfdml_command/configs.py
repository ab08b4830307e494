"""`tfdml configs`: the flag files that come with the package."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

USAGE = """List the flag files that come with tfdml, with the number that the paper reports.

  tfdml configs                       all
  tfdml configs sop small             those with one of the words in their name
  tfdml configs sop_jrd               with a single one, print it too

A command takes them by name from any folder: tfdml train --flagfile=configs/sop_jrd.flags ..."""


def folder() -> Path:
    """Return the folder of the flag files: in the installed package, or next to it in a checkout."""
    spec = importlib.util.find_spec("tfdml")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def shipped(path: str) -> Path | None:
    """Return the file of the package that a path such as `configs/sop_jrd.flags` names; None where there is none."""
    parts = Path(path).parts
    file = folder().joinpath(*parts[1:])
    return file if parts[:1] == ("configs",) and ".." not in parts and file.is_file() else None


def rows() -> list[dict[str, str]]:
    """Return name, data set, the paper's Recall@1, expected time and method of each file; empty where there is none."""
    entries = []
    for path in sorted(folder().rglob("*.flags"), key=lambda path: (len(path.parts), path)):
        lines = list(_lines(path))
        comment = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        paper = re.search(r"Paper: .*?Recall@1 ([\d.]*\d)", comment)
        time = re.search(r"Time: (.*?)\.(?: |$)", comment)
        entries.append(
            {
                "flag file": f"configs/{path.relative_to(folder()).as_posix()}",
                "data set": _value("dataset", lines),
                "R@1 of the paper": paper[1] if paper else "",
                "time": time[1] if time else "",
                "method": comment.partition(". ")[0].rpartition(" on ")[0].rstrip(","),
            }
        )
    return entries


def _value(flag: str, lines: Sequence[str]) -> str:
    return ["any", *(line.partition("=")[2] for line in lines if line.startswith(f"--{flag}="))][-1]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; those of a file that it names come after its own comments."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("--flagfile="):
            yield from (inner for inner in _lines(path.parent / line.partition("=")[2]) if inner.startswith("--"))
        else:
            yield line


def main(words: Sequence[str]) -> int:
    """Print the files whose names hold one of the words, and the only one itself; the exit status."""
    if {"--help", "-h"} & set(words):
        print(USAGE)
        return 0
    chosen = [row for row in rows() if not words or any(word in row["flag file"] for word in words)]
    if not chosen:
        print(f"configs: error: no flag file has {' or '.join(words)} in its name", file=sys.stderr)
        return 2
    titles = {name: name for name in chosen[0]}
    widths = {name: max(len(row[name]) for row in [titles, *chosen]) for name in titles}
    for row in [titles, *chosen]:
        print("  ".join(f"{row[name]:<{widths[name]}}" for name in titles).rstrip())
    if len(chosen) == 1:
        print("\n" + (folder().parent / chosen[0]["flag file"]).read_text(encoding="utf-8"), end="")
    return 0
