"""The classes one by one: how well each is found, how tight it is, and what it is taken for."""

from __future__ import annotations

import dataclasses

import numpy as np
from markupsafe import Markup

from tfdml.report.rendering import render
from tfdml.report.retrieved import Retrieved
from tfdml.report.thumbnails import Pictures
from tfdml.retrieval.exact import unit_rows

# Up to this many classes are all listed; of more, the worst and the best.
LISTED = 300
_EXTREMES = 50
# Images of a class whose pairs are measured: the mean of 1,770 pairs is close to that of all.
_MEASURED_PER_CLASS = 60


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """One class.

    Args:
        label: Its id.
        images: How many queries are of it.
        recall: Its queries' Recall@1; NaN where none has an image to find.
        map_at_r: Its queries' MAP@R; NaN as well where R is beyond the depth of the search.
        spread: Mean distance of two of its images; NaN where there is only one.
        nearest: The class that the nearest image of another class belongs to most often; None: there is none.
        nearest_share: For what share of its queries.
    """

    label: int
    images: int
    recall: float
    map_at_r: float
    spread: float
    nearest: int | None
    nearest_share: float


def class_rows(
    found: Retrieved,
    labels: np.ndarray,
    targets: np.ndarray,
    points: np.ndarray,
    point_labels: np.ndarray,
    distance: str,
) -> list[ClassRow]:
    """Every class of the queries, the worst found first, those that cannot be measured last.

    Args:
        found: What the search gave.
        labels: (N,) class ids of the queries.
        targets: (G,) class ids of the gallery.
        points: (M, d) embeddings of all images, queries and gallery.
        point_labels: (M,) their class ids.
        distance: As `nearest_neighbours`.
    """
    classes, place, images = np.unique(labels, return_inverse=True, return_counts=True)
    recall = _mean(found.first_hit == 1, place, len(classes), found.answerable)
    map_at_r = _mean(found.average_precision, place, len(classes), np.isfinite(found.average_precision))
    # The first wrong neighbour's class, by class of the query: the most frequent pair wins, of equals the lower id.
    known = found.wrong >= 0
    pairs, times = np.unique(np.stack([place[known], targets[found.wrong[known]]]), axis=1, return_counts=True)
    nearest: dict[int, tuple[int, int]] = {}
    for (row, other), count in zip(pairs.T.tolist(), times.tolist(), strict=True):
        if count > nearest.get(row, (0, 0))[1]:
            nearest[row] = (other, count)
    spread = within_class_distances(points, point_labels, distance)
    rows = []
    for row, label in enumerate(classes.tolist()):
        other, count = nearest.get(row, (None, 0))
        share = count / int(images[row])
        rows.append(
            ClassRow(label, int(images[row]), float(recall[row]), float(map_at_r[row]), spread[label], other, share)
        )
    return sorted(rows, key=lambda r: (*(np.inf if np.isnan(x) else x for x in (r.recall, r.map_at_r)), r.label))


def _mean(values: np.ndarray, place: np.ndarray, count: int, keep: np.ndarray) -> np.ndarray:
    sums = np.bincount(place[keep], weights=values[keep].astype(np.float64), minlength=count)
    with np.errstate(invalid="ignore"):
        return sums / np.bincount(place[keep], minlength=count)


def within_class_distances(embeddings: np.ndarray, labels: np.ndarray, distance: str) -> dict[int, float]:
    """The mean distance of two images of each class; NaN for a class of one.

    Of a class with more than 60 images, 60 are taken at equal steps.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids.
        distance: As `nearest_neighbours`.

    Example:
        >>> within_class_distances(np.array([[0.0], [3.0], [7.0]]), np.array([5, 5, 8]), "euclidean")
        {5: 3.0, 8: nan}
    """
    order = np.argsort(labels, kind="stable")
    classes, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    result = {}
    for label, start, size in zip(classes.tolist(), starts, sizes, strict=True):
        taken = min(int(size), _MEASURED_PER_CLASS)
        rows = order[start + np.arange(taken) * size // taken]
        result[label] = _mean_distance(embeddings[rows], distance)
    return result


def _mean_distance(x: np.ndarray, distance: str) -> float:
    if len(x) < 2:
        return float("nan")
    x = (unit_rows(x) if distance == "cosine" else x).astype(np.float64)
    upper = np.triu_indices(len(x), 1)
    if distance in ("euclidean", "sqeuclidean"):
        x = x - x.mean(axis=0)
    products = x @ x.T
    if distance == "cosine":
        return float(1 - products[upper].mean())
    if distance == "dot":
        return float(-products[upper].mean())
    norms = np.diagonal(products)
    squared = np.maximum(norms[:, None] + norms[None] - 2 * products, 0.0)[upper]
    return float((np.sqrt(squared) if distance == "euclidean" else squared).mean())


def classes_html(rows: list[ClassRow], pictures: Pictures) -> Markup:
    """The classes as a table that a script lets the reader sort."""
    shown = rows if len(rows) <= LISTED else rows[:_EXTREMES] + rows[-_EXTREMES:]
    return render("classes.html", rows=shown, total=len(rows), extremes=_EXTREMES, class_name=pictures.class_name)
