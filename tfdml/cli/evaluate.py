r"""Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

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
  a folder that tfdml embed wrote; a Parquet file or a folder of them, with columns embedding, label
  an .npy file of embeddings (N, d), with --dataset for the labels
  an .npz file with the arrays embeddings (N, d), labels (N,), and for queries that search the rest
  is_query (N,) bool

--metrics are of recall, recall@K (CMC), precision@K, map@K, map@r, r_precision, nmi, ami, f1, and
of map, minp, mrr, ndcg and h_ap, which search once more; see docs/evaluation.md. The
default is recall, precision@1, map@r, r_precision, nmi, ami and f1; for benchmarks see
docs/protocols.md.

--task=verification counts all pairs of images: AUC, equal error rate, and the true accept rate at
false accept rates. With --target=far=0.001, or precision=0.99, it also chooses the threshold for
pairs of images; --json keeps it. --report has the ROC curve. --set_pairs=pairs.csv measures these
pairs of sets of images, such as the templates of IJB, by --per_class and --groups.
--task=classification votes by the nearest images of a gallery: every second image of each class,
without the last half of the classes, whose images are to be found unknown. With --target=fpir=0.01
it also chooses the threshold for searches of all stored images, or of the split: at most 1 % of the
queries of unknown classes are accepted. No threshold is chosen on classes that the model was
trained on.

  tfdml evaluate --model=models/cars/1/litert/int8.tflite --task=classification \
      --gallery=catalog --known=visits --strangers=others --target=fpir=0.01 --json=threshold.json

With --task=classification and --gallery, the threshold is that of this gallery: at most 1 % of the
images of --strangers find anything, and so many of --known find their class. Each is a folder of
class folders, or stored embeddings; the gallery may be a retriever, which embeds the others, or a
database. Name the file that will embed queries as --model, as the vectors of a quantized file
differ.

  tfdml evaluate --model=embeddings/new --gallery=embeddings/old --target=fpir=0.01

With --task=retrieval, --gallery is the stored embeddings of an older model. The images of --model
that are in it, by name, search it, each without its own image: new-old. Next to it stand the old
model by itself, old-old, and the new one, new-new. The threshold of --target is that of these two
models.

  tfdml evaluate --watch=threshold.json --gallery=catalog --queries=week \
      --model=models/cars/1/litert/int8.tflite

With --watch, later queries are compared with those of the threshold: the share that it refuses, how
far they are from the gallery, and how many of its classes they find. The exit status is 3 where one
of them is outside its interval, which is meant for 5 % of weeks without a change.

With a model of images and texts, --task=retrieval measures texts that search the images and images
that search the texts, verification pairs of an image and a text, and classification images by
--templates with the names of their classes; its --target is of texts that search the images. Where
the images have no texts, these are the names of their classes.

With --compare, the others are compared with the first run query by query, with 95 % intervals;
--json is optional.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from tfdml.cli.command_line import Command, Flags
from tfdml.cli.evaluation.flags import EvaluateFlags
from tfdml.cli.evaluation.galleries import calibrate_gallery, watch_queries
from tfdml.cli.evaluation.splits import Split
from tfdml.cli.evaluation.upgrades import ACROSS, OLD, SEARCHES, Upgrade
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.io.files import printable, require_writable, write_json
from tfdml.options import fields_of, flag_text
from tfdml.run_folder import FLAGS_FILE
from tfdml.training import Experiment

if TYPE_CHECKING:
    import numpy as np

    from tfdml.data.dataset import ImageDataset
    from tfdml.evaluation.views import ViewItems


#: The exit status where watched queries have shifted.
SHIFTED = 3


def evaluate(flags: EvaluateFlags) -> None:
    """Evaluate as the flags say."""
    from tfdml.retrieval import is_database

    if flags.watch and not (flags.gallery and flags.queries):
        raise UserError("--watch needs the --gallery of its threshold, and --queries")
    has_gallery_alone = bool(flags.gallery) and not flags.is_upgrade
    if bool(flags.model) == bool(flags.compare) and not has_gallery_alone:
        raise UserError("is missing, or --compare in its place", model=...)
    if not flags.watch and has_gallery_alone != bool(flags.strangers):
        raise UserError("--gallery and --strangers go together: FPIR is the rate of strangers")
    if is_database(flags.model):
        raise UserError(
            "--model is the address of a gallery in a database, and no model: see tfdml search "
            "--gallery"
        )
    for name in ("json", "report"):
        if path := getattr(flags, name):
            require_writable(path, name)
    drift = None
    if flags.watch:
        drift, result = watch_queries(flags)
    elif flags.compare:
        result = _compared(flags.compare)
    elif has_gallery_alone:
        result = calibrate_gallery(flags)
    else:
        result = _measured(flags)
    if flags.json:
        write_json(flags.json, result)
    for path in filter(None, (flags.json, flags.report)):
        print(f"written: {printable(path)}")
    if drift is not None and drift.has_shifted:
        sys.exit(SHIFTED)


def _compared(folders: Sequence[str]) -> dict[str, Any]:
    """Print how runs compare with the first, query by query, and return the differences for
    JSON."""
    from tfdml.report import read_run
    from tfdml.report.runs import metric_name, metric_order
    from tfdml.results import compare_queries

    if len(folders) < 2:
        raise UserError("name at least two runs", compare=...)
    reference, *others = map(read_run, folders)
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
            ends = []
            for over, intervals in (("classes", result.classes), ("seeds", result.seeds)):
                if name in intervals:
                    low, high = 100 * intervals[name].low, 100 * intervals[name].high
                    ends.append(f"{low:.1f} to {high:.1f} over {over}")
            difference = 100 * result.classes[name].mean
            print(f"  {metric_name(name):<16}{difference:>+7.1f}  {', '.join(ends)}")
        differences.append(
            {"run": run.name, "over_classes": result.classes, "over_seeds": result.seeds}
        )
    return {"first": folders[0], "differences": differences}


def _measured(flags: EvaluateFlags) -> dict[str, Any]:
    """Print what a split measures, and return it for JSON."""
    from tfdml import evaluation
    from tfdml.evaluation.calibration import KINDS

    target = {}
    if flags.target:
        kinds = KINDS[1:] if flags.task == "verification" else KINDS[:1]
        target = evaluation.target_of(flags.target, kinds=kinds)
    split = Split(flags)
    print(f"{printable(flags.model)} on {_size(split)}")
    _report_trained(split.trained_classes(), "the model", flags.target)
    result = {
        "model": flags.model,
        "dataset": split.name,
        "split": flags.split,
        "distance": flags.distance,
    }
    if flags.task != "retrieval":
        result["task"] = flags.task
    measures, searched = _MEASURES[flags.task](split)
    if target:
        calibration = evaluation.calibrate(**searched, distance=flags.distance, **target)
        which = "all stored images" if "own_rows" in searched else flags.split
        calibration = calibration.measured_on(
            gallery=f"{split.name}, {which}",
            queries="texts" if split.items else "images",
            model=split.model,
        )
        if split.old is not None:
            calibration = calibration.measured_on(
                gallery=printable(flags.gallery), gallery_model=split.old.model
            )
        print(f"  threshold: {calibration}")
        measures["calibration"] = calibration.to_dict()
    if flags.report:
        _write_report(split, measures, target)
    return result | measures


def _report_trained(trained: int, model: str, target: str) -> None:
    """Print how many of the classes a model was trained on; raise a `UserError` where a threshold
    is to be chosen on them."""
    if not trained:
        return
    print(f"  {model} was trained on {trained:,} of these classes: it does better on them")
    if target:
        raise UserError(
            f"{trained:,} of the classes were trained on, and no threshold is chosen on such: "
            "name other images, by --dataset or by --gallery, --known and --strangers",
            target=target,
        )


def _size(split: Split) -> str:
    """Return what a split is called, with its images, classes and texts."""
    import numpy as np

    has_parts = split.selection is not None or split.images.roles is not None
    name = f"{split.name}, {split.flags.split}" if has_parts else split.name
    num_classes = len(np.unique(split.images.labels))
    texts = f", {counted(len(split.items.texts), 'text')}" if split.items else ""
    return f"{name}: {counted(len(split.images), 'image')} of {num_classes:,} classes{texts}"


def _write_report(split: Split, measures: Mapping[str, Any], target: dict[str, Any]) -> None:
    from tfdml.report import Run, write_report

    flags = split.flags
    shown = "auc|intervals|tar@" if flags.task == "verification" else ""
    measured = {name: value for name, value in measures.items() if re.match(shown, name)}
    given: dict[str, Any] = {}
    for name, field in fields_of(EvaluateFlags).items():
        if getattr(flags, name) != field.default:
            given[name] = flag_text(getattr(flags, name))
    run = Run(flags.model, {"metrics": measured}, flags=given)
    options: dict[str, Any] = {"target": target} if target else {}
    write_report(
        flags.report, run, split.images, split.embeddings, distance=flags.distance, **options
    )


# What a task measures, for JSON; and the arguments of `calibrate` for its threshold.
_Measures = tuple[dict[str, Any], dict[str, Any]]


def _retrieval(split: Split) -> _Measures:
    from tfdml import evaluation
    from tfdml.evaluation.metrics import DEFAULT_KS, metric_names

    if split.old is not None:
        return _upgrade(split)
    if split.items:
        return _image_text_retrieval(split, split.items)
    flags = split.flags
    benchmark = getattr(split.images, "protocol", None)
    default_metrics = benchmark.metrics if benchmark else evaluation.DEFAULT_METRICS
    metrics = list(flags.metrics or default_metrics)
    depths = flags.ks or (benchmark.ks if benchmark else DEFAULT_KS)
    metric_names(metrics, depths)  # refuses unknown metrics before anything is embedded
    if "recall" in metrics:
        depths = _depths_that_fit(flags.ks, depths, split.images)
    if flags.generalization and flags.split == "train":
        raise UserError(
            "--generalization compares the test classes with the training classes: leave "
            "--split=test"
        )
    result = evaluation.evaluate_dataset(
        split.embeddings, split.images, metrics=metrics, ks=depths, **_retrieval_options(flags)
    )
    if flags.generalization:
        train = _of_training_classes(split)
        measures = evaluation.evaluate_generalization(
            split.embeddings, split.images.labels, *train, distance=flags.distance
        )
        result["generalization"] = measures
    _print_metrics(result)
    for name, value in result.get("generalization", {}).items():
        number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        print(f"  {name:<36}{number:>14}")
    return result, {}


def _upgrade(split: Split) -> _Measures:
    """Measure how a new model searches the gallery of an old one, next to each by itself."""
    from tfdml import evaluation

    flags = split.flags
    if flags.target:
        target = evaluation.target_of(flags.target, kinds=("fpir",))
    upgrade = Upgrade.of(split)
    print(f"  {upgrade.sizes()}")
    _report_trained(upgrade.trained, "the model of --gallery", flags.target)
    options = _retrieval_options(flags)
    options["metrics"] = flags.metrics or ("recall", "map@r", "r_precision")
    options["ks"] = flags.ks or None
    result: dict[str, Any] = {"gallery": printable(flags.gallery)}
    values: dict[str, dict[str, np.ndarray]] = {}
    for name, search in upgrade.searches.items():
        values[name] = {}
        print(f"  {name}: {SEARCHES[name]}")
        result[name] = evaluation.evaluate_retrieval(
            **search, **upgrade.relevance, **options, values=values[name]
        )
        _print_metrics(result[name])
    differences = evaluation.paired_differences(values[ACROSS], values[OLD], upgrade.labels)
    print(f"  {ACROSS} less {OLD}, in points, 95 % intervals over classes")
    for name, interval in differences.items():
        print(f"  {name:<24}{100 * interval.mean:+6.2f}  {_interval(interval)}")
    result["difference"] = differences
    if not flags.target:
        return result, {}
    result[f"threshold of {OLD}"] = _rates_of_old_threshold(upgrade, target, flags.distance)
    return result, upgrade.searches[ACROSS]


def _rates_of_old_threshold(
    upgrade: Upgrade, target: Mapping[str, Any], distance: str
) -> dict[str, Any]:
    """Print what the old model's own threshold does with queries of the new one."""
    from tfdml.evaluation import calibrate
    from tfdml.evaluation.identification import Searches

    threshold = calibrate(**upgrade.searches[OLD], distance=distance, **target).threshold
    searches = Searches(**upgrade.searches[ACROSS], distance=distance)
    rates = searches.rates(threshold, 0.95, new_classes=True)
    shares = ", ".join(f"{name} {100 * rate.mean:.2f} %" for name, rate in rates.items())
    print(f"  the threshold of {OLD}, {threshold:.9g}, has on {ACROSS}: {shares}")
    return {"threshold": threshold, "rates": rates}


