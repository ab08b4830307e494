"""What a run reaches: its selected epoch, its metrics along the training and at the end, and
`TrainingRun`."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches, own_threads
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings import embed
from tfdml.embeddings.backends import load_keras_model
from tfdml.embeddings.compute import slices
from tfdml.evaluation import Interval, confidence_intervals, evaluate_dataset, student_interval
from tfdml.evaluation.metrics import ks_within
from tfdml.evaluation.relevance import images_to_search
from tfdml.evaluation.views import evaluate_views
from tfdml.io.files import write_json
from tfdml.models import Embedder, MetricLearner, MomentEmbedder
from tfdml.models.inference import compiled
from tfdml.models.interpolation import choose_share, interpolate
from tfdml.results import QueryValues
from tfdml.run_folder import RunFolder
from tfdml.training import checkpoints
from tfdml.training.build import EVALUATION_BATCH, has_orders
from tfdml.training.checkpoints import TrainingState
from tfdml.training.choices import Whitened
from tfdml.training.run_data import Splits, load_splits, make_transforms
from tfdml.training.settings import (
    PAIR_METRICS,
    USUAL_METRICS,
    DataSettings,
    EvaluationSettings,
    Experiment,
)
from tfdml.training.workers import Processes, assign_here

#: One mapping per epoch, as in `metrics.jsonl`. The first is before training.
Records = list[dict[str, Any]]

# Below this many held-out classes, a choice between epochs is mostly chance.
FEW_CLASSES = 10
# From here on, the few queries that are left decide between epochs.
SATURATED = 0.98
RETRIEVAL = ("recall", "map@r", "r_precision")
# The features that are measured before the first epoch, and the split that they are of.
_FEATURES = {"features": "test", "also_features": "also"}
CLUSTERING = ("nmi", "ami", "f1")


def selected_epoch(records: Records, selection: str, metric: str = "map@r") -> int:
    """Return the epoch whose embedder is kept: the last, or the one with the highest metric on the
    selection's split.

    Of several epochs with the same value, the first is selected. Once the learning rate is below
    its highest value, the last of them is: it has trained longer at a low rate.

    Args:
        records: One mapping per epoch, as in `metrics.jsonl`. The first, before training, is
            selected only if it is the only one.
        selection: `"last"`, `"validation"` or `"test"`.
        metric: `"map@r"` or `"recall@1"`.

    Example:
        >>> selected_epoch([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4,
        ...     0.4])], "test")
        1
    """
    selected = records[-1]["epoch"]
    if selection == "last":
        return selected
    best, highest_rate = -1.0, 0.0
    for record in records[1:]:
        value = _value(record.get(selection, {}), metric, -1.0)
        rate = record.get("learning_rate", 0.0)
        highest_rate = max(highest_rate, rate)
        if value > best or (value == best >= 0 and rate < highest_rate):
            best, selected = value, record["epoch"]
    return selected


def _value(metrics: Mapping[str, Any], metric: str, default: float) -> float:
    """Return a metric, or its mean over levels, whose names end by `/0`, `/1` and so on."""
    levels = [value for name, value in metrics.items() if name.startswith(f"{metric}/")]
    return metrics.get(metric, sum(levels) / len(levels) if levels else default)


def selection_warnings(selection: str, held_out: ImageDataset | None) -> list[str]:
    """Return a warning, as a list of at most one line, where an epoch is selected on few held-out
    classes.

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
        f"WARNING: --selection=validation selects the epoch on {held_out.num_classes} held-out "
        "classes, which is "
        f"mostly chance below {FEW_CLASSES}. Raise --holdout_classes, or use --selection=last"
    ]


def saturation_warnings(records: Records, selection: str, metric: str = "map@r") -> list[str]:
    """Return a warning, as a list of at most one line, where the metric can hardly distinguish the
    best epochs.

    Args:
        records: As in `selected_epoch`.
        selection: As in `selected_epoch`.
        metric: As in `selected_epoch`.

    Example:
        >>> saturation_warnings([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4,
        ...     0.4])], "test")
        []
    """
    epoch = selected_epoch(records, selection, metric)
    value = _value(records[epoch].get(selection, {}), metric, 0.0)
    if value < SATURATED:
        return []
    return [
        f"WARNING: {metric} on the {selection} classes is saturated: {100 * value:.1f} % in the "
        "selected epoch "
        f"{epoch}, so that a few images decide between epochs. Hold out more classes, or use "
        "--selection=last"
    ]


