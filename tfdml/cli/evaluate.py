"""Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

  tfdml evaluate --model=runs/cars_jrd
  tfdml evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --json=metrics.json
  tfdml evaluate --model=models/cars/1/litert/int8.tflite --dataset=cars196 --data_dir=/data/cars196
  tfdml evaluate --model=models/cars --dataset=folder --data_dir=photos --intervals=classes
  tfdml evaluate --model=embeddings/cars --metrics=recall,map@r --ks=1,10
  tfdml evaluate --model=vectors.npz --distance=cosine
  tfdml evaluate --model=runs/head --features=new.npz
  tfdml evaluate --model='lancedb:///data/galleries?table=cars&index=ivf_pq&effort=20' --ks=1,10
  tfdml evaluate --compare=runs/cars_am,runs/cars_jrd --report=comparison.html
  tfdml evaluate --model=runs/cars_jrd --task=verification --target=far=0.001 --json=threshold.json
  tfdml evaluate --model=runs/cars_jrd --task=classification

--model embeds the images, or is stored embeddings:
  a folder that tfdml embed wrote; a Parquet file or a folder of them, with the columns embedding and label
  an .npy file of embeddings (N, d), with --dataset for the labels
  an .npz file with the arrays embeddings (N, d) and labels (N,), and for queries that are searched in the rest
  is_query (N,) bool

--metrics are of recall, recall@K (CMC), precision@K, map@K, mp@K, mmp@K, map@r, r_precision, nmi, ami, f1, and of map,
map_trapezoidal, minp, mrr, ndcg, h_ap, asi, gap and gap_known, which search once more; see docs/evaluation.md. The
default is recall, precision@1, map@r, r_precision, nmi, ami and f1; for benchmarks see docs/protocols.md.

--task=verification counts all pairs of images: AUC, equal error rate, and the true accept rate at false accept rates.
With --target=far=0.001, or precision=0.99, it also chooses the threshold for pairs of images; --json keeps it. --report
has the ROC curve; its threshold comes from the held-out classes of a run.
--task=classification votes by the nearest images of a gallery: every second image of each class, without the last half
of the classes, whose images are to be found unknown. With --target=fpir=0.01 it also chooses the threshold for searches
of all stored images, or of the split: at most 1 % of the queries of unknown classes are accepted.

With --compare, the others are compared with the first run query by query, with 95 % intervals; --report and --json are
optional. With --dataset too, the page also shows what each run finds for the same queries.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdml import evaluation
from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.data.dataset import ImageDataset
from tfdml.effects import Effect, both, either, needs
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.embeddings.files import StoredEmbeddings, holds_embeddings, read_embeddings
from tfdml.errors import UserError
from tfdml.evaluation.classification import KINDS
from tfdml.evaluation.metrics import ks_within, metric_names
from tfdml.evaluation.relevance import images_to_search
from tfdml.io.files import as_named, require_writable, sweep, write_json
from tfdml.report import Run, write_comparison, write_report
from tfdml.report.metric_text import metric_name
from tfdml.report.pages import Paired
from tfdml.report.runs import read_runs
from tfdml.retrieval import is_gallery
from tfdml.training import RunFolder
from tfdml.training.images import split_training_classes
from tfdml.training.settings import integers

FLAGS = Flags()
model_flags.define_model_flags(FLAGS)
model_flags.define_data_flags(FLAGS)
FLAGS.define("split", "test", "Which classes to measure on.", ["test", "train"])
FLAGS.define("metrics", [], "Which metrics, see above. Large sets are quicker without nmi, ami and f1.")
FLAGS.define("ks", ["1", "2", "4", "8"], "The K of Recall@K; by default the benchmark's, or those that fit the images.")
model_flags.define_distance(FLAGS)
INTERVALS = ["none", "classes", "queries", "parts"]
FLAGS.define("intervals", "none", "95 % intervals: by bootstrap, or means over ten parts of the images.", INTERVALS)
FLAGS.define("task", "retrieval", "What the embeddings are for.", ["retrieval", "verification", "classification"])
TARGET = "Choose a threshold: far=0.001 or precision=0.99 with --task=verification, fpir=0.01 with classification."
FLAGS.define("target", "", TARGET)
FLAGS.define("neighbors", 5, "With --task=classification: how many images vote.", lower_bound=1)
FLAGS.define("generalization", False, "Also compare the embeddings of the training classes with these.")
FLAGS.define("json", "", "File to write the metrics to, as fractions.")
FLAGS.define("report", "", "File to write an HTML page to.")
FLAGS.define("heat_maps", False, "With --report: show what a few queries have in common with their neighbors.")
FLAGS.define("compare", [], "In place of --model: finished runs, compared with the first of them.", kind="paths")


def evaluate(values: Flags) -> None:
    """Evaluate as the flags say."""
    ks = _checked_ks(values)
    kind = _kind(values.flag_values_dict())
    if kind == "runs":
        _compare_runs(values)
        return

    metrics = values.metrics or list(evaluation.DEFAULT_METRICS)
    if values.task != "retrieval":
        metrics = []
    split = EmbeddedSplit.on_disk(values) if kind == "embeddings" else EmbeddedSplit.by_model(values, metrics)
    benchmark = getattr(split.images, "protocol", None)
    if benchmark and not values.metrics:
        metrics = list(benchmark.metrics)
    about = {"model": values.model, "dataset": split.dataset_name, "split": values.split, "distance": values.distance}
    if values.task == "retrieval":
        result = _retrieval(values, split, metrics, ks)
    else:
        about["task"] = values.task
        result = split.verification() if values.task == "verification" else split.classification()
    if values.json:
        _write(values.json, {**about, **result})
    if values.report:
        split.write_page(result)
        print(f"written: {as_named(values.report)}")


def _retrieval(values: Flags, split: EmbeddedSplit, metrics: Sequence[str], ks: Sequence[int]) -> dict[str, Any]:
    """Print the retrieval metrics of a split, and return them for JSON."""
    ks = fitting_ks(values, split.images) if "recall" in metrics else ks
    options: dict[str, Any] = {"ks": ks, "metrics": metrics, "distance": values.distance}
    resampled = values.intervals if values.intervals in ("classes", "queries") else None
    result = evaluation.evaluate_dataset(split.embeddings, split.images, intervals=resampled, **options)
    if values.intervals == "parts":
        if split.images.is_query is not None or getattr(split.images, "groups", None) is not None:
            raise UserError("--intervals=parts: parts are searched all-to-all, and these images have roles or groups")
        result["parts"] = evaluation.part_protocol(split.embeddings, split.images.labels, **options)
    if values.generalization:
        result["generalization"] = split.generalization()
    size = f"{len(split.embeddings):,} images of {len(np.unique(split.images.labels)):,} classes"
    print(f"{as_named(values.model)} on {split.name}: {size}")
    print_metrics(result)
    return result


def _write(path: str, result: dict[str, Any]) -> None:
    write_json(path, result)
    print(f"written: {as_named(path)}")


def _checked_ks(values: Flags) -> tuple[int, ...]:
    """Check the flags before anything is loaded, and returns the K of `--ks`."""
    if values.compare and values.model:
        raise UserError("--compare takes the place of --model: name one of them")
    if not values.compare and not values.model:
        raise UserError("--model is missing")
    if is_gallery(values.model):
        raise UserError("--model is the address of a gallery in a database, and no model: see tfdml search --gallery")
    for name in ("metrics", "ks", "compare"):
        if values[name].present and not any(values[name].value or ()):
            raise UserError(f"--{name}= names nothing: leave the flag out, or name what it is to take")
    ks = integers(",".join(values.ks), "--ks", required=True)
    for name in ("json", "report"):
        path = values[name].value
        if path:
            require_writable(path, name)
            sweep(os.path.dirname(os.path.realpath(path)))
    if values.target:
        kinds = KINDS[1:] if values.task == "verification" else KINDS[:1]
        evaluation.target_of(values.target, kinds=kinds)
    if values.metrics:
        metric_names(values.metrics, ks)
    return ks


def _compare_runs(values: Flags) -> None:
    """Print how runs compare with the first, and write the page; with `--dataset`, embed its images by each run.

    Raises:
        UserError: As `write_comparison`, or a file cannot be written.
    """
    folders, report, distance = values.compare, values.report, values.distance
    runs = read_runs(folders)
    dataset, embeddings = None, None
    if values.dataset or values.features:
        dataset = model_flags.chosen_data(values, "").load(values.split)
        # Of several seeds, the first embeds the images that the page shows.
        models = [str(run.seeds[0].path if run.seeds else run.path) for run in runs]
        embeddings = [model_flags.chosen_source(values, model).embed(dataset, values.batch_size) for model in models]
    pairs = write_comparison(report or None, folders, dataset=dataset, embeddings=embeddings, distance=distance)
    for pair in pairs:
        if pair.refused:
            print(f"{pair.name} and {pair.reference} are not compared query by query: {pair.refused}")
            continue
        print(f"{pair.name} compared with {pair.reference}: differences in points, 95 % intervals")
        for metric in pair.classes:
            print(f"  {metric_name(metric):<16}{pair.change(metric):>7}  {', '.join(pair.intervals(metric))}")
    if values.json:
        _write(values.json, {"first": folders[0], "differences": [_as_json(pair) for pair in pairs]})
    if report:
        print(f"written: {as_named(report)}")


def _as_json(pair: Paired) -> dict[str, Any]:
    if pair.refused:
        return {"run": pair.name, "refused": pair.refused}
    return {"run": pair.name, "over_classes": pair.classes, "over_seeds": pair.seeds}


def _kind(given: Mapping[str, Any]) -> str:
    """Return what is measured: `runs` (--compare), stored `embeddings`, or a `model`."""
    if given["compare"]:
        return "runs"
    return "embeddings" if holds_embeddings(given["model"]) else "model"


_RETRIEVAL = needs("task", "retrieval")
_ALONE = Effect(lambda given: not given["compare"], "--model in place of --compare")
_IMAGES = either(needs("dataset"), needs("features"), Effect(lambda given: _kind(given) == "model", "a model"))
_EMBEDDING = Effect(
    lambda given: _kind(given) == "model" or bool(given["compare"] and (given["dataset"] or given["features"])),
    "a model that embeds images as --model, or --compare with --dataset",
)


@dataclasses.dataclass(frozen=True)
class EmbeddedSplit:
    """A split of a data set, embedded.

    Args:
        values: The flags.
        name: What to call the images in print.
        dataset_name: The data set, or where the embeddings lie.
        embeddings: (N, d).
        images: Has the `labels` (N,), and `is_query` (N,) or None, of the embeddings.
        dataset: The images themselves; None where only embeddings are known.
        source: The model; None likewise.
        choice: Where to read other splits from; None likewise.
        stored: All that lies next to the embeddings on disk; None for a model.
    """

    values: Flags
    name: str
    dataset_name: str
    embeddings: np.ndarray
    images: Any
    dataset: ImageDataset | None = None
    source: EmbeddingBackend | None = None
    choice: model_flags.DataChoice | None = None
    stored: StoredEmbeddings | None = None

    @classmethod
    def by_model(cls, values: Flags, metrics: Sequence[str]) -> EmbeddedSplit:
        """Return a split, embedded by a model."""
        choice = model_flags.chosen_data(values)
        source = model_flags.chosen_source(values)
        dataset = choice.load(values.split)
        if "recall" in metrics:
            fitting_ks(values, dataset)
        vectors = source.embed(dataset, values.batch_size)
        return cls(values, f"{choice.name}, {values.split}", choice.name, vectors, dataset, dataset, source, choice)

    @classmethod
    def on_disk(cls, values: Flags) -> EmbeddedSplit:
        """Return a split of embeddings from disk; with `--dataset`, checked against its images.

        Raises:
            UserError: There are no labels, the data set's images are others, or a page is asked for without them.
        """
        if values.report and not values.dataset:
            raise UserError("--report shows images: name their --dataset and --data_dir next to the embeddings")
        everything = read_embeddings(values.model)
        part = everything.split(values.split)
        dataset, choice = None, None
        if values.dataset:
            choice = model_flags.chosen_data(values)
            dataset = choice.load(values.split)
            part = _with_labels_of(part, dataset, f"{choice.name} ({values.split})")
        if part.labels is None:
            raise UserError(f"{values.model} has no labels: add the class of each embedding, or name a --dataset")
        known = choice.name if choice else Path(values.model).name
        about = part.manifest.get("dataset", {}).get("name") or known
        name = f"{about}, {values.split}" if part.roles is not None or choice else about
        images = part if dataset is None or not (dataset.protocol or dataset.groups is not None) else dataset
        return cls(values, name, about, part.embeddings, images, dataset, None, choice, everything)

    def generalization(self) -> dict[str, Any]:
        """Return the measures of generalization that the training classes, and the model, allow."""
        if self.values.split == "train":
            raise UserError("--generalization compares the test classes with the training classes: leave --split=test")
        train = self._train_side()
        if train[0] is None:
            logging.warning("no embeddings of training classes: some measures are left out (tfdml embed --split=all)")
        return evaluation.evaluate_generalization(
            self.embeddings, self.images.labels, *train, distance=self.values.distance
        )

    def verification(self) -> dict[str, Any]:
        """Print verification over all pairs of the split, and with `--target` the threshold; return both for JSON."""
        labels, distance = self.images.labels, self.values.distance
        measured = evaluation.verification(self.embeddings, labels, distance=distance)
        size = f"{len(labels):,} images of {measured.num_classes:,} classes"
        print(f"{as_named(self.values.model)} on {self.name}: {size}")
        print(
            f"  pairs: {measured.num_same:,} of one class, {measured.num_different:,} of different classes; {distance}"
        )
        print(f"  {'auc':<24}{measured.auc:9.6f}")
        print(f"  {'eer':<24}{100 * measured.eer:6.2f} %  at a distance of {measured.eer_threshold:.6g}")
        for far, point in measured.points.items():
            place = f"at a distance of {point.threshold:.6g}"
            print(f"  {f'tar@far={far:g}':<24}{100 * point.tar.mean:6.2f} %{_interval(point.tar)}  {place}")
        result = measured.to_dict()
        result["intervals"] = {f"tar@far={far:g}": point.tar for far, point in measured.points.items()}
        if self.values.target:
            calibration = evaluation.calibrate(
                self.embeddings, labels, distance=distance, **evaluation.target_of(self.values.target)
            )
            result["calibration"] = _threshold(calibration)
        return result

    def classification(self) -> dict[str, Any]:
        """Print how well nearest images classify the split, and name classes that the gallery lacks; return it."""
        labels = np.asarray(self.images.labels)
        classes, in_gallery = np.unique(labels), np.zeros(len(labels), bool)
        for label in classes[: -(-len(classes) // 2)]:
            in_gallery[np.flatnonzero(labels == label)[::2]] = True
        classifier = evaluation.KNNClassifier(
            self.embeddings[in_gallery], labels[in_gallery], k=self.values.neighbors, distance=self.values.distance
        )
        measured = evaluation.evaluate_classification(classifier, self.embeddings[~in_gallery], labels[~in_gallery])
        print(
            f"{as_named(self.values.model)} on {self.name}: a gallery of {in_gallery.sum():,} images of "
            f"{len(classifier.classes):,} classes; {measured['num_known']:,} queries of these, "
            f"{measured['num_unknown']:,} of other classes"
        )
        print_metrics({name: value for name, value in measured.items() if isinstance(value, float)})
        if not self.values.target:
            return measured
        sides: dict[str, Any] = {}
        if self.stored is not None and self.stored.roles is not None and self.stored.classes is not None:
            rows = np.flatnonzero(self.stored.roles != "train")
            if len(rows) == len(labels):
                labels = self.stored.classes[rows]
                sides = {"gallery": self.stored.embeddings, "gallery_labels": self.stored.classes, "own_rows": rows}
        calibration = evaluation.calibrate(
            self.embeddings, labels, distance=self.values.distance, **sides, **evaluation.target_of(self.values.target)
        )
        return {**measured, "calibration": _threshold(calibration)}

    def write_page(self, result: dict[str, Any]) -> None:
        """Write the report of one model on the split."""
        assert self.dataset is not None
        values, held_out = self.values, None
        if self.source is not None and self.choice is not None and values.split == "test" and is_run(values.model):
            _, classes = seen_and_held_out(self.choice.load("train"), self.choice.name, values.model)
            held_out = None if classes is None else (self._embed(classes), classes.labels)
        if values.task == "verification":
            shown = [name for name in result if name in ("auc", "intervals") or name.startswith("tar@")]
            result = {name: result[name] for name in shown}
        options: dict[str, Any] = {"distance": values.distance, "held_out": held_out}
        if values.target:
            options["target"] = evaluation.target_of(values.target)
        if values.heat_maps:
            options["embedder"] = getattr(self.source, "embedder", None)
            if not isinstance(options["embedder"], keras.Model):
                raise UserError(f"--heat_maps needs a Keras model, for its gradients; {values.model} is none")
        settings = {name: values[name].value for name in values if values[name].present}
        run = Run(values.model, {"metrics": result}, flags=settings)
        write_report(values.report, run, self.dataset, self.embeddings, **options)

    def _embed(self, dataset: ImageDataset) -> np.ndarray:
        assert self.source is not None
        return self.source.embed(dataset, self.values.batch_size)

    def _train_side(self) -> tuple[Any, Any]:
        """Embeddings and labels of the training classes; None where they are not to be had."""
        if self.source is not None and self.choice is not None:
            dataset, _ = seen_and_held_out(self.choice.load("train"), self.choice.name, self.values.model)
            return self._embed(dataset), dataset.labels
        if self.stored is not None and self.stored.roles is not None and (self.stored.roles == "train").any():
            train = self.stored.split("train")
            return train.embeddings, train.labels
        return None, None


def _threshold(calibration: evaluation.Calibration) -> dict[str, Any]:
    """Print a threshold and what to expect of it on as many other classes; return it for JSON."""
    print(f"  {calibration}")
    return calibration.to_dict()


def fitting_ks(values: Flags, images: Any) -> tuple[int, ...]:
    """Return the K of `--ks`; where the flag is not given, without those that the images are too few for.

    Args:
        values: The flags.
        images: Has `labels` (N,), and `is_query` (N,) or None.

    Raises:
        UserError: A query is compared with fewer than K images, for a K that was asked for.
    """
    benchmark = getattr(images, "protocol", None)
    ks = benchmark.ks if benchmark and not values["ks"].present else tuple(int(k) for k in values.ks)
    available = images_to_search(images)
    fitting = ks_within(ks, available)
    if fitting == ks:
        return ks
    asked, smaller = (",".join(map(str, some)) for some in (ks, fitting))
    reason = f"there are {available:,} images to search in"
    if values["ks"].present:
        raise UserError(f"--ks={asked}: {reason}; choose e.g. --ks={smaller}")
    logging.log_first_n(logging.WARNING, "recall@K is measured for K = %s of %s: %s", 1, smaller, asked, reason)
    return fitting


def is_run(model: str) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(model) / "flags.txt").is_file()


def seen_and_held_out(train: ImageDataset, name: str, model: str) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the training images of the classes that a run trained on, and those of the classes that it held out.

    Args:
        train: The images.
        name: The data set.
        model: The folder of the run; for another model, or another data set, no class is held out, nor by a run
            without labels.
    """
    if not is_run(model):
        return train, None
    experiment = RunFolder(model).load_experiment()
    if experiment.data_name != name or experiment.sampling == "two_views":
        return train, None
    held_out = experiment.holdout_classes, experiment.seed, experiment.holdout_sampling, experiment.holdout_part
    return split_training_classes(train, *held_out)


