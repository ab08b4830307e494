"""What a run measures along its training, and what it writes after its last step."""

import dataclasses
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
from tfdml.evaluation import QueryValues, embed, evaluate_dataset, evaluate_generalisation
from tfdml.evaluation.per_query import recording
from tfdml.io.files import write_json
from tfdml.layers import StatisticsNetwork
from tfdml.models import Embedder, MetricLearner, MomentEmbedder
from tfdml.models.inference import compiled
from tfdml.objectives import RankMI
from tfdml.training.build.components import has_orders
from tfdml.training.build.images import Splits, load_splits, make_transforms
from tfdml.training.checkpoints import save_model
from tfdml.training.distributed.processes import Processes
from tfdml.training.run.monitor import TrainingMonitor
from tfdml.training.run.selection import saturation_warnings, selected_epoch, write_embedder
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment

RETRIEVAL = ("recall", "map@r", "r_precision")
CLUSTERING = ("nmi", "ami", "f1")


def is_due(epoch: int, every: int, epochs: int) -> bool:
    """Whether something is measured after an epoch: before the first, after the last, and every so many between."""
    return epoch in (0, epochs) or (every > 0 and epoch % every == 0)


def measure_together(experiment: Experiment, embedders: Sequence[Path]) -> dict[str, Any]:
    """Return the metrics of the embeddings of several embedders side by side, on the unseen classes.

    Each is normalised, and all count alike, as the concatenated models of Musgrave et al. (ECCV 2020).

    Args:
        experiment: The settings that all were trained with.
        embedders: Their files.
    """
    images = load_splits(experiment, experiment.seed).test
    batches = evaluation_batches(images, make_transforms(experiment)[1], experiment.evaluation_batch_size)
    parts = [embed(keras.saving.load_model(path), batches) for path in embedders]
    together = np.concatenate(parts, axis=1) / np.sqrt(len(parts))
    return evaluate_dataset(together, images, ks=experiment.recall_ks(), metrics=RETRIEVAL)


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
        ks, images = self.settings.recall_ks(), getattr(self.splits, name)
        return evaluate_dataset(embeddings, images, ks=ks, metrics=metrics, **options)

    def each_epoch(self, learner: MetricLearner, epoch: int) -> dict[str, dict]:
        """Return the metrics of every split, of HORDE's orders, and of generalisation, in the epochs that measure them.

        Of several processes all embed, and the chief measures; the others get no metrics.
        """
        settings, measured = self.settings, {}
        every, seen = settings.generalisation_every, self.splits.seen
        compared = every > 0 and seen is not None and is_due(epoch, every, settings.epochs)
        evaluated = is_due(epoch, settings.evaluate_every, settings.epochs)
        names = self.batches if evaluated else ("test", "seen") if compared else ()
        embeddings = {name: self.embed_together(learner.embedder, name) for name in names}
        if not self.processes.is_chief:
            return {}
        if evaluated:
            measured = {name: self.measure(embeddings[name], name) for name in embeddings}
            for name, metrics in measured.items():
                logging.info("epoch %d, %s: %s", epoch, name, format_metrics(metrics))
            if settings.evaluate_orders == "epochs" or (settings.evaluate_orders == "end" and epoch == settings.epochs):
                measured.update(self.orders(learner))
        if compared:
            measured["generalisation"] = self._generalisation(embeddings)
        return measured

    def _generalisation(self, embeddings: dict[str, np.ndarray]) -> dict[str, float | int | bool]:
        """How the unseen classes lie compared with the seen ones; see `evaluate_generalisation`."""
        assert self.splits.seen is not None
        return evaluate_generalisation(
            embeddings["test"],
            self.splits.test.labels,
            embeddings["seen"],
            self.splits.seen.labels,
            measures=("density", "divergence"),
        )

    def orders(self, learner: MetricLearner) -> dict[str, dict]:
        """Return Recall@K of each order of HORDE's moments on unseen classes, as `orders`; empty without one horde."""
        if not has_orders(learner):
            return {}
        batches = self.batches["test"]
        return {"orders": measure_orders(learner, batches, lambda part: self.measure(part, "test", ("recall",)))}


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics for people: percent, one decimal."""
    shown = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown)


def measure_orders(
    learner: MetricLearner, batches: tf.data.Dataset, measure: Callable[[np.ndarray], dict]
) -> dict[str, dict]:
    """Return the metrics of each order's own embedding, and of all of them side by side.

    Args:
        learner: A learner with one `HighOrderMomentLoss`.
        batches: Batches of the images to measure, in the view of evaluation.
        measure: embeddings (N, d) -> metrics.

    Returns:
        Metrics by `"1"` (the embedding itself), `"2"` ... and `"all"`.
    """
    model = MomentEmbedder.from_learner(learner)
    features = embed(compiled(model, model.features), batches)
    measured = {str(order): measure(part) for order, part in model.by_order(features).items()}
    return {**measured, "all": measure(features)}


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
        measured = {"metrics_orders": "orders", "metrics_seen": "seen", "generalisation": "generalisation"}
        how = "all-to-all" if splits.test.is_query is None else "queries against gallery"
        protocol = _PROTOCOL if experiment.sampling != "two_views" else _TWO_VIEWS + "{how} on {test} classes"
        if "test" in splits.two_views:
            protocol = _TWO_VIEWS + "on two views of each of {test} other images, which are to find each other"
        selected_by = "two_views" if selection in splits.two_views and selection == "validation" else selection
        result = {
            "dataset": experiment.data_name,
            "intervals": metrics.pop("intervals"),
            "metrics": metrics,
            "metrics_before": monitor.records[0].get("test", {}),
            "protocol": protocol.format(train=splits.train.num_classes, test=splits.test.num_classes, how=how),
            "selection": _SELECTION[selected_by] + (f", by {metric}" if selection != "last" else ""),
            **({} if splits.test.pairs is None else {"primary": primary_metric(experiment, metrics)}),
            "epoch": epoch,
            "steps": monitor.step,
            "train_seconds": monitor.train_seconds,
            "images_per_second": monitor.images_per_second(),
            **{name: chosen[part] for name, part in measured.items() if part in chosen},
            **({} if learner.auto_weights is None else {"auto_weights": learner.auto_weights.describe()}),
            "seconds": seconds,
        }
        QueryValues.of(splits.test, values, experiment.data_dir).write(folder.queries)
        # Before the result, which shows that the run has finished.
        if (rank_mi := rank_mi_of(learner)) is not None:
            save_model(folder.statistics_network, statistics_model(rank_mi))
        if experiment.moment_embedder:
            result["metrics_moments"] = _write_moments(learner, evaluator, folder)
        write_json(folder.result, result)
    if experiment.report and write_report is not None and not folder.report.is_file():
        held_out = None
        if splits.validation is not None:
            held_out = evaluator.embed(embedder, "validation"), splits.validation.labels
        write_report(folder, splits.test, embeddings, held_out)
    return result


def primary_metric(experiment: Experiment, metrics: Mapping[str, Any]) -> str:
    """Return the metric by which a run on given pairs is judged: what selected the epoch, or the first of the pairs."""
    if experiment.selection != "last":
        return experiment.selection_metric
    return next((name for name in ("spearman", "triplet_accuracy", "auc") if name in metrics), "map@r")


def _write_moments(learner: MetricLearner, evaluator: Evaluator, folder: RunFolder) -> dict[str, Any]:
    batch_size = evaluator.settings.evaluation_batch_size
    train = evaluation_batches(evaluator.splits.train, evaluator.transform, batch_size)
    model = moment_embedder(learner, train)
    save_model(folder.moments, model)
    return evaluator.measure(evaluator.embed(model, "test"), "test", RETRIEVAL + CLUSTERING)


def moment_embedder(learner: MetricLearner, train: tf.data.Dataset) -> MomentEmbedder:
    """Return the learner's `MomentEmbedder`, with the principal components of its training images.

    Args:
        learner: A trained learner with one `HighOrderMomentLoss`.
        train: Batches of the training images in the view of evaluation.
    """
    model = MomentEmbedder.from_learner(learner)
    features = embed(compiled(model, model.features), train)
    logging.info("principal components of %d moments: %d dimensions", len(features), model.embedding_dim)
    model.adapt(features)
    return model


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
