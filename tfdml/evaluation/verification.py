"""Verification: do two images show the same class? Distances of all pairs, error rates, and their
uncertainty."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.arguments import count_of_share, number
from tfdml.errors import UserError, check_choice, check_share
from tfdml.evaluation.intervals import Interval, freedom_of, rate_interval, worst_tenth
from tfdml.evaluation.relevance import check_labels
from tfdml.labels import image_rows, true_or_false
from tfdml.registry import DISTANCES
from tfdml.retrieval.exact import check_embeddings, frame_of, in_float32, measure, row_blocks

if TYPE_CHECKING:
    from tfdml.data.dataset import PairList

#: The false accept rates of which `verification` reports the true accept rate.
FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Rows and columns of the distance matrix that are counted at once.
_TILE = 1024
# How many bins distances are counted in, a power of two: so many that what happens within one does
# not matter.
_BINS = 2**20
# Below the largest distance by this many powers of two there is one bin; twice as many for squares.
_OCTAVES = 32
# The share of |x|^2 + |y|^2 from which on |x - y|^2 is that of products, to 1e-9 in float64.
_OF_PRODUCTS = 1e-6
# Numbers of the differences that are measured at once: 8 MB.
_DIFFERENCES_AT_ONCE = 2**20
# Counts of a strip of classes against all classes, for every threshold.
_STRIP = 2**23


@dataclasses.dataclass(frozen=True)
class PairHistogram:
    """Counts of the pairs of images by distance.

    Args:
        edges: (K + 1,) float64, ascending: bin k reaches from `edges[k]` to `edges[k + 1]`.
        positive: (K,) int64 pairs of one class.
        negative: (K,) int64 pairs of different classes.
        mean_positive: The mean d+, of the distances and not of the bins.
        mean_negative: The mean d-.
    """

    edges: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    mean_positive: float
    mean_negative: float

    def rebinned(self, bins: int) -> PairHistogram:
        """Return the same pairs in at most `bins` bins, from the least distance that occurs to the
        largest.

        They are as wide as one another as far as the present edges allow, at which they begin and
        end.

        Example:
            >>> histogram = AllPairs([[0.0], [1.0], [5.0]], [0, 0, 1]).histogram.rebinned(2)
            >>> histogram.positive.tolist(), histogram.negative.tolist()
            ([1, 0], [0, 2])
        """
        places = np.flatnonzero(self.positive + self.negative)
        first, stop = int(places[0]), int(places[-1]) + 1
        new_edges = np.linspace(self.edges[first], self.edges[stop], bins, endpoint=False)
        starts = np.unique(np.searchsorted(self.edges, new_edges, side="right") - 1)
        positive, negative = (
            np.add.reduceat(counts[:stop], starts) for counts in (self.positive, self.negative)
        )
        return dataclasses.replace(
            self, edges=self.edges[np.append(starts, stop)], positive=positive, negative=negative
        )


def probability_nearer(positive: Any, negative: Any) -> float:
    """P(d+ < d-) + P(d+ = d-) / 2, the area under the ROC curve, of histograms over the same
    ascending bins.

    Pairs in one bin count as ties: with fine bins the error is at most half of sum_k p_k q_k.

    Args:
        positive: (K,) counts or probabilities of d+; scaled to the sum 1.
        negative: (K,) the same of d-.

    Example:
        >>> probability_nearer([1, 1, 0], [0, 1, 1])
        0.875
    """
    p, q = (np.asarray(counts, np.float64) for counts in (positive, negative))
    p, q = p / p.sum(), q / q.sum()
    further = 1 - np.cumsum(q)
    return float((p * (further + q / 2)).sum())


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """The rates of calling two images the same where their distance is at most a threshold.

    Attributes:
        threshold: A distance.
        tar: True accept rate: the share of the pairs of one class that are accepted; 1 - FNMR.
        far: False accept rate: the share of the pairs of different classes that are accepted; FMR.
        precision: The share of the accepted pairs that are of one class.
        worst: `tar` and `far` of the tenth of the classes where it is the worst, see `worst_tenth`.
    """

    threshold: float
    tar: Interval
    far: Interval
    precision: Interval
    worst: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Verification:
    """How well a threshold on the distance separates pairs of one class from pairs of different
    classes.

    Attributes:
        distance: The distance.
        num_same: The number of pairs of one class.
        num_different: The number of pairs of different classes.
        num_classes: The number of classes.
        auc: The area under the ROC curve. Distances within 3e-5 of one another may count as equal,
            and those below a billionth of the largest.
        eer: Equal error rate, where FAR and FNMR are equal, by linear interpolation of the ROC
            curve.
        eer_threshold: The distance there.
        points: The operating points by the false accept rate that was asked for.
        roc: Three arrays `far`, `tar` and `threshold` for drawing, at most 2,000 points.
        counts: The histogram of all pairs, in at most 256 bins.
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
        measures = {
            name: getattr(self, name)
            for name in ("auc", "eer", "eer_threshold", "num_same", "num_different")
        }
        tar = {f"tar@far={far:g}": point.tar.mean for far, point in self.points.items()}
        thresholds = {
            f"threshold@far={far:g}": point.threshold for far, point in self.points.items()
        }
        worst = {f"worst_tenth@far={far:g}": point.worst for far, point in self.points.items()}
        sizes = {"num_classes": self.num_classes, "distance": self.distance}
        return {**measures, **sizes, **tar, **thresholds, **worst}


