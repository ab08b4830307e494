"""Several runs side by side: a report, and whether one is better than the first, query by query."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.intervals import Interval, paired_differences, seed_difference
from tfdml.evaluation.per_query import QUERIES_FILE, QueryValues, retrieval_per_query
from tfdml.evaluation.retrieval import dataset_protocol
from tfdml.report import metric_text, plots
from tfdml.report.metric_text import metric_name, metric_order, metric_value
from tfdml.report.queries import examples_html, rank_queries
from tfdml.report.rendering import setting_text, write_page
from tfdml.report.run_report import checked_embeddings, pair_histogram
from tfdml.report.runs import Run, read_runs

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from tfdml.data.dataset import ImageDataset

_SELECTION = "ways to select the embedder"


def write_comparison(
    path: str | os.PathLike | None,
    runs: Sequence[str | os.PathLike],
    *,
    names: Sequence[str] | None = None,
    dataset: ImageDataset | None = None,
    embeddings: Sequence[Any] | None = None,
    distance: str = "euclidean",
    num_queries: int = 6,
) -> list[Paired]:
    """Write a report of finished runs side by side: metrics, training curves, distances, flags that differ.

    The first run is what the others are compared with, query by query where both answered the same ones. Only the
    folders are read (`flags.txt`, `environment.json`, `metrics.jsonl`, `result.json`, `queries.npz`), unless embeddings
    of the same images under each run are given too: then there are curves of Recall@K, histograms of d+ and d-, and the
    same queries with what each run finds. Runs whose results do not compare (other images, another protocol) are shown
    all the same, with a warning on top.

    Args:
        path: Where to write; the folder is made if it is missing. None: nowhere, for what is returned alone.
        runs: Folders of 2 to 8 finished runs, those of several seeds among them.
        names: What to call them; default: as their folders.
        dataset: The images of the embeddings; with query and gallery roles queries are searched in the gallery.
        embeddings: (N, d) for each run, one row per image of `dataset`; given exactly if `dataset` is. Their number of
            dimensions may differ.
        distance: How the embeddings are compared.
        num_queries: How many queries to show.

    Returns:
        How each run but the first compares with the first, query by query.

    Raises:
        UserError: Fewer than 2 runs or more than 8, a folder that is not that of a finished run, embeddings that do
            not go with the runs or the data set, an image that cannot be read.
        OSError: The report cannot be written.

    Example:
        >>> pairs = write_comparison("comparison.html", ["runs/cars_am", "runs/cars_jrd"])
        >>> pairs[0].sentence("recall@1")
        'cars_jrd and cars_am are not distinguished by Recall@1: the difference is +0.0 points ...'
    """
    read = read_runs(runs, names)
    if (dataset is None) != (embeddings is None):
        raise UserError("dataset and embeddings go together: give both, or none to compare what the folders hold")
    checked: dict[str, np.ndarray] = {}
    if dataset is not None and embeddings is not None:
        if len(embeddings) != len(read):
            raise UserError(f"embeddings of {len(embeddings)} runs for {len(read)} runs; give one array each")
        for number, (run, x) in enumerate(zip(read, embeddings, strict=True), 1):
            checked[run.name] = checked_embeddings(dataset, x, f"embeddings of run {number}")
    paired = pairs_with_first(read, dataset, list(checked.values()), distance)
    if path is None:
        return paired
    shown: dict[str, Any] = {}
    if dataset is not None:
        queries, gallery = (dataset, dataset) if dataset.is_query is None else (dataset.queries, dataset.gallery)
        ranked = {name: rank_queries(**dataset_protocol(x, dataset), distance=distance) for name, x in checked.items()}
        shown["recall"] = plots.recall_curves({name: of.recall() for name, of in ranked.items() if of is not None})
        shown["histograms"] = {
            name: plots.histogram_html(pair_histogram(x, dataset.labels, distance), distance, name)
            for name, x in checked.items()
        }
        shown["queries"] = examples_html(ranked, queries, gallery, num_queries)
    differing_flags, shared_flags = _split([_flat({**run.flags, "run_dir": ""}) for run in read])
    shared_flags.pop("run_dir")  # where a run lies says nothing about what it did
    write_page(
        path,
        "comparison.html",
        runs=read,
        reservations=reservations(read),
        same_task=same_task(read),
        metrics=metric_rows(read),
        paired=paired,
        training=plots.training_curves({run.name: run.measured for run in read}),
        shown=shown,
        differing_flags=differing_flags,
        shared_flags=shared_flags,
        differing_environment=_split([_flat(run.environment) for run in read])[0],
    )
    return paired


# Whether one run is better than another


@dataclasses.dataclass(frozen=True)
class Paired:
    """A run compared with another, query by query.

    Args:
        name: Of the run.
        reference: Of the other one.
        refused: Why they cannot be compared query by query; empty where they can.
        classes: Run minus reference by metric, with intervals over classes: see `paired_differences`.
        seeds: The same with intervals over seeds, where both have several: see `seed_difference`.
        counts: How many seeds the run and the reference have.

    Example:
        >>> Paired("jrd", "am", classes={"recall@1": Interval(0.024, 0.011, 0.036, 0.006)}).sentence("recall@1")
        'jrd is better than am by 2.4 points of Recall@1 (95 % interval over classes 1.1 to 3.6; one seed each)'
    """

    name: str
    reference: str
    refused: str = ""
    classes: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    seeds: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    counts: tuple[int, int] = (1, 1)

    def told_apart(self, metric: str) -> bool:
        """Whether no interval that is known of the difference holds 0."""
        known = [of[metric] for of in (self.classes, self.seeds) if metric in of]
        return all(interval.low > 0 for interval in known) or all(interval.high < 0 for interval in known)

    def sentence(self, metric: str) -> str:
        """Return what the comparison says of a metric."""
        mean, sign = self.classes[metric].mean, 1
        if self.told_apart(metric):
            word, sign = ("better", 1) if mean > 0 else ("worse", -1)
            start = (
                f"{self.name} is {word} than {self.reference} by {metric_value(metric, sign * mean)} points of "
                f"{metric_name(metric)}"
            )
        else:
            start = (
                f"{self.name} and {self.reference} are not distinguished by {metric_name(metric)}: the difference is "
                f"{self.change(metric)} points"
            )
        intervals = f"95 % interval over classes {_ends(metric, self.classes[metric], sign)}"
        if metric in self.seeds:
            first, second = self.counts
            intervals += f", over {first} and {second} seeds {_ends(metric, self.seeds[metric], sign)}"
        else:
            intervals += "; one seed each" if self.counts == (1, 1) else "; one of them has one seed"
        return f"{start} ({intervals})"

    def change(self, metric: str) -> str:
        """Return the difference in points, with its sign."""
        value = metric_value(metric, self.classes[metric].mean)
        return value if value.startswith("−") else f"+{value}"

    def ends(self, metric: str) -> str:
        """Return the interval over classes in print."""
        return _ends(metric, self.classes[metric], 1)


def _ends(metric: str, interval: Interval, sign: int) -> str:
    return " to ".join(metric_value(metric, end) for end in sorted((sign * interval.low, sign * interval.high)))


def pairs_with_first(
    runs: Sequence[Run], dataset: ImageDataset | None, embeddings: Sequence[np.ndarray], distance: str
) -> list[Paired]:
    """Each run but the first compared with the first, query by query.

    Args:
        runs: What `read_runs` gives.
        dataset: Images to search, for runs that have not stored what they found; None: there are none.
        embeddings: (N, d) of them under each run.
        distance: How the embeddings are compared.
    """
    stored = measured = [_stored(run) for run in runs]
    if dataset is not None and not all(stored):
        options: dict[str, Any] = {"metrics": ("recall@1", "map@r", "r_precision"), "distance": distance}
        values = [retrieval_per_query(**dataset_protocol(x, dataset), **options) for x in embeddings]
        measured = [[QueryValues.of(dataset, of_run)] for of_run in values]
    pairs = []
    for number in range(1, len(runs)):
        found = stored if stored[number] and stored[0] else measured
        pairs.append(_paired(runs[number], runs[0], found[number], found[0]))
    return pairs


def _stored(run: Run) -> list[QueryValues]:
    """Return what the seeds of a run have found for each query; empty where one has not stored it."""
    paths = [one.path / QUERIES_FILE for one in run.seeds or [run] if one.path]
    return [QueryValues.read(path) for path in paths] if all(path.is_file() for path in paths) else []


def _paired(run: Run, reference: Run, first: list[QueryValues], second: list[QueryValues]) -> Paired:
    every = [*first, *second]
    refused = ""
    if not first or not second:
        name = (reference if first else run).name
        refused = f"{name} has no {QUERIES_FILE}; name the data set, and the command embeds the images again"
    elif difference := next(filter(None, (every[0].difference_to(other) for other in every[1:])), ""):
        refused = f"their queries are not the same: {difference}"
    shared = metric_order(name for name in (every[0].values if every else ()) if all(name in of.values for of in every))
    if not refused and not shared:
        refused = "they have no metric in common"
    if refused:
        return Paired(run.name, reference.name, refused)
    here, there = ([{name: of.values[name] for name in shared} for of in side] for side in (first, second))
    over_seeds: dict[str, Interval] = {}
    of_seeds = all(one.name.startswith("seed ") for one in (*run.seeds, *reference.seeds))
    if min(len(first), len(second)) > 1 and of_seeds:
        for name in shared:
            ours, theirs = ([float(np.nanmean(of[name])) for of in side] for side in (here, there))
            over_seeds[name] = seed_difference(ours, theirs)
    classes = paired_differences(here, there, first[0].labels)
    return Paired(run.name, reference.name, "", classes, over_seeds, (len(first), len(second)))


# In what runs differ


def reservations(runs: Sequence[Run]) -> dict[str, str]:
    """Why the results of these runs do not compare: what differs, and what it is in each; empty where nothing does."""
    conditions: dict[str, list[Any]] = {
        "data sets": [run.result.get("dataset") for run in runs],
        "protocols": [run.result.get("protocol") for run in runs],
        "options of the data set": [run.flags.get("dataset_options") for run in runs],
        "numbers of images": [_images(run) for run in runs],
        _SELECTION: [run.result.get("selection") for run in runs],
    }
    return {
        what: "; ".join(f"{run.name}: {value or 'not stated'}" for run, value in zip(runs, values, strict=True))
        for what, values in conditions.items()
        if len({str(value) for value in values}) > 1
    }


def _images(run: Run) -> str:
    queries, gallery = (f"{run.metrics[key]:,}" if key in run.metrics else "?" for key in metric_text.COUNTS[:2])
    return f"{queries} queries, each compared with {gallery}"


def same_task(runs: Sequence[Run]) -> bool:
    """Whether all runs were measured on the same images in the same way, so that a difference means something."""
    return not reservations(runs).keys() - {_SELECTION}


def metric_rows(runs: Sequence[Run]) -> dict[str, list[tuple[str, list[str], bool]]]:
    """Every metric under every run: in print, notes below it, and whether it is the best.

    The notes are the difference to the first run, on the same task, and the interval, where it is known.
    """
    comparable = same_task(runs)
    rows: dict[str, list[tuple[str, list[str], bool]]] = {}
    for key in metric_order(dict.fromkeys(key for run in runs for key in run.metrics)):
        values = [run.metrics.get(key) for run in runs]
        # The largest as printed, where more is better and not all are the same.
        printed = [None if value is None else round(100 * value, 1) for value in values]
        known = {value for value in printed if value is not None}
        best = max(known) if comparable and metric_text.is_fraction(key) and len(known) > 1 else None
        rows[key] = []
        for number, (run, value) in enumerate(zip(runs, values, strict=True)):
            notes = (
                [metric_text.metric_change(key, values[0], value)]
                if comparable and number and value is not None
                else []
            )
            notes += [metric_text.metric_interval(key, run.intervals[key])] if key in run.intervals else []
            rows[key].append((metric_value(key, value), notes, best is not None and printed[number] == best))
    return rows


def _split(settings: Sequence[Mapping[str, str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the settings in which runs differ, a value for each run, and those that they share."""
    names = dict.fromkeys(name for values in settings for name in values)
    rows = {name: [values.get(name, "–") for values in settings] for name in names}
    differing = {name: row for name, row in rows.items() if len(set(row)) > 1}
    return differing, {name: row[0] for name, row in rows.items() if name not in differing}


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        result |= _flat(value, f"{above}{key} ") if nested else {above + str(key): setting_text(value)}
    return result
