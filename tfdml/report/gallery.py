"""Retrieval examples: which queries to show, with their neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdml.evaluation.retrieval import matches_in_gallery, precision_sums
from tfdml.evaluation.search.exact import nearest_neighbours
from tfdml.report.elements import escape
from tfdml.report.thumbnails import Pictures

# The page needs only a few queries; ranking this many finds good and bad ones without another pass over everything.
_RANKED_QUERIES = 2000
_GROUPS = {
    "random": ("Typical", "drawn at random"),
    "worst": ("Hardest", "fewest neighbours of the query’s own class"),
    "best": ("Best", "most neighbours of the query’s own class"),
}

KEY = (
    '<ul class="key"><li class="hit"><span class="badge" aria-hidden="true">✓</span>same class as the query</li>'
    '<li class="miss"><span class="badge" aria-hidden="true">✗</span>another class</li></ul>'
)


@dataclasses.dataclass(frozen=True)
class Example:
    """One query and its neighbours, nearest first."""

    kind: str  # "random", "worst" or "best"
    query: int
    neighbours: np.ndarray  # (k,) gallery rows
    distances: np.ndarray  # (k,)
    hits: np.ndarray  # (k,) bool


@dataclasses.dataclass(frozen=True)
class Ranked:
    """The neighbours of some queries.

    Args:
        queries: (Q,) rows of the queries.
        rows: (Q, k) gallery rows, nearest first.
        distances: (Q, k).
        hits: (Q, k) bool.
        score: (Q,) average precision among the k.
    """

    queries: np.ndarray
    rows: np.ndarray
    distances: np.ndarray
    hits: np.ndarray
    score: np.ndarray

    def example(self, kind: str, place: int) -> Example:
        """One of them."""
        return Example(kind, int(self.queries[place]), self.rows[place], self.distances[place], self.hits[place])


def rank_queries(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    neighbours: int,
    distance: str,
    seed: int,
) -> Ranked | None:
    """The neighbours of up to 2,000 queries drawn at random among those with an image of their class to find.

    None where there is none. The draw depends on the labels and the seed alone.
    """
    matches = matches_in_gallery(labels, gallery_labels)
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(matches > 0))[:_RANKED_QUERIES]
    if not len(drawn) or neighbours < 1:
        return None
    searched, targets = (embeddings, labels) if gallery is None else (gallery, gallery_labels)
    rows, distances = nearest_neighbours(
        embeddings[drawn],
        searched,
        k=min(neighbours, len(searched) - (gallery is None)),
        distance=distance,
        own_rows=drawn if gallery is None else None,
    )
    hits = np.asarray(targets)[rows] == labels[drawn][:, None]
    score = precision_sums(hits, np.minimum(matches[drawn], rows.shape[1]))[0]
    return Ranked(drawn, rows, distances, hits, score)


def choose_examples(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    num_queries: int = 10,
    neighbours: int = 8,
    distance: str = "euclidean",
    seed: int = 0,
) -> list[Example]:
    """Some queries drawn at random, some whose nearest images are mostly wrong, some whose are mostly right.

    Right and wrong by average precision among the neighbours shown. Of up to 2,000 queries drawn at random, about
    two fifths of those shown are the first drawn, the rest worst and best in equal parts, of different classes as
    far as there are enough. The same arguments give the same choice.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        num_queries: How many queries, fewer where there are not as many with an image of their class to find.
        neighbours: How many neighbours of each, fewer where the gallery is smaller.
        distance: As `nearest_neighbours`.
        seed: Of the draw.
    """
    ranked = rank_queries(
        embeddings, labels, gallery, gallery_labels, neighbours=neighbours, distance=distance, seed=seed
    )
    if ranked is None or num_queries < 1:
        return []
    taken: list[tuple[str, int]] = []

    def take(kind: str, order: np.ndarray, count: int) -> None:
        used = {place for _, place in taken}
        fresh = [int(place) for place in order if int(place) not in used]
        chosen = spread_over_classes(fresh, labels[ranked.queries])[:count]
        taken.extend((kind, place) for place in chosen)

    extremes = (num_queries * 3) // 10
    take("random", np.arange(len(ranked.queries)), num_queries - 2 * extremes)
    take("worst", np.argsort(ranked.score, kind="stable"), extremes)
    take("best", np.argsort(-ranked.score, kind="stable"), extremes)
    return [ranked.example(kind, place) for kind, place in taken]


def spread_over_classes(places: Sequence[int], labels: np.ndarray) -> list[int]:
    """`places` with the first of every class before the others, else in their order.

    Example:
        >>> spread_over_classes([2, 0, 1], np.array([5, 7, 5]))
        [2, 1, 0]
    """
    seen: set[int] = set()
    first: list[int] = []
    others: list[int] = []
    for place in places:
        (others if int(labels[place]) in seen else first).append(place)
        seen.add(int(labels[place]))
    return first + others


def gallery_html(examples: Sequence[Example], pictures: Pictures, gallery: Pictures, thumbnail_size: int = 144) -> str:
    """The examples as HTML: groups of rows, each a query and an ordered list of its neighbours.

    A neighbour of the query's class is framed green and marked with a tick, another red with a cross, and the words
    are there for whoever sees neither.
    """
    parts = []
    for kind, (title, subtitle) in _GROUPS.items():
        group = [example for example in examples if example.kind == kind]
        if group:
            heading = f"<h3>{title} <span>{subtitle}</span></h3>"
            rows = [_row(example, pictures, gallery, thumbnail_size) for example in group]
            parts.append(f'<section class="group">{heading}{"".join(rows)}</section>')
    return "".join(parts)


def _row(example: Example, pictures: Pictures, gallery: Pictures, size: int) -> str:
    figure = query_html(example.query, pictures, size, count_right(example))
    label = f"Nearest to the query {pictures.class_of(example.query)}, {count_right(example)}"
    return (
        f'<div class="example"><div class="query">{figure}</div>{neighbours_html(example, gallery, size, label)}</div>'
    )


def count_right(example: Example) -> str:
    """How many of the neighbours shown are right, in words."""
    return f"{int(example.hits.sum())} of {len(example.hits)} right"


def query_html(query: int, pictures: Pictures, size: int, note: str) -> str:
    """A query with its class."""
    name = pictures.class_of(query)
    return _figure(pictures, query, size, alt=f"Query of class {name}", badge="", name=name, note=note)


def neighbours_html(example: Example, gallery: Pictures, size: int, label: str) -> str:
    """The neighbours as an ordered list called `label`."""
    items = []
    neighbours = zip(example.neighbours, example.distances, example.hits, strict=True)
    for rank, (row, distance, hit) in enumerate(neighbours, 1):
        name = gallery.class_of(int(row))
        verdict, mark = ("hit", "✓") if hit else ("miss", "✗")
        picture = _figure(
            gallery,
            int(row),
            size,
            alt=f"Neighbour {rank}, {verdict}: {name}",
            badge=f'<span class="badge" aria-hidden="true">{mark}</span>',
            name=name,
            note=f"{distance:.3f}",
        )
        items.append(f'<li class="{verdict}">{picture}</li>')
    return f'<ol class="neighbours" aria-label="{escape(label)}">{"".join(items)}</ol>'


def _figure(pictures: Pictures, index: int, size: int, *, alt: str, badge: str, name: str, note: str) -> str:
    title, name = escape(pictures.dataset.images.name(index)), escape(name)
    return (
        f'<figure><div class="frame"><img src="{pictures.thumbnail(index, size)}" alt="{escape(alt)}" title="{title}">'
        f'{badge}</div><figcaption><span class="name" title="{name}">{name}</span><span class="note">{note}</span>'
        "</figcaption></figure>"
    )
