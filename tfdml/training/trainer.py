"""Runs an experiment: starts or resumes it in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.faults import explain_failure
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
    adapt,
    build_components,
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
        _telling_what_is_left(folder, processes),
    ):
        _check_alike(experiment, processes)
        state = open_run(experiment, resume, processes, owned)
        if state is RunState.FINISHED:
            return _finished_run(experiment) if processes.is_chief else None
        trainer = Trainer(experiment, processes, interruption, saved)
        if state is RunState.NEW:
            trainer.create_folder(owned)
        trainer.record_origin()
        trainer.start()
        if finish:
            trainer.end()
        else:
            trainer.fit()
        return trainer.finish()


class RunState(enum.Enum):
    """In which state a run is opened."""

    NEW = "new"
    RESUMED = "resumed"
    FINISHED = "finished"


def open_run(
    experiment: Experiment,
    resume: bool,
    processes: workers.Processes,
    owned: contextlib.ExitStack,
) -> RunState:
    """Return whether a run is new, resumed or finished, and keep other runs out of one that is
    there.

    A run that was killed before its flags were written is new.

    Args:
        experiment: The settings.
        resume: Whether the run in `experiment.run_dir` is to be continued.
        processes: Who trains: the chief looks for all.
        owned: Keeps the lock of the folder.

    Raises:
        UserError: A new run would be written over another, or the run to resume is not there, was
            started with other settings, or is another process's.
    """
    folder = RunFolder(experiment.run_dir)
    is_new = processes.of_chief(lambda: not resume or folder.is_untouched())
    if is_new:
        processes.of_chief(lambda: _check_new(folder, experiment))
        return RunState.NEW
    processes.of_chief(experiment.check_resumes)
    if processes.is_chief:
        owned.enter_context(folder.locked())
    is_finished = processes.of_chief(lambda: _is_finished(folder, experiment))
    return RunState.FINISHED if is_finished else RunState.RESUMED


def _check_new(folder: RunFolder, experiment: Experiment) -> None:
    folder.check_new()
    check_start(experiment.start_from)


def _is_finished(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether a run has nothing left to do."""
    files = [folder.embedder]
    if experiment.moment_embedder:
        files.append(folder.moments)
    if experiment.text_backbone:
        files.append(folder.text_embedder)
    return all(path.is_file() for path in files) and folder.read_result() is not None


def _finished_run(experiment: Experiment) -> TrainingRun:
    folder = RunFolder(experiment.run_dir)
    result = folder.read_result()
    assert result is not None
    logging.info("%s is finished already: there is nothing left to train", folder.path)
    return TrainingRun(experiment, result)


@contextlib.contextmanager
def _telling_what_is_left(folder: RunFolder, processes: workers.Processes) -> Iterator[None]:
    """Enter a block of whose interruption it is said how far the run has come."""
    try:
        yield
    except Interrupted as stop:
        if processes.is_chief:
            stop.left = folder.how_far()
        else:
            stop.left = f"the run is that of worker 0 ({processes.addresses[0]})"
        raise


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
    with contextlib.ExitStack() as owned:
        state = open_run(experiment, resume, workers.Processes(), owned)
        if state is RunState.NEW:
            owned.enter_context(folder.new_run(experiment.as_flags()))
        runs = _train_each(experiment, folder, saved)
        result = folder.read_result()
        if result is None:
            result = combine(runs)
            trained = list(runs.values())
            if experiment.folds and trained[0].splits.searched_by_images("test"):
                result["metrics_together"] = measure_together(trained)
            write_json(folder.result, result)
    return TrainingRun(experiment, result, list(runs.values()))


def _train_each(
    experiment: Experiment, folder: RunFolder, saved: Callable[[], None]
) -> dict[str, TrainingRun]:
    """Return the run of each seed or fold, by the name of its folder."""
    runs: dict[str, TrainingRun] = {}
    experiments = runs_of(experiment)
    for run_experiment in experiments:
        path = RunFolder(run_experiment.run_dir).path
        name = path.name.replace("_", " ")
        logging.info("%s", name)
        try:
            run = train(run_experiment, path.exists(), saved)
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
        runs[path.name] = TrainingRun(run_experiment, run.result)
        # The next one's memory is that of a process of its own.
        keras.utils.clear_session()
    return runs


