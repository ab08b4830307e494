"""Decisions by distance: calibrated thresholds, queries of unknown classes, and classification by a
gallery."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.arguments import number, one_of
from tfdml.errors import REASON, UserError, check_positive, check_share, user_errors
from tfdml.evaluation.intervals import Interval, rate_interval
from tfdml.evaluation.relevance import ids_or_names, joined_labels
from tfdml.evaluation.verification import AllPairs
from tfdml.registry import DISTANCES
from tfdml.retrieval.exact import (
    check_dimensions,
    check_embeddings,
    nearest_neighbors,
    neighbor_blocks,
    unit_rows,
)

_LOGGER = logging.getLogger(__name__)
#: What a threshold can be calibrated to.
KINDS = ("fpir", "far", "precision")
TARGETS = tuple(f"{kind}=" for kind in KINDS)
WEIGHTS = ("uniform", "distance", "softmax")


def largest_threshold(distances: Any, fpir: float, distance: str) -> float:
    """Return the largest threshold within which at most this share of the distances lies.

    Args:
        distances: (Q,) float32, of queries of unknown classes to what they find.
        fpir: The share.
        distance: What the distances are.

    Raises:
        UserError: `fpir` is not between 0 and 1, below what so few queries can show, or exceeded by
            exact copies.
    """
    check_share(fpir=fpir)
    distances, allowed = (
        np.sort(np.asarray(distances, np.float32)),
        int(np.floor(fpir * len(distances))),
    )
    if allowed < 1:
        raise UserError(
            f"fpir={fpir:g} needs at least {1 / fpir:,.0f} queries of unknown classes, not "
            f"{len(distances):,}"
        )
    if distance != "dot" and distances[allowed] <= 0:
        copies = (
            f"{np.count_nonzero(distances <= 0):,} of {len(distances):,} queries have a copy in "
            "another class"
        )
        raise UserError(f"no threshold reaches fpir={fpir:g}: {copies}; find them with tfdml audit")
    return float(np.nextafter(distances[allowed], np.float32(-np.inf)))


class Searches:
    """The nearest image of a gallery to each query, and the nearest of those that are of other
    classes.

    Attributes:
        nearest: (Q,) float32 distance to the nearest image, which is not the query itself.
        right: (Q,) bool, whether that is of the query's class.
        known: (Q,) bool, whether the gallery has an image of the query's class, other than the
            query itself.
        unknown: (Q,) float32 distance to the nearest image of another class: what the query finds
            where its class is unknown.
        num_images: The number of images of the gallery.
        num_classes: The number of its classes.

    Args:
        embeddings: (Q, d) the queries.
        labels: (Q,) class ids (integers) or names.
        gallery: (G, d); None: the queries search one another.
        gallery_labels: (G,).
        own_rows: (Q,) the row of each query in the gallery, where it is one of its images.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.

    Raises:
        UserError: Embeddings that `nearest_neighbors` refuses, not one label for each, or a query
            without an image of another class in the gallery.
    """

    def __init__(
        self,
        embeddings: Any,
        labels: Any,
        gallery: Any = None,
        gallery_labels: Any = None,
        own_rows: Any = None,
        distance: str = "euclidean",
    ):
        embeddings = check_embeddings(embeddings)
        labels = ids_or_names(labels, len(embeddings))
        if gallery is None:
            gallery, gallery_labels, own_rows = embeddings, labels, np.arange(len(embeddings))
        gallery = check_embeddings(gallery, "gallery embeddings")
        gallery_labels = ids_or_names(gallery_labels, len(gallery), "gallery labels")
        codes = np.unique(joined_labels(gallery_labels, labels), return_inverse=True)[1]
        classes, self._own = codes[: len(gallery)], codes[len(gallery) :]
        sizes = np.bincount(classes, minlength=codes.max() + 1)
        self.num_images, self.num_classes = len(gallery), int(np.count_nonzero(sizes))
        if sizes[self._own].max() == len(gallery):
            raise UserError("the rates of unknown classes need a gallery of at least two classes")

        def nearest(**left_out: Any) -> tuple[np.ndarray, np.ndarray]:
            blocks = neighbor_blocks(
                embeddings, gallery, k=1, distance=distance, own_rows=own_rows, **left_out
            )
            parts = [(rows[:, 0], distances[:, 0]) for _, rows, distances in blocks]
            rows, distances = map(np.concatenate, zip(*parts, strict=True))
            return classes[rows], distances

        self._other, self.unknown = nearest(
            ignored=lambda block, rows: classes[rows] == self._own[block, None],
            most_ignored=int(sizes.max()),
        )
        closest, self.nearest = nearest()
        self.right = closest == self._own
        self.known = sizes[self._own] > (own_rows is not None)

    def rates(self, threshold: float, level: float, new_classes: bool) -> dict[str, Interval]:
        """Return `fpir`, and `tpir` where there are known queries, with intervals over the classes
        of the queries."""
        from scipy.sparse import coo_array

        accepted = self.unknown <= threshold
        shape = (max(self._own.max(), self._other.max()) + 1,) * 2
        ends = self._own[accepted], self._other[accepted]
        counts = coo_array((np.ones(len(ends[0])), ends), shape=shape).tocsr()
        # Two classes that lie near one another are falsely found by the queries of both.
        mutual = float(counts.multiply(counts.T).sum()) / len(accepted) ** 2
        rates = {"fpir": _over_classes(accepted, self._own, mutual, level, new_classes)}
        if self.known.any():
            answered = (self.right & (self.nearest <= threshold))[self.known]
            rates["tpir"] = _over_classes(answered, self._own[self.known], 0.0, level, new_classes)
        return rates


def _over_classes(
    hits: np.ndarray, classes: np.ndarray, mutual: float, level: float, new_classes: bool
) -> Interval:
    """Return the share of hits with its cluster-robust interval."""
    numbers = np.unique(classes, return_inverse=True)[1]
    groups, rate = int(numbers.max()) + 1, float(hits.mean())
    variance = np.square(np.bincount(numbers, weights=hits - rate) / len(hits)).sum() + mutual
    variance *= (2 if new_classes else 1) * groups / max(groups - 1, 1)
    return rate_interval(rate, variance, groups, level, groups)


def identification_rates(
    embeddings: Any,
    labels: Any,
    threshold: float,
    *,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    distance: str = "euclidean",
    level: float = 0.95,
) -> dict[str, Interval]:
    """Measures the rates of searches of a gallery at a given threshold, such as that of a
    `Calibration`.

    Args:
        embeddings: (Q, d) the queries.
        labels: (Q,) class ids (integers) or names.
        threshold: The largest distance of an accepted image.
        gallery: (G, d); None: the queries search one another.
        gallery_labels: (G,).
        own_rows: (Q,) the row of each query in the gallery, where it is one of its images.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals, which are over the classes of the queries.

    Returns:
        - `fpir`: false positive identification rate: the share of the queries for which an image of
            another class lies within the threshold, as if the query's class were unknown (NIST FRVT
            1:N; ISO/IEC 19795-1).
        - `tpir`: true positive identification rate, 1 - FNIR, also called detection and
            identification rate: the share of the queries of known classes whose nearest image is of
            the right class and within the threshold. Not where there is none.

    Raises:
        UserError: As `Searches`.

    Example:
        >>> gallery, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> rates = tfdml.evaluation.identification_rates(gallery, labels, 1.0)
        >>> rates["fpir"].mean, rates["tpir"].mean
        (0.0, 1.0)
    """
    check_share(level=level)
    searches = Searches(embeddings, labels, gallery, gallery_labels, own_rows, distance)
    return searches.rates(number("threshold", threshold), level, new_classes=False)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A threshold on a distance, chosen on held-out classes, and what to expect of it on other
    classes.

    Attributes:
        threshold: The largest distance that is accepted.
        distance: The distance.
        kind: What was asked for: `far` or `precision` of pairs of images, or `fpir` of searches of
            a gallery.
        rate: The rate that was asked for, such as 0.01.
        rates: Each rate at the threshold with the interval for as many other classes. Of pairs
            `far`, `tar` and `precision`, at the share of pairs of one class that the held-out
            images have; of searches `fpir` and `tpir`, as `identification_rates`.
        level: The coverage of the intervals.
        num_images: The number of images: held-out ones, or for `fpir` those of the gallery.
        num_classes: The number of their classes.
        distances: (K,) distances, ascending, at which `probabilities` stand; none for `fpir`.
        probabilities: (K,) the probability that a pair at that distance is of one class, not
            ascending.
        prior: The share of pairs of one class that the probabilities assume.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> calibration = tfdml.evaluation.calibrate(images, labels, far=0.3)
        >>> calibration.same([0.05, 6.0])
        array([ True, False])
    """

    threshold: float
    distance: str
    kind: str
    rate: float
    rates: Mapping[str, Interval]
    level: float
    num_images: int
    num_classes: int
    distances: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), repr=False)
    probabilities: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), repr=False)
    prior: float | None = None

    @property
    def target(self) -> str:
        """What was asked for, such as `far=0.001`."""
        return f"{self.kind}={self.rate:g}"

    def __str__(self) -> str:
        rates = [
            f"{name} {100 * rate.mean:.3g} % [{100 * rate.low:.3g}, {100 * rate.high:.3g}]"
            for name, rate in sorted(self.rates.items())
        ]
        where = "in a gallery of" if self.kind == "fpir" else "measured on"
        size = f"{self.num_images:,} images of {self.num_classes:,} classes"
        return (
            f"{self.target}: {self.distance} distance at most {self.threshold:.9g}; {where} "
            f"{size}; {', '.join(rates)}"
        )

    def same(self, distances: Any) -> np.ndarray:
        """Return whether pairs at these distances are called the same."""
        return np.asarray(distances, np.float64) <= self.threshold

    def probability(self, distances: Any) -> np.ndarray:
        """Return the probability that pairs at these distances are of one class."""
        return np.interp(np.asarray(distances, np.float64), self.distances, self.probabilities)

    def for_searches(self, distance: str, num_images: int | None = None) -> Calibration:
        """Return this calibration if it holds for searches of a gallery.

        Where the gallery is larger by half than that of the calibration, a warning says so: more of
        the queries of unknown classes are then accepted.

        Args:
            distance: The distance of the search.
            num_images: The number of images of the gallery; None: unknown.

        Raises:
            UserError: It is of pairs of images, or of another distance.
        """
        if self.kind != "fpir":
            raise UserError(
                f"{self.target} is a rate of pairs of images, not of searches: calibrate with "
                "fpir=0.01"
            )
        if self.distance != distance:
            raise UserError(
                f"the threshold is of distance={self.distance!r}, the search of {distance!r}"
            )
        if num_images is not None and num_images >= 1.5 * self.num_images:
            _LOGGER.warning(
                "the threshold for %s is of a gallery of %s images, and this one has %s: it "
                "accepts more queries of "
                "unknown classes; calibrate again",
                *(self.target, f"{self.num_images:,}", f"{num_images:,}"),
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as plain numbers and lists, for JSON; `from_dict` reads them."""
        plain = dataclasses.asdict(self)
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in plain.items()
        } | {"rates": {name: list(rate) for name, rate in self.rates.items()}}

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: str | os.PathLike = "from_dict"
    ) -> Calibration:
        """Create the calibration that `to_dict` wrote.

        Args:
            values: What it wrote.
            where: The file that holds it, for the message.

        Raises:
            UserError: A value is missing, unknown or damaged.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        with user_errors(
            (TypeError, ValueError, AttributeError),
            f"{where}: the calibration cannot be used: {REASON}",
        ):
            if set(values) != names:
                raise ValueError(
                    f"a calibration has the values {', '.join(sorted(names))}, not "
                    f"{', '.join(values)}"
                )
            numbers = {
                name: np.asarray(values[name], float)
                for name in ("threshold", "distances", "probabilities")
            }
            if not all(np.isfinite(number).all() for number in numbers.values()):
                raise ValueError("its threshold or its curve is damaged")
            rates = {name: Interval(*rate) for name, rate in values["rates"].items()}
            return cls(
                **{**values, **numbers, "threshold": float(values["threshold"]), "rates": rates}
            )


def target_of(text: str, argument: str = "target", kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Return the argument of `calibrate` that a text names.

    Args:
        text: One of the kinds, `=` and a number.
        argument: The argument that has the text, for the message.
        kinds: Those that are accepted.

    Raises:
        UserError: It is none, or the number is not between 0 and 1.

    Example:
        >>> target_of("far=0.001")
        {'far': 0.001}
    """
    match = re.fullmatch(rf"({'|'.join(kinds)})=([\d.]+(?:e-?\d+)?)", text)
    if match is None or not 0 < float(match[2]) < 1:
        choices = " or ".join(f"{kind}=" for kind in kinds)
        example = f"{kinds[0]}=0.001"
        raise UserError(
            f"write {choices} and a number from 0 to 1, such as {example}", **{argument: text}
        )
    return {match[1]: float(match[2])}


def calibrate(
    embeddings: Any,
    labels: Any,
    *,
    far: float | None = None,
    precision: float | None = None,
    fpir: float | None = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    distance: str = "euclidean",
    level: float = 0.95,
    prior: float | None = None,
    views: Any = None,
) -> Calibration:
    """Chooses the threshold on the distance up to which an image is accepted.

    Use classes that the embedder was not trained on: on training classes the rates come out too
    good.

    For searches of a gallery, where a query meets all of its images:

    - `fpir`: the largest threshold at which at most this share of the queries of unknown classes is
      accepted. Each query searches the gallery without its own class. The rate grows with the
      gallery, whose size is stored.

    For pairs of images, one to one:

    - `far`: the largest threshold whose false accept rate is at most this.
    - `precision`: the largest threshold at which this share of the accepted pairs is of one class.

    The intervals are those of the rates that this threshold has on as many other classes of the
    same kind. They hold both the uncertainty of the choice and that of the other classes (twice the
    variance of these: see `verification`; of searches, the variance over the classes of the
    queries, and of classes that are found by one another's queries). The probability of "same" is
    the isotonic regression of "same" on the distance over all pairs (Zadrozny and Elkan, 2002,
    "Transforming classifier scores into accurate multiclass probability estimates"), in the 2**20
    bins of `verification`.

    Args:
        embeddings: (N, d), of held-out classes.
        labels: (N,) class ids (integers); for `fpir` also names.
        far: The false accept rate to keep to. Give one of the three.
        precision: The precision to keep to.
        fpir: The false positive identification rate to keep to.
        gallery: For `fpir`: (G, d), which the embeddings search; None: they search one another.
        gallery_labels: (G,).
        own_rows: (N,) the row of each query in the gallery, where it is one of its images.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals.
        prior: The share of pairs of one class among the pairs that will be asked about; None: that
            of these images.
        views: For `far` and `precision`, as `verification`: pairs of an image and a text, not of
            two images.

    Returns:
        A `Calibration`.

    Raises:
        UserError: Not exactly one of the rates, a rate outside 0 to 1, a rate that these images
            cannot show or reach, an argument of another rate, or embeddings and labels that
            `verification` or `Searches` refuses.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> calibration = tfdml.evaluation.calibrate(images, labels, precision=0.9)
        >>> 0.1 <= calibration.threshold < 4.9, calibration.rates["tar"].mean
        (True, 1.0)
        >>> tfdml.evaluation.calibrate(images, labels, fpir=0.25).rates["fpir"].mean
        0.0
    """
    rates = {
        kind: rate
        for kind, rate in zip(KINDS, (fpir, far, precision), strict=True)
        if rate is not None
    }
    if len(rates) != 1:
        raise UserError(
            "give one of fpir=, such as 0.01, far=, such as 0.001, and precision=, such as 0.99"
        )
    ((kind, rate),) = rates.items()
    check_share(**{kind: rate, "prior": 0.5 if prior is None else prior, "level": level})
    if fpir is not None:
        if not (prior is views is None):
            raise UserError("go with far= or precision=", prior=..., views=...)
        searches = Searches(embeddings, labels, gallery, gallery_labels, own_rows, distance)
        threshold = largest_threshold(searches.unknown, fpir, distance)
        rates_there = searches.rates(threshold, level, new_classes=True)
        size = searches.num_images, searches.num_classes
        return Calibration(threshold, distance, kind, rate, rates_there, level, *size)
    if not (gallery is gallery_labels is own_rows is None):
        raise UserError("go with fpir=", gallery=..., gallery_labels=..., own_rows=...)
    pairs = AllPairs(embeddings, labels, distance, views)
    same, different = pairs.histogram.positive, pairs.histogram.negative
    threshold = _of_far(pairs, rate) if kind == "far" else _of_precision(pairs, rate)
    (point,) = pairs.operating_points([threshold], level, new_classes=True)
    prior = float(same.sum() / (same.sum() + different.sum())) if prior is None else prior
    return Calibration(
        point.threshold,
        distance,
        kind,
        rate,
        {name: getattr(point, name) for name in ("far", "tar", "precision")},
        level,
        int(pairs.sizes.sum()),
        len(pairs.sizes),
        *_isotonic(pairs, prior),
        prior,
    )


def _of_far(pairs: AllPairs, far: float) -> float:
    """Return the largest threshold at which the share of accepted pairs of different classes is at
    most `far`."""
    count = int(pairs.histogram.negative.sum())
    if far * count < 1:
        raise UserError(
            f"far={far:g} needs at least {1 / far:,.0f} pairs of different classes, not {count:,}"
        )
    (threshold,), _ = pairs.thresholds([far])
    if threshold < 0 and pairs.distance != "dot":
        copies = (
            f"more than {int(far * count):,} of the {count:,} pairs of different classes are at "
            "distance 0"
        )
        raise UserError(
            f"far={far:g} cannot be kept to: {copies}; remove the copies, or correct their labels"
        )
    return threshold


def _of_precision(pairs: AllPairs, precision: float) -> float:
    """Return the largest threshold at which this share of the accepted pairs is of one class."""
    coarse = pairs.curve()
    bins = np.flatnonzero(pairs.histogram.positive + pairs.histogram.negative)
    enough = coarse.same[bins] >= precision * (coarse.same + coarse.different)[bins]
    last = np.max(np.flatnonzero(enough), initial=-1)
    # Within the next bin that holds a pair the precision may still be reached.
    curve = pairs.curve(bins[max(last, 0) : last + 2])
    total = curve.same + curve.different
    good = np.flatnonzero((curve.same >= precision * total) & (np.diff(total, prepend=0) > 0))
    if not len(good):
        raise UserError(f"no threshold reaches precision={precision:g} on these images")
    # Up to the next distance, or the end of the bin, no further pair is accepted.
    return max(
        pairs.below(np.append(curve.starts, pairs.edges[-1])[good[-1] + 1]),
        float(curve.ends[good[-1]]),
    )


def _isotonic(pairs: AllPairs, prior: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots of the probability of "same" by distance, as if the pairs of one class were
    a share `prior`."""
    same, different = pairs.histogram.positive, pairs.histogram.negative
    same, different = same * prior / same.sum(), different * (1 - prior) / different.sum()
    weights = same + different
    some = weights > 0
    edges = pairs.histogram.edges
    centers = (edges[:-1] + edges[1:])[some] / 2
    from sklearn.isotonic import IsotonicRegression

    regression = IsotonicRegression(increasing=False)
    regression.fit(centers, same[some] / weights[some], sample_weight=weights[some])
    return regression.X_thresholds_, regression.y_thresholds_


def warn_of_indistinct(
    vectors: np.ndarray, classes: np.ndarray, distance: str, *, first: int = 0
) -> None:
    """Warn of vectors that cannot stand for a class: equal ones of two classes, and those without a
    direction.

    Of two equal vectors the later is never the nearest alone. A vector of length 0 has one cosine,
    or product, with every query.

    Args:
        vectors: (N, d) float32 that queries are compared with.
        classes: (N,) the class of each, an id or a name.
        distance: What they are compared by.
        first: The row from which on the vectors are new.

    Example:
        >>> warn_of_indistinct(np.eye(2, dtype=np.float32), np.array(["cat", "dog"]), "cosine")
    """
    points = unit_rows(vectors) if distance == "cosine" else vectors
    # Without the sign of zeros, which are equal.
    points = np.asarray(points, np.float32) + np.float32(0)
    keys = np.array([hash(point.tobytes()) for point in points], np.int64)
    _, starts, places = np.unique(keys, return_index=True, return_inverse=True)
    earlier, new = starts[places], np.arange(len(points)) >= first
    is_zero = ~points.any(axis=1) & (distance in ("cosine", "dot"))
    twins = np.flatnonzero(new & ~is_zero & (classes != classes[earlier]))
    # The keys of others may be equal.
    twins = twins[np.all(points[twins] == points[earlier[twins]], axis=1)]
    if len(twins):
        later, sooner = classes[[twins[0], earlier[twins[0]]]].tolist()
        logging.warning(
            "%d of %d vectors equal one of another class, the first is %r, which equals %r: of the "
            "two classes only one is answered; join them, or tell them apart",
            *(len(twins), len(points), later, sooner),
        )
    zeros = np.flatnonzero(new & is_zero)
    if len(zeros):
        logging.warning(
            "%d of %d vectors have length 0, the first is of class %r: no query is near to it "
            "rather than to others; leave it out, or embed it from something else",
            *(len(zeros), len(points), *classes[zeros[:1]].tolist()),
        )


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a classifier answers for each query.

    Attributes:
        labels: (Q,) the class, or the classifier's `unknown` where nothing of it is near enough.
        closed: (Q,) the class as if every query were of a known one.
        distances: (Q,) the distance to the nearest image, or to the center, of that class.
        confidences: (Q,) the share of the votes for that class, 0 to 1.
    """

    labels: np.ndarray
    closed: np.ndarray
    distances: np.ndarray
    confidences: np.ndarray


class KNNClassifier:
    """Classifies by a vote of the k nearest images of a gallery.

    Adding a class is adding its images: nothing is trained. A query whose nearest image of the
    class voted for is further away than the threshold is of no known class.

    Args:
        embeddings: (G, d) of the gallery.
        labels: (G,) class ids (integers) or names.
        k: The number of images that vote; all, where there are fewer.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        weights: What a vote weighs. `uniform`: 1. `distance`: the inverse of the distance (Dudani,
            1976). `softmax`: exp(-distance / temperature) (Wu et al., 2018, "Unsupervised feature
            learning via non-parametric instance discrimination").
        temperature: Of `softmax`.
        threshold: The largest distance of a known class: a `Calibration` from
            `calibrate(..., fpir=0.01)`, or a number in this `distance`. None: every query is of a
            known class. See also `fit_threshold`.

    Raises:
        UserError: The gallery is empty or has other labels than one a row; an argument is out of
            range; the calibration is of another distance, or of pairs.

    Example:
        >>> gallery, names = [[0.0], [0.1], [5.0]], ["cat", "cat", "dog"]
        >>> classifier = tfdml.evaluation.KNNClassifier(gallery, names, k=1, distance="euclidean",
        ...     threshold=1.0)
        >>> classifier.classify([[0.2], [5.1], [9.0]]).labels.tolist()
        ['cat', 'dog', 'unknown']
    """

    def __init__(
        self,
        embeddings: Any,
        labels: Any,
        *,
        k: int = 5,
        distance: str = "euclidean",
        weights: str = "softmax",
        temperature: float = 0.07,
        threshold: float | Calibration | None = None,
    ):
        check_positive(k=k)
        if not temperature > 0:
            raise UserError(f"temperature must be above 0; got {temperature}")
        self.k, self.weights, self.temperature = k, one_of("weights", weights, WEIGHTS), temperature
        self._calibration = threshold if isinstance(threshold, Calibration) else None
        if isinstance(threshold, Calibration):
            threshold = threshold.threshold
        self.threshold = None if threshold is None else number("threshold", threshold)
        self.distance = one_of("distance", distance, DISTANCES)
        if self.distance == "dot" and self.weights == "distance":
            raise UserError(
                "weights='distance' are inverse distances, which negative products are not: take "
                "softmax"
            )
        self.embeddings = np.zeros((0, check_embeddings(embeddings).shape[1]), np.float32)
        self.labels = ids_or_names(labels, len(embeddings))[:0]
        self.add(embeddings, labels)

    def add(self, embeddings: Any, labels: Any) -> None:
        """Add images of known or of new classes to the gallery.

        Args:
            embeddings: (n, d).
            labels: (n,) class ids or names.

        Raises:
            UserError: Embeddings that are not finite or of another dimension, or not one label per
                embedding.
        """
        embeddings = check_embeddings(embeddings)
        check_dimensions(embeddings, self.embeddings)
        present = len(self.labels)
        self.labels = joined_labels(self.labels, ids_or_names(labels, len(embeddings)))
        self.embeddings = np.concatenate([self.embeddings, embeddings])
        if self._calibration is not None:
            self._calibration.for_searches(self.distance, len(self.labels))
        self._update(present)

    @property
    def unknown(self) -> Any:
        """What stands for "none of these": -1, or "unknown" where classes have names."""
        return -1 if self.labels.dtype.kind in "iu" else "unknown"

    @property
    def classes(self) -> np.ndarray:
        """The classes, sorted."""
        return np.unique(self.labels)

    def fit_threshold(self, queries: Any, *, fpir: float = 0.01) -> float:
        """Chooses the threshold from queries of classes that are not in the gallery.

        Args:
            queries: (Q, d) embeddings of unknown classes, other ones than those that the classifier
                is measured on.
            fpir: The share of them that may be taken for a known class.

        Returns:
            The threshold, in the classifier's `distance`, which it uses from now on.

        Raises:
            UserError: `fpir` is not between 0 and 1, or below what so few queries can show.
        """
        self.threshold = largest_threshold(self.classify(queries).distances, fpir, self.distance)
        return self.threshold

    def classify(self, queries: Any) -> Predictions:
        """Return the class of each query.

        Args:
            queries: (Q, d) embeddings.

        Raises:
            UserError: Embeddings that are not finite or of another dimension.
        """
        closed, distances, confidences = self._votes(check_embeddings(queries, "queries"))
        known = (
            np.ones(len(closed), bool) if self.threshold is None else distances <= self.threshold
        )
        labels = np.where(known, self._names[closed], self.unknown)
        return Predictions(labels, self._names[closed], distances, confidences)

    def _update(self, present: int) -> None:
        """Find the classes, and check the vectors beyond those that were present before."""
        self._names, self._places = np.unique(self.labels, return_inverse=True)
        warn_of_indistinct(self.embeddings, self.labels, self.distance, first=present)

    def _votes(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Place of the class, distance and confidence of each query."""
        k = min(self.k, len(self.embeddings))
        rows, distances = nearest_neighbors(queries, self.embeddings, k=k, distance=self.distance)
        classes = self._places[rows]
        if self.weights == "uniform":
            weights = np.ones(distances.shape)
        elif self.weights == "distance":
            # Those at distance 0 alone vote, if there are any.
            exact = distances <= 0
            weights = np.where(
                exact.any(axis=1, keepdims=True), exact, 1 / np.where(exact, 1.0, distances)
            )
        else:
            weights = np.exp(-(distances - distances[:, :1]).astype(np.float64) / self.temperature)
        # (Q, k): the votes of the class of each neighbor; the nearest of equal classes wins.
        votes = np.stack(
            [np.sum(weights * (classes == classes[:, [i]]), axis=1) for i in range(k)], axis=1
        )
        best = np.argmax(votes, axis=1)
        every = np.arange(len(queries))
        return (
            classes[every, best],
            distances[every, best],
            votes[every, best] / weights.sum(axis=1),
        )


class CentroidClassifier(KNNClassifier):
    """Classifies by the nearest class center: the mean of a class's images (Snell et al., 2017,
    prototypes).

    With `cosine` and `dot`, images are scaled to length 1 before the mean.

    Args:
        embeddings: (G, d) of the gallery.
        labels: (G,) class ids (integers) or names.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        temperature: Of the softmax over the distances to the centers, which is the confidence.
        threshold: The largest `distance` to the center of a known class. A `Calibration` is of the
            distances between images, which are larger: use `fit_threshold`. None: every query is of
            a known class.

    Raises:
        UserError: As `KNNClassifier`, or the threshold is a `Calibration`.

    Example:
        >>> classifier = tfdml.evaluation.CentroidClassifier([[0.0], [0.2], [5.0]], [3, 3, 8],
        ...     distance="euclidean")
        >>> classifier.add([[9.0]], [12])  # a new class
        >>> classifier.classify([[0.2], [8.0]]).labels.tolist()
        [3, 12]
    """

    def __init__(
        self,
        embeddings: Any,
        labels: Any,
        *,
        distance: str = "euclidean",
        temperature: float = 0.07,
        threshold: float | None = None,
    ):
        if isinstance(threshold, Calibration):
            raise UserError(
                "a calibration is of distances between images, not to a center: use fit_threshold"
            )
        super().__init__(
            embeddings, labels, distance=distance, temperature=temperature, threshold=threshold
        )

    def _update(self, present: int) -> None:
        self._names, self._places = np.unique(self.labels, return_inverse=True)
        points = (
            unit_rows(self.embeddings) if self.distance in ("cosine", "dot") else self.embeddings
        )
        sums = np.zeros((len(self._names), points.shape[1]))
        np.add.at(sums, self._places, points)
        self.centers = (sums / np.bincount(self._places)[:, None]).astype(np.float32)
        warn_of_indistinct(self.centers, self._names, self.distance)

    def _votes(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, distances = nearest_neighbors(
            queries, self.centers, k=len(self.centers), distance=self.distance
        )
        weights = np.exp(-(distances - distances[:, :1]).astype(np.float64) / self.temperature)
        return rows[:, 0], distances[:, 0], 1 / weights.sum(axis=1)


def evaluate_classification(
    classifier: Any, queries: Any, labels: Any, *, fpirs: Sequence[float] = (0.01, 0.1)
) -> dict[str, float]:
    """Measures a classifier on queries of known classes, and of unknown ones where there are any.

    A query is known where its class is in the gallery. It is accepted at a threshold where its
    distance is at most it.

    - `accuracy`: the share of the known queries whose class is found, as if there were no threshold
      (micro).
    - `macro_accuracy`: the mean over classes of that share.
    - `auroc`: the probability that a known query is nearer than an unknown one.
    - `oscr`: the area under the share of known queries that are accepted and correct, over the
      share of unknown queries that are accepted (Dhamija et al., 2018, "Reducing network
      agnostophobia").
    - `fnir@fpir=x`: the least share of the known queries that are refused or wrong, where at most x
      of the unknown queries are accepted (ISO/IEC 19795-1).
    - With the classifier's threshold: `known_accepted` (accepted and correct) and
      `unknown_accepted`, shares.

    Args:
        classifier: A `KNNClassifier` or `CentroidClassifier`.
        queries: (Q, d) embeddings.
        labels: (Q,) class ids or names.
        fpirs: The false positive identification rates to report.

    Raises:
        UserError: Not one label per query, or no query of a known class.

    Example:
        >>> classifier = tfdml.evaluation.KNNClassifier([[0.0], [5.0]], [3, 8], k=1,
        ...     distance="euclidean")
        >>> measures = tfdml.evaluation.evaluate_classification(classifier, [[0.1], [5.1], [9.0]],
        ...     [3, 8, 12])
        >>> measures["accuracy"], measures["auroc"], measures["oscr"]
        (1.0, 1.0, 1.0)
    """
    from sklearn.metrics import roc_auc_score

    predictions = classifier.classify(queries)
    labels = ids_or_names(labels, len(predictions.labels))
    known = np.isin(labels, classifier.classes)
    if not known.any():
        raise UserError("no query is of a class in the gallery")
    right = (predictions.closed == labels)[known]
    _, classes = np.unique(labels[known], return_inverse=True)
    of_class = np.bincount(classes, weights=right) / np.bincount(classes)
    measures = {
        "accuracy": float(right.mean()),
        "macro_accuracy": float(of_class.mean()),
        "num_known": int(known.sum()),
        "num_unknown": int((~known).sum()),
    }
    if classifier.threshold is not None:
        accepted = predictions.distances <= classifier.threshold
        measures["known_accepted"] = float((accepted[known] & right).mean())
        if not known.all():
            measures["unknown_accepted"] = float(accepted[~known].mean())
    if known.all():
        return measures
    distances, unknown = predictions.distances[known], np.sort(predictions.distances[~known])
    measures["auroc"] = float(roc_auc_score(known, -predictions.distances))
    # Of each correct query, the share of unknown ones that are further away; ties count half.
    beyond = 1 - (
        np.searchsorted(unknown, distances, "left") + np.searchsorted(unknown, distances, "right")
    ) / 2 / len(unknown)
    measures["oscr"] = float((beyond * right).sum() / len(right))
    for fpir in fpirs:
        check_share(fpirs=fpir)
        # Below the first distance that would be one unknown query too many.
        limit = unknown[int(np.floor(fpir * len(unknown)))]
        measures[f"fnir@fpir={fpir:g}"] = float(1 - (right & (distances < limit)).mean())
    return measures