def _retrieval_options(flags: EvaluateFlags) -> dict[str, Any]:
    intervals = None if flags.intervals == "none" else flags.intervals
    return {"distance": flags.distance, "intervals": intervals}


def _image_text_retrieval(split: Split, items: ViewItems) -> _Measures:
    from tfdml import evaluation

    flags = split.flags
    options = _retrieval_options(flags)
    if flags.metrics:
        options["metrics"] = flags.metrics
    labels = items.image_labels, items.text_labels
    result = evaluation.evaluate_views(
        split.embeddings, split.texts, *labels, ks=flags.ks or None, **options
    )
    for direction, measures in result.items():
        print(f"  {direction.replace('_', ' ')}")
        _print_metrics(measures, measures["chance"])
    return result, {}


def _depths_that_fit(ks: Sequence[int] | None, depths: Sequence[int], images: Any) -> Sequence[int]:
    """Return the depths that are no larger than the number of images to search; raise a
    `UserError` where `ks` were asked for."""
    from tfdml.evaluation.metrics import ks_within
    from tfdml.evaluation.relevance import images_to_search

    available = images_to_search(images)
    fitting = ks_within(depths, available)
    if fitting == depths:
        return depths
    reason = f"there are {counted(available, 'image')} to search in"
    if ks:
        raise UserError(f"{reason}; choose e.g. --ks={','.join(map(str, fitting))}", ks=ks)
    logging.warning(
        "recall@K is measured for K = %s alone: %s", ", ".join(map(str, fitting)), reason
    )
    return fitting


