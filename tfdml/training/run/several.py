"""Experiments that train several runs: one for each seed, or one that finds the number of epochs for another."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdml.errors import UserError
from tfdml.evaluation import Interval, QueryValues, confidence_intervals, student_interval
from tfdml.io.files import write_json
from tfdml.io.manifests import read_json
from tfdml.training.build.initial_weights import check_start
from tfdml.training.distributed.devices import require_one_process
from tfdml.training.run.interruption import Interrupted
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment

# Trains one run: see `trainer.train`.
Train = Callable[..., dict[str, Any]]


def run_of_seed(experiment: Experiment, seed: int) -> Experiment:
    """Return the run of one seed: in the folder `seed_<seed>` of that of all.

    Example:
        >>> run_of_seed(Experiment(run_dir="runs/cars", seeds="3"), 2).run_dir
        'runs/cars/seed_2'
    """
    return dataclasses.replace(experiment, seeds="", seed=seed, run_dir=f"{experiment.run_dir}/seed_{seed}")


@contextlib.contextmanager
def _folder_of(experiment: Experiment, flag: str, resume: bool) -> Iterator[RunFolder]:
    """Enter a block in the folder of several runs, which is made where it does not resume."""
    require_one_process(flag)
    folder = RunFolder(experiment.run_dir)
    if resume and not folder.is_untouched():
        folder.check_same(experiment)
        owned = folder.locked()
    else:
        folder.check_new()
        check_start(experiment.start_from)
        owned = folder.created(experiment)
    with owned:
        yield folder


def _train_part(folder: RunFolder, run: Experiment, train: Train, progress: str) -> dict[str, Any]:
    """Train one of several runs, or resume it; the folder of all is removed where the first one leaves none."""
    try:
        result = train(run, resume=Path(run.run_dir).exists())
    except Interrupted as stop:
        stop.left = f"{progress}; continue with --run_dir={folder.path} --resume"
        raise
    except UserError:
        if not any(entry.is_dir() for entry in folder.path.iterdir()):
            folder.discard()
        raise
    # The next one's memory is that of a process of its own.
    keras.utils.clear_session()
    return result


def train_seeds(
    experiment: Experiment, train: Train, resume: bool = False, write_report: Callable[..., None] | None = None
) -> dict[str, Any]:
    """Train a run for each of `experiment.seeds`, one after another, then write their common result and report.

    Each is an ordinary run in its own folder; with `resume`, those that have ended are kept and the others resume.

    Args:
        experiment: The settings; its folder is that of all runs.
        train: Trains one of them.
        resume: Continue what is in the folder.
        write_report: See `trainer.train`.

    Returns:
        What `result.json` holds: see `combine`.

    Raises:
        UserError: As a single run; or this is one of several processes.
        Interrupted: A signal asked for it.
    """
    with _folder_of(experiment, "seeds", resume) as folder:
        known = folder.read_result()
        if known is not None and (folder.report.is_file() or not experiment.report):
            logging.info("%s is finished already: there is nothing left to do", folder.path)
            return known
        results: dict[int, dict[str, Any]] = {}
        for seed in experiment.seed_list():
            logging.info("seed %d", seed)
            progress = f"{len(results)} of {len(experiment.seed_list())} seeds have ended"
            try:
                results[seed] = _train_part(folder, run_of_seed(experiment, seed), train, progress)
            except UserError as error:
                raise type(error)(f"seed {seed}: {error}") from error
        values = [QueryValues.read(RunFolder(run_of_seed(experiment, seed).run_dir).queries) for seed in results]
        result = combine(results, values)
        write_json(folder.result, result)
        if experiment.report and write_report is not None:
            write_report(folder)
    return result


def combine(results: Mapping[int, Mapping[str, Any]], values: Sequence[QueryValues]) -> dict[str, Any]:
    """Return what runs of several seeds say together.

    Args:
        results: What `result.json` of each run holds, by seed.
        values: What each of them has found for each query.

    Returns:
        `metrics` and `metrics_before`, means over the seeds; `intervals` over classes, of each query's mean over the
        seeds (`confidence_intervals`): how the mean would vary with other classes; `intervals_seeds`
        (`student_interval`): how it would with other seeds; `seeds`, a row for each; `dataset`, `protocol`,
        `selection`, and the seconds of all.
    """
    every = list(results.values())
    means = {part: _means([result[part] for result in every]) for part in ("metrics", "metrics_before")}
    shared = [name for name in values[0].values if all(name in of.values for of in values)]
    of_queries = {name: np.mean([of.values[name] for of in values], axis=0) for name in shared}
    over_seeds: dict[str, Interval] = {
        name: student_interval([result["metrics"][name] for result in every])
        for name, mean in means["metrics"].items()
        if isinstance(mean, float)
    }
    rows = ("epoch", "steps", "metrics", "train_seconds", "images_per_second")
    return {
        **{name: every[0][name] for name in ("dataset", "protocol", "selection")},
        **means,
        "intervals": confidence_intervals(of_queries, values[0].labels),
        "intervals_seeds": over_seeds,
        "train_seconds": sum(result["train_seconds"] for result in every),
        "seconds": sum(result["seconds"] for result in every),
        "seeds": [{"seed": seed, **{row: result.get(row) for row in rows}} for seed, result in results.items()],
    }


def _means(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric that all have; counts, which are those of the images, as they are."""
    names = [name for name in metrics[0] if all(name in of for of in metrics)]
    return {
        name: metrics[0][name] if isinstance(metrics[0][name], int) else sum(of[name] for of in metrics) / len(metrics)
        for name in names
    }


