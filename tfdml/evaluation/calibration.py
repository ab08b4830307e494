"""Thresholds on distances: chosen, stored, read and applied, with what they were measured on."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.arguments import count_of_share
from tfdml.errors import ERROR_TEXT, UserError, check_share, user_errors
from tfdml.evaluation.drift import Baseline, Drift, compare_queries
from tfdml.evaluation.identification import Basis, Searches, largest_threshold
from tfdml.evaluation.intervals import Interval, mean_interval
from tfdml.evaluation.relevance import ids_or_names
from tfdml.evaluation.verification import AllPairs
from tfdml.names import short_fingerprint
from tfdml.retrieval.exact import check_embeddings

_LOGGER = logging.getLogger(__name__)
#: What a threshold can be calibrated to.
KINDS = ("fpir", "far", "precision")
TARGETS = tuple(f"{kind}=" for kind in KINDS)
# Images whose pairs show by how much other vectors move a threshold.
_MOST_IMAGES = 4_000
_FEWEST_PAIRS = 30
# The largest change of a Euclidean distance that counts as rounding.
_ROUNDING = 1e-4
_FEWEST_CLASSES = 8


# Choosing


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
    kind, _, written = text.partition("=")
    try:
        rate = float(written)
    except ValueError:
        rate = 0.0
    if kind not in kinds or not 0 < rate < 1:
        choices = " or ".join(f"{choice}=" for choice in kinds)
        example = f"{kinds[0]}=0.001"
        raise UserError(
            f"write {choices} and a number from 0 to 1, such as {example}", **{argument: text}
        )
    return {kind: rate}


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
    unknown: Any = None,
    distance: str = "euclidean",
    level: float = 0.95,
    prior: float | None = None,
    views: Any = None,
    per_class: str = "nearest",
    groups: Any = None,
) -> Calibration:
    """Chooses the threshold on the distance up to which an image is accepted.

    Use classes that the embedder was not trained on: on training classes the rates come out too
    good.

    For searches of a gallery, where a query meets all of its images:

    - `fpir`: the largest threshold at which at most this share of the queries of unknown classes is
      accepted. These are the queries whose class the gallery does not have, or those that `unknown`
      names. Where the gallery has the classes of all, each query also searches it without its own
      class. The rate grows with the gallery, whose size is stored.

    For pairs of images, one to one:

    - `far`: the largest threshold whose false accept rate is at most this.
    - `precision`: the largest threshold at which this share of the accepted pairs is of one class.

    The intervals are those of the rates that this threshold has on as many other classes of the
    same kind. They hold both the uncertainty of the choice and that of the other classes (twice the
    variance of these: see `verification`; of searches, the variance over the classes of the
    queries). Where each query searches without its own class, the gallery consists of other classes
    too, so that each class also counts as what queries find. The probability of "same" is
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
        unknown: For `fpir`: (N,) bool, which queries stand for unknown classes; None: the gallery's
            classes tell.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals.
        prior: The share of pairs of one class among the pairs that will be asked about, for the
            precision and the probability of "same"; None: that of these images.
        views: For `far` and `precision`, as `verification`: pairs of an image and a text, not of
            two images.
        per_class: For `fpir`: what stands for a class of the gallery. `nearest`: each image.
            `mean`: the mean of its images. `max_of_means`: the nearest of several means. See
            `tfdml.retrieval.Identities`. The threshold is that of this rule alone.
        groups: For the means: (G,) the group of each image of the gallery, such as its session.

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
    rates = {}
    for kind, rate in zip(KINDS, (fpir, far, precision), strict=True):
        if rate is not None:
            rates[kind] = rate
    if len(rates) != 1:
        raise UserError(
            "give one of fpir=, such as 0.01, far=, such as 0.001, and precision=, such as 0.99"
        )
    ((kind, rate),) = rates.items()
    check_share(**{kind: rate, "prior": 0.5 if prior is None else prior, "level": level})
    if fpir is not None:
        if not (prior is views is None):
            raise UserError("go with far= or precision=", prior=..., views=...)
        searches = Searches(
            embeddings,
            labels,
            gallery,
            gallery_labels,
            own_rows,
            unknown,
            distance,
            per_class,
            groups,
        )
        threshold = largest_threshold(searches.unknown, fpir, distance)
        rates_there = searches.rates(threshold, level, new_classes=True)
        basis, growth = searches.basis(), searches.growth(threshold, level)
        worst = searches.worst(threshold)
        calibration = Calibration(
            threshold, distance, kind, rate, rates_there, level, basis, worst, growth=growth
        )
        return dataclasses.replace(calibration, baseline=searches.baseline(threshold))
    if not (gallery is gallery_labels is own_rows is unknown is groups is None):
        raise UserError("go with fpir=", gallery=..., own_rows=..., unknown=..., groups=...)
    if per_class != "nearest":
        raise UserError("goes with fpir=: pairs are of two images", per_class=per_class)
    return _of_pairs(AllPairs(embeddings, labels, distance, views), kind, rate, level, prior)


