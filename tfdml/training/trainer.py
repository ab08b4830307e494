"""Runs an experiment: starts or resumes it in its folder."""

import contextlib
import dataclasses
import functools
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import explain_failure
from tfdml.data.pipeline import decoded_source, own_threads, training_batches
from tfdml.data.sampling import NeighborSampler, Share
from tfdml.errors import UserError, differences, user_errors
from tfdml.evaluation import Interval, QueryValues, confidence_intervals, student_interval
from tfdml.io.files import atomic_write, is_disk_full, write_json
from tfdml.retrieval import confusable_classes
from tfdml.training import checkpoints, workers
from tfdml.training.build import build_components, calibrate, check_memory, check_start, start_from
from tfdml.training.callbacks import Interrupted, Interruption, TrainingMonitor
from tfdml.training.checkpoints import MAY_DIFFER, RunFolder
from tfdml.training.optimizers import averaged
from tfdml.training.results import Evaluator, finish, measure_together, selection_warnings
from tfdml.training.settings import MOST_CLASSES, Experiment
from tfdml.training.watching import Watcher, logger_of
from tfdml.version import __version__, installed


def train(
    experiment: Experiment,
    resume: bool = False,
    saved: Callable[[], None] | None = None,
    write_report: Callable[..., None] | None = None,
    finish: bool = False,
) -> dict[str, Any]:
    """Run an experiment to its end and return what `result.json` holds.

    Stopped or killed at any moment, a run is continued by `resume` to the same end. On SIGINT, SIGTERM or SIGHUP it
    saves a checkpoint at the end of the step; a second signal ends the process at once.

    Args:
        experiment: The settings.
        resume: Continue the run in `experiment.run_dir` from its newest checkpoint; of one that was trained to its end,
            make what is missing of its results.
        saved: Called after every checkpoint.
        write_report: Called at the end, where the settings ask for a report, to write it: with the run's folder, and,
            but for a run of several seeds, its test images, their embeddings, and those of the held-out classes; see
            `tfdml.report.write_run_report`.
        finish: With `resume`: train no further, and make the results of what has been trained.

    Returns:
        What `result.json` holds (of several seeds: see `combine`); empty in all but the first of several
        processes of JAX.

    Raises:
        UserError: Something that the user can mend, before training where it can be known then.
        Interrupted: A signal asked for it.
        Halted: An alarm of `stop_on` did; a `UserError` too.
    """
    workers.check_backend()
    if experiment.seeds or experiment.folds:
        if finish:
            raise UserError("--finish ends one run: name its folder, such as --run_dir=RUN/seed_0")
        one = functools.partial(train, saved=saved, write_report=write_report)
        return train_several(experiment, one, resume, write_report)
    folder = RunFolder(experiment.run_dir)
    if experiment.deterministic and experiment.logical_devices < 2:
        workers.one_operation_at_a_time()
    processes = workers.join(experiment.logical_devices)
    with Interruption() as interruption, processes.ending_together(), contextlib.ExitStack() as owned:
        try:
            _check_alike(experiment, processes)
            # A run that was killed before its flags were written is as good as none.
            resume = processes.of_chief(lambda: resume and not folder.is_untouched())
            processes.of_chief(lambda: folder.check_same(experiment) if resume else _check_new(folder, experiment))
            if resume:
                if processes.is_chief:
                    owned.enter_context(folder.locked())
                finished = processes.of_chief(lambda: folder.read_result() if folder.is_finished(experiment) else None)
                if finished is not None:
                    logging.info("%s is finished already: there is nothing left to do", folder.path)
                    return finished
            run = Run(experiment, folder, processes, interruption, saved, write_report)
            if not resume:
                run.load_initial_weights()
                if processes.is_chief:
                    owned.enter_context(folder.created(experiment))
            try:
                run.describe()
                if not (resume and run.restore()):
                    if resume:
                        run.load_initial_weights()
                    run.calibrate()
                if finish:
                    run.end()
                else:
                    run.fit()
                return run.finish()
            except Exception as error:
                if not resume and run.monitor.step == 0 and processes.is_chief and not processes.is_loss(error):
                    folder.discard()
                elif not resume and _disk_was_full(error):
                    raise UserError(f"{error}, with --resume") from error
                raise
        except Interrupted as stop:
            of_chief = f"the run is that of worker 0 ({processes.addresses[0]})"
            stop.left = folder.how_far() if processes.is_chief else of_chief
            raise


