"""Drift: whether later queries find in a gallery what those of a calibration found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_share
from tfdml.evaluation.intervals import Interval, freedom_of, new_rate_interval

# A distribution of distances is kept as at most so many quantiles.
_QUANTILES = 128
# Coordinates of the gallery's center that tell it from others.
_COORDINATES = 8
_SAME_CENTER = 1e-3
# Of a share: an interval may have no width, where all queries find the same.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Spread:
    """How much a value differs between the classes of queries.

    Attributes:
        correlation: The intraclass correlation, the share of the variance that is between classes.
        freedom: The degrees of freedom of the variance of the mean, see `freedom_of`.
    """

    correlation: float
    freedom: float

    @classmethod
    def of(cls, values: np.ndarray, classes: np.ndarray) -> Spread:
        """Measure values (N,) of queries of classes (N,), by the analysis of variance."""
        numbers = np.unique(classes, return_inverse=True)[1]
        sizes = np.bincount(numbers)
        groups, count = len(sizes), len(values)
        deviations = values - values.mean()
        sums = np.bincount(numbers, weights=deviations)
        freedom = freedom_of(sums)
        if not 1 < groups < count:
            return cls(0.0, max(freedom, 1.0))
        of_classes = float((np.square(sums) / sizes).sum())
        between = of_classes / (groups - 1)
        within = (float(np.square(deviations).sum()) - of_classes) / (count - groups)
        usual_size = (count - float(np.square(sizes).sum()) / count) / (groups - 1)
        total = between + (usual_size - 1) * within
        correlation = (between - within) / total if total > 0 else 0.0
        return cls(float(np.clip(correlation, 0.0, 1.0)), freedom)


@dataclasses.dataclass(frozen=True)
class QueryProfile:
    """What known queries, or strangers, found in a gallery.

    Attributes:
        count: The number of queries.
        classes: To how many classes of one size theirs amount: the squared number of queries by the
            sum of the squared numbers of the classes.
        refused: The share of queries that the threshold refuses.
        refusal: How that differs between classes.
        rank: How the ranks of the distances differ between classes.
        distances: (K,) quantiles of the distances to what they found, of equal shares.
    """

    count: int
    classes: float
    refused: float
    refusal: Spread
    rank: Spread
    distances: tuple[float, ...]

    @classmethod
    def of(cls, distances: np.ndarray, classes: np.ndarray, threshold: float) -> QueryProfile:
        """Describe queries by their distances (N,) and classes (N,)."""
        count = len(distances)
        refused = (distances > threshold).astype(np.float64)
        sizes = np.unique(classes, return_counts=True)[1]
        ordered = np.sort(np.float64(distances))
        number = min(count, _QUANTILES)
        places = (np.arange(number) + 0.5) / number
        quantiles = ordered[np.int64(places * count)]
        of_one_size = count**2 / float(np.square(sizes).sum())
        refusal = Spread.of(refused, classes)
        rank = Spread.of(_ranks(ordered, distances), classes)
        share = float(refused.mean())
        return cls(count, of_one_size, share, refusal, rank, tuple(quantiles.tolist()))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QueryProfile:
        """Create the profile that `dataclasses.asdict` made plain."""
        read = dict(values)
        read["refusal"] = Spread(**values["refusal"])
        read["rank"] = Spread(**values["rank"])
        read["distances"] = tuple(values["distances"])
        return cls(**read)

    def mean_variance(self, variance: float, spread: Spread) -> float:
        """Return the variance of the mean of a value of these queries."""
        between = spread.correlation / self.classes
        return variance * (between + (1 - spread.correlation) / self.count)


def _ranks(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the share of ordered numbers below each value; equal ones count half."""
    below = np.searchsorted(ordered, values, side="left")
    upto = np.searchsorted(ordered, values, side="right")
    return (below + upto) / (2 * len(ordered))


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What the queries of a calibration found, in numbers with which later ones are compared.

    Attributes:
        known: The known queries; None where there were none.
        unknown: The strangers; None where they were known queries, in a search without their class.
        found: Of each class of the gallery that an accepted query found: by how many known queries
            and by how many strangers, and how many classes are alike in that.
        center: Coordinates of the center of the gallery, which tell it from others.
    """

    known: QueryProfile | None
    unknown: QueryProfile | None
    found: tuple[tuple[int, int, int], ...]
    center: tuple[float, ...]

    @classmethod
    def of(
        cls, known: QueryProfile | None, unknown: QueryProfile | None, found: Any, gallery: Any
    ) -> Baseline:
        """Describe queries.

        Args:
            known: The known queries.
            unknown: The strangers.
            found: (2, C) how many accepted known queries and strangers found each class.
            gallery: (G, d) its vectors.
        """
        pairs, classes = np.unique(found[:, found.any(axis=0)], axis=1, return_counts=True)
        rows = np.column_stack([pairs.T, classes]).tolist()
        return cls(known, unknown, tuple(map(tuple, rows)), center_of(gallery))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Baseline:
        """Create the baseline that `dataclasses.asdict` made plain."""
        read = dict(values)
        for name in ("known", "unknown"):
            read[name] = values[name] and QueryProfile.from_dict(values[name])
        read["found"] = tuple(map(tuple, values["found"]))
        read["center"] = tuple(values["center"])
        return cls(**read)

    def is_of(self, gallery: np.ndarray) -> bool:
        """Whether a gallery (G, d) has the vectors that were searched."""
        center = np.array(center_of(gallery))
        scale = float(np.abs(self.center).max(initial=1e-12))
        same_dim = len(center) == len(self.center)
        return same_dim and bool(
            np.allclose(center, self.center, rtol=0, atol=_SAME_CENTER * scale)
        )

    def parts(self, unknown_share: float | None) -> list[Part]:
        """Return known queries and strangers, each with its share.

        Args:
            unknown_share: The share of strangers; None: as many as there were.
        """
        sides = {"known": self.known, "unknown": self.unknown}
        counts = {name: side.count if side else 0 for name, side in sides.items()}
        if unknown_share is None:
            unknown_share = counts["unknown"] / sum(counts.values())
        shares = {"known": 1 - unknown_share, "unknown": unknown_share}
        parts = []
        for column, (name, side) in enumerate(sides.items()):
            if side is not None:
                queries = np.array([row[column] for row in self.found], np.int64)
                parts.append(Part(shares[name], side, name == "known", queries))
            elif shares[name] > 0:
                raise UserError(
                    f"the calibration has no {name} queries: measure it with such, or leave the "
                    "share out",
                    unknown_share=unknown_share,
                )
        return parts


def center_of(gallery: np.ndarray) -> tuple[float, ...]:
    """Return the first coordinates of the mean of vectors (G, d)."""
    center = np.asarray(gallery[:, :_COORDINATES], np.float64).mean(axis=0)
    return tuple(center.tolist())


@dataclasses.dataclass(frozen=True)
class Part:
    """The known queries, or the strangers, of a calibration.

    Attributes:
        share: Which share of later queries they stand for.
        profile: What they found.
        is_known: Whether they are known.
        found: (R,) how many of them found each class of a row of `Baseline.found`.
    """

    share: float
    profile: QueryProfile
    is_known: bool
    found: np.ndarray


@dataclasses.dataclass(frozen=True)
class DriftRow:
    """A number of the queries of a calibration and of later ones.

    Attributes:
        name: What it is.
        baseline: That of the calibration, as a fraction.
        now: That of the later queries.
        low: The lower end of the interval in which it is expected.
        high: The upper end.
    """

    name: str
    baseline: float
    now: float
    low: float
    high: float

    @property
    def has_shifted(self) -> bool:
        """Whether it is outside its interval, by more than rounding."""
        return not self.low - _ROUNDING <= self.now <= self.high + _ROUNDING

    def __str__(self) -> str:
        text = f"  {self.name:<46}{100 * self.baseline:9.2f}{100 * self.now:9.2f}"
        mark = "  shifted" if self.has_shifted else ""
        return f"{text}   {100 * self.low:6.2f} to {100 * self.high:6.2f}{mark}"


@dataclasses.dataclass(frozen=True)
class Drift:
    """How later queries differ from those of a calibration.

    Attributes:
        rows: The numbers: the share of unknown queries, how often one is further from the gallery
            than before, and the share of the gallery's classes that they find.
        count: The number of queries.
        clusters: To how many classes of one size theirs amount.
        compared: Of how many queries the classes found are compared.
        level: The chance that no row is outside its interval where nothing has changed.
    """

    rows: tuple[DriftRow, ...]
    count: int
    clusters: float
    compared: int
    level: float

    @property
    def has_shifted(self) -> bool:
        """Whether any row is outside its interval."""
        return any(row.has_shifted for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for JSON."""
        return {**dataclasses.asdict(self), "has_shifted": self.has_shifted}

    def __str__(self) -> str:
        head = f"  {'in percent':<46}{'baseline':>9}{'now':>9}   interval"
        lines = [head, *map(str, self.rows)]
        return "\n".join(lines)