def _of_training_classes(split: Split) -> tuple[Any, Any]:
    """Return embeddings and labels of the classes that the model was trained on; None where there
    are none."""
    if split.stored is not None:
        if split.stored.roles is not None and (split.stored.roles == "train").any():
            part = split.stored.split("train")
            return part.embeddings, part.labels
        logging.warning(
            "no embeddings of training classes: some measures are left out (tfdml embed "
            "--split=all)"
        )
        return None, None
    assert split.selection is not None
    model = split.flags.model
    images = classes_trained_on(split.selection.load("train"), split.selection.name, model)
    return split.source.embed(images, split.flags.batch_size), images.labels


def classes_trained_on(train: ImageDataset, name: str, model: str) -> ImageDataset:
    """Return the images of the classes that a run trained on, without those that it held out.

    Args:
        train: The training images.
        name: The data set.
        model: The folder of the run; another model, or another data set, has held out none.
    """
    from tfdml.training.run_data import split_training_classes

    if not (Path(model) / FLAGS_FILE).is_file():
        return train
    experiment = Experiment.of_run(model)
    if experiment.data_name != name:
        return train
    share, sampling = experiment.holdout_classes, experiment.holdout_sampling
    return split_training_classes(train, share, experiment.seed, sampling)[0]


def _verification_of_sets(split: Split) -> _Measures:
    """Measure the pairs of sets of --set_pairs; the classes of the images are the sets."""
    import numpy as np

    from tfdml import evaluation
    from tfdml.data.readers.own_images import read_set_pairs
    from tfdml.embeddings.files import class_of_each
    from tfdml.evaluation.verification import verify_in_random_folds

    flags = split.flags
    if split.items:
        raise UserError("are of images, and the model is of images and texts", set_pairs=...)
    groups = split.images.groups if flags.groups else None
    if flags.groups and groups is None:
        raise UserError("the images have no column group", groups=True)
    pairs, is_similar = read_set_pairs(flags.set_pairs)
    sets = np.array(class_of_each(split.images.labels, split.images.class_names), str)
    rule: dict[str, Any] = {"per_class": flags.per_class, "distance": flags.distance}
    with user_errors(UserError, ERROR_TEXT, set_pairs=flags.set_pairs):
        distances = evaluation.set_distances(split.embeddings, sets, pairs, groups=groups, **rule)
        measures = verify_in_random_folds(distances, is_similar)
    rule_text = f"{flags.distance}, by per_class={flags.per_class}"
    if flags.groups:
        rule_text += ", the images of a group as one"
    counts = f"{counted(len(pairs), 'pair')} of sets, {is_similar.sum():,} of one class"
    print(f"  {counts}; {rule_text}")
    for name in ("accuracy", "auc", "eer"):
        print(f"  {name:<24}{100 * measures[name]:6.2f} %")
    print(f"  most accurate at a distance of {measures['threshold']:.6g}")
    return {"num_pairs": len(pairs), **rule, "groups": flags.groups, **measures}, {}


