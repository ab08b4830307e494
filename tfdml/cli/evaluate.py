"""Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

  tfdml evaluate --model=runs/cars_jrd
  tfdml evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --json=metrics.json
  tfdml evaluate --model=models/cars/1/litert/int8.tflite --dataset=cars196 --data_dir=/data/cars196
  tfdml evaluate --model=models/cars --dataset=folder --data_dir=photos --intervals=classes
  tfdml evaluate --model=embeddings/cars --metrics=recall,map@r --ks=1,10
  tfdml evaluate --model=vectors.npz --distance=cosine
  tfdml evaluate --model=runs/head --features=new.npz
  tfdml evaluate --compare=runs/cars_am,runs/cars_jrd --json=differences.json
  tfdml evaluate --model=runs/cars_jrd --task=verification --target=far=0.001 --json=threshold.json
  tfdml evaluate --model=runs/cars_jrd --task=classification

--model embeds the images, or is stored embeddings:
  a folder that tfdml embed wrote; a Parquet file or a folder of them, with the columns embedding and label
  an .npy file of embeddings (N, d), with --dataset for the labels
  an .npz file with the arrays embeddings (N, d) and labels (N,), and for queries that are searched in the rest
  is_query (N,) bool

--metrics are of recall, recall@K (CMC), precision@K, map@K, map@r, r_precision, nmi, ami, f1, and of map,
minp, mrr, ndcg and h_ap, which search once more; see docs/evaluation.md. The
default is recall, precision@1, map@r, r_precision, nmi, ami and f1; for benchmarks see docs/protocols.md.

--task=verification counts all pairs of images: AUC, equal error rate, and the true accept rate at false accept rates.
With --target=far=0.001 it also chooses the threshold for pairs of images; --json keeps it. --report has the ROC curve.
--task=classification votes by the nearest images of a gallery: every second image of each class, without the last half
of the classes, whose images are to be found unknown. With --target=fpir=0.01 it also chooses the threshold for searches
of all stored images, or of the split: at most 1 % of the queries of unknown classes are accepted.

With a model of images and texts, texts search the images and images the texts. Where the images have no texts, these
are the names of their classes.

With --compare, the others are compared with the first run query by query, with 95 % intervals; --json is optional.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml import evaluation
from tfdml.cli.command_line import Command, DataFlags, Flags, data_choice, load_source
from tfdml.data.dataset import ImageDataset
from tfdml.effects import needs
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.embeddings.files import StoredEmbeddings, holds_embeddings, read_embeddings
from tfdml.errors import UserError
from tfdml.evaluation.classification import KINDS
from tfdml.evaluation.compare import compare_queries
from tfdml.evaluation.views import ViewItems
from tfdml.io.files import as_named, require_writable, write_json
from tfdml.pairwise import DISTANCES
from tfdml.report import Run, read_run, write_report
from tfdml.report.runs import metric_name, metric_order
from tfdml.retrieval import is_gallery
from tfdml.training import RunFolder
from tfdml.training.images import split_training_classes
from tfdml.training.settings import choice, integers, positive

_TASKS = ("retrieval", "verification", "classification")
_MEASURED = needs("task", "retrieval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags(DataFlags):
    """What is measured, and how.

    Args:
        split: Which classes to measure on.
        metrics: Which metrics, see above. Large sets are quicker without nmi, ami and f1.
        ks: The K of Recall@K; by default the benchmark's, or those of 1, 2, 4 and 8 that fit the images.
        distance: What near means.
        intervals: 95 % intervals, by bootstrap over classes or queries.
        task: What the embeddings are for.
        target: Choose a threshold: far=0.001 with --task=verification, fpir=0.01 with classification.
        neighbors: How many images vote.
        generalization: Also compare the embeddings of the training classes with these.
        json: File to write the metrics to, as fractions.
        report: File to write an HTML page to.
        compare: In place of --model: finished runs, compared with the first of them.
    """

    split: str = choice("test", choices=("test", "train"))
    metrics: Sequence[str] = choice((), effect=_MEASURED)
    ks: Sequence[str] = choice((), effect=_MEASURED)
    distance: str = choice("euclidean", choices=DISTANCES)
    intervals: str = choice("none", choices=("none", "classes", "queries"), effect=_MEASURED)
    task: str = choice("retrieval", choices=_TASKS)
    target: str = choice("", effect=needs("task", *_TASKS[1:]))
    neighbors: int = choice(5, check=positive, effect=needs("task", "classification"))
    generalization: bool = choice(False, effect=_MEASURED)
    json: str = ""
    report: str = choice("", effect=needs("task", *_TASKS[:2]))
    compare: Sequence[str] = ()


FLAGS = Flags(EvaluateFlags)


def evaluate(values: Flags) -> None:
    """Evaluate as the flags say."""
    flags = values.settings(EvaluateFlags)
    if bool(flags.model) == bool(flags.compare):
        raise UserError("--compare takes the place of --model" if flags.model else "--model is missing")
    if is_gallery(flags.model):
        raise UserError("--model is the address of a gallery in a database, and no model: see tfdml search --gallery")
    for name in ("json", "report"):
        if path := getattr(flags, name):
            require_writable(path, name)
    result = _compared(flags.compare) if flags.compare else _measured(flags)
    if flags.json:
        write_json(flags.json, result)
    for path in filter(None, (flags.json, flags.report)):
        print(f"written: {as_named(path)}")


def _compared(folders: Sequence[str]) -> dict[str, Any]:
    """Print how runs compare with the first, query by query, and return the differences for JSON."""
    if len(folders) < 2:
        raise UserError("--compare: name at least two runs")
    reference, *others = map(read_run, folders)
    differences: list[dict[str, Any]] = []
    for run in others:
        seeds = all(one.name.startswith("seed ") for one in (*run.seeds, *reference.seeds))
        result = compare_queries(run.queries(), reference.queries(), seeds=seeds)
        print(f"{run.name} compared with {reference.name}: differences in points, 95 % intervals")
        for name in metric_order(result.classes):
            kinds = {"classes": result.classes.get(name), "seeds": result.seeds.get(name)}
            ends = [f"{100 * of.low:.1f} to {100 * of.high:.1f} over {kind}" for kind, of in kinds.items() if of]
            print(f"  {metric_name(name):<16}{100 * result.classes[name].mean:>+7.1f}  {', '.join(ends)}")
        differences.append({"run": run.name, "over_classes": result.classes, "over_seeds": result.seeds})
    return {"first": folders[0], "differences": differences}


def _measured(flags: EvaluateFlags) -> dict[str, Any]:
    """Print what a split measures, and return it for JSON."""
    target = {}
    if flags.target:
        target = evaluation.target_of(flags.target, kinds=KINDS[1:] if flags.task == "verification" else KINDS[:1])
    split = _stored_split(flags) if holds_embeddings(flags.model) else _embedded_split(flags)
    images = split.images
    print(f"{as_named(flags.model)} on {split.name}, {flags.split}: {len(images):,} images of ", end="")
    print(f"{len(np.unique(images.labels)):,} classes" + (f", {len(split.texts):,} texts" if split.items else ""))
    result = {"model": flags.model, "dataset": split.name, "split": flags.split, "distance": flags.distance}
    result |= {} if flags.task == "retrieval" else {"task": flags.task}
    measures, searched = _MEASURES[flags.task](flags, split)
    if target:
        calibration = evaluation.calibrate(**searched, distance=flags.distance, **target)
        print(f"  {calibration}")
        measures["calibration"] = calibration.to_dict()
    if flags.report:
        shown = "auc|intervals|tar@" if flags.task == "verification" else ""
        metrics = {name: value for name, value in measures.items() if re.match(shown, name)}
        fields = dataclasses.fields(flags)
        changed = {each.name: value for each in fields if (value := getattr(flags, each.name)) != each.default}
        run = Run(flags.model, {"metrics": metrics}, flags=changed)
        options: dict[str, Any] = {"target": target} if target else {}
        write_report(flags.report, run, images, split.embeddings, distance=flags.distance, **options)
    return result | measures


@dataclasses.dataclass
class _Split:
    """A split of a data set, with its embeddings.

    Attributes:
        name: The data set, or where the embeddings are.
        images: The images; or embeddings that have the labels, roles and groups.
        embeddings: (N, d) those of the images.
        stored: The stored embeddings, of all splits; None for a model.
        source: The model; None for stored embeddings.
        items: Of a model of images and texts: both, each once; None for images alone.
        texts: (M, d) those of the texts.
    """

    name: str
    images: Any
    embeddings: np.ndarray
    stored: StoredEmbeddings | None = None
    source: EmbeddingBackend | None = None
    items: ViewItems | None = None
    texts: Any = None


def _stored_split(flags: EvaluateFlags) -> _Split:
    stored = read_embeddings(flags.model)
    part = stored.split(flags.split)
    if not flags.dataset:
        if part.labels is None or flags.report:
            needed = "--report shows images" if flags.report else f"{flags.model} has no labels"
            raise UserError(f"{needed}: name the --dataset and --data_dir of the embeddings")
        name = part.manifest.get("dataset", {}).get("name") or Path(flags.model).name
        return _Split(name, part, part.embeddings, stored)
    dataset = data_choice(flags).load(flags.split)
    what = f"{dataset.name} ({dataset.split})"
    if len(part) != len(dataset):
        raise UserError(f"{part.source} holds {len(part):,} embeddings, but {what} has {len(dataset):,} images")
    # An .npz may number its classes in its own way: the same images must belong together.
    labels = dataset.labels if part.labels is None else part.labels
    pairs = np.unique(np.stack([labels, dataset.labels]), axis=1).shape[1]
    if not pairs == len(np.unique(labels)) == len(np.unique(dataset.labels)):
        raise UserError(f"{part.source} holds embeddings of other classes than {what}, or of its images in other order")
    return _Split(dataset.name, dataset, part.embeddings, stored)


def _embedded_split(flags: EvaluateFlags) -> _Split:
    selection = data_choice(flags)
    images, source = selection.load(flags.split), load_source(flags)
    if not source.embeds_texts:
        return _Split(selection.name, images, source.embed(images, flags.batch_size), source=source)
    if flags.task != "retrieval" or flags.generalization or flags.report:
        raise UserError(f"{flags.model} is a model of images and texts, which --task=retrieval alone measures")
    items = ViewItems.of(images)
    images = images.take(items.rows)
    vectors = source.embed(images, flags.batch_size), source.embed_texts(items.texts)
    return _Split(selection.name, images, vectors[0], source=source, items=items, texts=vectors[1])


# What a task measures, for JSON; and the arguments of `calibrate` for its threshold.
_Measures = tuple[dict[str, Any], dict[str, Any]]


def _retrieval(flags: EvaluateFlags, split: _Split) -> _Measures:
    intervals = None if flags.intervals == "none" else flags.intervals
    options: dict[str, Any] = {"distance": flags.distance, "intervals": intervals}
    options |= {"metrics": flags.metrics} if flags.metrics else {}
    ks = integers(",".join(flags.ks), "--ks") or None
    if split.items:
        labels = split.items.image_labels, split.items.text_labels
        result = evaluation.evaluate_views(split.embeddings, split.texts, *labels, ks=ks, **options)
        for direction, measures in result.items():
            print(f"  {direction.replace('_', ' ')}")
            _print_metrics(measures, measures["chance"])
        return result, {}
    if benchmark := getattr(split.images, "protocol", None):
        options, ks = {"metrics": benchmark.metrics, **options}, ks or benchmark.ks
    result = evaluation.evaluate_dataset(split.embeddings, split.images, ks=ks, **options)
    if flags.generalization:
        train = _of_training_classes(flags, split)
        result["generalization"] = evaluation.evaluate_generalization(
            split.embeddings, split.images.labels, *train, distance=flags.distance
        )
    _print_metrics(result)
    for name, value in result.get("generalization", {}).items():
        print(f"  {name:<36}{value:>14,}" if isinstance(value, int) else f"  {name:<36}{value:>14.4g}")
    return result, {}


def _of_training_classes(flags: EvaluateFlags, split: _Split) -> tuple[Any, Any]:
    """Return embeddings and labels of the classes that the model was trained on; None where there are none."""
    if flags.split == "train":
        raise UserError("--generalization compares the test classes with the training classes: leave --split=test")
    if split.source is None:
        stored = split.stored
        if stored is None or stored.roles is None or not (stored.roles == "train").any():
            logging.warning("no embeddings of training classes: some measures are left out (tfdml embed --split=all)")
            return None, None
        part = stored.split("train")
        return part.embeddings, part.labels
    selection = data_choice(flags)
    images = classes_trained_on(selection.load("train"), selection.name, flags.model)
    return split.source.embed(images, flags.batch_size), images.labels


def classes_trained_on(train: ImageDataset, name: str, model: str) -> ImageDataset:
    """Return the images of the classes that a run trained on, without those that it held out.

    Args:
        train: The training images.
        name: The data set.
        model: The folder of the run; another model, or another data set, has held out none, nor has a run without
            labels.
    """
    if not (Path(model) / "flags.txt").is_file():
        return train
    experiment = RunFolder(model).load_experiment()
    if experiment.data_name != name:
        return train
    return split_training_classes(train, *experiment.held_out(experiment.seed))[0]


def _verification(flags: EvaluateFlags, split: _Split) -> _Measures:
    searched: dict[str, Any] = {"embeddings": split.embeddings, "labels": split.images.labels}
    result = evaluation.verification(**searched, distance=flags.distance)
    print(f"  pairs: {result.num_same:,} of one class, {result.num_different:,} of different classes; {flags.distance}")
    print(f"  {'auc':<24}{result.auc:9.6f}")
    print(f"  {'eer':<24}{100 * result.eer:6.2f} %  at a distance of {result.eer_threshold:.6g}")
    for far, point in result.points.items():
        place = f"at a distance of {point.threshold:.6g}"
        print(f"  {f'tar@far={far:g}':<24}{100 * point.tar.mean:6.2f} %{_interval(point.tar)}  {place}")
    intervals = {f"tar@far={far:g}": point.tar for far, point in result.points.items()}
    return {**result.to_dict(), "intervals": intervals}, searched


def _classification(flags: EvaluateFlags, split: _Split) -> _Measures:
    """Measure a gallery of every second image of the first half of the classes; the other classes are unknown to it."""
    embeddings, labels = split.embeddings, np.asarray(split.images.labels)
    classes, in_gallery = np.unique(labels), np.zeros(len(labels), bool)
    for label in classes[: -(-len(classes) // 2)]:
        in_gallery[np.flatnonzero(labels == label)[::2]] = True
    gallery = embeddings[in_gallery], labels[in_gallery]
    classifier = evaluation.KNNClassifier(*gallery, k=flags.neighbors, distance=flags.distance)
    result = evaluation.evaluate_classification(classifier, embeddings[~in_gallery], labels[~in_gallery])
    print(
        f"  a gallery of {in_gallery.sum():,} images of {len(classifier.classes):,} classes; {result['num_known']:,} "
        f"queries of these, {result['num_unknown']:,} of other classes"
    )
    _print_metrics({name: value for name, value in result.items() if isinstance(value, float)})
    searched: dict[str, Any] = {"embeddings": embeddings, "labels": labels}
    stored = split.stored
    if stored is not None and stored.roles is not None and stored.classes is not None:
        rows = np.flatnonzero(stored.roles != "train")
        if len(rows) == len(labels):  # searches meet all stored images
            searched |= {"labels": stored.classes[rows], "own_rows": rows}
            searched |= {"gallery": stored.embeddings, "gallery_labels": stored.classes}
    return result, searched


_MEASURES = {"retrieval": _retrieval, "verification": _verification, "classification": _classification}


def _print_metrics(result: Mapping[str, Any], chance: Mapping[str, float] = {}) -> None:
    """Print one metric a line, fractions in percent, with its interval and the level of chance where there are any."""
    for name, value in result.items():
        if isinstance(value, float):
            random = f"  chance {100 * chance[name]:.2f} %" if name in chance else ""
            print(f"  {name:<24}{100 * value:6.2f} %{_interval(result.get('intervals', {}).get(name))}{random}")
        elif isinstance(value, int):
            print(f"  {name:<24}{value:>6}")


def _interval(interval: Any) -> str:
    return f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""


COMMAND = Command("evaluate", evaluate, FLAGS, __doc__)