def runs_of(experiment: Experiment) -> list[Experiment]:
    """Return the runs of several seeds, or of folds: in the folders `seed_<seed>` or `fold_<part>` of that of all.

    Example:
        >>> [run.run_dir for run in runs_of(Experiment(run_dir="runs/cars", seeds="2"))]
        ['runs/cars/seed_0', 'runs/cars/seed_1']
    """
    place, change = experiment.run_dir, functools.partial(dataclasses.replace, experiment, seeds="", folds=0)
    seeds = [change(seed=seed, run_dir=f"{place}/seed_{seed}") for seed in experiment.seed_list()]
    parts = range(1, experiment.folds + 1)
    share = 1 / max(experiment.folds, 1)
    return seeds or [change(holdout_classes=share, holdout_part=part, run_dir=f"{place}/fold_{part}") for part in parts]


def train_several(
    experiment: Experiment,
    train_one: Callable[..., dict[str, Any]],
    resume: bool = False,
    write_report: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Train a run for each of the seeds or folds, one after another, then write their common result and report.

    Each is an ordinary run in its own folder; with `resume`, those that have ended are kept and the others resume.

    Args:
        experiment: The settings; its folder is that of all runs.
        train_one: Trains one of them.
        resume: Continue what is in the folder.
        write_report: See `train`.

    Returns:
        What `result.json` holds: see `combine`.

    Raises:
        UserError: As a single run; or this is one of several processes.
        Interrupted: A signal asked for it.
    """
    if workers.rank_and_count()[1] > 1:
        raise UserError("--seeds and --folds train run after run in one process: leave them out where several train")
    folder = RunFolder(experiment.run_dir)
    if resume and not folder.is_untouched():
        folder.check_same(experiment)
        owned = folder.locked()
    else:
        _check_new(folder, experiment)
        owned = folder.created(experiment)
    with owned:
        known = folder.read_result()
        if known is not None and (folder.report.is_file() or not experiment.report):
            logging.info("%s is finished already: there is nothing left to do", folder.path)
            return known
        runs = {RunFolder(run.run_dir): run for run in runs_of(experiment)}
        results: dict[str, dict[str, Any]] = {}
        for one, run in runs.items():
            name = one.path.name.replace("_", " ")
            logging.info("%s", name)
            try:
                results[one.path.name] = train_one(run, resume=one.path.exists())
            except Interrupted as stop:
                ended = f"{len(results)} of {len(runs)} {name.split()[0]}s have ended"
                stop.left = f"{ended}; continue with --run_dir={folder.path} --resume"
                raise
            except UserError as error:
                if not any(entry.is_dir() for entry in folder.path.iterdir()):
                    folder.discard()  # the first one has left none
                raise type(error)(f"{name}: {error}") from error
            # The next one's memory is that of a process of its own.
            keras.utils.clear_session()
        result = combine(results, [QueryValues.read(one.queries) for one in runs])
        if experiment.folds:
            result["metrics_together"] = measure_together(experiment, [one.embedder for one in runs])
        write_json(folder.result, result)
        if experiment.report and write_report is not None:
            write_report(folder)
    return result


def combine(results: Mapping[str, Mapping[str, Any]], values: Sequence[QueryValues]) -> dict[str, Any]:
    """Return what runs of several seeds or folds say together.

    Args:
        results: What `result.json` of each run holds, by the name of its folder.
        values: What each of them has found for each query.

    Returns:
        `metrics` and `metrics_before`, means over the runs; `intervals` over classes, of each query's mean over the
        runs (`confidence_intervals`): how the mean would vary with other classes; `intervals_runs`
        (`student_interval`): how it would with other seeds or folds; `runs`, a row for each; `dataset`, `protocol`,
        `selection`, and the seconds of all.
    """
    every = list(results.values())
    means = {part: _means([result[part] for result in every]) for part in ("metrics", "metrics_before")}
    shared = [name for name in values[0].values if all(name in of.values for of in values)]
    of_queries = {name: np.mean([of.values[name] for of in values], axis=0) for name in shared}
    over_runs: dict[str, Interval] = {
        name: student_interval([result["metrics"][name] for result in every])
        for name, mean in means["metrics"].items()
        if isinstance(mean, float)
    }
    rows = ("epoch", "steps", "metrics", "train_seconds", "images_per_second")
    return {
        **{name: every[0][name] for name in ("dataset", "protocol", "selection")},
        **means,
        "intervals": confidence_intervals(of_queries, values[0].labels),
        "intervals_runs": over_runs,
        "train_seconds": sum(result["train_seconds"] for result in every),
        "seconds": sum(result["seconds"] for result in every),
        "runs": [{"run": name, **{row: result.get(row) for row in rows}} for name, result in results.items()],
    }


def _means(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric that all have; counts, which are those of the images, as they are."""
    names = [name for name in metrics[0] if all(name in of for of in metrics)]
    return {
        name: metrics[0][name] if isinstance(metrics[0][name], int) else sum(of[name] for of in metrics) / len(metrics)
        for name in names
    }


def _check_alike(experiment: Experiment, processes: workers.Processes) -> None:
    """Refuse to train with processes of other versions or with other settings."""
    if processes.alone:
        return
    versions = {"tfdml": __version__, **installed(("tensorflow", "keras", "jax", "numpy"))}
    for name, other in processes.of_chief(lambda: versions).items():
        if versions.get(name) != other:
            own = versions.get(name, "none")
            raise UserError(
                f"{name} {own} on worker {processes.index} and {other} on worker 0: install the same version"
            )
    chiefs = Experiment.from_flags(processes.of_chief(experiment.as_flags))
    for field in dataclasses.fields(Experiment):
        other, own = getattr(chiefs, field.name), getattr(experiment, field.name)
        if other != own and field.name not in (*MAY_DIFFER, "weights", "start_from"):
            raise UserError(f"--{field.name}={own} on worker {processes.index} and {other} on worker 0: use the same")


def _check_new(folder: RunFolder, experiment: Experiment) -> None:
    folder.check_new()
    check_start(experiment.start_from)


def _disk_was_full(error: Exception) -> bool:
    # Keras's fit takes the cause away.
    reason = error.__cause__ or error.__context__
    return isinstance(error, UserError) and reason is not None and is_disk_full(reason)


@dataclasses.dataclass(eq=False)
class Run:
    """The objects of a run, and what is done with them, in the order of the methods. Making one writes nothing.

    Args:
        experiment: The settings.
        folder: Where the run is written, by the chief.
        processes: Who trains.
        interruption: Asked after each step whether the run is to stop.
        saved: See `train`.
        write_report: See `train`.

    Raises:
        UserError: The run could not be trained or measured.
    """

    experiment: Experiment
    folder: RunFolder
    processes: workers.Processes
    interruption: Interruption
    saved: Callable[[], None] | None = None
    write_report: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        experiment, processes = self.experiment, self.processes
        self.parts = parts = build_components(experiment, processes)
        self.learner, self.splits = parts.learner, parts.splits
        self.share = Share(parts.sampler, processes.index, processes.count)
        check_memory(self.learner.embedder, parts.train_view, self.share.batch_size, self.learner.gradient_cache)
        for warning in selection_warnings(experiment.selection, self.splits.validation):
            logging.warning("%s", warning)
        logging.info("%s", parts.cache.reason)
        self.evaluator = Evaluator(
            experiment, self.splits, parts.evaluation_view, parts.cache.evaluation, processes, parts.train_view
        )
        self.watcher = Watcher(experiment, parts, self.folder)
        evaluate = functools.partial(self.evaluator.each_epoch, self.learner)
        self.monitor = TrainingMonitor(
            experiment, parts, self.watcher, evaluate, self.interruption, processes, self._save
        )
        self.monitor.set_model(self.learner)

    def _save(self) -> None:
        if self.saved is not None:
            self.saved()

    def load_initial_weights(self) -> None:
        """Take over the weights that the experiment names."""
        if self.experiment.start_from:
            self.processes.of_chief(lambda: start_from(self.experiment.start_from, self.learner))
            checkpoints.share_weights(self.processes, self.learner)

    def describe(self) -> None:
        """Write down the data and the environment, or see that the data is that of the folder."""
        names = workers.device_names(self.parts.strategy, self.processes)
        data = self.splits.describe(self.experiment.data_dir)
        changed = differences(self.processes.of_chief(lambda: data), data)
        if changed:
            raise UserError(f"the images of worker {self.processes.index} are not those of worker 0: {changed}")
        self.processes.of_chief(lambda: self.folder.describe(data, names))

    def restore(self) -> bool:
        """Continue from the newest checkpoint of the chief; whether there is one."""
        state = checkpoints.restore_latest(self.folder.checkpoints, self.learner, self.processes)
        if state is not None:
            self.monitor.resume(state)
            logging.info("resuming %s at step %d", self.folder.path, state.step)
        return state is not None

    def calibrate(self) -> None:
        """Whiten the projection where that is asked for and it is new; let objectives measure the training images."""
        experiment, head = self.experiment, self.experiment.head_call()
        whitening = head.arguments if head.name == "whitened" and not experiment.start_from else None
        train, view, size = self.splits.train, self.evaluator.transform, experiment.evaluation_batch_size
        with self._naming_bad_images():
            calibrate(self.learner, train, view, size, self.processes, whitening)

    def fit(self) -> None:
        """Train to the last epoch."""
        monitor, parts, steps = self.monitor, self.parts, self.parts.steps_per_epoch
        loggers = logger_of(self.experiment.log_to) if self.processes.is_chief else []
        with self._naming_bad_images(), self.interruption.deferred():
            if monitor.records and monitor.epoch_is_open:
                monitor.close_epoch()
            if monitor.step >= self.experiment.epochs * steps and monitor.records:
                return
            train, view, limit = self.splits.train, parts.train_view, self.experiment.cache_limit_mb
            images = decoded_source(train, view, limit) if parts.cache.training else False
            for first, last, length in self._spans():
                if isinstance(parts.sampler, NeighborSampler) and first < last:
                    self._update_neighbors(parts.sampler, first)
                batches = training_batches(
                    train, self.share, view, seed=self.experiment.seed, first_step=monitor.step, cache=images
                )
                self.learner.fit(
                    self.processes.distribute(own_threads(batches), parts.sampler.batch_size),
                    initial_epoch=first,
                    epochs=last,
                    steps_per_epoch=length,
                    callbacks=[monitor, *loggers],
                    verbose=0 if not self.processes.is_chief else 1 if sys.stdout.isatty() else 2,
                    shuffle=False,
                )

    def end(self) -> None:
        """Close the epoch that the run is in, as its last.

        Raises:
            UserError: No step has been trained.
        """
        if not self.monitor.step:
            raise UserError(f"{self.folder.path}: no step has been trained, so there is nothing to finish")
        with self._naming_bad_images(), self.interruption.deferred():
            if self.monitor.step > self.monitor.records[-1]["step"]:
                self.monitor.close_epoch()

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first epoch of each call of `fit`, that after the last, and how many steps their epochs have.

        A call ends where the neighbors are searched again, so that no batch is made ahead of them.
        """
        epoch, within = divmod(self.monitor.step, self.parts.steps_per_epoch)
        epochs = self.experiment.epochs
        every = self.experiment.neighbors_every if self.experiment.sampling == "neighbors" else epochs
        while epoch < epochs or not self.monitor.records:
            # First the rest of the epoch in which the run was stopped.
            last = epoch + 1 if within else min((epoch // max(every, 1) + 1) * every, epochs)
            yield epoch, last, self.parts.steps_per_epoch - within
            epoch, within = last, 0

    def _update_neighbors(self, sampler: NeighborSampler, epoch: int) -> None:
        """Have batches of the classes that the embedder confuses, by the last search before an epoch.

        It is written before the first step that depends on it, and read again where a run is resumed after that step.
        """
        settings, train = self.experiment, self.splits.train
        epoch -= epoch % settings.neighbors_every
        first_step, path = epoch * self.parts.steps_per_epoch, self.folder.neighbors(epoch)
        due = self.monitor.step == first_step
        with self.monitor.measuring():
            embeddings = self.evaluator.embed_train(self.learner.embedder) if due else None

            def search() -> None:
                if embeddings is not None:
                    margin = settings.relative_margin if settings.relative_margin >= 0 else None
                    most = settings.classes_per_batch or MOST_CLASSES
                    found = confusable_classes(
                        embeddings, train.labels, most=most, skip_top=settings.skip_top, relative_margin=margin
                    )
                    path.parent.mkdir(exist_ok=True)
                    with atomic_write(path) as temporary, open(temporary, "wb") as file:
                        np.save(file, found)
                lost = f"{path} is missing or damaged: the run cannot be resumed without it"
                with user_errors((OSError, ValueError, EOFError), lost):
                    np.load(path)

            self.processes.of_chief(search)
        sampler.update(np.load(io.BytesIO(self.processes.bytes_of_chief(path.read_bytes))), first_step)
        self.watcher.forget_batches()

    def finish(self) -> dict[str, Any]:
        """Write the results, and return them; empty in a process that has nothing to do with them."""
        left = self.processes.leave(list(checkpoints.variables(self.learner).values()))
        if left is None:
            return {}
        self.processes = self.evaluator.processes = left
        seconds = time.perf_counter() - self.started
        with self._naming_bad_images(), averaged(self.learner):
            result = finish(self.experiment, self.learner, self.evaluator, self.monitor, seconds, self.write_report)
        try:
            return left.of_chief(lambda: result)
        except tf.errors.OpError:
            if not left.is_chief:
                raise
            return result  # all is written

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
