"""Verification: do two images show the same class? Distances of all pairs, error rates, and their uncertainty."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import roc_auc_score

from tfdml.arguments import number
from tfdml.errors import UserError, check_choice, check_share
from tfdml.evaluation.intervals import Interval, rate_interval
from tfdml.evaluation.relevance import check_labels
from tfdml.pairwise import DISTANCES, image_rows
from tfdml.retrieval.exact import check_embeddings, in_float32, measure, row_blocks, unit_rows

if TYPE_CHECKING:
    from tfdml.data.dataset import PairList

#: The false accept rates of which `verification` reports the true accept rate.
FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Rows and columns of the distance matrix that are counted at once.
_TILE = 1024
# Distances are counted by the first bits of their float32 number: within a bin they differ by at most 3e-5. The bins
# reach 64 powers of two below the largest distance; for negative and positive ones 32 each.
_BINS, _DROPPED_BITS = 2**21, 8
# The share of |x|^2 + |y|^2 from which on |x - y|^2 is that of products, to 1e-9 in float64.
_OF_PRODUCTS = 1e-6
# Points of a ROC curve.
_POINTS = 1000


@dataclasses.dataclass(frozen=True)
class PairHistogram:
    """Counts of the pairs of images by distance.

    Args:
        edges: (K + 1,) float64, ascending: bin k reaches from `edges[k]` to below `edges[k + 1]`.
        positive: (K,) int64 pairs of one class.
        negative: (K,) int64 pairs of different classes.
    """

    edges: np.ndarray
    positive: np.ndarray
    negative: np.ndarray

    @property
    def area(self) -> float:
        """The area under the ROC curve: the probability of d+ < d-, and half that of both in one bin."""
        further = 1 - np.cumsum(self.negative) / self.negative.sum()
        return float((self.positive * (further + self.negative / self.negative.sum() / 2)).sum() / self.positive.sum())


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """The rates of calling two images the same where their distance is at most a threshold.

    Attributes:
        threshold: A distance.
        tar: True accept rate: the share of the pairs of one class that are accepted; 1 - FNMR.
        far: False accept rate: the share of the pairs of different classes that are accepted; FMR.
    """

    threshold: float
    tar: Interval
    far: Interval


@dataclasses.dataclass(frozen=True)
class Verification:
    """How well a threshold on the distance separates pairs of one class from pairs of different classes.

    Attributes:
        distance: The distance.
        num_same: The number of pairs of one class.
        num_different: The number of pairs of different classes.
        num_classes: The number of classes.
        auc: The area under the ROC curve. Distances within 3e-5 of one another may count as equal, and those below a
            billionth of the largest.
        eer: Equal error rate, where FAR and FNMR are equal, by linear interpolation of the ROC curve.
        eer_threshold: The distance there.
        points: The operating points by the false accept rate that was asked for.
        roc: Two arrays `far` and `tar` for drawing.
        counts: The histogram of all pairs.
    """

    distance: str
    num_same: int
    num_different: int
    num_classes: int
    auc: float
    eer: float
    eer_threshold: float
    points: Mapping[float, OperatingPoint]
    roc: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    counts: PairHistogram = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the measures without the curves, for JSON."""
        measures = {name: getattr(self, name) for name in ("auc", "eer", "eer_threshold", "num_same", "num_different")}
        tar = {f"tar@far={far:g}": point.tar.mean for far, point in self.points.items()}
        thresholds = {f"threshold@far={far:g}": point.threshold for far, point in self.points.items()}
        return measures | {"num_classes": self.num_classes, "distance": self.distance} | tar | thresholds


