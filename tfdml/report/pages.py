"""The report of a run, or of several that differ in the seed alone, and that of an audit: one HTML
file each.

The templates are in `templates/`. All text in them is escaped unless it is markup already.
"""

from __future__ import annotations

import base64
import functools
import importlib.resources
import inspect
import io
import itertools
import math
import numbers
import os
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from absl import logging
from markupsafe import Markup

from tfdml.audit import Audit
from tfdml.errors import UserError
from tfdml.evaluation.calibration import Calibration, calibrate
from tfdml.evaluation.identification import Searches, identification
from tfdml.evaluation.relevance import dataset_protocol
from tfdml.evaluation.verification import accepted_rates, verification
from tfdml.io.files import is_remote, printable, write_whole
from tfdml.report import figures, runs
from tfdml.report.runs import Run, choose_examples, confusions, rank_queries, read_run
from tfdml.retrieval.exact import check_embeddings

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.training import TrainingRun

#: What the threshold is calibrated to.
TARGET = {"fpir": 0.01}
_GROUPS = {
    "random": ("Typical", "drawn at random"),
    "worst": ("Hardest", "fewest neighbors of the query’s own class"),
    "best": ("Best", "most neighbors of the query’s own class"),
}
# The pairs of so many images are counted within seconds.
_MOST_IMAGES = 10_000
# Confusions that are shown.
_PICTURED = 12


