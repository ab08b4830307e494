"""The report of one training run, or of several that differ in the seed alone, and its section of error rates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from markupsafe import Markup

from tfdml.errors import UserError
from tfdml.evaluation.pair_distances import PairHistogram, count_pair_distances
from tfdml.evaluation.retrieval import dataset_protocol, recall_by_size
from tfdml.evaluation.verification import accepted_rates, calibrate, verification
from tfdml.report import plots
from tfdml.report.embedding_map import map_html
from tfdml.report.metric_text import metric_order, plain_intervals
from tfdml.report.queries import (
    class_rows,
    classes_html,
    confusions,
    confusions_html,
    examples_html,
    most_confused,
    rank_queries,
)
from tfdml.report.rendering import render, write_page
from tfdml.report.runs import Run, read_run
from tfdml.retrieval.exact import check_embeddings

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from tfdml.data.dataset import ImageDataset
    from tfdml.training import RunFolder

#: What the threshold is calibrated to.
TARGET = {"far": 0.01}
_IN_WORDS = {"far": "a false accept rate of at most {:g} %", "precision": "a precision of at least {:g} %"}
# The pairs of so many images are counted within seconds.
_MOST_IMAGES = 10_000


def verification_html(
    embeddings: np.ndarray,
    dataset: ImageDataset,
    distance: str,
    held_out: tuple[Any, Any] | None = None,
    target: Mapping[str, float] = TARGET,
) -> Markup:
    """Return the ROC curve, both histograms with the threshold, and the rates as tables.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        distance: As `verification`.
        held_out: Embeddings and labels of other classes that the embedder was not trained on, for the threshold; None:
            half of the classes of `dataset`, and only the other half is shown.
        target: What the threshold is calibrated to, `far` or `precision`.
    """
    labels, shown = dataset.labels, np.ones(len(dataset), bool)
    halved = held_out is None
    if held_out is None:
        half = np.isin(labels, drawn_classes(labels)[::2])
        held_out, shown = (embeddings[half], labels[half]), ~half
    kept = sampled_images(held_out[1])
    try:
        calibration = calibrate(np.asarray(held_out[0])[kept], held_out[1][kept], distance=distance, **target)
    except UserError:  # there are too few pairs, or none reaches the precision
        calibration, shown = None, np.ones(len(dataset), bool)
    rows = np.flatnonzero(shown)
    rows = rows[sampled_images(labels[rows])]
    points, labels = embeddings[rows], labels[rows]
    if not 1 < len(np.unique(labels)) < len(labels):
        return Markup("<p>There are not both pairs of one class and pairs of different classes.</p>")
    measured = verification(points, labels, distance=distance)
    threshold = measured.eer_threshold if calibration is None else calibration.threshold
    rates = accepted_rates(points, labels, threshold, distance=distance)
    return render(
        "same_or_different.html",
        measured=measured,
        calibration=calibration,
        halved=halved,
        target=" and ".join(_IN_WORDS[name].format(100 * rate) for name, rate in target.items()),
        threshold=threshold,
        rates=rates,
        sampled=len(rows) < shown.sum(),
        roc=plots.roc_curve(measured, rates),
        histogram=plots.histogram_html(measured.counts, distance, threshold=threshold),
    )


def drawn_classes(labels: np.ndarray) -> np.ndarray:
    """Return the classes in a random order, always the same."""
    return np.random.default_rng(0).permutation(np.unique(labels))


def sampled_images(labels: np.ndarray) -> np.ndarray:
    """(N,) bool, the images of classes drawn at random: at least two classes, else no more images than are measured."""
    classes = drawn_classes(labels)
    counts = np.unique(labels, return_counts=True)[1]
    images = np.cumsum(counts[np.searchsorted(np.sort(classes), classes)])
    return np.isin(labels, classes[: max(2, int(np.searchsorted(images, _MOST_IMAGES, side="right")))])


def pair_histogram(embeddings: np.ndarray, labels: np.ndarray, distance: str) -> PairHistogram | None:
    """Return the histogram of the pairs of images of `sampled_images`; None where there are not both kinds of pairs."""
    kept = sampled_images(labels)
    if not 1 < len(np.unique(labels[kept])) < kept.sum():
        return None
    return count_pair_distances(embeddings[kept], labels[kept], distance=distance)


def write_run_report(
    folder: RunFolder,
    dataset: ImageDataset | None = None,
    embeddings: Any = None,
    held_out: tuple[Any, Any] | None = None,
) -> None:
    """Write `report/index.html` of a finished run; `trainer.train` calls it.

    Args:
        folder: The run's folder.
        dataset: The test images; None for a run of several seeds.
        embeddings: (N, d) one row per image, after training; None for a run of several seeds.
        held_out: Embeddings and labels of the held-out training classes, if there are any.
    """
    options: dict[str, Any] = {"interval_name": "95% interval over classes", "held_out": held_out}
    if dataset is not None and folder.load_experiment().heat_maps:
        options["embedder"] = keras.saving.load_model(folder.embedder)
    write_report(folder.report, read_run(folder.path), dataset, embeddings, **options)


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
    target: Mapping[str, float] = TARGET,
    embedder: Any = None,
) -> None:
    """Write the report: metrics, curves, retrieval examples, verification, the map, classes, confusions, settings.

    Of several seeds it has the mean of each metric with its intervals over classes and over seeds, each seed, and the
    curves.

    The report loads nothing: pictures are inside it, figures are SVG, and its one script, which sorts tables and steps
    through the map, is inside it too; without a script it reads the same. It is written atomically. What comes from
    outside (names, flags) is escaped. Every part that could grow with the data is bounded, so that 60,000 images of
    11,316 classes give a few MB.

    Args:
        path: Where to write; the folder is made if it is missing.
        run: What was measured, and how: `read_run` of a run's folder, or a `Run` of one's own numbers. The title is its
            name, with its result's data set. Without a history the report has no curve of the training.
        dataset: The images that were measured, but for several seeds; with query and gallery roles queries are searched
            in the gallery.
        embeddings: (N, d) one row per image of `dataset`, after training.
        distance: What the metrics were computed with.
        interval_name: What the intervals of the metrics are called.
        num_queries: How many queries to show.
        held_out: Embeddings and labels of other classes that the embedder was not trained on. They calibrate the
            threshold of the section "Same or different?"; None: half of the classes of `dataset`.
        target: What that threshold is calibrated to, as `calibrate`: `far` or `precision`.
        embedder: What the embeddings come from. The section "What is found" then has heat maps of what three queries
            have in common with their nearest hit and miss (`tfdml.explain`); None: it has none.

    Raises:
        UserError: Embeddings that do not go with their data set, or an image that cannot be read.
        OSError: The report cannot be written.

    Example:
        >>> run = Run("cars", {"metrics": evaluate_dataset(embeddings, test)})
        >>> write_report("report.html", run, test, embeddings)
    """
    settings = render("settings.html", groups=[("Flags", run.flags), ("Environment", run.environment)])
    if run.seeds:
        histories = {one.name: one.measured for one in run.seeds}
        # Of more seeds than a figure has styles for, their mean.
        many = {f"mean of {len(histories)} runs": run.measured}
        write_page(
            path,
            "seeds.html",
            run=run,
            keys=metric_order(run.metrics),
            what=run.seeds[0].name.split()[0],
            over_seeds=plain_intervals(run.result.get("intervals_runs") or {}, {}),
            training=plots.training_curves(histories if len(histories) <= plots.STYLES else many),
            settings=settings,
        )
        return
    if dataset is None:
        raise UserError("the report of a run needs its test images and their embeddings")
    embeddings = checked_embeddings(dataset, embeddings)
    queries, gallery = (dataset, dataset) if dataset.is_query is None else (dataset.queries, dataset.gallery)
    protocol = dataset_protocol(embeddings, dataset)
    ranked = rank_queries(**protocol, distance=distance)
    confused, recall, sizes = [], np.zeros(0), []
    by_class = confusion = Markup("<p>No query has another image of its class to find.</p>")
    if ranked is not None:
        confused, recall = confusions(ranked, queries.labels, gallery.labels), ranked.recall()
        sizes = recall_by_size(**protocol) if ranked.answerable.any() else []
        rows = class_rows(ranked, queries.labels, gallery.labels)
        by_class = classes_html(rows, dataset.class_names)
        confusion = confusions_html(confused, ranked, queries, gallery)
    marked = most_confused(confused, plots.STYLES)
    write_page(
        path,
        "report.html",
        run=run,
        interval_name=interval_name,
        dataset=dataset,
        queries=queries,
        gallery=gallery,
        distance=plots.DISTANCE_NAMES[distance],
        recall=plots.recall_curves({"after training": recall}, run.before),
        training=plots.training_curves(run.histories),
        objectives=plots.objectives_html(run.history),
        watched=plots.watched_html(run.watch),
        examples=examples_html({"": ranked}, queries, gallery, num_queries, embedder),
        map=map_html(embeddings, dataset, marked, distance=distance),
        verification=verification_html(embeddings, dataset, distance, held_out, target),
        sizes=sizes,
        classes=by_class,
        confusions=confusion,
        settings=settings,
    )


def checked_embeddings(dataset: ImageDataset, embeddings: Any, what: str = "embeddings") -> np.ndarray:
    """(N, d) embeddings, one row per image.

    Raises:
        UserError: They are empty or not finite, or not as many as images; `what` names them.
    """
    embeddings = check_embeddings(embeddings, what)
    if len(embeddings) != len(dataset):
        raise UserError(f"{what}: {len(embeddings)} rows for the {len(dataset)} images of {dataset.name}")
    return embeddings
