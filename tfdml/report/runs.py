"""What a report shows of a run, read from its folder without TensorFlow: its metrics, and what its
queries find."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.metrics import METRICS, average_precision_at_r
from tfdml.evaluation.relevance import Relevance, retrieval_task
from tfdml.evaluation.retrieval import nearest_left
from tfdml.flags import parse_flags
from tfdml.io.files import fields, parse_json, read_json
from tfdml.results import QueryValues
from tfdml.run_folder import (
    ENVIRONMENT_FILE,
    FLAGS_FILE,
    METRICS_FILE,
    QUERIES_FILE,
    RESULT_FILE,
    WATCH_FILE,
)

# Numbers of results that count images and measure nothing.
COUNTS = ("num_queries", "num_gallery", "queries_without_match")
# Besides those of the table of metrics.
_TITLES = {"nmi": "NMI", "ami": "AMI", "f1": "Pairwise F1", "auc": "AUC"}
_DIRECTIONS = {"text_to_image": "text → image:", "image_to_text": "image → text:"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, or whatever else was measured: only `name` and the metrics of `result` need
    to be there.

    Args:
        name: What a report calls it.
        result: What `result.json` holds: `metrics` as `evaluate_retrieval` gives them, fractions,
            with `intervals` of `confidence_intervals` among them or next to them; if measured,
            `metrics_before` the training, with the untrained head, and `metrics_features`, without
            a head; `metrics_moments` of a `MomentEmbedder`, `metrics_orders`
            by order of HORDE's moments; among the metrics or next to them `generalization` as
            `evaluate_generalization` gives it; `dataset`, `protocol` and `selection` in words.
        history: One mapping per epoch, what `metrics.jsonl` holds: `epoch`, metrics of unseen
            classes as `test`, and what `fit` reports as `train`; empty where there is no such file.
        flags: Its flags by name; empty where there is no `flags.txt`.
        environment: What `environment.json` holds; empty where there is no such file.
        path: Its folder; None: it has none.
        seeds: Of what was trained with several seeds or folds, the run of each; its metrics are
            then their means.
        watch: What `watch.json` holds, alarms and sampled batches; empty where there is no such
            file.

    Example:
        >>> run = Run("cars", {"metrics": {"recall@1": 0.5}, "metrics_before": {"recall@1": 0.25}})
        >>> run.metrics, run.intervals
        ({'recall@1': 0.5}, {})
    """

    name: str
    result: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: Path | None = None
    seeds: Sequence[Run] = ()
    watch: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the result that are numbers."""
        return numbers(self.result["metrics"])

    @property
    def before(self) -> dict[str, float]:
        """The metrics before training; empty where they were not measured."""
        return numbers(self.result.get("metrics_before") or {})

    @property
    def features(self) -> dict[str, float]:
        """The metrics before training and without a head; empty where they were not measured."""
        return numbers(self.result.get("metrics_features") or {})

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The ends of the intervals that were measured, by metric."""
        return ends_of(
            self.result.get("intervals") or self.result["metrics"].get("intervals") or {}
        )

    @property
    def generalization(self) -> dict[str, float]:
        """The measures of generalization."""
        return numbers(
            self.result.get("generalization") or self.result["metrics"].get("generalization") or {}
        )

    def records(self, key: str) -> list[dict[str, Any]]:
        """Return what was measured after each epoch under a key of `history`, with `epoch`."""
        return [
            {"epoch": record["epoch"], **record[key]} for record in self.history if record.get(key)
        ]

    def queries(self) -> list[QueryValues]:
        """Return the metrics of each query, by each of its seeds.

        Raises:
            UserError: The run has not stored them.
        """
        return [
            QueryValues.read(Path(one.path or "") / QUERIES_FILE) for one in self.seeds or [self]
        ]

    @property
    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """The metrics of unseen classes after each epoch, by the name of a curve: of the run, or of
        each seed."""
        runs = self.seeds or [dataclasses.replace(self, name="unseen classes")]
        return {run.name: run.records("test") for run in runs}


def read_run(path: str | os.PathLike, name: str = "") -> Run:
    """Read the folder of a finished run.

    Args:
        path: The folder.
        name: What to call the run; empty: as the folder.

    Raises:
        UserError: There is no such folder, the run in it has not ended, or one of its files is
            damaged.
    """
    path = Path(path)
    if not (path / RESULT_FILE).is_file():
        raise UserError(
            f"{path} is not the folder of a finished run: there is no {RESULT_FILE} in it"
        )
    result = read_json(path / RESULT_FILE, {"metrics": dict}, "was it written by another program?")
    name = name or Path(os.path.abspath(path)).name
    lines = _text(path / METRICS_FILE).splitlines()
    history = [parse_json(line, f"{path}/{METRICS_FILE}") for line in lines if line.strip()]
    flags = parse_flags(_text(path / FLAGS_FILE))
    environment = _json(path / ENVIRONMENT_FILE)
    watch = _json(path / WATCH_FILE)
    seeds = []
    for row in result.get("runs", []):
        folder = fields(row, {"run": str}, f"{path}/{RESULT_FILE}: runs")["run"]
        seeds.append(read_run(path / os.path.basename(folder), folder.replace("_", " ")))
    return Run(name, result, history, flags, environment, path, seeds, watch)


