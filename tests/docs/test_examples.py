"""Every example of a docstring does what it says, and the Python of README and of every page runs,
block after block, in a small world of what it names."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from decimal import Decimal

import pytest

from tests.docs import world
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
# test_documents.py runs the page that writes a module.
PYTHON = {
    name_of(page): found
    for page in PAGES
    if (found := blocks(page, "python")) and page.stem != "adding_your_own"
}
# A number that is no integer, with the spaces that NumPy puts behind it.
_FRACTION = re.compile(r"[-+]?\d+(?:\.\d*(?:e[-+]?\d+)?|e[-+]?\d+) *")


class RoundedNumbers(doctest.OutputChecker):
    """Fractions agree to the digits that the example prints; all other text exactly."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether `got` is what the example says."""
        numbers = iter(_FRACTION.findall(want))

        def as_printed(match: re.Match) -> str:
            number = next(numbers, "")
            if number and _agree(number, match[0]):
                return number
            return match[0]

        return super().check_output(want, _FRACTION.sub(as_printed, got), optionflags)


def _agree(want: str, got: str) -> bool:
    """Whether one is the other, rounded, but for the last digits of float32, which depend on the
    processor. NumPy prints `2.` where all digits are meant."""
    exponent = Decimal(want).as_tuple().exponent
    half = 0.51 * 10.0**exponent if exponent < 0 else 0
    return abs(float(want) - float(got)) <= half + 1e-6 * abs(float(want))


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW)) for name in MODULES],
)
def test_docstring_examples(module, tmp_path, monkeypatch):
    lines = re.findall(r"^ *(?:>>>|\.\.\.) .*", MODULES[module].read_text(), re.MULTILINE)
    world.write_named("\n".join(lines), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # what an example allows is not for other tests
    name = f"tfdml.{module}".removesuffix(".__init__")
    imported, report = importlib.import_module(name), []
    given, flags = (
        {**world.names(), **vars(imported)},
        doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    with world.small_world():
        for example in doctest.DocTestFinder().find(imported, name, globs=given):
            runner = doctest.DocTestRunner(RoundedNumbers(), verbose=False, optionflags=flags)
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_python_of_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world.write_named("\n".join(block.code for block in PYTHON[page]), tmp_path)
    shared = dict(world.names())
    with world.small_world():
        for block in PYTHON[page]:
            if block.runs:
                exec(compiled(block), shared)  # the pages are ours
