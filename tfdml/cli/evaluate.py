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
pairs of images; --json keeps it. --report has the ROC curve.
--task=classification votes by the nearest images of a gallery: every second image of each class,
without the last half of the classes, whose images are to be found unknown. With --target=fpir=0.01
it also chooses the threshold for searches of all stored images, or of the split: at most 1 % of the
queries of unknown classes are accepted. No threshold is chosen on classes that the model was
trained on.

  tfdml evaluate --model=models/cars/1/litert/int8.tflite --task=classification \
      --gallery=catalog --known=visits --strangers=others --target=fpir=0.01 --json=threshold.json

With --gallery, the threshold is that of this gallery: at most 1 % of the images of --strangers find
anything, and so many of --known find their class. Each is a folder of class folders, or stored
embeddings; the gallery may be a retriever, which embeds the others. Name the file that will embed
queries as --model, as the vectors of a quantized file differ.

With a model of images and texts, --task=retrieval measures texts that search the images and images
that search the texts, verification pairs of an image and a text, and classification images by
--templates with the names of their classes; its --target is of texts that search the images. Where
the images have no texts, these are the names of their classes.

With --compare, the others are compared with the first run query by query, with 95 % intervals;
--json is optional.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from tfdml.cli.command_line import Command, Flags, load_tensorflow
from tfdml.cli.model_flags import (
    DataChoice,
    DataFlags,
    data_choice,
    kind_of_gallery,
    load_source,
    trained_classes,
    trained_names,
)
from tfdml.errors import UserError
from tfdml.expressions import Arguments
from tfdml.io.files import printable, require_writable, write_json
from tfdml.options import changed, condition, fields_of, flag_text, option
from tfdml.registry import DISTANCES, PER_CLASS
from tfdml.run_folder import FLAGS_FILE
from tfdml.training import Experiment

if TYPE_CHECKING:
    import numpy as np

    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.embeddings.files import StoredEmbeddings

_ALONE = "no compare"
_IMAGES = "dataset or features or embeds"
_MEASURED = f"{_ALONE} and task=retrieval"
_TASKS = ("retrieval", "verification", "classification")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags(DataFlags):
    """What is measured, and how."""

    title: ClassVar[str] = "What is measured, and how"

    batch_size: int = changed(DataFlags, "batch_size", requires="embeds")
    truncate_dim: int = changed(DataFlags, "truncate_dim", requires="embeds")
    features: str = changed(DataFlags, "features", requires="has_head")
    data_dir: str = changed(DataFlags, "data_dir", requires=_IMAGES)
    dataset_options: Arguments = changed(DataFlags, "dataset_options", requires=_IMAGES)
    bad_images: str = changed(DataFlags, "bad_images", requires=_IMAGES)
    split: str = option(
        "test", words=("test", "train"), requires=_ALONE, help="Which classes to measure on."
    )
    metrics: tuple[str, ...] = option(
        (),
        requires=_MEASURED,
        help="Which metrics, see above. Large sets are quicker without nmi, ami and f1.",
    )
    ks: tuple[int, ...] = option(
        (),
        at_least=1,
        requires=_MEASURED,
        help="The K of Recall@K; by default the benchmark's, or those of 1, 2, 4 and 8 that fit "
        "the images.",
    )
    distance: str = option("euclidean", words=DISTANCES, requires=_ALONE, help="What near means.")
    intervals: str = option(
        "none",
        words=("none", "classes", "queries"),
        requires=_MEASURED,
        help="95 % intervals, by bootstrap over classes or queries.",
    )
    task: str = option(
        "retrieval", words=_TASKS, requires=_ALONE, help="What the embeddings are for."
    )
    target: str = option(
        "",
        requires="task=verification|classification and split=test",
        help="Choose a threshold: far=0.001 or precision=0.99 with --task=verification, fpir=0.01 "
        "with classification.",
    )
    gallery: str = option(
        "",
        requires="task=classification and target",
        help="What is searched, in place of a split: images, stored embeddings or a retriever.",
    )
    known: str = option(
        "", requires="gallery", help="Further images of the gallery's classes, or embeddings."
    )
    strangers: str = option(
        "", requires="gallery", help="Images of none of the gallery's classes, or embeddings."
    )
    neighbors: int = option(
        5, at_least=1, requires="task=classification", help="How many images vote."
    )
    per_class: str = option(
        "nearest",
        words=PER_CLASS,
        requires="task=classification",
        help="What stands for a class: each image, their mean, or several means.",
    )
    templates: tuple[str, ...] = option(
        ("{}",),
        requires="task=classification",
        help="Texts with {} in the place of a class's name, for a model of images and texts.",
    )
    generalization: bool = option(
        False,
        requires=_MEASURED,
        help="Also compare the embeddings of the training classes with these.",
    )
    json: str = option("", help="File to write the metrics to, as fractions.")
    report: str = option(
        "",
        requires=f"{_ALONE} and task=retrieval|verification",
        help="File to write an HTML page to.",
    )
    compare: tuple[str, ...] = option(
        (),
        paths=True,
        help="In place of --model: finished runs, compared with the first of them.",
    )

    @condition("a model as --model")
    def embeds(self) -> bool:
        """Whether images are embedded."""
        from tfdml.embeddings.files import holds_embeddings

        return not self.compare and not holds_embeddings(self.model)

    @condition("a head as --model")
    def has_head(self) -> bool:
        """Whether the model may be a head."""
        from tfdml.embeddings.files import holds_embeddings

        return not holds_embeddings(self.model)