def _verification(split: Split) -> _Measures:
    import numpy as np

    from tfdml import evaluation

    if split.flags.set_pairs:
        return _verification_of_sets(split)
    distance = split.flags.distance
    searched: dict[str, Any] = {"embeddings": split.embeddings, "labels": split.images.labels}
    if split.items:
        labels = np.concatenate(split.items.connected())
        searched = {"embeddings": np.concatenate([split.embeddings, split.texts]), "labels": labels}
        searched["views"] = np.arange(len(labels)) < len(split.images)
    measured = evaluation.verification(**searched, distance=distance)
    print(
        f"  pairs: {measured.num_same:,} of one class, {measured.num_different:,} of different "
        f"classes; {distance}"
    )
    print(f"  {'auc':<24}{measured.auc:9.6f}")
    print(
        f"  {'eer':<24}{100 * measured.eer:6.2f} %  at a distance of {measured.eer_threshold:.6g}"
    )
    intervals = {}
    for far, point in measured.points.items():
        name = f"tar@far={far:g}"
        intervals[name] = point.tar
        worst = f"{100 * point.worst['tar']:.2f} % of the worst tenth of the classes"
        rate = f"{100 * point.tar.mean:6.2f} %{_interval(point.tar)}"
        print(f"  {name:<24}{rate}  at a distance of {point.threshold:.6g}; {worst}")
    return {**measured.to_dict(), "intervals": intervals}, searched


