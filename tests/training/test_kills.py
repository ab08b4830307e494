"""A run killed at any moment, named by what is on disk then, ends as one that never was."""

import json

import numpy as np
import pytest

import tfdml  # noqa: F401  (registers the classes that a saved embedder names)
from tests.cli.conftest import TINY
from tests.training.kill_driver import drive
from tests.training.runs import embedder, records

# The last epoch counts; with all but a report.
LAST = [
    *TINY,
    "--objectives=contrastive + 10 * density + horde(loss=contrastive, orders=2, dim=8) + "
    "am_softmax(sample=0.3)",
    "--moment_embedder",
    "--steps_per_epoch=4",
    "--checkpoint_steps=2",
    "--noreport",
]
# The best epoch counts; with a report.
BEST = [
    *TINY,
    "--holdout_classes=0.2",
    "--selection=validation",
    "--steps_per_epoch=4",
    "--checkpoint_steps=2",
]
RUNS = {"last": LAST, "best": BEST}
# A run is killed at each moment in turn, and resumed in between.
MOMENTS = {
    "last": [
        ["half of", "flags.txt", 1],
        ["after", "data.json", 1],
        ["half of", "step-00000000.npz", 1],
        ["half of", "step-00000002.npz", 1],
        ["after", "step-00000006.npz", 1],
        ["after", "metrics.jsonl", 1],  # of an epoch, without its checkpoint
        ["after", "step-00000008.npz", 1],
        ["half of", "embedder.keras", 1],
        ["after", "moments.keras", 1],
    ],
    "best": [
        ["after", "embedder.keras", 1],  # the selected one, without its checkpoint
        ["after", "step-00000004.npz", 1],
        ["after", "result.json", 1],
        ["half of", "index.html", 1],
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs: the uninterrupted ones, and those that were killed and resumed."""
    place = tmp_path_factory.mktemp("kills")
    runs = [{"flags": [*flags, f"--run_dir={place / name}"]} for name, flags in RUNS.items()]
    for name, flags in RUNS.items():
        killed = {"flags": [*flags, f"--run_dir={place / f'{name} killed'}"]}
        runs += [*({**killed, "kill": moment} for moment in MOMENTS[name]), killed]
    status, errors = drive(runs)
    assert status == [-9 if "kill" in run else 0 for run in runs], errors[-3000:]
    return place


def measured(folder):
    """What a run measured, without what depends on the clock."""
    result = json.loads((folder / "result.json").read_text())
    return [{name: result[name] for name in result if "second" not in name}, *records(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_every_moment_ends_as_the_uninterrupted_one(name, runs):
    uninterrupted, continued = runs / name, runs / f"{name} killed"
    assert measured(continued) == measured(uninterrupted)
    for old, new in zip(embedder(uninterrupted), embedder(continued), strict=True):
        np.testing.assert_array_equal(old, new)
    names = [
        sorted(path.relative_to(run).as_posix() for path in run.rglob("*"))
        for run in (uninterrupted, continued)
    ]
    for name in names[0]:
        assert name in names[1] or name.startswith("tensorboard/")
    assert not list(continued.rglob(".*"))