def evaluate(flags: EvaluateFlags) -> None:
    """Evaluate as the flags say."""
    from tfdml.retrieval import is_database

    if bool(flags.model) == bool(flags.compare) and not flags.gallery:
        raise UserError("is missing, or --compare in its place", model=...)
    if bool(flags.gallery) != bool(flags.strangers):
        raise UserError("--gallery and --strangers go together: FPIR is the rate of strangers")
    if is_database(flags.model):
        raise UserError(
            "--model is the address of a gallery in a database, and no model: see tfdml search "
            "--gallery"
        )
    for name in ("json", "report"):
        if path := getattr(flags, name):
            require_writable(path, name)
    if flags.compare:
        result = _compared(flags.compare)
    elif flags.gallery:
        result = _calibrated(flags)
    else:
        result = _measured(flags)
    if flags.json:
        write_json(flags.json, result)
    for path in filter(None, (flags.json, flags.report)):
        print(f"written: {printable(path)}")


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
            kinds = {"classes": result.classes.get(name), "seeds": result.seeds.get(name)}
            ends = [
                f"{100 * of.low:.1f} to {100 * of.high:.1f} over {kind}"
                for kind, of in kinds.items()
                if of
            ]
            print(
                f"  {metric_name(name):<16}{100 * result.classes[name].mean:>+7.1f}  "
                f"{', '.join(ends)}"
            )
        differences.append(
            {"run": run.name, "over_classes": result.classes, "over_seeds": result.seeds}
        )
    return {"first": folders[0], "differences": differences}


