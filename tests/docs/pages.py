"""The Markdown pages: their fenced blocks, and the command lines in them."""

from __future__ import annotations

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
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(rf"tfdml ({'|'.join(STAGES)})\b")


class Block(NamedTuple):
    """A fenced block of a Markdown page, below a heading of the second level."""

    page: str
    heading: str
    line: int
    language: str
    code: str

    @property
    def runs(self) -> bool:
        """Whether it can run in a test; else its first line says what it needs."""
        return not self.code.startswith("# Needs ")


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


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each `tfdml ...` of a text, without what is said of it after three spaces
    or `#`."""
    lines = [line.strip() for line in joined_lines(text)]
    commands = [re.split(r"\s{3,}|\s#\s", line)[0] for line in lines if _COMMAND.match(line)]
    return [shlex.split(command)[1:] for command in commands]
