"""One page with several runs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.evaluation.search.exact import check_embeddings
from tfdml.report.comparison_tables import (
    differing_environment,
    differing_flags,
    metrics_comparison,
    runs_table,
    same_task,
    training_distances,
    warnings,
)
from tfdml.report.curves import recall_curves, training_curves
from tfdml.report.distances import DISTANCE_NAMES, LEGEND, histogram_html
from tfdml.report.elements import Section, escape
from tfdml.report.figures import STYLES
from tfdml.report.page import write_page
from tfdml.report.retrieved import retrieve
from tfdml.report.runs import Run, read_runs
from tfdml.report.side_by_side import Embeddings, side_by_side_html
from tfdml.report.thumbnails import Pictures, ReadImage, dataset_reader

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


def write_comparison(
    path: str | os.PathLike,
    runs: Sequence[str | os.PathLike],
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    dataset: ImageDataset | None = None,
    embeddings: Sequence[np.ndarray] | None = None,
    distance: str = "euclidean",
    curve_metric: str = "recall@1",
    num_queries: int = 6,
    neighbours: int = 8,
    read_image: ReadImage | None = None,
    seed: int = 0,
) -> None:
    """Write a page that sets finished runs side by side: metrics, training curves, distances, flags that differ.

    The first run is what the others are compared with. Only the folders are read (`flags.txt`, `environment.json`,
    `metrics.jsonl`, `result.json`), unless embeddings of the same images under each run are given too: then there are
    curves of Recall@K, histograms of d+ and d-, and the same queries with what each run finds. Runs whose figures do
    not compare (other images, another protocol) are shown all the same, with a warning on top.

    Args:
        path: Where to write; the folder is made if it is missing.
        runs: Folders of 2 to 8 finished runs.
        names: What to call them; default: as their folders.
        title: The heading; default: the names.
        dataset: The images of the embeddings; with query and gallery roles queries are searched in the gallery.
        embeddings: (N, d) for each run, one row per image of `dataset`; given exactly if `dataset` is. Their number of
            dimensions may differ.
        distance: How the embeddings are compared.
        curve_metric: What the training curves show.
        num_queries: How many queries to show.
        neighbours: How many neighbours of each under each run.
        read_image: Reads image `index` of `dataset` as (H, W, 3) uint8; default `dataset_reader(dataset)`.
        seed: Of the choice of queries and pairs.

    Raises:
        UserError: Fewer than 2 runs or more than 8, a folder that is not that of a finished run, embeddings that do
            not go with the runs or the data set, an image that cannot be read.
        OSError: The page cannot be written.

    Example:
        >>> write_comparison("comparison.html", ["runs/cars_jrd", "runs/cars_am"])  # doctest: +SKIP
    """
    if not 2 <= len(runs) <= STYLES:
        raise UserError(f"a comparison needs 2 to {STYLES} runs; got {len(runs)}")
    read = read_runs(runs, names)
    if (dataset is None) != (embeddings is None):
        raise UserError("dataset and embeddings go together: give both, or none to compare what the folders hold")
    header = f"<p>{len(read)} runs side by side.</p>{warnings(read)}"
    histories = {
        run.name: [{"epoch": record.get("epoch"), **record.get("test", {})} for record in run.history] for run in read
    }
    training = Section(
        "training",
        "During training",
        training_curves(histories, curve_metric),
        "On the images of the test classes, after each epoch that was measured.",
        nav="Training",
        half=True,
    )
    sections = [
        Section("runs", "The runs", runs_table(read), nav="Runs"),
        Section(
            "results",
            "Results",
            metrics_comparison(read),
            _about_the_metrics(read),
            nav="Results",
        ),
    ]
    if dataset is None or embeddings is None:
        sections.append(training)
        if drawn := training_distances(read):
            intro = "Mean distances in the batches of the last epoch of training, as the training saw them."
            sections.append(Section("distances", "Distances of pairs", drawn, intro, nav="Distances", half=True))
    else:
        sections += _of_embeddings(
            read, dataset, embeddings, training, distance, num_queries, neighbours, read_image, seed
        )
    sections.append(Section("flags", "Flags that differ", differing_flags(read), nav="Flags"))
    sections.append(Section("environment", "Environment", differing_environment(read), nav="Environment"))
    write_page(path, title or " and ".join(run.name for run in read), header, sections)


def _about_the_metrics(runs: Sequence[Run]) -> str:
    if not same_task(runs):
        return "In percent, with 95% intervals where they are known. The tasks differ, so no run is called the best."
    return (
        f"In percent. Below each value, its difference to {escape(runs[0].name)} and, where known, its 95% interval. "
        "Runs that differ in the seed alone differ too, by chance."
    )


def _of_embeddings(
    runs: Sequence[Run],
    dataset: ImageDataset,
    embeddings: Sequence[np.ndarray],
    training: Section,
    distance: str,
    num_queries: int,
    neighbours: int,
    read_image: ReadImage | None,
    seed: int,
) -> list[Section]:
    """The sections that need embeddings, and that of the training, which stands beside one of them."""
    checked = _checked(embeddings, dataset, len(runs))
    read_image = read_image or dataset_reader(dataset)
    if dataset.is_query is None:
        pictures, gallery, gallery_labels = Pictures(dataset, read_image), None, None
        parts: dict[str, Embeddings] = {run.name: (x, None) for run, x in zip(runs, checked, strict=True)}
    else:
        asked = dataset.is_query
        pictures = Pictures(dataset.queries, _reader_of(np.flatnonzero(asked), read_image))
        gallery = Pictures(dataset.gallery, _reader_of(np.flatnonzero(~asked), read_image))
        gallery_labels = gallery.dataset.labels
        parts = {run.name: (x[asked], x[~asked]) for run, x in zip(runs, checked, strict=True)}
    recalls, histograms = {}, []
    for (name, (queries, searched)), x in zip(parts.items(), checked, strict=True):
        found = retrieve(queries, pictures.dataset.labels, searched, gallery_labels, distance=distance)
        recalls[name] = np.zeros(0) if found is None else found.recall()
        pairs = sample_pair_distances(x, dataset.labels, distance=distance, seed=seed)
        shape = histogram_html(*pairs, DISTANCE_NAMES[distance], key=False)
        histograms.append(f"<div><h3>{escape(name)}</h3>{shape}</div>")
    shown = side_by_side_html(
        parts,
        pictures,
        gallery,
        num_queries=num_queries,
        neighbours=neighbours,
        distance=distance,
        seed=seed,
    )
    return [
        Section("recall", "Recall@K", recall_curves(recalls), nav="Curves", half=True),
        training,
        Section(
            "distances",
            "How far classes are apart",
            f'{LEGEND}<div class="several">{"".join(histograms)}</div>',
            "The less the two shapes overlap, the better a distance tells same from different.",
            nav="Distances",
        ),
        Section(
            "retrieval",
            "What each run finds",
            shown or "<p>No query has another image of its class to find.</p>",
            "The same queries, with their nearest images under each run.",
            nav="Retrieval",
        ),
    ]


def _checked(embeddings: Sequence[np.ndarray], dataset: ImageDataset, count: int) -> list[np.ndarray]:
    if len(embeddings) != count:
        raise UserError(f"embeddings of {len(embeddings)} runs for {count} runs; give one array each")
    checked = [check_embeddings(x, f"embeddings of run {number}") for number, x in enumerate(embeddings, 1)]
    for number, x in enumerate(checked, 1):
        if len(x) != len(dataset):
            raise UserError(
                f"embeddings of run {number}: {len(x)} rows for the {len(dataset)} images of {dataset.name}"
            )
    return checked


def _reader_of(rows: np.ndarray, read: ReadImage) -> ReadImage:
    """A reader of the images at `rows`, by their place among them."""
    return lambda index: read(int(rows[index]))