WORDS = "another training on all training classes, for as many epochs as were best on held-out ones"


def selection_run(experiment: Experiment) -> Experiment:
    """Return the run that finds the number of epochs, in the folder `selection` of the run.

    Example:
        >>> chosen = Experiment(run_dir="runs/a", refit=True, selection="validation", holdout_classes=0.1)
        >>> selection_run(chosen).run_dir
        'runs/a/selection'
    """
    folder = f"{experiment.run_dir}/selection"
    return dataclasses.replace(experiment, refit=False, report=False, moment_embedder=False, run_dir=folder)


def final_run(experiment: Experiment) -> Experiment:
    """Return what is trained in the run's own folder: with `refit`, all training classes.

    Everything else is that of `experiment`: the start, the seed, the batches of an epoch, and the rates, which follow
    the schedule of `experiment.epochs` as far as `epochs_to_train`.

    Args:
        experiment: The settings.

    Example:
        >>> final_run(Experiment(run_dir="runs/a", selection="validation", holdout_classes=0.1)).holdout_classes
        0.1
    """
    if not experiment.refit:
        return experiment
    return dataclasses.replace(experiment, refit=False, selection="last", selection_metric="map@r", holdout_classes=0.0)


def epochs_to_train(experiment: Experiment) -> int:
    """For how many epochs a run is trained: with `refit` those that were found.

    Raises:
        UserError: They have not been found yet.

    Example:
        >>> epochs_to_train(Experiment(run_dir="runs/a", epochs=7))
        7
    """
    if not experiment.refit:
        return experiment.epochs
    return read_json(RunFolder(selection_run(experiment).run_dir).result, {"epoch": int})["epoch"]


def select_epochs(experiment: Experiment, train: Train, resume: bool = False) -> None:
    """Begin the run's folder, and find the number of epochs on held-out classes.

    Args:
        experiment: The settings, with `refit`.
        train: Trains a run: see `trainer.train`.
        resume: Continue what is in the folder.

    Raises:
        UserError: As a single run; or this is one of several processes.
        Interrupted: A signal asked for it.
    """
    with _folder_of(experiment, "refit", resume) as folder:
        if folder.is_finished(experiment):
            return
        logging.info("finding the number of epochs on held-out classes")
        found = _train_part(folder, selection_run(experiment), train, "the number of epochs is not found yet")
        logging.info("epoch %d was the best on held-out classes: training again on all, for as many", found["epoch"])