@dataclasses.dataclass(eq=False)
class Evaluator:
    """Embeds splits and measures them.

    Args:
        settings: What is measured, and when.
        splits: The images.
        view: How images are seen.
        cache: Whether to keep the views in memory.
        processes: Who trains: each embeds its part of the images, and the chief measures.
    """

    settings: EvaluationSettings
    splits: Splits
    view: EvaluationTransform
    cache: bool = False
    processes: Processes = dataclasses.field(default_factory=Processes)
    _batches: dict[tuple, tf.data.Dataset] = dataclasses.field(default_factory=dict, init=False)

    def embed(self, model: Any, name: str, together: bool = True) -> np.ndarray:
        """Return the embeddings of a split, (N, d) float32.

        Args:
            model: The embedder, or any function from a batch of images to vectors.
            name: The split.
            together: Share the work out over all processes, each of which has to call this with the
                same weights.
        """
        images: ImageDataset = getattr(self.splits, name)
        together = together and self.processes.count <= len(images)
        rows = self.processes.part(len(images)) if together else slice(0, len(images))
        embeddings = embed(model, self._batches_of(name, images, rows))
        return self.processes.gather(embeddings) if together else embeddings

    def _batches_of(self, name: str, images: ImageDataset, rows: slice) -> tf.data.Dataset:
        """Return the batches of some rows of a split, which are made once."""
        key = name, rows.start, rows.stop
        if key not in self._batches:
            if rows != slice(0, len(images)):
                images = images.take(np.arange(len(images))[rows])
            batches = evaluation_batches(images, self.view, EVALUATION_BATCH)
            if self.cache and name != "train":
                batches = batches.cache()
            self._batches[key] = own_threads(batches)
        return self._batches[key]

    def embed_texts(self, learner: MetricLearner, name: str) -> np.ndarray | None:
        """Return the embeddings of a split's texts, each once, (M, d) float32; None where there are
        no texts."""
        if name not in self.splits.views:
            return None
        return embed(
            learner.towers["text"],
            slices(np.asarray(self.splits.views[name].texts), EVALUATION_BATCH),
        )

    def measure(
        self,
        embeddings: np.ndarray,
        name: str,
        metrics=RETRIEVAL,
        texts: np.ndarray | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the metrics of a split's embeddings; see `evaluate_retrieval` for the options.

        With those of its texts also `text_to_image/recall@1` and the like, with `intervals` and
        `chance` among them.
        """
        images: ImageDataset = getattr(self.splits, name)
        result: dict[str, Any] = {}
        direction, _, metric = self.settings.selection_metric.rpartition("/")
        added = () if metric in USUAL_METRICS + PAIR_METRICS else (metric,)
        if self.splits.searched_by_images(name):
            ks = ks_within(self.settings.ks, images_to_search(images))
            names = metrics if direction else (*metrics, *added)
            result = evaluate_dataset(embeddings, images, ks=ks, metrics=names, **options)
        if texts is None:
            return result
        of_texts = ("recall", "map", *added) if direction else ("recall", "map")
        intervals = options.get("intervals")
        measured = self._measure_views(embeddings, name, texts, of_texts, intervals)
        result |= _by_direction(measured)
        if intervals:
            result["chance"] = _by_direction(_part_of_each(measured, "chance"))
            of_views = _by_direction(_part_of_each(measured, "intervals"))
            result["intervals"] = result.get("intervals", {}) | of_views
        return result

    def _measure_views(
        self,
        embeddings: np.ndarray,
        name: str,
        texts: np.ndarray,
        metrics: tuple[str, ...],
        intervals: Any,
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return how images and texts of a split find each other, by direction."""
        items = self.splits.views[name]
        return evaluate_views(
            embeddings,
            texts,
            items.image_labels,
            items.text_labels,
            ks=ks_within(self.settings.ks, min(len(embeddings), len(texts))),
            metrics=metrics,
            intervals=intervals,
        )

    def each_epoch(self, learner: MetricLearner, epoch: int, last: int) -> dict[str, dict]:
        """Return the metrics of every split, in the epochs that measure: before the first, every so
        many, and the `last`.

        Before the first, `features` are those of unseen images without a projection: what the
        backbone gives, or the vectors of `--features`; `also_features` those of the second data
        set.

        Of several processes all embed, and the chief measures; the others get no metrics.
        """
        every = self.settings.evaluate_every
        if epoch not in (0, last) and (every == 0 or epoch % every):
            return {}
        names = list(self.splits.evaluated())
        embeddings = {
            name: (self.embed(learner.embedder, name), self.embed_texts(learner, name))
            for name in names
        }
        features = {}
        for name, split in _FEATURES.items():
            if epoch == 0 and split in names and self.splits.searched_by_images(split):
                features[name] = self._features(learner, split)
        if not self.processes.is_chief:
            return {}
        metrics = {
            name: self.measure(images, name, texts=texts)
            for name, (images, texts) in embeddings.items()
        }
        for name, vectors in features.items():
            metrics[name] = self.measure(vectors, _FEATURES[name])
        for name, values in metrics.items():
            logging.info("epoch %d, %s: %s", epoch, name, format_metrics(values))
        return metrics

    def _features(self, learner: MetricLearner, name: str) -> np.ndarray:
        """Return the pooled features of a split, (N, D), scaled to length 1."""
        embedder = learner.embedder

        def features(images):
            pooled = embedder.represent(images, training=False)["pooled"]
            return keras.ops.normalize(keras.ops.cast(pooled, "float32"))

        return self.embed(compiled(embedder, features), name)

    def moments(self, learner: MetricLearner) -> dict[str, dict]:
        """Return Recall@K of the embedding of each order of HORDE's moments on unseen classes.

        They are `"1"` (the embedding itself), `"2"` ... and `"all"` of them side by side.
        """
        model = MomentEmbedder.from_learner(learner)
        features = self.embed(compiled(model, model.features), "test", together=False)
        parts = {str(order): part for order, part in model.by_order(features).items()}
        parts["all"] = features
        return {order: self.measure(part, "test", ("recall",)) for order, part in parts.items()}

    def write_moments(self, learner: MetricLearner, folder: RunFolder) -> dict[str, Any]:
        """Write the learner's `MomentEmbedder`, with the principal components of its training
        images; its metrics."""
        model = MomentEmbedder.from_learner(learner)
        model.adapt(self.embed(compiled(model, model.features), "train", together=False))
        checkpoints.save_model(folder.moments, model)
        return self.measure(
            self.embed(model, "test", together=False), "test", RETRIEVAL + CLUSTERING
        )


def _by_direction(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return fractions or intervals of both directions under names such as
    `text_to_image/recall@1`."""
    named = {}
    for direction, measures in measured.items():
        for name, value in measures.items():
            if isinstance(value, float | tuple):
                named[f"{direction}/{name}"] = value
    return named


def _part_of_each(measured: Mapping[str, Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Return one part of what was measured in each direction."""
    return {direction: measures[part] for direction, measures in measured.items()}


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return metrics for people: percent, one decimal."""
    shown = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown)


class TrainingRun:
    """A run that has ended.

    Args:
        experiment: Its settings.
        result: What `result.json` holds: `metrics`, `metrics_before` the training, of the first
            projection, and `metrics_features`, without a projection; of `--also_measure`
            `metrics_also` and so on; `intervals`, `protocol`, `selection` ...
        runs: Those of several seeds or folds; empty for a single run.
        embeddings: Those of splits that are embedded already.

    Example:
        >>> run = TrainingRun(experiment, {"metrics": {"recall@1": 0.5}})
        >>> run.metrics["recall@1"], run.folder.embedder.name
        (0.5, 'embedder.keras')
    """

    def __init__(
        self,
        experiment: Experiment,
        result: dict[str, Any],
        runs: Sequence[TrainingRun] = (),
        embeddings: Mapping[str, np.ndarray] = {},
    ):
        self.experiment = experiment
        self.result = result
        self.runs = tuple(runs)
        self._embeddings = dict(embeddings)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics on unseen classes."""
        return self.result["metrics"]

    @property
    def folder(self) -> RunFolder:
        """The paths of its files."""
        return RunFolder(self.experiment.run_dir)

    @functools.cached_property
    def embedder(self) -> Embedder:
        """The selected embedder."""
        return load_keras_model(self.folder.embedder)

    @functools.cached_property
    def splits(self) -> Splits:
        """The images: `train`, `validation` and `test`."""
        return load_splits(self.experiment.part(DataSettings), self.experiment.seed)

    @property
    def embeddings(self) -> np.ndarray:
        """(N, d) those of the test images."""
        return self.embed("test")

    def embed(self, split: str) -> np.ndarray:
        """Return the embeddings of the images of a split, (N, d) float32."""
        if split not in self._embeddings:
            settings = self.experiment.part(EvaluationSettings)
            _, view = make_transforms(self.experiment.part(DataSettings))
            evaluator = Evaluator(settings, self.splits, view)
            self._embeddings[split] = evaluator.embed(self.embedder, split)
        return self._embeddings[split]


# By the key in `result.json`: the name of a start in the first line of `metrics.jsonl`.
_STARTS = {
    "metrics_features": "features",
    "metrics_before": "test",
    "metrics_also_features": "also_features",
    "metrics_also_before": "also",
}
_PROTOCOL = (
    "zero-shot: trained on {train} classes, evaluated {searches} on {test} classes never seen in "
    "training"
)
_TEXTS = "; {images:,} images and {texts:,} texts find each other"
_SELECTION = {
    "last": "the last epoch",
    "validation": "the best epoch on held-out training classes",
    "test": "the best epoch on the test classes themselves: the figure is flattered by that choice",
}
_INTERPOLATION = "; of its weights {share:g} and of those at the start the rest, {chosen}"


def write_results(
    experiment: Experiment,
    learner: MetricLearner,
    evaluator: Evaluator,
    state: TrainingState,
    seconds: float,
    planned: int,
) -> TrainingRun | None:
    """Write what of the embedders' and the results' files is not there yet.

    Args:
        experiment: The settings of the run.
        learner: As it is after the last step; afterwards its embedder is that of the selected
            epoch.
        evaluator: Measures the embedder.
        state: What was recorded and selected.
        seconds: How long the run has taken in this process.
        planned: How many steps the run was to have.

    Returns:
        The run; None on a worker that is not the chief, and writes nothing.

    Raises:
        UserError: A file cannot be written.
    """
    processes, splits = evaluator.processes, evaluator.splits
    epoch = _restore_selected(experiment, learner, processes, state)
    interpolation = _interpolate(experiment, learner, evaluator)
    folder = RunFolder(experiment.run_dir)
    if processes.is_chief:
        _save_selected(experiment, learner, state.records, epoch)
        if splits.test is not None:
            logging.info("measuring %s images of unseen classes", f"{len(splits.test):,}")
    embeddings = {name: evaluator.embed(learner.embedder, name) for name in splits.evaluated()}
    texts = evaluator.embed_texts(learner, "test")
    if not processes.is_chief:
        return None
    result = folder.read_result()
    if result is None or (experiment.moment_embedder and not folder.moments.is_file()):
        result = _result(experiment, evaluator, embeddings, texts, state.records, epoch)
        result["seconds"] = seconds
        if interpolation:
            result["interpolation"] = interpolation
            result["selection"] += _INTERPOLATION.format(**interpolation)
        if (steps := result["steps"]) < planned:
            result["selection"] += f"; the run was ended after {steps} of {planned} steps"
        # Moments are not saved with the embedder: those of an earlier epoch are gone.
        is_last = epoch == state.records[-1]["epoch"] and not interpolation
        if is_last and has_orders(learner) and splits.test is not None:
            result["metrics_orders"] = evaluator.moments(learner)
        if experiment.moment_embedder:
            result["metrics_moments"] = evaluator.write_moments(learner, folder)
        write_json(folder.result, result)
    run = TrainingRun(experiment, result, embeddings=embeddings)
    run.splits = splits
    return run


def _save_selected(
    experiment: Experiment, learner: MetricLearner, records: Records, epoch: int
) -> None:
    settings = experiment.selection, experiment.selection_metric
    for warning in saturation_warnings(records, *settings):
        logging.warning("%s", warning)
    logging.info("the embedder is that of epoch %d", epoch)
    checkpoints.save_embedders(RunFolder(experiment.run_dir), learner)


def _restore_selected(
    experiment: Experiment, learner: MetricLearner, processes: Processes, state: TrainingState
) -> int:
    """Give a learner the embedder of the selected epoch, and return that epoch."""
    epoch = processes.of_chief(
        lambda: selected_epoch(state.records, experiment.selection, experiment.selection_metric)
    )
    if epoch != state.records[-1]["epoch"]:
        for weight, value in zip(learner.embedder_weights, state.selected, strict=True):
            assign_here(weight, value)
    return epoch


def _interpolate(
    experiment: Experiment, learner: MetricLearner, evaluator: Evaluator
) -> dict[str, Any]:
    """Give a learner the weights between start and end, and return how far; else nothing."""
    share = experiment.interpolate.share
    if share == 1:
        return {}
    path = RunFolder(experiment.run_dir).start
    packed = evaluator.processes.bytes_of_chief(path.read_bytes)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(packed)
        start = load_keras_model(copy)
    # A head of random numbers means nothing at the start.
    backbone_alone = not (experiment.start_from or isinstance(experiment.head, Whitened))
    end = learner.embedder
    result: dict[str, Any] = {"backbone_alone": backbone_alone}
    if share is None:
        measure = functools.partial(_measure_forgetting, evaluator)
        share, result["metrics"] = choose_share(start, end, measure, backbone_alone)
        result["chosen"] = "as is best on held-out classes and on the second data set itself"
    else:
        result["chosen"] = "as was asked for"
    result["share"] = share
    weights = interpolate(start, end, share, backbone_alone).get_weights()
    for weight, value in zip(end.weights, weights, strict=True):
        assign_here(weight, value)
    return result


def _measure_forgetting(evaluator: Evaluator, embedder: Embedder) -> tuple[float, float]:
    """Return the metric that selects an epoch on held-out classes and on the second data set."""
    values = []
    for name in ("validation", "also"):
        embeddings = evaluator.embed(embedder, name)
        measure = functools.partial(evaluator.measure, embeddings, name)
        metrics = evaluator.processes.of_chief(measure)
        values.append(_value(metrics, evaluator.settings.selection_metric, 0.0))
    return values[0], values[1]


def _result(
    experiment: Experiment,
    evaluator: Evaluator,
    embeddings: Mapping[str, np.ndarray],
    texts: np.ndarray | None,
    records: Records,
    epoch: int,
) -> dict[str, Any]:
    """Return the results of an embedder; those of each query are written. Without test images
    nothing is measured."""
    rates = [record["images_per_second"] for record in records if "images_per_second" in record]
    seconds = sum(record.get("seconds", 0.0) for record in records)
    speed = float(np.median(rates)) if rates else None
    result: dict[str, Any] = {
        "dataset": experiment.data_name,
        "epoch": epoch,
        "steps": records[-1]["step"],
        "train_seconds": seconds,
        "images_per_second": speed,
    }
    for part, name in _STARTS.items():
        result[part] = records[0].get(name, {})
    splits = evaluator.splits
    result["metrics_also"] = {}
    if splits.also is not None:
        result["metrics_also"] = evaluator.measure(embeddings["also"], "also")
    if splits.test is None:
        return result | _unmeasured(experiment, splits)
    return result | _measured(experiment, evaluator, splits.test, embeddings["test"], texts)


def _unmeasured(experiment: Experiment, splits: Splits) -> dict[str, Any]:
    """Return the fields of the result of a final model: no metrics, as it has no test images."""
    classes = f"all {splits.train.num_classes} classes of {experiment.data_name}"
    origin = f"the metrics are those of {experiment.final_of}"
    protocol = f"trained on {classes}, and measured on none: {origin}"
    return {"intervals": {}, "metrics": {}, "protocol": protocol, "selection": _SELECTION["last"]}


def _measured(
    experiment: Experiment,
    evaluator: Evaluator,
    test: ImageDataset,
    embeddings: np.ndarray,
    texts: np.ndarray | None,
) -> dict[str, Any]:
    """Return what a result holds of test images, and write the metrics of each query."""
    in_lists = test.protocol is not None and test.protocol.lists
    names = RETRIEVAL if in_lists else RETRIEVAL + CLUSTERING
    values: dict[str, np.ndarray] = {}
    metrics = evaluator.measure(
        embeddings, "test", names, texts, intervals="classes", values=values
    )
    queries = QueryValues.of(test, values, experiment.data_dir)
    queries.write(RunFolder(experiment.run_dir).queries)
    result = {"intervals": metrics.pop("intervals"), "metrics": metrics}
    searches = "all-to-all" if test.is_query is None else "queries against gallery"
    classes = evaluator.splits.train.num_classes
    result["protocol"] = _PROTOCOL.format(train=classes, test=test.num_classes, searches=searches)
    if texts is not None:
        result["protocol"] += _TEXTS.format(images=len(embeddings), texts=len(texts))
        result["chance"] = metrics.pop("chance")
    selection, metric = experiment.selection, experiment.selection_metric
    if test.pairs is not None:
        usual = next((name for name in ("triplet_accuracy", "auc") if name in metrics), "map@r")
        result["primary"] = usual if selection == "last" else metric
    by_metric = "" if selection == "last" else f", by {metric}"
    result["selection"] = _SELECTION[selection] + by_metric
    return result


def combine(runs: Mapping[str, TrainingRun]) -> dict[str, Any]:
    """Return the results of runs of several seeds or folds together.

    Args:
        runs: The runs, by the name of their folder.

    Returns:
        `metrics`, `metrics_before`, `metrics_features` and those of a second data set such as
        `metrics_also`, means over the runs; `intervals` over
        classes, of each query's mean over the runs (`confidence_intervals`): how the mean would
        vary with other classes; `intervals_runs` (`student_interval`): how it would with other
        seeds or folds; `runs`, a row for each; `dataset`, `protocol`, `selection`, and the seconds
        of all.
    """
    results = [run.result for run in runs.values()]
    names = ("dataset", "protocol", "selection", "chance")
    combined = {name: results[0][name] for name in names if name in results[0]}
    for part in ("metrics", "metrics_also", *_STARTS):
        combined[part] = _means([result.get(part, {}) for result in results])
    combined["intervals"] = _intervals_over_classes(list(runs.values()))
    combined["intervals_runs"] = _intervals_over_runs(results, combined["metrics"])
    for part in ("train_seconds", "seconds"):
        combined[part] = sum(result[part] for result in results)
    combined["runs"] = [_row(name, run.result) for name, run in runs.items()]
    return combined


def _row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a run in the results of several."""
    columns = ("epoch", "steps", "metrics", "train_seconds", "images_per_second")
    return {"run": name, **{column: result.get(column) for column in columns}}


def _intervals_over_classes(runs: Sequence[TrainingRun]) -> dict[str, Interval]:
    """Return the intervals of each query's mean over the runs, for metrics that all have."""
    queries = [QueryValues.read(run.folder.queries) for run in runs]
    means = {}
    for name in _shared_names([run.values for run in queries]):
        means[name] = np.mean([run.values[name] for run in queries], axis=0)
    return confidence_intervals(means, queries[0].labels)


def _intervals_over_runs(
    results: Sequence[Mapping[str, Any]], means: Mapping[str, Any]
) -> dict[str, Interval]:
    """Return the interval of each metric that is a fraction."""
    intervals = {}
    for name, mean in means.items():
        if isinstance(mean, float):
            intervals[name] = student_interval([result["metrics"][name] for result in results])
    return intervals


def _shared_names(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names that all have, in the order of the first."""
    shared = set.intersection(*map(set, mappings))
    return [name for name in mappings[0] if name in shared]


def _means(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric that all have; counts, which are those of the images, as they
    are."""
    means = {}
    for name in _shared_names(metrics):
        means[name] = metrics[0][name]
        if not isinstance(means[name], int):
            means[name] = sum(values[name] for values in metrics) / len(metrics)
    return means


def measure_together(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return the metrics of the embeddings of several runs side by side, on the unseen classes.

    Each is normalized, and all count alike, as the concatenated models of Musgrave et al. (ECCV
    2020).

    Args:
        runs: Runs of the same images.
    """
    embeddings = np.concatenate([run.embeddings for run in runs], axis=1) / np.sqrt(len(runs))
    images, ks = runs[0].splits.test, runs[0].experiment.ks
    assert images is not None  # a final model has no folds
    return evaluate_dataset(
        embeddings, images, ks=ks_within(ks, images_to_search(images)), metrics=RETRIEVAL
    )
