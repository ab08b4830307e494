"""Runs an experiment: starts or resumes it in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import Share
from tfdml.errors import UserError, differences
from tfdml.io.files import is_disk_full
from tfdml.objectives import Calibrated
from tfdml.training import checkpoints
from tfdml.training.build.components import assemble
from tfdml.training.build.initial_weights import calibrate, check_start, start_from
from tfdml.training.build.learner import check_memory, doubts, warned_of_batch_norm
from tfdml.training.checkpoints import TrainingState
from tfdml.training.distributed import devices, jax_processes
from tfdml.training.distributed.devices import check_backend
from tfdml.training.distributed.jax_processes import processes
from tfdml.training.distributed.tensorflow_workers import LOST, Workers, join
from tfdml.training.experiment import Experiment
from tfdml.training.optimizers import averaged
from tfdml.training.run.evaluator import Evaluator
from tfdml.training.run.interruption import Interrupted, Interruption
from tfdml.training.run.monitor import TrainingMonitor
from tfdml.training.run.results import finish
from tfdml.training.run.selection import few_classes
from tfdml.training.run.several import WORDS, epochs_to_train, final_run, select_epochs, train_seeds
from tfdml.training.run_folder import MAY_DIFFER, RunFolder
from tfdml.training.watching.loggers import Logger
from tfdml.training.watching.watcher import make_watching


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is written, by whom, and what it listens to."""

    folder: RunFolder
    interruption: Interruption
    workers: Workers
    saved: Callable[[], None] | None
    write_report: Callable[..., None] | None = None


