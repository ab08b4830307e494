"""Verification: do two images show the same class? Error rates of all pairs, thresholds, and their uncertainty."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging
from scipy.stats import pearsonr, spearmanr
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score

from tfdml.errors import UserError, check_share
from tfdml.evaluation.identification import Searches, largest_threshold
from tfdml.evaluation.intervals import Interval, rate_interval
from tfdml.evaluation.pair_distances import AllPairs, PairHistogram, probability_nearer
from tfdml.pairwise import image_rows
from tfdml.retrieval.exact import check_embeddings
from tfdml.retrieval.faiss_index import rescore

if TYPE_CHECKING:
    from tfdml.data.dataset import PairList

#: The false accept rates of which `verification` reports the true accept rate.
FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
#: What a threshold can be calibrated to.
KINDS = ("fpir", "far", "precision")
TARGETS = tuple(f"{kind}=" for kind in KINDS)
# Images of the classes whose pairs with all classes are counted at once.
_ROWS = 1024
# Counts of a strip of classes against all classes, for every threshold.
_STRIP = 2**23


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """The rates of calling two images the same where their distance is at most a threshold.

    Attributes:
        threshold: A distance.
        tar: True accept rate: the share of the pairs of one class that are accepted; 1 - FNMR.
        far: False accept rate: the share of the pairs of different classes that are accepted; FMR.
        precision: The share of the accepted pairs that are of one class.
    """

    threshold: float
    tar: Interval
    far: Interval
    precision: Interval


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
        measures = {name: getattr(self, name) for name in ("auc", "eer", "eer_threshold", "num_same", "num_different")}
        tar = {f"tar@far={far:g}": point.tar.mean for far, point in self.points.items()}
        thresholds = {f"threshold@far={far:g}": point.threshold for far, point in self.points.items()}
        return measures | {"num_classes": self.num_classes, "distance": self.distance} | tar | thresholds


def verification(
    embeddings: Any,
    labels: Any,
    *,
    distance: str = "euclidean",
    fars: Sequence[float] | None = None,
    level: float = 0.95,
) -> Verification:
    """Measures verification over all pairs of images.

    A pair is accepted where its distance is at most a threshold. FAR is the share of the pairs of different classes
    that is accepted, TAR the share of the pairs of one class. TAR@FAR is the largest TAR of any threshold whose FAR is
    at most the one asked for, and FNMR@FMR is 1 - TAR@FAR.

    All pairs are counted in 2**20 bins. A second pass over the bin of each threshold makes the threshold exact. The
    memory does not grow with the number of pairs: 60,000 images of 128 dimensions take 150 MB next to the embeddings.
    Distances are computed in float64 and rounded to float32, as those of a search; exact copies are at distance 0.

    Intervals are over classes: pairs that share a class are not independent (dyadic cluster-robust variance: Aronow,
    Samii and Assenova, 2015, "Cluster-robust variance estimation for dyadic data"), on the scale of log odds, with
    Student's t. The estimate of few classes may be too low, even negative. The variance of FAR is therefore never
    below that of independent pairs of classes. Where the estimate for the precision is not positive, pairs of classes
    are taken as independent.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        fars: The false accept rates; by default those of `FARS` that the number of pairs can resolve.
        level: The coverage of the intervals.

    Returns:
        A `Verification`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not match them, an unknown distance, no pair
            of one class or of different classes, or a rate outside 0 to 1.

    Example:
        >>> result = tfdml.evaluation.verification([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8], distance="euclidean")
        >>> result.auc, result.eer, result.num_same, result.num_different
        (1.0, 0.0, 2, 4)
    """
    check_share(level=level)
    pairs = _CountedPairs(embeddings, labels, distance)
    histogram = pairs.histogram()
    same, different = histogram.positive, histogram.negative
    num_same, num_different = int(same.sum()), int(different.sum())
    if fars is None:
        fars = [far for far in FARS if far * num_different >= 1]
    for far in fars:
        check_share(fars=far)
    accepted_same, accepted = np.cumsum(same), np.cumsum(different)

    # FNMR - FAR falls along the bins; it becomes 0 or negative within this one.
    crossing = int(np.argmax((1 - accepted_same / num_same) - accepted / num_different <= 0))
    thresholds, within = pairs.thresholds(different, [int(np.floor(far * num_different)) for far in fars], {crossing})
    before = int(accepted_same[crossing] - same[crossing]), int(accepted[crossing] - different[crossing])
    eer, eer_threshold = _equal_error(*within[crossing], *before, num_same, num_different)
    points = pairs.operating_points(thresholds, level, new_classes=False)
    chosen = _spread(accepted_same + accepted, 2000)
    return Verification(
        distance,
        num_same,
        num_different,
        len(pairs.sizes),
        probability_nearer(same, different),
        eer,
        eer_threshold * pairs.scale,
        dict(zip(fars, points, strict=True)),
        {
            "far": accepted[chosen] / num_different,
            "tar": accepted_same[chosen] / num_same,
            "threshold": histogram.edges[chosen + 1],
        },
        histogram.rebinned(256),
    )


def accepted_rates(
    embeddings: Any, labels: Any, threshold: float, *, distance: str = "euclidean", level: float = 0.95
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
    pairs = _CountedPairs(embeddings, labels, distance)
    return pairs.operating_points([threshold / pairs.scale], level, new_classes=False)[0]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A threshold on a distance, chosen on held-out classes, and what to expect of it on other classes.

    Attributes:
        threshold: The largest distance that is accepted.
        distance: The distance.
        kind: What was asked for: `far` or `precision` of pairs of images, or `fpir` of searches of a gallery.
        rate: The rate that was asked for, such as 0.01.
        rates: Each rate at the threshold with the interval for as many other classes. Of pairs `far`, `tar` and
            `precision`, at the share of pairs of one class that the held-out images have; of searches `fpir` and
            `tpir`, as `identification_rates`.
        level: The coverage of the intervals.
        num_images: The number of images: held-out ones, or for `fpir` those of the gallery.
        num_classes: The number of their classes.
        distances: (K,) distances, ascending, at which `probabilities` stand; none for `fpir`.
        probabilities: (K,) the probability that a pair at that distance is of one class, not ascending.
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
            f"{self.target}: {self.distance} distance at most {self.threshold:.6g}; {where} {size}; {', '.join(rates)}"
        )

    def same(self, distances: Any) -> np.ndarray:
        """Return whether pairs at these distances are called the same."""
        return np.asarray(distances, np.float64) <= self.threshold

    def probability(self, distances: Any) -> np.ndarray:
        """Return the probability that pairs at these distances are of one class."""
        return np.interp(np.asarray(distances, np.float64), self.distances, self.probabilities)

    def for_searches(self, distance: str, num_images: int | None = None) -> Calibration:
        """Return this calibration if it holds for searches of a gallery.

        Where the gallery is larger by half than that of the calibration, a warning says so: more of the queries of
        unknown classes are then accepted.

        Args:
            distance: The distance of the search.
            num_images: The number of images of the gallery; None: unknown.

        Raises:
            UserError: It is of pairs of images, or of another distance.
        """
        if self.kind != "fpir":
            raise UserError(f"{self.target} is a rate of pairs of images, not of searches: calibrate with fpir=0.01")
        if self.distance != distance:
            raise UserError(f"the threshold is of distance={self.distance!r}, the search of {distance!r}")
        if num_images is not None and num_images >= 1.5 * self.num_images:
            logging.warning(
                "the threshold for %s is of a gallery of %s images, and this one has %s: it accepts more queries of "
                "unknown classes; calibrate again",
                *(self.target, f"{self.num_images:,}", f"{num_images:,}"),
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as plain numbers and lists, for JSON; `from_dict` reads them."""
        plain = dataclasses.asdict(self)
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in plain.items()} | {
            "rates": {name: list(rate) for name, rate in self.rates.items()}
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Create the calibration that `to_dict` wrote.

        Raises:
            UserError: A value is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            raise UserError(f"a calibration has the values {', '.join(sorted(names))}; got {', '.join(sorted(values))}")
        read = {name: np.asarray(values[name], float) for name in ("distances", "probabilities")}
        return cls(**{**values, **read, "rates": {name: Interval(*rate) for name, rate in values["rates"].items()}})


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
        raise UserError(f"`{argument}={text}`: write {choices} and a number from 0 to 1, such as {kinds[0]}=0.001")
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
) -> Calibration:
    """Chooses the threshold on the distance up to which an image is accepted.

    Use classes that the embedder was not trained on: on training classes the rates come out too good.

    For searches of a gallery, where a query meets all of its images:

    - `fpir`: the largest threshold at which at most this share of the queries of unknown classes is accepted. Each
      query searches the gallery without its own class. The rate grows with the gallery, whose size is stored.

    For pairs of images, one to one:

    - `far`: the largest threshold whose false accept rate is at most this.
    - `precision`: the largest threshold at which this share of the accepted pairs is of one class.

    The intervals are those of the rates that this threshold has on as many other classes of the same kind. They hold
    both the uncertainty of the choice and that of the other classes (twice the variance of these: see `verification`;
    of searches, the variance over the classes of the queries, and of classes that are found by one another's queries).
    The probability of "same" is the isotonic regression of "same" on the distance over all pairs (Zadrozny and Elkan,
    2002, "Transforming classifier scores into accurate multiclass probability estimates"), in the 2**20 bins of
    `verification`.

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
        prior: The share of pairs of one class among the pairs that will be asked about; None: that of these images.

    Returns:
        A `Calibration`.

    Raises:
        UserError: Not exactly one of the rates, a rate outside 0 to 1, a rate that these images cannot show or reach,
            an argument of another rate, or embeddings and labels that `verification` or `Searches` refuses.

    Example:
        >>> images, labels = [[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8]
        >>> calibration = tfdml.evaluation.calibrate(images, labels, precision=0.9)
        >>> 0.1 <= calibration.threshold < 4.9, calibration.rates["tar"].mean
        (True, 1.0)
        >>> tfdml.evaluation.calibrate(images, labels, fpir=0.25).rates["fpir"].mean
        0.0
    """
    rates = {kind: rate for kind, rate in zip(KINDS, (fpir, far, precision), strict=True) if rate is not None}
    if len(rates) != 1:
        raise UserError("give one of fpir=, such as 0.01, far=, such as 0.001, and precision=, such as 0.99")
    ((kind, rate),) = rates.items()
    check_share(**{kind: rate, "prior": 0.5 if prior is None else prior, "level": level})
    if fpir is not None:
        if prior is not None:
            raise UserError("`prior` goes with far= or precision=")
        searches = Searches(embeddings, labels, gallery, gallery_labels, own_rows, distance)
        threshold = largest_threshold(searches.unknown, fpir, distance)
        expected, size = searches.rates(threshold, level, new_classes=True), (searches.num_images, searches.num_classes)
        return Calibration(threshold, distance, kind, rate, expected, level, *size)
    if not (gallery is gallery_labels is own_rows is None):
        raise UserError("`gallery`, `gallery_labels` and `own_rows` go with fpir=")
    pairs = _CountedPairs(embeddings, labels, distance)
    histogram = pairs.histogram()
    same, different = histogram.positive, histogram.negative
    if kind == "far":
        threshold = pairs.threshold_of_far(different, rate)
    else:
        threshold = pairs.of_precision(same, different, rate)
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
        *_isotonic(pairs, same, different, prior),
        prior,
    )


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
    found = []
    for fold in names:
        threshold = _most_accurate(distances[folds != fold], same[folds != fold])
        found.append((np.mean((distances[folds == fold] <= threshold) == same[folds == fold]), threshold))
    accuracies, thresholds = np.transpose(found)
    eer, _ = _equal_error(distances[same], distances[~same], 0, 0, int(same.sum()), int((~same).sum()))
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_std": float(accuracies.std(ddof=1) / len(names) ** 0.5),
        "threshold": float(thresholds.mean()),
        "auc": float(roc_auc_score(same, -distances)),
        "eer": eer,
    }