def _with_labels_of(part: StoredEmbeddings, dataset: ImageDataset, what: str) -> StoredEmbeddings:
    if len(part) != len(dataset):
        raise UserError(f"{part.source} holds {len(part):,} embeddings, but {what} has {len(dataset):,} images")
    if part.labels is None:
        roles = None if dataset.is_query is None else np.where(dataset.is_query, "query", "gallery")
        return dataclasses.replace(part, labels=dataset.labels, roles=part.roles if roles is None else roles)
    # An .npz may number its classes in its own way: the same images must belong together.
    pairs = np.unique(np.stack([part.labels, dataset.labels]), axis=1).shape[1]
    if not pairs == len(np.unique(part.labels)) == len(np.unique(dataset.labels)):
        raise UserError(f"{part.source} holds embeddings of other classes than {what}, or of its images in other order")
    return part


def print_metrics(result: dict[str, Any]) -> None:
    """Print one metric a line, fractions in percent, with its interval where there is one."""
    intervals = result.get("intervals", {})
    for key, value in result.items():
        if isinstance(value, float):
            print(f"  {key:<24}{100 * value:6.2f} %{_interval(intervals.get(key))}")
        elif isinstance(value, int):
            print(f"  {key:<24}{value:>6}")
    if "parts" in result:
        print("  means over ten disjoint parts:")
        for key, interval in result["parts"].items():
            print(f"    {key:<22}{100 * interval.mean:6.2f} %{_interval(interval)}")
    if "generalization" in result:
        print("  generalization (no percentages):")
        for key, value in result["generalization"].items():
            print(f"    {key:<34}{value:>14,}" if isinstance(value, int) else f"    {key:<34}{value:>14.4g}")


def _interval(interval: Any) -> str:
    return f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""


FLAGS.effects.update(
    {
        **dict.fromkeys(("data_dir", "dataset_options", "bad_images"), _IMAGES),
        **dict.fromkeys(("batch_size", "truncate_dim"), _EMBEDDING),
        "report": needs("task", "retrieval", "verification"),
        "features": Effect(lambda given: _kind(given) != "embeddings", "a head as --model"),
        **dict.fromkeys(("split", "distance"), either(_ALONE, needs("dataset"), needs("features"))),
        "heat_maps": both(needs("report"), Effect(lambda given: _kind(given) == "model", "a model")),
        **dict.fromkeys(("metrics", "ks", "intervals", "generalization"), both(_ALONE, _RETRIEVAL)),
        "task": _ALONE,
        "target": needs("task", "verification", "classification"),
        "neighbors": needs("task", "classification"),
    }
)
COMMAND = Command(
    "evaluate",
    evaluate,
    FLAGS,
    __doc__,
)