def verification(
    embeddings: Any, labels: Any, *, distance: str = "euclidean", fars: Sequence[float] | None = None
) -> Verification:
    """Measures verification over all pairs of images.

    A pair is accepted where its distance is at most a threshold. FAR is the share of the pairs of different classes
    that is accepted, TAR the share of the pairs of one class. TAR@FAR is the TAR of the largest threshold whose FAR is
    at most the one asked for, and FNMR@FMR is 1 - TAR@FAR.

    All pairs are counted, in bins that are 3e-5 of a distance wide. A threshold lies at the edge of a bin, and the
    rates at it are exact. The memory does not grow with the number of pairs. Distances are computed in float64 and
    rounded to float32, as those of a search; exact copies are at distance 0.

    Intervals of 95 % are over classes, because pairs that share a class are not independent: a jackknife leaves out
    each class in turn with all its pairs. They are on the scale of log odds, with Student's t.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        fars: The false accept rates; by default those of `FARS` that the number of pairs can resolve.

    Returns:
        A `Verification`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not match them, an unknown distance, no pair
            of one class or of different classes, or a rate outside 0 to 1.

    Example:
        >>> result = tfdml.evaluation.verification([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8], distance="euclidean")
        >>> result.auc, result.eer, result.num_same, result.num_different
        (1.0, 0.0, 2, 4)

    Source: Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 1981.
    """
    pairs = AllPairs(embeddings, labels, distance)
    histogram = pairs.histogram
    curve = Curve(histogram.edges[1:], np.cumsum(histogram.positive), np.cumsum(histogram.negative))
    num_same, num_different = int(curve.same[-1]), int(curve.different[-1])
    fars = [far for far in FARS if far * num_different >= 1] if fars is None else fars
    for far in fars:
        check_share(fars=far)
    eer, eer_threshold = curve.equal_error()
    points = pairs.operating_points([pairs.threshold(far) for far in fars])
    ranks = np.geomspace(1, num_different, _POINTS)
    places = np.unique(np.searchsorted(curve.different, ranks))
    return Verification(
        distance,
        num_same,
        num_different,
        len(pairs.sizes),
        histogram.area,
        eer,
        eer_threshold,
        dict(zip(fars, points, strict=True)),
        {"far": curve.different[places] / num_different, "tar": curve.same[places] / num_same},
        histogram,
    )


def accepted_rates(embeddings: Any, labels: Any, threshold: float, *, distance: str = "euclidean") -> OperatingPoint:
    """Measure the rates at a given threshold, such as that of a `Calibration` on other classes.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        threshold: The largest distance of an accepted pair.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.

    Returns:
        An `OperatingPoint`, with intervals of 95 % over classes.

    Raises:
        UserError: As `verification`.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> point = tfdml.evaluation.accepted_rates(images, labels, 1.0, distance="euclidean")
        >>> point.tar.mean, point.far.mean
        (1.0, 0.0)
    """
    return AllPairs(embeddings, labels, distance).operating_points([number("threshold", threshold)])[0]


