"""The classes one by one, and which class is taken for which."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from tfdml.report.queries import RankedQueries
from tfdml.report.rendering import render

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from tfdml.data.dataset import ImageDataset

# Up to this many classes are all listed; of more, the worst and the best.
_LISTED_CLASSES = 300
_EXTREMES = 50
# Confusions that are pictured, and listed.
_PICTURED = 12
_LISTED = 50


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """One class.

    Args:
        label: Its id.
        images: How many queries are of it.
        recall: Its queries' Recall@1; NaN where none has an image to find.
        map_at_r: Its queries' MAP@R; NaN as well where R is beyond the depth of the search.
        nearest: The class that the nearest image of another class belongs to most often; None: there is none.
        nearest_share: For what share of its queries.
    """

    label: int
    images: int
    recall: float
    map_at_r: float
    nearest: int | None
    nearest_share: float


def class_rows(ranked: RankedQueries, labels: np.ndarray, targets: np.ndarray) -> list[ClassRow]:
    """Every class of the queries, the worst found first, those that cannot be measured last.

    Args:
        ranked: What the search found.
        labels: (N,) class ids of the queries.
        targets: (G,) class ids of the gallery.
    """
    classes, place, images = np.unique(labels, return_inverse=True, return_counts=True)
    recall = _means(ranked.first_hit == 1, place, len(classes), ranked.answerable)
    map_at_r = _means(ranked.average_precision, place, len(classes), np.isfinite(ranked.average_precision))
    # The first wrong neighbour's class, by class of the query: the most frequent pair wins, of equals the lower id.
    known = ranked.wrong >= 0
    pairs, times = np.unique(np.stack([place[known], targets[ranked.wrong[known]]]), axis=1, return_counts=True)
    nearest: dict[int, tuple[int, int]] = {}
    for (row, other), count in zip(pairs.T.tolist(), times.tolist(), strict=True):
        if count > nearest.get(row, (0, 0))[1]:
            nearest[row] = (other, count)
    rows = []
    for row, (label, size) in enumerate(zip(classes.tolist(), images.tolist(), strict=True)):
        other, count = nearest.get(row, (None, 0))
        rows.append(ClassRow(label, size, float(recall[row]), float(map_at_r[row]), other, count / size))
    return sorted(rows, key=lambda r: (*(np.inf if np.isnan(x) else x for x in (r.recall, r.map_at_r)), r.label))


def _means(values: np.ndarray, place: np.ndarray, count: int, keep: np.ndarray) -> np.ndarray:
    sums = np.bincount(place[keep], weights=values[keep].astype(np.float64), minlength=count)
    with np.errstate(invalid="ignore"):
        return sums / np.bincount(place[keep], minlength=count)


def classes_html(rows: list[ClassRow], names: dict[int, str]) -> Markup:
    """Return the classes as a table that a script lets the reader sort."""
    shown = rows if len(rows) <= _LISTED_CLASSES else rows[:_EXTREMES] + rows[-_EXTREMES:]
    return render("classes.html", rows=shown, total=len(rows), extremes=_EXTREMES, names=names)


# What is taken for what


@dataclasses.dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest image is of another.

    Args:
        label: The class of the queries.
        taken_for: The class of their nearest images.
        count: How many such queries there are.
        queries: How many queries of that class have an image of it to find.
        reverse: How many there are the other way round.
        query: The one of them whose nearest image is nearest.
        neighbour: That image's gallery row.
        distance: How far it is.
    """

    label: int
    taken_for: int
    count: int
    queries: int
    reverse: int
    query: int
    neighbour: int
    distance: float


def confusions(ranked: RankedQueries, labels: np.ndarray, targets: np.ndarray) -> list[Confusion]:
    """Every pair of classes that is confused, the most frequent first, of equals the larger share of its class first.

    Queries without an image of their class to find are not counted: they cannot be right.

    Args:
        ranked: What the search found.
        labels: (N,) class ids of the queries.
        targets: (G,) class ids of the gallery.
    """
    asked = dict(zip(*(a.tolist() for a in np.unique(labels[ranked.answerable], return_counts=True)), strict=True))
    wrong = np.flatnonzero(ranked.answerable & (ranked.first_hit != 1))
    # Nearest first, so that the first of every pair is its example.
    wrong = wrong[np.argsort(ranked.distances[wrong, 0], kind="stable")]
    pairs = np.stack([labels[wrong], targets[ranked.rows[wrong, 0]]])
    kinds, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    times = {(a, b): n for a, b, n in zip(*kinds.tolist(), counts.tolist(), strict=True)}
    result = []
    for (a, b), query in zip(times, wrong[first].tolist(), strict=True):
        row, distance = int(ranked.rows[query, 0]), float(ranked.distances[query, 0])
        result.append(Confusion(a, b, times[a, b], asked[a], times.get((b, a), 0), query, row, distance))
    return sorted(result, key=lambda c: (-c.count, c.queries, c.label, c.taken_for))


def most_confused(pairs: Sequence[Confusion], count: int) -> list[int]:
    """Up to `count` classes that take part in the most frequent confusions, those confused together adjacent."""
    classes: list[int] = []
    for pair in pairs:
        fresh = [label for label in (pair.label, pair.taken_for) if label not in classes]
        if len(classes) + len(fresh) > count:
            break
        classes += fresh
    return classes


def confusions_html(
    pairs: Sequence[Confusion], ranked: RankedQueries, queries: ImageDataset, gallery: ImageDataset
) -> Markup:
    """Render the most frequent confusions with an example each, and more as a table."""
    # Without those whose reverse comes before them.
    one_way = {frozenset((pair.label, pair.taken_for)): pair for pair in reversed(pairs)}
    examples = [pair for pair in pairs if one_way[frozenset((pair.label, pair.taken_for))] is pair]
    return render(
        "confusions.html",
        pairs=pairs,
        examples=examples[:_PICTURED],
        listed=pairs[:_LISTED] if len(pairs) > _PICTURED else [],
        errors=sum(pair.count for pair in pairs),
        total=int(ranked.answerable.sum()),
        names={**gallery.class_names, **queries.class_names},
        queries=queries,
        gallery=gallery,
    )