@dataclasses.dataclass(frozen=True)
class _Side:
    """Images or stored embeddings, by the names of their classes.

    Args:
        embeddings: (N, d).
        classes: (N,) names.
        model: The fingerprint of what embedded them; empty where it is not known.
        classes_are_numbers: Whether the classes have no names.
    """

    embeddings: np.ndarray
    classes: np.ndarray
    model: str
    classes_are_numbers: bool = False

    @classmethod
    def read(cls, name: str, flags: EvaluateFlags, source: Callable[[], EmbeddingBackend]) -> _Side:
        """Read what a flag names, and print what it is.

        Args:
            name: The flag.
            flags: The flags.
            source: Loads what embeds images.

        Raises:
            UserError: It is a database, it has no classes, or an image is bad.
        """
        from tfdml.embeddings.files import class_of_each

        path = os.path.expanduser(getattr(flags, name))
        kind = kind_of_gallery(path)
        if kind == "embeddings" or (kind == "retriever" and name == "gallery"):
            if kind == "retriever":
                load_tensorflow()
            side = cls._of_gallery(path)
            if not any(side.classes):
                raise UserError("has no classes: add the class of each embedding", **{name: path})
        elif kind == "images":
            images = DataChoice("folder", path, {}, flags.bad_images).load("all")
            classes = class_of_each(images.labels, images.class_names)
            vectors = source().embed(images, flags.batch_size)
            side = cls(vectors, classes, source().fingerprint())
        else:
            raise UserError(
                f"is a {kind}: name the images or the embeddings that it was made from",
                **{name: getattr(flags, name)},
            )
        count = f"{len(side.classes):,} images of {len(set(side.classes)):,} classes"
        print(f"{name} {printable(getattr(flags, name))}: {count}")
        return side

    @classmethod
    def _of_gallery(cls, path: str) -> _Side:
        import numpy as np

        from tfdml.retrieval import open_gallery

        with open_gallery(path) as gallery:
            rows = gallery.rows(len(gallery))
            about = gallery.about
            model = about.model if about else ""
            are_numbers = bool(about and about.classes_are_numbers)
            return cls(rows.vectors, np.array(rows.columns["class"], object), model, are_numbers)


def _calibrated(flags: EvaluateFlags) -> dict[str, Any]:
    """Print the threshold for searches of a gallery by known queries and strangers, and return it
    for JSON."""
    import numpy as np

    from tfdml import evaluation
    from tfdml.embeddings.backends import load_backend

    target = evaluation.target_of(flags.target, kinds=("fpir",))

    @functools.cache
    def source() -> EmbeddingBackend:
        if flags.model:
            return load_source(flags)
        if kind_of_gallery(flags.gallery) != "retriever":
            raise UserError("is missing: it embeds the images", model=...)
        return load_backend(os.path.expanduser(flags.gallery))

    names = ["gallery", "strangers"] + (["known"] if flags.known else [])
    sides = {name: _Side.read(name, flags, source) for name in names}
    gallery = sides.pop("gallery")
    for name, side in sides.items():
        _check_against_gallery(gallery, side, name)
    shared = np.intersect1d(sides["strangers"].classes, gallery.classes)
    if len(shared):
        raise UserError(
            f"{len(shared):,} of its classes are in the gallery, such as {shared[0]}: name images "
            "of other classes",
            strangers=flags.strangers,
        )
    _report_trained(flags.model, sides)
    queries = np.concatenate([side.embeddings for side in sides.values()])
    labels = np.concatenate([side.classes for side in sides.values()])
    is_stranger = np.zeros(len(labels), bool)
    is_stranger[: len(sides["strangers"].classes)] = True
    calibration = evaluation.calibrate(
        queries,
        labels,
        gallery=gallery.embeddings,
        gallery_labels=gallery.classes,
        unknown=is_stranger,
        distance=flags.distance,
        per_class=flags.per_class,
        **target,
    )
    model = gallery.model or sides["strangers"].model
    calibration = calibration.measured_on(gallery=flags.gallery, model=model)
    print(calibration)
    return {
        "task": flags.task,
        **{name: getattr(flags, name) for name in ("model", "gallery", "known", "strangers")},
        "distance": flags.distance,
        "calibration": calibration.to_dict(),
    }


def _check_against_gallery(gallery: _Side, side: _Side, name: str) -> None:
    """Refuse queries of another model, or with numbers of classes that the gallery has too: nobody
    knows whether they are the same classes."""
    from tfdml.embeddings.files import check_same_model

    check_same_model(gallery.model, side.model, f"--gallery and --{name}")
    if gallery.classes_are_numbers or side.classes_are_numbers:
        shared = sorted(set(gallery.classes).intersection(side.classes))
        if shared:
            raise UserError(
                f"its classes or those of the gallery are numbers, such as {shared[0]}, which mean "
                "something in one file alone: store names of classes",
                **{name: ...},
            )


