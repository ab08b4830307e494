"""Notebooks, the tutorial for keras.io and the page that adds parts of one's own run, each in a
process of its own, and end with what they promise."""

import json
import os
import pathlib
import re

import keras
import numpy as np
import pytest

from tests.cli import commands
from tests.docs.pages import ROOT, blocks, command_lines
from tests.support.processes import run_python

GAIN = "assert recall > recall_before + 0.1"
TUTORIAL = """
assert (len(x_seen), len(x_unseen)) == (500, 750)
assert after > 0.5
assert right > 0.1
assert np.mean(answers == "truck") >= 0
"""
OWN = """
import json
again = keras.saving.load_model("learner.keras")
assert type(again.objectives[0].loss) is type(loss)
assert "--import=my_own" in open("runs/shop/flags.txt").read()
metrics = json.load(open("metrics.json"))
assert 0 <= metrics.get("metrics", metrics)["found@5"] <= 1
"""
# By document and backend, what holds at its end.
ENDS = {
    ("notebooks/glyphs.ipynb", "tensorflow"): GAIN,
    ("notebooks/plain_keras.ipynb", "jax"): GAIN,
    ("notebooks/plain_keras.ipynb", "torch"): GAIN,
    # Its last command compares two models, whatever these have learned in an epoch.
    ("notebooks/shop.ipynb", "tensorflow"): "assert 'new-old less old-old' in printed",
    ("keras_io/metric_learning_with_tfdml.py", "tensorflow"): TUTORIAL,
    ("adding_your_own.md", "tensorflow"): OWN,
}
# The first epochs of a long training show the gain; the shop is about its steps.
SHORTER = {"epochs=15": "epochs=3", "epochs=10": "epochs=2", "range(140)": "range(40)"}
TUTORIALS = sorted((ROOT / "docs" / "keras_io").glob("*.py"))
# As scripts/tutobooks.py of keras-io reads it.
HEADER = r'"""\nTitle: .+\nAuthors?: .+\nDate created: {date}\nLast modified: {date}\n'
HEADER += r'Description: [A-Z].{{0,98}}\.\nAccelerator: (GPU|TPU|None)\n"""\n'


def cells_of(path):
    """Return the cells of code and of commands of a document; the first of a page is written as the
    module that it says it is."""
    if path.suffix == ".md":
        module, *cells = [b.code for b in blocks(path) if b.language in ("python", "bash")]
        pathlib.Path("my_own.py").write_text(module)
        return cells
    if path.suffix == ".py":
        return [path.read_text()]
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def made_images(count, seed):
    """As `keras.datasets.cifar10` gives them: noise around the color of each class."""
    labels = np.arange(count) % 10
    colors = np.random.default_rng(0).integers(30, 220, (10, 4, 4, 3))
    noise = np.random.default_rng(seed).normal(0, 25, (count, 32, 32, 3))
    images = colors[labels].repeat(8, axis=1).repeat(8, axis=2) + noise
    return np.clip(images, 0, 255).astype(np.uint8), labels[:, None].astype(np.uint8)


def run(name, backend):
    """Run a document in this process and folder."""
    keras.datasets.cifar10.load_data = lambda: (made_images(1000, 1), made_images(1500, 2))
    images, labels = made_images(96, 3)
    np.savez("shop.npz", images=images, labels=labels[:, 0])
    names = {}
    for number, cell in enumerate(cells_of(ROOT / "docs" / name)):
        for text, shorter in SHORTER.items():
            cell = cell.replace(text, shorter)
        lines = command_lines(os.path.expandvars(cell.replace("!tfdml", "tfdml")))
        for words in lines:
            names["printed"] = commands.printed(*words)
        if not lines:
            exec(compile(cell, f"{name}, cell {number}", "exec"), names)  # documents are ours
    exec(ENDS[name, backend], names)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), ENDS)
def test_a_document_runs(name, backend, tmp_path):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    # Threads of PyTorch that wait for each other take many times as long on a machine that does
    # other work. A training runs for longer than it compiles.
    variables |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    variables["PWD"] = str(tmp_path)
    code = f"from tests.docs import test_documents; test_documents.run{name, backend}"
    run_python("-c", code, environment=variables, cwd=tmp_path)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_the_format_of_keras_io(path):
    text = path.read_text()
    assert re.match(HEADER.format(date=r"\d{4}/[01]\d/[0-3]\d"), text)
    # Each text stands between two lines of quotes, one of which may name a shell cell.
    quotes = re.findall(r'^.*""".*$', text, re.MULTILINE)
    assert {*quotes} == {'"""', '"""shell'}
    assert len(quotes) % 2 == 0
