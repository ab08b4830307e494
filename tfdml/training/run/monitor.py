"""What happens around the steps of `fit`, and after the last: what a run measures, records, keeps and writes.

Which epoch's embedder is selected, and what is wrong with that choice; evaluation, records and checkpoints along the
training, and the halt of a run that has diverged; the results.
"""

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches, own_threads, two_view_batches
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.evaluation import QueryValues, embed, evaluate_dataset, evaluate_generalization
from tfdml.evaluation.per_query import ks_within, recording
from tfdml.evaluation.retrieval import images_to_search
from tfdml.io.files import atomic_write, is_disk_full, unwritable, write_json, write_lines
from tfdml.layers import StatisticsNetwork
from tfdml.models import Embedder, MetricLearner, MomentEmbedder
from tfdml.models.inference import compiled
from tfdml.objectives import RankMI
from tfdml.training import checkpoints
from tfdml.training.build.components import Components, has_orders
from tfdml.training.build.images import Splits, load_splits, make_transforms
from tfdml.training.distributed import Processes
from tfdml.training.optimizers import averaged
from tfdml.training.run.interruption import Interrupted, Interruption
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment
from tfdml.training.watching import Halted, Watcher, flat

#: One mapping per epoch, as in `metrics.jsonl`.
Records = list[dict[str, Any]]

# Below this many held-out classes, a choice between epochs is mostly chance.
FEW_CLASSES = 10
# From here on, the few queries that are left decide between epochs.
SATURATED = 0.98


def selected_epoch(records: Records, selection: str, metric: str = "map@r") -> int:
    """Return the epoch whose embedder is kept: the last, or the one with the highest metric on the selection's split.

    Of several epochs with the same value, the first is selected. Once the learning rate is below its highest value, the
    last of them is: it has trained longer at a low rate.

    Args:
        records: One mapping per epoch, as in `metrics.jsonl`. The first, before training, is selected only if it is
            the only one.
        selection: `"last"`, `"validation"` or `"test"`.
        metric: `"map@r"` or `"recall@1"`.

    Example:
        >>> selected_epoch([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4, 0.4])], "test")
        1
    """
    best, highest_rate, chosen = -1.0, 0.0, records[-1]["epoch"]
    if selection == "last":
        return chosen
    for record in records[1:]:
        value, rate = _value(record.get(selection, {}), metric, -1.0), record.get("learning_rate", 0.0)
        highest_rate = max(highest_rate, rate)
        if value > best or (value == best >= 0 and rate < highest_rate):
            best, chosen = value, record["epoch"]
    return chosen


def _value(measured: dict[str, Any], metric: str, default: float) -> float:
    """Return a metric, or its mean over levels, whose names end by `/0`, `/1` and so on."""
    levels = [value for name, value in measured.items() if name.startswith(f"{metric}/")]
    return measured.get(metric, sum(levels) / len(levels) if levels else default)


def selection_warnings(selection: str, held_out: ImageDataset | None) -> list[str]:
    """Return a warning, as a list of at most one line, where an epoch is selected on few held-out classes.

    Args:
        selection: As in `selected_epoch`.
        held_out: The images of the held-out classes.

    Example:
        >>> selection_warnings("last", None)
        []
    """
    if selection != "validation" or held_out is None or held_out.num_classes >= FEW_CLASSES:
        return []
    return [
        f"WARNING: --selection=validation selects the epoch on {held_out.num_classes} held-out classes, which is "
        f"mostly chance below {FEW_CLASSES}. Raise --holdout_classes, or use --selection=last"
    ]


def saturation_warnings(records: Records, selection: str, metric: str = "map@r") -> list[str]:
    """Return a warning, as a list of at most one line, where the metric can hardly distinguish the best epochs.

    Args:
        records: As in `selected_epoch`.
        selection: As in `selected_epoch`.
        metric: As in `selected_epoch`.

    Example:
        >>> saturation_warnings([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4, 0.4])], "test")
        []
    """
    epoch = selected_epoch(records, selection, metric)
    chosen = next(record for record in records if record["epoch"] == epoch)
    value = _value(chosen.get(selection, {}), metric, 0.0)
    if value < SATURATED:
        return []
    other = "--selection_metric=map@r or " if metric == "recall@1" else ""
    other += "more --holdout_classes or " if selection == "validation" else ""
    return [
        f"WARNING: {metric} on the {selection} classes is saturated: {100 * value:.1f} % in the selected epoch "
        f"{epoch}, so that a few images decide between epochs. Use {other}--selection=last"
    ]


