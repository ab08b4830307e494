"""Retrieval metrics of every query: computed from neighbors or whole rankings, and kept in a file.

Besides right and wrong, a ranking can be measured by graded relevance: H-AP, ASI and nDCG of the levels of a hierarchy.
GAP measures all queries at once, by the confidence of their nearest images.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from tfdml.embeddings.reader import ImageTable
from tfdml.errors import REASON, UserError, check_choice, user_errors
from tfdml.evaluation.relevance import Relevance, check_labels
from tfdml.io.files import atomic_write
from tfdml.pairwise import DISTANCES, require_classes
from tfdml.retrieval import exact

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

# `recall` stands for every K of `ks`; recall@K, precision@K, map@K, mp@K and mmp@K name one K each.
WHOLE_RANKING_METRICS = ("map", "map_trapezoidal", "minp", "mrr", "h_ap", "asi", "ndcg")
PER_QUERY_METRICS = ("recall", "precision@1", "map@r", "r_precision", *WHOLE_RANKING_METRICS)
_FAMILIES = ("recall", "precision", "map", "mp", "mmp")
#: The K of `recall`, where the images suffice for them.
DEFAULT_KS = (1, 2, 4, 8)
_AT_K = re.compile(rf"({'|'.join(_FAMILIES)})@([1-9]\d*)")

# Up to this many relevant images, comparing a row with each of their scores is faster than sorting the row.
_COUNTED = 64
QUERIES_FILE = "queries.npz"


def precision_sums(hits: np.ndarray, matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average precision at R and R-precision of every query.

    Args:
        hits: (B, K) bool, whether the i-th neighbor shares the query's class; K at least `matches.max()`.
        matches: (B,) R of every query, at least 1.

    Returns:
        (B,) AP@R = 1/R sum_{i <= R} hit_i precision_i, and (B,) R-precision = hits among the first R, over R.
    """
    rank = np.arange(1, hits.shape[1] + 1)
    within = hits & (rank <= matches[:, None])
    precision = np.cumsum(within, axis=1) / rank
    return (precision * within).sum(axis=1) / matches, within.sum(axis=1) / matches


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """Checked queries and what they are searched in; made by `retrieval_task`."""

    queries: np.ndarray
    labels: np.ndarray | None  # (N,) class ids of the queries, where they have classes
    gallery: np.ndarray | None
    own_rows: np.ndarray | None
    relevance: Relevance

    @property
    def searched(self) -> np.ndarray:
        """(G, d) what is searched."""
        return self.queries if self.gallery is None else self.gallery

    @property
    def own(self) -> np.ndarray | None:
        """(N,) the gallery row of each query itself, which is left out of its ranking; None: there is none."""
        return np.arange(len(self.queries)) if self.gallery is None else self.own_rows

    @property
    def available(self) -> int:
        """How many images a query is compared with."""
        return len(self.searched) - (self.own is not None)

    @functools.cached_property
    def matches(self) -> np.ndarray:
        """(N,) R of every query: how many images there are to find, neither ignored nor the query itself."""
        if self.own is None:
            return self.relevance.matches
        every, own = slice(None), self.own[:, None]
        itself = (self.relevance.of(every, own) > 0) & ~self.relevance.ignored(every, own)
        return self.relevance.matches - itself[:, 0]

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    @functools.cached_property
    def by_level(self) -> dict[str, RetrievalTask]:
        """The task of each level by what follows the name of its metrics; this one, where there are no levels."""
        levels = self.relevance.by_level
        if "" in levels:
            return {"": self}
        return {end: dataclasses.replace(self, relevance=one, labels=one.labels) for end, one in levels.items()}

    def part(self, block: slice | np.ndarray) -> RetrievalTask:
        """Return the task of a block of the queries, searched in the same gallery."""
        return RetrievalTask(
            self.queries[block],
            None if self.labels is None else self.labels[block],
            self.searched,
            None if self.own is None else self.own[block],
            self.relevance.part(block),
        )

    def depth_with_ignored(self, depth: int) -> int:
        """How many neighbors to search, so that `depth` are left without those that are ignored."""
        return min(depth + self.relevance.most_ignored, self.available)


