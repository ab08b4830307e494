"""The Markdown pages: their fenced blocks, and the command lines in them."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
from typing import NamedTuple

from tfdml.cli import STAGES

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "export/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Blocks that cannot run in a test: page, how the block begins, and why.
SKIPPED = {
    ("docs/backbones.md", "import keras_hub"): "fetches a preset",
    ("docs/migrating.md", "specs ="): "needs TensorFlow Similarity, a sampler and images",
    ("docs/protocols.md", "import csv"): "needs the data set",
    ("docs/training.md", "import dataclasses"): "trains twenty runs, and needs Optuna",
}
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block of a Markdown page, below a heading of the second level."""

    page: str
    heading: str
    line: int
    language: str
    code: str

    @property
    def runs(self) -> bool:
        """Whether it can run in a test."""
        return not any(self.page == page and self.code.startswith(start) for page, start in SKIPPED)


def name_of(page: pathlib.Path) -> str:
    """Return the path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: pathlib.Path, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, or those of a language."""
    text, result = page.read_text(), []
    for match in FENCE.finditer(text):
        before, indent = text[: match.start()], len(match["indent"])
        heading = before.rpartition("\n## ")[2].partition("\n")[0]
        code = "\n".join(line[indent:] for line in match["body"].split("\n"))
        line = before.count("\n") + 2
        if language in (None, match["language"]):
            result.append(Block(name_of(page), heading, line, match["language"], code))
    return result


def joined_lines(text: str) -> list[str]:
    """Return the lines of a block, those that end with a backslash joined with the next."""
    return re.sub(r"\s*\\\n\s*", " ", text).splitlines()


def command_of(line: str) -> str:
    """Return a command without what is said of it after three spaces or `#`."""
    return re.split(r"\s{3,}|\s#\s", line.strip())[0]


def command_lines() -> list[tuple[str, str, list[str], bool]]:
    """Return (where, subcommand, flags, whether it is whole) of each `tfdml ...` of the pages, and
    of the commands' own help."""
    texts = [(f"{b.page}:{b.line}", b.code) for page in PAGES for b in blocks(page)]
    for path in sorted((ROOT / "tfdml" / "cli").glob("*.py")):
        texts.append((path.name, ast.get_docstring(ast.parse(path.read_text())) or ""))
    result = []
    for where, text in texts:
        for line in joined_lines(text):
            if re.match(rf"\s*tfdml ({'|'.join(STAGES)})\b", line):
                _, name, *words = shlex.split(command_of(line))
                words = [word for word in words if not re.fullmatch(r"(--\w+=)?\.\.\.", word)]
                result.append((where, name, words, "..." not in line))
    return result