def evaluate_pairs(embeddings: Any, pairs: PairList, distance: str = "euclidean") -> dict[str, float]:
    """Measure embeddings on given pairs or triplets.

    Args:
        embeddings: (N, d).
        pairs: Of the rows of the embeddings.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`.

    Returns:
        Of similar and dissimilar pairs `accuracy`, `auc` and `eer`, as `verify_pairs`; of graded pairs `spearman` and
        `pearson`, the correlations of cosine and similarity, as for the STS benchmark; of triplets `triplet_accuracy`,
        the share whose positive is nearer than the negative. Nothing that the pairs do not suffice for.

    Raises:
        UserError: `distance` is unknown, a pair names no row of the embeddings, or the pairs suffice for nothing.

    Example:
        >>> pairs = tfdml.data.PairList(np.array([[0, 1], [0, 2], [1, 2]]), np.array([1, 0, 0]))
        >>> tfdml.evaluation.evaluate_pairs(np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0]]), pairs)["auc"]
        1.0
    """
    measures = measures_of_pairs(embeddings, pairs, distance)
    if not measures:
        few = f"{len(pairs.rows)} pairs, of which {len(pairs.similar())} are similar, are too few to measure"
        raise UserError(f"{few}: give at least 3, similar and dissimilar ones, or pairs of different similarities")
    return measures


