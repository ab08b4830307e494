"""One page with several runs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdml.errors import UserError
from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.evaluation.per_query import QueryValues, retrieval_per_query
from tfdml.evaluation.retrieval import dataset_protocol
from tfdml.report import differences
from tfdml.report.curves import recall_curves, training_curves
from tfdml.report.figures import STYLES, histogram_html
from tfdml.report.gallery import side_by_side_html
from tfdml.report.paired import Paired, paired_with_first
from tfdml.report.rendering import write_page
from tfdml.report.retrieved import retrieve
from tfdml.report.runs import Run, read_runs
from tfdml.report.subject import Subject

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


def write_comparison(
    path: str | os.PathLike,
    runs: Sequence[str | os.PathLike],
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    dataset: ImageDataset | None = None,
    embeddings: Sequence[Any] | None = None,
    distance: str = "euclidean",
    curve_metric: str = "recall@1",
    num_queries: int = 6,
    neighbours: int = 8,
    seed: int = 0,
) -> list[Paired]:
    """Write a page that sets finished runs side by side: metrics, training curves, distances, flags that differ.

    The first run is what the others are compared with, query by query where both answered the same ones. Only the
    folders are read (`flags.txt`, `environment.json`, `metrics.jsonl`, `result.json`, `queries.npz`), unless embeddings
    of the same images under each run are given too: then there are curves of Recall@K, histograms of d+ and d-, and the
    same queries with what each run finds. Runs whose figures do not compare (other images, another protocol) are shown
    all the same, with a warning on top.

    Args:
        path: Where to write; the folder is made if it is missing.
        runs: Folders of 2 to 8 finished runs, those of several seeds among them.
        names: What to call them; default: as their folders.
        title: The heading; default: the names.
        dataset: The images of the embeddings; with query and gallery roles queries are searched in the gallery.
        embeddings: (N, d) for each run, one row per image of `dataset`; given exactly if `dataset` is. Their number of
            dimensions may differ.
        distance: How the embeddings are compared.
        curve_metric: What the training curves show.
        num_queries: How many queries to show.
        neighbours: How many neighbours of each under each run.
        seed: Of the choice of queries and pairs.

    Returns:
        How each run but the first compares with the first, query by query.

    Raises:
        UserError: Fewer than 2 runs or more than 8, a folder that is not that of a finished run, embeddings that do
            not go with the runs or the data set, an image that cannot be read.
        OSError: The page cannot be written.

    Example:
        >>> pairs = write_comparison("comparison.html", ["runs/cars_am", "runs/cars_jrd"])
        >>> pairs[0].sentence("recall@1")
        'cars_jrd and cars_am are not told apart by Recall@1: the difference is +0.0 points ...'
    """
    check_number(runs)
    read = read_runs(runs, names)
    if (dataset is None) != (embeddings is None):
        raise UserError("dataset and embeddings go together: give both, or none to compare what the folders hold")
    shown, measured = {}, None
    if dataset is not None and embeddings is not None:
        if len(embeddings) != len(read):
            raise UserError(f"embeddings of {len(embeddings)} runs for {len(read)} runs; give one array each")
        shown = _of_embeddings(read, Subject(dataset), embeddings, distance, num_queries, neighbours, seed)
        measured = measured_queries(dataset, embeddings, distance)
    pairs = paired_with_first(read, measured)
    differing, shared = differences.split_flags(read)
    write_page(
        path,
        "comparison.html",
        title=title or " and ".join(run.name for run in read),
        runs=read,
        reservations=differences.reservations(read),
        same_task=differences.same_task(read),
        metrics=differences.metric_rows(read),
        paired=pairs,
        training=training_curves({run.name: run.measured for run in read}, curve_metric),
        training_distances=differences.training_distances(read),
        shown=shown,
        differing_flags=differing,
        shared_flags=shared,
        differing_environment=differences.differing_environment(read),
    )
    return pairs


def check_number(runs: Sequence[Any]) -> None:
    """Raise UserError where there are too few or too many runs to compare."""
    if not 2 <= len(runs) <= STYLES:
        raise UserError(f"a comparison needs 2 to {STYLES} runs; got {len(runs)}")


def measured_queries(dataset: ImageDataset, embeddings: Sequence[Any], distance: str) -> list[QueryValues]:
    """What each run finds for each query of a data set.

    Args:
        dataset: The images.
        embeddings: (N, d) for each run.
        distance: How the embeddings are compared.
    """
    return [
        QueryValues.of(
            dataset,
            retrieval_per_query(
                **dataset_protocol(x, dataset), metrics=("recall@1", "map@r", "r_precision"), distance=distance
            ),
        )
        for x in embeddings
    ]


def _of_embeddings(
    runs: Sequence[Run],
    subject: Subject,
    embeddings: Sequence[Any],
    distance: str,
    num_queries: int,
    neighbours: int,
    seed: int,
) -> dict[str, Any]:
    """What of the page needs embeddings."""
    checked = {
        run.name: subject.checked(x, f"embeddings of run {number}")
        for number, (run, x) in enumerate(zip(runs, embeddings, strict=True), 1)
    }
    protocols = {name: subject.protocol(x) for name, x in checked.items()}
    found = {name: retrieve(**protocol, distance=distance) for name, protocol in protocols.items()}
    labels = subject.dataset.labels
    return {
        "recall": recall_curves({name: of.recall() for name, of in found.items() if of is not None}),
        "histograms": {
            name: histogram_html(*sample_pair_distances(x, labels, distance=distance, seed=seed), distance, key=False)
            for name, x in checked.items()
        },
        "queries": side_by_side_html(
            protocols,
            subject.queries,
            subject.gallery,
            num_queries=num_queries,
            neighbours=neighbours,
            distance=distance,
            seed=seed,
        ),
    }
