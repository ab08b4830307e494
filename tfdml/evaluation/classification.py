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
from tfdml.retrieval.exact import check_dimensions, check_embeddings, unit_rows
from tfdml.retrieval.identities import Identities, check_rule, group_numbers

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
    """Classifies by a vote of the k nearest images of a gallery, or by the nearest class.

    Adding a class is adding its images: nothing is trained. A query whose nearest image of the
    class voted for is further away than the threshold is of no known class.

    With `per_class="mean"`, it is the nearest class mean (Snell et al., 2017, "Prototypical
    networks for few-shot learning"), and the confidence is that among the k nearest classes.

    Args:
        embeddings: (G, d) of the gallery.
        labels: (G,) class ids (integers) or names.
        k: The number of images that vote, or of classes; all, where there are fewer.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        weights: What a vote weighs. `uniform`: 1. `distance`: the inverse of the distance (Dudani,
            1976). `softmax`: exp(-distance / temperature) (Wu et al., 2018, "Unsupervised feature
            learning via non-parametric instance discrimination").
        temperature: Of `softmax`.
        threshold: The largest distance of a known class: a `Calibration` from
            `calibrate(..., fpir=0.01)`, or a number in this `distance`. None: every query is of a
            known class. See also `fit_threshold`.
        per_class: What stands for a class: `nearest` (each image), `mean` or `max_of_means`, see
            `tfdml.retrieval.Identities`.
        groups: (G,) for the means: the group of each image, such as its session, a number or a
            name.

    Raises:
        UserError: The gallery is empty or has other labels than one a row; an argument is out of
            range; the calibration is of another distance or rule, or of pairs.

    Example:
        >>> gallery, names = [[0.0], [0.1], [5.0]], ["cat", "cat", "dog"]
        >>> classifier = tfdml.evaluation.KNNClassifier(gallery, names, k=1, distance="euclidean",
        ...     threshold=1.0)
        >>> classifier.classify([[0.2], [5.1], [9.0]]).labels.tolist()
        ['cat', 'dog', 'unknown']
        >>> by_means = tfdml.evaluation.KNNClassifier([[0.0], [4.0], [3.0]], ["a", "a", "b"],
        ...     distance="euclidean", per_class="mean")
        >>> by_means.classify([[3.9]]).labels.tolist()
        ['b']
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
        per_class: str = "nearest",
        groups: Any = None,
    ):
        check_positive(k=k)
        check_rule(per_class, groups)
        if not temperature > 0:
            raise UserError(f"temperature must be above 0; got {temperature}")
        self.k = k
        self.weights = one_of("weights", weights, WEIGHTS)
        self.temperature = temperature
        self.per_class = per_class
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
        self.groups = None if groups is None else np.zeros(0, object)
        self.add(embeddings, labels, groups)

    def add(self, embeddings: Any, labels: Any, groups: Any = None) -> None:
        """Add images of known or of new classes to the gallery.

        Args:
            embeddings: (n, d).
            labels: (n,) class ids or names.
            groups: (n,) their groups, where those before have some.

        Raises:
            UserError: Embeddings that are not finite or of another dimension, or not one label per
                embedding.
        """
        embeddings = check_embeddings(embeddings)
        check_dimensions(embeddings, self.embeddings)
        present = len(self.labels)
        if (groups is None) != (self.groups is None):
            raise UserError("give them with all images, or with none", groups=...)
        if self.groups is not None:
            group_numbers(groups, len(embeddings))
            self.groups = np.concatenate([self.groups, np.asarray(groups, object)])
        self.labels = joined_labels(self.labels, ids_or_names(labels, len(embeddings)))
        self.embeddings = np.concatenate([self.embeddings, embeddings])
        self._update(present)
        if self._calibration is not None:
            size = len(self._identities)
            self._calibration.for_searches(self.distance, size, self.per_class)

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
        limit = np.inf if self.threshold is None else self.threshold
        labels = np.where(distances <= limit, self._names[closed], self.unknown)
        return Predictions(labels, self._names[closed], distances, confidences)

    def _update(self, present: int) -> None:
        """Find the classes, and check the vectors beyond those that were present before."""
        self._names, places = np.unique(self.labels, return_inverse=True)
        groups = group_numbers(self.groups, len(places))
        self._identities = Identities(
            self.embeddings, places, self.per_class, self.distance, groups
        )
        names = self._names[self._identities.reference_classes]
        first = present if self.per_class == "nearest" else 0
        warn_of_indistinct(self._identities.references, names, self.distance, first=first)

    def _votes(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Place of the class, distance and confidence of each query."""
        k = min(self.k, len(self._identities))
        classes, distances = self._identities.search(queries, k)
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
        votes = np.zeros(distances.shape)
        for place in range(k):
            is_same = classes == classes[:, place, None]
            votes[:, place] = np.sum(weights * is_same, axis=1)
        best = np.argmax(votes, axis=1)
        every = np.arange(len(queries))
        return (
            classes[every, best],
            distances[every, best],
            votes[every, best] / weights.sum(axis=1),
        )


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
        classifier: A `KNNClassifier`.
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
    predictions = classifier.classify(queries)
    labels = ids_or_names(labels, len(predictions.labels))
    is_known = np.isin(labels, classifier.classes)
    if not is_known.any():
        raise UserError("no query is of a class in the gallery")
    right = (predictions.closed == labels)[is_known]
    _, classes = np.unique(labels[is_known], return_inverse=True)
    of_class = np.bincount(classes, weights=right) / np.bincount(classes)
    num_known = int(is_known.sum())
    measures = {
        "accuracy": float(right.mean()),
        "macro_accuracy": float(of_class.mean()),
        "num_known": num_known,
        "num_unknown": len(labels) - num_known,
    }
    if classifier.threshold is not None:
        accepted = predictions.distances <= classifier.threshold
        measures["known_accepted"] = float((accepted[is_known] & right).mean())
        if not is_known.all():
            measures["unknown_accepted"] = float(accepted[~is_known].mean())
    if is_known.all():
        return measures
    return measures | _open_set(predictions.distances, is_known, right, fpirs)


def _open_set(
    distances: np.ndarray, is_known: np.ndarray, right: np.ndarray, fpirs: Sequence[float]
) -> dict[str, float]:
    """Return the measures of queries of known and of unknown classes at all thresholds.

    Args:
        distances: (Q,).
        is_known: (Q,) bool.
        right: Of each known query, whether its class is found.
        fpirs: The false positive identification rates to report.
    """
    from sklearn.metrics import roc_auc_score

    near = distances[is_known]
    unknown = np.sort(distances[~is_known])
    measures = {"auroc": float(roc_auc_score(is_known, -distances))}
    # Of each correct query, the share of unknown ones that are further away; ties count half.
    nearer = np.searchsorted(unknown, near, "left") + np.searchsorted(unknown, near, "right")
    beyond = 1 - nearer / 2 / len(unknown)
    measures["oscr"] = float((beyond * right).sum() / len(right))

    for fpir in fpirs:
        check_share(fpirs=fpir)
        limit = first_refused(unknown, fpir)
        measures[f"fnir@fpir={fpir:g}"] = float(1 - (right & (near < limit)).mean())
    return measures