def retrieval_task(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    relevance: Relevance | None = None,
) -> RetrievalTask:
    """Return the arguments of `evaluate_retrieval`, checked.

    Raises:
        UserError: As `evaluate_retrieval`, for its arrays.
    """
    if relevance is None and labels is None:
        raise UserError("nothing defines what is relevant: give labels, or a Relevance")
    if relevance is None and (gallery is None) != (gallery_labels is None):
        raise UserError("gallery and gallery_labels go together: give both (query/gallery) or none (all-to-all)")
    embeddings, gallery, own_rows = exact.check_sides(embeddings, gallery, own_rows)
    if labels is not None:
        labels = check_labels(labels, len(embeddings))
    if relevance is None:
        if gallery is not None:
            gallery_labels = check_labels(gallery_labels, len(gallery), "gallery_labels")
        relevance = Relevance.classes(labels, gallery_labels)
    relevance.check(len(embeddings), len(embeddings if gallery is None else gallery))
    return RetrievalTask(embeddings, relevance.labels if labels is None else labels, gallery, own_rows, relevance)


def ks_within(ks: Sequence[int], available: int) -> tuple[int, ...]:
    """Those K for which a query has enough images to be compared with; 1 where none is.

    Example:
        >>> ks_within((1, 10, 100), available=12)
        (1, 10)
    """
    return tuple(k for k in ks if k <= available) or (1,)


def requested(
    ks: Sequence[int] | None, metrics: Sequence[str], known: Sequence[str], available: int = DEFAULT_KS[-1]
) -> list[str]:
    """Return the names of the results: those at each K, ascending, then the others as `known`.

    Args:
        ks: The K of `recall`; None for those of `DEFAULT_KS` for which the images suffice, with a warning if not all.
        metrics: The names.
        known: The names that there are.
        available: How many images a query is compared with.

    Raises:
        UserError: No metric, an unknown one, or K below 1.
    """
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    if not metrics:
        raise UserError(f"no metric is asked for; choose from {', '.join(known)}")
    at_k: set[tuple[str, int]] = set()
    for name in metrics:
        single = _AT_K.fullmatch(name)
        if single:
            at_k.add((single[1], int(single[2])))
        elif name == "recall":
            if ks is None:
                ks = ks_within(DEFAULT_KS, available)
                if ks != DEFAULT_KS:
                    left = f"recall@K is measured for K = {', '.join(map(str, ks))} alone"
                    warnings.warn(f"{left}: a query is compared with {available} images", stacklevel=3)
            if isinstance(ks, int | np.integer):
                raise UserError(f"ks must be a list of integers; got {ks}: write ks=({ks},)")
            if not len(ks) or min(ks) < 1:
                raise UserError(f"ks must be one or more integers of at least 1; got {list(ks)}")
            at_k.update(("recall", int(k)) for k in ks)
        elif name not in known:
            names = ", ".join([*known, "or one of a K", *(f"{family}@K" for family in _FAMILIES)])
            raise UserError(f"unknown metric {name!r}; one of {names}")
    named = [f"{family}@{k}" for family, k in sorted(at_k, key=lambda pair: (_FAMILIES.index(pair[0]), pair[1]))]
    return named + [name for name in known if name in metrics and name != "recall" and name not in named]


