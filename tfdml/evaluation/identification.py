"""Identification: searches of a gallery by queries of known and of unknown classes, and their
rates at a threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdml.arguments import count_of_share, number
from tfdml.errors import UserError, check_share, counted
from tfdml.evaluation.drift import Baseline, QueryProfile
from tfdml.evaluation.intervals import (
    Interval,
    freedom_of,
    new_rate_interval,
    rate_interval,
    worst_tenth,
)
from tfdml.evaluation.relevance import ids_or_names, joined_labels
from tfdml.evaluation.verification import PairHistogram
from tfdml.labels import true_or_false
from tfdml.retrieval.exact import check_embeddings
from tfdml.retrieval.identities import Identities, each_class_once, group_numbers

# Of each stranger so many neighbors are looked at, for the classes that it finds.
_MOST_NEAR = 50
# How many times as large galleries are, of which a calibration has the rate.
_TIMES = (0.125, 0.25, 0.5, 1, 2, 4, 10)
#: The false positive identification rates of which `identification` reports the true ones.
FPIRS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


@dataclasses.dataclass(frozen=True)
class Basis:
    """What a threshold was measured on.

    Attributes:
        images: The number of images of the gallery; of pairs, of the images that were paired.
        classes: The number of their classes.
        known: The number of queries of classes of the gallery; of pairs, that of pairs of one
            class.
        unknown: The number of queries of unknown classes; of pairs, that of pairs of different
            classes.
        known_classes: The number of classes of the known queries; 0 for pairs.
        unknown_classes: The number of classes of the unknown queries; 0 for pairs.
        left_out: Whether the unknown queries are of classes of the gallery, and each searched it
            without its own class.
        gallery: What the images are, such as the address of a gallery; empty where it is not known.
        queries: `images` or `texts`.
        model: The fingerprint of the model that embedded them; empty where it is not known.
        gallery_model: That of the gallery, where another model embedded it; empty: `model`.
        per_class: What stands for a class: `nearest` (each image), `mean` or `max_of_means`, see
            `Identities`.
    """

    images: int
    classes: int
    known: int
    unknown: int
    known_classes: int = 0
    unknown_classes: int = 0
    left_out: bool = False
    gallery: str = ""
    queries: str = "images"
    model: str = ""
    gallery_model: str = ""
    per_class: str = "nearest"

    def __str__(self) -> str:
        rule = "" if self.per_class == "nearest" else f" by per_class={self.per_class}"
        name = f" ({self.gallery})" if self.gallery else ""
        return f"{counted(self.images, 'image')} of {self.classes:,} classes{rule}{name}"

    @property
    def size(self) -> int:
        """What the gallery is as large as: its images by `nearest`, else its classes."""
        return self.images if self.per_class == "nearest" else self.classes

    @property
    def unit(self) -> str:
        """What `size` counts."""
        return "images" if self.per_class == "nearest" else "classes"

    def counts(self) -> dict[str, str]:
        """Return what each rate is a share of, in words."""
        if not self.unknown_classes:
            return {
                "far": f"{counted(self.unknown, 'pair')} of different classes",
                "tar": f"{counted(self.known, 'pair')} of one class",
                "precision": "the accepted pairs",
            }
        without = ", each without its own class" if self.left_out else ""
        unknown = f"{self.unknown:,} unknown {self.queries} of {self.unknown_classes:,} classes"
        known = f"{self.known:,} known {self.queries} of {self.known_classes:,} classes"
        return {"fpir": unknown + without, "tpir": known}


def first_refused(distances: Any, share: float) -> np.float32:
    """Return the least distance at which more than a share of the distances would be accepted.

    Args:
        distances: (Q,) float32.
        share: The share, above 0 and below 1.

    Example:
        >>> float(first_refused([0.1, 0.2, 0.3, 0.4], 0.5))
        0.30000001192092896
    """
    ordered = np.sort(np.asarray(distances, np.float32))
    return ordered[min(count_of_share(share, len(ordered)), len(ordered) - 1)]


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
    distances = np.asarray(distances, np.float32)
    if count_of_share(fpir, len(distances)) < 1:
        fewest = count_of_share(1 / fpir, 1, up=True)
        raise UserError(
            f"fpir={fpir:g} needs at least {fewest:,} queries of unknown classes, not "
            f"{len(distances):,}"
        )
    refused = first_refused(distances, fpir)
    if distance != "dot" and refused <= 0:
        copies = (
            f"{np.count_nonzero(distances <= 0):,} of {len(distances):,} queries have a copy in "
            "another class"
        )
        raise UserError(f"no threshold reaches fpir={fpir:g}: {copies}; find them with tfdml audit")
    return float(np.nextafter(refused, np.float32(-np.inf)))


class Searches:
    """What queries of known and of unknown classes find in a gallery.

    Attributes:
        strangers: (S,) rows of the queries that stand for unknown classes.
        unknown: (S,) float32 distance of each to the nearest reference that is not of its class.
        found: (S,) the class of that reference, a number.
        known: (K,) rows of the queries whose class the gallery has, in another image than the query
            itself.
        nearest: (K,) float32 distance of each to the nearest reference.
        right: (K,) bool, whether that is of the query's class.
        left_out: Whether strangers are of classes of the gallery, and search it without them.
        num_images: The number of images of the gallery.
        num_classes: The number of its classes.

    Args:
        embeddings: (Q, d) the queries.
        labels: (Q,) class ids (integers) or names.
        gallery: (G, d); None: the queries search one another.
        gallery_labels: (G,).
        own_rows: (Q,) the row of each query in the gallery, where it is one of its images.
        unknown: (Q,) bool, which queries stand for unknown classes. None: those whose class the
            gallery does not have. If there is none, every query stands for a known class and, in a
            search without its own class, for an unknown one.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        per_class: What stands for a class, see `Identities`: `nearest` (each image), `mean` or
            `max_of_means`. A query that is an image of the gallery is in no mean that it meets.
        groups: (G,) the group of each image of the gallery, such as a session, for the means.

    Raises:
        UserError: Embeddings that `nearest_neighbors` refuses, not one label for each, a known
            query whose class the gallery does not have, a stranger without an image of another
            class in the gallery, or groups that `Identities` refuses.
    """

    def __init__(
        self,
        embeddings: Any,
        labels: Any,
        gallery: Any = None,
        gallery_labels: Any = None,
        own_rows: Any = None,
        unknown: Any = None,
        distance: str = "euclidean",
        per_class: str = "nearest",
        groups: Any = None,
    ):
        embeddings = check_embeddings(embeddings)
        labels = ids_or_names(labels, len(embeddings))
        if gallery is None:
            gallery, gallery_labels = embeddings, labels
            own_rows = np.arange(len(embeddings))
        gallery = check_embeddings(gallery, "gallery embeddings")
        gallery_labels = ids_or_names(gallery_labels, len(gallery), "gallery labels")
        codes = np.unique(joined_labels(gallery_labels, labels), return_inverse=True)[1]
        classes = codes[: len(gallery)]
        self._own = codes[len(gallery) :]
        numbers = group_numbers(groups, len(gallery))
        self._identities = Identities(gallery, classes, per_class, distance, numbers)
        self._gallery = gallery
        self._queries = embeddings
        self._own_rows = None if own_rows is None else np.asarray(own_rows)
        sizes = np.bincount(classes, minlength=codes.max() + 1)
        self.num_images = len(gallery)
        self.num_classes = int(np.count_nonzero(sizes))
        self._divide(sizes, unknown, labels)
        self.found, self._class_distances = self._search_strangers()
        self.unknown = self._class_distances[:, 0]
        self._found_by_known = np.zeros(0, np.int64)
        self.nearest = np.zeros(0, np.float32)
        if len(self.known):
            self._found_by_known, self.nearest = _nearest(self._search(self.known, 1))
        self.right = self._found_by_known == self._own[self.known]

    def _divide(self, sizes: np.ndarray, unknown: Any, labels: np.ndarray) -> None:
        """Tell strangers from known queries, see `Searches`; `sizes` are those of all classes."""
        is_stranger = _strangers(sizes[self._own] > 0, unknown, labels)
        is_known = sizes[self._own] > (self._own_rows is not None)
        if unknown is not None:
            is_known &= ~is_stranger
        self.strangers = np.flatnonzero(is_stranger)
        self.known = np.flatnonzero(is_known)
        largest = sizes[self._own[self.strangers]].max()
        self.left_out = bool(largest)
        if largest == self.num_images:
            raise UserError("the rates of unknown classes need a gallery of at least two classes")

    def _search(
        self, rows: np.ndarray, k: int, without: Any = None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield what some of the queries find, see `Identities.search_blocks`."""
        own_rows = None if self._own_rows is None else self._own_rows[rows]
        return self._identities.search_blocks(self._queries[rows], k, own_rows, without)

    def _search_strangers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (S,) the class that each stranger finds without its own, and (S, k) float32
        distances of the nearest classes: infinite where it finds fewer."""
        available = len(self._identities) - (self._own_rows is not None)
        k = min(_MOST_NEAR, available)
        nearest_classes = np.zeros(len(self.strangers), np.int64)
        distances = np.full((len(self.strangers), k), np.inf, np.float32)
        without = self._own[self.strangers]
        for block, near, far in self._search(self.strangers, k, without):
            nearest_classes[block] = near[:, 0]
            distances[block] = each_class_once(near, far, k)[1]
        return nearest_classes, distances

    def basis(self) -> Basis:
        """Return what a threshold of these searches is measured on."""
        known_classes = np.unique(self._own[self.known])
        unknown_classes = np.unique(self._own[self.strangers])
        basis = Basis(self.num_images, self.num_classes, len(self.known), len(self.strangers))
        return dataclasses.replace(
            basis,
            known_classes=len(known_classes),
            unknown_classes=len(unknown_classes),
            left_out=self.left_out,
            per_class=self._identities.per_class,
        )

    def rates(self, threshold: float, level: float, new_classes: bool) -> dict[str, Interval]:
        """Return `fpir`, and `tpir` where there are known queries, with intervals over the classes
        of the queries; of strangers that search without their class, also over those they find."""
        # A stranger that is let in depends on two classes, its own and the one that it finds; of a
        # known query both are one.
        class_pairs = {"fpir": self._pairs_alone(threshold), "tpir": np.zeros((2, 0), np.int64)}
        rates = {}
        for name, (hits, classes) in self._hits(threshold).items():
            rates[name] = _over_classes(hits, classes, class_pairs[name], level, new_classes)
        return rates

    def _pairs_alone(self, threshold: float) -> np.ndarray:
        """Return (2, P) the classes of strangers and those that they find, where nothing is found
        without either: both stand for other classes."""
        own = self._own[self.strangers]
        chosen = (self._classes_within(threshold) == 1) & np.isin(self.found, own)
        return np.stack([own, self.found])[:, chosen]

    def _hits(self, threshold: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return by rate, `fpir` and, where there are known queries, `tpir`, which of its queries
        count, and their classes."""
        hits = {"fpir": (self.unknown <= threshold, self._own[self.strangers])}
        if len(self.known):
            answered = self.right & (self.nearest <= threshold)
            hits["tpir"] = answered, self._own[self.known]
        return hits

    def _classes_within(self, threshold: float) -> np.ndarray:
        """Return (S,) in how many other classes each stranger finds a reference."""
        return np.count_nonzero(self._class_distances <= threshold, axis=1)

    def growth(self, threshold: float, level: float) -> tuple[tuple[int, Interval], ...]:
        """Return FPIR by the size of the gallery, see `Basis`, for as many other strangers.

        In a random part of the gallery's classes a stranger is accepted where one of the classes
        that it finds is in it; the chance follows from how many it finds. Beyond the gallery, the
        line through log(-log(1 - FPIR)) at half of the classes and at all, over the logarithm of
        the size, is continued.
        """
        counts = self._classes_within(threshold)
        classes = self.num_classes - self.left_out
        numbers = np.unique(self._own[self.strangers], return_inverse=True)[1]
        sizes = np.bincount(numbers)

        def rates(part: float) -> np.ndarray:
            """Return the rate in a part of the classes, of all strangers and without each class."""
            accepted = np.bincount(numbers, weights=_chance(counts, classes, part))
            total = np.append(accepted.sum(), accepted.sum() - accepted)
            return total / np.append(sizes.sum(), np.maximum(sizes.sum() - sizes, 1))

        hazards = -np.log1p(-np.minimum(rates(1.0), 1 - 1e-12))
        halves = -np.log1p(-np.minimum(rates(0.5), 1 - 1e-12))
        slopes = np.log2(np.maximum(hazards, 1e-300) / np.maximum(halves, 1e-300))
        size = self.basis().size
        grown = []
        for times in _TIMES:
            if times < 1:
                values = rates(times)
            else:
                values = -np.expm1(-hazards * times ** np.clip(slopes, 0, 1))
            parts = values[1:] - values[1:].mean()
            # Of the jackknife, for the choice of the threshold and for the other strangers.
            variance = 2 * (1 - 1 / len(parts)) * float(np.square(parts).sum())
            rate = float(values[0])
            interval = new_rate_interval(rate, variance, freedom_of(parts), level, len(parts))
            grown.append((round(times * size), interval))
        return tuple(grown)

    def worst(self, threshold: float) -> dict[str, float]:
        """Return `fpir`, and `tpir` where there are known queries, of the tenth of the classes of
        the queries where it is the worst."""
        worst = {}
        for name, (hits, classes) in self._hits(threshold).items():
            of_class = np.bincount(classes, weights=hits)
            worst[name] = worst_tenth(of_class, np.bincount(classes), highest=name == "fpir")
        return worst

    def baseline(self, threshold: float) -> Baseline | None:
        """Return what the queries found, for `compare_queries`; None where all are strangers of
        classes of the gallery, which searched it without these."""
        known = unknown = None
        most = 1 + int(max(self.found.max(), self._found_by_known.max(initial=0)))
        counts = np.zeros((2, most), np.int64)
        if len(self.known):
            known = QueryProfile.of(self.nearest, self._own[self.known], threshold)
            accepted = self._found_by_known[self.nearest <= threshold]
            counts[0] = np.bincount(accepted, minlength=most)
        if not self.left_out:
            unknown = QueryProfile.of(self.unknown, self._own[self.strangers], threshold)
            accepted = self.found[self.unknown <= threshold]
            counts[1] = np.bincount(accepted, minlength=most)
        if known is unknown is None:
            return None
        return Baseline.of(known, unknown, counts, self._gallery)