def _classification(split: Split) -> _Measures:
    """Measure a gallery of every second image of the first half of the classes; the other classes
    are unknown to it."""
    import numpy as np

    from tfdml import evaluation

    flags, embeddings = split.flags, split.embeddings
    if split.items:
        if flags.per_class != "nearest":
            raise UserError("classes are texts here: leave it", per_class=flags.per_class)
        return _zero_shot(split)
    labels = np.asarray(split.images.labels)
    in_gallery = _every_second_of_half(labels)
    gallery = embeddings[in_gallery], labels[in_gallery]
    rule: dict[str, Any] = {"distance": flags.distance, "per_class": flags.per_class}
    classifier = evaluation.KNNClassifier(*gallery, k=flags.neighbors, **rule)
    result = evaluation.evaluate_classification(
        classifier, embeddings[~in_gallery], labels[~in_gallery]
    )
    per_class = "" if flags.per_class == "nearest" else f" by per_class={flags.per_class}"
    images = f"{counted(in_gallery.sum(), 'image')} of {len(classifier.classes):,}"
    print(
        f"  votes{per_class} in a gallery of {images} classes, every second image of half of the "
        f"classes; {result['num_known']:,} queries of these, {result['num_unknown']:,} of other "
        "classes"
    )
    _print_metrics({name: value for name, value in result.items() if isinstance(value, float)})
    return result, {**_searches_of(split, labels), "per_class": flags.per_class}


def _every_second_of_half(labels: np.ndarray) -> np.ndarray:
    """Return which images are the gallery: every second one of the first half of the classes."""
    import numpy as np

    classes = np.unique(labels)
    in_gallery = np.zeros(len(labels), bool)
    for label in classes[: -(-len(classes) // 2)]:
        in_gallery[np.flatnonzero(labels == label)[::2]] = True
    return in_gallery


def _searches_of(split: Split, labels: np.ndarray) -> dict[str, Any]:
    """Return the searches that a threshold is chosen for: of all stored images, where the split is
    all of them that were not trained on; else of the split."""
    import numpy as np

    stored = split.stored
    if stored is not None and stored.roles is not None and stored.classes is not None:
        rows = np.flatnonzero(stored.roles != "train")
        if len(rows) == len(labels):
            return {
                "embeddings": split.embeddings,
                "labels": stored.classes[rows],
                "own_rows": rows,
                "gallery": stored.embeddings,
                "gallery_labels": stored.classes,
            }
    return {"embeddings": split.embeddings, "labels": labels}


def _zero_shot(split: Split) -> _Measures:
    import numpy as np

    from tfdml import evaluation

    flags, images = split.flags, split.images
    assert split.items is not None
    names = [images.class_names[label] for label in images.classes.tolist()]
    classes = evaluation.class_embeddings(split.source.embed_texts, names, flags.templates)
    intervals = None if flags.intervals == "none" else flags.intervals
    rows = np.searchsorted(images.classes, images.labels)
    result = evaluation.evaluate_zero_shot(
        split.embeddings, rows, classes, class_names=names, intervals=intervals
    )
    _print_metrics(result)
    labels, text_labels = split.items.connected()
    searched = {"gallery": split.embeddings, "gallery_labels": labels}
    return result, {
        "embeddings": split.texts,
        "labels": text_labels,
        **searched,
    }


_MEASURES = {
    "retrieval": _retrieval,
    "verification": _verification,
    "classification": _classification,
}


def _print_metrics(result: Mapping[str, Any], chance: Mapping[str, float] = {}) -> None:
    """Print one metric a line, fractions in percent, with its interval and the level of chance
    where there are any."""
    intervals = result.get("intervals", {})
    for name, value in result.items():
        if isinstance(value, float):
            random = f"  chance {100 * chance[name]:.2f} %" if name in chance else ""
            interval = _interval(intervals.get(name))
            print(f"  {name:<24}{100 * value:6.2f} %{interval}{random}")
        elif isinstance(value, int):
            print(f"  {name:<24}{value:>6}")


def _interval(interval: Any) -> str:
    return (
        f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""
    )


COMMAND = Command("evaluate", evaluate, Flags(EvaluateFlags), __doc__)