def retrieval_per_query(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = ("recall", "map@r", "r_precision"),
    distance: str = "euclidean",
    *,
    relevance: Relevance | None = None,
    own_rows: Any = None,
    neighbors: Any = None,
    memory_budget: int = 256 * 2**20,
) -> dict[str, np.ndarray]:
    """Return the retrieval metrics of each query, whose means `evaluate_retrieval` reports.

    Args:
        embeddings: As `evaluate_retrieval`.
        labels: As `evaluate_retrieval`.
        gallery: As `evaluate_retrieval`.
        gallery_labels: As `evaluate_retrieval`.
        ks: As `evaluate_retrieval`.
        metrics: Retrieval metrics, as `evaluate_retrieval`.
        distance: As `evaluate_retrieval`.
        relevance: As `evaluate_retrieval`.
        own_rows: As `evaluate_retrieval`.
        neighbors: (N, k) gallery rows, nearest first, that are measured in place of the exact search: of a re-ranking
            or an index. They may hold images that the relevance ignores, and -1 where fewer than k are known.
        memory_budget: Bytes that a block of the search may take.

    Returns:
        (N,) float64 by metric name, each in 0 .. 1; NaN for queries without an image of their class to find.

    Raises:
        UserError: As `evaluate_retrieval`; `neighbors` are too few for a metric, or not those of a search.

    Example:
        >>> import numpy as np
        >>> points = np.array([[0.0], [0.1], [5.0], [5.1], [9.0]])
        >>> retrieval_per_query(points, [3, 3, 8, 3, 7], ks=[1], metrics=["recall"])["recall@1"].tolist()
        [1.0, 1.0, nan, 0.0, nan]
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
    names = requested(ks, metrics, PER_QUERY_METRICS, task.available)
    return values_per_query(task, names, distance, memory_budget, neighbors)


def recording(found: dict[str, np.ndarray]) -> Callable[..., dict[str, np.ndarray]]:
    """`values_per_query` that leaves its values in `found`, too: the means and the values of one search."""

    def compute(*arguments: Any, **options: Any) -> dict[str, np.ndarray]:
        found.update(values_per_query(*arguments, **options))
        return dict(found)

    return compute


def check_depth(task: RetrievalTask, names: Sequence[str]) -> None:
    """Raise UserError where a metric needs more gallery images than there are, or nothing can be right or wrong."""
    require_wrong_answers(task)
    at_k = _depths(names)
    largest = max(at_k.values(), default=0)
    if largest > task.available:
        name = next(name for name, k in at_k.items() if k == largest)
        raise UserError(f"{name} needs {largest} gallery images per query; there are {task.available}")
    for end, level in task.by_level.items():
        if level.answerable.any():
            continue
        if task.labels is None:
            why = "no query has a relevant image to find"
        elif task.gallery is None:
            why = "no query shares its class with another image"
        else:
            why = "queries and gallery have no class in common; do both use the same class ids?"
        ignored = f"; up to {task.relevance.most_ignored} images of each query are ignored"
        raise UserError(f"{why}{ignored if task.relevance.most_ignored else ''}{f' (level {end[1:]})' if end else ''}")


def require_wrong_answers(task: RetrievalTask) -> None:
    """Raise UserError where all images are of one class, which any embedding retrieves."""
    if task.gallery is None and task.relevance.labels is not None:
        require_classes(task.relevance.labels, "retrieval")


def search_depth(task: RetrievalTask, names: Sequence[str]) -> int:
    """How many neighbors of each query the metrics need, without those that are ignored."""
    deepest = max(_depths(names).values(), default=1)
    if not {"map@r", "r_precision"} & set(names):
        return deepest
    return max(deepest, *(int(level.matches.max()) for level in task.by_level.values()))


def _depths(names: Sequence[str]) -> dict[str, int]:
    """Return the K of each metric that has one."""
    return {name: int(name.split("@")[1]) for name in names if _AT_K.fullmatch(name)}


def values_per_query(
    task: RetrievalTask,
    names: Sequence[str],
    distance: str,
    memory_budget: int,
    neighbors: Any = None,
) -> dict[str, np.ndarray]:
    """Return what `retrieval_per_query` returns, for a checked task and the names of `requested`.

    Args:
        task: The queries and the gallery.
        names: Of the metrics.
        distance: As `retrieval_per_query`.
        memory_budget: As `retrieval_per_query`.
        neighbors: As `retrieval_per_query`.
    """
    check_depth(task, names)
    depth = search_depth(task, names)
    count = len(task.queries)
    levels = task.by_level
    values = {name + end: np.full(count, np.nan) for end in levels for name in names}
    ranked = [name for name in names if name in WHOLE_RANKING_METRICS]
    near = [name for name in names if name not in ranked]
    if neighbors is not None:
        if ranked:
            raise UserError(f"{ranked[0]} ranks the whole gallery, `neighbors` do not: choose map@r or map@K")
        neighbors = _checked_neighbors(task, neighbors, task.depth_with_ignored(depth))
    if near:
        for block, found in _blocks_of_neighbors(task, depth, distance, memory_budget, neighbors):
            for end, level in levels.items():
                keep = np.flatnonzero(level.answerable[block])
                queries = block.start + keep
                hits = level.relevance.of(queries, found[keep])
                for name, column in metrics_of_hits(near, hits, level.matches[queries]).items():
                    values[name + end][queries] = column
    graded = [name for name in ranked if name in _GRADED and "" not in levels]
    values |= {name: np.full(count, np.nan) for name in graded}
    rankings = whole_rankings(task, distance, memory_budget) if ranked else iter(())
    for query, parts in itertools.groupby(rankings, key=operator.itemgetter(0)):
        by_level = {end: ranks for _, end, ranks in parts}
        for end, ranks in by_level.items():
            for name in ranked:
                values[name + end][query] = _OF_RANKS[name](ranks)
        if graded:
            # The images of a level are among those of the next coarser one.
            ranks = list(by_level.values())[-1]
            shared = np.sum([np.isin(ranks, of_level) for of_level in by_level.values()], axis=0)
            relevances = population_relevances(shared, len(levels), itself=task.own is not None)
            for name in graded:
                values[name][query] = _GRADED[name](ranks, shared, relevances)
    return values


def _blocks_of_neighbors(
    task: RetrievalTask, depth: int, distance: str, memory_budget: int, neighbors: np.ndarray | None
) -> Iterator[tuple[slice, np.ndarray]]:
    if neighbors is None:
        yield from ((block, rows) for block, rows, _ in nearest_left(task, depth, distance, memory_budget))
        return
    for block in exact.row_blocks(len(neighbors), 4096):
        yield block, exact.left_over(neighbors[block], task.relevance.ignored(block, neighbors[block]), depth)


def _checked_neighbors(task: RetrievalTask, neighbors: Any, depth: int) -> np.ndarray:
    rows, count = np.asarray(neighbors), len(task.queries)
    if rows.ndim != 2 or len(rows) != count or rows.shape[1] < depth or rows.dtype.kind not in "iu":
        raise UserError(
            f"`neighbors` must be gallery rows ({count}, k), k at least {depth} for these metrics; "
            f"got {rows.dtype} {rows.shape}"
        )
    if rows.min() < -1 or rows.max() >= len(task.searched):
        raise UserError(f"`neighbors` must lie in 0 .. {len(task.searched) - 1}, the rows of the gallery, or be -1")
    ordered = np.sort(rows, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        raise UserError(f"`neighbors` of query {np.flatnonzero(twice.any(axis=1))[0]} have a gallery row twice")
    if task.own is not None and (itself := (rows == task.own[:, None]).any(axis=1)).any():
        raise UserError(f"`neighbors` of query {np.flatnonzero(itself)[0]} have the query itself: leave it out")
    return rows


def nearest_hits(task: RetrievalTask, distance: str, memory_budget: int) -> tuple[np.ndarray, np.ndarray]:
    """(N,) bool, whether the nearest image that is not ignored is relevant, and (N,) float32, how far it is.

    Args:
        task: The queries and the gallery.
        distance: As `retrieval_per_query`.
        memory_budget: As `retrieval_per_query`.
    """
    hits, distances = np.zeros(len(task.queries), bool), np.zeros(len(task.queries), np.float32)
    for block, rows, far in nearest_left(task, 1, distance, memory_budget):
        hits[block] = task.relevance.of(block, rows)[:, 0] > 0
        distances[block] = far[:, 0]
    return hits, distances


def nearest_left(
    task: RetrievalTask,
    k: int,
    distance: str,
    memory_budget: int = 256 * 2**20,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield what `neighbor_blocks` yields, without images that are ignored; row -1 where fewer than k are left.

    Args:
        task: The queries and the gallery.
        k: How many neighbors.
        distance: As `neighbor_blocks`.
        memory_budget: As `neighbor_blocks`.
    """
    relevance = task.relevance
    options: dict[str, Any] = {"distance": distance, "own_rows": task.own_rows, "memory_budget": memory_budget}
    if relevance.most_ignored:
        options |= {"ignored": relevance.ignored, "most_ignored": relevance.most_ignored}
    yield from exact.neighbor_blocks(task.queries, task.gallery, k=k, **options)