def _of_pairs(
    pairs: AllPairs, kind: str, rate: float, level: float, prior: float | None
) -> Calibration:
    """Return the threshold of pairs for `far` or `precision`."""
    if kind == "far":
        threshold = _of_far(pairs, rate)
    else:
        threshold = _of_precision(pairs, rate, prior)
    (point,) = pairs.operating_points([threshold], level, new_classes=True, prior=prior)
    rates = {"far": point.far, "tar": point.tar, "precision": point.precision}
    same = int(pairs.histogram.positive.sum())
    different = int(pairs.histogram.negative.sum())
    basis = Basis(int(pairs.sizes.sum()), len(pairs.sizes), known=same, unknown=different)
    prior = same / (same + different) if prior is None else prior
    return Calibration(
        point.threshold,
        pairs.distance,
        kind,
        rate,
        rates,
        level,
        basis,
        point.worst,
        *_isotonic(pairs, prior),
        prior,
    )


def _of_far(pairs: AllPairs, far: float) -> float:
    """Return the largest threshold at which the share of accepted pairs of different classes is at
    most `far`."""
    count = int(pairs.histogram.negative.sum())
    allowed = count_of_share(far, count)
    if allowed < 1:
        fewest = count_of_share(1 / far, 1, up=True)
        raise UserError(
            f"far={far:g} needs at least {fewest:,} pairs of different classes, not {count:,}"
        )
    (threshold,), _ = pairs.thresholds([far])
    if threshold < 0 and pairs.distance != "dot":
        copies = (
            f"more than {allowed:,} of the {count:,} pairs of different classes are at distance 0"
        )
        raise UserError(
            f"far={far:g} cannot be kept to: {copies}; remove the copies, or correct their labels"
        )
    return threshold


def _of_precision(pairs: AllPairs, precision: float, prior: float | None) -> float:
    """Return the largest threshold at which this share of the accepted pairs is of one class.

    Args:
        pairs: The pairs.
        precision: The share.
        prior: The share of all pairs that is of one class; None: that of these pairs.
    """
    coarse = pairs.curve()
    weight = pairs.weight_of_different(prior)

    def is_reached(same: np.ndarray, different: np.ndarray) -> np.ndarray:
        return same >= count_of_share(precision, same + weight * different, up=True)

    bins = np.flatnonzero(pairs.histogram.positive + pairs.histogram.negative)
    enough = is_reached(coarse.same[bins], coarse.different[bins])
    last = np.max(np.flatnonzero(enough), initial=-1)
    # Within the next bin that holds a pair the precision may still be reached.
    curve = pairs.curve(bins[max(last, 0) : last + 2])
    holds_a_pair = np.diff(curve.same + curve.different, prepend=0) > 0
    good = np.flatnonzero(is_reached(curve.same, curve.different) & holds_a_pair)
    if not len(good):
        raise UserError(f"no threshold reaches precision={precision:g} on these images")
    # Up to the next distance, or the end of the bin, no further pair is accepted.
    starts = np.append(curve.starts, pairs.edges[-1])
    return max(pairs.below(starts[good[-1] + 1]), float(curve.ends[good[-1]]))


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


