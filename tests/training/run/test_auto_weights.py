"""Runs whose weights are measured: stopped in the midst of it, begun again, and what they leave behind."""

import json

import numpy as np
import pytest

from tests.training import runs
from tests.training.run.stopping import assert_alike, finished, make_quick, train_until
from tests.training.runs import EPOCHS, STEPS, train
from tfdml.errors import UserError
from tfdml.training import checkpoints

OBJECTIVES = "contrastive + auto(share=0.2, steps=4) * density + auto(steps=4) * gor"
SETTINGS = {"objectives": OBJECTIVES, "checkpoint_steps": 1, "keep_checkpoints": 9}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("runs") / "uninterrupted", **SETTINGS)


def found(folder):
    return json.loads((folder / "result.json").read_text())["auto_weights"]


def history(folder):
    """The weights after each epoch."""
    epochs = [record["train"] for record in runs.records(folder) if record["train"]]
    return [{name: logs[f"{name}_weight"] for name in ("density", "gor")} for logs in epochs]


@pytest.mark.slow
def test_a_run_tells_the_weights_that_it_found(uninterrupted):
    weights = found(uninterrupted)
    assert {name: (of["share"], of["steps"]) for name, of in weights.items()} == {"density": (0.2, 4), "gor": (0.03, 4)}
    last = {name: of["weight"] for name, of in weights.items()}
    assert min(last.values()) > 0
    assert len(history(uninterrupted)) == EPOCHS
    assert history(uninterrupted)[-1] == last
    # Of 3 of the 4 steps.
    assert history(uninterrupted)[0] != last
    assert "auto(share=0.2, steps=4) * density" in (uninterrupted / "flags.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, STEPS])
def test_a_run_killed_while_it_measures_ends_as_one_that_was_not(step, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    train_until(f"step-{step:08d}.npz", folder, **SETTINGS)
    train(folder, resume=True, **SETTINGS)
    assert_alike(folder, uninterrupted)
    assert found(folder) == found(uninterrupted)


@pytest.mark.slow
def test_a_run_from_old_weights_measures_anew(uninterrupted, tmp_path):
    train(tmp_path / "second", start_from=str(uninterrupted), **SETTINGS)
    arrays, _ = checkpoints.read(tmp_path / "second" / "checkpoints" / "step-00000000.npz")
    first = {name: array for name, array in arrays.items() if name.startswith("others/")}
    assert first
    assert not any(np.any(array) for name, array in first.items() if array.ndim)
    assert found(tmp_path / "second") != found(uninterrupted)


@pytest.mark.slow
def test_a_term_that_the_embedder_does_not_learn_from_ends_the_run_with_one_line(tmp_path):
    # Moments are of the backbone's feature map alone.
    objectives = "contrastive + auto(steps=2) * horde(loss=contrastive, orders=2, dim=8)"
    with pytest.raises(UserError, match="the weight of horde cannot be measured, as gradients were 0") as caught:
        train(tmp_path / "run", objectives=objectives, backbone_rate=0.0)
    assert "\n" not in str(caught.value)