def metrics_of_hits(names: Sequence[str], hits: np.ndarray, matches: np.ndarray) -> dict[str, np.ndarray]:
    """(B,) values of each metric, from whether the i-th neighbor is a hit (B, K) and R of each query (B,)."""
    values: dict[str, Any] = {}
    if {"map@r", "r_precision"} & set(names):
        values["map@r"], values["r_precision"] = precision_sums(hits, matches)
    for name, k in _depths(names).items():
        near = hits[:, :k]
        family = name.split("@")[0]
        if family == "recall":
            values[name] = near.any(axis=1)
        elif family == "precision":
            values[name] = near.mean(axis=1)
        elif family == "map":
            precision = np.cumsum(near, axis=1) / np.arange(1, k + 1)
            values[name] = (precision * near).sum(axis=1) / np.minimum(k, matches)
        elif family == "mmp":
            most = np.minimum(k, matches)
            values[name] = (near & (np.arange(k) < most[:, None])).sum(axis=1) / most
        else:
            found = near.sum(axis=1)
            last = k - near[:, ::-1].argmax(axis=1)  # rank of the last hit, where there is one
            values[name] = found / np.where(found == matches, last, k)
    return {name: values[name] for name in names}


def hierarchical_average_precision(ranks: Any, levels: Any = None, relevances: Any = None) -> float:
    """Return the H-AP of one query (Ramzi et al., 2022, HAPPIER).

    H-AP = 1 / sum_k rel(k) sum_k 1/rank(k) sum_{j: rank(j) <= rank(k)} min(rel(j), rel(k)), over the relevant images.
    Of one level it is average precision.

    Args:
        ranks: (R,) places of the relevant images in the ranking, ascending, from 1.
        levels: (R,) how many levels of the hierarchy each shares with the query, 1 .. L; None: 1.
        relevances: (L + 1,) the relevance of an image by its level, 0 for level 0, never falling; None: the level.

    Example:
        >>> hierarchical_average_precision([1, 2], levels=[2, 1])
        1.0
        >>> hierarchical_average_precision([1, 2], levels=[1, 2])  # (1 + (1 + 2) / 2) / 3
        0.8333333333333334
    """
    ranks, levels = _checked_ranks(ranks, levels)
    gains = levels.astype(np.float64) if relevances is None else np.asarray(relevances, np.float64)[levels]
    shared = np.zeros(len(ranks))
    for gain in np.unique(gains):
        shared += np.minimum(gains, gain) * np.cumsum(gains == gain)
    return float((shared / ranks).sum() / gains.sum())


