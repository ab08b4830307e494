"""Which class is taken for which: queries whose nearest image is of another class, counted by pairs of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdml.report.elements import Column, details, escape, scrolling, table
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
) -> str:
    """The most frequent confusions with an example each, more of them as a table, and the matrix of a few classes."""
    if not pairs:
        return "<p>The nearest image of every query is of its own class.</p>"
    errors = sum(pair.count for pair in pairs)
    total = int(found.answerable.sum())
    intro = (
        f"Of {total:,} queries, {errors:,} have a nearest image of another class: {len(pairs):,} different "
        f"pairs of classes."
    )
    items = "".join(_example(pair, pictures, gallery) for pair in _one_way(pairs)[:_PICTURED])
    body = f'<p class="intro">{intro}</p><ol class="confusions">{items}</ol>'
    if len(pairs) > _PICTURED:
        listed = pairs[:_LISTED]
        more = table(
            [
                Column("Query’s class"),
                Column("Nearest image’s class", css="left"),
                Column("Queries"),
                Column("Of the class, %"),
                Column("The other way"),
            ],
            [
                [
                    escape(pictures.class_name(p.label)),
                    escape(gallery.class_name(p.taken_for)),
                    f"{p.count:,}",
                    f"{100 * p.count / p.queries:.0f}",
                    f"{p.reverse:,}",
                ]
                for p in listed
            ],
            caption="Confusions, the most frequent first",
            css="sortable",
        )
        title = f"The {len(listed)} most frequent of {len(pairs):,} as a table"
        body += details(title, scrolling(more, "Confusions", "tall"))
    return body + _matrix(pairs, found, labels, pictures)


def _one_way(pairs: Sequence[Confusion]) -> list[Confusion]:
    """The pairs without those whose reverse comes before them."""
    seen: set[tuple[int, int]] = set()
    kept = []
    for pair in pairs:
        if (pair.taken_for, pair.label) not in seen:
            seen.add((pair.label, pair.taken_for))
            kept.append(pair)
    return kept


def _example(pair: Confusion, pictures: Pictures, gallery: Pictures) -> str:
    asked, got = pictures.class_name(pair.label), gallery.class_name(pair.taken_for)
    other_way = f", {pair.reverse:,} the other way" if pair.reverse else ""
    share = f"{100 * pair.count / pair.queries:.0f}% of the class{other_way}"
    first = _picture(pictures, pair.query, f"Query of class {asked}")
    second = _picture(gallery, pair.neighbour, f"Its nearest image, of class {got}")
    return (
        f'<li><div class="two">{first}{second}</div><p><span class="name">{escape(asked)}</span> '
        f'<span class="soft">taken for</span> <span class="name">{escape(got)}</span></p>'
        f'<p class="note"><b>{pair.count:,}</b> of {pair.queries:,} queries, {share}; '
        f"these two are {pair.distance:.3f} apart</p></li>"
    )


def _picture(pictures: Pictures, index: int, alt: str) -> str:
    source = pictures.thumbnail(index, _THUMBNAIL)
    title = escape(pictures.dataset.images.name(index))
    return f'<div class="frame"><img src="{source}" alt="{escape(alt)}" title="{title}"></div>'


def _matrix(pairs: Sequence[Confusion], found: Retrieved, labels: np.ndarray, pictures: Pictures) -> str:
    """Shares of the nearest images' classes, for the classes confused most; empty for fewer than three."""
    classes = most_confused(pairs, _MATRIX)
    if len(classes) < 3:
        return ""
    times = {(pair.label, pair.taken_for): pair.count for pair in pairs}
    right = dict.fromkeys(classes, 0)
    asked = dict.fromkeys(classes, 0)
    for label in classes:
        of_class = found.answerable & (labels == label)
        asked[label] = int(of_class.sum())
        right[label] = int((of_class & (found.first_hit == 1)).sum())
    heads = [Column("Query’s class")]
    heads += [
        Column(f'<abbr title="{escape(pictures.class_name(label))}">{place}</abbr>')
        for place, label in enumerate(classes, 1)
    ]
    heads.append(Column("other"))
    rows = []
    for place, label in enumerate(classes, 1):
        cells = [f'<span class="place">{place}</span> {escape(pictures.class_name(label))}']
        shown = 0
        for other in classes:
            count = right[label] if other == label else times.get((label, other), 0)
            shown += count
            cells.append(_shaded(count, asked[label], "right" if other == label else "wrong"))
        cells.append(_shaded(asked[label] - shown, asked[label], "wrong"))
        rows.append(cells)
    text = "Rows: the query’s class. Columns: the class of its nearest image, by number. Cells: queries."
    matrix = table(heads, rows, caption=f"Nearest images of the {len(classes)} classes confused most", css="matrix")
    return details(
        f"The {len(classes)} classes confused most, as a matrix",
        f'<p class="intro">{text}</p>{scrolling(matrix, "Matrix of confusions")}',
    )


def _shaded(count: int, total: int, kind: str) -> str:
    if not count:
        return "<td></td>"
    # Steps rather than a scale: each step keeps its text readable on it, in light and in dark.
    step = min(5, 1 + int(5 * count / total))
    return f'<td class="{kind}{step}">{count:,}</td>'
