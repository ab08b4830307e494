"""The pages: the report of a run, or of several that differ in the seed alone; a comparison of runs; and an audit.

A comparison says whether one run is better than the first, query by query.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.audit import Audit, Finding
from tfdml.errors import UserError
from tfdml.evaluation.classification import calibrate, identification_rates
from tfdml.evaluation.compare import QUERIES_FILE, QueryValues, compare_queries
from tfdml.evaluation.intervals import Interval
from tfdml.evaluation.relevance import dataset_protocol
from tfdml.evaluation.retrieval import recall_by_size, retrieval_per_query
from tfdml.evaluation.verification import PairHistogram, accepted_rates, count_pair_distances, verification
from tfdml.report import metric_text, plots
from tfdml.report.embedding_map import map_html
from tfdml.report.metric_text import metric_order, metric_value, plain_intervals
from tfdml.report.queries import (
    class_rows,
    classes_html,
    confusions,
    confusions_html,
    examples_html,
    most_confused,
    rank_queries,
)
from tfdml.report.rendering import render, setting_text, write_page
from tfdml.report.runs import Run, read_run, read_runs
from tfdml.retrieval.exact import check_embeddings

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from tfdml.data.dataset import ImageDataset
    from tfdml.training import TrainingRun


#: What the threshold is calibrated to.
TARGET = {"fpir": 0.01}
_IN_WORDS = {
    "fpir": "a false positive identification rate of at most {:g} %",
    "far": "a false accept rate of at most {:g} %",
    "precision": "a precision of at least {:g} %",
}
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
        target: What the threshold is calibrated to, as `calibrate`: `fpir` of searches among as many images, or `far`
            or `precision` of pairs.
    """
    labels, shown = dataset.labels, np.ones(len(dataset), bool)
    halved = held_out is None
    if held_out is None:
        half = np.isin(labels, drawn_classes(labels)[::2])
        held_out, shown = (embeddings[half], labels[half]), ~half
    kept = sampled_images(held_out[1])
    try:
        calibration = calibrate(np.asarray(held_out[0])[kept], held_out[1][kept], distance=distance, **target)
    except UserError:  # there are too few images or pairs, or none reaches the rate
        calibration, shown = None, np.ones(len(dataset), bool)
    rows = np.flatnonzero(shown)
    rows = rows[sampled_images(labels[rows])]
    points, labels = embeddings[rows], labels[rows]
    if not 1 < len(np.unique(labels)) < len(labels):
        return Markup("<p>There are not both pairs of one class and pairs of different classes.</p>")
    measured = verification(points, labels, distance=distance)
    threshold = measured.eer_threshold if calibration is None else calibration.threshold
    accepted = accepted_rates(points, labels, threshold, distance=distance)
    rates: Mapping[str, Interval] = {name: getattr(accepted, name) for name in ("far", "tar", "precision")}
    if "fpir" in target:
        rates = identification_rates(points, labels, threshold, distance=distance)
    return render(
        "same_or_different.html",
        measured=measured,
        calibration=calibration,
        halved=halved,
        target=" and ".join(_IN_WORDS[name].format(100 * rate) for name, rate in target.items()),
        threshold=threshold,
        rates=rates,
        sampled=len(rows) < shown.sum(),
        roc=plots.roc_curve(measured, accepted),
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


def write_run_report(run: TrainingRun) -> None:
    """Write `report/index.html` of a run that has ended, where its settings ask for it and it is not there yet.

    Args:
        run: What `tfdml.training.train` returns; of several seeds or folds, each has its own report too.

    Example:
        >>> write_run_report(train(experiment))
    """
    for one in run.runs:
        write_run_report(one)
    if not run.experiment.report or run.folder.report.is_file():
        return
    options: dict[str, Any] = {}
    if not run.runs:
        options = {"dataset": run.splits.test, "embeddings": run.embeddings}
        if (validation := run.splits.validation) is not None:
            options["held_out"] = run.embed("validation"), validation.labels
    write_report(run.folder.report, read_run(run.folder.path), **options, interval_name="95% interval over classes")


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

    The report loads nothing: pictures are inside it, figures are SVG, and its one script, which sorts tables, is
    inside it too; without a script it reads the same. It is written atomically. What comes from
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
        target: What that threshold is calibrated to, as `calibrate`: `fpir`, `far` or `precision`.
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
        sizes = recall_by_size(**protocol) if ranked.answerable.any() and dataset.num_classes > 1 else []
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
        >>> pairs[0].change("recall@1")
        '+0.0'
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
        >>> pair = Paired("jrd", "am", classes={"recall@1": Interval(0.024, 0.011, 0.036, 0.006)})
        >>> pair.change("recall@1"), pair.intervals("recall@1")
        ('+2.4', ['1.1 to 3.6 over classes'])
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

    def change(self, metric: str) -> str:
        """Return the difference in points, with its sign."""
        value = metric_value(metric, self.classes[metric].mean)
        return value if value.startswith("−") else f"+{value}"

    def intervals(self, metric: str) -> list[str]:
        """Return the 95 % intervals in print: over classes and, where both have several seeds, over seeds."""
        kinds = (self.classes, "classes"), (self.seeds, "{} and {} seeds".format(*self.counts))
        values = [(of[metric], kind) for of, kind in kinds if metric in of]
        return [f"{metric_value(metric, of.low)} to {metric_value(metric, of.high)} over {kind}" for of, kind in values]


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
    if not first or not second:
        name = (reference if first else run).name
        refused = f"{name} has no {QUERIES_FILE}; name the data set, and the command embeds the images again"
        return Paired(run.name, reference.name, refused)
    of_seeds = all(one.name.startswith("seed ") for one in (*run.seeds, *reference.seeds))
    try:
        differences = compare_queries(first, second, seeds=of_seeds)
    except UserError as error:
        return Paired(run.name, reference.name, str(error))
    classes = {name: differences.classes[name] for name in metric_order(differences.classes)}
    return Paired(run.name, reference.name, "", classes, differences.seeds, (len(first), len(second)))


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


# How much of each kind the page has; the CSV files have all.
_GROUPS, _LABELS, _OUTLIERS, _CLASSES, _PICKS = 40, 48, 24, 24, 48
_IN_A_GROUP, _OF_A_CLASS = 6, 6


def write_audit(
    path: str | os.PathLike, audit: Audit, name: str, picture: Callable[[int], np.ndarray] | None = None
) -> None:
    """Write the page of an audit.

    Args:
        path: Where to write; the folder is made if it is missing.
        audit: What was found.
        name: What the images are called.
        picture: From a row to its image (H, W, 3) uint8; None: the page has names only.

    Raises:
        OSError: The page cannot be written.
        UserError: An image cannot be read.

    Example:
        >>> table = tfdml.embeddings.ImageTable.of([test])
        >>> write_audit("audit.html", tfdml.audit.audit(embeddings, table), "photos", test.images.picture)
    """
    table = audit.table
    images = types.SimpleNamespace(picture=picture, name=lambda row: table.names[row])
    write_page(
        path,
        "audit.html",
        title=f"{name}: audit",
        audit=audit,
        dataset=types.SimpleNamespace(images=images, labels=table.labels, class_names={**table.class_names, -1: "–"}),
        groups=audit.groups()[:_GROUPS],
        counts=audit.counts(),
        in_a_group=_IN_A_GROUP,
        labels=audit.of("label")[:_LABELS],
        outliers=audit.of("outlier")[:_OUTLIERS],
        same=[(finding, _of_class(audit, finding)) for finding in audit.of("same class")[:_CLASSES]],
        scattered=[(finding, _of_class(audit, finding)) for finding in audit.of("scattered class")[:_CLASSES]],
        picks=audit.of("pick")[:_PICKS],
    )


def _of_class(audit: Audit, finding: Finding) -> list[int]:
    """Return rows of some images of the class of a finding, and as many of the other class if there is one."""
    labels = [label for label in (finding.label, finding.other_label) if label >= 0]
    most = _OF_A_CLASS // len(labels)
    return [row for label in labels for row in np.flatnonzero(audit.table.labels == label)[:most].tolist()]
