"""The examples of docstrings and of Markdown pages, found and run."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import re
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "export/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "tfdml").rglob("*.py")
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?![\w])")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
# Blocks that cannot run in a test: page, how the block begins, and why.
SKIPPED = {
    ("docs/backbones.md", "import keras_hub"): "fetches a preset",
    ("docs/migrating.md", "specs ="): "needs TensorFlow Similarity, a sampler and images",
    ("docs/protocols.md", "import csv"): "needs the data set",
    ("docs/protocols.md", "tfdml evaluate --model=models/"): "needs the data set",
    ("docs/training.md", "import dataclasses"): "trains twenty runs, and needs Optuna",
}


class NumberChecker(doctest.OutputChecker):
    """Numbers agree to the digits that the example prints; all other text, but for white space,
    exactly."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether `got` is what the example says."""
        if super().check_output(want, got, optionflags | doctest.NORMALIZE_WHITESPACE):
            return True
        wanted, gotten = _NUMBER.findall(want), _NUMBER.findall(got)
        words = [_words(text) for text in (want, got)]
        return (
            words[0] == words[1]
            and len(wanted) == len(gotten)
            and all(_agree(*pair) for pair in zip(wanted, gotten, strict=True))
        )


def _words(text: str) -> str:
    return "".join(_NUMBER.sub("#", text).split())


def _agree(want: str, got: str) -> bool:
    difference = abs(float(want) - float(got))
    if "." not in want and "e" not in want:
        return difference == 0
    if want.endswith("."):  # NumPy leaves out zeros: all digits of float32 are meant
        return difference <= 1e-6 * max(1.0, abs(float(want)))
    # Fewer digits are a rounded value, but for the last digits of float32, which depend on the
    # processor.
    unit = 10.0 ** -_digits(want)
    return difference <= (0.51 if _digits(got) > _digits(want) else 1.01) * unit + 1e-6 * abs(
        float(want)
    )


def _digits(number: str) -> int:
    """How many digits after the decimal point a number is printed with."""
    mantissa, _, exponent = number.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def has_examples(module: str) -> bool:
    """Whether a docstring of the module has an example, without importing it."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path.is_file() and ">>>" in path.read_text()


def run_docstrings(module: str, names: dict[str, Any]) -> str:
    """What the examples of a module's docstrings report of failures; empty where all is well.

    Args:
        module: Its dotted name.
        names: What the examples may use besides the module's own names.
    """
    imported, report = importlib.import_module(module), list[str]()
    for example in doctest.DocTestFinder().find(
        imported, module, globs={**names, **vars(imported)}
    ):
        runner = doctest.DocTestRunner(
            checker=NumberChecker(), verbose=False, optionflags=doctest.ELLIPSIS
        )
        runner.run(example, out=report.append, clear_globs=False)
    return "".join(report)


class Block(NamedTuple):
    """A fenced block of a Markdown page."""

    page: pathlib.Path
    line: int
    language: str
    code: str
    skip: str


def blocks(page: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page; those of `SKIPPED` have a reason."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    result = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["body"].split("\n"))
        skip = next(
            (why for (of, start), why in SKIPPED.items() if of == name and code.startswith(start)),
            "",
        )
        line = text.count("\n", 0, match.start()) + 2
        result.append(Block(page, line, match["language"], code, skip))
    return result