def verification(
    embeddings: Any,
    labels: Any,
    *,
    distance: str = "euclidean",
    fars: Sequence[float] | None = None,
    level: float = 0.95,
    views: Any = None,
) -> Verification:
    """Measures verification over all pairs of images.

    A pair is accepted where its distance is at most a threshold. FAR is the share of the pairs of
    different classes that is accepted, TAR the share of the pairs of one class. TAR@FAR is the
    largest TAR of any threshold whose FAR is at most the one asked for, and FNMR@FMR is 1 -
    TAR@FAR.

    All pairs are counted in 2**20 bins. A second pass over the bin of each threshold makes the
    threshold exact. The memory does not grow with the number of pairs: 60,000 images of 128
    dimensions take 150 MB next to the embeddings. Distances are computed in float64 and rounded to
    float32, as those of a search; exact copies are at distance 0.

    Intervals are over classes: pairs that share a class are not independent (dyadic cluster-robust
    variance: Aronow, Samii and Assenova, 2015, "Cluster-robust variance estimation for dyadic
    data"), on the scale of log odds, with Student's t and Satterthwaite's degrees of freedom: few,
    where few classes make up most of the variance. The estimate of few classes may be too low, even
    negative. The variances of FAR and precision are therefore never below those of independent
    pairs of classes.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        fars: The false accept rates; by default those of `FARS` that the number of pairs can
            resolve.
        level: The coverage of the intervals.
        views: (N,) bool, the view of each embedding, such as whether it is of a text: pairs of
            different views count alone; None: all pairs.

    Returns:
        A `Verification`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not match them, an
            unknown distance, no pair of one class or of different classes, or a rate outside 0 to
            1.

    Example:
        >>> result = tfdml.evaluation.verification([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8],
        ...     distance="euclidean")
        >>> result.auc, result.eer, result.num_same, result.num_different
        (1.0, 0.0, 2, 4)
    """
    check_share(level=level)
    pairs = AllPairs(embeddings, labels, distance, views)
    histogram, curve = pairs.histogram, pairs.curve()
    num_same, num_different = int(curve.same[-1]), int(curve.different[-1])
    if fars is None:
        fars = [far for far in FARS if count_of_share(far, num_different)]
    for far in fars:
        check_share(fars=far)
    # FNMR - FAR falls along the bins; it becomes 0 or negative within this one.
    gaps = (1 - curve.same / num_same) - curve.different / num_different
    crossing = int(np.argmax(gaps <= 0))
    thresholds, exact = pairs.thresholds(fars, [crossing])
    eer, eer_threshold = exact.equal_error()
    points = pairs.operating_points(thresholds, level, new_classes=False)
    places = _spread(curve.same + curve.different, 2000)
    roc = {
        "far": curve.different[places] / num_different,
        "tar": curve.same[places] / num_same,
        "threshold": histogram.edges[places + 1],
    }
    auc = probability_nearer(histogram.positive, histogram.negative)
    point_by_far = dict(zip(fars, points, strict=True))
    return Verification(
        distance,
        num_same,
        num_different,
        len(pairs.sizes),
        auc,
        eer,
        eer_threshold * pairs.scale,
        point_by_far,
        roc,
        histogram.rebinned(256),
    )


