"""A run by two workers, one of which is killed or silent, ends by three as that of one process."""

import json

import numpy as np
import pytest

from tests.support.mathematics import assert_close
from tests.support.processes import run_python
from tests.training import runs
from tfdml.training import checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def ended(folder):
    done = run_python("-m", "tests.training.worker_runs", folder)
    found = json.loads(done.stdout.rpartition("ENDED")[2])
    assert found["uninterrupted"]["statuses"] == [0], found["uninterrupted"]["errors"]
    return found


@pytest.mark.parametrize(("name", "saved"), [("killed", 1), ("silent", 2)])
def test_where_one_is_killed_or_silent_the_others_end_with_one_line(name, saved, ended):
    lost = ended[name]
    assert lost["statuses"] == [2, -9], lost["errors"]
    line = lost["errors"][0].strip().splitlines()[-1]
    assert line.startswith("train: error: another worker ended or cannot be reached")
    assert "--resume" in line
    assert lost["saved"][-1] == f"step-{saved:08d}.npz"


def test_the_run_ends_as_that_of_one_process(ended, folder):
    assert ended["resumed"]["statuses"] == [0, 0, 0], ended["resumed"]["errors"]
    one, several = folder / "uninterrupted", folder / "several"
    expected, found = (
        runs.arrays(run / "checkpoints" / "step-00000006.npz") for run in (one, several)
    )
    assert set(found) == set(expected)
    for name, value in expected.items():
        # Means over a replica's pairs are reported of each replica's own.
        if not name.startswith("metrics/"):
            assert_close(found[name], value, 1e-5, floor=1e-6 * max(1e-3, np.abs(value).max()))
    neighbors = [
        checkpoints.read(run / "checkpoints" / "step-00000006.npz")[1].neighbors
        for run in (one, several)
    ]
    assert neighbors[0] == neighbors[1]
    assert neighbors[0]
    for wanted, record in zip(runs.records(one), runs.records(several), strict=True):
        assert record["step"] == wanted["step"]
        if wanted["train"]:
            assert record["train"]["loss"] == pytest.approx(wanted["train"]["loss"], rel=1e-5)


def test_only_the_chief_writes(ended, folder):
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "several",
        "uninterrupted",
    ]
    assert (folder / "several" / "result.json").is_file()
    samples = json.loads((folder / "several" / "watch.json").read_text())["samples"]
    # Of a batch of 12 images the chief looks at a third.
    assert [(sample["step"], sample["images"]) for sample in samples] == [(2, 4), (4, 4)]
    assert "worker 1 of 2 (127.0.0.1:" in ended["killed"]["errors"][1]
