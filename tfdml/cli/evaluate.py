"""Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

  tfdml evaluate --model=runs/cars_jrd
  tfdml evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --json=metrics.json
  tfdml evaluate --model=models/cars/1/litert/int8.tflite --dataset=cars196 --data_dir=/data/cars196
  tfdml evaluate --model=models/cars --dataset=folder --data_dir=photos --intervals=classes
  tfdml evaluate --model=embeddings/cars --metrics=recall,map@r --ks=1,10
  tfdml evaluate --model=vectors.npz --distance=cosine
  tfdml evaluate --model=runs/head --features=new.npz
  tfdml evaluate --model='lancedb:///data/galleries?table=cars&index=ivf_pq&effort=20' --ks=1,10
  tfdml evaluate --compare=runs/cars_am,runs/cars_jrd --json=differences.json
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

With --compare, the others are compared with the first run query by query, with 95 % intervals; --json is optional.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from tfdml.evaluation.compare import compare_queries
from tfdml.evaluation.metrics import DEFAULT_KS, ks_within, metric_names
from tfdml.evaluation.relevance import images_to_search
from tfdml.io.files import as_named, require_writable, write_json
from tfdml.report import Run, read_run, write_report
from tfdml.report.runs import metric_name, metric_order
from tfdml.retrieval import is_gallery
from tfdml.training import RunFolder
from tfdml.training.images import split_training_classes
from tfdml.training.settings import integers

_RETRIEVAL = needs("task", "retrieval")
_ALONE = Effect(lambda values: not values["compare"], "--model in place of --compare")
_MODEL = Effect(lambda values: not values["compare"] and not holds_embeddings(values["model"]), "a model as --model")
_IMAGES = either(needs("dataset"), needs("features"), _MODEL)
_MEASURED = both(_ALONE, _RETRIEVAL)

FLAGS = Flags()
model_flags.define_model_flags(FLAGS, embeds=_MODEL)
model_flags.define_data_flags(FLAGS, images=_IMAGES)
FLAGS.effects["features"] = Effect(lambda values: not holds_embeddings(values["model"]), "a head as --model")
FLAGS.define("split", "test", "Which classes to measure on.", ["test", "train"], effect=_ALONE)
_METRICS = "Which metrics, see above. Large sets are quicker without nmi, ami and f1."
FLAGS.define("metrics", [], _METRICS, effect=_MEASURED)
_KS = "The K of Recall@K; by default the benchmark's, or those of 1, 2, 4 and 8 that fit the images."
FLAGS.define("ks", [], _KS, effect=_MEASURED)
model_flags.define_distance(FLAGS, _ALONE)
INTERVALS = ["none", "classes", "queries", "parts"]
_INTERVALS = "95 % intervals: by bootstrap, or means over ten parts of the images."
FLAGS.define("intervals", "none", _INTERVALS, INTERVALS, effect=_MEASURED)
TASKS = ["retrieval", "verification", "classification"]
FLAGS.define("task", "retrieval", "What the embeddings are for.", TASKS, effect=_ALONE)
_TARGET = "Choose a threshold: far=0.001 or precision=0.99 with --task=verification, fpir=0.01 with classification."
FLAGS.define("target", "", _TARGET, effect=needs("task", *TASKS[1:]))
FLAGS.define("neighbors", 5, "How many images vote.", lower_bound=1, effect=needs("task", "classification"))
_GENERALIZATION = "Also compare the embeddings of the training classes with these."
FLAGS.define("generalization", False, _GENERALIZATION, effect=_MEASURED)
FLAGS.define("json", "", "File to write the metrics to, as fractions.")
FLAGS.define("report", "", "File to write an HTML page to.", effect=both(_ALONE, needs("task", *TASKS[:2])))
FLAGS.define("compare", [], "In place of --model: finished runs, compared with the first of them.", kind="paths")


def evaluate(values: Flags) -> None:
    """Evaluate as the flags say."""
    if bool(values.model) == bool(values.compare):
        raise UserError("--model is missing" if not values.model else "--compare takes the place of --model")
    if is_gallery(values.model):
        raise UserError("--model is the address of a gallery in a database, and no model: see tfdml search --gallery")
    for name, path in (("json", values.json), ("report", values.report)):
        if path:
            require_writable(path, name)
    if values.compare:
        result = _compared(values)
    else:
        split = _split_of(values)
        measure = {"retrieval": _retrieval, "verification": _verification, "classification": _classification}
        result = {"model": values.model, "dataset": split.data, "split": values.split, "distance": values.distance}
        result |= {} if values.task == "retrieval" else {"task": values.task}
        measures = measure[values.task](values, split)
        result |= measures
        if values.report:
            _write_page(values, split, measures)
    if values.json:
        write_json(values.json, result)
    for path in filter(None, (values.json, values.report)):
        print(f"written: {as_named(path)}")


def _compared(values: Flags) -> dict[str, Any]:
    """Print how runs compare with the first, query by query, and return the differences for JSON."""
    if len(values.compare) < 2:
        raise UserError("--compare: name at least two runs")
    reference, *others = [read_run(folder) for folder in values.compare]
    differences: list[dict[str, Any]] = []
    for run in others:
        names = f"{run.name} compared with {reference.name}"
        seeds = all(one.name.startswith("seed ") for one in (*run.seeds, *reference.seeds))
        try:
            result = compare_queries(run.queries(), reference.queries(), seeds=seeds)
        except UserError as error:
            print(f"{names}: {error}")
            differences.append({"run": run.name, "refused": str(error)})
            continue
        print(f"{names}: differences in points, 95 % intervals")
        for name in metric_order(result.classes):
            kinds = {"classes": result.classes.get(name), "seeds": result.seeds.get(name)}
            ends = [f"{100 * of.low:.1f} to {100 * of.high:.1f} over {kind}" for kind, of in kinds.items() if of]
            print(f"  {metric_name(name):<16}{100 * result.classes[name].mean:>+7.1f}  {', '.join(ends)}")
        differences.append({"run": run.name, "over_classes": result.classes, "over_seeds": result.seeds})
    return {"first": values.compare[0], "differences": differences}


@dataclasses.dataclass(frozen=True)
class _Split:
    """A split of a data set, embedded.

    Args:
        name: What to call it in print.
        data: The data set, or where the embeddings are.
        embeddings: (N, d).
        images: Has the `labels` (N,), and the roles, groups and protocol, of the embeddings.
        ks: The K of Recall@K.
        dataset: The images themselves; None where only embeddings are there.
        choice: Where to read other splits from; None likewise.
        source: The model; None for stored embeddings.
        stored: All that is next to the embeddings on disk; None for a model.
    """

    name: str
    data: str
    embeddings: np.ndarray
    images: Any
    ks: tuple[int, ...]
    dataset: ImageDataset | None
    choice: model_flags.DataChoice | None
    source: EmbeddingBackend | None
    stored: StoredEmbeddings | None


def _split_of(values: Flags) -> _Split:
    stored = read_embeddings(values.model) if holds_embeddings(values.model) else None
    if stored and values.report and not values.dataset:
        raise UserError("--report shows images: name their --dataset and --data_dir next to the embeddings")
    if values.target:
        evaluation.target_of(values.target, kinds=KINDS[1:] if values.task == "verification" else KINDS[:1])
    choice = model_flags.data_choice(values) if values.dataset or stored is None else None
    dataset = choice.load(values.split) if choice else None
    if stored is None:
        assert choice is not None
        assert dataset is not None
        source = model_flags.load_source(values)
        ks = _ks(values, dataset)
        name = f"{choice.name}, {values.split}"
        embeddings = source.embed(dataset, values.batch_size)
        return _Split(name, choice.name, embeddings, dataset, ks, dataset, choice, source, None)
    part = stored.split(values.split)
    if dataset is not None:
        part = _with_labels_of(part, dataset)
    if part.labels is None:
        raise UserError(f"{values.model} has no labels: add the class of each embedding, or name a --dataset")
    about = part.manifest.get("dataset", {}).get("name") or (choice.name if choice else Path(values.model).name)
    name = f"{about}, {values.split}" if part.roles is not None or choice else about
    images = part if dataset is None or not (dataset.protocol or dataset.groups is not None) else dataset
    return _Split(name, about, part.embeddings, images, _ks(values, images), dataset, choice, None, stored)


def _with_labels_of(part: StoredEmbeddings, dataset: ImageDataset) -> StoredEmbeddings:
    what = f"{dataset.name} ({dataset.split})"
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


def _metrics(values: Flags, images: Any) -> list[str]:
    benchmark = getattr(images, "protocol", None)
    return values.metrics or list(benchmark.metrics if benchmark else evaluation.DEFAULT_METRICS)


def _ks(values: Flags, images: Any) -> tuple[int, ...]:
    """Return the K of Recall@K; refuse metrics that there are not, and K that the images are too few for."""
    benchmark, metrics = getattr(images, "protocol", None), _metrics(values, images)
    ks = integers(",".join(values.ks), "--ks") or (benchmark.ks if benchmark else DEFAULT_KS)
    if values.task == "retrieval":
        metric_names(metrics, ks)
    if values.task != "retrieval" or "recall" not in metrics:
        return ks
    fitting = ks_within(ks, available := images_to_search(images))
    reason = f"there are {available:,} images to search in"
    if values.ks and fitting != ks:
        raise UserError(f"--ks={','.join(values.ks)}: {reason}; choose e.g. --ks={','.join(map(str, fitting))}")
    if fitting != ks:
        logging.warning("recall@K is measured for K = %s alone: %s", ", ".join(map(str, fitting)), reason)
    return fitting


def _retrieval(values: Flags, split: _Split) -> dict[str, Any]:
    metrics = _metrics(values, split.images)
    options: dict[str, Any] = {"ks": split.ks, "metrics": metrics, "distance": values.distance}
    resampled = values.intervals if values.intervals in ("classes", "queries") else None
    result = evaluation.evaluate_dataset(split.embeddings, split.images, intervals=resampled, **options)
    if values.intervals == "parts":
        if split.images.is_query is not None or getattr(split.images, "groups", None) is not None:
            raise UserError("--intervals=parts: parts are searched all-to-all, and these images have roles or groups")
        result["parts"] = evaluation.part_protocol(split.embeddings, split.images.labels, **options)
    if values.generalization:
        result["generalization"] = _generalization(values, split)
    _print_name(values, split)
    _print_metrics(result, result.get("intervals", {}))
    for name, interval in result.get("parts", {}).items():
        print(f"  {name:<24}{100 * interval.mean:6.2f} %{_interval(interval)}  mean over ten disjoint parts")
    for name, value in result.get("generalization", {}).items():
        print(f"  {name:<36}{value:>14,}" if isinstance(value, int) else f"  {name:<36}{value:>14.4g}")
    return result


def _generalization(values: Flags, split: _Split) -> dict[str, Any]:
    if values.split == "train":
        raise UserError("--generalization compares the test classes with the training classes: leave --split=test")
    train: tuple[Any, Any] = None, None
    if split.source is not None and split.choice is not None:
        dataset, _ = seen_and_held_out(split.choice.load("train"), split.choice.name, values.model)
        train = split.source.embed(dataset, values.batch_size), dataset.labels
    elif split.stored is not None and split.stored.roles is not None and (split.stored.roles == "train").any():
        part = split.stored.split("train")
        train = part.embeddings, part.labels
    else:
        logging.warning("no embeddings of training classes: some measures are left out (tfdml embed --split=all)")
    labels = split.images.labels
    return evaluation.evaluate_generalization(split.embeddings, labels, *train, distance=values.distance)


def _verification(values: Flags, split: _Split) -> dict[str, Any]:
    labels, distance = split.images.labels, values.distance
    measured = evaluation.verification(split.embeddings, labels, distance=distance)
    _print_name(values, split)
    print(f"  pairs: {measured.num_same:,} of one class, {measured.num_different:,} of different classes; {distance}")
    print(f"  {'auc':<24}{measured.auc:9.6f}")
    print(f"  {'eer':<24}{100 * measured.eer:6.2f} %  at a distance of {measured.eer_threshold:.6g}")
    for far, point in measured.points.items():
        place = f"at a distance of {point.threshold:.6g}"
        print(f"  {f'tar@far={far:g}':<24}{100 * point.tar.mean:6.2f} %{_interval(point.tar)}  {place}")
    intervals = {f"tar@far={far:g}": point.tar for far, point in measured.points.items()}
    return {**measured.to_dict(), "intervals": intervals, **_calibration(values, split.embeddings, labels)}


def _classification(values: Flags, split: _Split) -> dict[str, Any]:
    """Measure a gallery of every second image of the first half of the classes; the other classes are unknown to it."""
    labels = np.asarray(split.images.labels)
    classes, in_gallery = np.unique(labels), np.zeros(len(labels), bool)
    for label in classes[: -(-len(classes) // 2)]:
        in_gallery[np.flatnonzero(labels == label)[::2]] = True
    gallery, options = split.embeddings[in_gallery], {"k": values.neighbors, "distance": values.distance}
    classifier = evaluation.KNNClassifier(gallery, labels[in_gallery], **options)
    result = evaluation.evaluate_classification(classifier, split.embeddings[~in_gallery], labels[~in_gallery])
    _print_name(values, split)
    print(
        f"  a gallery of {len(gallery):,} images of {len(classifier.classes):,} classes; {result['num_known']:,} "
        f"queries of these, {result['num_unknown']:,} of other classes"
    )
    _print_metrics({name: value for name, value in result.items() if isinstance(value, float)}, {})
    sides: dict[str, Any] = {}
    stored = split.stored
    if stored is not None and stored.roles is not None and stored.classes is not None:
        rows = np.flatnonzero(stored.roles != "train")
        if len(rows) == len(labels):  # searches meet all stored images
            labels = stored.classes[rows]
            sides = {"gallery": stored.embeddings, "gallery_labels": stored.classes, "own_rows": rows}
    return {**result, **_calibration(values, split.embeddings, labels, **sides)}


def _calibration(values: Flags, embeddings: np.ndarray, labels: Any, **sides: Any) -> dict[str, Any]:
    """Print the threshold of `--target`, and what to expect of it on as many other classes; return it for JSON."""
    if not values.target:
        return {}
    target = evaluation.target_of(values.target)
    calibration = evaluation.calibrate(embeddings, labels, distance=values.distance, **sides, **target)
    print(f"  {calibration}")
    return {"calibration": calibration.to_dict()}


def _write_page(values: Flags, split: _Split, result: dict[str, Any]) -> None:
    options: dict[str, Any] = {"distance": values.distance}
    if split.source is not None and split.choice is not None and values.split == "test" and _is_run(values.model):
        _, classes = seen_and_held_out(split.choice.load("train"), split.choice.name, values.model)
        if classes is not None:
            options["held_out"] = split.source.embed(classes, values.batch_size), classes.labels
    if values.task == "verification":
        result = {name: result[name] for name in result if name in ("auc", "intervals") or name.startswith("tar@")}
    if values.target:
        options["target"] = evaluation.target_of(values.target)
    flags = {name: values[name].value for name in values if values[name].present}
    run = Run(values.model, {"metrics": result}, flags=flags)
    write_report(values.report, run, split.dataset, split.embeddings, **options)


def _is_run(model: str) -> bool:
    return (Path(model) / "flags.txt").is_file()


def seen_and_held_out(train: ImageDataset, name: str, model: str) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the training images of the classes that a run trained on, and those of the classes that it held out.

    Args:
        train: The images.
        name: The data set.
        model: The folder of the run; for another model, or another data set, no class is held out, nor by a run
            without labels.
    """
    experiment = RunFolder(model).load_experiment() if _is_run(model) else None
    if experiment is None or experiment.data_name != name or experiment.sampling_call().name == "two_views":
        return train, None
    held_out = experiment.holdout_classes, experiment.seed, experiment.holdout_sampling, experiment.holdout_part
    return split_training_classes(train, *held_out)


def _print_name(values: Flags, split: _Split) -> None:
    size = f"{len(split.embeddings):,} images of {len(np.unique(split.images.labels)):,} classes"
    print(f"{as_named(values.model)} on {split.name}: {size}")


def _print_metrics(result: Mapping[str, Any], intervals: Mapping[str, Sequence[float]]) -> None:
    """Print one metric a line, fractions in percent, with its interval where there is one."""
    for name, value in result.items():
        if isinstance(value, float):
            print(f"  {name:<24}{100 * value:6.2f} %{_interval(intervals.get(name))}")
        elif isinstance(value, int):
            print(f"  {name:<24}{value:>6}")


def _interval(interval: Any) -> str:
    return f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""


COMMAND = Command("evaluate", evaluate, FLAGS, __doc__)
