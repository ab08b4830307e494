"""Runs an experiment: starts or resumes it in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import explain_failure
from tfdml.data.pipeline import CACHE_LIMIT_MB, decoded_source, own_threads, training_batches
from tfdml.data.sampling import NeighborSampler, Share
from tfdml.errors import UserError, differences
from tfdml.io.files import write_json
from tfdml.models import MetricLearner
from tfdml.models.embedder import untrained_batch_norm
from tfdml.options import flag_text
from tfdml.retrieval import confusable_classes
from tfdml.run_folder import FOLD_PREFIX, SEED_PREFIX, RunFolder
from tfdml.training import checkpoints, workers
from tfdml.training.build import (
    Components,
    build_components,
    calibrate,
    check_start,
    start_from,
    whitening,
)
from tfdml.training.callbacks import TrainingMonitor
from tfdml.training.choices import Neighbors, Whitened
from tfdml.training.interruption import Interrupted, Interruption
from tfdml.training.optimizers import averaged
from tfdml.training.results import (
    Evaluator,
    TrainingRun,
    combine,
    measure_together,
    selection_warnings,
    write_results,
)
from tfdml.training.settings import MAY_DIFFER, MOST_CLASSES, EvaluationSettings, Experiment
from tfdml.training.watching import check_logger, logger_of
from tfdml.version import __version__, installed


def train(
    experiment: Experiment,
    resume: bool = False,
    saved: Callable[[], None] = lambda: None,
    *,
    finish: bool = False,
) -> TrainingRun | None:
    """Run an experiment to its end.

    Stopped or killed at any moment, a run is continued by `resume` to the same end. On SIGINT,
    SIGTERM or SIGHUP it saves a checkpoint at the end of the execution of steps; a second signal
    ends the process at once.

    Args:
        experiment: The settings.
        resume: Continue the run in `experiment.run_dir` from its newest checkpoint; of one that was
            trained to its end, make what is missing of its results.
        saved: Called after every checkpoint.
        finish: With `resume`: train no further, and make the results of what has been trained.

    Returns:
        The run: of several seeds or folds, with `runs`. None in all but the first of several
        processes.

    Raises:
        UserError: Something that the user can mend, before training where it can be known then.
        Interrupted: A signal asked for it.

    Example:
        >>> run = train(experiment)
        >>> run.metrics["num_queries"], run.folder.embedder.name
        (428, 'embedder.keras')
    """
    workers.check_backend()
    if experiment.seeds or experiment.folds:
        if finish:
            raise UserError(
                "ends one run: name its folder, such as run_dir=RUN/seed_0", finish=True
            )
        return _train_several(experiment, resume, saved)
    folder = RunFolder(experiment.run_dir)
    if experiment.deterministic and experiment.logical_devices < 2:
        workers.one_operation_at_a_time()
    processes = workers.join(experiment.logical_devices)
    with (
        Interruption() as interruption,
        processes.ending_together(),
        contextlib.ExitStack() as owned,
    ):
        try:
            _check_alike(experiment, processes)
            # A run that was killed before its flags were written is as good as none.
            resume = processes.of_chief(lambda: resume and not folder.is_untouched())
            if not resume:
                processes.of_chief(lambda: _check_new(folder, experiment))
            else:
                processes.of_chief(lambda: experiment.check_resumes())
                if processes.is_chief:
                    owned.enter_context(folder.locked())
                result = processes.of_chief(lambda: _finished(folder, experiment))
                if result is not None:
                    return TrainingRun(experiment, result) if processes.is_chief else None
            trainer = Trainer(experiment, processes, interruption, saved)
            if not resume:
                for line in final_length(trainer.parts):
                    logging.info("%s", line)
                trainer.load_initial_weights()
                if processes.is_chief:
                    owned.enter_context(folder.created(experiment.as_flags()))
            try:
                trainer.describe()
                if not (resume and trainer.restore()):
                    if resume:
                        trainer.load_initial_weights()
                    trainer.calibrate()
                if finish:
                    trainer.end()
                else:
                    trainer.fit()
                return trainer.finish()
            except Exception as error:
                lost = isinstance(error, workers.LOST)
                if not resume and trainer.monitor.step == 0 and processes.is_chief and not lost:
                    shutil.rmtree(folder.path, ignore_errors=True)  # nothing was trained
                raise
        except Interrupted as stop:
            of_chief = f"the run is that of worker 0 ({processes.addresses[0]})"
            stop.left = folder.how_far() if processes.is_chief else of_chief
            raise


def _finished(folder: RunFolder, experiment: Experiment) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do; None of another."""
    files = [folder.embedder, *([folder.moments] if experiment.moment_embedder else [])]
    files += [folder.text_embedder] if experiment.text_backbone else []
    result = folder.read_result() if all(path.is_file() for path in files) else None
    if result is not None:
        logging.info("%s is finished already: there is nothing left to train", folder.path)
    return result


