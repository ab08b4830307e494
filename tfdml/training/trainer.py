"""Runs an experiment: begins it, or goes on with it, in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml.disk_space import is_disk_full
from tfdml.errors import UserError
from tfdml.training import distribution
from tfdml.training.backends import check_backend
from tfdml.training.experiment import Experiment
from tfdml.training.interruption import Interrupted, Interruption
from tfdml.training.jax_devices import processes
from tfdml.training.phases import Place, RunPhases
from tfdml.training.refit import select_epochs
from tfdml.training.run_folder import MAY_DIFFER, RunFolder
from tfdml.training.seeds import train_seeds
from tfdml.training.starting import check_start
from tfdml.training.workers import LOST, Workers, join


def train(
    experiment: Experiment,
    resume: bool = False,
    restart: bool = False,
    saved: Callable[[], None] | None = None,
    write_report: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Run an experiment to its end and return what `result.json` holds.

    Stopped or killed at any moment, a run is continued by `resume` to the same end. On SIGINT, SIGTERM or SIGHUP it
    saves a checkpoint at the end of the step; a second signal ends the process at once.

    Args:
        experiment: The settings.
        resume: Continue the run in `experiment.run_dir` from its newest checkpoint; of one that was trained to its end,
            make what is missing of its results.
        restart: With `resume`: where there are checkpoints, but none can be used, train again from the first step.
        saved: Called after every checkpoint.
        write_report: Called at the end, where the settings ask for a report, to write it: with the run's folder, and,
            but for a run of several seeds, its test images and their embeddings; see `tfdml.report.write_run_report`.

    Returns:
        What `result.json` holds (of several seeds: see `seeds.combine`); empty in all but the first of several
        processes of JAX.

    Raises:
        UserError: Something that the user can mend, before training where it can be known then.
        Interrupted: A signal asked for it.
        Halted: An alarm of `stop_on` did; a `UserError` too.
    """
    check_backend(experiment.run)
    one = functools.partial(train, saved=saved, write_report=write_report)
    if experiment.seeds:
        return train_seeds(experiment, one, resume, restart, write_report)
    if experiment.refit:
        select_epochs(experiment, one, resume, restart)
        resume = True
    folder = RunFolder(experiment.run_dir)
    if experiment.run.deterministic and experiment.run.logical_devices < 2:
        distribution.one_operation_at_a_time()
    workers = join()
    with Interruption() as interruption, workers.ending_together():
        place = Place(folder, interruption, workers, saved, write_report)
        if processes().index:
            return _follow(experiment, place, resume)
        try:
            _check_alike(experiment, workers)
            # A run that was killed before its flags were written is as good as none.
            if workers.of_chief(lambda: resume and (processes().count > 1 or not folder.is_untouched())):
                result = _resume(experiment, place, restart)
            else:
                result = _begin(experiment, place)
        except Interrupted as stop:
            stop.left = (
                folder.how_far() if workers.is_chief else f"the run is that of worker 0 ({workers.addresses[0]})"
            )
            raise
        try:
            return workers.of_chief(lambda: result)
        except tf.errors.OpError:
            if not workers.is_chief:
                raise
            return result  # all is written


def _check_alike(experiment: Experiment, workers: Workers) -> None:
    """Refuse to train with workers that were started with other settings."""
    if workers.alone:
        return
    chiefs = Experiment.from_flags(workers.of_chief(experiment.as_flags))
    for field in dataclasses.fields(Experiment):
        other, own = getattr(chiefs, field.name), getattr(experiment, field.name)
        if other != own and field.name not in (*MAY_DIFFER, "weights", "start_from"):
            raise UserError(
                f"--{field.name}={own} on worker {workers.index} and {other} on worker 0: start all with the same flags"
            )


def _begin(experiment: Experiment, place: Place) -> dict[str, Any]:
    folder, workers = place.folder, place.workers

    def check() -> None:
        folder.check_new()
        check_start(experiment.start_from)

    workers.of_chief(check)
    run = RunPhases(experiment, place)
    run.take_up_weights()
    with folder.created(experiment) if workers.is_chief else contextlib.nullcontext():
        try:
            run.describe()
            run.calibrate()
            return run.complete()
        except Exception as error:
            lost = not workers.alone and isinstance(error, LOST)
            if run.monitor.step == 0 and workers.is_chief and not lost:
                folder.discard()
            elif _disk_was_full(error):
                raise UserError(f"{error}, with --resume") from error
            raise


def _resume(experiment: Experiment, place: Place, restart: bool) -> dict[str, Any]:
    folder, workers = place.folder, place.workers
    workers.of_chief(lambda: folder.check_same(experiment))
    with folder.locked() if workers.is_chief else contextlib.nullcontext():
        finished = workers.of_chief(lambda: folder.read_result() if folder.is_finished(experiment.evaluation) else None)
        if finished is not None and processes().count == 1:
            logging.info("%s is finished already: there is nothing left to do", folder.path)
            return finished
        run = RunPhases(experiment, place)
        run.describe()
        if not run.restore(restart):
            run.take_up_weights()
            run.calibrate()
        return run.complete()


def _follow(experiment: Experiment, place: Place, resume: bool) -> dict[str, Any]:
    """The steps of the first process in another one, whose own folder is read by nobody."""
    with tempfile.TemporaryDirectory() as scratch:
        run = RunPhases(experiment, dataclasses.replace(place, folder=RunFolder(scratch)))
        if not (resume and run.restore()):
            run.take_up_weights()
            run.calibrate()
        return run.complete()


def _disk_was_full(error: Exception) -> bool:
    # Keras's fit takes the cause away.
    reason = error.__cause__ or error.__context__
    return isinstance(error, UserError) and reason is not None and is_disk_full(reason)


def run_paths(run_dir: str) -> dict[str, Path]:
    """Where a run's results lie."""
    folder = RunFolder(run_dir)
    return {"embedder": folder.embedder, "result": folder.result, "report": folder.report}
