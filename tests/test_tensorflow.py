"""Where TensorFlow is imported below `training`: WITH_TENSORFLOW names the modules."""

import ast

import pytest

from tests.experiments import ROOT

# What is written with keras.ops, from the ground up.
PORTABLE = (
    "workarounds",
    "pairwise",
    "replicas",
    "kernels",
    "mining",
    "layers",
    "losses",
    "objectives",
    "backbones",
    "models",
)
# These have a path for TensorFlow alone.
WITH_TENSORFLOW = {
    "pairwise",
    "replicas",
    "layers/moments",
    "losses/classification",
    "workarounds",
    *(f"models/{name}" for name in ("chunks", "inference", "learner")),
}
# Of TensorFlow alone, and so imported in functions.
TENSORFLOW_ONLY = {"models/chunks"}
MODULES = sorted(
    path
    for name in PORTABLE
    for path in [ROOT / "tfdml" / f"{name}.py", *(ROOT / "tfdml" / name).rglob("*.py")]
    if path.exists()
)


def imports_of(text):
    """(whether in a function, name) of every module that a text imports."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((id(node) in inner, name) for name in names)


def name_of(path):
    """`models/learner` for tfdml/models/learner.py."""
    return path.relative_to(ROOT / "tfdml").with_suffix("").as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_tensorflow_is_imported_where_it_may_be_and_in_functions_alone(path):
    imports = list(imports_of(path.read_text()))
    found = [inside for inside, name in imports if name.partition(".")[0] == "tensorflow"]
    if name_of(path) not in TENSORFLOW_ONLY:
        only = {f"tfdml.{name.replace('/', '.')}" for name in TENSORFLOW_ONLY}
        inner = found + [inside for inside, name in imports if name in only]
        assert all(inner), "on JAX the import of the package would bring TensorFlow"
    assert bool(found) == (name_of(path) in WITH_TENSORFLOW)
