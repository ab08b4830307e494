"""What `import tfdml` offers to people, editors and type checkers."""

import ast
import pathlib

import numpy as np
import pytest

import tfdml
from tests.support.processes import run_python
from tfdml.version import installed


def test_importing_the_package_imports_no_part_of_it():
    code = (
        "import sys, tfdml; print('Index' in dir(tfdml), {'keras', 'numpy', 'tfdml.models'} & "
        "set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "True set()"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["keras, tfdml", "tfdml, tfdml.models, keras"])
def test_keras_finds_the_classes_of_a_saved_model(words):
    code = (
        f"import {words}; print(keras.saving.get_registered_object('tfdml>Embedder'), "
        "tfdml.losses.TripletLoss)"
    )
    assert run_python("-c", code).stdout.startswith(
        "<class 'tfdml.models.embedder.Embedder'> <class 'tfdml.losses"
    )


@pytest.mark.slow
def test_the_mathematics_works_without_what_the_platform_needs():
    assert "trains without PIL" in run_python("-m", "tests.support.mathematics_alone").stdout


def test_versions_are_those_of_the_packages_that_are_installed():
    assert installed(("numpy", "no-such-package")) == {"numpy": np.__version__}


def test_nothing_is_unpickled():
    """A pickle runs code: none is read, by whatever name; `torch.load` reads arrays alone with
    `weights_only`."""
    readers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    root, faults = pathlib.Path(tfdml.__file__).parents[1], []
    for path in (path for folder in ("tfdml", "tools") for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, arguments = (
                ast.unparse(node.func),
                {one.arg: ast.unparse(one.value) for one in node.keywords},
            )
            if (
                called.split(".")[0] in readers
                or called.endswith(("Unpickler", "read_pickle"))
                or arguments.get("allow_pickle", "False") != "False"
                or (called == "torch.load" and arguments.get("weights_only") != "True")
            ):
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not faults
