"""Retrieval examples: which queries to show, with their neighbours under one embedding or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tfdml.evaluation.per_query import matches_in_gallery, precision_sums
from tfdml.report.rendering import render
from tfdml.report.thumbnails import Pictures
from tfdml.retrieval.exact import nearest_neighbours

# The page needs only a few queries; ranking this many finds good and bad ones without another pass over everything.
_RANKED_QUERIES = 2000
_GROUPS = {
    "random": ("Typical", "drawn at random"),
    "worst": ("Hardest", "fewest neighbours of the query’s own class"),
    "best": ("Best", "most neighbours of the query’s own class"),
    "better": ("Better", "another run finds more than {first}"),
    "worse": ("Worse", "another run finds less than {first}"),
}


@dataclasses.dataclass(frozen=True)
class Example:
    """One query and its neighbours, nearest first."""

    kind: str  # "random", "worst" or "best"
    query: int
    neighbours: np.ndarray  # (k,) gallery rows
    distances: np.ndarray  # (k,)
    hits: np.ndarray  # (k,) bool

    def found(self) -> Iterator[tuple[int, float, bool]]:
        """Row, distance, and whether it is of the query's class, of each neighbour."""
        return zip(self.neighbours.tolist(), self.distances.tolist(), self.hits.tolist(), strict=True)

    @property
    def right(self) -> str:
        """How many of the neighbours shown are right, in words."""
        return f"{int(self.hits.sum())} of {len(self.hits)} right"


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


def choose_queries(ranked: Sequence[Ranked], labels: np.ndarray, count: int) -> dict[str, list[int]]:
    """Which queries to show: drawn at random, better than under the first, and worse than under it.

    Better and worse by the average precision among the neighbours shown, of the run that differs most.

    Args:
        ranked: What each finds for the same queries.
        labels: Class ids of all queries.
        count: How many to choose.

    Returns:
        Places in `ranked` by kind: `random`, `better`, `worse`.
    """
    first = ranked[0].score
    others = np.stack([run.score for run in ranked[1:]]) - first
    labels = labels[ranked[0].queries]
    each = count // 3
    taken: set[int] = set()
    chosen: dict[str, list[int]] = {}
    for kind, gain in (("better", others.max(axis=0)), ("worse", -others.min(axis=0))):
        order = [
            int(place) for place in np.argsort(-gain, kind="stable") if gain[place] > 0 and int(place) not in taken
        ]
        chosen[kind] = spread_over_classes(order, labels)[:each]
        taken.update(chosen[kind])
    fresh = [place for place in range(len(labels)) if place not in taken]
    rest = count - len(taken) if count < 3 else count - 2 * each
    return {"random": spread_over_classes(fresh, labels)[:rest], **chosen}


def gallery_html(examples: Sequence[Example], pictures: Pictures, gallery: Pictures) -> Markup:
    """The examples in groups: each a query and its neighbours."""
    groups = {kind: [{"": example} for example in examples if example.kind == kind] for kind in _GROUPS}
    return _gallery(groups, pictures, gallery, 144)


def side_by_side_html(
    runs: Mapping[str, Mapping[str, Any]],
    pictures: Pictures,
    gallery: Pictures,
    *,
    num_queries: int,
    neighbours: int,
    distance: str,
    seed: int,
) -> Markup:
    """Some queries, each with its neighbours under every run.

    Args:
        runs: By the run's name the embeddings and labels that `rank_queries` takes; all of the same images.
        pictures: The queries.
        gallery: What is searched.
        num_queries: How many queries.
        neighbours: How many neighbours of each.
        distance: As `nearest_neighbours`.
        seed: Of the draw.
    """
    options: dict[str, Any] = {"neighbours": neighbours, "distance": distance, "seed": seed}
    found = {name: rank_queries(**protocol, **options) for name, protocol in runs.items()}
    ranked = {name: run for name, run in found.items() if run is not None}
    chosen = choose_queries(list(ranked.values()), pictures.labels, num_queries) if ranked else {}
    groups = {
        kind: [{name: run.example(kind, place) for name, run in ranked.items()} for place in places]
        for kind, places in chosen.items()
    }
    return _gallery(groups, pictures, gallery, 112)


def _gallery(
    groups: Mapping[str, Sequence[Mapping[str, Example]]], pictures: Pictures, gallery: Pictures, size: int
) -> Markup:
    """Groups of queries by kind, each query with what every run finds, by the run's name."""
    shown = []
    for kind, queries in groups.items():
        if queries:
            title, subtitle = _GROUPS[kind]
            shown.append((title, subtitle.replace("{first}", next(iter(queries[0]))), queries))
    return render("gallery.html", groups=shown, pictures=pictures, gallery=gallery, size=size)