def _chance(counts: np.ndarray, classes: int, part: float) -> np.ndarray:
    """Return the chance that a part of the classes, drawn at random, has one of some that are
    counted."""
    drawn = min(max(round(part * classes), 1), classes)
    left = np.arange(counts.max(initial=0))
    each = np.maximum(classes - drawn - left, 0) / np.maximum(classes - left, 1)
    return 1 - np.append(1.0, np.cumprod(each))[counts]


def _strangers(in_gallery: np.ndarray, unknown: Any, labels: np.ndarray) -> np.ndarray:
    """Return which queries stand for unknown classes, see `Searches`."""
    if unknown is None:
        return np.ones_like(in_gallery) if in_gallery.all() else ~in_gallery
    chosen = true_or_false(unknown, "unknown", len(labels))
    if not chosen.any():
        raise UserError("calls no query unknown: FPIR is the rate of those", unknown=...)
    astray = labels[~(chosen | in_gallery)]
    if len(astray):
        raise UserError(
            f"{len(astray):,} known queries are of classes that the gallery does not have, the "
            f"first is {astray.tolist()[0]!r}: call them unknown, or add the class",
            unknown=...,
        )
    return chosen


def _nearest(blocks: Iterable[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Return the class and the distance of the nearest reference to each query of a search."""
    parts = [(near[:, 0], distances[:, 0]) for _, near, distances in blocks]
    classes, distances = map(np.concatenate, zip(*parts, strict=True))
    return classes, distances


def _over_classes(
    hits: np.ndarray, classes: np.ndarray, pairs: np.ndarray, level: float, new_classes: bool
) -> Interval:
    """Return the share of hits with its cluster-robust interval.

    A hit that needs the class that it finds is of two classes. Both count it, and what a pair of
    classes counts twice is subtracted once (Aronow, Samii and Assenova, 2015). The variance is
    never below that over the classes of the queries alone.

    Args:
        hits: (N,) of the queries.
        classes: (N,) their classes, numbers.
        pairs: (2, P) the class of the query of such a hit, and the class that it finds.
        level: The coverage.
        new_classes: Whether the interval is that of the rate of as many other classes.
    """
    rate = float(hits.mean())
    numbers, places = np.unique(classes, return_inverse=True)
    groups = len(numbers)
    parts = np.bincount(places, weights=hits - rate)
    variance = float(np.square(parts).sum())
    if pairs.size:
        ends = np.searchsorted(numbers, pairs)
        times_found = np.bincount(ends[1], minlength=groups)
        parts = parts + times_found - times_found.mean()
        hits_of_pairs = np.unique(np.sort(ends, axis=0), axis=1, return_counts=True)[1]
        of_both = float(np.square(parts).sum() - np.square(hits_of_pairs).sum())
        variance = max(variance, of_both)
    variance *= groups / max(groups - 1, 1) / len(hits) ** 2
    if new_classes:
        return new_rate_interval(rate, 2 * variance, freedom_of(parts), level, groups)
    return rate_interval(rate, variance, freedom_of(parts), level, groups)


def identification_rates(
    embeddings: Any,
    labels: Any,
    threshold: float,
    *,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    unknown: Any = None,
    distance: str = "euclidean",
    level: float = 0.95,
    per_class: str = "nearest",
    groups: Any = None,
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
        unknown: (Q,) bool, which queries stand for unknown classes, as `calibrate`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals, which are over the classes of the queries.
        per_class: What stands for a class, as `calibrate`.
        groups: (G,) as `calibrate`.

    Returns:
        - `fpir`: false positive identification rate: the share of the queries of unknown classes
            for which an image lies within the threshold (NIST FRVT 1:N; ISO/IEC 19795-1). Where the
            gallery has the class of every query, each is searched for without its own class.
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
    sides = embeddings, labels, gallery, gallery_labels
    searches = Searches(*sides, own_rows, unknown, distance, per_class, groups)
    return searches.rates(number("threshold", threshold), level, new_classes=False)


@dataclasses.dataclass(frozen=True)
class Identification:
    """How well a threshold tells queries of known classes from those of unknown ones.

    Attributes:
        distance: The distance.
        basis: What was searched, and by what.
        points: By false positive identification rate that was asked for, the largest threshold, its
            rates, `fpir` and `tpir`, and these of the worst tenth of the classes.
        curve: Three arrays `fpir`, `tpir` and `threshold` for drawing.
        counts: Known queries (as `positive`) and unknown ones by their distance to what they find.
    """

    distance: str
    basis: Basis
    points: Mapping[float, tuple[float, Mapping[str, Interval], Mapping[str, float]]]
    curve: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    counts: PairHistogram = dataclasses.field(repr=False)


def identification(
    embeddings: Any,
    labels: Any,
    *,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    unknown: Any = None,
    distance: str = "euclidean",
    level: float = 0.95,
    per_class: str = "nearest",
    groups: Any = None,
) -> Identification:
    """Measures searches of a gallery by queries of known and of unknown classes, at all thresholds.

    Args:
        embeddings: (Q, d) the queries.
        labels: (Q,) class ids (integers) or names.
        gallery: (G, d); None: the queries search one another.
        gallery_labels: (G,).
        own_rows: (Q,) the row of each query in the gallery, where it is one of its images.
        unknown: (Q,) bool, which queries stand for unknown classes, as `calibrate`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals, which are over the classes of the queries.
        per_class: What stands for a class, as `calibrate`.
        groups: (G,) as `calibrate`.

    Raises:
        UserError: As `Searches`, or no query is of a known class.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.2]], [3, 3, 8, 8]
        >>> found = tfdml.evaluation.identification(images, labels)
        >>> found.basis.known, found.curve["tpir"].tolist()
        (4, [1.0, 1.0, 1.0, 1.0])
    """
    check_share(level=level)
    sides = embeddings, labels, gallery, gallery_labels
    searches = Searches(*sides, own_rows, unknown, distance, per_class, groups)
    if not len(searches.known):
        raise UserError("no query is of a class of the gallery")
    strangers = np.sort(searches.unknown)
    below = np.nextafter(strangers, np.float32(-np.inf))
    answered = np.sort(searches.nearest[searches.right])
    points = {}
    for fpir in FPIRS:
        if not count_of_share(fpir, len(strangers)):
            continue
        threshold = float(np.nextafter(first_refused(strangers, fpir), np.float32(-np.inf)))
        rates = searches.rates(threshold, level, new_classes=False)
        points[fpir] = threshold, rates, searches.worst(threshold)
    accepted = np.searchsorted(strangers, below, side="right")
    right = np.searchsorted(answered, below, side="right")
    curve = {
        "fpir": accepted / len(strangers),
        "tpir": right / len(searches.known),
        "threshold": below.astype(np.float64),
    }
    counts = _histogram(searches.nearest, strangers)
    return Identification(distance, searches.basis(), points, curve, counts)


def _histogram(known: np.ndarray, unknown: np.ndarray) -> PairHistogram:
    """Return the distances of known and of unknown queries in 256 equal bins."""
    least = min(known.min(), unknown.min())
    largest = np.nextafter(max(known.max(), unknown.max()), np.float32(np.inf))
    edges = np.linspace(least, largest, 257)
    near, _ = np.histogram(known, edges)
    far, _ = np.histogram(unknown, edges)
    return PairHistogram(edges, near, far, float(known.mean()), float(unknown.mean()))