def compare_queries(
    baseline: Baseline,
    threshold: float,
    distances: np.ndarray,
    found: np.ndarray,
    num_classes: int,
    clusters: Any = None,
    unknown_share: float | None = None,
    level: float = 0.95,
) -> Drift:
    """Compare what later queries find in a gallery with what those of a calibration found.

    Each interval is where the number is expected, from the variance of both samples, which for
    either is that over its classes. Each of the three has the level 1 - (1 - level) / 3, so that
    where nothing has changed all hold with the probability `level` at least (Bonferroni).

    - `refused, so unknown`: the share of queries that the threshold refuses.
    - `further from the gallery than before`: the share of pairs of a later query and one of the
      calibration in which the later one is further from what it finds (Mann and Whitney, 1947).
    - `classes that queries find`: the share of the gallery's classes that an accepted query finds,
      for as many queries on both sides (rarefaction: Hurlbert, 1971).

    Args:
        baseline: What the queries of the calibration found.
        threshold: Its threshold.
        distances: (N,) of each later query to the nearest image.
        found: (N,) the class of that image, from 0.
        num_classes: The number of the gallery's classes.
        clusters: (N,) the classes of the queries; None: those that they find stand for them.
        unknown_share: The share of strangers that is expected; None: that of the calibration.
        level: See above.

    Raises:
        UserError: The calibration had no queries of a kind that is expected.
    """
    check_share(level=level)
    parts = baseline.parts(unknown_share)
    sizes = np.unique(found if clusters is None else clusters, return_counts=True)[1]
    count = len(distances)
    of_one_size = count**2 / float(np.square(sizes).sum())
    # Images of one class come together, as far as the classes are known.
    arrivals = count if clusters is None else of_one_size
    comparison = _Comparison(
        parts, count, of_one_size, arrivals, num_classes, level=1 - (1 - level) / 3
    )
    is_refused = distances > threshold
    classes = np.array([row[2] for row in baseline.found], np.int64)
    coverage, compared = comparison.coverage(classes, found[~is_refused])
    refusals = comparison.refusals(float(is_refused.mean()))
    rows = (refusals, comparison.ranks(distances), coverage)
    return Drift(rows, count, of_one_size, compared, level)


