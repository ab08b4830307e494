"""The notebooks run: that on plain Keras on the backends that no other notebook is run on."""

import json
import os
import shlex

import pytest

from tests.cli import commands
from tests.docs.pages import joined_lines
from tests.docs.test_names import NOTEBOOKS, ROOT
from tests.support.processes import run_python

RUNS = [(path.stem, "tensorflow") for path in NOTEBOOKS if path.stem != "plain_keras"]
RUNS += [("plain_keras", "jax"), ("plain_keras", "torch")]
# The first epochs of a long training show the gain; the shop is about its steps.
SHORTER = {"epochs=15": "epochs=3", "epochs=10": "epochs=1", "range(140)": "range(40)"}


def run_notebook(name):
    """Run the cells of a notebook on the backend of this process."""
    import matplotlib

    matplotlib.use("agg")
    names = {}
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    cells = json.loads(path.read_text())["cells"]
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        code = "".join(cell["source"])
        for text, shorter in SHORTER.items():
            code = code.replace(text, shorter)
        if code.startswith("!"):
            for line in joined_lines(os.path.expandvars(code)):
                names["printed"] = commands.printed(*shlex.split(line)[1:])
        else:
            exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
    if name == "shop":
        # The last command compares two models, whatever these have learned in an epoch.
        assert "new-old less old-old" in names["printed"]
    else:
        assert names["recall"] > names["recall_before"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_a_notebook_runs(name, backend, tmp_path):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    code = f"from tests.docs import test_notebooks; test_notebooks.run_notebook({name!r})"
    # Threads of PyTorch that wait for each other take many times as long on a machine that does
    # other work.
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    # A training runs for longer than it compiles.
    variables |= {"PYTHONPATH": str(ROOT), "PWD": str(tmp_path), "XLA_FLAGS": ""}
    run_python("-c", code, environment=variables, cwd=tmp_path)