def runs_of(experiment: Experiment) -> list[Experiment]:
    """Return the runs of several seeds, or of folds: in the folders `seed_<seed>` or `fold_<part>`
    of that of all.

    Example:
        >>> [run.run_dir for run in runs_of(Experiment(run_dir="runs/cars", seeds="2"))]
        ['runs/cars/seed_0', 'runs/cars/seed_1']
    """
    change = functools.partial(dataclasses.replace, experiment, seeds=(), folds=0)
    runs = []
    for seed in experiment.seed_list():
        runs.append(change(seed=seed, run_dir=f"{experiment.run_dir}/{SEED_PREFIX}{seed}"))
    for part in range(1, experiment.folds + 1):
        fold = change(
            holdout_classes=1 / experiment.folds,
            holdout_sampling=dataclasses.replace(experiment.holdout_sampling, part=part),
            run_dir=f"{experiment.run_dir}/{FOLD_PREFIX}{part}",
        )
        runs.append(fold)
    return runs


def _train_several(experiment: Experiment, resume: bool, saved: Callable[[], None]) -> TrainingRun:
    """Train a run for each of the seeds or folds, one after another, then write their common
    result.

    Each is an ordinary run in its own folder; with `resume`, those that have ended are kept and the
    others resume.
    """
    if workers.rank_and_count()[1] > 1:
        raise UserError(
            "seeds and folds train run after run in one process: leave them out where several train"
        )
    folder = RunFolder(experiment.run_dir)
    resume = resume and not folder.is_untouched()
    if resume:
        experiment.check_resumes()
    else:
        _check_new(folder, experiment)
    with folder.locked() if resume else folder.created(experiment.as_flags()):
        runs: dict[str, TrainingRun] = {}
        experiments = runs_of(experiment)
        for one in experiments:
            place = RunFolder(one.run_dir).path
            name = place.name.replace("_", " ")
            logging.info("%s", name)
            try:
                run = train(one, place.exists(), saved)
            except Interrupted as stop:
                ended = f"{len(runs)} of {len(experiments)} {name.split()[0]}s have ended"
                stop.left = f"{ended}; continue with --run_dir={folder.path} --resume"
                raise
            except UserError as error:
                if not any(entry.is_dir() for entry in folder.path.iterdir()):
                    shutil.rmtree(folder.path, ignore_errors=True)  # the first one has left nothing
                raise type(error)(f"{name}: {error}") from error
            assert run is not None
            # Images and network are loaded again where they are asked for.
            runs[place.name] = TrainingRun(one, run.result)
            # The next one's memory is that of a process of its own.
            keras.utils.clear_session()
        result = folder.read_result()
        if result is None:
            result = combine(runs)
            trained = list(runs.values())
            if experiment.folds and trained[0].splits.searched_by_images("test"):
                result["metrics_together"] = measure_together(trained)
            write_json(folder.result, result)
    return TrainingRun(experiment, result, list(runs.values()))