@dataclasses.dataclass(frozen=True)
class _Values:
    """A value of the queries of a part: its mean, variance, and spread over classes."""

    mean: float
    variance: float
    spread: Spread


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Compares later queries with the parts of a calibration.

    Args:
        parts: Known queries and strangers.
        count: The number of later queries.
        clusters: To how many classes of one size theirs amount.
        arrivals: How many of them are known, or not, each for itself.
        num_classes: The number of classes of the gallery.
        level: Of each interval.
    """

    parts: list[Part]
    count: int
    clusters: float
    arrivals: float
    num_classes: int
    level: float

    def refusals(self, now: float) -> DriftRow:
        """Return the share of queries that the threshold refuses."""
        values = []
        for part in self.parts:
            share = part.profile.refused
            values.append(_Values(share, share * (1 - share), part.profile.refusal))
        return self._row("refused, so unknown", values, now)

    def ranks(self, distances: np.ndarray) -> DriftRow:
        """Return how often a later query is further from what it finds."""
        points = np.concatenate([part.profile.distances for part in self.parts])
        weights = []
        for part in self.parts:
            number = len(part.profile.distances)
            weights.append(np.full(number, part.share / number))
        order = np.argsort(points, kind="stable")
        points, total = points[order], np.append(0.0, np.cumsum(np.concatenate(weights)[order]))

        def ranks_of(distances: Any) -> np.ndarray:
            """Return the share of the calibration's queries below each; equal ones count half."""
            below = np.searchsorted(points, distances, side="left")
            upto = np.searchsorted(points, distances, side="right")
            return (total[below] + total[upto]) / 2

        values = []
        for part in self.parts:
            ranks = ranks_of(part.profile.distances)
            values.append(_Values(float(ranks.mean()), float(ranks.var()), part.profile.rank))
        now = float(ranks_of(distances).mean())
        return self._row("further from the gallery than before", values, now)

    def _row(self, name: str, values: list[_Values], now: float) -> DriftRow:
        """Return a mean of the queries, with the interval in which that of later ones is."""
        pairs = list(zip(self.parts, values, strict=True))
        mean = sum(part.share * value.mean for part, value in pairs)
        variance = measured = below = 0.0
        for part, value in pairs:
            own = part.share**2 * part.profile.mean_variance(value.variance, value.spread)
            measured += own
            below += own**2 / value.spread.freedom
            variance += own + self._variance_of_later(part, value, mean)
        # Of a sum of variances (Welch, 1947).
        freedom = measured**2 / below if below else 1.0
        groups = min(self.clusters, *(part.profile.classes for part in self.parts)) / 2
        mean = float(np.clip(mean, 0.0, 1.0))
        interval = new_rate_interval(mean, max(variance, 0.0), freedom, self.level, groups)
        return DriftRow(name, mean, now, interval.low, interval.high)

    def _variance_of_later(self, part: Part, value: _Values, mean: float) -> float:
        """Return what a part adds to the variance of the mean of later queries."""
        of_classes = value.variance * value.spread.correlation
        variance = part.share * of_classes / self.clusters
        variance += part.share * (value.variance - of_classes) / self.count
        variance += part.share * (value.mean - mean) ** 2 / self.arrivals
        if part.is_known:  # both samples are of the same classes of the gallery
            variance -= 2 * part.share**2 * of_classes / self.num_classes
        return variance

    def coverage(self, classes: np.ndarray, found: np.ndarray) -> tuple[DriftRow, int]:
        """Return the share of classes found, by as many queries on both sides, and by how many.

        Where images of one class come together, they find fewer: the lower end is that of as many
        queries as there are classes of one size.

        Args:
            classes: (R,) the number of classes of each row of `Baseline.found`.
            found: (A,) the class that each accepted later query found.
        """
        most = [part.profile.count / part.share for part in self.parts if part.share]
        compared = int(min(self.count, *most))
        expected = self._coverage_by(classes, compared)
        together = self._coverage_by(classes, min(round(self.arrivals), compared))
        counts = np.unique(found, return_counts=True)[1]
        now = float((1 - _chance_of_none(counts, self.count, compared)).sum()) / self.num_classes
        ends = together.low, expected.high
        return DriftRow("classes that queries find", expected.mean, now, *ends), compared

    def _coverage_by(self, classes: np.ndarray, count: int) -> Interval:
        """Return which share of the classes so many queries find."""
        missed = np.ones(len(classes))
        chances = np.zeros(len(classes))
        largest = 0.0
        for part in self.parts:
            total = part.profile.count
            drawn = min(round(part.share * count), total)
            missed *= _chance_of_none(part.found, total, drawn)
            chances += part.share * part.found / total
            largest = max(largest, drawn / total)
        expected = min(float(classes @ (1 - missed)) / self.num_classes, 1.0)
        variance = _variance_of_found(classes, chances, count) / self.num_classes**2
        # Of a larger sample, of which so many are drawn, by its size smaller (Hoeffding, 1948).
        variance *= largest + min(count / self.arrivals, 1.0)
        return new_rate_interval(expected, variance, np.inf, self.level, self.num_classes / 2)


def _variance_of_found(classes: np.ndarray, chances: np.ndarray, count: int) -> float:
    """Return the variance of the number of classes that so many queries find, each with its
    chance."""
    none = np.power(1 - chances, count)
    independent = float(classes @ (none * (1 - none)))
    shared = count * float(classes @ (chances * none)) ** 2
    return max(independent - shared, 0.0)


def _chance_of_none(counts: np.ndarray, total: int, drawn: int) -> np.ndarray:
    """Return the chance that of `total` things none of `counts` is among `drawn`."""
    from scipy.special import gammaln

    left = total - counts
    possible = left >= drawn
    kept = np.maximum(left, drawn)
    logs = gammaln(kept + 1) - gammaln(kept - drawn + 1)
    logs -= gammaln(total + 1) - gammaln(total - drawn + 1)
    return np.where(possible, np.exp(logs), 0.0)