def verify_pairs(distances: Any, same: Any, folds: Any = 10) -> dict[str, Any]:
    """Measures verification over given pairs: accuracy by folds as for Labeled Faces in the Wild, AUC and EER.

    For each fold, the threshold with the best accuracy on the other folds is applied to it (Huang et al., 2007,
    "Labeled Faces in the Wild", section 4).

    Args:
        distances: (P,) distance of each pair.
        same: (P,) booleans, whether the pair is of one class.
        folds: The number of folds, consecutive parts of the pairs; or (P,) integers, the fold of each pair.

    Returns:
        `accuracy` (the mean over folds), `accuracy_std` (its standard error), `threshold` (the mean over folds), `auc`
        and `eer`.

    Raises:
        UserError: Not one value per pair, not finite, only one kind of pair, or fewer than two folds.

    Example:
        >>> measures = tfdml.evaluation.verify_pairs([0.1, 0.9, 0.2, 0.8], [True, False, True, False], folds=2)
        >>> measures["accuracy"], measures["auc"], measures["eer"]
        (1.0, 1.0, 0.0)
    """
    distances, same = np.asarray(distances, np.float64), np.asarray(same)
    if distances.ndim != 1 or same.shape != distances.shape or same.dtype.kind not in "biu":
        raise UserError(f"give one distance and one boolean a pair; got shapes {distances.shape} and {same.shape}")
    if not np.isfinite(distances).all():
        raise UserError(f"{np.count_nonzero(~np.isfinite(distances))} of the distances are not finite")
    same = same.astype(bool)
    if same.all() or not same.any():
        raise UserError("the pairs must hold some of one class and some of different classes")
    if np.ndim(folds) == 0:
        folds = np.arange(len(distances)) * int(folds) // len(distances)
    folds = np.asarray(folds)
    names = np.unique(folds)
    if folds.shape != distances.shape or len(names) < 2:
        raise UserError(f"give at least 2 folds, or one fold a pair; got {len(names)} for {len(distances)} pairs")
    by_fold = []
    for inside in (folds == name for name in names):
        threshold = Curve.of(distances[~inside], same[~inside]).most_accurate()
        by_fold.append((np.mean((distances[inside] <= threshold) == same[inside]), threshold))
    accuracies, thresholds = np.transpose(by_fold)
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_std": float(accuracies.std(ddof=1) / len(names) ** 0.5),
        "threshold": float(thresholds.mean()),
        "auc": float(roc_auc_score(same, -distances)),
        "eer": Curve.of(distances, same).equal_error()[0],
    }


def evaluate_pairs(embeddings: Any, pairs: PairList, distance: str = "euclidean") -> dict[str, float]:
    """Measure embeddings on given pairs or triplets.

    Args:
        embeddings: (N, d).
        pairs: Of the rows of the embeddings.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`.

    Returns:
        Of similar and dissimilar pairs `accuracy`, `auc` and `eer`, as `verify_pairs`; of triplets `triplet_accuracy`,
        the share whose positive is nearer than the negative. Nothing that the pairs do not suffice for.

    Raises:
        UserError: `distance` is unknown, a pair names no row of the embeddings, or the pairs suffice for nothing.

    Example:
        >>> pairs = tfdml.data.PairList(np.array([[0, 1], [0, 2], [1, 2]]), np.array([1, 0, 0]))
        >>> tfdml.evaluation.evaluate_pairs(np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0]]), pairs)["auc"]
        1.0
    """
    check_choice("distance", distance, DISTANCES)
    vectors = check_embeddings(embeddings)
    image_rows(pairs.rows, "pairs", len(vectors))

    def between(rows: np.ndarray) -> np.ndarray:
        far = measure(vectors[rows[:, 0]], vectors, rows[:, 1:], distance)[:, 0]
        return in_float32(far, distance).astype(np.float64)

    scores, measures = pairs.scored(), {}
    rows, same = scores[:, :2].astype(np.int64), scores[:, 2] == 1
    if 0 < same.sum() < len(same) and len(same) > 2:
        # In another order, as folds without one of the two kinds would have no threshold.
        order = np.random.default_rng(0).permutation(len(same))
        of_folds = verify_pairs(between(rows)[order], same[order], folds=min(10, len(same)))
        measures = {name: of_folds[name] for name in ("accuracy", "auc", "eer")}
    if pairs.rows.shape[1] == 3 and len(pairs.rows):
        near, far = (between(pairs.rows[:, [0, end]]) for end in (1, 2))
        measures["triplet_accuracy"] = float(np.mean(near < far))
    if not measures:
        few = f"{len(pairs.rows)} pairs, of which {len(pairs.similar())} are similar, are too few to measure"
        raise UserError(f"{few}: give at least 3, similar and dissimilar ones")
    return measures