def _report_trained(model: str, sides: Mapping[str, _Side]) -> None:
    """Print which queries have the names of classes that an exported model was trained on.

    Raises:
        UserError: Strangers have.
    """
    trained = trained_names(model)
    for name, side in sides.items():
        shared = sorted(trained.intersection(side.classes))
        if not shared:
            continue
        text = f"{len(shared):,} of the classes were trained on by name, such as {shared[0]}"
        if name == "strangers":
            raise UserError(f"{text}: the rate would come out too good", strangers=...)
        print(f"{name}: {text}: tpir may come out too good")


class _Split:
    """A split of a data set, with its embeddings.

    Args:
        flags: The flags.

    Attributes:
        images: The images; or embeddings that have the labels, roles and groups.
        selection: The data set, from which other splits are read; None where only embeddings are
            there.
        stored: The stored embeddings, of all splits; None for a model.
        items: Of a model of images and texts: both, each once; None for images alone.
        name: The data set, or where the embeddings are.

    Raises:
        UserError: The flags do not go together, or the embeddings with the data set.
    """

    def __init__(self, flags: EvaluateFlags):
        from tfdml.embeddings.files import holds_embeddings, read_embeddings
        from tfdml.evaluation.views import ViewItems

        self.flags, self.items = flags, None
        self.stored = read_embeddings(flags.model) if holds_embeddings(flags.model) else None
        if self.stored and flags.report and not flags.dataset:
            raise UserError(
                "--report shows images: name their --dataset and --data_dir next to the embeddings"
            )
        self.selection = data_choice(flags) if flags.dataset or self.stored is None else None
        self.images: Any = self.selection.load(flags.split) if self.selection else None
        self.name = self.selection.name if self.selection else Path(flags.model).name
        if self.stored is not None:
            part = self.part = self.stored.split(flags.split)
            if self.images is not None:
                _check_same_images(part, self.images)
            elif part.labels is None:
                raise UserError(
                    f"{flags.model} has no labels: add the class of each embedding, or name a "
                    "--dataset"
                )
            self.images = part if self.images is None else self.images
            self.name = part.manifest.get("dataset", {}).get("name") or self.name
        elif self.images is not None and self.source.embeds_texts:
            self.items = ViewItems.of(self.images)
            self.images = self.images.take(self.items.rows)
            for flag in ("generalization", "report"):
                if getattr(flags, flag):
                    raise UserError(
                        f"--{flag} measures images alone, and {flags.model} is a model of images "
                        "and texts"
                    )

    @functools.cached_property
    def source(self) -> EmbeddingBackend:
        """The model."""
        return load_source(self.flags)

    @property
    def model(self) -> str:
        """The fingerprint of the model; empty where it is not known."""
        return self.source.fingerprint() if self.stored is None else self.stored.model

    def trained_classes(self) -> int:
        """Return how many of the classes the model was trained on, as far as its run, its card or
        the stored embeddings tell."""
        if self.flags.split == "train":
            return 0
        labels = self.images.labels
        names = {self.images.class_names.get(label, str(label)) for label in set(labels.tolist())}
        if self.stored is not None:
            return len(names.intersection(self.stored.manifest.get("trained_on", ())))
        assert self.selection is not None  # there are no stored embeddings
        return len(trained_classes(self.flags.model, self.selection, names))

    @functools.cached_property
    def embeddings(self) -> np.ndarray:
        """(N, d) those of the images."""
        if self.stored is not None:
            return self.part.embeddings
        return self.source.embed(self.images, self.flags.batch_size)

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """(M, d) those of the texts."""
        assert self.items is not None
        return self.source.embed_texts(self.items.texts)


