"""What `import tfdml` offers to people, editors and type checkers."""

import ast
import pathlib

import pytest

import tfdml
from tests.processes import ROOT, run_python


def test_dir_offers_every_public_name():
    assert {"Index", "UserError", "__version__", "data", "losses", "register"} <= set(dir(tfdml))
    assert dir(tfdml) == sorted(dir(tfdml))


def test_importing_the_package_imports_no_part_of_it():
    code = "import sys, tfdml; dir(tfdml); print({'keras', 'numpy', 'tensorflow', 'tfdml.models'} & set(sys.modules))"
    assert run_python("-c", code).stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["keras, tfdml", "tfdml, tfdml.models, keras"])
def test_keras_finds_the_classes_of_a_saved_model(words):
    code = f"import {words}; print(keras.saving.get_registered_object('tfdml>Embedder'), tfdml.losses.TripletLoss)"
    assert run_python("-c", code).stdout.startswith("<class 'tfdml.models.embedder.Embedder'> <class 'tfdml.losses")


def test_nothing_is_unpickled():
    """A pickle runs code: none is read, by whatever name; `torch.load` reads arrays alone with `weights_only`."""
    readers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    root, faults = pathlib.Path(tfdml.__file__).parents[1], []
    for path in (path for folder in ("tfdml", "tools") for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, arguments = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            if (
                called.split(".")[0] in readers
                or called.endswith(("Unpickler", "read_pickle"))
                or arguments.get("allow_pickle", "False") != "False"
                or (called == "torch.load" and arguments.get("weights_only") != "True")
            ):
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not faults


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tfdml' has no attribute 'dta'"):
        _ = tfdml.dta


TYPED = """import numpy as np
import tfdml

train = tfdml.data.load("glyphs")
reveal_type(train)
own = tfdml.data.ImageDataset(images=np.zeros((1, 8, 8, 3), np.uint8), labels=[0])
tfdml.data.laod("glyphs")
tfdml.evaluation.evaluate_retreival
tfdml.dta
train.class_name
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_packages_of_first_use(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    command = ["-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", "user.py"]
    done = run_python(*command, cwd=tmp_path, status=1)
    assert 'user.py:5: note: Revealed type is "tfdml.data.dataset.ImageDataset"' in done.stdout
    errors = [line.partition(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == ["user.py:7", "user.py:8", "user.py:9", "user.py:10"], done.stdout


def test_all_defaults_of_distance_agree():
    """A threshold of one function is one of every other; only losses have the distances of their papers."""
    defaults = {}
    for path in sorted((ROOT / "tfdml").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "losses" not in path.parts:
                names = node.args.args[len(node.args.args) - len(node.args.defaults) :] + node.args.kwonlyargs
                for name, default in zip(names, node.args.defaults + node.args.kw_defaults, strict=True):
                    if name.arg == "distance" and isinstance(default, ast.Constant) and default.value is not None:
                        defaults[f"{path.stem}.{node.name}:{node.lineno}"] = default.value
    assert len(defaults) > 20
    assert set(defaults.values()) == {"euclidean"}, defaults
