"""Classification by a gallery, with queries of classes that it does not have."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.arguments import number, one_of
from tfdml.errors import UserError, check_positive, check_share
from tfdml.evaluation.calibration import Calibration
from tfdml.evaluation.identification import first_refused, largest_threshold
from tfdml.evaluation.relevance import ids_or_names, joined_labels
from tfdml.registry import DISTANCES
from tfdml.retrieval.exact import (
    check_dimensions,
    check_embeddings,
    nearest_neighbors,
    unit_rows,
)

WEIGHTS = ("uniform", "distance", "softmax")


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
        limit = first_refused(unknown, fpir)
        measures[f"fnir@fpir={fpir:g}"] = float(1 - (right & (distances < limit)).mean())
    return measures