def _json(path: Path) -> dict[str, Any]:
    """Return the values of a file; none where there is no file."""
    return read_json(path) if path.is_file() else {}


def _text(path: Path) -> str:
    """Return the text of a file; empty where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


# Metrics in print


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers: not what else a result may hold, such as intervals."""
    return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def ends_of(intervals: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the ends of intervals by metric: (low, high), or an `Interval` with the mean before
    its ends.

    Example:
        >>> ends_of({"recall@1": [0.5, 0.4, 0.6, 0.05]})
        {'recall@1': (0.4, 0.6)}
    """
    ends = {}
    for key, value in intervals.items():
        low, high = value if len(value) == 2 else value[1:3]
        ends[key] = (low, high)
    return ends


def metric_name(key: str) -> str:
    """Return what to call a metric in print.

    Example:
        >>> metric_name("recall@1"), metric_name("map@r")
        ('Recall@1', 'MAP@R')
    """
    direction, _, metric = key.rpartition("/")
    if direction in _DIRECTIONS:
        return f"{_DIRECTIONS[direction]} {metric_name(metric)}"
    family, _, k = key.partition("@")
    shown = METRICS.get(key) or METRICS.get(f"{family}@K")
    return shown.title.replace("@K", f"@{k}") if shown else _TITLES.get(key, key)


def is_fraction(key: str) -> bool:
    """Whether a metric is a share, printed in percent, of which more is better."""
    return key.rpartition("/")[2] in METRICS | _TITLES or "@" in key


def metric_order(keys: Iterable[str]) -> list[str]:
    """Return the keys that name metrics: Recall@K by K, then the others as they come.

    Example:
        >>> metric_order(["nmi", "recall@10", "num_queries", "recall@2"])
        ['recall@2', 'recall@10', 'nmi']
    """
    keys = [key for key in keys if key not in COUNTS]
    recalls = sorted(
        (key for key in keys if re.fullmatch(r"recall@\d+", key)), key=lambda key: int(key[7:])
    )
    return recalls + [key for key in keys if key not in recalls]


def metric_value(key: str, value: float | None) -> str:
    """Return a value in print, a fraction in percent; a dash where there is none.

    Example:
        >>> metric_value("recall@1", 0.5738), metric_value("lambda", 3.14159)
        ('57.4', '3.142')
    """
    if value is None:
        return "–"
    # The sum takes the sign from a zero that rounding left negative.
    text = f"{round(100 * value, 1) + 0.0:.1f}" if is_fraction(key) else f"{value:,.4g}"
    return text.replace("-", "−")


def metric_change(key: str, before: float | None, after: float | None) -> str:
    """Return the difference of two values as printed, so that the row adds up; a dash where one is
    missing.

    Example:
        >>> metric_change("recall@1", 0.1234, 0.2), metric_change("recall@1", 0.2, 0.1)
        ('+7.7', '−10.0')
    """
    if before is None or after is None:
        return "–"
    text = metric_value(
        key, round(after, 3) - round(before, 3) if is_fraction(key) else after - before
    )
    return text if text.startswith("−") else f"+{text}"


def metric_interval(key: str, ends: tuple[float, float] | None) -> str:
    """Return an interval in print; a dash where there is none.

    Example:
        >>> metric_interval("recall@1", (0.5512, 0.5966))
        '55.1 – 59.7'
    """
    if ends is None:
        return "–"
    low, high = ends
    return f"{metric_value(key, low)} – {metric_value(key, high)}"


def order_name(order: str) -> str:
    """Return what to call one of HORDE's orders of moments in print.

    Example:
        >>> order_name("1"), order_name("3"), order_name("all")
        ('1, the embedding', 'order 3', 'all, side by side')
    """
    return {"1": "1, the embedding", "all": "all, side by side"}.get(order, f"order {order}")


def setting_text(value: Any) -> str:
    """Return a setting as text: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# As far as the curve of Recall@K goes.
_DEPTH = 100
# Neighbors that are kept, to be shown.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class RankedQueries:
    """What N queries find among their nearest gallery images.

    Args:
        matches: (N,) how many gallery images share the query's class, itself not counted.
        hits: (N, depth) whether the nearest images are of the query's class.
        rows: (N, k) gallery rows of the 8 nearest of them, fewer where the gallery is smaller.
        distances: (N, k) how far they are.
    """

    matches: np.ndarray
    hits: np.ndarray
    rows: np.ndarray
    distances: np.ndarray

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    @property
    def shown_hits(self) -> np.ndarray:
        """(N, k) whether the neighbors that are kept are of the query's class."""
        return self.hits[:, : self.rows.shape[1]]

    def recall(self) -> np.ndarray:
        """(depth,) Recall@K for K = 1 .. depth; empty where no query is answerable."""
        hits = np.logical_or.accumulate(self.hits[self.answerable], axis=1)
        return hits.mean(axis=0) if len(hits) else np.zeros(0)

    def neighbors(self, query: int) -> Iterator[tuple[int, float, bool]]:
        """Row, distance, and whether it is of the query's class, of each neighbor that is kept."""
        return zip(
            *(values[query].tolist() for values in (self.rows, self.distances, self.shown_hits)),
            strict=True,
        )

    def right(self, query: int) -> str:
        """How many of the neighbors that are kept are right, in words."""
        shown = self.shown_hits[query]
        return f"{int(shown.sum())} of {len(shown)} right"


def rank_queries(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    relevance: Relevance | None = None,
    depth: int = _DEPTH,
    distance: str = "euclidean",
) -> RankedQueries | None:
    """Search every query for its nearest gallery images.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        relevance: As `evaluate_retrieval`, without levels. No image that is ignored is among the
            neighbors.
        depth: How many neighbors to look at, fewer where the gallery is smaller.
        distance: As `nearest_neighbors`.

    Returns:
        None where there is only one image, hence no neighbor.
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, relevance=relevance)
    depth = min(depth, task.available - task.relevance.most_ignored)
    if depth < 1:
        return None
    hits = []
    neighbors = []
    distances_shown = []
    for block, rows, distances in nearest_left(task, depth, distance):
        hits.append(task.relevance.of(block, rows))
        # Copies, so that the whole block is not kept.
        neighbors.append(rows[:, :_SHOWN].copy())
        distances_shown.append(distances[:, :_SHOWN].copy())
    columns = map(np.concatenate, (hits, neighbors, distances_shown))
    return RankedQueries(task.matches, *columns)


def choose_examples(
    ranked: RankedQueries, labels: np.ndarray, count: int, seed: int = 0
) -> dict[str, list[int]]:
    """Which queries to show, of different classes as far as there are enough; all have an image of
    their class to find.

    About two fifths are drawn at random, the others are the worst and the best in equal parts, by
    average precision among the neighbors that are shown.

    Args:
        ranked: What the search finds.
        labels: (N,) class ids of the queries.
        count: How many to choose.
        seed: Of the draw.

    Returns:
        Queries by kind: `random`, `worst` and `best`.
    """
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(ranked.answerable))
    hits = ranked.shown_hits[drawn]
    scores = average_precision_at_r(hits, np.minimum(ranked.matches[drawn], hits.shape[1]))
    worst = drawn[np.argsort(scores, kind="stable")]
    best = drawn[np.argsort(-scores, kind="stable")]
    extremes = count * 3 // 10
    kinds = (
        ("random", drawn, count - 2 * extremes),
        ("worst", worst, extremes),
        ("best", best, extremes),
    )
    examples = {}
    taken: set[int] = set()
    for kind, order, most in kinds:
        left = [query for query in order.tolist() if query not in taken]
        queries = spread_over_classes(left, labels)[:most]
        taken.update(queries)
        if queries:
            examples[kind] = queries
    return examples


def spread_over_classes(rows: Sequence[int], labels: np.ndarray) -> list[int]:
    """`rows` with the first of every class before the others, else in their order.

    Example:
        >>> spread_over_classes([2, 0, 1], np.array([5, 7, 5]))
        [2, 1, 0]
    """
    order = np.asarray(rows, np.int64)
    is_first = np.isin(np.arange(len(order)), np.unique(labels[order], return_index=True)[1])
    return [*order[is_first].tolist(), *order[~is_first].tolist()]


# What is taken for what


@dataclasses.dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest image is of another.

    Args:
        label: The class of the queries.
        taken_for: The class of their nearest images.
        count: How many such queries there are.
        queries: How many queries of that class have an image of it to find.
        query: The one of them whose nearest image is nearest.
        neighbor: That image's gallery row.
        distance: How far it is.
    """

    label: int
    taken_for: int
    count: int
    queries: int
    query: int
    neighbor: int
    distance: float


def confusions(ranked: RankedQueries, labels: np.ndarray, targets: np.ndarray) -> list[Confusion]:
    """Every pair of classes that is confused, the most frequent first, of equals the larger share
    of its class first.

    Queries without an image of their class to find are not counted: they cannot be right.

    Args:
        ranked: What the search found.
        labels: (N,) class ids of the queries.
        targets: (G,) class ids of the gallery.
    """
    asked = dict(
        zip(
            *(a.tolist() for a in np.unique(labels[ranked.answerable], return_counts=True)),
            strict=True,
        )
    )
    wrong = np.flatnonzero(ranked.answerable & ~ranked.hits[:, 0])
    # Nearest first, so that the first of every pair is its example.
    wrong = wrong[np.argsort(ranked.distances[wrong, 0], kind="stable")]
    pairs = np.stack([labels[wrong], targets[ranked.rows[wrong, 0]]])
    kinds, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    result = []
    for a, b, count, query in zip(
        *kinds.tolist(), counts.tolist(), wrong[first].tolist(), strict=True
    ):
        row, distance = int(ranked.rows[query, 0]), float(ranked.distances[query, 0])
        result.append(Confusion(a, b, count, asked[a], query, row, distance))
    return sorted(result, key=lambda c: (-c.count, c.queries, c.label, c.taken_for))