def _check_same_images(part: StoredEmbeddings, dataset: ImageDataset) -> None:
    """Refuse embeddings of another number of images or, as far as labels show it, of others."""
    import numpy as np

    what = f"{dataset.name} ({dataset.split})"
    if len(part) != len(dataset):
        raise UserError(
            f"{part.source} holds {len(part):,} embeddings, but {what} has {len(dataset):,} images"
        )
    # An .npz may number its classes in its own way: the same images must belong together.
    labels = dataset.labels if part.labels is None else part.labels
    pairs = np.unique(np.stack([labels, dataset.labels]), axis=1).shape[1]
    if not pairs == len(np.unique(labels)) == len(np.unique(dataset.labels)):
        raise UserError(
            f"{part.source} holds embeddings of other classes than {what}, or of its images in "
            "other order"
        )


def _measured(flags: EvaluateFlags) -> dict[str, Any]:
    """Print what a split measures, and return it for JSON."""
    import numpy as np

    from tfdml import evaluation
    from tfdml.evaluation.calibration import KINDS
    from tfdml.report import Run, write_report

    target = {}
    if flags.target:
        target = evaluation.target_of(
            flags.target, kinds=KINDS[1:] if flags.task == "verification" else KINDS[:1]
        )
    split = _Split(flags)
    part = f", {flags.split}" if split.selection or split.images.roles is not None else ""
    size = f"{len(split.images):,} images of {len(np.unique(split.images.labels)):,} classes"
    size += f", {len(split.items.texts):,} texts" if split.items else ""
    print(f"{printable(flags.model)} on {split.name}{part}: {size}")
    if trained := split.trained_classes():
        print(f"  the model was trained on {trained:,} of these classes: it does better on them")
        if target:
            raise UserError(
                f"{trained:,} of the classes were trained on, and no threshold is chosen on such: "
                "name other images, by --dataset or by --gallery, --known and --strangers",
                target=flags.target,
            )
    result = {
        "model": flags.model,
        "dataset": split.name,
        "split": flags.split,
        "distance": flags.distance,
    }
    result |= {} if flags.task == "retrieval" else {"task": flags.task}
    measures, searched = _MEASURES[flags.task](split)
    if target:
        calibration = evaluation.calibrate(**searched, distance=flags.distance, **target)
        which = "all stored images" if "own_rows" in searched else flags.split
        calibration = calibration.measured_on(
            gallery=f"{split.name}, {which}",
            queries="texts" if split.items else "images",
            model=split.model,
        )
        print(f"  threshold: {calibration}")
        measures["calibration"] = calibration.to_dict()
    if flags.report:
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
    return result | measures


# What a task measures, for JSON; and the arguments of `calibrate` for its threshold.
_Measures = tuple[dict[str, Any], dict[str, Any]]


def _retrieval(split: _Split) -> _Measures:
    from tfdml import evaluation
    from tfdml.evaluation.metrics import DEFAULT_KS, ks_within, metric_names
    from tfdml.evaluation.relevance import images_to_search

    flags = split.flags
    options: dict[str, Any] = {
        "distance": flags.distance,
        "intervals": None if flags.intervals == "none" else flags.intervals,
    }
    ks = flags.ks
    if split.items:
        options |= {"metrics": flags.metrics} if flags.metrics else {}
        labels = split.items.image_labels, split.items.text_labels
        result = evaluation.evaluate_views(
            split.embeddings, split.texts, *labels, ks=ks or None, **options
        )
        for direction, measures in result.items():
            print(f"  {direction.replace('_', ' ')}")
            _print_metrics(measures, measures["chance"])
        return result, {}
    benchmark = getattr(split.images, "protocol", None)
    metrics = list(
        flags.metrics or (benchmark.metrics if benchmark else evaluation.DEFAULT_METRICS)
    )
    depths = ks or (benchmark.ks if benchmark else DEFAULT_KS)
    metric_names(metrics, depths)
    available = images_to_search(split.images)
    fitting = ks_within(depths, available) if "recall" in metrics else depths
    if fitting != depths:
        reason = f"there are {available:,} images to search in"
        if ks:
            fitting_text = ",".join(map(str, fitting))
            raise UserError(f"{reason}; choose e.g. --ks={fitting_text}", ks=ks)
        logging.warning(
            "recall@K is measured for K = %s alone: %s", ", ".join(map(str, fitting)), reason
        )
    if flags.generalization and flags.split == "train":
        raise UserError(
            "--generalization compares the test classes with the training classes: leave "
            "--split=test"
        )
    result = evaluation.evaluate_dataset(
        split.embeddings, split.images, metrics=metrics, ks=fitting, **options
    )
    if flags.generalization:
        train = _of_training_classes(split)
        measures = evaluation.evaluate_generalization(
            split.embeddings, split.images.labels, *train, distance=flags.distance
        )
        result["generalization"] = measures
    _print_metrics(result)
    for name, value in result.get("generalization", {}).items():
        print(
            f"  {name:<36}{value:>14,}" if isinstance(value, int) else f"  {name:<36}{value:>14.4g}"
        )
    return result, {}


