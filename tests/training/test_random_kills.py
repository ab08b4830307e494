"""Fourteen kills at random moments, in every phase of training, export and evaluation: nothing is lost.

    TFDML_KILLS_SEED=7 pytest -m slow -s tests/training/test_random_kills.py

draws other moments; the log of the kills is printed as a table.
"""

import json
import os
import random

import numpy as np
import pytest

from tests.training.test_kills import LAST, drive, figures, weights

WHOLE = [*LAST, "--report"]

SEED = int(os.environ.get("TFDML_KILLS_SEED", "0"))
# A phase begins when the first file is written, and ends with the second; their order is that of a run.
PHASES = {
    "building data and network": ("", "flags.txt"),
    "describing the data": ("flags.txt", "environment.json"),
    "measuring before training": ("environment.json", "step-00000000.npz"),
    "first steps, checkpoint": ("step-00000000.npz", "step-00000002.npz"),
    "steps, evaluation of an epoch": ("step-00000002.npz", "step-00000004.npz"),
    "steps of the next epoch, checkpoint": ("step-00000004.npz", "step-00000006.npz"),
    "last steps, last evaluation": ("step-00000006.npz", "step-00000008.npz"),
    "saving the embedder": ("step-00000008.npz", "embedder.keras"),
    "results": ("embedder.keras", "result.json"),
    "report": ("result.json", "index.html"),
}
KILLS = {"train": len(PHASES), "export": 2, "evaluate": 2}


def in_training(rng, times):
    """Random moments, one in each phase of a run and in their order: the phase, and what `clock` takes."""
    found = []
    for phase, (first, last) in PHASES.items():
        seconds = rng.uniform(0, when(last, times) - (when(first, times) if first else 0.0))
        found.append((phase, [first, seconds, last]))
    return found


def when(pattern, times):
    """When the first file of this name was written."""
    return next(seconds for name, seconds in times if name.startswith(pattern.partition("*")[0]))


def read_times(path):
    """Which file was written when."""
    return [(name, float(seconds)) for name, seconds in (line.split("\t") for line in path.read_text().splitlines())]


def outputs(place, run):
    """The flags of commands that read a run and write below `place`."""
    return {
        "export": [f"--run_dir={run}", f"--out={place / 'models'}", "--formats=saved_model"],
        "evaluate": [f"--model={run}", f"--json={place / 'metrics.json'}", f"--report={place / 'page.html'}"],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of everything: what was killed and resumed, and what never was."""
    place = tmp_path_factory.mktemp("random_kills")
    uninterrupted, killed = place / "uninterrupted", place / "killed"
    uninterrupted.mkdir(), killed.mkdir()
    whole = [{"flags": [*WHOLE, f"--run_dir={uninterrupted / 'run'}"], "times": str(place / "train")}]
    for command, flags in outputs(uninterrupted, uninterrupted / "run").items():
        whole.append({"command": command, "flags": flags, "times": str(place / command)})
    status, errors = drive(whole)
    assert status == [0] * len(whole), errors[-3000:]

    rng = random.Random(SEED)
    plan = [("train", *moment) for moment in in_training(rng, read_times(place / "train"))]
    again = {"train": [*WHOLE, f"--run_dir={killed / 'run'}"], **outputs(killed, uninterrupted / "run")}
    for command in outputs(killed, uninterrupted):
        last, seconds = read_times(place / command)[-1]
        for _ in range(KILLS[command]):
            plan.append((command, command, ["", rng.uniform(0, seconds), last]))
    asked = [
        {"command": command, "flags": again[command], "clock": clock, "go_on": command == "train"}
        for command, _, clock in plan
    ]
    asked += [{"command": command, "flags": again[command], "go_on": command == "train"} for command in again]
    status, errors = drive(asked)
    print(f"\nseed {SEED}\n| command | phase | killed | ended by |\n|---|---|---|---|")
    for (command, phase, (first, seconds, _)), ended in zip(plan, status, strict=False):
        print(f"| {command} | {phase} | {seconds:.2f} s after {first or 'its start'} | {ended} |")
    assert status == [-9] * sum(KILLS.values()) + [0] * len(again), errors[-3000:]
    return place


@pytest.mark.slow
def test_a_run_that_was_killed_ten_times_ends_as_the_uninterrupted_one(runs):
    uninterrupted, killed = (runs / name / "run" for name in ("uninterrupted", "killed"))
    assert figures(killed) == figures(uninterrupted)
    for old, new in zip(weights(uninterrupted / "embedder.keras"), weights(killed / "embedder.keras"), strict=True):
        np.testing.assert_array_equal(old, new)
    for path in uninterrupted.rglob("*"):
        name = path.relative_to(uninterrupted).as_posix()
        assert name.startswith("tensorboard/") or (killed / name).exists(), name
    assert not list(killed.rglob(".*"))


@pytest.mark.slow
def test_a_killed_export_is_made_whole_by_the_next(runs):
    versions = [
        sorted(path.name for path in (runs / name / "models").iterdir()) for name in ("uninterrupted", "killed")
    ]
    assert versions[1] == versions[0] == ["1"]
    files = [sorted(path.name for path in (runs / name / "models").rglob("*")) for name in ("uninterrupted", "killed")]
    assert files[1] == files[0]
    cards = [json.loads((runs / name / "models/1/model_card.json").read_text()) for name in ("uninterrupted", "killed")]
    assert cards[1] == cards[0]


@pytest.mark.slow
def test_a_killed_evaluation_is_made_whole_by_the_next(runs):
    found = [json.loads((runs / name / "metrics.json").read_text()) for name in ("uninterrupted", "killed")]
    assert found[1] == found[0]
    pages = [(runs / name / "page.html").stat().st_size for name in ("uninterrupted", "killed")]
    assert pages[1] == pytest.approx(pages[0], rel=0.01)
    assert not list((runs / "killed").glob(".*"))