def write_page(path: str | os.PathLike, template: str, **values: Any) -> None:
    """Write a page atomically.

    Its style is inside it. The page's policy lets no script run, and nothing be loaded.

    Args:
        path: Where to write; the folder is made if it is missing.
        template: The name of a file in `templates/` that extends `page.html`.
        **values: What it shows; text is escaped, `Markup` is taken as it is. Those that it lacks
            are an error.

    Raises:
        OSError: The page cannot be written.
    """
    style = (
        importlib.resources.files("tfdml.report").joinpath("templates/page.css").read_text("utf-8")
    )
    values["style"] = Markup(style)  # noqa: S704 - a file of ours
    if not is_remote(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        path, printable(_environment().get_template(template).render(values)).encode("utf-8")
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdml.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(inspect.getmembers(runs, inspect.isfunction), class_of=class_of)
    environment.filters.update(number=_number, thumbnail=thumbnail, setting=runs.setting_text)
    return environment


def class_of(dataset: Any, index: int) -> str:
    """Return the name of the class of one image, or its id where it has none."""
    label = int(dataset.labels[index])
    return str(dataset.class_names.get(label, label))


def _number(value: Any, form: str = ",.0f", factor: float = 1) -> str:
    """Return a number in print; a dash where there is none."""
    if not isinstance(value, numbers.Real) or math.isnan(value):
        return "–"
    return f"{factor * float(value):{form}}"


def thumbnail(image: np.ndarray, size: int) -> str:
    """Return an image (H, W, 3) uint8 as a JPEG data URI whose longer side is at most `size`."""
    from PIL import Image

    picture, buffer = Image.fromarray(np.ascontiguousarray(image, np.uint8)), io.BytesIO()
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    picture.save(buffer, "JPEG", quality=80, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


# The report of a run


def write_run_report(run: TrainingRun) -> None:
    """Write `report/index.html` of a run that has ended, where its settings ask for it and it is
    not there yet.

    Args:
        run: What `tfdml.training.train` returns; of several seeds or folds, each has its own report
            too.

    Example:
        >>> write_run_report(tfdml.training.train(experiment))
    """
    for one in run.runs:
        write_run_report(one)
    if not run.experiment.report or run.folder.report.is_file():
        return
    logging.info("writing the report of %s", run.folder.path)
    options: dict[str, Any] = {}
    if not run.runs:
        options = {"dataset": run.splits.test, "embeddings": run.embeddings}
        if (validation := run.splits.validation) is not None:
            options["held_out"] = run.embed("validation"), validation.labels
    write_report(
        run.folder.report,
        read_run(run.folder.path),
        **options,
        interval_name="95% interval over classes",
    )


def write_report(
    path: str | os.PathLike,
    run: Run,
    dataset: ImageDataset | None = None,
    embeddings: Any = None,
    *,
    distance: str = "euclidean",
    interval_name: str = "95% interval",
    num_queries: int = 10,
    held_out: tuple[Any, Any] | None = None,
    target: Mapping[str, Any] = TARGET,
) -> None:
    """Write the report: metrics, curves, retrieval examples, thresholds, the map, confusions,
    settings.

    Of several seeds it has the mean of each metric with its intervals over classes and over seeds,
    each seed, and the curves.

    The report loads nothing and has no script: pictures are inside it, figures are SVG. It is
    written atomically. What comes from outside (names, flags) is escaped. Every part that could
    grow with the data is bounded, so that 60,000 images of 11,316 classes give a few MB.

    Args:
        path: Where to write; the folder is made if it is missing.
        run: What was measured, and how: `read_run` of a run's folder, or a `Run` of one's own
            numbers. The title is its name, with its result's data set. Without a history the report
            has no curve of the training.
        dataset: The images that were measured, but for several seeds; with query and gallery roles
            queries are searched in the gallery.
        embeddings: (N, d) one row per image of `dataset`, after training.
        distance: What the metrics were computed with.
        interval_name: What the intervals of the metrics are called.
        num_queries: How many queries to show.
        held_out: Embeddings and labels of other classes that the embedder was not trained on. They
            calibrate the threshold of the section "Same or different?"; None: half of the classes
            of `dataset`.
        target: What that threshold is calibrated to, as `calibrate`: `fpir`, `far` or `precision`.

    Raises:
        UserError: Embeddings that do not go with their data set, or an image that cannot be read.
        OSError: The report cannot be written.

    Example:
        >>> metrics = tfdml.evaluation.evaluate_dataset(embeddings, test)
        >>> run = Run("cars", {"metrics": metrics})
        >>> write_report("report.html", run, test, embeddings)
    """
    images = None
    # A run of several seeds is a summary; each seed has a report with images.
    if not run.seeds:
        if dataset is None:
            raise UserError("the report of a run needs its test images and their embeddings")
        embeddings = check_embeddings(embeddings)
        if len(embeddings) != len(dataset):
            raise UserError(
                f"{len(embeddings)} embeddings for the {len(dataset)} images of {dataset.name}"
            )
        images = _images(run, dataset, embeddings, distance, num_queries)
        images["thresholds"] = thresholds(embeddings, dataset, distance, held_out, target)
    write_page(
        path,
        "report.html",
        run=run,
        interval_name=interval_name,
        distance=distance,
        training=figures.training_figure(run),
        objectives=figures.objective_figures(run),
        images=images,
    )


def _images(
    run: Run, dataset: ImageDataset, embeddings: np.ndarray, distance: str, num_queries: int
) -> dict[str, Any]:
    """Return what the report shows of the images: what queries find, the map, and confusions."""
    queries = dataset if dataset.is_query is None else dataset.queries
    gallery = dataset if dataset.is_query is None else dataset.gallery
    protocol = dataset_protocol(embeddings, dataset)
    ranked = rank_queries(**protocol, distance=distance)
    values: dict[str, Any] = {
        "dataset": dataset,
        "queries": queries,
        "gallery": gallery,
        "ranked": ranked,
        "examples": (),
        "pairs": (),
    }
    if ranked is not None and ranked.answerable.any():
        pairs = confusions(ranked, queries.labels, gallery.labels)
        examples = choose_examples(ranked, queries.labels, num_queries)
        values["recall"] = figures.recall_figure(ranked.recall(), run.before)
        values["examples"] = [(*_GROUPS[kind], rows) for kind, rows in examples.items()]
        values["pairs"] = pairs
        values["pictured"] = pairs[:_PICTURED]
        values["names"] = {**gallery.class_names, **queries.class_names}
    confused = itertools.chain.from_iterable(
        (pair.label, pair.taken_for) for pair in values["pairs"]
    )
    marked = list(dict.fromkeys(confused))[: figures.STYLES]
    return {**values, **_map(dataset, embeddings, distance, marked)}


def _map(
    dataset: ImageDataset, embeddings: np.ndarray, distance: str, marked: list[int]
) -> dict[str, Any]:
    """Return what the report shows of the map of the images, with some classes marked."""
    rows = figures.rows_on_map(dataset.labels, marked)
    places = figures.lay_out(embeddings[rows], distance=distance)
    labels = dataset.labels[rows]
    shown = [label for label in marked if label in labels]
    names = {label: str(dataset.class_names.get(label, label)) for label in shown}
    figure = None if places is None else figures.map_figure(places, labels, names)
    return {"map": figure, "mapped": (len(labels), len(np.unique(labels)), list(names.values()))}


def thresholds(
    embeddings: np.ndarray,
    dataset: ImageDataset,
    distance: str,
    held_out: tuple[Any, Any] | None = None,
    target: Mapping[str, Any] = TARGET,
) -> dict[str, Any] | None:
    """Return the threshold, the rates at it and at others, their curve and both histograms.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        distance: As `verification`.
        held_out: Embeddings and labels of other classes that the embedder was not trained on, for
            the threshold; None: half of the classes of `dataset`, and only the other half is shown.
        target: What the threshold is calibrated to, as `calibrate`: `fpir` of searches among as
            many images, or `far` or `precision` of pairs.

    Returns:
        Those of searches for `fpir`, else those of pairs. None where there are not both pairs of
        one class and pairs of different classes.
    """
    labels = dataset.labels
    is_shown = np.ones(len(dataset), bool)
    halved = held_out is None
    if held_out is None:
        half = np.isin(labels, drawn_classes(labels)[::2])
        held_out, is_shown = (embeddings[half], labels[half]), ~half
    sampled = sampled_images(held_out[1])
    held_out_points = np.asarray(held_out[0])[sampled]
    held_out_labels = held_out[1][sampled]
    try:
        calibration = calibrate(held_out_points, held_out_labels, distance=distance, **target)
    except UserError:  # there are too few images or pairs, or none reaches the rate
        calibration, is_shown = None, np.ones(len(dataset), bool)
    rows = np.flatnonzero(is_shown)
    rows = rows[sampled_images(labels[rows])]
    points, labels = embeddings[rows], labels[rows]
    num_classes = len(np.unique(labels))
    if not 1 < num_classes < len(labels):
        return None
    values: dict[str, Any] = {
        "calibration": calibration,
        "halved": halved,
        "classes": num_classes,
        "sampled": len(rows) < is_shown.sum(),
    }
    if calibration is not None and "fpir" in target:
        return values | _of_searches(points, labels, distance, calibration.threshold)
    return values | _of_pairs(points, labels, distance, calibration)


def _of_searches(
    points: np.ndarray, labels: np.ndarray, distance: str, threshold: float
) -> dict[str, Any]:
    """Return what `thresholds` returns of searches."""
    measured = identification(points, labels, distance=distance)
    searches = Searches(points, labels, distance=distance)
    rates = searches.rates(threshold, 0.95, new_classes=False)
    values: dict[str, Any] = {"searches": measured, "threshold": threshold, "rates": rates}
    values["worst"] = searches.worst(threshold)
    values["curve"] = figures.identification_figure(measured, rates, threshold)
    histogram = figures.histogram_figure(measured.counts, distance, threshold, figures.QUERIES)
    return values | {"histogram": histogram}


def _of_pairs(
    points: np.ndarray, labels: np.ndarray, distance: str, calibration: Calibration | None
) -> dict[str, Any]:
    """Return what `thresholds` returns of pairs; without a calibration at the equal error rate."""
    measured = verification(points, labels, distance=distance)
    threshold = measured.eer_threshold if calibration is None else calibration.threshold
    accepted = accepted_rates(points, labels, threshold, distance=distance)
    rates = {name: getattr(accepted, name) for name in ("far", "tar", "precision")}
    values: dict[str, Any] = {"searches": None, "measured": measured, "threshold": threshold}
    values["rates"] = rates
    values["worst"] = accepted.worst
    values["curve"] = figures.roc_figure(measured, accepted)
    histogram = figures.histogram_figure(measured.counts, distance, threshold)
    return values | {"histogram": histogram}


def drawn_classes(labels: np.ndarray) -> np.ndarray:
    """Return the classes in a random order, always the same."""
    return np.random.default_rng(0).permutation(np.unique(labels))


def sampled_images(labels: np.ndarray) -> np.ndarray:
    """(N,) bool, the images of classes drawn at random: at least two classes, else no more images
    than are measured."""
    classes = drawn_classes(labels)
    counts = np.unique(labels, return_counts=True)[1]
    images = np.cumsum(counts[np.searchsorted(np.sort(classes), classes)])
    return np.isin(
        labels, classes[: max(2, int(np.searchsorted(images, _MOST_IMAGES, side="right")))]
    )


# The report of an audit

# How much of each kind it has; the CSV files have all.
_FINDINGS = {"label": 48, "outlier": 24}
_DUPLICATES, _OF_A_GROUP = 40, 6


def write_audit(
    path: str | os.PathLike,
    audit: Audit,
    name: str,
    picture: Callable[[int], np.ndarray] | None = None,
) -> None:
    """Write the report of an audit.

    Args:
        path: Where to write; the folder is made if it is missing.
        audit: The findings.
        name: What the images are called.
        picture: From a row to its image (H, W, 3) uint8; None: the report has names only.

    Raises:
        OSError: The report cannot be written.
        UserError: An image cannot be read.

    Example:
        >>> table = tfdml.embeddings.ImageTable.of([test])
        >>> write_audit("audit.html", tfdml.audit.audit(embeddings, table), "photos",
        ...     test.images.picture)
    """
    table = audit.table
    images = types.SimpleNamespace(picture=picture, name=table.names.__getitem__)
    class_names = {**table.class_names, -1: "–"}
    dataset = types.SimpleNamespace(images=images, labels=table.labels, class_names=class_names)
    findings = {kind: audit.of(kind)[:most] for kind, most in _FINDINGS.items()}
    groups = audit.groups()[:_DUPLICATES]
    values = {"audit": audit, "dataset": dataset, "groups": groups, "findings": findings}
    heading = f"{name}: audit"
    counts = audit.counts()
    write_page(path, "audit.html", title=heading, counts=counts, in_a_group=_OF_A_GROUP, **values)
