"""Losses of TensorFlow Similarity and TensorFlow Addons and ours: values and gradients, live.
docs/parity.md."""

import dataclasses
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.parity.keras_cases import ADDONS, LACKING, SIMILARITY, WHOLE, batches
from tests.support.mathematics import value_and_gradients
from tfdml import losses, mining

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATCHES = batches()


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: its module, what is compared, the Python of its environment, and its environment
    variables."""

    module: str
    cases: dict
    python: pathlib.Path
    environment: dict

    def run(self, script, *arguments, timeout=600):
        """Run a script there."""
        command = [str(self.python), str(ROOT / "tests" / "parity" / script), *map(str, arguments)]
        # Flags of XLA that a version does not know end its process.
        nothing = {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": ""}
        environment = {**os.environ, **nothing, **self.environment}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
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
EQUAL = [(peer, name) for peer, name in NAMES if PEERS[peer].cases[name].ours is not None]
LABELED = [(peer, name) for peer, name in EQUAL if PEERS[peer].cases[name].form == "labels"]


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
            arrays = {
                f"{key}|labels": np.asarray(labels, "int64") for key, (labels, _) in BATCHES.items()
            }
            arrays |= {f"{key}|x": np.asarray(x, "float32") for key, (_, x) in BATCHES.items()}
            np.savez(folder / "batches.npz", **arrays)
            (folder / "cases.json").write_text(
                json.dumps([case.there() for case in library.cases.values()])
            )
            files = [folder / file for file in ("cases.json", "batches.npz", "values.npz")]
            library.run("keras_values.py", library.module, *files)
            known[peer] = dict(np.load(files[2]))
        start = f"{list(library.cases).index(name)}|{batch}|"
        found = {
            key.removeprefix(start): value
            for key, value in known[peer].items()
            if key.startswith(start)
        }
        assert "value" in found, found
        return found["value"], found["gradient"]

    return values


def ours(case, batch):
    labels, x = BATCHES[batch]
    value, (gradient,) = value_and_gradients(
        lambda tensor: case.ours(np.asarray(labels), tensor), x
    )
    return value, gradient


def assert_agree(actual, expected, what):
    """Both compute in float32."""
    allowed = 2e-5 * max(1e-3, float(np.max(np.abs(expected))))
    assert np.max(np.abs(actual - expected)) <= allowed, f"{what}\n{actual}\n{expected}"


@pytest.mark.parametrize(("peer", "name"), EQUAL)
def test_a_loss_equals_theirs(peer, name, values_of):
    case = PEERS[peer].cases[name]
    for batch in case.batches:
        (value, gradient), (expected, slope) = ours(case, batch), values_of(peer, name, batch)
        assert_agree(value, expected, batch)
        if case.on_the_sphere:
            x = BATCHES[batch][1]
            slope = slope - x * np.sum(x * slope, axis=1, keepdims=True)
        assert_agree(gradient, slope, batch)
    # Of equal and zero vectors the value: where distances tie, the choice of one for the gradient
    # is each library's.
    for batch in WHOLE if case.form == "labels" else ():
        if (batch, name) == ("a zero vector", "soft nearest neighbor cosine"):
            continue  # there the zero vector is at distance 1 from all, here it has no direction
        assert_agree(ours(case, batch)[0], values_of(peer, name, batch)[0], batch)


# docs/parity.md says what each makes of anchors that lack a positive or a negative; here they cost
# nothing.


@pytest.mark.parametrize(("peer", "name"), LABELED)
def test_anchors_that_lack_a_positive_or_a_negative_cost_nothing_here(peer, name):
    assert [float(ours(PEERS[peer].cases[name], batch)[0]) for batch in LACKING] == [0.0] * 3


# What differs on purpose, by its formula.


def test_semi_hard_of_similarity_falls_back_on_the_furthest_negative(values_of):
    """Ours, by `BatchEasyHardMiner("hard", "semi_hard")`, leaves such an anchor out."""
    seen = []
    for batch in ("unit", "two a class", "real"):
        labels, x = BATCHES[batch]
        unit, same = np.asarray(x, "float64"), labels[:, None] == labels[None, :]
        distances, positives, negatives = (
            1.0 - unit @ unit.T,
            same & ~np.eye(len(labels), dtype=bool),
            ~same,
        )
        expected, fallen = [], []
        for row in range(len(x)):
            furthest = distances[row][positives[row]].max()
            beyond = distances[row][negatives[row] & (distances[row] > furthest)]
            chosen = beyond.min() if beyond.size else distances[row][negatives[row]].max()
            expected.append(max(furthest - chosen + 0.2, 0.0))
            fallen.append(not beyond.size)
        value = values_of("similarity", "semi-hard", batch)[0]
        np.testing.assert_allclose(value, np.mean(expected), rtol=1e-5)
        miner = mining.BatchEasyHardMiner("hard", "semi_hard")
        mine = losses.TripletLoss(0.2, miner, "cosine", average="all")(labels, x)
        kept = np.array(expected)[~np.array(fallen)]
        np.testing.assert_allclose(float(mine), np.mean(kept), rtol=1e-5)
        seen += [any(fallen)]
    assert set(seen) == {True, False}


def test_the_sampler_of_similarity_trains_our_embedder_and_its_indexer_finds_as_ours(tmp_path):
    """In their environment with Keras 3: a run on their sampler's batches, and both indexes on what
    it embeds."""
    library = needed("similarity")
    bridge = dataclasses.replace(
        library, environment={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    bridge.run("similarity_bridge.py", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["recall@1 after"] > found["recall@1 before"] + 0.1
    assert found["neighbors"] == found["expected neighbors"]
    assert found["read back"] is True