def average_set_intersection(ranks: Any, levels: Any = None) -> float:
    """Return the ASI of one query (Sun et al., 2021, "Dynamic Metric Learning").

    ASI = 1/R sum_{k=1..R} SI(k), where SI(k) is the share of the k best images that are among the k first, counted by
    level: 1/k sum_v min(images of level v among the k first, images of level v among the k best). R is the number
    of images that share any level.

    Args:
        ranks: As `hierarchical_average_precision`.
        levels: As `hierarchical_average_precision`.

    Example:
        >>> average_set_intersection([1, 2, 4])  # (1 + 1 + 2/3) / 3
        0.8888888888888888
    """
    ranks, levels = _checked_ranks(ranks, levels)
    depth = np.arange(1, len(ranks) + 1)
    best = np.sort(levels)[::-1]
    shared = np.zeros(len(ranks))
    for level in np.unique(levels):
        shared += np.minimum(np.searchsorted(ranks[levels == level], depth, "right"), np.cumsum(best == level))
    return float((shared / depth).mean())


def ndcg(ranks: Any, levels: Any = None) -> float:
    """Return the normalized discounted cumulative gain of one query, over the whole gallery.

    DCG = sum_k (2^level(k) - 1) / log2(1 + rank(k)), divided by that of the best ranking (Järvelin and Kekäläinen,
    2002, with the gain of Burges et al., 2005).

    Args:
        ranks: As `hierarchical_average_precision`.
        levels: As `hierarchical_average_precision`.

    Example:
        >>> ndcg([1, 2, 3], levels=[3, 1, 1])
        1.0
    """
    ranks, levels = _checked_ranks(ranks, levels)
    gains = np.exp2(levels) - 1
    best = np.sort(gains)[::-1] / np.log2(1 + np.arange(1, len(ranks) + 1))
    return float((gains / np.log2(1 + ranks)).sum() / best.sum())


