"""The Python of README and of every page runs, block after block, on small stand-ins for what it
names."""

import ast
import itertools
import pkgutil
import re
import types

import pytest

from tests.docs import files, page_stand_ins, stand_ins
from tests.docs.examples import PAGES, ROOT, blocks

PYTHON = {
    page.relative_to(ROOT).as_posix(): [
        block for block in blocks(page) if block.language == "python"
    ]
    for page in PAGES
}
# test_adding_your_own.py runs the one that writes a module.
WITH_PYTHON = [
    name for name, found in PYTHON.items() if found and name != "docs/adding_your_own.md"
]


@pytest.fixture(scope="module")
def names():
    own = stand_ins.names()
    return own | page_stand_ins.names_of_pages(own)


@pytest.fixture(scope="module")
def folder(names, tmp_path_factory):
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("embeddings", "runs"):
        (folder / name).mkdir()
    files.write_photos(folder / "photos")
    files.write_photo(folder / "car.jpg")
    for name in ("cars", "cars_am", "cars_jrd"):
        files.write_run(folder / "runs" / name)
    files.write_embeddings(folder / "embeddings" / "cars", names)
    page_stand_ins.write_weights(folder)
    page_stand_ins.write_retriever(folder, names["embedder"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_of_pages(page, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    shared = dict(names)
    data_sets = page_stand_ins.data_sets(names["train"], names["test"])
    with stand_ins.short_training(), stand_ins.untrained_exports(), data_sets:
        for block in PYTHON[page]:
            if not block.skip:
                # Blank lines before it, so that a traceback has the line of the page.
                code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
                exec(code, shared)  # the pages are ours


def test_python_of_pages_compiles():
    for found in PYTHON.values():
        for block in found:
            compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")


def test_names_of_tfdml_in_the_text_exist():
    for page in PAGES:
        for name in sorted(set(re.findall(r"\btfdml(?:\.[A-Za-z_]\w*)+", page.read_text()))):
            pkgutil.resolve_name(name)


def _imports(tree):
    """What a block imports of tfdml: the full name by the name that the block gives it."""
    for node in ast.walk(tree):
        for alias in getattr(node, "names", ()):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                yield alias.asname or alias.name, alias.name


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_what_python_of_pages_imports_of_tfdml_exists(page):
    """Without running it, as slow tests do: names that have moved, and those of modules."""
    trees = [ast.parse(block.code) for block in PYTHON[page]]
    imports = dict(itertools.chain.from_iterable(map(_imports, trees)))
    ours = {name: full for name, full in imports.items() if full.partition(".")[0] == "tfdml"}
    found = {name: pkgutil.resolve_name(full) for name, full in ours.items()}
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = found.get(node.value.id)
            if isinstance(module, types.ModuleType):
                assert hasattr(module, node.attr), f"{module.__name__}.{node.attr}"
