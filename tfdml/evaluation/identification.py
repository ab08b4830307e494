"""Identification: what queries of known and of unknown classes find in a gallery, and the rates at a threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from tfdml.errors import UserError, check_share
from tfdml.evaluation.intervals import Interval, rate_interval
from tfdml.evaluation.relevance import ids_or_names
from tfdml.retrieval.exact import check_embeddings, neighbor_blocks


def largest_threshold(distances: Any, fpir: float, distance: str) -> float:
    """Return the largest threshold within which at most this share of the distances lies.

    Args:
        distances: (Q,) float32, of queries of unknown classes to what they find.
        fpir: The share.
        distance: What the distances are.

    Raises:
        UserError: `fpir` is not between 0 and 1, below what so few queries can show, or exceeded by exact copies.
    """
    check_share(fpir=fpir)
    distances, allowed = np.sort(np.asarray(distances, np.float32)), int(np.floor(fpir * len(distances)))
    if allowed < 1:
        raise UserError(
            f"fpir={fpir:g} needs at least {1 / fpir:,.0f} queries of unknown classes, not {len(distances):,}"
        )
    if distance != "dot" and distances[allowed] <= 0:
        copies = f"{np.count_nonzero(distances <= 0):,} of {len(distances):,} queries have a copy in another class"
        raise UserError(f"no threshold reaches fpir={fpir:g}: {copies}; find them with tfdml audit")
    return float(np.nextafter(distances[allowed], np.float32(-np.inf)))


class Searches:
    """The nearest image of a gallery to each query, and the nearest of those that are of other classes.

    Attributes:
        nearest: (Q,) float32 distance to the nearest image, which is not the query itself.
        right: (Q,) bool, whether that is of the query's class.
        known: (Q,) bool, whether the gallery has an image of the query's class, other than the query itself.
        unknown: (Q,) float32 distance to the nearest image of another class: what the query finds where its class is
            unknown.
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
        UserError: Embeddings that `nearest_neighbors` refuses, not one label for each, or a query without an image of
            another class in the gallery.
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
        if (labels.dtype.kind in "iu") != (gallery_labels.dtype.kind in "iu"):
            raise UserError(f"labels are of type {labels.dtype}, those of the gallery of {gallery_labels.dtype}")
        codes = np.unique(np.concatenate([gallery_labels, labels]), return_inverse=True)[1]
        classes, self._own = codes[: len(gallery)], codes[len(gallery) :]
        sizes = np.bincount(classes, minlength=codes.max() + 1)
        self.num_images, self.num_classes = len(gallery), int(np.count_nonzero(sizes))
        if sizes[self._own].max() == len(gallery):
            raise UserError("the rates of unknown classes need a gallery of at least two classes")

        def nearest(**left_out: Any) -> tuple[np.ndarray, np.ndarray]:
            blocks = neighbor_blocks(embeddings, gallery, k=1, distance=distance, own_rows=own_rows, **left_out)
            parts = [(rows[:, 0], distances[:, 0]) for _, rows, distances in blocks]
            rows, distances = map(np.concatenate, zip(*parts, strict=True))
            return classes[rows], distances

        self._other, self.unknown = nearest(
            ignored=lambda block, rows: classes[rows] == self._own[block, None], most_ignored=int(sizes.max())
        )
        closest, self.nearest = nearest()
        self.right = closest == self._own
        self.known = sizes[self._own] > (own_rows is not None)

    def rates(self, threshold: float, level: float, new_classes: bool) -> dict[str, Interval]:
        """Return `fpir`, and `tpir` where there are known queries, with intervals over the classes of the queries."""
        accepted = self.unknown <= threshold
        size = max(self._own.max(), self._other.max()) + 1
        counts = sparse.coo_array(
            (np.ones(accepted.sum()), (self._own[accepted], self._other[accepted])), shape=(size, size)
        ).tocsr()
        # Two classes that lie near one another are falsely found by the queries of both.
        mutual = float(counts.multiply(counts.T).sum()) / len(accepted) ** 2
        rates = {"fpir": _over_classes(accepted, self._own, mutual, level, new_classes)}
        if self.known.any():
            answered = (self.right & (self.nearest <= threshold))[self.known]
            rates["tpir"] = _over_classes(answered, self._own[self.known], 0.0, level, new_classes)
        return rates


def _over_classes(hits: np.ndarray, classes: np.ndarray, mutual: float, level: float, new_classes: bool) -> Interval:
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
    """Measures the rates of searches of a gallery at a given threshold, such as that of a `Calibration`.

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
        - `fpir`: false positive identification rate: the share of the queries for which an image of another class lies
          within the threshold, as if the query's class were unknown (NIST FRVT 1:N; ISO/IEC 19795-1).
        - `tpir`: true positive identification rate, 1 - FNIR, also called detection and identification rate: the share
          of the queries of known classes whose nearest image is of the right class and within the threshold. Not where
          there is none.

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
    return searches.rates(threshold, level, new_classes=False)