class AllPairs:
    """The distances of all pairs of images, tile by tile.

    Attributes:
        classes: (N,) the class of each image, from 0; images are sorted by class.
        sizes: (C,) the number of images of each class.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.

    Raises:
        UserError: As `verification`.
    """

    def __init__(self, embeddings: Any, labels: Any, distance: str = "euclidean"):
        check_choice("distance", distance, DISTANCES)
        points = check_embeddings(embeddings)
        labels = check_labels(labels, len(points))
        order = np.argsort(labels, kind="stable")
        _, self.classes, self.sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
        if not 1 < len(self.sizes) < len(labels):
            missing = "of different classes" if len(self.sizes) < len(labels) else "of one class"
            raise UserError(f"there is no pair of images {missing}: {len(labels)} images of {len(self.sizes)} classes")
        points = points[order].astype(np.float64)
        if distance == "cosine":
            points = unit_rows(points)
        elif distance != "dot":
            points -= np.median(points, axis=0)
        self._points, self._squares, self.distance = points, np.square(points).sum(axis=1), distance
        longest = float(self._squares.max()) or 1.0
        largest = {"euclidean": 2 * longest**0.5, "sqeuclidean": 4 * longest, "cosine": 2.0, "dot": longest}
        last = int(np.float32(largest[distance]).view(np.int32)) >> _DROPPED_BITS
        self._magnitudes = _BINS // 2 if distance == "dot" else _BINS
        self._first = last - self._magnitudes + 1

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """(K + 1,) the edges of the bins, in ascending order."""
        bits = (self._first + np.arange(self._magnitudes + 1)) << _DROPPED_BITS
        ends = bits.astype(np.int32).view(np.float32).astype(np.float64)
        ends[0] = 0
        return np.concatenate([-ends[:0:-1], ends]) if self.distance == "dot" else ends

    def _bins(self, distances: np.ndarray) -> np.ndarray:
        places = (np.abs(distances).view(np.int32) >> _DROPPED_BITS) - self._first
        places = np.clip(places, 0, self._magnitudes)
        if self.distance == "dot":
            return np.where(distances < 0, self._magnitudes - 1 - places, self._magnitudes + places)
        return places

    def tiles(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield two slices of the images and the distances between them; each pair once, and infinity for the rest."""
        blocks = row_blocks(len(self._points), _TILE)
        for i, rows in enumerate(blocks):
            for columns in blocks[i:]:
                distances = self._tile(rows, columns)
                if rows == columns:
                    distances[np.tril_indices(len(distances))] = np.inf
                yield rows, columns, distances

    def _tile(self, rows: slice, columns: slice) -> np.ndarray:
        x, y = self._points[rows], self._points[columns]
        products = x @ y.T
        if self.distance == "dot":
            return (-products).astype(np.float32)
        if self.distance == "cosine":
            sums: Any = np.float64(1)
            values = 1 - products
        else:
            sums = self._squares[rows, None] + self._squares[columns]
            values = sums - 2 * products
        # Near one another, the difference of large products says little.
        i, j = np.nonzero(values <= _OF_PRODUCTS * sums)
        values[i, j] = np.square(x[i] - y[j]).sum(axis=1) / (2 if self.distance == "cosine" else 1)
        return (np.sqrt(values) if self.distance == "euclidean" else values).astype(np.float32)

    @functools.cached_property
    def histogram(self) -> PairHistogram:
        """The counts of all pairs."""
        everything, positive = np.zeros((2, _BINS + 1), np.int64)  # the last bin is of what is no pair
        for rows, columns, distances in self.tiles():
            places = self._bins(distances)
            everything += np.bincount(places.ravel(), minlength=_BINS + 1)
            if self.classes[rows.stop - 1] >= self.classes[columns.start]:
                same = self.classes[rows, None] == self.classes[columns]
                positive += np.bincount(places[same], minlength=_BINS + 1)
        return PairHistogram(self.edges, positive[:-1], (everything - positive)[:-1])

    def threshold(self, far: float) -> float:
        """Return the largest threshold, below an edge, that accepts at most a share of the pairs of other classes."""
        accepted = np.cumsum(self.histogram.negative)
        too_many = int(np.searchsorted(accepted, np.floor(far * accepted[-1]), side="right"))
        return float(np.nextafter(np.float32(self.edges[too_many]), np.float32(-np.inf)))

    def operating_points(self, thresholds: Sequence[float], new_classes: bool = False) -> list[OperatingPoint]:
        """Return the rates at thresholds, with intervals.

        Args:
            thresholds: Distances.
            new_classes: Whether the intervals are of the rates on as many other classes, and not of those expected.
        """
        count = len(self.sizes)
        same, others = np.zeros((2, len(thresholds), count))  # accepted pairs of each class
        for rows, columns, distances in self.tiles():
            for place, threshold in enumerate(thresholds):
                row, column = np.nonzero(distances <= threshold)
                one, other = self.classes[rows][row], self.classes[columns][column]
                alike = one == other
                same[place] += np.bincount(one[alike], minlength=count)
                ends = np.concatenate([one[~alike], other[~alike]])
                others[place] += np.bincount(ends, minlength=count)
        sizes = self.sizes.astype(np.float64)
        pairs_same, pairs_others = sizes * (sizes - 1) / 2, sizes * (len(self._points) - sizes)
        return [
            OperatingPoint(
                float(threshold),
                _rate(of_same, of_same.sum(), pairs_same, pairs_same.sum(), new_classes),
                _rate(of_others, of_others.sum() / 2, pairs_others, pairs_others.sum() / 2, new_classes),
            )
            for threshold, of_same, of_others in zip(thresholds, same, others, strict=True)
        ]


def _rate(hits: np.ndarray, all_hits: float, pairs: np.ndarray, all_pairs: float, new_classes: bool) -> Interval:
    """Return the share of accepted pairs, with its interval by leaving out each class in turn.

    Args:
        hits: (C,) accepted pairs that a class is in.
        all_hits: How many pairs are accepted.
        pairs: (C,) pairs that a class is in.
        all_pairs: How many pairs there are.
        new_classes: See `AllPairs.operating_points`.
    """
    left = (pairs > 0) & (pairs < all_pairs)
    without = (all_hits - hits[left]) / (all_pairs - pairs[left])
    groups = len(without)
    variance = float(np.square(without - without.mean()).sum()) * (groups - 1) / groups if groups > 1 else 0.0
    return rate_interval(all_hits / all_pairs, (2 if new_classes else 1) * variance, groups)


@dataclasses.dataclass(frozen=True)
class Curve:
    """How many pairs are accepted at ascending thresholds.

    Args:
        ends: (K,) the thresholds.
        same: (K,) the accepted pairs of one class.
        different: (K,) the accepted pairs of different classes.
    """

    ends: np.ndarray
    same: np.ndarray
    different: np.ndarray

    @classmethod
    def of(cls, distances: np.ndarray, same: np.ndarray) -> Curve:
        """Return the curve of given pairs, with each distance that occurs as a threshold."""
        values, places = np.unique(distances, return_inverse=True)
        alike, unlike = (np.bincount(places[kind], minlength=len(values)) for kind in (same, ~same))
        return cls(values, np.cumsum(alike), np.cumsum(unlike))

    def equal_error(self) -> tuple[float, float]:
        """Return where FNMR = 1 - TAR and FAR cross, by linear interpolation, and the distance."""
        tar, far = (np.append(0, counts / counts[-1]) for counts in (self.same, self.different))
        gap = (1 - tar) - far
        k = int(np.argmax(gap <= 0))
        share = gap[k - 1] / (gap[k - 1] - gap[k])
        return float(far[k - 1] + share * (far[k] - far[k - 1])), float(self.ends[k - 1])

    def most_accurate(self) -> float:
        """Return the threshold with the best accuracy, between two distances; the lowest of several."""
        right = np.append(0, self.same) - np.append(0, self.different)
        k = int(np.argmax(right))
        if k in (0, len(self.ends)):
            return float(self.ends[0] - 1 if k == 0 else self.ends[-1])
        return float((self.ends[k - 1] + self.ends[k]) / 2)