def accepted_rates(
    embeddings: Any,
    labels: Any,
    threshold: float,
    *,
    distance: str = "euclidean",
    level: float = 0.95,
) -> OperatingPoint:
    """Measure the rates at a given threshold, such as that of a `Calibration` on other classes.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        threshold: The largest distance of an accepted pair.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        level: The coverage of the intervals, which are over classes.

    Returns:
        An `OperatingPoint`.

    Raises:
        UserError: As `verification`.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> point = tfdml.evaluation.accepted_rates(images, labels, 1.0, distance="euclidean")
        >>> point.tar.mean, point.far.mean
        (1.0, 0.0)
    """
    check_share(level=level)
    pairs = AllPairs(embeddings, labels, distance)
    return pairs.operating_points(
        [number("threshold", threshold) / pairs.scale], level, new_classes=False
    )[0]


def verify_pairs(distances: Any, same: Any, folds: Any = 10) -> dict[str, Any]:
    """Measures verification over given pairs: accuracy by folds as for Labeled Faces in the Wild,
    AUC and EER.

    For each fold, the threshold with the best accuracy on the other folds is applied to it (Huang
    et al., 2007, "Labeled Faces in the Wild", section 4).

    Args:
        distances: (P,) distance of each pair.
        same: (P,) booleans, or 0 and 1: whether the pair is of one class.
        folds: The number of folds, consecutive parts of the pairs; or (P,) integers, the fold of
            each pair.

    Returns:
        `accuracy` (the mean over folds), `accuracy_std` (its standard error), `threshold` (the mean
        over folds), `auc` and `eer`.

    Raises:
        UserError: Not one value per pair, not finite, neither true nor false, only one kind of
            pair, or fewer than two folds.

    Example:
        >>> measures = tfdml.evaluation.verify_pairs([0.1, 0.9, 0.2, 0.8], [True, False, True,
        ...     False], folds=2)
        >>> measures["accuracy"], measures["auc"], measures["eer"]
        (1.0, 1.0, 0.0)
    """
    from sklearn.metrics import roc_auc_score

    distances = np.asarray(distances, np.float64)
    if distances.ndim != 1:
        raise UserError(f"give one distance a pair; got shape {distances.shape}")
    same = true_or_false(same, "same", len(distances))
    if not np.isfinite(distances).all():
        raise UserError(
            f"{np.count_nonzero(~np.isfinite(distances))} of the distances are not finite"
        )
    if same.all() or not same.any():
        raise UserError("the pairs must hold some of one class and some of different classes")
    if np.ndim(folds) == 0:
        folds = np.arange(len(distances)) * int(folds) // len(distances)
    folds = np.asarray(folds)
    names = np.unique(folds)
    if folds.shape != distances.shape or len(names) < 2:
        raise UserError(
            f"give at least 2 folds, or one fold a pair; got {len(names)} for {len(distances)} "
            "pairs"
        )
    accuracies, thresholds = _by_fold(distances, same, [folds == name for name in names])
    standard_error = accuracies.std(ddof=1) / len(names) ** 0.5
    eer, _ = Curve.of(distances, same).equal_error()
    auc = float(roc_auc_score(same, -distances))
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_std": float(standard_error),
        "threshold": float(thresholds.mean()),
        "auc": auc,
        "eer": eer,
    }


