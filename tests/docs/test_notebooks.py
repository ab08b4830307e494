"""The notebooks run, one of them on every backend of Keras."""

import json

import pytest

from tests.docs.test_names import NOTEBOOKS, ROOT
from tests.support.processes import run_python


def run_notebook(path):
    """Run the cells of a notebook on the backend of this process."""
    import matplotlib

    matplotlib.use("agg")
    names = {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            # The first of the longest training show the gain.
            code = "".join(cell["source"]).replace("epochs=15", "epochs=4")
            exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
    assert names["recall"] > names["recall_before"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_notebook(path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_notebook_on_plain_keras_runs_on_other_backends(backend, tmp_path):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    (number,) = (i for i, path in enumerate(NOTEBOOKS) if path.stem == "plain_keras")
    code = f"from tests.docs import test_notebooks as t; t.run_notebook(t.NOTEBOOKS[{number}])"
    # Threads of PyTorch that wait for each other take many times as long on a machine that does
    # other work.
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    run_python("-c", code, environment={**variables, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
