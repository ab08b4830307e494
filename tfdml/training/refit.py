"""A run that finds its number of epochs on held-out classes, and is then trained anew on all training classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from absl import logging

from tfdml.errors import UserError
from tfdml.manifests import read_json
from tfdml.training.backends import require_one_process
from tfdml.training.experiment import Experiment
from tfdml.training.interruption import Interrupted
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import DataSettings
from tfdml.training.starting import check_start

WORDS = "a training anew on all training classes, for as many epochs as were best on held-out ones"


def selection_run(experiment: Experiment) -> Experiment:
    """The run that finds the number of epochs, in the folder `selection` of the run.

    Example:
        >>> chosen = Experiment(run_dir="runs/a", refit=True, selection="validation", holdout_classes=0.1)
        >>> selection_run(chosen).run_dir
        'runs/a/selection'
    """
    folder = f"{experiment.run_dir}/selection"
    return dataclasses.replace(experiment, refit=False, report=False, moment_embedder=False, run_dir=folder)


def final_run(experiment: Experiment) -> Experiment:
    """What is trained in the run's own folder: with `refit`, all training classes.

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


def trained_on(experiment: Experiment) -> DataSettings:
    """Which images the embedder of a run was trained on: with `refit` those of the held-out classes, too.

    Example:
        >>> trained_on(Experiment(run_dir="runs/a", holdout_classes=0.1)).holdout_classes
        0.1
    """
    return dataclasses.replace(experiment.data, holdout_classes=0.0) if experiment.refit else experiment.data


def select_epochs(
    experiment: Experiment, train: Callable[..., dict[str, Any]], resume: bool = False, restart: bool = False
) -> None:
    """Begin the run's folder, and find the number of epochs on held-out classes.

    Args:
        experiment: The settings, with `refit`.
        train: Trains a run: see `trainer.train`.
        resume: Continue what is in the folder.
        restart: As for a single run.

    Raises:
        UserError: As a single run; or this is one of several processes.
        Interrupted: A signal asked for it.
    """
    require_one_process("refit")
    folder = RunFolder(experiment.run_dir)
    if resume and not folder.is_untouched():
        folder.check_same(experiment)
        if folder.is_finished(experiment.evaluation):
            return
    else:
        folder.check_new()
        check_start(experiment.start_from)
        with folder.created(experiment):
            pass
    run = selection_run(experiment)
    path = Path(run.run_dir)
    logging.info("finding the number of epochs on held-out classes: %s", path)
    try:
        found = train(run, resume=path.exists(), restart=restart)
    except Interrupted as stop:
        stop.left = f"the number of epochs is not found yet; continue with --run_dir={folder.path} --resume"
        raise
    except UserError:
        if not path.exists():
            folder.discard()
        raise
    logging.info("epoch %d was the best on held-out classes: training anew on all, for as many", found["epoch"])
    keras.utils.clear_session()
