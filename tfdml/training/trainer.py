"""Runs an experiment: `fit`, evaluation, and the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml.data.pipeline import explain_failure, training_batches
from tfdml.data.sampling import Share
from tfdml.disk_space import is_disk_full
from tfdml.errors import UserError
from tfdml.training import checkpoints, distribution, jax_devices
from tfdml.training.advice import doubts
from tfdml.training.assembly import assemble
from tfdml.training.backends import check_backend
from tfdml.training.calibration import calibrate
from tfdml.training.checkpoints import TrainingState
from tfdml.training.evaluating import Evaluator
from tfdml.training.experiment import Experiment
from tfdml.training.finishing import finish
from tfdml.training.interruption import Interrupted, Interruption
from tfdml.training.jax_devices import processes
from tfdml.training.limits import check_memory
from tfdml.training.monitor import TrainingMonitor
from tfdml.training.run_folder import RunFolder
from tfdml.training.starting import check_start, start_from

# Of a resumed run: where the folder lies, and where the images, which are compared by their checksums.
_MAY_DIFFER = ("run_dir", "data_dir")


def train(experiment: Experiment, resume: bool = False, restart: bool = False) -> dict[str, Any]:
    """Run an experiment to its end and return what `result.json` holds.

    Stopped or killed at any moment, a run is continued by `resume` to the same end. On SIGINT, SIGTERM or SIGHUP it
    saves a checkpoint at the end of the step; a second signal ends the process at once.

    Args:
        experiment: The settings.
        resume: Continue the run in `experiment.run_dir` from its newest checkpoint; of one that was trained to its end,
            make what is missing of its results.
        restart: With `resume`: where there are checkpoints, but none can be used, train again from the first step.

    Returns:
        What `result.json` holds; empty in all but the first of several processes.

    Raises:
        UserError: Something that the user can mend, before training where it can be known then.
        Interrupted: A signal asked for it.
    """
    check_backend(experiment.run)
    folder = RunFolder(experiment.run_dir)
    with Interruption() as interruption:
        if processes().index:
            return _follow(experiment, interruption, resume)
        try:
            # A run that was killed before its flags were written is as good as none.
            if resume and (processes().count > 1 or not folder.is_untouched()):
                return _resume(experiment, folder, interruption, restart)
            return _begin(experiment, folder, interruption)
        except Interrupted as stop:
            stop.left = folder.how_far()
            raise


def _begin(experiment: Experiment, folder: RunFolder, interruption: Interruption) -> dict[str, Any]:
    folder.check_new()
    check_start(experiment.start_from)
    run = _Run(experiment, folder, interruption)
    run.take_up_weights()
    with folder.created(experiment):
        try:
            run.describe()
            run.calibrate()
            return run.complete()
        except Exception as error:
            if run.monitor.step == 0:
                folder.discard()
            elif _disk_was_full(error):
                raise UserError(f"{error}, with --resume") from error
            raise


def _resume(experiment: Experiment, folder: RunFolder, interruption: Interruption, restart: bool) -> dict[str, Any]:
    _check_same(experiment, folder.load_experiment())
    with folder.locked():
        finished = folder.read_result() if folder.is_finished(experiment.evaluation) else None
        if finished is not None and processes().count == 1:
            logging.info("%s is finished already: there is nothing left to do", folder.path)
            return finished
        run = _Run(experiment, folder, interruption)
        run.describe()
        if not run.restore(restart):
            run.take_up_weights()
            run.calibrate()
        return run.complete()


def _follow(experiment: Experiment, interruption: Interruption, resume: bool) -> dict[str, Any]:
    """The steps of the first process in another one, whose own folder is read by nobody."""
    with tempfile.TemporaryDirectory() as scratch:
        run = _Run(experiment, RunFolder(scratch), interruption)
        if not (resume and run.restore()):
            run.take_up_weights()
            run.calibrate()
        return run.complete()


def _check_same(asked: Experiment, stored: Experiment) -> None:
    for field in dataclasses.fields(Experiment):
        old, new = getattr(stored, field.name), getattr(asked, field.name)
        if old != new and field.name not in _MAY_DIFFER:
            raise UserError(
                f"--resume: the run was started with --{field.name}={old}, not {new}; leave the flag out, or start anew"
            )


def _disk_was_full(error: Exception) -> bool:
    # Keras's fit takes the cause away.
    reason = error.__cause__ or error.__context__
    return isinstance(error, UserError) and reason is not None and is_disk_full(reason)


class _Run:
    """What an experiment is made of, and the phases that it goes through. Making one writes nothing.

    Raises:
        UserError: The run could not be trained or measured.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder, interruption: Interruption):
        self.started = time.perf_counter()
        self.experiment, self.folder, self.interruption = experiment, folder, interruption
        run, evaluation = experiment.run, experiment.evaluation
        if run.deterministic and run.logical_devices < 2:
            distribution.one_operation_at_a_time()
        self.parts = assemble(experiment)
        self.learner, self.splits = self.parts.learner, self.parts.splits
        check_memory(self.learner.embedder, self.parts.train_view, self.parts.sampler.batch_size)
        for doubt in doubts(experiment.model, self.learner.embedder):
            logging.warning("%s", doubt)
        logging.info("%s", self.parts.cache.reason)
        self.evaluator = Evaluator(
            evaluation, experiment.epochs, self.splits, self.parts.evaluation_view, self.parts.cache.evaluation
        )
        self.monitor = TrainingMonitor(
            folder,
            self.parts.sampler.batch_size,
            self.parts.steps_per_epoch,
            lambda epoch: self.evaluator.each_epoch(self.learner, epoch),
            evaluation.selection,
            run.checkpoint_steps,
            run.keep_checkpoints,
            interruption,
        )
        self.monitor.set_model(self.learner)

    def take_up_weights(self) -> None:
        """Take over the weights that the experiment names."""
        if self.experiment.start_from:
            start_from(self.experiment.start_from, self.learner)

    def describe(self) -> None:
        """Write down the data and the environment, or see that the data is that of the folder."""
        devices = distribution.describe(self.parts.strategy)
        self.folder.describe(self.splits.describe(self.experiment.data_dir), devices)

    def restore(self, restart: bool = False) -> bool:
        """Continue from the newest checkpoint, of the first process; whether there is one."""
        state = checkpoints.restore_latest(self.folder.checkpoints, self.learner, restart)
        if processes().count > 1:
            known = None if state is None else dataclasses.asdict(state)
            found = jax_devices.from_first(checkpoints.variables(self.learner), known)
            state = TrainingState(**found) if found else None
        if state is not None:
            self.monitor.resume(state)
            logging.info("resuming %s at step %d", self.folder.path, state.step)
        return state is not None

    def calibrate(self) -> None:
        """Let the objectives measure the training images that ask for it."""
        with self._naming_bad_images():
            calibrate(
                self.learner,
                self.splits.train,
                self.evaluator.transform,
                self.experiment.evaluation_batch_size,
                self.folder.calibration,
            )

    def complete(self) -> dict[str, Any]:
        """Train to the end, and write the results."""
        with self._naming_bad_images():
            with self.interruption.deferred():
                self._fit()
            if processes().count > 1:
                jax_devices.part(checkpoints.variables(self.learner))
            if processes().index:
                return {}
            seconds = time.perf_counter() - self.started
            dataset = self.experiment.dataset
            return finish(dataset, self.learner, self.evaluator, self.monitor, self.folder, seconds)

    def _fit(self) -> None:
        monitor, steps, epochs = self.monitor, self.monitor.steps_per_epoch, self.experiment.epochs
        if monitor.records and monitor.epoch_is_open:
            monitor.close_epoch()
        epoch, within = divmod(monitor.step, steps)
        if epoch >= epochs and monitor.records:
            return
        batches = training_batches(
            self.splits.train,
            Share(self.parts.sampler, processes().index, processes().count),
            self.parts.train_view,
            seed=self.experiment.seed,
            first_step=monitor.step,
            cache=self.parts.cache.training,
            cache_limit_mb=self.experiment.cache_limit_mb,
        )
        batches = distribution.own_threads(batches)
        fit_arguments = {"callbacks": [monitor], "verbose": 1 if sys.stdout.isatty() else 2, "shuffle": False}
        if within:
            # The rest of the epoch in which the run was stopped; the same stream of batches then goes on.
            rest = steps - within
            self.learner.fit(
                batches.take(rest), initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=rest, **fit_arguments
            )
            batches, epoch = batches.skip(rest), epoch + 1
        self.learner.fit(batches, initial_epoch=epoch, epochs=epochs, steps_per_epoch=steps, **fit_arguments)

    @contextlib.contextmanager
    def _naming_bad_images(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            for split in (self.splits.train, *self.splits.evaluated().values()):
                explained = explain_failure(error, split)
                if explained is not None:
                    raise explained from error
            raise


def run_paths(run_dir: str) -> dict[str, Path]:
    """Where a run's results lie."""
    folder = RunFolder(run_dir)
    return {"embedder": folder.embedder, "result": folder.result, "report": folder.report}
