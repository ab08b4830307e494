"""Rules of the layout that no linter has: `python -m tools.house`, a part of `make lint`.

- Places that a reader reads twice, which are the `SHAPES` of statements and functions, are refused.
- A name in `GONE` was an entrance of its own, and does not return.
- A folder of the package has at most 12 modules.
- No module changes the meaning of others by a `ContextVar`.

`python -m tools.house --table` prints places, statements and syntax nodes by package.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_IN_A_FOLDER = 12
LARGEST_STATEMENT = 25
LARGEST_FUNCTION = 250

SHAPES = (
    "three or more assigned at once",
    "conditional expression with a comprehension, another one, or and/or in its test",
    "two or more comprehensions in a statement",
    "comprehension with two `for`, or within another",
    "a name for a lambda",
    f"a statement of more than {LARGEST_STATEMENT} nodes",
    "a dict of arguments built by |=",
    f"a function of more than {LARGEST_FUNCTION} nodes",
)

#: Names of entrances that went, and what is in their place.
GONE: dict[str, str] = {
    "EFFECTS": "`requires` of a setting",
    "flag_names": "the flags of a tfdml.cli.command_line.Command",
    "in_vain": "tfdml.options.unmet",
    "sampling_call": "experiment.sampling",
    "head_call": "experiment.head",
    "parse_sum": "tfdml.expressions.Terms.parse",
    "calibrates_on": "Objective.adapts_to, and adapt in the place of calibrate",
    "load_experiment": "tfdml.training.Experiment.of_run",
    "parse_arguments": "tfdml.expressions.Arguments.parse",
    "calibration_of_file": "tfdml.evaluation.calibration.stored_calibration",
    "read_cells": "tfdml.io.tables.read_table",
    "check_composed": "tfdml.names.clean",
    "CentroidClassifier": 'KNNClassifier(per_class="mean")',
    "import connect": "tfdml.retrieval.open_gallery",
    "GalleryDatabase": "tfdml.retrieval.WritableGallery",
    "upsert": "WritableGallery.add",
    "index_embeddings": "WritableGallery.add_embeddings",
    "of_arrays": "RetrievalResults.of_neighbors",
    "SearchResult": "tfdml.retrieval.Neighbors",
    "VectorImages": "the vectors of a tfdml.data.ImageDataset",
    "relation_of": "ImageDataset.relation",
    "readers.tables": "tfdml.data.readers.image_files and splits",
    "_in_database": "tfdml.retrieval.open_gallery",
    "_in_embeddings": "tfdml.retrieval.open_gallery",
    "_in_retriever": "tfdml.retrieval.open_gallery",
}

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_BODIES = ("body", "orelse", "finalbody", "handlers")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """A place that a reader reads twice."""

    path: pathlib.Path
    line: int
    function: str
    shape: str


def count_nodes(node: ast.AST, kinds: tuple[type[ast.AST], ...] = (ast.expr, ast.stmt)) -> int:
    """Count the nodes of some kinds in a syntax tree; expressions and statements by default."""
    return sum(isinstance(part, kinds) for part in ast.walk(node))


def _own_parts(statement: ast.stmt) -> list[ast.AST]:
    """Return a statement, or the head of a compound one."""
    if not isinstance(statement, _COMPOUND):
        return [statement]
    parts: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        values = value if isinstance(value, list) else [value]
        if name not in _BODIES:
            parts += [part for part in values if isinstance(part, ast.AST)]
    return parts


def _is_tangled(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    choices = count_nodes(node, (ast.IfExp,))
    return choices > 1 or bool(
        count_nodes(node, _COMPREHENSIONS) or count_nodes(node.test, (ast.BoolOp,))
    )


def _assignment_shapes(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.AugAssign):
        if isinstance(statement.op, ast.BitOr) and isinstance(statement.value, ast.Dict):
            yield SHAPES[6]
    elif isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(value.elts) > 2:
            yield SHAPES[0]
        if isinstance(value, ast.Lambda):
            yield SHAPES[4]


def statement_shapes(statement: ast.stmt, is_table: bool) -> Iterator[str]:
    """Yield the shapes of a statement, without those of the statements in its body.

    Args:
        statement: The statement.
        is_table: Whether it is a constant of a module, which may be as long as its table.
    """
    parts = _own_parts(statement)
    nodes = [node for part in parts for node in ast.walk(part)]
    comprehensions = [node for node in nodes if isinstance(node, _COMPREHENSIONS)]
    yield from _assignment_shapes(statement)
    if any(_is_tangled(node) for node in nodes):
        yield SHAPES[1]
    if len(comprehensions) > 1:
        yield SHAPES[2]
    for node in comprehensions:
        if len(node.generators) > 1 or count_nodes(node, _COMPREHENSIONS) > 1:
            yield SHAPES[3]
            break
    if not is_table and sum(map(count_nodes, parts)) > LARGEST_STATEMENT:
        yield SHAPES[5]


def places_of(path: pathlib.Path, tree: ast.Module) -> Iterator[Place]:
    """Yield the places of a module."""
    tables = set(map(id, tree.body))

    def visit(node: ast.AST, scope: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
                inner = f"{scope}.{child.name}".lstrip(".")
            elif isinstance(child, ast.stmt) and not _is_text(child):
                for shape in statement_shapes(child, id(child) in tables):
                    yield Place(path, child.lineno, scope, shape)
            if isinstance(child, _FUNCTIONS) and count_nodes(child) > LARGEST_FUNCTION:
                yield Place(path, child.lineno, inner, SHAPES[7])
            yield from visit(child, inner)

    yield from visit(tree, "")


def _is_text(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def package_of(path: pathlib.Path) -> str:
    """Return the package of a module, relative to the root; `.` for modules at the top."""
    return path.parts[1] if len(path.parts) > 2 else "."


class House:
    """The modules of the package, and what breaks the rules in them."""

    def __init__(self, root: pathlib.Path = ROOT):
        paths = sorted((root / "tfdml").rglob("*.py"))
        self.texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.places: list[Place] = []
        for path, tree in self.trees.items():
            self.places += places_of(path, tree)

    def faults(self) -> Iterator[str]:
        """Yield a line for each breach of a rule."""
        for place in self.places:
            yield f"{place.path}:{place.line}: {place.function}: {place.shape}"
        # The top of the package holds what all packages stand on.
        modules = [path for path in self.texts if path.name != "__init__.py"]
        folders = collections.Counter(path.parent for path in modules if len(path.parts) > 2)
        for folder, count in folders.items():
            if count > MOST_IN_A_FOLDER:
                yield f"{folder}: {count} modules; at most {MOST_IN_A_FOLDER}"
        for path, text in self.texts.items():
            if "ContextVar" in text:
                yield f"{path}: no ContextVar; hand over an argument"
            for name, successor in GONE.items():
                if re.search(rf"\b{name}\b", text):
                    yield f"{path}: {name} went; use {successor}"

    def table(self) -> Iterator[str]:
        """Yield a line for each package, and one for all: places, statements and nodes."""
        places = collections.Counter(package_of(place.path) for place in self.places)
        statements: collections.Counter[str] = collections.Counter()
        nodes: collections.Counter[str] = collections.Counter()
        for path, tree in self.trees.items():
            texts = sum(map(_is_text, ast.walk(tree)))
            statements[package_of(path)] += count_nodes(tree, (ast.stmt,)) - texts
            nodes[package_of(path)] += count_nodes(tree)
        yield f"{'package':<12} {'places':>6} {'statements':>10} {'per 1,000':>9} {'nodes':>8}"
        for name in sorted(statements):
            share = 1000 * places[name] / statements[name]
            yield (
                f"{name:<12} {places[name]:>6} {statements[name]:>10,} {share:>9.0f} "
                f"{nodes[name]:>8,}"
            )
        total = statements.total()
        share = 1000 * places.total() / total
        yield f"{'all':<12} {places.total():>6} {total:>10,} {share:>9.0f} {nodes.total():>8,}"


def main(words: list[str]) -> int:
    """Print breaches, or with `--table` what is measured; return the status."""
    house = House()
    if "--table" in words:
        print("\n".join(house.table()))
        return 0
    breaches = list(house.faults())
    print("\n".join(breaches))
    return int(bool(breaches))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
