"""The table of metrics: what each is computed from, how, and what it is called; `metric` adds one.

A metric of the table works in `evaluate_retrieval`, `tfdml evaluate --metrics`, the selection of
checkpoints and the report.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_choice
from tfdml.registry import register, registered

#: Of each query, whether its nearest images are relevant; of each query, the ranks of all relevant
#: images; of all images, clusters.
NEEDS = ("neighbors", "ranking", "clusters")
PER_QUERY = NEEDS[:2]
# Without those that need a search or a sort of their own.
DEFAULT_METRICS = ("recall", "precision@1", "map@r", "r_precision", "nmi", "ami", "f1")
#: The K of `recall`, where the images suffice for them.
DEFAULT_KS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric; larger is better, at most 1.

    Args:
        name: By which it is asked for; `recall@K` is asked for with a number in place of K.
        needs: One of `NEEDS`.
        compute: See `metric`.
        title: What it is called in print.
        graded: See `metric`.
    """

    name: str
    needs: str
    compute: Callable[..., Any]
    title: str
    graded: bool = False


#: All metrics by name, in the order in which they are reported.
METRICS: dict[str, Metric] = {}


def metric(
    name: str, needs: str, *, title: str = "", graded: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the table of metrics. `tfdml.register("metric")` adds one that needs
    neighbors.

    What the function is called with, and returns, depends on `needs`:

    - `"neighbors"`: `(hits, matches)`, (B, K) bool, whether the i-th nearest image is relevant to a
      query, and (B,) how many relevant images there are, at least 1. It returns (B,) values. A name
      that ends in `@K` gets K columns; any other as many as a query has relevant images, or more.
    - `"ranking"`: `(ranks)`, (R,) ascending ranks, from 1, of all relevant images of one query. It
      returns a number.
    - `"clusters"`: `(labels, clusters)`, each (N,) integers. It returns a number.

    Args:
        name: By which it is asked for.
        needs: What it is computed from.
        title: What it is called in print; by default its name.
        graded: Whether it is called with `(ranks, levels, relevances)` for rankings of a hierarchy,
            see `hierarchical_average_precision`, and with `(ranks)` for those of each level.

    Raises:
        UserError: Another metric has this name, or `needs` is none of `NEEDS`.

    Example:
        >>> @tfdml.evaluation.metrics.metric("miss_rate@K", needs="neighbors")
        ... def miss_rate(hits, matches):
        ...     return ~hits.any(axis=1)
        >>> points, labels = [[0.0], [1.0], [5.0]], [3, 3, 8]
        >>> tfdml.evaluation.evaluate_retrieval(points, labels,
        ...     metrics=["miss_rate@1"])["miss_rate@1"]
        0.0
    """
    check_choice("needs", needs, NEEDS)

    def add(compute: Callable[..., Any]) -> Callable[..., Any]:
        register("metric", name=name)(compute)
        METRICS[name] = Metric(name, needs, compute, title or name, graded)
        return compute

    return add


def all_metrics() -> dict[str, Metric]:
    """Return the table, with those that are registered without a place in it at the end."""
    others = {
        name: compute for name, compute in registered("metric").items() if name not in METRICS
    }
    return METRICS | {
        name: Metric(name, "neighbors", compute, name) for name, compute in others.items()
    }


def find_metric(name: str, needs: Sequence[str] = NEEDS) -> tuple[Metric, int]:
    """Return the metric of a name such as `map@5`, and its K; 0 where it has none.

    Raises:
        UserError: There is none that needs one of these.
    """
    table = all_metrics()
    match = None if name in table else re.fullmatch(r"(.+)@([1-9]\d*)", name)
    key = f"{match[1]}@K" if match else name
    choices = [key for key, value in table.items() if value.needs in needs]
    if key not in choices or (match is None and key.endswith("@K")):
        check_choice("metrics", name, [choice for choice in ("recall", *choices) if choice != name])
    return table[key], int(match[2]) if match else 0


def ks_within(ks: Sequence[int], available: int) -> tuple[int, ...]:
    """Those K for which a query has enough images to be compared with; 1 where none is.

    Example:
        >>> ks_within((1, 10, 100), available=12)
        (1, 10)
    """
    return tuple(k for k in ks if k <= available) or (1,)


def metric_names(
    metrics: Sequence[str],
    ks: Sequence[int] | None = None,
    available: int = DEFAULT_KS[-1],
    needs: Sequence[str] = NEEDS,
) -> list[str]:
    """Return the names of the results, in the order of the table and of K.

    Args:
        metrics: The metrics that are asked for; `recall` stands for `recall@K` of every K of `ks`.
        ks: None for those of `DEFAULT_KS` for which the images suffice, with a warning if not all.
        available: How many images a query is compared with.
        needs: What the metrics may need.

    Raises:
        UserError: No metric, an unknown one, or K below 1.
    """
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    if not metrics:
        raise UserError(f"no metric is asked for; choose from recall, {', '.join(all_metrics())}")
    names = {name for name in metrics if name != "recall"}
    if "recall" in metrics:
        fitting = ks_within(DEFAULT_KS, available)
        if ks is None and fitting != DEFAULT_KS:
            few = f"a query is compared with {available} images"
            warnings.warn(
                f"recall@K is measured for K = {', '.join(map(str, fitting))} alone: {few}",
                stacklevel=3,
            )
        depths = np.asarray(fitting if ks is None else ks)
        if depths.ndim != 1 or not len(depths) or depths.min() < 1:
            raise UserError(
                f"ks must be a list of integers of at least 1, such as [1, 10]; got {ks}"
            )
        names |= {f"recall@{k}" for k in depths.tolist()}
    order = list(all_metrics())
    pairs = {name: find_metric(name, needs) for name in names}
    return sorted(pairs, key=lambda name: (order.index(pairs[name][0].name), pairs[name][1]))


# Of the nearest images


@metric("recall@K", "neighbors", title="Recall@K")
def _recall(hits: np.ndarray, matches: np.ndarray) -> np.ndarray:
    return np.any(hits, axis=1)


@metric("precision@K", "neighbors", title="Precision@K")
def _precision(hits: np.ndarray, matches: np.ndarray) -> np.ndarray:
    return hits.mean(axis=1)


@metric("map@K", "neighbors", title="MAP@K")
def _average_precision_at_k(hits: np.ndarray, matches: np.ndarray) -> np.ndarray:
    precision = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    return (precision * hits).sum(axis=1) / np.minimum(hits.shape[1], matches)


@metric("map@r", "neighbors", title="MAP@R")
def average_precision_at_r(hits: np.ndarray, matches: np.ndarray) -> np.ndarray:
    """Return 1/R sum_{i <= R} hit_i precision_i of every query.

    Args:
        hits: (B, K) bool, whether the i-th neighbor is relevant; K at least `matches.max()`.
        matches: (B,) R of every query, at least 1.
    """
    rank = np.arange(1, hits.shape[1] + 1)
    within = hits & (rank <= matches[:, None])
    precision = np.cumsum(within, axis=1) / rank
    return (precision * within).sum(axis=1) / matches


@metric("r_precision", "neighbors", title="R-precision")
def _r_precision(hits: np.ndarray, matches: np.ndarray) -> np.ndarray:
    return (hits & (np.arange(hits.shape[1]) < matches[:, None])).sum(axis=1) / matches


# Of the ranks of all relevant images


@metric("map", "ranking", title="mAP")
def _average_precision(ranks: np.ndarray) -> float:
    return float(np.mean(np.arange(1, len(ranks) + 1) / ranks))


@metric("minp", "ranking", title="mINP")
def _inverse_negative_penalty(ranks: np.ndarray) -> float:
    return len(ranks) / ranks[-1]


@metric("mrr", "ranking", title="MRR")
def _reciprocal_rank(ranks: np.ndarray) -> float:
    return 1 / ranks[0]


def _checked_ranks(ranks: Any, levels: Any) -> tuple[np.ndarray, np.ndarray]:
    ranks = np.asarray(ranks, np.int64)
    levels = np.ones(len(ranks), np.int64) if levels is None else np.asarray(levels, np.int64)
    if (
        ranks.ndim != 1
        or ranks.shape != levels.shape
        or not len(ranks)
        or (np.diff(ranks, prepend=0) < 1).any()
    ):
        raise UserError("ranks must be ascending from 1, at least one, with as many levels")
    return ranks, levels


@metric("h_ap", "ranking", title="H-AP", graded=True)
def hierarchical_average_precision(ranks: Any, levels: Any = None, relevances: Any = None) -> float:
    """Return the H-AP of one query (Ramzi et al., 2022, HAPPIER).

    H-AP = 1 / sum_k rel(k) sum_k 1/rank(k) sum_{j: rank(j) <= rank(k)} min(rel(j), rel(k)), over
    the relevant images. Of one level it is average precision.

    Args:
        ranks: (R,) places of the relevant images in the ranking, ascending, from 1.
        levels: (R,) how many levels of the hierarchy each shares with the query, 1 .. L; None: 1.
        relevances: (L + 1,) the relevance of an image by its level, 0 for level 0, never falling;
            None: the level.

    Example:
        >>> hierarchical_average_precision([1, 2], levels=[2, 1])
        1.0
        >>> hierarchical_average_precision([1, 2], levels=[1, 2])  # (1 + (1 + 2) / 2) / 3
        0.8333333333333334
    """
    ranks, levels = _checked_ranks(ranks, levels)
    gains = (
        levels.astype(np.float64)
        if relevances is None
        else np.asarray(relevances, np.float64)[levels]
    )
    shared = np.zeros(len(ranks))
    for gain in np.unique(gains):
        shared += np.minimum(gains, gain) * np.cumsum(gains == gain)
    return float((shared / ranks).sum() / gains.sum())


@metric("ndcg", "ranking", title="nDCG", graded=True)
def ndcg(ranks: Any, levels: Any = None, relevances: Any = None) -> float:
    """Return the normalized discounted cumulative gain of one query, over the whole gallery.

    DCG = sum_k (2^level(k) - 1) / log2(1 + rank(k)), divided by that of the best ranking (Järvelin
    and Kekäläinen, 2002, with the gain of Burges et al., 2005).

    Args:
        ranks: As `hierarchical_average_precision`.
        levels: As `hierarchical_average_precision`.
        relevances: Has no effect.

    Example:
        >>> ndcg([1, 2, 3], levels=[3, 1, 1])
        1.0
    """
    ranks, levels = _checked_ranks(ranks, levels)
    gains = np.exp2(levels) - 1
    best = np.sort(gains)[::-1] / np.log2(1 + np.arange(1, len(ranks) + 1))
    return float((gains / np.log2(1 + ranks)).sum() / best.sum())


def population_relevances(levels: np.ndarray, depth: int, itself: bool = False) -> np.ndarray:
    """(L + 1,) relevances of levels: l/L, shared by the images that have level l (Ramzi et al.,
    2022).

    Args:
        levels: (R,) as `hierarchical_average_precision`.
        depth: L, how many levels the hierarchy has.
        itself: Whether the query counts as one more image of level L. The authors' code counts it
            where all images are queries.

    Example:
        >>> population_relevances(np.array([2, 1, 1]), 2)
        array([0.  , 0.25, 1.  ])
    """
    counts = np.bincount(levels, minlength=depth + 1).astype(np.float64)
    counts[depth] += itself
    return np.arange(depth + 1) / depth / np.maximum(counts, 1)