def _of_training_classes(split: _Split) -> tuple[Any, Any]:
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


def _verification(split: _Split) -> _Measures:
    import numpy as np

    from tfdml import evaluation

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
    for far, point in measured.points.items():
        worst = f"{100 * point.worst['tar']:.2f} % of the worst tenth of the classes"
        place = f"at a distance of {point.threshold:.6g}; {worst}"
        print(
            f"  {f'tar@far={far:g}':<24}{100 * point.tar.mean:6.2f} %{_interval(point.tar)}  "
            f"{place}"
        )
    intervals = {f"tar@far={far:g}": point.tar for far, point in measured.points.items()}
    return {**measured.to_dict(), "intervals": intervals}, searched


def _classification(split: _Split) -> _Measures:
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
    classes, in_gallery = np.unique(labels), np.zeros(len(labels), bool)
    for label in classes[: -(-len(classes) // 2)]:
        in_gallery[np.flatnonzero(labels == label)[::2]] = True
    gallery = embeddings[in_gallery], labels[in_gallery]
    rule: dict[str, Any] = {"distance": flags.distance, "per_class": flags.per_class}
    classifier = evaluation.KNNClassifier(*gallery, k=flags.neighbors, **rule)
    result = evaluation.evaluate_classification(
        classifier, embeddings[~in_gallery], labels[~in_gallery]
    )
    per_class = "" if flags.per_class == "nearest" else f" by per_class={flags.per_class}"
    images = f"{in_gallery.sum():,} images of {len(classifier.classes):,}"
    print(
        f"  votes{per_class} in a gallery of {images} classes, every second image of half of the "
        f"classes; {result['num_known']:,} queries of these, {result['num_unknown']:,} of other "
        "classes"
    )
    _print_metrics({name: value for name, value in result.items() if isinstance(value, float)})
    searched: dict[str, Any] = {"embeddings": embeddings, "labels": labels}
    searched["per_class"] = flags.per_class
    stored = split.stored
    if stored is not None and stored.roles is not None and stored.classes is not None:
        rows = np.flatnonzero(stored.roles != "train")
        if len(rows) == len(labels):  # searches meet all stored images
            searched |= {"labels": stored.classes[rows], "own_rows": rows}
            searched |= {"gallery": stored.embeddings, "gallery_labels": stored.classes}
    return result, searched


def _zero_shot(split: _Split) -> _Measures:
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
    for name, value in result.items():
        if isinstance(value, float):
            random = f"  chance {100 * chance[name]:.2f} %" if name in chance else ""
            print(
                f"  {name:<24}{100 * value:6.2f} "
                f"%{_interval(result.get('intervals', {}).get(name))}{random}"
            )
        elif isinstance(value, int):
            print(f"  {name:<24}{value:>6}")


def _interval(interval: Any) -> str:
    return (
        f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""
    )


COMMAND = Command("evaluate", evaluate, Flags(EvaluateFlags), __doc__)
