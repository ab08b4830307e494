"""A sweep: many runs side by side through Ray Tune, compared on held-out classes."""

from __future__ import annotations

import dataclasses
import json
import logging as python_logging
import os
import shutil
from pathlib import Path
from typing import Any

from absl import logging

from tfdml.cluster.messages import Outbox, ToOutbox, shown
from tfdml.cluster.ray_session import ray_session
from tfdml.cluster.training import ClusterSettings
from tfdml.errors import UserError
from tfdml.io.files import write_json
from tfdml.io.manifests import read_json
from tfdml.report.sweep import write_sweep
from tfdml.training import Experiment, RunFolder
from tfdml.training.run import trainer
from tfdml.training.sweeping import parse_sweep, trials


def sweep(
    experiment: Experiment, text: str, settings: ClusterSettings, samples: int = 8, resume: bool = False
) -> list[dict[str, Any]]:
    """Run every trial of a sweep, and write what came of it to `sweep.json`, `sweep.csv` and `sweep.png`.

    Each trial is a run of its own in `trials/`, one process of it; `settings.workers` train side by side. They are
    compared by `selection_metric` on the held-out classes, at the epoch that counts.

    Args:
        experiment: What the runs have in common; `run_dir`, the folder of the sweep, is seen by every host.
        text: What is varied: see `tfdml.training.sweeping.parse_sweep`.
        settings: Where they are trained.
        samples: How many draws there are of ranges.
        resume: Go on with a sweep that was stopped: runs that have ended are kept, others go on.

    Returns:
        Of each run, the best first: `trial`, `values`, and the metric, or `error` of one that failed.

    Raises:
        UserError: Nothing is held out, or the sweep is not the one that was begun in this folder.
    """
    chosen = trials(experiment, parse_sweep(text), samples)
    if not experiment.holdout_classes:
        raise UserError("--sweep compares runs on held-out classes: add e.g. --holdout_classes=0.1")
    if experiment.seeds or experiment.refit:
        raise UserError("--sweep goes without --seeds and --refit: train the best of its runs anew with them")
    folder = Path(experiment.run_dir).absolute()
    begun = {"sweep": text, "samples": samples, "flags": experiment.as_flags()}
    if resume:
        _check_same(folder / "settings.json", begun)
    else:
        RunFolder(experiment.run_dir).check_new()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "settings.json", begun)
    runs = [dataclasses.replace(run, run_dir=str(Path(run.run_dir).absolute())) for _, run in chosen]
    left = [i for i, run in enumerate(runs) if RunFolder(run.run_dir).read_result() is None]
    logging.info("%d runs, %d of them still to be trained", len(runs), len(left))
    failed = _train([(i, runs[i]) for i in left], folder, settings) if left else {}
    rows: list[dict[str, Any]] = []
    metric = experiment.selection_metric
    for i, ((values, _), run) in enumerate(zip(chosen, runs, strict=True)):
        row = {"trial": i, "values": values}
        rows.append(row | ({"error": failed[i]} if i in failed else {metric: score_of(run)}))
    rows.sort(key=lambda row: -row.get(metric, -1.0))
    write_json(folder / "sweep.json", rows)
    write_sweep(folder, rows, metric)
    return rows


def _check_same(path: Path, now: dict[str, Any]) -> None:
    before = read_json(path)
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(f"--resume: the sweep in {path.parent} was begun with other {name}; name another --run_dir")


def _train(left: list[tuple[int, Experiment]], folder: Path, settings: ClusterSettings) -> dict[int, str]:
    """Train the runs; what failed, by trial."""
    cpus = max(settings.workers, os.cpu_count() or 1)
    with ray_session(settings.address, cpus=cpus) as ray:
        from ray import tune

        python_logging.getLogger("ray.tune").setLevel(python_logging.ERROR)
        outbox = ray.remote(Outbox).options(num_cpus=0).remote()
        work = [{"trial": i, "flags": run.as_flags(), "run_dir": run.run_dir} for i, run in left]
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trial, outbox=outbox), _resources(settings)),
            param_space={"work": tune.grid_search(work)},
            tune_config=tune.TuneConfig(max_concurrent_trials=settings.workers),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(folder),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=settings.max_failures),
            ),
        )
        with shown(ray, outbox):
            tuner.fit()
        shutil.rmtree(folder / "ray", ignore_errors=True)
        ended = {i: ray.get(outbox.read.remote(str(i))) for i, _ in left}
    # A trial whose process was lost too often has told nothing.
    told = {i: "its process was lost" if error is None else error for i, error in ended.items()}
    return {i: error for i, error in told.items() if error}


def _resources(settings: ClusterSettings) -> dict[str, float]:
    return {"cpu": 1, "gpu": settings.gpus_per_worker}


def _trial(config: dict[str, Any], outbox: Any) -> None:
    """Train one run, or go on with it."""
    import ray

    work = config["work"]
    ToOutbox.install(outbox, f"trial {work['trial']}: ")
    experiment = Experiment.from_flags(work["flags"], run_dir=work["run_dir"])
    error = ""
    try:
        trainer.train(experiment, resume=Path(work["run_dir"]).exists())
    except UserError as refused:
        error = str(refused)
    ray.get(outbox.tell.remote(str(work["trial"]), error))


def score_of(run: Experiment) -> float:
    """The `selection_metric` of a finished run on the held-out classes, at or last before the epoch that counts.

    Args:
        run: Its settings, with its folder.
    """
    folder = RunFolder(run.run_dir)
    result = folder.read_result() or {}
    records = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    metric, last = run.selection_metric, result["epoch"]
    measured = [r["validation"][metric] for r in records if "validation" in r and r["epoch"] <= last]
    return float(measured[-1])