def keep_if_selected(folder: RunFolder, records: Records, selection: str, metric: str, embedder: Embedder) -> None:
    """Keep the embedder of the newest epoch if it is the best; to be called before that epoch's checkpoint."""
    epoch = records[-1]["epoch"]
    if selection != "last" and selected_epoch(records, selection, metric) == epoch:
        folder.checkpoints.mkdir(exist_ok=True)
        checkpoints.save_model(folder.selected(epoch), embedder)


def publish_selected(folder: RunFolder, records: Records, selection: str, metric: str, steps_per_epoch: int) -> None:
    """Make the best embedder the run's, and drop those that no checkpoint needs; to be called after the checkpoint."""
    if selection == "last":
        return
    selected = folder.selected(selected_epoch(records, selection, metric))
    with atomic_write(folder.embedder, selected.stat().st_size) as temporary:
        shutil.copyfile(selected, temporary)
    # Whichever checkpoint the run is resumed from, the embedder that was selected by then has to be there.
    steps = map(checkpoints.step_of, checkpoints.list_checkpoints(folder.checkpoints))
    closed = {step // steps_per_epoch for step in steps} - {0}
    needed = {folder.selected(selected_epoch(records[: epoch + 1], selection, metric)) for epoch in closed}
    for path in folder.checkpoints.glob("selected-epoch-*.keras"):
        if path not in needed:
            path.unlink()


def write_embedder(folder: RunFolder, records: Records, selection: str, metric: str, embedder: Embedder) -> Embedder:
    """Write the embedder of the run, that of the selected epoch, and return it.

    Args:
        folder: The run folder.
        records: As in `selected_epoch`.
        selection: As in `selected_epoch`.
        metric: As in `selected_epoch`.
        embedder: As it is after the last step.

    Raises:
        UserError: The file cannot be written.
    """
    epoch = selected_epoch(records, selection, metric)
    if epoch == records[-1]["epoch"]:
        checkpoints.save_model(folder.embedder, embedder)
        return embedder
    logging.info("the embedder is that of epoch %d", epoch)
    with atomic_write(folder.embedder, folder.selected(epoch).stat().st_size) as temporary:
        shutil.copyfile(folder.selected(epoch), temporary)
    return keras.saving.load_model(folder.embedder)


# Unit vectors whose negatives are this close, on average, have collapsed to a point.
_COLLAPSED = 1e-3


class TrainingMonitor(keras.callbacks.Callback):
    """Evaluates, writes metrics.jsonl and TensorBoard, keeps the selected embedder, and checkpoints.

    One callback rather than several, because the order matters: a checkpoint holds the records of its epoch, so that a
    resumed run writes the same history as an uninterrupted one; the embedder that it selects is there before it.

    Args:
        experiment: The settings.
        parts: The objects of the run.
        watcher: Looks at some of the batches, on the chief.
        evaluate: epoch -> dict of split -> metrics; called before training (epoch 0) and after epochs.
        interruption: Asked after each step whether the run is to stop; within `fit` it should be deferred.
        processes: Who trains: the chief alone writes, and a signal to one of them is one to all.
        saved: Called after every checkpoint, in each process.
    """

    def __init__(
        self,
        experiment: Experiment,
        parts: Components,
        watcher: Watcher,
        evaluate: Callable[[int], dict[str, dict]],
        interruption: Interruption,
        processes: Processes,
        saved: Callable[[], None] | None,
    ):
        super().__init__()
        self.folder, self.steps_per_epoch = watcher.folder, parts.steps_per_epoch
        self._experiment, self._batch_size = experiment, parts.sampler.batch_size
        self._watcher, self._evaluate, self._saved = watcher, evaluate, saved
        self._interruption, self._processes = interruption, processes
        self.records: list[dict] = []
        self.step = 0
        self.train_seconds = self._timed_seconds = 0.0
        self._timed_images = 0
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = self._compiled = 0.0
        self._steps_here = 0

    def resume(self, state: checkpoints.TrainingState) -> None:
        """Continue from a checkpoint's state; the model holds the checkpoint's arrays."""
        self.records, self.step, self.train_seconds = state.records, state.step, state.train_seconds
        if self._processes.is_chief:
            write_lines(self.folder.metrics, self.records)
            self._watcher.resume(self.step)
        if self.step % self.steps_per_epoch:
            # fit() resets metrics at the start of an epoch; in the middle of one they must go on.
            self._metric_state = [keras.ops.convert_to_numpy(v) for v in self.model.metrics_variables]

    @property
    def epoch_is_open(self) -> bool:
        """Whether an epoch's last step has been made and the epoch not been measured yet."""
        return self.step > 0 and self.step // self.steps_per_epoch > self.records[-1]["epoch"]

    def close_epoch(self) -> None:
        """Measure and record the epoch that a resumed run had come to the end of, or into which it had come."""
        self._epoch_started = time.perf_counter()
        self.on_train_begin()
        try:
            self.on_epoch_end((self.step - 1) // self.steps_per_epoch, self.model.get_metrics_result())
        finally:
            self.on_train_end()

    # Keras's hooks

    def on_train_begin(self, logs=None):
        """Open TensorBoard's file; before the first step, measure and record the untrained embedder."""
        if self._processes.is_chief:
            with self._disk_for_summaries():
                self._writer = tf.summary.create_file_writer(str(self.folder.tensorboard))
        if not self.records:
            with self.measuring():
                measured = self._evaluate(0)
            self._record({"epoch": 0, "step": 0, **measured})
            self.checkpoint()

    def on_epoch_begin(self, epoch, logs=None):
        """Start the clock."""
        if self._metric_state is not None:
            for variable, value in zip(self.model.metrics_variables, self._metric_state, strict=True):
                variable.assign(value)
            self._metric_state = None
        self._epoch_started = time.perf_counter()
        self._steps_here = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Look at the batch, when it is time."""
        if not self._watcher.is_due(self.step):
            return
        _ = self.model  # on JAX variables are with the learner only once a callback has asked for it

        def look() -> list[str]:
            with self._disk_for_summaries():
                return self._watcher.look(self.step, self._writer)

        ending = self._processes.of_chief(look)
        if ending:
            self.checkpoint()
            raise Halted(
                f"ended by --stop_on={self._experiment.stop_on}: {'; and '.join(ending)}; the checkpoint of step "
                f"{self.step} is saved; continue it anyway with --run_dir={self.folder.path} --resume, or with other "
                "flags by --start_from"
            )

    def on_train_batch_end(self, batch, logs=None):
        """Count the step; stop a run that has diverged; checkpoint when it is time, or when the run is to stop."""
        self.step += 1
        self._steps_here += 1
        if self._steps_here == self._compiling_steps:
            self._compiled = time.perf_counter()
        self._check_finite(logs or {})
        in_epoch = self.step % self.steps_per_epoch
        self._interruption.agree(self._processes)
        every = self._experiment.checkpoint_steps
        due = every and in_epoch and self.step % every == 0
        if due or self._interruption.received is not None:
            self.checkpoint()
        self._interruption.check()

    def on_epoch_end(self, epoch, logs=None):
        """Evaluate, record, keep the embedder if it is selected, checkpoint; the callbacks after this one log all."""
        shared = {} if logs is None else logs
        logs = {key: float(value) for key, value in shared.items()}
        now = time.perf_counter()
        seconds = now - self._epoch_started
        images = max(self._steps_here - self._compiling_steps, 0) * self._batch_size
        timed = now - self._compiled if images else 0.0
        pairs = float(keras.ops.convert_to_numpy(self.model.distance_trackers[1].count))
        if pairs and logs["d_neg"] < _COLLAPSED:
            raise UserError(
                f"the embedding collapsed in epoch {epoch + 1}: negatives are {logs['d_neg']:.1e} apart on average; "
                f"lower the learning rate or change --objectives{self._how_to_start_again()}"
            )
        record = {"epoch": epoch + 1, "step": self.step, "seconds": seconds, "train": logs}
        if timed > 0:
            record["images_per_second"] = images / timed
        record["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        try:
            with averaged(self.model), self.measuring():
                record.update(self._evaluate(epoch + 1))
        except Interrupted:
            # The resumed run closes this epoch before it continues.
            self.checkpoint()
            raise
        self.train_seconds += seconds
        self._timed_images += images
        self._timed_seconds += timed
        self._record(record)
        shared.update(flat(record))
        selection, metric = self._experiment.selection, self._experiment.selection_metric
        with averaged(self.model):
            if self._processes.is_chief:
                keep_if_selected(self.folder, self.records, selection, metric, self.model.embedder)
        self.checkpoint()
        if self._processes.is_chief:
            publish_selected(self.folder, self.records, selection, metric, self.steps_per_epoch)
        self._interruption.agree(self._processes)
        self._interruption.check()

    def on_train_end(self, logs=None):
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()

    # Steps of those

    def checkpoint(self) -> None:
        """Write a checkpoint of this moment.

        Raises:
            UserError: The weights are not finite, and worth no checkpoint; or it cannot be written.
        """
        part = checkpoints.first_not_finite(self.model)
        if part:
            raise self._diverged(f"the {part}'s weights are not finite")
        state = checkpoints.TrainingState(self.step, self.records, self.train_seconds)
        keep, writes = self._experiment.keep_checkpoints, self._processes.is_chief
        checkpoints.save(self.folder.checkpoints, self.model, state, keep, writes)
        if self._saved is not None:
            self._saved()

    def images_per_second(self) -> float | None:
        """Trained images per second in this process, without evaluation and the steps of an epoch that may compile."""
        return self._timed_images / self._timed_seconds if self._timed_seconds > 0 else None

    @property
    def _compiling_steps(self) -> int:
        """The first steps of an epoch that throughput leaves out, as they may compile: one of each phase."""
        return 1 + getattr(self.model, "statistics_steps", 0)

    def _record(self, record: dict) -> None:
        self.records.append(record)
        if not self._processes.is_chief:
            return
        write_lines(self.folder.metrics, self.records)
        with self._disk_for_summaries(), self._writer.as_default(step=record["epoch"]):
            for name, value in flat(record).items():
                if name not in ("epoch", "step", "seconds"):
                    tf.summary.scalar(name, value)
            self._writer.flush()

    def _check_finite(self, logs: dict) -> None:
        bad = [name for name, value in logs.items() if not math.isfinite(float(value))]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise self._diverged(f"{', '.join(terms)} is not finite", logs)

    def _diverged(self, what: str, logs: dict | None = None) -> UserError:
        told = ""
        if self._processes.is_chief and self.step:
            # JSON has no NaN.
            self._watcher.diverged(self.step, what, {name: str(float(value)) for name, value in (logs or {}).items()})
            told = f" (its batch: {self.folder.diverged})"
        return UserError(
            f"the run diverged at step {self.step}: {what}{told}; lower the learning rate or add --clip_norm"
            f"{self._how_to_start_again()}"
        )

    def _how_to_start_again(self) -> str:
        last = checkpoints.list_checkpoints(self.folder.checkpoints)[-1:]
        return "".join(f", in a new run from its last weights: --start_from={path} --run_dir=NEW" for path in last)

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that a signal ends at once; of several workers, who measure together, after its end."""
        return self._interruption.immediate() if self._processes.alone else contextlib.nullcontext()

    @contextlib.contextmanager
    def _disk_for_summaries(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            if not is_disk_full(error):
                raise
            raise unwritable(self.folder.tensorboard, error) from error


RETRIEVAL = ("recall", "map@r", "r_precision")
CLUSTERING = ("nmi", "ami", "f1")


def is_due(epoch: int, every: int, epochs: int) -> bool:
    """Whether something is measured after an epoch: before the first, after the last, and every so many between."""
    return epoch in (0, epochs) or (every > 0 and epoch % every == 0)


def measure_together(experiment: Experiment, embedders: Sequence[Path]) -> dict[str, Any]:
    """Return the metrics of the embeddings of several embedders side by side, on the unseen classes.

    Each is normalized, and all count alike, as the concatenated models of Musgrave et al. (ECCV 2020).

    Args:
        experiment: The settings that all were trained with.
        embedders: Their files.
    """
    images = load_splits(experiment, experiment.seed).test
    assert images is not None
    batches = evaluation_batches(images, make_transforms(experiment)[1], experiment.evaluation_batch_size)
    parts = [embed(keras.saving.load_model(path), batches) for path in embedders]
    together = np.concatenate(parts, axis=1) / np.sqrt(len(parts))
    ks = ks_within(experiment.recall_ks(), images_to_search(images))
    return evaluate_dataset(together, images, ks=ks, metrics=RETRIEVAL)


@dataclasses.dataclass(eq=False)
class Evaluator:
    """Embeds splits and measures them.

    Args:
        settings: What is measured, and when.
        splits: The images.
        transform: The view of evaluation.
        cache: Whether to keep the views in memory.
        processes: Who trains: each embeds its part of the images, and the chief measures.
        train_view: The augmentation, of which splits without labels are measured on two views.
    """

    settings: Experiment
    splits: Splits
    transform: EvaluationTransform
    cache: bool = False
    processes: Processes = dataclasses.field(default_factory=Processes)
    train_view: TrainTransform | None = None
    batches: dict[str, tf.data.Dataset] = dataclasses.field(default_factory=dict, init=False)
    _parts: dict[str, tf.data.Dataset] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, split in self.splits.evaluated().items():
            self.batches[name] = self._batches(name, split, self.cache)
            if not self.processes.alone and name not in self.splits.two_views:
                rows = np.arange(len(split))[self.processes.part(len(split))]
                self._parts[name] = self._batches(name, split.take(rows), self.cache)

    def _batches(self, name: str, images: ImageDataset, cache: bool) -> tf.data.Dataset:
        size = self.settings.evaluation_batch_size
        if name in self.splits.two_views:
            assert self.train_view is not None
            batches = two_view_batches(images, self.train_view, size)
        else:
            batches = evaluation_batches(images, self.transform, size)
        return own_threads(batches.cache() if cache else batches)

    def embed(self, embedder: Embedder, name: str) -> np.ndarray:
        """Return the embeddings of a split, (N, d) float32, by this process alone."""
        return embed(embedder, self.batches[name])

    def embed_together(self, embedder: Embedder, name: str) -> np.ndarray:
        """Return the same, by all processes, each of which has to call this; with the weights that they share."""
        few = len(getattr(self.splits, name)) < self.processes.count
        if few or self.processes.alone or name in self.splits.two_views:
            return self.embed(embedder, name)
        return self.processes.gather(embed(embedder, self._parts[name]))

    def embed_train(self, embedder: Embedder) -> np.ndarray:
        """Return the embeddings of the training images, as `embed_together`."""
        rows = np.arange(len(self.splits.train))[self.processes.part(len(self.splits.train))]
        return self.processes.gather(embed(embedder, self._batches("train", self.splits.train.take(rows), cache=False)))

    def measure(self, embeddings: np.ndarray, name: str, metrics=RETRIEVAL, **options: Any) -> dict[str, Any]:
        """Return the metrics of a split's embeddings; see `evaluate_retrieval` for the options."""
        images = getattr(self.splits, name)
        ks = ks_within(self.settings.recall_ks(), images_to_search(images))
        return evaluate_dataset(embeddings, images, ks=ks, metrics=metrics, **options)

    def each_epoch(self, learner: MetricLearner, epoch: int) -> dict[str, dict]:
        """Return the metrics of every split, of HORDE's orders, and of generalization, in the epochs that measure them.

        Of several processes all embed, and the chief measures; the others get no metrics.
        """
        settings, measured = self.settings, {}
        every = settings.generalization_every
        # None unless their comparison with the unseen classes is due.
        seen = self.splits.seen if every > 0 and is_due(epoch, every, settings.epochs) else None
        evaluated = is_due(epoch, settings.evaluate_every, settings.epochs)
        names = self.batches if evaluated else () if seen is None else ("test", "seen")
        embeddings = {name: self.embed_together(learner.embedder, name) for name in names}
        if not self.processes.is_chief:
            return {}
        if evaluated:
            measured = {name: self.measure(embeddings[name], name) for name in embeddings}
            for name, metrics in measured.items():
                logging.info("epoch %d, %s: %s", epoch, name, format_metrics(metrics))
            if settings.evaluate_orders == "epochs" or (settings.evaluate_orders == "end" and epoch == settings.epochs):
                measured.update(self.orders(learner))
        if seen is not None:
            assert self.splits.test is not None
            sides = embeddings["test"], self.splits.test.labels, embeddings["seen"], seen.labels
            measured["generalization"] = evaluate_generalization(*sides, measures=("density", "divergence"))
        return measured

    def orders(self, learner: MetricLearner) -> dict[str, dict]:
        """Return Recall@K of the embedding of each order of HORDE's moments on unseen classes, as `orders`.

        They are `"1"` (the embedding itself), `"2"` ... and `"all"` of them side by side; empty without one horde.
        """
        if not has_orders(learner) or self.splits.test is None:
            return {}
        model = MomentEmbedder.from_learner(learner)
        features = embed(compiled(model, model.features), self.batches["test"])
        parts = {str(order): part for order, part in model.by_order(features).items()} | {"all": features}
        return {"orders": {order: self.measure(part, "test", ("recall",)) for order, part in parts.items()}}


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics for people: percent, one decimal."""
    shown = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown)


_PROTOCOL = "zero-shot: trained on {train} classes, evaluated {how} on {test} classes never seen in training"
_TWO_VIEWS = "without labels: trained on two views of each of {train} images, evaluated "
_SELECTION = {
    "last": "the last epoch",
    "validation": "the best epoch on held-out training classes",
    "two_views": "the best epoch on held-out images, two views of which are to find each other",
    "test": "the best epoch on the test classes themselves: the figure is flattered by that choice",
}


def finish(
    experiment: Experiment,
    learner: MetricLearner,
    evaluator: Evaluator,
    monitor: TrainingMonitor,
    seconds: float,
    write_report: Callable[..., None] | None,
) -> dict[str, Any]:
    """Write what of `embedder.keras`, `moments.keras`, `statistics_network.keras`, `queries.npz`, `result.json` and
    the report is not there yet.

    Args:
        experiment: The settings.
        learner: As it is after the last step.
        evaluator: Measures the embedder.
        monitor: Holds the records of the epochs.
        seconds: How long the run has taken in this process.
        write_report: See `trainer.train`.

    Returns:
        What `result.json` holds; on a worker that is not the chief, and writes nothing, an empty mapping.

    Raises:
        UserError: A file cannot be written.
    """
    folder, splits, processes = monitor.folder, evaluator.splits, evaluator.processes
    selection, metric = experiment.selection, experiment.selection_metric
    embedder = learner.embedder
    if processes.is_chief:
        for warning in saturation_warnings(monitor.records, selection, metric):
            logging.warning("%s", warning)
        embedder = write_embedder(folder, monitor.records, selection, metric, embedder)
    if splits.test is None:
        return _finish_final(experiment, learner, monitor, splits, seconds) if processes.is_chief else {}
    # An embedder of an earlier epoch is on the chief alone.
    if processes.of_chief(lambda: embedder is learner.embedder):
        embeddings = evaluator.embed_together(embedder, "test")
    elif processes.is_chief:
        embeddings = evaluator.embed(embedder, "test")
    if not processes.is_chief:
        return {}
    result = folder.read_result()
    if result is None or (experiment.moment_embedder and not folder.moments.is_file()):
        values: dict[str, np.ndarray] = {}
        by_class = splits.test.protocol is None or not splits.test.protocol.lists
        names = RETRIEVAL + CLUSTERING if by_class else RETRIEVAL
        metrics = evaluator.measure(embeddings, "test", names, intervals="classes", per_query=recording(values))
        # Moments are not saved with the embedder: those of the epoch that was chosen were measured then, or not at all.
        epoch = selected_epoch(monitor.records, selection, metric)
        chosen = next(record for record in monitor.records if record["epoch"] == epoch)
        measured = {"metrics_orders": "orders", "metrics_seen": "seen", "generalization": "generalization"}
        how = "all-to-all" if splits.test.is_query is None else "queries against gallery"
        protocol = _PROTOCOL if experiment.sampling != "two_views" else _TWO_VIEWS + "{how} on {test} classes"
        if "test" in splits.two_views:
            protocol = _TWO_VIEWS + "on two views of each of {test} other images, which are to find each other"
        planned = experiment.epochs * monitor.steps_per_epoch
        ended = f"; the run was ended after {monitor.step} of {planned} steps" if monitor.step < planned else ""
        selected_by = "two_views" if selection in splits.two_views and selection == "validation" else selection
        result = {
            "dataset": experiment.data_name,
            "intervals": metrics.pop("intervals"),
            "metrics": metrics,
            "metrics_before": monitor.records[0].get("test", {}),
            "protocol": protocol.format(train=splits.train.num_classes, test=splits.test.num_classes, how=how),
            "selection": _SELECTION[selected_by] + (f", by {metric}" if selection != "last" else "") + ended,
            **({} if splits.test.pairs is None else {"primary": primary_metric(experiment, metrics)}),
            "epoch": epoch,
            "steps": monitor.step,
            "train_seconds": monitor.train_seconds,
            "images_per_second": monitor.images_per_second(),
            **{name: chosen[part] for name, part in measured.items() if part in chosen},
            "seconds": seconds,
        }
        QueryValues.of(splits.test, values, experiment.data_dir).write(folder.queries)
        # Before the result, which shows that the run has finished.
        if (rank_mi := rank_mi_of(learner)) is not None:
            checkpoints.save_model(folder.statistics_network, statistics_model(rank_mi))
        if experiment.moment_embedder:
            result["metrics_moments"] = _write_moments(learner, evaluator, folder)
        write_json(folder.result, result)
    if experiment.report and write_report is not None and not folder.report.is_file():
        held_out = None
        if splits.validation is not None:
            held_out = evaluator.embed(embedder, "validation"), splits.validation.labels
        write_report(folder, splits.test, embeddings, held_out)
    return result


def _finish_final(
    experiment: Experiment, learner: MetricLearner, monitor: TrainingMonitor, splits: Splits, seconds: float
) -> dict[str, Any]:
    """Write the result of a final model, of which nothing is measured."""
    result = monitor.folder.read_result()
    if result is None:
        classes = f"trained on all {splits.train.num_classes} classes of {experiment.data_name}"
        result = {
            "dataset": experiment.data_name,
            "metrics": {},
            "metrics_before": {},
            "protocol": f"{classes}, and measured on none: the metrics are those of {experiment.final_of}",
            "selection": _SELECTION["last"],
            "epoch": monitor.records[-1]["epoch"],
            "steps": monitor.step,
            "train_seconds": monitor.train_seconds,
            "images_per_second": monitor.images_per_second(),
            "seconds": seconds,
        }
        if (rank_mi := rank_mi_of(learner)) is not None:
            checkpoints.save_model(monitor.folder.statistics_network, statistics_model(rank_mi))
        write_json(monitor.folder.result, result)
    return result


def primary_metric(experiment: Experiment, metrics: Mapping[str, Any]) -> str:
    """Return the metric by which a run on given pairs is judged: what selected the epoch, or the first of the pairs."""
    if experiment.selection != "last":
        return experiment.selection_metric
    return next((name for name in ("spearman", "triplet_accuracy", "auc") if name in metrics), "map@r")


def _write_moments(learner: MetricLearner, evaluator: Evaluator, folder: RunFolder) -> dict[str, Any]:
    """Write the learner's `MomentEmbedder`, with the principal components of its training images, and measure it."""
    model, batch_size = MomentEmbedder.from_learner(learner), evaluator.settings.evaluation_batch_size
    train = evaluation_batches(evaluator.splits.train, evaluator.transform, batch_size)
    features = embed(compiled(model, model.features), train)
    logging.info("principal components of %d moments: %d dimensions", len(features), model.embedding_dim)
    model.adapt(features)
    checkpoints.save_model(folder.moments, model)
    return evaluator.measure(evaluator.embed(model, "test"), "test", RETRIEVAL + CLUSTERING)


def rank_mi_of(learner: MetricLearner) -> RankMI | None:
    """Return the learner's RankMI; None without exactly one."""
    found = [objective for objective in learner.objectives if isinstance(objective, RankMI)]
    if len(found) > 1:
        logging.warning("no statistics network is saved: there are %d", len(found))
    return found[0] if len(found) == 1 else None


def statistics_model(objective: RankMI) -> keras.Model:
    """Return the objective's V as a model of its own: distances (N,) -> V (N,), which Keras saves and loads."""
    network = StatisticsNetwork.from_config(objective.network.get_config())
    distances = keras.Input(shape=(), name="distance")
    model = keras.Model(distances, network(distances), name="statistics_network")
    network.set_weights(objective.network.get_weights())
    return model
