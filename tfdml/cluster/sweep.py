"""A sweep: many runs side by side through Ray, compared on held-out classes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import typing
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml.cluster.ray_session import Outbox, ToOutbox, ray_session, shown
from tfdml.cluster.training import ClusterSettings
from tfdml.effects import in_vain
from tfdml.errors import UserError, short_message
from tfdml.io.files import write_json
from tfdml.io.manifests import read_json
from tfdml.report.sweep import write_sweep
from tfdml.training import Experiment, RunFolder
from tfdml.training.experiment import EFFECTS
from tfdml.training.expressions import with_weight
from tfdml.training.run import trainer

_FORM = "write e.g. --sweep='objectives.weight=0.1,0.3,1; learning_rate=1e-4..1e-3'"
_FIXED = (
    *("run_dir", "selection", "selection_metric", "dataset", "data_dir", "seed", "seeds", "refit"),
    *("holdout_classes", "holdout_sampling", "ks", "start_from"),
)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting that a sweep varies.

    Args:
        name: A setting of `Experiment`; or `objectives.weight`, the factor of the last term of `objectives`, or
            `objectives.NAME`, that of the term of this name.
        values: What it takes, each of these with each of the other axes; or
        low: The range from which it is drawn, evenly in its logarithm.
        high: The end of the range.
    """

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0


def parse_sweep(text: str) -> list[Axis]:
    """Return the axes of `--sweep`: `name=a,b,c` for values, `name=low..high` for a range, with `;` between them.

    Raises:
        UserError: The text is not of this form, or names no setting that can be varied.

    Example:
        >>> parse_sweep("learning_rate=1e-4..1e-3; embedding_dim=64,128")[1].values
        ('64', '128')
    """
    axes: list[Axis] = []
    known = {field.name for field in dataclasses.fields(Experiment)} - set(_FIXED)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = (word.strip() for word in part.partition("="))
        if not equals or not values:
            raise UserError(f"--sweep: {part!r} is not name=values; {_FORM}")
        if name not in known and not name.startswith("objectives."):
            raise UserError(f"--sweep: {name!r} is no setting that can be varied; {_FORM}")
        if name in (axis.name for axis in axes):
            raise UserError(f"--sweep: {name} is there twice")
        axes.append(_range(name, values) if ".." in values else Axis(name, tuple(v.strip() for v in values.split(","))))
    if not axes:
        raise UserError(f"--sweep varies nothing; {_FORM}")
    return axes


def _range(name: str, text: str) -> Axis:
    try:
        low, high = map(float, text.split(".."))
    except ValueError as error:
        raise UserError(f"--sweep: {name}={text} is no range of two numbers; {_FORM}") from error
    if not 0 < low < high < math.inf:
        raise UserError(f"--sweep: {name}={text}: a range goes from a positive number to a larger one")
    return Axis(name, low=low, high=high)


def trials(experiment: Experiment, axes: list[Axis], samples: int) -> list[tuple[dict[str, str], Experiment]]:
    """Return the values and the experiment of each run of a sweep, the same whenever it is asked.

    Every combination of the values is run; where there are ranges, `samples` times, each with a draw of its own.

    Args:
        experiment: What all have in common; its folder is that of the sweep.
        axes: What is varied.
        samples: How many draws there are of the ranges.

    Raises:
        UserError: A value does not fit its setting, or the setting has no effect in one of the runs.

    Example:
        >>> axes = parse_sweep("learning_rate=1e-4..1e-3; epochs=1,2")
        >>> len(trials(Experiment(run_dir="runs/sweep", holdout_classes=0.2), axes, samples=3))
        6
    """
    lists = [[(axis.name, value) for value in axis.values] for axis in axes if axis.values]
    ranges = [axis for axis in axes if not axis.values]
    generator = np.random.default_rng(experiment.seed)
    found: list[tuple[dict[str, str], Experiment]] = []
    for chosen in itertools.product(*lists):
        for _ in range(samples if ranges else 1):
            drawn = [(a.name, f"{math.exp(generator.uniform(math.log(a.low), math.log(a.high))):.4g}") for a in ranges]
            values = dict([*chosen, *drawn])
            folder = f"{experiment.run_dir}/trials/{len(found):03d}"
            found.append((values, _changed(experiment, values, folder)))
    return found


