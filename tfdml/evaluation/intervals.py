"""Confidence intervals of metrics over classes, queries or seeds, and of the differences between
two runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfdml.arguments import count_of_share
from tfdml.errors import UserError, check_choice, check_share
from tfdml.evaluation.relevance import ids_or_names

if TYPE_CHECKING:
    pass


RESAMPLED = ("classes", "queries")


# Of one run: metric name to (N,) values, as `retrieval_per_query` returns them.
PerQuery = Mapping[str, Any]


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

    Each resample draws as many classes (or queries) as there are, with replacement, and takes the
    mean of the queries drawn, a class with all of its queries as often as it was drawn. The
    interval holds the middle `level` of these means (Efron, 1979; for classes, the cluster
    bootstrap of Davison and Hinkley, 1997, section 3.8). The gallery and the model stay as they
    are.

    - `over="classes"`: how the metric would vary with other unseen classes of the same kind.
      Queries of one class share what makes it easy or hard, so this is the interval for the
      zero-shot protocol.
    - `over="queries"`: how it would vary with other images of these same classes as queries;
      narrower.

    To compare two models on the same queries, pass the differences of their values: an interval
    without 0 shows them apart.

    Args:
        per_query: Metric name to (N,) values, as `retrieval_per_query` returns; NaN in all metrics
            of a query: it is left out.
        labels: (N,) class ids of the queries.
        over: `"classes"` or `"queries"`.
        resamples: How many resamples.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the resampling; all metrics see the same resamples.

    Returns:
        An `Interval` per metric; its standard error is the standard deviation of the resamples'
        means. With one class (or one query) left every resample is the same and the interval has no
        width: a warning says so.

    Raises:
        UserError: No metric or no query with a value; values or labels that do not go together; an
            unknown `over`; `resamples` below 2; `level` not between 0 and 1.

    Example:
        >>> import numpy as np
        >>> hits = {"recall@1": np.array([1.0, 1.0, 0.0, 1.0])}
        >>> interval = confidence_intervals(hits, [0, 0, 1, 1], over="classes")["recall@1"]
        >>> interval.mean, interval.low, interval.high
        (0.75, 0.5, 1.0)
    """
    check_choice("over", over, RESAMPLED)
    if resamples < 2:
        raise UserError(f"resamples must be at least 2; got {resamples}")
    check_share(level=level)
    values, labels = _answered(per_query, labels)
    groups = (
        np.unique(labels, return_inverse=True)[1] if over == "classes" else np.arange(len(labels))
    )
    sizes = np.bincount(groups).astype(np.float64)
    if len(sizes) == 1:
        warnings.warn(f"intervals over {over} say nothing: there is one alone", stacklevel=2)
    sums = np.stack([np.bincount(groups, weights=column) for column in values.T], axis=1)

    rng = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    for i in range(resamples):
        groups_drawn = rng.integers(len(sizes), size=len(sizes))
        times_drawn = np.bincount(groups_drawn, minlength=len(sizes)).astype(np.float64)
        means[i] = times_drawn @ sums / (times_drawn @ sizes)
    ends = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    errors = means.std(axis=0, ddof=1)
    intervals = {}
    for j, name in enumerate(per_query):
        mean = float(values[:, j].mean())
        low, high = ends[:, j].tolist()
        intervals[name] = Interval(mean, low, high, float(errors[j]))
    return intervals


