"""The phases of a run: from weights taken up, over `fit`, to its results."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import Share
from tfdml.errors import UserError, differences
from tfdml.objectives import Calibrated
from tfdml.training import checkpoints, distribution, jax_devices
from tfdml.training.advice import doubts, warned_of_batch_norm
from tfdml.training.assembly import assemble
from tfdml.training.averaging import averaged
from tfdml.training.calibration import calibrate
from tfdml.training.checkpoints import TrainingState
from tfdml.training.evaluating import Evaluator
from tfdml.training.experiment import Experiment
from tfdml.training.finishing import finish
from tfdml.training.interruption import Interruption
from tfdml.training.jax_devices import processes
from tfdml.training.limits import check_memory
from tfdml.training.monitor import TrainingMonitor
from tfdml.training.refit import WORDS, epochs_to_train, final_run
from tfdml.training.run_folder import RunFolder
from tfdml.training.selection import few_classes
from tfdml.training.starting import start_from
from tfdml.training.watching.building import make_watching
from tfdml.training.watching.loggers import Logger
from tfdml.training.workers import Workers


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
        devices = distribution.describe(self.parts.strategy, self.workers)
        data = self.splits.describe(self.experiment.data_dir)
        changed = differences(self.workers.of_chief(lambda: data), data)
        if changed:
            raise UserError(f"the images of worker {self.workers.index} are not those of worker 0: {changed}")
        self.workers.of_chief(lambda: self.folder.describe(data, devices))

    def restore(self, restart: bool = False) -> bool:
        """Continue from the newest checkpoint, of the first process; whether there is one."""
        state = checkpoints.restore_on_all(self.workers, self.folder.checkpoints, self.learner, restart)
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
                jax_devices.part(checkpoints.variables(self.learner))
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
        batches = distribution.own_threads(batches)
        if within:
            # The rest of the epoch in which the run was stopped; the same stream of batches then goes on.
            rest = steps - within
            self._train_on(batches.take(rest), rest, epoch, epoch + 1)
            batches, epoch = batches.skip(rest), epoch + 1
        self._train_on(batches, steps, epoch, epochs)

    def _train_on(self, batches: tf.data.Dataset, steps: int, first_epoch: int, epochs: int) -> None:
        given = distribution.share_of(batches, self.parts.sampler.batch_size, self.workers)
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
