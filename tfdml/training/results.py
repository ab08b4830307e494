"""What happens around the steps of `fit`, and after the last: what a run measures, records, keeps and writes.

Which epoch's embedder is selected, and what is wrong with that choice; evaluation, records and checkpoints along the
training, and the halt of a run that has diverged; the results.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches, own_threads, two_view_batches
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.evaluation import QueryValues, embed, evaluate_dataset, evaluate_generalization
from tfdml.evaluation.metrics import ks_within
from tfdml.evaluation.relevance import images_to_search
from tfdml.io.files import atomic_write, write_json
from tfdml.layers import StatisticsNetwork
from tfdml.models import Embedder, MetricLearner, MomentEmbedder
from tfdml.models.inference import compiled
from tfdml.objectives import RankMI
from tfdml.training import checkpoints
from tfdml.training.build import has_orders
from tfdml.training.checkpoints import RunFolder
from tfdml.training.images import Splits, load_splits, make_transforms
from tfdml.training.settings import Experiment
from tfdml.training.workers import Processes

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
    with atomic_write(folder.embedder) as temporary:
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
    with atomic_write(folder.embedder) as temporary:
        shutil.copyfile(folder.selected(epoch), temporary)
    return keras.saving.load_model(folder.embedder)


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
    monitor: Any,
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
        metrics = evaluator.measure(embeddings, "test", names, intervals="classes", values=values)
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
    experiment: Experiment, learner: MetricLearner, monitor: Any, splits: Splits, seconds: float
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