def _changed(experiment: Experiment, values: dict[str, str], folder: str) -> Experiment:
    kinds = typing.get_type_hints(Experiment)
    changes: dict[str, Any] = {"run_dir": folder, "report": False}
    for name, text in values.items():
        setting, _, term = name.partition(".")
        try:
            if term:
                before = changes.get("objectives", experiment.objectives)
                changes["objectives"] = with_weight(
                    before, float(text), "--objectives", "" if term == "weight" else term
                )
            elif kinds[setting] is bool:
                changes[setting] = {"true": True, "false": False}[text.lower()]
            else:
                changes[setting] = kinds[setting](text)
        except (ValueError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"--sweep: {text!r} is no value of {name}") from error
    changed = dataclasses.replace(experiment, **changes)
    for message in in_vain(EFFECTS, dataclasses.asdict(changed), values).values():
        raise UserError(f"--sweep: {message}")
    return changed


def sweep(
    experiment: Experiment, text: str, settings: ClusterSettings, samples: int = 8, resume: bool = False
) -> list[dict[str, Any]]:
    """Run every trial of a sweep, and write what came of it to `sweep.json`, `sweep.csv` and `sweep.png`.

    Each trial is a run of its own in `trials/`, one process of it; `settings.workers` train side by side. They are
    compared by `selection_metric` on the held-out classes, at the epoch that counts.

    Args:
        experiment: What the runs have in common; `run_dir`, the folder of the sweep, is seen by every host.
        text: What is varied: see `parse_sweep`.
        settings: Where they are trained.
        samples: How many draws there are of ranges.
        resume: Resume a sweep that was stopped: runs that have ended are kept, others resume.

    Returns:
        Of each run, the best first: `trial`, `values`, and the metric, or `error` of one that failed.

    Raises:
        UserError: Nothing is held out, or the sweep is not the one that was begun in this folder.
    """
    chosen = trials(experiment, parse_sweep(text), samples)
    if not experiment.holdout_classes:
        raise UserError("--sweep compares runs on held-out classes: add e.g. --holdout_classes=0.1")
    if experiment.seeds or experiment.refit:
        raise UserError("--sweep goes without --seeds and --refit: train the best of its runs again with them")
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
    failed = _train([(i, runs[i]) for i in left], settings) if left else {}
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


def _train(left: list[tuple[int, Experiment]], settings: ClusterSettings) -> dict[int, str]:
    """Train the runs, `settings.workers` at a time; why runs failed, by trial."""
    cpus = max(settings.workers, os.cpu_count() or 1)
    queue, failed = list(reversed(left)), {}
    with ray_session(settings.address, cpus=cpus) as ray:
        outbox = ray.remote(Outbox).options(num_cpus=0).remote()
        # A process of its own for each run; one that is lost is started again, and resumes.
        train = ray.remote(
            num_cpus=1,
            num_gpus=settings.gpus_per_worker,
            max_calls=1,
            max_retries=settings.max_failures,
            retry_exceptions=True,
        )(_trial)
        running: dict[Any, int] = {}
        with shown(ray, outbox):
            while queue or running:
                while queue and len(running) < settings.workers:
                    trial, run = queue.pop()
                    running[train.remote(trial, run.as_flags(), run.run_dir, outbox)] = trial
                (ready,), _ = ray.wait(list(running), num_returns=1)
                trial = running.pop(ready)
                try:
                    error = ray.get(ready)
                except Exception as lost:
                    error = f"its process was lost: {short_message(lost, 'last')}"
                if error:
                    failed[trial] = error
    return failed


def _trial(trial: int, flags: str, run_dir: str, outbox: Any) -> str:
    """Train one run, or resume it; why it was refused, or nothing."""
    ToOutbox.install(outbox, f"trial {trial}: ")
    try:
        trainer.train(Experiment.from_flags(flags, run_dir=run_dir), resume=Path(run_dir).exists())
    except UserError as refused:
        return str(refused)
    return ""


def score_of(run: Experiment) -> float:
    """Return the `selection_metric` of a finished run on the held-out classes, at or last before the epoch that counts.

    Args:
        run: Its settings, with its folder.
    """
    folder = RunFolder(run.run_dir)
    result = folder.read_result() or {}
    records = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    metric, last = run.selection_metric, result["epoch"]
    measured = [r["validation"][metric] for r in records if "validation" in r and r["epoch"] <= last]
    return float(measured[-1])