def _check_alike(experiment: Experiment, processes: workers.Processes) -> None:
    """Refuse to train with processes of other versions or with other settings."""
    if processes.alone:
        return
    versions = {"tfdml": __version__, **installed(("tensorflow", "keras", "jax", "numpy"))}
    chief = processes.of_chief(lambda: {"versions": versions, "flags": experiment.as_flags()})
    here = f"on worker {processes.index}"
    for name in sorted(versions.keys() | chief["versions"].keys()):
        value = versions.get(name, "none")
        chiefs_value = chief["versions"].get(name, "none")
        if value != chiefs_value:
            raise UserError(
                f"{name} {value} {here} and {chiefs_value} on worker 0: install the same version"
            )
    for name, value, chiefs_value in experiment.differences_to(
        Experiment.from_flags(chief["flags"])
    ):
        if name not in (*MAY_DIFFER, "weights", "start_from"):
            values = f"--{name}={flag_text(value)} {here} and {flag_text(chiefs_value)} on worker 0"
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
        self.experiment = experiment
        self.processes = processes
        self.interruption = interruption
        self.components = components = build_components(experiment, processes)
        self.learner = components.learner
        self.splits = components.splits
        self.folder = components.folder
        for warning in selection_warnings(experiment.selection, self.splits.validation):
            logging.warning("%s", warning)
        logging.info("%s", components.cache.reason)
        self._warn_of_shorter_executions()
        self.evaluator = Evaluator(
            experiment.part(EvaluationSettings),
            self.splits,
            components.evaluation_view,
            components.cache.kept,
            processes,
        )
        self.monitor = TrainingMonitor(components, self.evaluator, interruption, saved)

    def _warn_of_shorter_executions(self) -> None:
        steps, asked = self.learner.steps_per_execution, self.experiment.steps_per_execution
        if steps < asked:
            logging.warning(
                "%d steps an execution, not --steps_per_execution=%d: epochs have %d",
                steps,
                asked,
                self.components.steps_per_epoch,
            )

    def create_folder(self, owned: contextlib.ExitStack) -> None:
        """Create the folder of a new run, which goes again if the run fails before its first step.

        Args:
            owned: Keeps the lock of the folder.
        """
        for line in final_length(self.components):
            logging.info("%s", line)
        if self.processes.is_chief:
            owned.enter_context(self.folder.new_run(self.experiment.as_flags()))
            owned.enter_context(self._removing_untrained())

    @contextlib.contextmanager
    def _removing_untrained(self) -> Iterator[None]:
        try:
            yield
        except workers.LOST:
            raise
        except Exception:
            if self.monitor.step == 0:
                shutil.rmtree(self.folder.path, ignore_errors=True)
            raise

    def start(self) -> None:
        """Continue from the newest checkpoint; without one, take over the weights that the
        experiment names, and adapt the learner."""
        if not self.restore():
            self.load_initial_weights()
            self.adapt()
            if self.experiment.interpolate.share != 1 and self.processes.is_chief:
                checkpoints.save_model(self.folder.start, self.learner.embedder)

    def load_initial_weights(self) -> None:
        """Take over the weights that the experiment names."""
        if self.experiment.start_from:
            self.processes.of_chief(lambda: start_from(self.experiment.start_from, self.learner))
            checkpoints.share_weights(self.processes, self.learner)

    def record_origin(self) -> None:
        """Write down the data and the environment, or see that the data is that of the folder."""
        devices = workers.device_names(self.components.strategy, self.processes)
        environment = workers.environment(devices)
        data = self.splits.identity(self.experiment.data_dir)
        if changed := differences(self.processes.of_chief(lambda: data), data):
            raise UserError(
                f"the images of worker {self.processes.index} are not those of worker 0: {changed}"
            )
        weights = self.experiment.weights
        self.processes.of_chief(lambda: self.folder.record(data, environment, weights))

    def restore(self) -> bool:
        """Continue from the newest checkpoint of the chief; whether there is one."""
        state = checkpoints.restore_latest(self.folder.checkpoints, self.learner, self.processes)
        if state is not None:
            self.monitor.resume(state)
            logging.info("resuming %s at step %d", self.folder.path, state.step)
        return state is not None

    def adapt(self) -> None:
        """Whiten the projection where that is asked for and it is new; let objectives measure the
        training images."""
        head, view = self.experiment.head, self.components.evaluation_view
        is_new = isinstance(head, Whitened) and not self.experiment.start_from
        whiten = whitening(head) if is_new else None
        with self._naming_bad_images():
            adapt(self.learner, self.splits.train, view, self.processes, whiten)

    def fit(self) -> None:
        """Train to the last epoch."""
        loggers = logger_of(self.experiment.log_to) if self.processes.is_chief else []
        verbosity = 2 if self.processes.is_chief else 0
        steps = self.components.steps_per_epoch
        with self._naming_bad_images(), self.interruption.deferred():
            self.monitor.close_epoch()
            images = self._decoded_images()
            for first_epoch, end_epoch in self._spans():
                self._update_neighbors(first_epoch, end_epoch)
                steps_left = steps - self.monitor.step % steps
                self.learner.fit(
                    self._batches(images),
                    initial_epoch=first_epoch,
                    epochs=end_epoch,
                    steps_per_epoch=steps_left,
                    callbacks=[self.monitor, *loggers],
                    verbose=verbosity,
                    shuffle=False,
                )

    def _decoded_images(self) -> Any:
        """Return the source of the decoded training images; False where none are kept, or no step
        is left."""
        steps = self.experiment.epochs * self.components.steps_per_epoch
        if not self.components.cache.kept or self.monitor.step >= steps:
            return False
        return decoded_source(self.splits.train, self.components.train_view, CACHE_LIMIT_MB)

    def _batches(self, images: Any) -> Any:
        """Return the batches of this process from the next step on, as the learner takes them.

        Args:
            images: Of `_decoded_images`.
        """
        sampler = self.components.sampler
        share = Share(sampler, self.processes.index, self.processes.count)
        batches = training_batches(
            self.splits.train,
            share,
            self.components.train_view,
            seed=self.experiment.seed,
            first_step=self.monitor.step,
            cache=images,
        )
        return self.processes.distribute(own_threads(batches), sampler.batch_size)

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
        while not monitor.records or monitor.step < epochs * self.components.steps_per_epoch:
            epoch, steps_within = divmod(monitor.step, self.components.steps_per_epoch)
            next_search = (epoch // every + 1) * every
            # First the rest of the epoch in which the run was stopped.
            yield epoch, epoch + 1 if steps_within else min(next_search, epochs)

    def _update_neighbors(self, first_epoch: int, end_epoch: int) -> None:
        """Have batches of the classes that the embedder confuses, by the last search before a call
        of `fit`.

        What a search found is in the checkpoints of the steps that depend on it.
        """
        sampler, sampling = self.components.sampler, self.experiment.sampling
        if not isinstance(sampler, NeighborSampler) or first_epoch == end_epoch:
            return
        assert isinstance(sampling, Neighbors)
        search_epoch = first_epoch - first_epoch % sampling.every
        first_step = search_epoch * self.components.steps_per_epoch
        if self.monitor.step == first_step:
            embeddings = self.evaluator.embed(self.learner.embedder, "train")
            self.monitor.neighbors = self.processes.of_chief(
                lambda: self._confused_classes(embeddings, sampling)
            )
        sampler.update(np.array(self.monitor.neighbors), first_step)
        self.monitor.watcher.forget_batches()

    def _confused_classes(self, embeddings: np.ndarray, sampling: Neighbors) -> list[list[int]]:
        classes = confusable_classes(
            embeddings,
            self.splits.train.labels,
            most=self.experiment.classes_per_batch or MOST_CLASSES,
            skip_top=sampling.skip_top,
            relative_margin=sampling.relative_margin,
        )
        return classes.tolist()

    def finish(self) -> TrainingRun | None:
        """Write the results, and return the run; None in a process that has nothing to do with
        them."""
        left = self.processes.leave(list(checkpoints.variables(self.learner).values()))
        if left is None:
            return None
        self.evaluator.processes = left
        seconds = time.perf_counter() - self.started
        with self._naming_bad_images(), averaged(self.learner):
            planned = self.experiment.epochs * self.components.steps_per_epoch
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


def describe(experiment: Experiment) -> str:
    """Return what a run would do: images, network, terms and steps. Loads the data and builds the
    model.

    Args:
        experiment: The settings.

    Raises:
        UserError: The run could not start.
    """
    _check_new(RunFolder(experiment.run_dir), experiment)
    components = build_components(experiment)
    lines = [*_warnings(components), *_images_in_words(components), *_network_in_words(components)]
    lines += [*_schedule_in_words(components), *final_length(components)]
    lines += ["", "as a flag file:", experiment.as_flags()]
    return "\n".join(lines)


def _warnings(components: Components) -> Iterator[str]:
    message = untrained_batch_norm(components.learner.embedder)
    if message and not components.experiment.start_from:
        yield f"WARNING: {message}"
    yield from selection_warnings(components.experiment.selection, components.splits.validation)


def _images_in_words(components: Components) -> Iterator[str]:
    experiment, splits = components.experiment, components.splits
    yield f"data         {experiment.data_name}"
    for name, split in ({"train": splits.train} | splits.evaluated()).items():
        yield f"  {name:<18}{len(split):>9,} images of {split.num_classes:,} classes"
    if not experiment.features:
        yield "views"
        yield f"  training   {components.train_view}"
        yield f"  evaluation {components.evaluation_view}"
    yield f"cache        {components.cache.reason}"


def _network_in_words(components: Components) -> Iterator[str]:
    experiment, embedder = components.experiment, components.learner.embedder
    network = experiment.head if experiment.features else experiment.backbone
    size = f"{embedder.count_params():,} parameters, {embedder.embedding_dim}-d"
    yield f"embedder     {network}: {size}"
    yield "objectives"
    for term in components.learner.objectives:
        yield f"  {term!r}"
    yield "trained             parameters   learning rate"
    yield from _trained(experiment.learning_rates(experiment.text_backbone), components.learner)


def _schedule_in_words(components: Components) -> Iterator[str]:
    batch_size, epochs = components.sampler.batch_size, components.experiment.epochs
    steps = components.steps_per_epoch * epochs
    images = steps * batch_size
    passes = images / len(components.splits.train)
    yield f"batches      {batch_size} images"
    length = f"{components.steps_per_epoch:,} steps an epoch, {epochs} epochs: {steps:,} steps"
    yield f"schedule     {length}, {images:,} images, {passes:.1f} times the training images"
    yield f"devices      {', '.join(workers.device_names(components.strategy))}"


def final_length(components: Components) -> Iterator[str]:
    """Yield how long a final model trains, and how often it sees an image, next to the run that it
    is final to; nothing of another run."""
    experiment, train_images = components.experiment, components.splits.train
    if not experiment.final_of:
        return
    measured = RunFolder(experiment.final_of).epoch_length()
    images_per_step = experiment.epochs * components.sampler.batch_size
    seen = images_per_step * components.steps_per_epoch / len(set(train_images.names))
    seen_before = images_per_step * measured.steps / measured.images
    length = f"{experiment.epochs} epochs of {components.steps_per_epoch:,} steps"
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
    """Yield a line for each part of the embedders, and one for each objective."""
    for part, variables in learner.parts().items():
        if part != "objectives":
            yield _trained_line(part, variables, rates[part])
    for term in learner.objectives:
        yield _trained_line(term.name, term.trainable_variables, rates["objectives"])


def _trained_line(name: str, variables: Sequence[Any], rate: float) -> str:
    count = sum(math.prod(variable.shape) for variable in variables)
    return f"  {name:<18}{count:>9,}   {f'{rate:g}' if count else '-'}"