def _by_fold(
    distances: np.ndarray, same: np.ndarray, folds: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy in each fold at the threshold that is the most accurate on the others,
    and these thresholds."""
    accuracies = np.zeros(len(folds))
    thresholds = np.zeros(len(folds))
    for i, inside in enumerate(folds):
        thresholds[i] = Curve.of(distances[~inside], same[~inside]).most_accurate()
        is_accepted = distances[inside] <= thresholds[i]
        accuracies[i] = np.mean(is_accepted == same[inside])
    return accuracies, thresholds


def evaluate_pairs(
    embeddings: Any, pairs: PairList, distance: str = "euclidean"
) -> dict[str, float]:
    """Measure embeddings on given pairs or triplets.

    Args:
        embeddings: (N, d).
        pairs: Of the rows of the embeddings.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`.

    Returns:
        Of similar and dissimilar pairs `accuracy`, `auc` and `eer`, as `verify_pairs`; of triplets
        `triplet_accuracy`, the share whose positive is nearer than the negative. Nothing that the
        pairs do not suffice for.

    Raises:
        UserError: `distance` is unknown, a pair names no row of the embeddings, or the pairs
            suffice for nothing.

    Example:
        >>> pairs = tfdml.data.PairList(np.array([[0, 1], [0, 2], [1, 2]]), np.array([1, 0, 0]))
        >>> tfdml.evaluation.evaluate_pairs(np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0]]),
        ...     pairs)["auc"]
        1.0
    """
    measures = measures_of_pairs(embeddings, pairs, distance)
    if not measures:
        few = (
            f"{len(pairs.rows)} pairs, of which {len(pairs.similar())} are similar, are too few to "
            "measure"
        )
        raise UserError(f"{few}: give at least 3, similar and dissimilar ones")
    return measures


def verify_in_random_folds(distances: np.ndarray, same: np.ndarray) -> dict[str, Any]:
    """As `verify_pairs`, in at most ten folds that are drawn: of pairs that are sorted by kind, a
    fold would have one kind alone, and the others no threshold."""
    order = np.random.default_rng(0).permutation(len(same))
    return verify_pairs(distances[order], same[order], folds=min(10, len(same)))


def measures_of_pairs(
    embeddings: Any, pairs: PairList, distance: str = "euclidean"
) -> dict[str, float]:
    """As `evaluate_pairs`, but nothing where the pairs suffice for nothing."""
    check_choice("distance", distance, DISTANCES)
    vectors = check_embeddings(embeddings)
    image_rows(pairs.rows, "pairs", len(vectors))

    def between(rows: np.ndarray) -> np.ndarray:
        far = measure(vectors[rows[:, 0]], vectors, rows[:, 1:], distance)[:, 0]
        return in_float32(far, distance).astype(np.float64)

    scores, measures = pairs.scored(), {}
    rows, same = scores[:, :2].astype(np.int64), scores[:, 2] == 1
    if 0 < same.sum() < len(same) and len(same) > 2:
        of_folds = verify_in_random_folds(between(rows), same)
        measures = {name: of_folds[name] for name in ("accuracy", "auc", "eer")}
    if pairs.rows.shape[1] == 3 and len(pairs.rows):
        near, far = (between(pairs.rows[:, [0, end]]) for end in (1, 2))
        measures["triplet_accuracy"] = float(np.mean(near < far))
    return measures


class AllPairs:
    """All pairs of images, sorted by class, with their distances tile by tile of the matrix.

    Attributes:
        classes: (N,) the place of each image's class in `sizes`, ascending.
        sizes: (C,) the number of images of each class.
        scale: What the distances of the tiles are multiplied by.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        views: As `verification`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels or views that do not go with
            them, an unknown distance, or not both pairs of one class and pairs of different
            classes.
    """

    def __init__(
        self, embeddings: Any, labels: Any, distance: str = "euclidean", views: Any = None
    ):
        check_choice("distance", distance, DISTANCES)
        embeddings = check_embeddings(embeddings)
        labels = check_labels(labels, len(embeddings))
        # Sorted by class, the pairs of one class lie in few tiles.
        order = np.argsort(labels, kind="stable")
        _, self.classes, self.sizes = np.unique(
            labels[order], return_inverse=True, return_counts=True
        )
        self._views = None if views is None else true_or_false(views, "views", len(labels))[order]
        self.counts = PairCounts.of(self.classes, self.sizes, self._views)
        if not (self.counts.same.any() and self.counts.others.any()):
            missing = "of different classes" if self.counts.same.any() else "of one class"
            raise UserError(
                f"there is no pair of images {missing}: {len(labels)} images of {len(self.sizes)} "
                "classes"
            )
        self.distance = distance
        self._points = embeddings[order]
        self._frame = frame_of(self._points, self._points, distance)
        self.scale = {"euclidean": self._frame.unit, "cosine": 1.0}.get(
            distance, self._frame.unit**2
        )
        # Bins are ranges of the bits of float32, which order its positive numbers.
        self._magnitudes = _BINS // 2 if distance == "dot" else _BINS
        octaves = 2 * _OCTAVES if distance == "sqeuclidean" else _OCTAVES
        self._shift_of_bits = (octaves * 2**23 // self._magnitudes).bit_length() - 1
        bits_of_largest = int(np.float32(self._bound()).view(np.int32))
        self._first_bits = bits_of_largest + 1 - (self._magnitudes << self._shift_of_bits)

    def _bound(self) -> float:
        """Return a number that no distance is beyond."""
        largest = 0.0
        for rows in row_blocks(len(self._points), _TILE):
            squares = _squares(self._frame.place(self._points[rows]))
            largest = max(largest, float(squares.max()))
        largest = largest or 1.0
        return {
            "euclidean": 2 * largest**0.5,
            "sqeuclidean": 4 * largest,
            "cosine": 2.0,
            "dot": largest,
        }[self.distance]

    def _placed(self, rows: slice) -> np.ndarray:
        return self._frame.place(self._points[rows].astype(np.float64))

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """(bins + 1,) float64, the ends of the bins, before `scale`."""
        bits = self._first_bits + (np.arange(self._magnitudes + 1) << self._shift_of_bits)
        ends = bits.astype(np.int32).view(np.float32).astype(np.float64)
        ends[0] = 0
        return np.concatenate([-ends[:0:-1], ends]) if self.distance == "dot" else ends

    def _bins_of(self, distances: np.ndarray) -> np.ndarray:
        places = (np.abs(distances).view(np.int32) - self._first_bits) >> self._shift_of_bits
        places = np.clip(places, 0, self._magnitudes - 1)
        if self.distance == "dot":
            places = np.where(
                distances < 0, self._magnitudes - 1 - places, self._magnitudes + places
            )
        return places

    def tiles(
        self, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[slice, slice, np.ndarray, Any]]:
        """Yield rows, columns, their distances (float32), and which of these count, so that each
        pair counts once.

        Args:
            start: The first row.
            stop: The row after the last; None for all.
        """
        stop = len(self._points) if stop is None else stop
        above_diagonal = np.triu(np.ones((_TILE, _TILE), bool), 1)
        for i in range(start, stop, _TILE):
            rows = slice(i, min(i + _TILE, stop))
            for j in range(i, len(self._points), _TILE):
                columns = slice(j, min(j + _TILE, len(self._points)))
                distances = self._tile(rows, columns)
                counted: Any = (
                    above_diagonal[: distances.shape[0], : distances.shape[1]] if i == j else ...
                )
                if self._views is not None:
                    across = self._views[rows, None] != self._views[columns]
                    counted = across if counted is ... else across & counted
                yield rows, columns, distances, counted

    def _tile(self, rows: slice, columns: slice) -> np.ndarray:
        x, y = self._placed(rows), self._placed(columns)
        products = x @ y.T
        if self.distance == "dot":
            return (-products).astype(np.float32)
        # Of cosine 1 - <x, y>, which is |x - y|^2 / 2 of unit vectors.
        halves = 2 if self.distance == "cosine" else 1
        sums = np.float64(1) if self.distance == "cosine" else _squares(x)[:, None] + _squares(y)
        values = sums - 2 / halves * products
        close = np.argwhere(values <= _OF_PRODUCTS * sums)
        for part in row_blocks(len(close), max(1, _DIFFERENCES_AT_ONCE // x.shape[1])):
            i, j = close[part].T
            values[i, j] = _squares(x[i] - y[j]) / halves
        return (np.sqrt(values) if self.distance == "euclidean" else values).astype(np.float32)

    def _same(self, rows: slice, columns: slice) -> np.ndarray:
        return self.classes[rows, None] == self.classes[columns]

    @functools.cached_property
    def histogram(self) -> PairHistogram:
        """The counts of all pairs, each unordered pair once.

        The 2**20 bins have widths in proportion to the distance, 3e-5 of it, so that far images do
        not put all others into one bin. Only below a billionth of the largest distance there is one
        bin. The memory does not grow with the number of pairs.
        """
        everything, positive = np.zeros((2, _BINS), np.int64)
        sum_of_all = sum_of_positive = 0.0
        for rows, columns, distances, counted in self.tiles():
            bins = self._bins_of(distances)
            everything += np.bincount(bins[counted].ravel(), minlength=_BINS)
            sum_of_all += float(distances[counted].sum(dtype=np.float64))
            if self.classes[rows.stop - 1] >= self.classes[columns.start]:
                same = self._same(rows, columns)
                same &= True if counted is ... else counted
                positive += np.bincount(bins[same], minlength=_BINS)
                sum_of_positive += float(distances[same].sum(dtype=np.float64))
        negative = everything - positive
        mean_positive = self.scale * sum_of_positive / int(positive.sum())
        mean_negative = self.scale * (sum_of_all - sum_of_positive) / int(negative.sum())
        return PairHistogram(
            self.scale * self.edges, positive, negative, mean_positive, mean_negative
        )

    def curve(self, bins: Sequence[int] | np.ndarray = ()) -> Curve:
        """Return the pairs accepted by distance, before `scale`: exact within some bins, at the
        ends of the others."""
        inside = np.zeros(_BINS, bool)
        inside[np.asarray(bins, int)] = True
        values, alike = [np.zeros(0)], [np.zeros(0, bool)]
        for rows, columns, distances, counted in self.tiles() if len(bins) else ():
            flat = distances[counted].ravel()
            here = np.flatnonzero(inside[self._bins_of(flat)])
            if len(here):
                values.append(flat[here].astype(np.float64))
                alike.append(self._same(rows, columns)[counted].ravel()[here])
        exact = Curve.of(np.concatenate(values), np.concatenate(alike))
        others, counts = ~inside, self.histogram
        starts = np.concatenate([exact.starts, self.edges[:-1][others]])
        order = np.argsort(starts, kind="stable")
        same = np.concatenate([np.diff(exact.same, prepend=0), counts.positive[others]])
        different = np.concatenate([np.diff(exact.different, prepend=0), counts.negative[others]])
        ends = np.concatenate([exact.ends, self.edges[1:][others]])
        return Curve(
            starts[order], ends[order], np.cumsum(same[order]), np.cumsum(different[order])
        )

    def below(self, distance: float) -> float:
        """Return the largest threshold, before `scale`, that refuses a distance: a float32 number
        after `scale`."""
        return (
            float(np.nextafter(np.float32(distance * self.scale), np.float32(-np.inf))) / self.scale
        )

    def thresholds(
        self, fars: Sequence[float], further: Sequence[int] = ()
    ) -> tuple[list[float], Curve]:
        """Return the largest threshold of each rate, and the curve that is exact there and in the
        bins `further`."""
        accepted = np.cumsum(self.histogram.negative)
        ranks = count_of_share(np.asarray(fars, np.float64), accepted[-1])
        curve = self.curve([*np.searchsorted(accepted, ranks, side="right"), *further])
        places = np.searchsorted(curve.different, ranks, side="right")
        return [self.below(curve.starts[place]) for place in places], curve

    def operating_points(
        self,
        thresholds: Sequence[float],
        level: float,
        new_classes: bool,
        prior: float | None = None,
    ) -> list[OperatingPoint]:
        """Return the rates at each threshold (before `scale`), with intervals over classes or for
        as many new ones; the precision where a share `prior` of the pairs is of one class."""
        order = np.argsort(thresholds)
        counts = self._accepted_by_class(np.asarray(thresholds, np.float64)[order])
        points = []
        for threshold, place in zip(thresholds, np.argsort(order), strict=True):
            accepted = [part[..., place] for part in counts]
            rates = _rates(self.counts, accepted, level, new_classes, prior)
            same, others = accepted[:2]
            worst = {
                "tar": worst_tenth(same, self.counts.same, highest=False),
                "far": worst_tenth(others, self.counts.others, highest=True),
            }
            tar, far, precision = rates
            scaled = float(threshold) * self.scale
            points.append(OperatingPoint(scaled, tar, far, precision, worst))
        return points

    def weight_of_different(self, prior: float | None) -> float:
        """Return what a pair of different classes counts, next to 1 for one of one class, so that
        pairs of one class are a share `prior`; 1 for their own share."""
        if prior is None:
            return 1.0
        same, different = self.counts.same.sum(), self.counts.others.sum() / 2
        return float((1 - prior) / prior * same / different)

    def _accepted_by_class(self, thresholds: np.ndarray) -> tuple[np.ndarray, ...]:
        """How many pairs are accepted: (C, T) of one class; (C, T) of a class with others; (T,)
        sums over pairs of classes of the square of the count, and of the count times the number of
        pairs."""
        num, kinds = len(self.sizes), len(thresholds)
        same = np.zeros((num, kinds))
        rows_of = np.zeros((num, kinds))
        squares = np.zeros(kinds)
        products = np.zeros(kinds)
        starts = np.append(0, np.cumsum(self.sizes))
        first = 0
        while first < num:
            # Whole classes: the tile's rows, and no more counts than fit.
            last = max(
                first + 1, int(np.searchsorted(starts, starts[first] + _TILE, side="right")) - 1
            )
            last = min(last, first + max(1, _STRIP // (num * max(kinds, 1))))
            strip = self._accepted_in_strip(first, last, starts, thresholds)
            for i, of_class in enumerate(strip):
                same[first + i] = of_class[first + i]
                of_class[first + i] = 0
            rows_of[first:last] += strip.sum(axis=1)
            rows_of += strip.sum(axis=0)
            squares += np.square(strip).sum(axis=(0, 1))
            products += np.einsum("cd,cdt->t", self.counts.between(slice(first, last)), strip)
            first = last
        return same, rows_of, squares, products

    def _accepted_in_strip(
        self, first: int, last: int, starts: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """Return (last - first, C, T) how many pairs of each of some classes and each class are
        accepted."""
        num, kinds = len(self.sizes), len(thresholds)
        counts = np.zeros((last - first) * num * kinds)
        largest = thresholds[-1] if kinds else -np.inf
        for rows, columns, distances, counted in self.tiles(int(starts[first]), int(starts[last])):
            accepted = distances <= largest
            row, column = np.nonzero(accepted if counted is ... else accepted & counted)
            cell = (self.classes[rows][row] - first) * num + self.classes[columns][column]
            place = np.searchsorted(thresholds, distances[row, column])
            np.add.at(counts, cell * kinds + place, 1)
        return counts.reshape(last - first, num, kinds).cumsum(axis=-1)


@dataclasses.dataclass(frozen=True)
class PairCounts:
    """How many pairs there are of each class and of any two.

    Args:
        first: (C,) the number of images of each class in one view.
        second: (C,) that in the other. Of one view half of `first`, as each of its pairs is met
            from either side.
        same: (C,) the number of pairs of each class.
    """

    first: np.ndarray
    second: np.ndarray
    same: np.ndarray

    @classmethod
    def of(cls, classes: np.ndarray, sizes: np.ndarray, views: np.ndarray | None) -> PairCounts:
        """Count the pairs of images of `classes` (N,), of any view or of different `views` (N,)."""
        first = sizes.astype(np.float64)
        if views is None:
            return cls(first, first / 2, first * (first - 1) / 2)
        second = np.bincount(classes, weights=views, minlength=len(sizes))
        return cls(first - second, second, (first - second) * second)

    @property
    def others(self) -> np.ndarray:
        """(C,) the number of pairs of an image of a class and one of another class."""
        a, b = self.first, self.second
        return a * (b.sum() - b) + b * (a.sum() - a)

    def between(self, rows: slice) -> np.ndarray:
        """Return the number of pairs of each of some classes and each class; twice that for a class
        and itself."""
        return self.first[rows, None] * self.second + self.second[rows, None] * self.first

    def squared(self) -> float:
        """Return the sum over any two different classes of the squared number of their pairs."""
        a, b = np.square(self.first), np.square(self.second)
        of_any = a.sum() * b.sum() + (self.first * self.second).sum() ** 2
        of_one_class = 2 * (a * b).sum()
        return float(of_any - of_one_class)


@dataclasses.dataclass(frozen=True)
class Curve:
    """How many pairs are accepted by the threshold on their distance.

    Args:
        starts: (K,) ascending; no pair between the end before and this is accepted below it.
        ends: (K,) the thresholds.
        same: (K,) the number of pairs of one class up to there.
        different: (K,) the number of pairs of different classes.
    """

    starts: np.ndarray
    ends: np.ndarray
    same: np.ndarray
    different: np.ndarray

    @classmethod
    def of(cls, distances: np.ndarray, same: np.ndarray) -> Curve:
        """Return the curve of given pairs, one point for each distance."""
        values, places = np.unique(distances, return_inverse=True)
        alike, unlike = (np.bincount(places[kind], minlength=len(values)) for kind in (same, ~same))
        return cls(values, values, np.cumsum(alike), np.cumsum(unlike))

    def equal_error(self) -> tuple[float, float]:
        """Return where FNMR = 1 - TAR and FAR cross, by linear interpolation, and the distance."""
        tar, far = (np.append(0, counts / counts[-1]) for counts in (self.same, self.different))
        gap = (1 - tar) - far
        k = int(np.argmax(gap <= 0))
        share = gap[k - 1] / (gap[k - 1] - gap[k])
        rate = far[k - 1] + share * (far[k] - far[k - 1])
        return float(rate), float(self.ends[k - 1])

    def most_accurate(self) -> float:
        """Return the threshold with the best accuracy, between two distances; the lowest of
        several."""
        right = np.append(0, self.same) - np.append(0, self.different)
        k = int(np.argmax(right))
        if k in (0, len(self.ends)):
            return float(self.ends[0] - 1 if k == 0 else self.ends[-1])
        return float((self.ends[k - 1] + self.ends[k]) / 2)


def _rates(
    counts: PairCounts, accepted: Sequence, level: float, new_classes: bool, prior: float | None
) -> tuple[Interval, ...]:
    """TAR, FAR and precision from what is accepted, as `_accepted_by_class` counts it at one
    threshold."""
    same, others, *_ = accepted
    half_of_classes = len(counts.same) / 2

    def interval(rate: float, variance: float, parts: np.ndarray, whole: float) -> Interval:
        variance *= (2 if new_classes else 1) * len(parts) / max(len(parts) - 1, 1)
        return rate_interval(rate, variance, freedom_of(parts), level, whole)

    tar, parts = _share(same, counts.same)
    with_pairs = counts.same > 0
    of_tar = interval(tar, float(np.square(parts).sum()), parts[with_pairs], int(with_pairs.sum()))
    far, parts = _share(others, counts.others, classes_of_pair=2)
    alone = _variance_of_pairs(counts, accepted, far)
    # Classes share causes, so that it is at least that of independent pairs of classes.
    variance = max(float(np.square(parts).sum()) - alone, alone)
    of_far = interval(far, variance, parts, half_of_classes)
    if not (tar or far):
        return of_tar, of_far, Interval(*[float("nan")] * 4)
    return of_tar, of_far, interval(*_precision(counts, accepted, prior), half_of_classes)


def _share(
    accepted: np.ndarray, pairs: np.ndarray, classes_of_pair: int = 1
) -> tuple[float, np.ndarray]:
    """Return the share of pairs that is accepted and the part of each class in it, by counts (C,)
    of the pairs with an image of each class."""
    share = accepted.sum() / pairs.sum()
    parts = (accepted - share * pairs) / (pairs.sum() / classes_of_pair)
    return share, parts


def _variance_of_pairs(counts: PairCounts, accepted: Sequence, far: float) -> float:
    """Return the variance of the FAR if pairs of classes were independent."""
    _, _, squares, products = accepted
    spread = float(squares - 2 * far * products + far**2 * counts.squared())
    return spread / (counts.others.sum() / 2) ** 2


def _precision(
    counts: PairCounts, accepted: Sequence, prior: float | None
) -> tuple[float, float, np.ndarray]:
    """Return the precision, its variance and the part of each class in it.

    Its logit is log hits - log false, or that of the prior + log TAR - log FAR.
    """
    same, others, squares, _ = accepted
    if prior is None:
        hits = same.sum()
        false = others.sum() / 2
        precision = hits / (hits + false)
        of_hits = same / (hits or 1) - 1 / len(same)
        of_false = others / (false or 1) - 2 / len(same)
        alone = float(squares) / (false or 1) ** 2
    else:
        tar, of_tar = _share(same, counts.same)
        far, of_far = _share(others, counts.others, classes_of_pair=2)
        precision = prior * tar / (prior * tar + (1 - prior) * far)
        of_hits = of_tar / (tar or 1)
        of_false = of_far / (far or 1)
        alone = _variance_of_pairs(counts, accepted, far) / (far or 1) ** 2
    slope = precision * (1 - precision)
    parts = slope * (of_hits - of_false)
    least = slope**2 * (float(np.square(of_hits).sum()) + alone)
    variance = float(np.square(parts).sum()) - slope**2 * alone
    return precision, max(variance, least), parts


def _spread(weights: np.ndarray, most: int) -> np.ndarray:
    """At most `most` places, evenly by rank on a logarithmic and on a linear scale, where something
    is counted."""
    places = np.flatnonzero(np.diff(weights, prepend=0))
    total = weights[-1]
    by_ratio = np.geomspace(1, total, most // 2)
    by_difference = np.linspace(1, total, most - most // 2)
    ranks = np.minimum(np.concatenate([by_ratio, by_difference]), total)
    return np.unique(places[np.searchsorted(weights[places], ranks)])


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.einsum("nd,nd->n", rows, rows)