def measures_of_pairs(embeddings: Any, pairs: PairList, distance: str = "euclidean") -> dict[str, float]:
    """As `evaluate_pairs`, but nothing where the pairs suffice for nothing."""
    vectors = check_embeddings(embeddings)
    image_rows(pairs.rows, "pairs", len(vectors))

    def between(rows: np.ndarray, kind: str) -> np.ndarray:
        return rescore(vectors[rows[:, 0]], vectors, rows[:, 1:], k=1, distance=kind)[1][:, 0].astype(np.float64)

    scored, found = pairs.scored(), {}
    rows, similarities = scored[:, :2].astype(np.int64), scored[:, 2]
    same = similarities >= pairs.threshold
    if 0 < same.sum() < len(same) and len(same) > 2:
        # In another order, as folds without one of the two kinds would have no threshold.
        order = np.random.default_rng(0).permutation(len(same))
        measured = verify_pairs(between(rows, distance)[order], same[order], folds=min(10, len(same)))
        found = {name: measured[name] for name in ("accuracy", "auc", "eer")}
    if pairs.graded and len(np.unique(similarities)) > 1:
        cosines = -between(rows, "cosine")
        for name, correlate in (("spearman", spearmanr), ("pearson", pearsonr)):
            # Of embeddings that are all one it is not defined.
            found[name] = float(correlate(cosines, similarities).statistic) if np.ptp(cosines) else 0.0
    if pairs.rows.shape[1] == 3 and len(pairs.rows):
        near, far = (between(pairs.rows[:, [0, end]], distance) for end in (1, 2))
        found["triplet_accuracy"] = float(np.mean(near < far))
    return found