def _check_alike(experiment: Experiment, processes: workers.Processes) -> None:
    """Refuse to train with processes of other versions or with other settings."""
    if processes.alone:
        return
    versions = {"tfdml": __version__, **installed(("tensorflow", "keras", "jax", "numpy"))}
    chief = processes.of_chief(lambda: {"versions": versions, "flags": experiment.as_flags()})
    here = f"on worker {processes.index}"
    for name in sorted(versions.keys() | chief["versions"].keys()):
        own, other = versions.get(name, "none"), chief["versions"].get(name, "none")
        if own != other:
            raise UserError(
                f"{name} {own} {here} and {other} on worker 0: install the same version"
            )
    for name, own, other in experiment.differences_to(Experiment.from_flags(chief["flags"])):
        if name not in (*MAY_DIFFER, "weights", "start_from"):
            values = f"--{name}={flag_text(own)} {here} and {flag_text(other)} on worker 0"
            raise UserError(f"{values}: use the same")


class Trainer:
    """The objects of a run, and what is done with them, in the order of the methods. Making one
    writes nothing.

    Args:
        experiment: The settings.
        processes: Who trains.
        interruption: Asked after each step whether the run is to stop.
        saved: See `train`.

    Raises:
        UserError: The run could not be trained or measured.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: workers.Processes,
        interruption: Interruption,
        saved: Callable[[], None] = lambda: None,
    ):
        self.started = time.perf_counter()
        check_logger(experiment.log_to)
        self.experiment, self.processes, self.interruption = experiment, processes, interruption
        self.parts = parts = build_components(experiment, processes)
        self.learner, self.splits, self.folder = parts.learner, parts.splits, parts.folder
        for warning in selection_warnings(experiment.selection, self.splits.validation):
            logging.warning("%s", warning)
        logging.info("%s", parts.cache.reason)
        if (together := self.learner.steps_per_execution) < experiment.steps_per_execution:
            asked = f"--steps_per_execution={experiment.steps_per_execution}"
            logging.warning(
                "%d steps an execution, not %s: epochs have %d",
                together,
                asked,
                parts.steps_per_epoch,
            )
        self.evaluator = Evaluator(
            experiment.part(EvaluationSettings),
            self.splits,
            parts.evaluation_view,
            parts.cache.kept,
            processes,
        )
        self.monitor = TrainingMonitor(parts, self.evaluator, interruption, saved)

    def load_initial_weights(self) -> None:
        """Take over the weights that the experiment names."""
        if self.experiment.start_from:
            self.processes.of_chief(lambda: start_from(self.experiment.start_from, self.learner))
            checkpoints.share_weights(self.processes, self.learner)

    def describe(self) -> None:
        """Write down the data and the environment, or see that the data is that of the folder."""
        devices = workers.device_names(self.parts.strategy, self.processes)
        environment = workers.environment(devices)
        data = self.splits.describe(self.experiment.data_dir)
        if changed := differences(self.processes.of_chief(lambda: data), data):
            raise UserError(
                f"the images of worker {self.processes.index} are not those of worker 0: {changed}"
            )
        weights = self.experiment.weights
        self.processes.of_chief(lambda: self.folder.describe(data, environment, weights))

    def restore(self) -> bool:
        """Continue from the newest checkpoint of the chief; whether there is one."""
        state = checkpoints.restore_latest(self.folder.checkpoints, self.learner, self.processes)
        if state is not None:
            self.monitor.resume(state)
            logging.info("resuming %s at step %d", self.folder.path, state.step)
        return state is not None

    def calibrate(self) -> None:
        """Whiten the projection where that is asked for and it is new; let objectives measure the
        training images."""
        experiment = self.experiment
        new = isinstance(experiment.head, Whitened) and not experiment.start_from
        with self._naming_bad_images():
            view, whiten = self.parts.evaluation_view, whitening(experiment.head) if new else None
            calibrate(self.learner, self.splits.train, view, self.processes, whiten)

    def fit(self) -> None:
        """Train to the last epoch."""
        monitor, parts, steps, view = (
            self.monitor,
            self.parts,
            self.parts.steps_per_epoch,
            self.parts.train_view,
        )
        loggers = logger_of(self.experiment.log_to) if self.processes.is_chief else []
        with self._naming_bad_images(), self.interruption.deferred():
            monitor.close_epoch()
            left = monitor.step < self.experiment.epochs * steps
            images = (
                decoded_source(self.splits.train, view, CACHE_LIMIT_MB)
                if parts.cache.kept and left
                else False
            )
            share = Share(parts.sampler, self.processes.index, self.processes.count)
            for first, last in self._spans():
                if isinstance(parts.sampler, NeighborSampler) and first < last:
                    self._update_neighbors(parts.sampler, first)
                batches = training_batches(
                    self.splits.train,
                    share,
                    view,
                    seed=self.experiment.seed,
                    first_step=monitor.step,
                    cache=images,
                )
                self.learner.fit(
                    self.processes.distribute(own_threads(batches), parts.sampler.batch_size),
                    initial_epoch=first,
                    epochs=last,
                    steps_per_epoch=steps - monitor.step % steps,
                    callbacks=[monitor, *loggers],
                    verbose=2 if self.processes.is_chief else 0,
                    shuffle=False,
                )

    def end(self) -> None:
        """Close the epoch that the run is in, as its last.

        Raises:
            UserError: No step has been trained.
        """
        if not self.monitor.step:
            raise UserError(
                f"{self.folder.path}: no step has been trained, so there is nothing to finish"
            )
        with self._naming_bad_images(), self.interruption.deferred():
            self.monitor.close_epoch(within=True)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first epoch of each call of `fit`, and that after the last.

        A call ends where the neighbors are searched again, so that no batch is made ahead of them.
        """
        monitor, epochs = self.monitor, self.experiment.epochs
        sampling = self.experiment.sampling
        every = sampling.every if isinstance(sampling, Neighbors) else max(epochs, 1)
        while not monitor.records or monitor.step < epochs * self.parts.steps_per_epoch:
            epoch, within = divmod(monitor.step, self.parts.steps_per_epoch)
            # First the rest of the epoch in which the run was stopped.
            yield epoch, epoch + 1 if within else min((epoch // every + 1) * every, epochs)

    def _update_neighbors(self, sampler: NeighborSampler, epoch: int) -> None:
        """Have batches of the classes that the embedder confuses, by the last search before an
        epoch.

        What a search found is in the checkpoints of the steps that depend on it.
        """
        train, sampling = self.splits.train, self.experiment.sampling
        assert isinstance(sampling, Neighbors)
        first_step = (epoch - epoch % sampling.every) * self.parts.steps_per_epoch
        if self.monitor.step == first_step:
            embeddings = self.evaluator.embed(self.learner.embedder, "train")

            def search() -> list[list[int]]:
                classes = confusable_classes(
                    embeddings,
                    train.labels,
                    most=self.experiment.classes_per_batch or MOST_CLASSES,
                    skip_top=sampling.skip_top,
                    relative_margin=sampling.relative_margin,
                )
                return classes.tolist()

            self.monitor.neighbors = self.processes.of_chief(search)
        sampler.update(np.array(self.monitor.neighbors), first_step)
        self.monitor.watcher.forget_batches()

    def finish(self) -> TrainingRun | None:
        """Write the results, and return the run; None in a process that has nothing to do with
        them."""
        left = self.processes.leave(list(checkpoints.variables(self.learner).values()))
        if left is None:
            return None
        self.evaluator.processes = left
        seconds = time.perf_counter() - self.started
        with self._naming_bad_images(), averaged(self.learner):
            planned = self.experiment.epochs * self.parts.steps_per_epoch
            run = write_results(
                self.experiment,
                self.learner,
                self.evaluator,
                self.monitor.state(),
                seconds,
                planned,
            )
        # The others wait for the chief. It needs none of them any more.
        with contextlib.suppress(*workers.LOST) if left.is_chief else contextlib.nullcontext():
            left.of_chief(lambda: None)
        return run

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


def _check_new(folder: RunFolder, experiment: Experiment) -> None:
    folder.check_new()
    check_start(experiment.start_from)


def describe(experiment: Experiment) -> str:
    """Return what a run would do: images, network, terms and steps. Loads the data and builds the
    model.

    Args:
        experiment: The settings.

    Raises:
        UserError: The run could not start.
    """
    _check_new(RunFolder(experiment.run_dir), experiment)
    parts = build_components(experiment)
    splits, learner, batch_size = parts.splits, parts.learner, parts.sampler.batch_size
    steps = parts.steps_per_epoch * experiment.epochs
    message = untrained_batch_norm(learner.embedder)
    views = [] if experiment.features else ["views", f"  training   {parts.train_view}"]
    views += [] if experiment.features else [f"  evaluation {parts.evaluation_view}"]
    lines = [
        *([f"WARNING: {message}"] if message and not experiment.start_from else []),
        *selection_warnings(experiment.selection, splits.validation),
        f"data         {experiment.data_name}",
        *(
            f"  {name:<18}{len(split):>9,} images of {split.num_classes:,} classes"
            for name, split in ({"train": splits.train} | splits.evaluated()).items()
        ),
        *views,
        f"cache        {parts.cache.reason}",
        f"embedder     {experiment.head if experiment.features else experiment.backbone}: "
        f"{learner.embedder.count_params():,} parameters, "
        f"{learner.embedder.embedding_dim}-d",
        "objectives",
        *(f"  {term!r}" for term in learner.objectives),
        "trained             parameters   learning rate",
        *_trained(experiment.learning_rates(experiment.text_backbone), learner),
        f"batches      {batch_size} images",
        f"schedule     {parts.steps_per_epoch:,} steps an epoch, {experiment.epochs} epochs: "
        f"{steps:,} steps, "
        f"{steps * batch_size:,} images, {steps * batch_size / len(splits.train):.1f} times the "
        "training images",
        f"devices      {', '.join(workers.device_names(parts.strategy))}",
        *final_length(parts),
    ]
    return "\n".join([*lines, "", "as a flag file:", experiment.as_flags()])


def final_length(parts: Components) -> Iterator[str]:
    """Yield how long a final model trains, and how often it sees an image, next to the run that it
    is final to; nothing of another run."""
    experiment, train_images = parts.experiment, parts.splits.train
    if not experiment.final_of:
        return
    measured = RunFolder(experiment.final_of).epoch_length()
    images_per_step = experiment.epochs * parts.sampler.batch_size
    seen = images_per_step * parts.steps_per_epoch / len(set(train_images.names))
    seen_before = images_per_step * measured.steps / measured.images
    length = f"{experiment.epochs} epochs of {parts.steps_per_epoch:,} steps"
    before = f"{measured.steps:,} steps an epoch on {measured.classes:,}"
    yield (
        f"final model of {experiment.final_of}: {length} on {train_images.num_classes:,} classes, "
        f"where the measured run had {before}; nothing is measured"
    )
    yield (
        f"an image is seen {seen:.1f} times, in the measured run {seen_before:.1f} times; "
        f"--steps_per_epoch={measured.steps} takes as many steps as that run"
    )


def _trained(rates: Mapping[str, float], learner: MetricLearner) -> Iterator[str]:
    groups = [
        (part, part, variables)
        for part, variables in learner.parts().items()
        if part != "objectives"
    ]
    groups += [("objectives", term.name, term.trainable_variables) for term in learner.objectives]
    for part, name, variables in groups:
        count = sum(math.prod(variable.shape) for variable in variables)
        yield f"  {name:<18}{count:>9,}   {f'{rates[part]:g}' if count else '-'}"