def population_relevances(levels: np.ndarray, depth: int, itself: bool = False) -> np.ndarray:
    """(L + 1,) relevances of levels: l/L, shared by the images that have level l (Ramzi et al., 2022).

    Args:
        levels: (R,) as `hierarchical_average_precision`.
        depth: L, how many levels the hierarchy has.
        itself: Whether the query counts as one more image of level L. The authors' code counts it where all images are
            queries.

    Example:
        >>> population_relevances(np.array([2, 1, 1]), 2)
        array([0.  , 0.25, 1.  ])
    """
    counts = np.bincount(levels, minlength=depth + 1).astype(np.float64)
    counts[depth] += itself
    return np.arange(depth + 1) / depth / np.maximum(counts, 1)


def global_average_precision(correct: Any, confidences: Any, known: int | None = None) -> float:
    """Return GAP, also called micro-AP: average precision of all predictions, sorted by confidence.

    GAP = 1/M sum_i P(i) rel(i), over the predictions in the order of falling confidence, where P(i) is the share of
    right ones among the first i and M the number of queries that have an answer (Perronnin et al., 2009; Google
    Landmarks; Met). Queries without an answer can only do harm: what is predicted for them is wrong.

    Args:
        correct: (N,) bool, whether the prediction of each query is right.
        confidences: (N,). Equal ones keep the order of the queries.
        known: M; None: all N.

    Raises:
        UserError: Not one value per query, or no query has an answer.

    Example:
        >>> global_average_precision([True, False, True], [0.9, 0.8, 0.3], known=2)  # (1 + 2/3) / 2
        0.8333333333333333
    """
    correct, confidences = np.asarray(correct, bool), np.asarray(confidences, np.float64)
    known = len(correct) if known is None else known
    if correct.ndim != 1 or correct.shape != confidences.shape or known < 1:
        raise UserError(f"{correct.shape} predictions, {confidences.shape} confidences, {known} queries with an answer")
    hits = correct[np.argsort(-confidences, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].sum() / known)


def _checked_ranks(ranks: Any, levels: Any) -> tuple[np.ndarray, np.ndarray]:
    ranks = np.asarray(ranks, np.int64)
    levels = np.ones(len(ranks), np.int64) if levels is None else np.asarray(levels, np.int64)
    if ranks.ndim != 1 or ranks.shape != levels.shape or not len(ranks) or (np.diff(ranks, prepend=0) < 1).any():
        raise UserError("ranks must be ascending from 1, at least one, with as many levels")
    return ranks, levels


def _trapezoidal(ranks: np.ndarray) -> float:
    """Area under precision over recall by the trapezoidal rule, with the precision before and at each hit."""
    hits = np.arange(len(ranks))
    before = np.where(ranks > 1, hits / np.maximum(ranks - 1, 1), 1.0)
    return float(np.mean((before + (hits + 1) / ranks) / 2))


