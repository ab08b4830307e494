"""Every example of a docstring does what it says, and the Python of README and of every page runs,
block after block, on small stand-ins for what it names."""

from __future__ import annotations

import ast
import doctest
import importlib
import re

import pytest

from tests.docs import stand_ins
from tests.docs.pages import PAGES, ROOT, blocks, name_of
from tfdml.registry import VARIABLE

# Packages and modules that train a network, export one, build one of hundreds of layers, start Ray,
# or read thousands of files.
SLOW = ("backbones", "cluster", "embeddings", "export", "models", "report", "training")
SLOW += ("data.pipeline", "data.policies", "data.readers", "objectives.mutual_information")
MODULES = {
    ".".join(path.relative_to(ROOT / "tfdml").with_suffix("").parts): path
    for path in sorted((ROOT / "tfdml").rglob("*.py"))
    if ">>>" in path.read_text()
}
# test_adding_your_own.py runs the page that writes a module.
PYTHON = {
    name_of(page): found
    for page in PAGES
    if (found := blocks(page, "python")) and page.stem != "adding_your_own"
}
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?![\w])")


class NumberChecker(doctest.OutputChecker):
    """Numbers agree to the digits that the example prints; all other text, but for white space,
    exactly."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether `got` is what the example says."""
        if super().check_output(want, got, optionflags | doctest.NORMALIZE_WHITESPACE):
            return True
        numbers = [_NUMBER.findall(text) for text in (want, got)]
        texts = ["".join(_NUMBER.sub("#", text).split()) for text in (want, got)]
        return texts[0] == texts[1] and all(map(_agree, *numbers))


def _agree(want: str, got: str) -> bool:
    difference = abs(float(want) - float(got))
    if "." not in want and "e" not in want:
        return difference == 0
    if want.endswith("."):  # NumPy leaves out zeros: all digits of float32 are meant
        return difference <= 1e-6 * max(1.0, abs(float(want)))
    # Fewer digits are a rounded value, but for the last digits of float32, which depend on the
    # processor.
    unit = 10.0 ** -_digits(want)
    units = 0.51 if _digits(got) > _digits(want) else 1.01
    return difference <= units * unit + 1e-6 * abs(float(want))


def _digits(number: str) -> int:
    """How many digits after the decimal point a number is printed with."""
    mantissa, _, exponent = number.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW)) for name in MODULES],
)
def test_docstring_examples(module, tmp_path, monkeypatch):
    lines = re.findall(r"^ *(?:>>>|\.\.\.) .*", MODULES[module].read_text(), re.MULTILINE)
    stand_ins.write_named("\n".join(lines), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # what an example allows is not for other tests
    name = f"tfdml.{module}".removesuffix(".__init__")
    imported, report = importlib.import_module(name), []
    finder, checker = doctest.DocTestFinder(), NumberChecker()
    given = {**stand_ins.names(), **vars(imported)}
    with stand_ins.small_world():
        for example in finder.find(imported, name, globs=given):
            runner = doctest.DocTestRunner(checker, verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(example, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def compiled(block):
    # Blank lines before it, so that a traceback has the line of the page.
    return compile("\n" * (block.line - 1) + block.code, block.page, "exec")


def test_python_of_pages_compiles():
    for found in PYTHON.values():
        for block in found:
            compiled(block)


def test_the_example_of_readme_is_five_statements():
    body = ast.parse(PYTHON["README.md"][0].code).body
    assert len([line for line in body if not isinstance(line, ast.Import)]) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    stand_ins.write_named(
        "\n".join(block.code for found in PYTHON.values() for block in found), folder
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_python_of_pages(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    shared = dict(stand_ins.names())
    with stand_ins.small_world():
        for block in PYTHON[page]:
            if block.runs:
                exec(compiled(block), shared)  # the pages are ours
