"""A run trained by workers of Ray, one of which is killed in the middle, ends as that of one
process."""

import dataclasses
import os
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest

from tests.support.mathematics import assert_close
from tests.support.processes import descendants
from tests.training import runs
from tfdml.cluster import ray_session as ray_sessions
from tfdml.cluster import training
from tfdml.cluster.ray_session import ray_session
from tfdml.cluster.settings import ClusterSettings
from tfdml.cluster.training import train_on_cluster
from tfdml.errors import UserError
from tfdml.training import trainer

SETTINGS = {
    "dataset_options": "images_per_class=4, size=16",
    "batch_norm": "statistics",
    "optimizer": "sgd",
}
# Wide and smooth enough that the order of sums decides on no pair and no neighbor.
SETTINGS |= {"backbone": "conv4(width=16)", "objectives": "binomial_deviance"}
SETTINGS |= {"epochs": 1, "steps_per_epoch": 4, "checkpoint_steps": 1, "evaluate_every": 0}
EXPERIMENT = runs.experiment("unused", **SETTINGS)


def test_a_folder_that_is_taken_is_refused_before_ray_is_started(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "flags.txt").write_text("")
    with pytest.raises(UserError, match="exists already"):
        train_on_cluster(
            dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / "run")), ClusterSettings()
        )


def test_a_run_that_has_ended_is_not_resumed(tmp_path):
    (tmp_path / "result.json").write_text('{"metrics": {}, "epoch": 1}')
    ended = dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path))
    assert train_on_cluster(ended, ClusterSettings(), resume=True).result["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("address", "error", "reported"),
    [
        ("ray://host:10001", ConnectionError("gone"), UserError),
        ("ray://host:10001", KeyError("ours"), KeyError),
        ("host:6379", ConnectionError("ours"), ConnectionError),
    ],
)
def test_a_connection_is_lost_by_a_client_alone(address, error, reported, monkeypatch):
    ray = mock.Mock(is_initialized=mock.Mock(side_effect=[False, True]))
    monkeypatch.setattr(ray_sessions, "import_ray", lambda: ray)
    with pytest.raises(reported), ray_session(address):
        raise error
    ray.shutdown.assert_called_once_with()


def kill_one(storage, killed):
    """Kill a worker when two checkpoints are in the storage."""
    while len(list(storage.glob("checkpoint_*"))) < 2 and not killed.wait(0.05):
        pass
    workers = descendants("TrainWorker")
    if workers:
        os.kill(workers[-1], signal.SIGKILL)
        time.sleep(0.1)
        killed.workers = workers


@pytest.fixture(scope="module")
def session():
    pytest.importorskip("ray")
    with ray_session("local", cpus=2, show_workers=True):
        yield


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_run_ends_as_one_process(
    session, tmp_path, capfd
):
    one, several = (
        dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / name)) for name in ("one", "several")
    )
    expected = trainer.train(one)
    killed = threading.Event()
    killer = threading.Thread(
        target=kill_one, args=(tmp_path / "several.ray" / "several", killed), daemon=True
    )
    killer.start()
    try:
        run = train_on_cluster(several, ClusterSettings(workers=2))
    finally:
        killed.set()
        killer.join()
    assert len(killed.workers) == 2
    assert "resuming from the last checkpoint in the storage" in "".join(capfd.readouterr())
    assert run.metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert not (tmp_path / "several.ray").exists()
    expected, arrays = (
        runs.arrays(tmp_path / name / "checkpoints" / "step-00000004.npz")
        for name in ("one", "several")
    )
    for name, value in expected.items():
        if not name.startswith("metrics/"):
            assert_close(arrays[name], value, 1e-5, floor=1e-6 * max(1e-3, np.abs(value).max()))


@pytest.mark.slow
def test_what_is_wrong_with_the_data_is_the_error_of_the_command(session, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_MOST_FAILURES", 1)
    changes = {"dataset": "folder", "data_dir": str(tmp_path / "no"), "dataset_options": ""}
    wrong = dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / "run"), **changes)
    with pytest.raises(UserError, match="there is no folder"):
        train_on_cluster(wrong, ClusterSettings(workers=1))
