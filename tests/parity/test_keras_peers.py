"""Losses of TensorFlow Similarity and TensorFlow Addons and ours: values and gradients, live. docs/parity.md."""

import dataclasses
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.mathematics import value_and_gradients
from tests.parity.keras_cases import ADDONS, LACKING, SIMILARITY, WHOLE, batches

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATCHES = batches()


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: its module, what is compared, the Python of its environment, and its environment variables."""

    module: str
    cases: dict
    python: pathlib.Path
    environment: dict

    def run(self, script, *arguments, timeout=600):
        """Run a script there."""
        command = [str(self.python), str(ROOT / "tests" / "parity" / script), *map(str, arguments)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **self.environment}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert result.returncode == 0, result.stderr[-3000:]


def python_of(variable, folder):
    return pathlib.Path(os.environ.get(variable, ROOT / folder / "bin" / "python"))


PEERS = {
    "similarity": Peer(
        "tensorflow_similarity",
        SIMILARITY,
        python_of("TFDML_TFSIM_PYTHON", ".venv-tfsim"),
        {"TF_USE_LEGACY_KERAS": "1"},
    ),
    "addons": Peer("tensorflow_addons", ADDONS, python_of("TFDML_TFA_PYTHON", ".venv-tfa"), {}),
}
pytestmark = pytest.mark.slow
NAMES = [(peer, name) for peer, found in PEERS.items() for name in found.cases]
LABELED = [(peer, name) for peer, name in NAMES if PEERS[peer].cases[name].form == "labels"]


def needed(peer):
    found = PEERS[peer]
    if not found.python.is_file():
        target = found.python.parents[1].name.removeprefix(".venv-")
        pytest.skip(f"no {found.module} here: make parity-{target}")
    return found


@pytest.fixture(scope="module")
def values_of(tmp_path_factory):
    """(peer, case, batch) -> what is found there; one process a library."""
    known = {}

    def values(peer, name, batch):
        library = needed(peer)
        if peer not in known:
            folder = tmp_path_factory.mktemp(peer)
            arrays = {f"{key}|labels": np.asarray(labels, "int64") for key, (labels, _) in BATCHES.items()}
            arrays |= {f"{key}|x": np.asarray(x, "float32") for key, (_, x) in BATCHES.items()}
            np.savez(folder / "batches.npz", **arrays)
            (folder / "cases.json").write_text(json.dumps([case.there() for case in library.cases.values()]))
            files = [folder / file for file in ("cases.json", "batches.npz", "values.npz")]
            library.run("keras_values.py", library.module, *files)
            known[peer] = dict(np.load(files[2]))
        start = f"{list(library.cases).index(name)}|{batch}|"
        found = {key.removeprefix(start): value for key, value in known[peer].items() if key.startswith(start)}
        assert "value" in found, found
        return found["value"], found["gradient"]

    return values


def ours(case, batch):
    labels, x = BATCHES[batch]
    value, (gradient,) = value_and_gradients(lambda tensor: case.ours(np.asarray(labels), tensor), x)
    return value, gradient


def assert_agree(actual, expected, what):
    """Both compute in float32."""
    allowed = 2e-5 * max(1e-3, float(np.max(np.abs(expected))))
    assert np.max(np.abs(actual - expected)) <= allowed, f"{what}\n{actual}\n{expected}"


@pytest.mark.parametrize(("peer", "name"), NAMES)
def test_a_loss_equals_theirs(peer, name, values_of):
    case = PEERS[peer].cases[name]
    for batch in case.batches:
        (value, gradient), (expected, slope) = ours(case, batch), values_of(peer, name, batch)
        assert_agree(value, expected, batch)
        if case.on_the_sphere:
            x = BATCHES[batch][1]
            slope = slope - x * np.sum(x * slope, axis=1, keepdims=True)
        assert_agree(gradient, slope, batch)
    # Of equal and zero vectors the value: where distances tie, the choice of one for the gradient is each library's.
    for batch in WHOLE if case.form == "labels" else ():
        if (batch, name) == ("a zero vector", "soft nearest neighbor cosine"):
            continue  # there the zero vector is at distance 1 from all, here it has no direction
        assert_agree(ours(case, batch)[0], values_of(peer, name, batch)[0], batch)


@pytest.mark.parametrize(("peer", "name"), LABELED)
def test_anchors_that_lack_a_positive_or_a_negative_cost_nothing_here(peer, name):
    assert [float(ours(PEERS[peer].cases[name], batch)[0]) for batch in LACKING] == [0.0] * 3