class _CountedPairs(AllPairs):
    """All pairs of the images, counted by distance and at thresholds."""

    precisions = (np.float64,)
    bins = 2**20

    def _below(self, distance: Any) -> float:
        """Return the largest threshold that refuses a distance: a float32 number, before `scale`."""
        return float(np.nextafter(np.float32(distance * self.scale), np.float32(-np.inf))) / self.scale

    def distances_in(self, bins: set[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the distances of the pairs of one class, and of different classes, in each of these bins."""
        found: dict[int, tuple[list, list]] = {k: ([], []) for k in bins}
        chosen_bins = np.zeros(self.bins, bool)
        chosen_bins[list(bins)] = True
        for rows, columns, distances, kept in self.tiles():
            same = self.same(rows, columns)
            values = distances[kept].ravel()
            of = self.bins_of(values)
            here = np.flatnonzero(chosen_bins[of])
            alike = np.zeros(len(here), bool) if same is None else same[kept].ravel()[here]
            for k in np.unique(of[here]):
                for kind in (0, 1):
                    found[int(k)][kind].append(values[here][(of[here] == k) & (alike == (kind == 0))])
        nothing = np.zeros(0, np.float32)
        return {k: tuple(np.concatenate([nothing, *part]) for part in two) for k, two in found.items()}  # type: ignore[misc]

    def thresholds(
        self, different: np.ndarray, ranks: Sequence[int], further: Iterable[int] = ()
    ) -> tuple[list[float], dict[int, tuple[np.ndarray, np.ndarray]]]:
        """Return the largest thresholds that accept at most so many pairs of different classes, and `distances_in`."""
        accepted = np.cumsum(different)
        bins = np.searchsorted(accepted, ranks, side="right").tolist()
        within = self.distances_in({*bins, *further})
        found = []
        for rank, k in zip(ranks, bins, strict=True):
            place = rank - int(accepted[k] - different[k])
            found.append(self._below(np.partition(within[k][1], place)[place]))
        return found, within

    def threshold_of_far(self, different: np.ndarray, far: float) -> float:
        """Return the largest threshold at which the share of accepted pairs of different classes is at most `far`."""
        pairs = int(different.sum())
        rank = int(np.floor(far * pairs))
        if rank < 1:
            raise UserError(f"far={far:g} needs at least {1 / far:,.0f} pairs of different classes, not {pairs:,}")
        (threshold,), _ = self.thresholds(different, [rank])
        if threshold < 0 and self._distance != "dot":
            copies = f"more than {rank:,} of the {pairs:,} pairs of different classes are at distance 0"
            raise UserError(f"far={far:g} cannot be kept to: {copies}; remove the copies, or correct their labels")
        return threshold

    def of_precision(self, same: np.ndarray, different: np.ndarray, precision: float) -> float:
        """Return the largest threshold at which this share of the accepted pairs is of one class."""
        accepted_same, accepted = np.cumsum(same), np.cumsum(different)
        occupied = np.flatnonzero(same + different)
        reached = accepted_same[occupied] >= precision * (accepted_same + accepted)[occupied]
        last = np.max(np.flatnonzero(reached), initial=-1)
        # Within the next bin that holds a pair the precision may still be reached.
        candidates = occupied[max(last, 0) : last + 2].tolist()
        best = None
        for k, (alike, unlike) in sorted(self.distances_in(set(candidates)).items()):
            values = np.concatenate([alike, unlike])
            order = np.argsort(values, kind="stable")
            hits = accepted_same[k] - same[k] + np.cumsum(order < len(alike))
            total = accepted_same[k] - same[k] + accepted[k] - different[k] + np.arange(1, len(values) + 1)
            last_of_ties = np.append(np.diff(values[order]) > 0, True)
            good = np.flatnonzero((hits >= precision * total) & last_of_ties)
            if len(good):
                # Up to the next distance, or the end of the bin, no further pair is accepted.
                beyond = self._below(np.append(values[order], self.edges[k + 1])[good[-1] + 1])
                best = max(beyond, float(values[order][good[-1]]))
        if best is None:
            raise UserError(f"no threshold reaches precision={precision:g} on these images")
        return best

    def operating_points(self, thresholds: Sequence[float], level: float, new_classes: bool) -> list[OperatingPoint]:
        """Return the rates at each threshold (before `scale`), with intervals over classes or for as many new ones."""
        order = np.argsort(thresholds)
        counts = self._accepted_by_class(np.asarray(thresholds, np.float64)[order])
        sizes, points = self.sizes.astype(np.float64), []
        for threshold, place in zip(thresholds, np.argsort(order), strict=True):
            rates = _rates(sizes, [part[..., place] for part in counts], level, new_classes)
            points.append(OperatingPoint(float(threshold) * self.scale, *rates))
        return points

    def _accepted_by_class(self, thresholds: np.ndarray) -> tuple[np.ndarray, ...]:
        """How many pairs are accepted: (C, T) of one class; (C, T) of a class with others; (T,) sums over pairs of
        classes of the square of the count, and of the count times the number of pairs."""
        num, kinds = len(self.sizes), len(thresholds)
        same, rows_of, squares, products = (np.zeros((num, kinds)), np.zeros((num, kinds)), *np.zeros((2, kinds)))
        starts = np.append(0, np.cumsum(self.sizes))
        first = 0
        while first < num:
            # Whole classes: the tile's rows, and no more counts than fit.
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + _ROWS, side="right")) - 1)
            last = min(last, first + max(1, _STRIP // (num * max(kinds, 1))))
            strip = np.zeros((last - first, num, kinds))
            for rows, columns, distances, kept in self.tiles(int(starts[first]), int(starts[last])):
                accepted = distances <= (thresholds[-1] if kinds else -np.inf)
                row, column = np.nonzero(accepted if kept is ... else accepted & kept)
                low = self.classes[columns.start]
                wide = self.classes[columns.stop - 1] + 1 - low
                cell = (self.classes[rows][row] - first) * wide + self.classes[columns][column] - low
                from_kind = np.searchsorted(thresholds, distances[row, column], side="left")
                found = np.bincount(cell * kinds + from_kind, minlength=len(strip) * wide * kinds)
                strip[:, low : low + wide] += found.reshape(len(strip), wide, kinds).cumsum(axis=-1)
            for i, of_class in enumerate(strip):
                same[first + i] = of_class[first + i]
                of_class[first + i] = 0
            rows_of[first:last] += strip.sum(axis=1)
            rows_of += strip.sum(axis=0)
            squares += np.square(strip).sum(axis=(0, 1))
            sizes = self.sizes[first:last, None] * self.sizes.astype(np.float64)
            products += np.einsum("cd,cdt->t", sizes, strip)
            first = last
        return same, rows_of, squares, products


def _rates(sizes: np.ndarray, accepted: Sequence, level: float, new_classes: bool) -> tuple[Interval, ...]:
    """TAR, FAR and precision from what is accepted, as `_accepted_by_class` counts it at one threshold."""
    same, others, squares, products = accepted
    num, images = len(sizes), sizes.sum()
    pairs_same, pairs_others = sizes * (sizes - 1) / 2, sizes * (images - sizes)
    num_same, num_different = pairs_same.sum(), pairs_others.sum() / 2
    hits, false = same.sum(), others.sum() / 2

    def interval(rate, variance, groups, whole):
        variance *= (2 if new_classes else 1) * groups / max(groups - 1, 1)
        return rate_interval(rate, variance, groups, level, whole)

    tar = hits / num_same
    with_pairs = int(np.count_nonzero(pairs_same))
    of_tar = interval(tar, float(np.square((same - tar * pairs_same) / num_same).sum()), with_pairs, with_pairs)
    far = false / num_different
    all_squared = (np.square(sizes).sum() ** 2 - (sizes**4).sum()) / 2
    shared = float(np.square((others - far * pairs_others) / num_different).sum())
    alone = float(squares - 2 * far * products + far**2 * all_squared) / num_different**2
    # Classes share causes, so that it is at least that of independent pairs of classes.
    of_far = interval(far, max(shared - alone, alone), num, num / 2)
    total = hits + false
    if not total:
        return of_tar, of_far, Interval(*[float("nan")] * 4)
    precision = hits / total
    shared = float(np.square((same * (1 - precision) - precision * others) / total).sum())
    alone = precision**2 * float(squares) / total**2
    own = float(np.square(same * (1 - precision) / total).sum())
    variance = shared - alone if shared > alone else own + alone
    return of_tar, of_far, interval(precision, variance, num, num / 2)


def _equal_error(same, different, before_same, before, num_same, num_different) -> tuple[float, float]:
    """Where FNMR = 1 - TAR and FAR cross, and the distance, from the distances around the crossing."""
    values = np.unique(np.concatenate([same, different]))
    tar = (before_same + np.searchsorted(np.sort(same), values, side="right")) / num_same
    far = (before + np.searchsorted(np.sort(different), values, side="right")) / num_different
    tar, far = np.append(before_same / num_same, tar), np.append(before / num_different, far)
    gap = (1 - tar) - far
    k = int(np.argmax(gap <= 0))
    if k == 0:
        return float(far[0] + 1 - tar[0]) / 2, float(values[0])
    share = gap[k - 1] / (gap[k - 1] - gap[k])
    return float(far[k - 1] + share * (far[k] - far[k - 1])), float(values[k - 1])


def _most_accurate(distances: np.ndarray, same: np.ndarray) -> float:
    """Return the threshold with the best accuracy, between two distances; the lowest of several."""
    order = np.argsort(distances, kind="stable")
    values = distances[order]
    right = np.count_nonzero(~same) + np.append(0, np.cumsum(np.where(same[order], 1, -1)))
    possible = np.concatenate([[True], np.diff(values) > 0, [True]])
    k = int(np.argmax(np.where(possible, right, -1)))
    if k in (0, len(values)):
        return float(values[0] - 1 if k == 0 else values[-1])
    return float((values[k - 1] + values[k]) / 2)


def _isotonic(pairs: _CountedPairs, same, different, prior) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots of the probability of "same" by distance."""
    # As if the pairs of one class were this share.
    same, different = same * prior / same.sum(), different * (1 - prior) / different.sum()
    weights = same + different
    some = weights > 0
    edges = pairs.scale * pairs.edges
    centers = (edges[:-1] + edges[1:])[some] / 2
    fitted = IsotonicRegression(increasing=False).fit_transform(
        centers, same[some] / weights[some], sample_weight=weights[some]
    )
    changes = np.flatnonzero(np.diff(fitted))
    kept = np.unique(np.concatenate([[0], changes, changes + 1, [len(fitted) - 1]]))
    return centers[kept], fitted[kept]


def _spread(weights: np.ndarray, most: int) -> np.ndarray:
    """At most `most` places, evenly by rank on a logarithmic and on a linear scale, where something is counted."""
    places = np.flatnonzero(np.diff(weights, prepend=0))
    wanted = np.concatenate([np.geomspace(1, weights[-1], most // 2), np.linspace(1, weights[-1], most - most // 2)])
    return np.unique(places[np.searchsorted(weights[places], np.minimum(wanted, weights[-1]))])
