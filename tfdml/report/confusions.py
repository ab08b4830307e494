"""Which class is taken for which: queries whose nearest image is of another class, counted by pairs of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from tfdml.report.rendering import render
from tfdml.report.retrieved import Retrieved
from tfdml.report.thumbnails import Pictures

_PICTURED = 12
_LISTED = 50
_THUMBNAIL = 96
# Rows of the matrix: more could not be read.
_MATRIX = 24


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


def confusions(found: Retrieved, labels: np.ndarray, targets: np.ndarray) -> list[Confusion]:
    """Every pair of classes that is confused, the most frequent first, of equals the larger share of its class first.

    Queries without an image of their class to find are not counted: they cannot be right.

    Args:
        found: What the search gave.
        labels: (N,) class ids of the queries.
        targets: (G,) class ids of the gallery.
    """
    asked = dict(zip(*(a.tolist() for a in np.unique(labels[found.answerable], return_counts=True)), strict=True))
    wrong = np.flatnonzero(found.answerable & (found.first_hit != 1))
    # Nearest first, so that the first of every pair is its example.
    wrong = wrong[np.argsort(found.nearest_distance[wrong], kind="stable")]
    pairs = np.stack([labels[wrong], targets[found.nearest[wrong]]])
    kinds, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    times = {(a, b): n for a, b, n in zip(*kinds.tolist(), counts.tolist(), strict=True)}
    result = []
    for (a, b), query in zip(kinds.T.tolist(), wrong[first].tolist(), strict=True):
        row, distance = int(found.nearest[query]), float(found.nearest_distance[query])
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
    pairs: Sequence[Confusion], found: Retrieved, labels: np.ndarray, pictures: Pictures, gallery: Pictures
) -> Markup:
    """The most frequent confusions with an example each, more of them as a table, and the matrix of a few classes."""
    return render(
        "confusions.html",
        pairs=pairs,
        examples=_one_way(pairs)[:_PICTURED],
        listed=pairs[:_LISTED] if len(pairs) > _PICTURED else [],
        errors=sum(pair.count for pair in pairs),
        total=int(found.answerable.sum()),
        matrix=_matrix(pairs, found, labels),
        pictures=pictures,
        gallery=gallery,
        size=_THUMBNAIL,
    )


def _one_way(pairs: Sequence[Confusion]) -> list[Confusion]:
    """The pairs without those whose reverse comes before them."""
    seen: set[tuple[int, int]] = set()
    kept = []
    for pair in pairs:
        if (pair.taken_for, pair.label) not in seen:
            seen.add((pair.label, pair.taken_for))
            kept.append(pair)
    return kept


def _matrix(pairs: Sequence[Confusion], found: Retrieved, labels: np.ndarray) -> dict[int, list[tuple[int, str]]]:
    """A row per class of those confused most: how many nearest images are of each of them, and of all others.

    With each number its shade, a class of the style sheet. Empty for fewer than three classes.
    """
    classes = most_confused(pairs, _MATRIX)
    if len(classes) < 3:
        return {}
    times = {(pair.label, pair.taken_for): pair.count for pair in pairs}
    rows = {}
    for label in classes:
        of_class = found.answerable & (labels == label)
        asked = int(of_class.sum())
        times[label, label] = int((of_class & (found.first_hit == 1)).sum())
        counts = [times.get((label, other), 0) for other in classes]
        cells = [(n, _shade(n, asked, other == label)) for n, other in zip(counts, classes, strict=True)]
        others = asked - sum(counts)
        rows[label] = [*cells, (others, _shade(others, asked, False))]
    return rows


def _shade(count: int, total: int, right: bool) -> str:
    if not count:
        return ""
    # Steps rather than a scale: each step keeps its text readable on it, in light and in dark.
    return f"{'right' if right else 'wrong'}{min(5, 1 + int(5 * count / total))}"