class RunPhases:
    """What an experiment is made of, and the phases that it goes through. Making one writes nothing.

    Args:
        asked: The experiment.
        place: Where it is written, by whom, and what it listens to.

    Raises:
        UserError: The run could not be trained or measured.
    """

    def __init__(self, asked: Experiment, place: Place):
        self.started = time.perf_counter()
        self.asked = asked
        self.experiment = experiment = final_run(asked)
        self.epochs = epochs_to_train(asked)
        self.folder, self.interruption, self.workers = place.folder, place.interruption, place.workers
        self.write_report = place.write_report
        run, evaluation = experiment.run, experiment.evaluation
        self.parts = assemble(experiment, self.workers)
        self.learner, self.splits = self.parts.learner, self.parts.splits
        among = processes() if self.workers.alone else self.workers
        self.share = Share(self.parts.sampler, among.index, among.count)
        check_memory(self.learner.embedder, self.parts.train_view, self.share.batch_size, self.learner.gradient_cache)
        for doubt in (
            *doubts(experiment.model, self.learner.embedder),
            *few_classes(evaluation.selection, self.splits.validation),
        ):
            logging.warning("%s", doubt)
        logging.info("%s", self.parts.cache.reason)
        self.evaluator = Evaluator(
            evaluation,
            self.epochs,
            self.splits,
            self.parts.evaluation_view,
            self.parts.cache.evaluation,
            self.workers,
        )
        # Of several processes of JAX, each with a folder of its own, the first one's is the run's.
        self.watching = make_watching(
            run, experiment.evaluation_batch_size, self.parts, self.folder, looks=processes().index == 0
        )
        self.monitor = TrainingMonitor(
            self.folder,
            self.parts.sampler.batch_size,
            self.parts.steps_per_epoch,
            lambda epoch: self.evaluator.each_epoch(self.learner, epoch),
            evaluation.selection,
            evaluation.selection_metric,
            run.checkpoint_steps,
            run.keep_checkpoints,
            self.interruption,
            self.workers,
            place.saved,
            self.watching.divergence,
            self.watching.watcher,
            self.watching.projector,
        )
        self.monitor.set_model(self.learner)

    def take_up_weights(self) -> None:
        """Take over the weights that the experiment names."""
        if self.experiment.start_from:
            self.workers.of_chief(lambda: start_from(self.experiment.start_from, self.learner))
            checkpoints.share_weights(self.workers, self.learner)

    def describe(self) -> None:
        """Write down the data and the environment, or see that the data is that of the folder."""
        trained_on = devices.describe(self.parts.strategy, self.workers)
        data = self.splits.describe(self.experiment.data_dir)
        changed = differences(self.workers.of_chief(lambda: data), data)
        if changed:
            raise UserError(f"the images of worker {self.workers.index} are not those of worker 0: {changed}")
        self.workers.of_chief(lambda: self.folder.describe(data, trained_on))

    def restore(self, restart: bool = False) -> bool:
        """Continue from the newest checkpoint, of the first process; whether there is one."""
        state = checkpoints.restore_on_all(self.workers, self.folder.checkpoints, self.learner, restart)
        if processes().count > 1:
            known = None if state is None else dataclasses.asdict(state)
            found = jax_processes.from_first(checkpoints.variables(self.learner), known)
            state = TrainingState(**found) if found else None
        if state is not None:
            self.monitor.resume(state)
            logging.info("resuming %s at step %d", self.folder.path, state.step)
        return state is not None

    def calibrate(self) -> None:
        """Let the objectives measure the training images that ask for it."""
        size, folder = self.experiment.evaluation_batch_size, self.folder.calibration
        with self._naming_bad_images():
            self.workers.of_chief(
                lambda: calibrate(self.learner, self.splits.train, self.evaluator.transform, size, folder)
            )
        if any(isinstance(o, Calibrated) and o.calibrates_on for o in self.learner.objectives):
            checkpoints.share_weights(self.workers, self.learner)

    def complete(self) -> dict[str, Any]:
        """Train to the end, and write the results."""
        with self._naming_bad_images():
            with self._logging(), self.interruption.deferred():
                self._fit()
            if processes().count > 1:
                jax_processes.part(checkpoints.variables(self.learner))
            if processes().index:
                return {}
            seconds = time.perf_counter() - self.started
            about = {"selection": WORDS} if self.asked.refit else {}
            data = self.experiment.data
            with averaged(self.learner):
                return finish(
                    data, self.learner, self.evaluator, self.monitor, self.folder, seconds, about, self.write_report
                )

    def _fit(self) -> None:
        monitor, steps, epochs = self.monitor, self.monitor.steps_per_epoch, self.epochs
        if monitor.records and monitor.epoch_is_open:
            monitor.close_epoch()
        epoch, within = divmod(monitor.step, steps)
        if epoch >= epochs and monitor.records:
            return
        batches = training_batches(
            self.splits.train,
            self.share,
            self.parts.train_view,
            seed=self.experiment.seed,
            first_step=monitor.step,
            cache=self.parts.cache.training,
            cache_limit_mb=self.experiment.cache_limit_mb,
        )
        batches = devices.own_threads(batches)
        if within:
            # The rest of the epoch in which the run was stopped; the same stream of batches then goes on.
            rest = steps - within
            self._train_on(batches.take(rest), rest, epoch, epoch + 1)
            batches, epoch = batches.skip(rest), epoch + 1
        self._train_on(batches, steps, epoch, epochs)

    def _train_on(self, batches: tf.data.Dataset, steps: int, first_epoch: int, epochs: int) -> None:
        given = devices.share_of(batches, self.parts.sampler.batch_size, self.workers)
        verbose = 0 if not self.workers.is_chief else 1 if sys.stdout.isatty() else 2
        with warned_of_batch_norm():
            self.learner.fit(
                given,
                initial_epoch=first_epoch,
                epochs=epochs,
                steps_per_epoch=steps,
                callbacks=[self.monitor],
                verbose=verbose,
                shuffle=False,
            )

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """A block in which another library is told of the epochs, where the run is to."""
        if not self.experiment.log_to or not self.workers.is_chief or processes().index:
            yield
            return
        logger = Logger(self.experiment.log_to, self.folder.path, dataclasses.asdict(self.experiment))
        self.monitor.logger = logger
        logger.begin(self.learner)
        try:
            yield
        finally:
            self.monitor.logger = None
            logger.end()

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
        devices.one_operation_at_a_time()
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
