"""The uncertainty of retrieval metrics: bootstrap intervals over queries or over classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfdml.errors import UserError

RESAMPLED = ("classes", "queries")


class Interval(NamedTuple):
    """A metric with its confidence interval, all fractions.

    Attributes:
        mean: The metric.
        low: Lower end of the interval.
        high: Upper end of the interval.
        standard_error: Estimated standard deviation of `mean`.
    """

    mean: float
    low: float
    high: float
    standard_error: float


def confidence_intervals(
    per_query: Mapping[str, Any],
    labels: Any,
    *,
    over: str = "classes",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Percentile bootstrap intervals of metrics that are means over queries.

    Each resample draws as many classes (or queries) as there are, with replacement, and takes the mean of the queries
    drawn, a class with all of its queries as often as it was drawn. The interval holds the middle `level` of these
    means (Efron, 1979; for classes, the cluster bootstrap of Davison and Hinkley, 1997, section 3.8). The gallery
    and the model stay as they are.

    - `over="classes"`: how the metric would vary with other unseen classes of the same kind. Queries of one class
      share what makes it easy or hard, so this is the interval for the zero-shot protocol.
    - `over="queries"`: how it would vary with other images of these same classes as queries; narrower.

    To compare two models on the same queries, pass the differences of their values: an interval without 0 shows
    them apart.

    Args:
        per_query: Metric name to (N,) values, as `retrieval_per_query` returns; NaN in all metrics of a query: it is
            left out.
        labels: (N,) class ids of the queries.
        over: `"classes"` or `"queries"`.
        resamples: How many resamples.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the resampling; all metrics see the same resamples.

    Returns:
        An `Interval` per metric; its standard error is the standard deviation of the resamples' means. With one class
        (or one query) left every resample is the same and the interval has no width: it then says nothing.

    Raises:
        UserError: No metric or no query with a value; values or labels that do not go together; an unknown `over`;
            `resamples` below 2; `level` not between 0 and 1.

    Example:
        >>> import numpy as np
        >>> hits = {"recall@1": np.array([1.0, 1.0, 0.0, 1.0])}
        >>> interval = confidence_intervals(hits, [0, 0, 1, 1], over="classes")["recall@1"]
        >>> interval.mean, interval.low, interval.high
        (0.75, 0.5, 1.0)
    """
    if over not in RESAMPLED:
        raise UserError(f"intervals are over {' or '.join(RESAMPLED)}; got {over!r}")
    if resamples < 2:
        raise UserError(f"resamples must be at least 2; got {resamples}")
    check_level(level)
    values, labels = _answered(per_query, labels)
    groups = np.unique(labels, return_inverse=True)[1] if over == "classes" else np.arange(len(labels))
    sizes = np.bincount(groups).astype(np.float64)
    sums = np.stack([np.bincount(groups, weights=column) for column in values.T], axis=1)

    rng = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    for i in range(resamples):
        times_drawn = np.bincount(rng.integers(len(sizes), size=len(sizes)), minlength=len(sizes)).astype(np.float64)
        means[i] = times_drawn @ sums / (times_drawn @ sizes)
    ends = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    errors = means.std(axis=0, ddof=1)
    return {
        name: Interval(float(values[:, j].mean()), float(ends[0, j]), float(ends[1, j]), float(errors[j]))
        for j, name in enumerate(per_query)
    }


def check_level(level: float) -> None:
    """Raise UserError where a confidence level is not between 0 and 1."""
    if not 0 < level < 1:
        raise UserError(f"level must be between 0 and 1, such as 0.95; got {level}")


def _answered(per_query: Mapping[str, Any], labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """(n, metrics) values and (n,) labels of the queries that have values."""
    labels = np.asarray(labels)
    if not per_query:
        raise UserError("there is no metric to give an interval of")
    for name, column in per_query.items():
        if labels.ndim != 1 or np.shape(column) != labels.shape:
            raise UserError(
                f"{name} has values of shape {np.shape(column)} and labels have shape {labels.shape}; "
                "give one value and one class id per query"
            )
    values = np.stack([np.asarray(column, np.float64) for column in per_query.values()], axis=1)
    missing = np.isnan(values)
    if not np.array_equal(missing.any(axis=1), missing.all(axis=1)):
        raise UserError("the metrics differ in which queries have no value (NaN); give those of one search together")
    keep = ~missing[:, 0]
    if not keep.any():
        raise UserError("no query has a value; an interval needs at least one")
    return values[keep], labels[keep]