def images_of_drawn_classes(labels: Any, images: int) -> np.ndarray:
    """Return which images are of classes drawn at random, always the same, with at least so many
    images; all, where there are fewer.

    Args:
        labels: (N,) the classes.
        images: How many images.

    Example:
        >>> int(images_of_drawn_classes([0, 0, 1, 1, 2, 2], 3).sum())
        4
    """
    classes, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.random.default_rng(0).permutation(len(classes))
    enough = 1 + np.searchsorted(np.cumsum(counts[order]), images)
    return np.isin(places, order[:enough])


def _pairs_of_different_classes(
    before: AllPairs, after: AllPairs
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return of each pair of images of different classes both classes, the distance, and that
    between other vectors of the same images."""
    parts = []
    for (rows, columns, distances, counted), (_, _, others, _) in zip(
        before.tiles(), after.tiles(), strict=True
    ):
        first, second = np.broadcast_arrays(before.classes[rows, None], before.classes[columns])
        chosen = first != second
        chosen[...] &= True if counted is ... else counted
        values = (distances * before.scale, others * after.scale)
        parts.append([array[chosen] for array in (first, second, *values)])
    first, second, distances, others = map(np.concatenate, zip(*parts, strict=True))
    return first, second, distances, others


def _threshold_of_equal_count(
    first: np.ndarray, second: np.ndarray, accepted: np.ndarray, distances: np.ndarray
) -> tuple[float, float]:
    """Return the threshold that accepts as many pairs as others did, halfway to the next pair, and
    its variance over classes.

    The variance is that of the jackknife for pairs, each of which is of two classes (Snijders and
    Borgatti, 1999).

    Args:
        first: (P,) the class of one image of each pair, from 0.
        second: (P,) that of the other.
        accepted: (P,) bool, by the threshold on other vectors.
        distances: (P,) of the pairs.
    """
    order = np.argsort(distances, kind="stable")
    accepted, distances = accepted[order], distances[order]
    num_accepted = np.count_nonzero(accepted)

    def threshold_without(left_out: np.ndarray) -> float:
        """Return the threshold without the pairs at some places of the order, which ascend."""
        count = num_accepted - np.count_nonzero(accepted[left_out])
        last = len(distances) - len(left_out) - 1
        ranks = np.array([max(count - 1, 0), min(count, last)])
        # How many of those stand before the pair that has this rank among the rest.
        before = np.searchsorted(left_out - np.arange(len(left_out)), ranks, side="right")
        return float(distances[ranks + before].mean())

    classes = np.stack([first[order], second[order]], axis=1).ravel()
    ends = np.cumsum(np.bincount(classes))
    places_by_class = np.split(np.argsort(classes, kind="stable") // 2, ends[:-1])
    without = np.array([threshold_without(places) for places in places_by_class])
    num_classes = len(without)
    spread = float(np.square(without - without.mean()).sum())
    variance = (num_classes - 2) / (2 * num_classes) * spread
    return threshold_without(np.zeros(0, np.int64)), variance


# Storing, reading and applying


def _of_models(queries: str, gallery: str) -> str:
    """Return the models of a search in words."""
    model = short_fingerprint(queries)
    if queries == gallery:
        return f"one model ({model})"
    return f"model {model} in vectors of {short_fingerprint(gallery)}"


def _in_percent(rate: Interval) -> str:
    ends = f"{100 * rate.low:.3g}, {100 * rate.high:.3g}"
    return f"{100 * rate.mean:.3g} % [{ends}]"


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
            `far`, `tar` and `precision`, at the prior; of searches `fpir` and, where there are
            known queries, `tpir`, as `identification_rates`.
        level: The coverage of the intervals.
        basis: The gallery, the queries and the model that it was measured on.
        worst: `far` and `tar`, or `fpir` and `tpir`, of the tenth of the classes where it is the
            worst: what one threshold for all costs them.
        distances: (K,) distances, ascending, at which `probabilities` stand; none for `fpir`.
        probabilities: (K,) the probability that a pair at that distance is of one class, not
            ascending.
        prior: The share of pairs of one class that precision and probabilities assume.
        growth: For `fpir`: sizes of a gallery, and FPIR in one of each, see `fpir_among`.
        moved: Of a file whose vectors differ from those that were measured: the threshold with the
            interval of the difference, see `moved_to`. None: the threshold was measured.
        baseline: For `fpir`: what the queries found, see `watch`.

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
    basis: Basis
    worst: Mapping[str, float]
    distances: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), repr=False)
    probabilities: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), repr=False)
    prior: float | None = None
    growth: tuple[tuple[int, Interval], ...] = ()
    moved: Interval | None = None
    baseline: Baseline | None = dataclasses.field(default=None, repr=False)

    @property
    def target(self) -> str:
        """What was asked for, such as `far=0.001`."""
        return f"{self.kind}={self.rate:g}"

    def __str__(self) -> str:
        where = "in a gallery of" if self.kind == "fpir" else "between"
        parts = [
            f"{self.target}: {self.distance} distance at most {self.threshold:.9g} {where} "
            f"{self.basis}"
        ]
        for name, count in self.basis.counts().items():
            rate = self.rates.get(name)
            measured = "not measured: there are" if rate is None else f"{_in_percent(rate)} of"
            parts.append(f"{name} {measured} {count}")
            if name in self.worst:
                parts[-1] += f", {100 * self.worst[name]:.3g} % of the worst tenth of the classes"
        if self.growth:
            size, rate = self.growth[-1]
            among = f"among {size:,} {self.basis.unit}"
            parts.append(f"{among} fpir would be about {_in_percent(rate)}")
        if self.moved is not None:
            parts.append(
                f"moved to the vectors of a file [{self.moved.low:.6g}, {self.moved.high:.6g}]; "
                "the rates are those of the vectors before"
            )
        return "; ".join(parts)

    def same(self, distances: Any) -> np.ndarray:
        """Return whether pairs at these distances are called the same."""
        return np.asarray(distances, np.float64) <= self.threshold

    def probability(self, distances: Any) -> np.ndarray:
        """Return the probability that pairs at these distances are of one class."""
        return np.interp(np.asarray(distances, np.float64), self.distances, self.probabilities)

    def measured_on(
        self, gallery: str = "", queries: str = "", model: str = "", gallery_model: str = ""
    ) -> Calibration:
        """Return this calibration with more of what it was measured on, see `Basis`."""
        images = {"gallery": gallery, "queries": queries}
        models = {"model": model, "gallery_model": gallery_model}
        texts: dict[str, Any] = {name: text for name, text in {**images, **models}.items() if text}
        return dataclasses.replace(self, basis=dataclasses.replace(self.basis, **texts))

    def check_models(self, model: str, gallery_model: str) -> None:
        """Raise a `UserError` where one model searches vectors of another, or its own, and the
        threshold is not of that.

        Distances between the vectors of two models are others than those of either. A fingerprint
        that is not known (empty) fits any other.

        Args:
            model: The fingerprint of the model that embedded the queries.
            gallery_model: That of the gallery.
        """
        measured = self.basis.model, self.basis.gallery_model or self.basis.model
        searched = model, gallery_model
        if not all((*measured, *searched)):
            return
        crosses = searched[0] != searched[1]
        if crosses != (measured[0] != measured[1]) or (crosses and searched != measured):
            raise UserError(
                f"the threshold is of {_of_models(*measured)}, and the search of "
                f"{_of_models(*searched)}: measure one by tfdml evaluate --gallery=OLD --target"
            )

    def fpir_among(self, size: int) -> Interval | None:
        """Return FPIR in a gallery of another size of the same kind.

        Smaller galleries are parts of the one that was searched. Larger ones, up to ten times as
        large, continue how the rate grew.

        Args:
            size: The number of images; of classes, where the rule is not `nearest`.

        Returns:
            The rate; None where the size is further away, or the threshold is of pairs.

        Example:
            >>> images, labels = np.arange(40.0)[:, None] // 2, np.arange(40) // 2
            >>> calibration = tfdml.evaluation.calibrate(images + 0.1, labels, fpir=0.5)
            >>> calibration.fpir_among(100).mean >= calibration.fpir_among(40).mean
            True
        """
        if not self.growth or not self.growth[0][0] <= size <= self.growth[-1][0]:
            return None
        sizes = np.log([number for number, _ in self.growth])
        rates = np.array([rate for _, rate in self.growth])
        return Interval(*(float(np.interp(np.log(size), sizes, of)) for of in rates.T))

    def for_searches(
        self, distance: str, size: int | None = None, per_class: str = "nearest"
    ) -> Calibration:
        """Return this calibration if it holds for searches of a gallery.

        Where the gallery is larger by half than that of the calibration, a warning names the rate
        there: more of the queries of unknown classes are accepted.

        Args:
            distance: The distance of the search.
            size: The number of images of the gallery, or of classes, where the rule is not
                `nearest`; None: unknown.
            per_class: What stands for a class in the search.

        Raises:
            UserError: It is of pairs of images, of another distance or of another rule.
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
        if self.basis.per_class != per_class:
            raise UserError(
                f"the threshold is of per_class={self.basis.per_class!r}, the search of "
                f"{per_class!r}"
            )
        if size is not None and size >= 1.5 * self.basis.size:
            rate = self.fpir_among(size)
            share = "more" if rate is None else f"about {_in_percent(rate)}"
            _LOGGER.warning(
                "the threshold for %s is of a gallery of %s %s, and this one has %s: it "
                "accepts %s of the queries of unknown classes; calibrate again",
                *(self.target, f"{self.basis.size:,}", self.basis.unit, f"{size:,}", share),
            )
        return self

    def watch(
        self,
        embeddings: Any,
        gallery: Any,
        gallery_labels: Any,
        *,
        groups: Any = None,
        classes: Any = None,
        unknown_share: float | None = None,
        level: float = 0.95,
    ) -> Drift:
        """Compare later queries, such as those of a week, with the queries of the calibration.

        A share of unknown queries that is outside its interval has one of two causes: there are
        more strangers than before, or the images are different ones. Distances and classes found
        shift with both.

        Args:
            embeddings: (N, d) the later queries, by the model that was calibrated.
            gallery: (G, d) the gallery that was calibrated.
            gallery_labels: (G,) class ids (integers) or names.
            groups: (G,) as `calibrate`.
            classes: (N,) classes of the queries, of any kind, whose images are not independent;
                None: the classes that they find stand for them.
            unknown_share: The share of strangers that is expected; None: that of the queries of the
                calibration, or none where it searched for known classes alone.
            level: The chance that nothing is reported where nothing has changed.

        Returns:
            A `Drift`, three rows of one table.

        Raises:
            UserError: The calibration is of pairs, of another gallery, or was moved to the vectors
                of a file; embeddings or labels that `calibrate` refuses; or as `compare_queries`.

        Example:
            >>> images, labels = np.arange(40.0)[:, None] // 2, np.arange(40) // 2
            >>> calibration = tfdml.evaluation.calibrate(images + 0.1, labels, fpir=0.5)
            >>> calibration.watch(images + 0.1, images + 0.1, labels).has_shifted
            False
        """
        if self.baseline is None:
            raise UserError(
                f"{self.target} has no queries of a gallery to compare with: calibrate with "
                "fpir=0.01, by known queries or strangers"
            )
        if self.moved is not None:
            raise UserError(
                "the threshold was moved to the vectors of a file, and its queries were not: "
                "measure it by that file, tfdml evaluate --model=FILE --target=fpir=0.01"
            )
        gallery = check_embeddings(gallery, "gallery embeddings")
        labels = ids_or_names(gallery_labels, len(gallery), "gallery labels")
        codes = np.unique(labels, return_inverse=True)[1]
        num_classes = int(codes.max()) + 1
        sizes = len(gallery), num_classes
        expected = self.basis.images, self.basis.classes
        if sizes != expected or not self.baseline.is_of(gallery):
            raise UserError(
                f"the threshold is of another gallery, of {self.basis}, not of one of "
                f"{sizes[0]:,} images of {sizes[1]:,} classes: calibrate in this one"
            )
        # All search as strangers, of a class that the gallery does not have.
        queries = check_embeddings(embeddings)
        strangers = np.full(len(queries), num_classes)
        options: dict[str, Any] = {"per_class": self.basis.per_class, "groups": groups}
        searches = Searches(queries, strangers, gallery, codes, distance=self.distance, **options)
        return compare_queries(
            self.baseline,
            self.threshold,
            searches.unknown,
            searches.found,
            num_classes,
            clusters=None if classes is None else ids_or_names(classes, len(queries)),
            unknown_share=unknown_share,
            level=level,
        )

    def moved_to(self, before: Any, after: Any, labels: Any) -> Calibration:
        """Return the calibration for other vectors of the same images, such as those of a quantized
        file.

        The threshold becomes the one at which as many of the same pairs of images of different
        classes are accepted. Its interval comes from leaving out one class after the other (the
        jackknife for pairs: Snijders and Borgatti, 1999, "Non-parametric standard errors and tests
        for network statistics"). The rates stay: they were measured on the vectors before.

        Args:
            before: (N, d) vectors of images by the model that was measured.
            after: (N, d) the vectors of the same images that will be compared.
            labels: (N,) class ids of the images.

        Raises:
            UserError: Too few pairs are accepted to show the difference, or the images are of too
                few classes. Vectors that differ by no more than rounding need none: the threshold
                stays, with an interval as wide as they may move a distance.
        """
        before, after = check_embeddings(before), check_embeddings(after)
        errors = np.linalg.norm(np.float64(after) - before, axis=1)
        largest = 2 * float(errors.max())
        if largest <= _ROUNDING and self.distance == "euclidean":
            ends = self.threshold - largest, self.threshold + largest
            return dataclasses.replace(self, moved=Interval(self.threshold, *ends, 0.0))
        if self.basis.per_class != "nearest":
            rule = f"the threshold is of per_class={self.basis.per_class}"
            raise UserError(f"{rule}, which pairs of images cannot move: measure it by the file")
        rows = np.flatnonzero(images_of_drawn_classes(labels, _MOST_IMAGES))
        codes = np.unique(np.asarray(labels)[rows], return_inverse=True)[1]
        pairs = [AllPairs(vectors[rows], codes, self.distance) for vectors in (before, after)]
        first, second, distances, others = _pairs_of_different_classes(*pairs)
        accepted = distances <= self.threshold
        count, groups = int(accepted.sum()), int(codes.max()) + 1
        if count < _FEWEST_PAIRS or groups < _FEWEST_CLASSES:
            images = f"{len(codes):,} images of {groups:,} classes"
            raise UserError(
                f"{count:,} pairs of different classes among {images} are within it, too few to "
                f"show how other vectors move it: at least {_FEWEST_PAIRS:,} of {_FEWEST_CLASSES} "
                "classes are needed"
            )
        threshold, variance = _threshold_of_equal_count(first, second, accepted, others)
        moved = mean_interval(threshold, variance, groups - 1, self.level)
        return dataclasses.replace(self, threshold=threshold, moved=moved)

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as plain numbers and lists, for JSON; `from_dict` reads them."""
        plain = dataclasses.asdict(self)
        for name in ("distances", "probabilities"):
            plain[name] = plain[name].tolist()
        plain["rates"] = {name: list(rate) for name, rate in self.rates.items()}
        plain["growth"] = [[images, list(rate)] for images, rate in self.growth]
        plain["moved"] = self.moved and list(self.moved)
        plain["baseline"] = self.baseline and dataclasses.asdict(self.baseline)
        return plain

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
            f"{where}: the calibration cannot be used: {ERROR_TEXT}",
        ):
            if others := names.symmetric_difference(values):
                listed = ", ".join(sorted(others))
                raise ValueError(
                    f"it is of another version ({listed}): measure it again with tfdml evaluate "
                    "--target"
                )
            arrays = {
                name: np.asarray(values[name], float)
                for name in ("threshold", "distances", "probabilities")
            }
            if not all(np.isfinite(array).all() for array in arrays.values()):
                raise ValueError("its threshold or its curve is damaged")
            read: dict[str, Any] = {**values, **arrays, "threshold": float(values["threshold"])}
            read["rates"] = {name: Interval(*rate) for name, rate in values["rates"].items()}
            read["basis"] = Basis(**values["basis"])
            read["growth"] = tuple((int(size), Interval(*rate)) for size, rate in values["growth"])
            read["moved"] = values["moved"] and Interval(*values["moved"])
            read["baseline"] = values["baseline"] and Baseline.from_dict(values["baseline"])
            return cls(**read)


def stored_calibration(
    document: Mapping[str, Any], path: str | os.PathLike, queries: str = "images"
) -> Calibration | None:
    """Return the calibration that a JSON document holds.

    These are the results of `tfdml evaluate`, the cards of models and of retrievers, each entry of
    a model card's `artifacts`, and the description of an `Index`.

    Args:
        document: What the file holds.
        path: The file, for the message.
        queries: What is compared with images: `images` or `texts`.

    Returns:
        The calibration; None where the document has none.

    Raises:
        UserError: It is damaged, or of other queries.
    """
    stored = document.get("calibration")
    if stored is None:
        return None
    calibration = Calibration.from_dict(stored, path)
    if calibration.basis.queries != queries:
        raise UserError(
            f"{path} has the threshold of {calibration.basis.queries} as queries, not of {queries}"
        )
    return calibration


def calibration_in(
    document: Mapping[str, Any], path: str | os.PathLike, queries: str = "images"
) -> Calibration:
    """Return the calibration that a JSON document must hold, see `stored_calibration`.

    Raises:
        UserError: As `stored_calibration`, or there is none.
    """
    calibration = stored_calibration(document, path, queries)
    if calibration is None:
        raise UserError(f"{path} has no threshold: write one with tfdml evaluate and --target")
    return calibration


def choose_calibration(
    option: str,
    usual: str,
    measure: Callable[[dict[str, Any]], Calibration],
    read: Callable[[str], Mapping[str, Any]],
    report: Callable[[str], None],
) -> Calibration | None:
    """Return the threshold that an option means: `none`, a target, a JSON file, or `auto`.

    Args:
        option: See `ExportOptions.calibrate`.
        usual: The target of `auto`, which is none where it cannot be measured.
        measure: Chooses the threshold for a target, as `calibrate` takes it.
        read: Reads a JSON file.
        report: Called with what the threshold is, or why there is none.

    Raises:
        UserError: It cannot be measured, or the file has none.
    """
    if option == "none":
        return None
    try:
        if option == "auto" or option.startswith(TARGETS):
            with user_errors(UserError, f"the images cannot show the threshold: {ERROR_TEXT}"):
                calibration = measure(target_of(usual if option == "auto" else option, "calibrate"))
        else:
            calibration = calibration_in(read(option), option)
    except UserError as error:
        if option != "auto":
            raise
        report(f"no threshold: {error}")
        return None
    if calibration.distance != "euclidean":
        raise UserError(
            f"the threshold is of {calibration.distance} distances, not of Euclidean",
            calibrate=option,
        )
    report(str(calibration))
    return calibration
