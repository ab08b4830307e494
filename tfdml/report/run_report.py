"""One self-contained HTML page on what a training run achieved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.report.classes import class_rows, classes_html
from tfdml.report.confusions import confusions, confusions_html, most_confused
from tfdml.report.curves import recall_curves, training_curves
from tfdml.report.figures import DISTANCE_NAMES, STYLES, histogram_html
from tfdml.report.gallery import choose_examples, gallery_html
from tfdml.report.map_html import map_html
from tfdml.report.paper_figures import objectives_html, statistics_html
from tfdml.report.rendering import render, write_page
from tfdml.report.retrieved import retrieve
from tfdml.report.runs import Run, read_run
from tfdml.report.seeds_report import write_seeds_report
from tfdml.report.subject import Subject
from tfdml.report.watched import watched_html

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset
    from tfdml.training import RunFolder


def write_report(
    path: str | os.PathLike,
    run: Run,
    dataset: ImageDataset,
    embeddings: Any,
    *,
    distance: str = "euclidean",
    curve_metric: str = "recall@1",
    interval_name: str = "95% interval",
    num_queries: int = 10,
    neighbours: int = 8,
    seed: int = 0,
) -> None:
    """Write the report: metrics, curves, retrieval examples, the map, pair distances, classes, confusions, settings.

    The page loads nothing from anywhere: pictures are inside it, figures are SVG, and its one script, which sorts
    tables and steps through the map, is inside it too; without a script the page reads the same. It is written whole
    or not at all. What comes from outside (names, flags) is escaped. Every part that could grow with the data is
    bounded, so that 60,000 images of 11,316 classes give a few MB.

    Args:
        path: Where to write; the folder is made if it is missing.
        run: What was measured, and how: `read_run` of a run's folder, or a `Run` of one's own figures. The title is its
            name, with its result's data set. Without a history the page has no curve of the training.
        dataset: The images that were measured; with query and gallery roles queries are searched in the gallery.
        embeddings: (N, d) one row per image of `dataset`, after training.
        distance: What the metrics were computed with.
        curve_metric: What the training curve shows.
        interval_name: What the intervals of the metrics are called.
        num_queries: How many queries to show.
        neighbours: How many neighbours of each.
        seed: Of the choice of queries, of the pairs in the histogram, and of the map.

    Raises:
        UserError: Embeddings that do not go with their data set, or an image that cannot be read.
        OSError: The page cannot be written.

    Example:
        >>> run = Run("cars", {"metrics": evaluate_dataset(embeddings, test)})
        >>> write_report("report.html", run, test, embeddings)
    """
    subject = Subject(dataset)
    embeddings = subject.checked(embeddings)
    queries, gallery = subject.queries, subject.gallery
    protocol = subject.protocol(embeddings)
    examples = choose_examples(**protocol, num_queries=num_queries, neighbours=neighbours, distance=distance, seed=seed)
    found = retrieve(**protocol, distance=distance)
    confused, recall = [], np.zeros(0)
    by_class = confusion = Markup("<p>No query has another image of its class to find.</p>")
    if found is not None:
        confused, recall = confusions(found, queries.labels, gallery.labels), found.recall()
        rows = class_rows(found, queries.labels, gallery.labels, embeddings, dataset.labels, distance)
        by_class = classes_html(rows, subject.pictures)
        confusion = confusions_html(confused, found, queries.labels, queries, gallery)
    pairs = sample_pair_distances(embeddings, dataset.labels, distance=distance, seed=seed)
    write_page(
        path,
        "report.html",
        title=": ".join(str(part) for part in (run.name, run.result.get("dataset")) if part),
        summary=_summary(run),
        run=run,
        interval_name=interval_name,
        dataset=dataset,
        queries=queries,
        num_classes=len(np.unique(queries.labels)),
        gallery=gallery,
        distance=DISTANCE_NAMES[distance],
        recall=recall_curves({"after training": recall}, {"before training": run.before or {}}),
        training=training_curves(run.histories, curve_metric),
        objectives=objectives_html(run.history),
        statistics=statistics_html(run.statistics),
        watched=watched_html(run.watch),
        examples=gallery_html(examples, queries, gallery),
        map=map_html(embeddings, subject.pictures, most_confused(confused, STYLES), distance=distance, seed=seed),
        histogram=histogram_html(*pairs, distance),
        classes=by_class,
        confusions=confusion,
        settings=render("settings.html", groups=[("Flags", run.flags), ("Environment", run.environment)]),
    )


def write_run_report(
    folder: RunFolder, dataset: ImageDataset | None = None, embeddings: np.ndarray | None = None
) -> None:
    """Write the report of a finished run into its folder; of several seeds, their common one.

    Args:
        folder: The run's folder.
        dataset: The test images; None for a run of several seeds.
        embeddings: (N, d) one row per image, after training; None for a run of several seeds.
    """
    run = read_run(folder.path)
    if run.seeds:
        write_seeds_report(folder.report, run)
    else:
        assert dataset is not None
        write_report(folder.report, run, dataset, embeddings, interval_name="95% interval over classes")


def _summary(run: Run) -> str:
    """How the run was measured and its embedder chosen, where its result says so."""
    protocol, selection = (str(run.result.get(key) or "") for key in ("protocol", "selection"))
    said = [f"{protocol.capitalize()}.", f"The embedder is that of {selection}."]
    return " ".join(sentence for sentence, known in zip(said, (protocol, selection), strict=True) if known)
