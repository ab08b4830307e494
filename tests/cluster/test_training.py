"""A run trained by workers of Ray, one of which is killed in the middle, ends as that of one process."""

import dataclasses
import json
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
from tests.worker_processes import descendants
from tfdml.cluster.ray_session import ray_session
from tfdml.cluster.training import (
    ClusterSettings,
    combinations,
    open_study,
    parse_sweep,
    run_of,
    score_of,
    sweep,
    train_on_cluster,
)
from tfdml.errors import UserError
from tfdml.training.expressions import with_weight
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


@pytest.mark.parametrize("metric", ["map@r", "recall@1"])
@pytest.mark.parametrize(("epoch", "expected"), [(2, 0.4), (3, 0.4), (4, 0.3)])
def test_a_trial_is_scored_at_the_epoch_that_counts(metric, epoch, expected, tmp_path):
    """Measured every second epoch; neither the best nor the last counts, but the last up to the chosen one."""
    other = {"map@r": "recall@1", "recall@1": "map@r"}[metric]
    measured = {0: 0.9, 2: 0.4, 4: 0.3, 6: 0.8}
    lines = [{"epoch": 0, "validation": {metric: measured[0], other: 0.0}}]
    lines += [
        {"epoch": n, **({"validation": {metric: measured[n], other: 0.0}} if n in measured else {})}
        for n in range(1, 7)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "result.json").write_text(json.dumps({"epoch": epoch, "metrics": {}}))
    run = runs.experiment(tmp_path, holdout_classes=0.2, selection="validation", selection_metric=metric)
    assert score_of(run) == expected


def test_values_are_combined(tmp_path):
    base = runs.experiment(tmp_path, objectives="am_softmax(scale=20.0) + 0.4 * jrs(levels=[pooled, embedding])")
    axes = parse_sweep("objectives.weight=0.1,1; learning_rate=1e-4..1e-2; flip=true")
    assert axes == {"objectives.weight": ("0.1", "1"), "learning_rate": (1e-4, 1e-2), "flip": ("true",)}
    found = combinations(base, axes)
    assert found == [{"objectives.weight": weight, "flip": "true"} for weight in ("0.1", "1")]
    first, last = (run_of(base, trial, {**values, "learning_rate": 3e-3}) for trial, values in enumerate(found))
    assert first.objectives == "am_softmax(scale=20.0) + 0.1 * jrs(levels=['pooled', 'embedding'])"
    assert last.objectives == "am_softmax(scale=20.0) + jrs(levels=['pooled', 'embedding'])"
    assert (first.flip, first.learning_rate, first.seed, first.epochs) == (True, 3e-3, base.seed, base.epochs)
    assert [run.run_dir for run in (first, last)] == [f"{tmp_path}/trials/00{trial}" for trial in (0, 1)]


def test_a_named_term_and_several_weights(tmp_path):
    base = runs.experiment(tmp_path, objectives="contrastive + 2 * jrs + 3 * horde(loss=contrastive, orders=2)")
    changed = run_of(base, 0, {"objectives.jrs": "0.5", "objectives.weight": "7"})
    assert changed.objectives == "contrastive + 0.5 * jrs + 7.0 * horde(loss='contrastive', orders=2)"
    assert with_weight("a + b(c=d(e=1))", 2.0, "--objectives") == "a + 2.0 * b(c=d(e=1))"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "varies nothing"),
        ("learning_rate", "is not name=values"),
        ("speed=1,2", "'speed' is no setting"),
        ("run_dir=a,b", "'run_dir' is no setting"),
        ("epochs=1; epochs=2", "twice"),
        ("learning_rate=a..b", "a range goes from a positive number"),
        ("learning_rate=0..1", "from a positive number"),
        ("learning_rate=1e-2..1e-3", "to a larger one"),
        ("epochs=many", "--epochs=many is not of type int"),
        ("flip=maybe", "--flip=maybe is not of type bool"),
        ("epochs=-1", "--epochs"),
        ("learning_rate=1e-3; epochs=1..3", "--epochs=1.0 is not of type int"),
        ("objectives.weight=much", "'much' is no value of objectives.weight"),
        ("objectives.jrs=1", "no term 'jrs'"),
        ("batch_size=10,20", "--batch_size=10 has no effect: it needs --sampling=shuffle or whole_classes"),
    ],
)
def test_what_cannot_be_varied_is_told(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        combinations(runs.experiment(tmp_path), parse_sweep(text))


@pytest.mark.parametrize(
    "name",
    ["selection", "selection_metric", "holdout_classes", "holdout_sampling", "dataset", "data_dir", "seed", "ks"],
)
def test_what_trials_are_compared_by_is_not_varied(name):
    with pytest.raises(UserError, match=f"'{name}' is no setting that can be varied"):
        parse_sweep(f"learning_rate=0.1; {name}=1,2")


def test_draws_follow_the_seed_within_the_range_and_go_on_when_resumed(tmp_path):
    distributions = pytest.importorskip("optuna").distributions
    space = {"learning_rate": distributions.FloatDistribution(1e-4, 1e-2, log=True)}

    def draws(name, *counts):
        experiment = runs.experiment(tmp_path / name)
        (tmp_path / name).mkdir()
        found = []
        for count in counts:
            study = open_study(experiment)
            found += [study.ask(space).params["learning_rate"] for _ in range(count)]
        return found

    rates = draws("a", 10)
    assert rates == draws("b", 10)
    assert len(set(draws("c", 5, 5))) == 10
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


def test_a_run_below_the_median_is_pruned_after_a_third_of_the_epochs(tmp_path):
    pytest.importorskip("optuna")
    study = open_study(runs.experiment(tmp_path, epochs=6))
    for value in (0.1, 0.2, 0.3, 0.4, 0.5):
        trial = study.ask()
        for epoch in range(1, 7):
            trial.report(value, epoch)
        study.tell(trial, value)
    for value, pruned in ((0.25, [False, False, True]), (0.35, [False, False, False])):
        trial, found = study.ask(), []
        for epoch in (0, 1, 2):
            trial.report(value, epoch)
            found.append(trial.should_prune())
        assert found == pruned