# From the ascending ranks of all relevant images of a query.
_OF_RANKS: dict[str, Callable[[np.ndarray], float]] = {
    "map": lambda ranks: float(np.mean(np.arange(1, len(ranks) + 1) / ranks)),
    "minp": lambda ranks: len(ranks) / ranks[-1],
    "mrr": lambda ranks: 1 / ranks[0],
    "map_trapezoidal": _trapezoidal,
    "h_ap": hierarchical_average_precision,
    "asi": average_set_intersection,
    "ndcg": ndcg,
}
# From the ranks of the images that share a level, how many levels each shares, and the relevance of each level.
_GRADED: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
    "h_ap": hierarchical_average_precision,
    "asi": lambda ranks, levels, _: average_set_intersection(ranks, levels),
    "ndcg": lambda ranks, levels, _: ndcg(ranks, levels),
}


def whole_rankings(task: RetrievalTask, distance: str, memory_budget: int) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield the ranks of all relevant images in the ranking of the whole gallery, for each query that has any.

    A rank is the place, from 1, by distance, equal distances by gallery row, without the query itself and without
    images that are ignored. No row is sorted by index: the rank of an image is one more than the number of images
    before it, which are counted.

    The ranking is that of float32 products of embeddings shifted to the gallery's median. Images whose squared
    distances differ by less than about 1e-7 of the squared spread may change places. Exact copies never do: they share
    a score.

    Args:
        task: The queries and the gallery.
        distance: As `nearest_neighbors`.
        memory_budget: Bytes that a block may take, next to about three copies of the gallery.

    Yields:
        The query, the level (see `RetrievalTask.by_level`), and (R,) ascending ranks.

    Raises:
        UserError: An unknown distance.
    """
    check_choice("distance", distance, DISTANCES)
    space = exact.placed_together(task.queries, task.searched, distance)
    size, count = len(space.gallery), len(task.queries)
    copies, originals = _copies(space.gallery)
    table = exact.score_table(space, size)

    def scores_of(block: slice) -> np.ndarray:
        scores = ops.convert_to_numpy(exact.block_scores(space, table, block))
        if len(copies):  # a product need not give equal columns equal results in their last bit
            scores = np.array(scores)
            scores[:, copies] = scores[:, originals]
        return scores

    rows = max(1, min(memory_budget // (12 * size), count))  # three at once: in use, coming, and its copy
    for block, scores in exact.one_ahead(scores_of, count, rows):
        for query in range(block.start, block.stop):
            row = scores[query - block.start].copy()
            if task.own is not None:
                row[task.own[query]] = -np.inf
            if task.relevance.most_ignored:
                row[task.relevance.ignored_rows(query)] = -np.inf
            for end, level in task.by_level.items():
                relevant = level.relevance.rows_of(query)
                relevant = relevant[row[relevant] > -np.inf]
                if len(relevant):
                    yield query, end, 1 + np.sort(_images_before(row, relevant))


def _copies(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of rows that equal an earlier one, and of the first that they equal."""
    rows = np.ascontiguousarray(rows) + np.float32(0)  # so that -0 has the bytes of 0
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    originals = first[inverse]
    copies = np.flatnonzero(originals != np.arange(len(rows)))
    return copies, originals[copies]


