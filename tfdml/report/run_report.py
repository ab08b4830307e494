"""One self-contained HTML page on what a training run achieved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.evaluation.search.exact import check_embeddings
from tfdml.report.classes import class_rows, classes_html
from tfdml.report.confusions import confusions, confusions_html, most_confused
from tfdml.report.curves import recall_curves, training_curves
from tfdml.report.distances import DISTANCE_NAMES, histogram_html
from tfdml.report.elements import Section, escape, paragraph
from tfdml.report.figures import STYLES
from tfdml.report.gallery import KEY, choose_examples, gallery_html
from tfdml.report.map_html import map_html
from tfdml.report.metric_text import Intervals, numbers, plain_intervals
from tfdml.report.orders import order_histories
from tfdml.report.page import write_page
from tfdml.report.paper_figures import paper_sections
from tfdml.report.retrieved import retrieve
from tfdml.report.settings import settings_html
from tfdml.report.summary import counts, further_tables, metrics_table, terms, tiles
from tfdml.report.thumbnails import Pictures, ReadImage, dataset_reader

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


def write_report(
    path: str | os.PathLike,
    title: str,
    metrics_before: Mapping[str, Any] | None,
    metrics_after: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    dataset: ImageDataset,
    embeddings: np.ndarray,
    *,
    gallery: ImageDataset | None = None,
    gallery_embeddings: np.ndarray | None = None,
    distance: str = "euclidean",
    summary: str = "",
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    curve_metric: str = "recall@1",
    num_queries: int = 10,
    neighbours: int = 8,
    read_image: ReadImage | None = None,
    read_gallery_image: ReadImage | None = None,
    seed: int = 0,
    intervals: Intervals | None = None,
    interval_name: str = "95% interval",
    records: Sequence[Mapping[str, Any]] = (),
    statistics: Mapping[str, Any] | None = None,
) -> None:
    """Write the report: metrics, curves, retrieval examples, the map, pair distances, classes, confusions, settings.

    The page loads nothing from anywhere: pictures are inside it, figures are SVG, and its one script, which sorts
    tables and steps through the map, is inside it too; without a script the page reads the same. It is written whole
    or not at all. What comes from outside (names, flags) is escaped. Every part that could grow with the data is
    bounded, so that 60,000 images of 11,316 classes give a few MB.

    Args:
        path: Where to write; the folder is made if it is missing.
        title: The heading, such as the run's name.
        metrics_before: What `evaluate_retrieval` gave before training; None if it was not measured.
        metrics_after: What it gives now; besides, if measured, `parts` as `part_protocol` gives them, `moments`, the
            metrics of a `MomentEmbedder`, `orders`, metrics by order of HORDE's moments, and `generalisation` as
            `evaluate_generalisation` does.
        history: One mapping per epoch with `epoch` and `curve_metric`, a fraction, and perhaps `orders`, the same by
            order, and `seen`, the same of seen classes; others are skipped. Empty: the page has no curve of the
            training.
        dataset: The queries.
        embeddings: (N, d) those of `dataset`, after training.
        gallery: What is searched; None: all-to-all.
        gallery_embeddings: (G, d), given exactly if `gallery` is.
        distance: What the metrics were computed with.
        summary: A sentence under the title, such as how the model was selected.
        flags: Settings of the run, by name.
        environment: Versions and hardware, by name.
        curve_metric: What the training curve shows.
        num_queries: How many queries to show.
        neighbours: How many neighbours of each.
        read_image: Reads query `index` as (H, W, 3) uint8; default `dataset_reader(dataset)`.
        read_gallery_image: The same for the gallery.
        seed: Of the choice of queries, of the pairs in the histogram, and of the map.
        intervals: (low, high) of metrics of `metrics_after`, as fractions, by the same names, or what
            `confidence_intervals` gives; None: those in `metrics_after`, where `evaluate_retrieval` was asked for them.
        interval_name: What the intervals are called.
        records: One mapping per epoch, as `metrics.jsonl` of a run holds them, for the figures of its objectives.
        statistics: What `statistics.json` of a run with RankMI holds.

    Raises:
        UserError: Embeddings that do not go with their data set, or an image that cannot be read.
        OSError: The page cannot be written.

    Example:
        >>> write_report("run/report/index.html", "cars", before, after, history, dataset, embeddings)  # doctest: +SKIP
    """
    embeddings = _checked(embeddings, dataset, "embeddings")
    if (gallery is None) != (gallery_embeddings is None):
        raise UserError("gallery and gallery_embeddings go together: give both (query/gallery) or none (all-to-all)")
    pictures = Pictures(dataset, read_image or dataset_reader(dataset))
    searched, points, labels = pictures, embeddings, dataset.labels
    if gallery is not None:
        gallery_embeddings = _checked(gallery_embeddings, gallery, "gallery embeddings")
        searched = Pictures(gallery, read_gallery_image or dataset_reader(gallery))
        points = np.concatenate([embeddings, gallery_embeddings])
        labels = np.concatenate([dataset.labels, gallery.labels])
    gallery_labels = None if gallery is None else gallery.labels
    ends = plain_intervals(intervals, metrics_after)
    before, after = None if metrics_before is None else numbers(metrics_before), numbers(metrics_after)
    name = DISTANCE_NAMES[distance]
    examples = choose_examples(
        embeddings,
        dataset.labels,
        gallery_embeddings,
        gallery_labels,
        num_queries=num_queries,
        neighbours=neighbours,
        distance=distance,
        seed=seed,
    )
    found = retrieve(embeddings, dataset.labels, gallery_embeddings, gallery_labels, distance=distance)
    confused, by_class, recall = [], [], np.zeros(0)
    if found is not None:
        confused = confusions(found, dataset.labels, searched.dataset.labels)
        by_class = class_rows(found, dataset.labels, searched.dataset.labels, points, labels, distance)
        recall = found.recall()

    def locate(row: int) -> tuple[Pictures, int]:
        return (pictures, row) if row < len(dataset) else (searched, row - len(dataset))

    emphasised = most_confused(confused, STYLES)
    positive, negative = sample_pair_distances(points, labels, distance=distance, seed=seed)
    training = []
    if history:
        curves = training_curves({**_by_classes(history), **order_histories(history)}, curve_metric)
        said = "On the same images, after each epoch that was measured."
        if len(_by_classes(history)) > 1:
            said += " Seen classes: of the training images."
        training.append(Section("training", "During training", curves, said, half=True))
    sections = [
        Section(
            "results",
            "Results",
            f'<div class="beside top"><div>'
            f"{metrics_table(before, after, ends, interval_name)}{counts(after)}{further_tables(metrics_after)}</div>"
            f"<div>{terms()}</div></div>",
            "In percent.",
            nav="Results",
        ),
        Section(
            "recall",
            "Recall@K",
            recall_curves({"after training": recall}, {"before training": before or {}}),
            "How far down the list one has to look to find an image of the class.",
            nav="Curves",
            half=bool(history),
        ),
        *training,
        *paper_sections(records, statistics),
        Section(
            "retrieval",
            "What is found",
            KEY + (gallery_html(examples, pictures, searched) or _NOTHING_TO_FIND),
            "A query and its nearest images, nearest first, with their class and distance.",
            nav="Retrieval",
        ),
        Section(
            "map-of-images",
            "Map of the embedding",
            map_html(points, labels, locate, emphasised, distance=distance, seed=seed),
            nav="Map",
        ),
        Section(
            "distances",
            "How far classes are apart",
            histogram_html(positive, negative, name),
            "The less the two shapes overlap, the better a distance tells same from different.",
            nav="Distances",
        ),
        Section(
            "classes", "Class by class", classes_html(by_class, pictures, searched) or _NOTHING_TO_FIND, nav="Classes"
        ),
        Section(
            "confusions",
            "What is taken for what",
            confusions_html(confused, found, dataset.labels, pictures, searched) if found else _NOTHING_TO_FIND,
            nav="Confusions",
        ),
        Section(
            "settings",
            "Settings",
            settings_html("Flags", flags) + settings_html("Environment", environment) or "<p>None were given.</p>",
            nav="Settings",
        ),
    ]
    header = paragraph("summary", summary) + f"<p>{_described(dataset, gallery, name)}</p>" + tiles(before, after, ends)
    write_page(path, title, header, sections)


def _by_classes(history: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The history of the classes of the page, and of seen classes where they were measured too."""
    seen = [{"epoch": entry.get("epoch"), **entry["seen"]} for entry in history if entry.get("seen")]
    return {"unseen classes": history, "seen classes": seen} if seen else {"this run": history}


_NOTHING_TO_FIND = "<p>No query has another image of its class to find.</p>"


def _checked(embeddings: Any, dataset: ImageDataset, what: str) -> np.ndarray:
    embeddings = check_embeddings(embeddings, what)
    if len(embeddings) != len(dataset):
        raise UserError(f"{what}: {len(embeddings)} rows for the {len(dataset)} images of {dataset.name}")
    return embeddings


def _described(dataset: ImageDataset, gallery: ImageDataset | None, distance: str) -> str:
    text = f"{dataset.name}, {dataset.split} split: {len(dataset):,} images of {dataset.num_classes:,} classes"
    if gallery is None:
        text += ", each a query against all others"
    else:
        text += f" as queries against a gallery of {len(gallery):,}"
    return escape(f"{text}, by {distance}.")