def _answered(per_query: Mapping[str, Any], labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """(n, metrics) values and (n,) labels of the queries that have values."""
    labels = ids_or_names(labels, len(labels))
    if not per_query:
        raise UserError("there is no metric to give an interval of")
    for name, column in per_query.items():
        if labels.ndim != 1 or np.shape(column) != labels.shape:
            raise UserError(
                f"{name} has values of shape {np.shape(column)} and labels have shape "
                f"{labels.shape}"
            )
    values = np.stack([np.asarray(column, np.float64) for column in per_query.values()], axis=1)
    missing = np.isnan(values)
    if not np.array_equal(missing.any(axis=1), missing.all(axis=1)):
        raise UserError(
            "the metrics differ in which queries have no value (NaN); give those of one search "
            "together"
        )
    keep = ~missing[:, 0]
    if not keep.any():
        raise UserError("no query has a value; an interval needs at least one")
    return values[keep], labels[keep]


def paired_differences(
    first: PerQuery | Sequence[PerQuery],
    second: PerQuery | Sequence[PerQuery],
    labels: Any,
    *,
    over: str = "classes",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """How much better the first model is than the second on the same queries, with bootstrap
    intervals.

    With x_si the metric of query i under the run of seed s of the first model, y_ti that under seed
    t of the second,

        d_i = 1/S sum_s x_si - 1/T sum_t y_ti,

    and the result is the mean of d_i over queries with its percentile bootstrap interval
    (`confidence_intervals`). The bootstrap has two levels, of which the upper one is resampled: a
    resample draws as many classes as there are, with replacement, each with all of its queries, and
    within a class every run of both sides answers the same queries and counts with equal weight.
    Seeds are averaged, not drawn: two or three are too few to draw from. So the interval says how
    the difference between these S and T trained networks would vary with other classes; how it
    varies with other seeds is what `seed_difference` says.

    Args:
        first: Metric name to (N,) values of one run, or a sequence of these, one for each seed; NaN
            in all metrics and all runs of a query: it is left out.
        second: The same of the other model; the number of seeds may be another.
        labels: (N,) class ids of the queries.
        over: `"classes"`, or `"queries"`: see `confidence_intervals`.
        resamples: How many resamples.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the resampling.

    Returns:
        An `Interval` for each metric that all runs have; positive where the first model is better.
        One without 0 shows them apart.

    Raises:
        UserError: A side without a run, no metric in common, or as `confidence_intervals`.

    Example:
        >>> labels = np.repeat([0, 1, 2], 2)
        >>> first, second = {"recall@1": np.ones(6)}, {"recall@1": np.array([1.0, 0.0, 1.0, 0.0,
        ...     1.0, 0.0])}
        >>> paired_differences(first, second, labels)["recall@1"].low
        0.5
    """
    sides = [[side] if isinstance(side, Mapping) else list(side) for side in (first, second)]
    if not all(sides):
        raise UserError("a comparison needs at least one run on each side")
    runs = sides[0] + sides[1]
    common = set(runs[0]).intersection(*runs[1:])
    metrics = [name for name in runs[0] if name in common]
    if not metrics:
        raise UserError("the runs have no metric in common to compare")
    for name in metrics:
        shapes = {np.shape(run[name]) for run in runs}
        if len(shapes) > 1:
            raise UserError(
                f"{name} has values of shapes {sorted(shapes)}; compare runs on the same queries"
            )
    differences = {}
    for name in metrics:
        first_mean = np.mean([run[name] for run in sides[0]], axis=0)
        differences[name] = first_mean - np.mean([run[name] for run in sides[1]], axis=0)
    return confidence_intervals(
        differences, labels, over=over, resamples=resamples, level=level, seed=seed
    )


def student_interval(values: Any, level: float = 0.95) -> Interval:
    """Return the mean of measurements, such as those of several seeds, with the interval of
    Student's distribution.

    mean +- t s / sqrt(S), with s the standard deviation of the S values (divisor S - 1) and t the
    quantile with S - 1 degrees of freedom. Of seeds: how the mean would vary with other seeds, on
    the same test images.

    Args:
        values: (S,) the metric of each seed.
        level: Coverage aimed at, between 0 and 1.

    Raises:
        UserError: Fewer than 2 values; `level` not between 0 and 1.

    Example:
        >>> [round(value, 3) for value in student_interval([0.5, 0.6, 0.7])]
        [0.6, 0.352, 0.848, 0.058]
    """
    count, mean, variance = _moments(values, level)
    return mean_interval(mean, variance / count, count - 1, level)


def seed_difference(first: Any, second: Any, level: float = 0.95) -> Interval:
    """Return the difference of a metric's means over the seeds of two models, with Welch's
    interval.

    With means m, n, variances s^2, r^2 (divisors S - 1, T - 1) and e^2 = s^2/S + r^2/T it is m - n
    +- t e, t the quantile of Student's distribution with e^4 / ((s^2/S)^2/(S-1) + (r^2/T)^2/(T-1))
    degrees of freedom (Welch, 1947): how the difference would vary with other seeds, on the same
    test images.

    Args:
        first: (S,) the metric of each seed of the first model.
        second: (T,) that of the second.
        level: Coverage aimed at, between 0 and 1.

    Raises:
        UserError: Fewer than 2 values of either; `level` not between 0 and 1.

    Example:
        >>> [round(value, 3) for value in seed_difference([0.5, 0.6, 0.7], [0.5, 0.5, 0.5])]
        [0.1, -0.148, 0.348, 0.058]
    """
    sides = [_moments(values, level) for values in (first, second)]
    parts = [variance / count for count, _, variance in sides]
    below = sum(part**2 / (count - 1) for part, (count, _, _) in zip(parts, sides, strict=True))
    # Without any spread the interval has no width, whatever the degrees of freedom.
    freedom = sum(parts) ** 2 / below if below else 1.0
    return mean_interval(sides[0][1] - sides[1][1], sum(parts), freedom, level)


def _moments(values: Any, level: float) -> tuple[int, float, float]:
    check_share(level=level)
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise UserError(f"Student's interval needs at least 2 values; got shape {values.shape}")
    return len(values), float(values.mean()), float(values.var(ddof=1))


def mean_interval(mean: float, variance: float, freedom: float, level: float) -> Interval:
    """Return an estimate with the interval of Student's distribution.

    Args:
        mean: The estimate.
        variance: Of the estimate.
        freedom: The degrees of freedom of the variance.
        level: The coverage.
    """
    error = float(np.sqrt(variance))
    half = _quantile(level, freedom) * error
    return Interval(mean, mean - half, mean + half, error)


def _quantile(level: float, freedom: float) -> float:
    """Return how many standard errors half an interval of Student's t is wide."""
    from scipy.stats import t as student  # takes a second, and a search needs no interval

    return float(student.ppf((1 + level) / 2, freedom))


def freedom_of(parts: np.ndarray) -> float:
    """Return the degrees of freedom of a variance that is a sum of squares over groups.

    They follow Satterthwaite (1946), 2 G / kurtosis - 1, as the kurtosis of few groups is estimated
    too low: G - 1 at most, and fewer where few groups, such as the classes that hold most errors,
    make up most of the sum.

    Args:
        parts: (G,) what each group contributes to the rate, with mean 0.

    Example:
        >>> freedom_of(np.array([1.0, -1.0, 1.0, -1.0]))
        3.0
        >>> round(freedom_of(np.array([9.0] + 9 * [-1.0])), 1)
        1.5
    """
    squares = np.square(np.asarray(parts, np.float64))
    most = float(len(squares) - 1)
    if not squares.any():
        return most
    kurtosis = len(squares) * float(np.square(squares).sum()) / float(squares.sum()) ** 2
    return min(most, max(1.0, 2 * len(squares) / kurtosis - 1))


def worst_tenth(hits: np.ndarray, counts: np.ndarray, *, highest: bool) -> float:
    """Return the mean rate of the tenth of the classes that have the highest, or the lowest, rates.

    The same images choose the classes and measure them, so that with few images of a class the rate
    is a little worse than that of the classes that are the worst in truth.

    Args:
        hits: (C,) of each class.
        counts: (C,) what they are a share of; classes without any are left out.
        highest: Whether a high rate is bad.

    Example:
        >>> worst_tenth(np.array([1, 2, 3]), np.array([4, 4, 4]), highest=True)
        0.75
    """
    some = counts > 0
    rates = np.sort(hits[some] / counts[some])
    number = count_of_share(0.1, len(rates), up=True)
    return float((rates[-number:] if highest else rates[:number]).mean())


def rate_interval(
    rate: float, variance: float, freedom: float, level: float, whole: float
) -> Interval:
    """Return a rate with its interval on the scale of log odds, with Student's t.

    Args:
        rate: From 0 to 1.
        variance: Of the rate.
        freedom: The degrees of freedom of the variance, see `freedom_of`.
        level: The coverage.
        whole: At a rate of 0 or 1, how many independent groups were without a case, or without any
            other.
    """
    from scipy.special import expit, logit

    rate, error = float(rate), float(np.sqrt(max(variance, 0.0)))
    if rate in (0.0, 1.0):
        beyond = 1 - ((1 - level) / 2) ** (1 / max(whole, 1))
        low, high = (0.0, beyond) if rate == 0 else (1 - beyond, 1.0)
        return Interval(rate, float(low), float(high), error)
    if freedom <= 0:
        return Interval(rate, 0.0, 1.0, error)
    width = _quantile(level, freedom) * error / (rate * (1 - rate))
    return Interval(
        rate, float(expit(logit(rate) - width)), float(expit(logit(rate) + width)), error
    )


def new_rate_interval(
    rate: float, variance: float, freedom: float, level: float, whole: float
) -> Interval:
    """Return a rate with the interval of the rate that as many other groups will have.

    The end towards the middle is that of `rate_interval`. The other groups may well have no case at
    all, which the scale of log odds never reaches. So the end towards 0, or 1, is on the scale on
    which the likelihood of a share is nearly normal, the integral of (p (1 - p))^(-2/3) (Anscombe,
    1964, "Normal likelihood functions").

    Args:
        rate: From 0 to 1.
        variance: Of the difference of both rates.
        freedom: As `rate_interval`.
        level: The coverage.
        whole: As `rate_interval`.

    Example:
        >>> interval = new_rate_interval(0.05, 0.05**2, 29, 0.95, 30)
        >>> round(interval.low, 3), round(interval.high, 3)
        (0.001, 0.312)
    """
    interval = rate_interval(rate, variance, freedom, level, whole)
    if rate in (0.0, 1.0) or freedom <= 0:
        return interval
    from scipy.special import beta, betainc, betaincinv

    third = 1 / 3
    slope = (rate * (1 - rate)) ** (third - 1) / beta(third, third)
    width = _quantile(level, freedom) * interval.standard_error * slope
    place = betainc(third, third, rate)
    if rate <= 0.5:
        low = betaincinv(third, third, max(place - width, 0.0))
        return interval._replace(low=float(low))
    high = betaincinv(third, third, min(place + width, 1.0))
    return interval._replace(high=float(high))