def _images_before(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """(R,) how many images come before each of `relevant`: better score, or the same and a lower row."""
    wanted = scores[relevant]
    if len(relevant) <= _COUNTED:
        pairs = zip(relevant, wanted, strict=True)
        return np.array([np.count_nonzero(scores[:row] >= x) + np.count_nonzero(scores[row:] > x) for row, x in pairs])
    ascending = np.sort(scores)
    not_better = np.searchsorted(ascending, wanted, "right")
    before = len(scores) - not_better
    for i in np.flatnonzero(not_better - np.searchsorted(ascending, wanted, "left") > 1):
        before[i] += np.count_nonzero(scores[: relevant[i]] == wanted[i])
    return before


def dataset_roles(dataset: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Which images are queries, and which are searched.

    Args:
        dataset: What has `labels` (N,), and `is_query` (N,) bool or None.

    Returns:
        The rows of the queries and those of the gallery; without roles all rows, and None: each against all others.

    Example:
        >>> dataset_roles(dataset)[1] is None
        True
    """
    if dataset.is_query is None:
        return np.arange(len(dataset.labels)), None
    return np.flatnonzero(dataset.is_query), np.flatnonzero(~dataset.is_query)


@dataclasses.dataclass(frozen=True)
class QueryValues:
    """Retrieval metrics of every query of a test set.

    Args:
        ids: (N,) uint64, which image each query is: the first eight bytes of the SHA-256 of its name.
        labels: (N,) int64 class ids of the queries.
        images: Checksum of the names, labels, roles and groups of all test images, so also of what is searched.
        values: Metric name to (N,) values; NaN where a query has nothing to find.

    Raises:
        UserError: They differ in number.

    Example:
        >>> ids, labels = np.array([7, 9], np.uint64), np.array([0, 0])
        >>> one = QueryValues(ids, labels, "sha256:a", {"recall@1": np.array([1.0, 0.0])})
        >>> one.difference_to(dataclasses.replace(one, ids=ids[::-1]))
        'the same queries in another order'
    """

    ids: np.ndarray
    labels: np.ndarray
    images: str
    values: Mapping[str, np.ndarray]

    def __post_init__(self):
        for name, column in {"labels": self.labels, **self.values}.items():
            if np.shape(column) != np.shape(self.ids) or np.ndim(column) != 1:
                raise UserError(f"{name} of shape {np.shape(column)} for ids of shape {np.shape(self.ids)}")

    @classmethod
    def of(cls, dataset: ImageDataset, values: Mapping[str, Any], directory: str | os.PathLike = "") -> QueryValues:
        """Those of a data set.

        Args:
            dataset: The images; with roles its queries alone have values.
            values: As `retrieval_per_query` returns them.
            directory: Where the data set lies: names count from there.
        """
        table = ImageTable.of([dataset], directory)
        queries, _ = dataset_roles(dataset)
        names = (table.names[i].encode("utf-8", "surrogateescape") for i in queries)
        ids = np.array([int.from_bytes(hashlib.sha256(name).digest()[:8], "little") for name in names], np.uint64)
        return cls(ids, dataset.labels[queries], table.checksum(), {name: np.asarray(v) for name, v in values.items()})

    @classmethod
    def read(cls, path: str | os.PathLike) -> QueryValues:
        """Those that `write` has written.

        Raises:
            UserError: The file cannot be read, or is of something else.
        """
        with user_errors(Exception, f"{path} cannot be read: {REASON}"):  # whatever NumPy raises on a damaged file
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            ids, labels, images = (columns.pop(name) for name in ("ids", "labels", "images"))
            return cls(ids, labels, str(images), {name: column.astype(np.float64) for name, column in columns.items()})

    def write(self, path: Path) -> None:
        """Write them as a compressed .npz, values in single precision.

        Args:
            path: The file.
        """
        columns: dict[str, Any] = {name: values.astype(np.float32) for name, values in self.values.items()}
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, ids=self.ids, labels=self.labels, images=self.images, **columns)

    def difference_to(self, other: QueryValues) -> str:
        """Why the values of another run are not of the same queries, in words; empty where they are.

        Args:
            other: Those of the other run.
        """
        if len(self.ids) != len(other.ids):
            return f"{len(self.ids):,} queries and {len(other.ids):,}"
        if not np.array_equal(self.ids, other.ids):
            shared = len(np.intersect1d(self.ids, other.ids))
            if shared == len(np.unique(self.ids)):
                return "the same queries in another order"
            return f"of {len(self.ids):,} queries {shared:,} are the same images"
        if not np.array_equal(self.labels, other.labels):
            return "the same queries with other classes"
        if self.images != other.images:
            return "the same queries, searched among other images"
        return ""
