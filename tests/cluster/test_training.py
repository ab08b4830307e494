"""A run trained by workers of Ray, one of which is killed in the middle, ends as that of one process."""

import dataclasses
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest

from tests.experiments import experiment_of
from tests.mathematics import assert_close
from tests.training import runs
from tfdml.cluster.ray_session import ray_session
from tfdml.cluster.sweep import combinations, open_study, parse_sweep, run_of, score_of, sweep
from tfdml.cluster.training import ClusterSettings, train_on_cluster
from tfdml.errors import UserError
from tfdml.training.run import trainer

EXPERIMENT = experiment_of(
    "--dataset=glyphs --dataset_options=images_per_class=4,size=16 --image_size=16 --resize=16 --flip=false "
    "--backbone=conv4(width=4) --batch_norm=statistics --embedding_dim=8 --objectives=contrastive "
    "--classes_per_batch=4 --images_per_class=2 --epochs=1 --steps_per_epoch=4 --checkpoint_steps=1 "
    "--evaluate_every=0 --optimizer=sgd --learning_rate=0.01 --report=false",
    run_dir="unused",
)


SWEEP = "embedding_dim=8,16; learning_rate=1e-3..1e-2"


def test_settings_are_checked():
    with pytest.raises(UserError, match="`workers` must be at least 1, not 0"):
        ClusterSettings(workers=0)


def test_a_folder_that_is_taken_is_refused_before_ray_is_started(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "flags.txt").write_text("")
    with pytest.raises(UserError, match="exists already"):
        train_on_cluster(dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / "run")), ClusterSettings())


def our_train_workers():
    """Process ids of Ray's train workers that descend from this process."""
    parents, found = {}, []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
            parents[int(folder.name)] = int(status["PPid"])
            if b"TrainWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue

    def ours(pid):
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sorted(filter(ours, found))


def kill_one(storage, killed):
    """Kill a worker when two checkpoints are in the storage."""
    while len(list(storage.glob("checkpoint_*"))) < 2 and not killed.wait(0.05):
        pass
    workers = our_train_workers()
    if workers:
        os.kill(workers[-1], signal.SIGKILL)
        time.sleep(0.1)
        killed.workers = workers


@pytest.fixture(scope="module")
def session():
    pytest.importorskip("ray")
    with ray_session("local", cpus=2):
        yield


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_run_ends_as_one_process(session, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("tfdml.cluster.ray_session.absl_logging.info", lambda text, *words: lines.append(text % words))
    one, several = (dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / name)) for name in ("one", "several"))
    expected = trainer.train(one)
    killed = threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path / "several.ray" / "several", killed), daemon=True)
    killer.start()
    try:
        result = train_on_cluster(several, ClusterSettings(workers=2, max_failures=1))
    finally:
        killed.set()
        killer.join()
    assert len(killed.workers) == 2
    assert sum("waiting for the others" in line for line in lines) == 2
    assert "resuming from the last checkpoint in the storage" in lines
    assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
    assert not (tmp_path / "several.ray").exists()
    wanted, found = (runs.arrays(tmp_path / name / "checkpoints" / "step-00000004.npz") for name in ("one", "several"))
    for name, value in wanted.items():
        if not name.startswith("metrics/"):
            assert_close(found[name], value, 1e-5, floor=1e-6 * max(1e-3, np.abs(value).max()))


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_stopped(session, tmp_path):
    distributions = pytest.importorskip("optuna").distributions
    experiment = dataclasses.replace(EXPERIMENT, run_dir=str(tmp_path / "sweep"), holdout_classes=0.2)
    with pytest.raises(UserError, match="held-out classes"):
        sweep(dataclasses.replace(experiment, holdout_classes=0.0), SWEEP, ClusterSettings())
    # As if the first run had ended, and the sweep was stopped while the second ran.
    (tmp_path / "sweep").mkdir()
    study = open_study(experiment)
    chosen = combinations(experiment, parse_sweep(SWEEP))
    for values in chosen:
        study.enqueue_trial(values)
    space = {
        "embedding_dim": distributions.CategoricalDistribution(("8", "16")),
        "learning_rate": distributions.FloatDistribution(1e-3, 1e-2, log=True),
    }
    first, second = (run_of(experiment, trial.number, trial.params) for trial in (study.ask(space), study.ask(space)))
    trainer.train(first)
    study.tell(0, score_of(first))
    before = pathlib.Path(first.run_dir, "result.json").read_bytes()
    rows = sweep(experiment, SWEEP, ClusterSettings(workers=2), samples=1, resume=True)
    assert pathlib.Path(first.run_dir, "result.json").read_bytes() == before
    assert sorted(row["trial"] for row in rows) == [0, 1]
    assert {row["state"] for row in rows} == {"complete"}
    assert rows[0]["map@r"] >= rows[1]["map@r"] >= 0
    assert (pathlib.Path(second.run_dir) / "embedder.keras").is_file()
    lines = (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("trial,map@r,state,embedding_dim,learning_rate,error", 3)
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="begun with other samples"):
        sweep(experiment, SWEEP, ClusterSettings(), samples=2, resume=True)
