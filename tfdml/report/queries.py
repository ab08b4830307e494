"""What one search of every query finds: its neighbors, Recall@K, queries to look at, and confused classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from tfdml.evaluation.metrics import average_precision_at_r
from tfdml.evaluation.relevance import Relevance, retrieval_task
from tfdml.evaluation.retrieval import nearest_left

# As far as the curve of Recall@K goes.
_DEPTH = 100
# Neighbors that are kept, to be shown.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class RankedQueries:
    """What N queries find among their nearest gallery images.

    Args:
        matches: (N,) how many gallery images share the query's class, itself not counted.
        hits: (N, depth) whether the nearest images are of the query's class.
        rows: (N, k) gallery rows of the 8 nearest of them, fewer where the gallery is smaller.
        distances: (N, k) how far they are.
    """

    matches: np.ndarray
    hits: np.ndarray
    rows: np.ndarray
    distances: np.ndarray

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    @property
    def shown_hits(self) -> np.ndarray:
        """(N, k) whether the neighbors that are kept are of the query's class."""
        return self.hits[:, : self.rows.shape[1]]

    def recall(self) -> np.ndarray:
        """(depth,) Recall@K for K = 1 .. depth; empty where no query is answerable."""
        hits = np.logical_or.accumulate(self.hits[self.answerable], axis=1)
        return hits.mean(axis=0) if len(hits) else np.zeros(0)

    def neighbors(self, query: int) -> Iterator[tuple[int, float, bool]]:
        """Row, distance, and whether it is of the query's class, of each neighbor that is kept."""
        return zip(*(values[query].tolist() for values in (self.rows, self.distances, self.shown_hits)), strict=True)

    def right(self, query: int) -> str:
        """How many of the neighbors that are kept are right, in words."""
        shown = self.shown_hits[query]
        return f"{int(shown.sum())} of {len(shown)} right"


def rank_queries(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    relevance: Relevance | None = None,
    depth: int = _DEPTH,
    distance: str = "euclidean",
) -> RankedQueries | None:
    """Search every query for its nearest gallery images.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        relevance: As `evaluate_retrieval`, without levels. No image that is ignored is among the neighbors.
        depth: How many neighbors to look at, fewer where the gallery is smaller.
        distance: As `nearest_neighbors`.

    Returns:
        None where there is only one image, hence no neighbor.
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, relevance=relevance)
    depth = min(depth, task.available - task.relevance.most_ignored)
    if depth < 1:
        return None
    parts = [
        (task.relevance.of(block, rows), rows[:, :_SHOWN].copy(), distances[:, :_SHOWN].copy())
        for block, rows, distances in nearest_left(task, depth, distance)
    ]
    return RankedQueries(task.matches, *map(np.concatenate, zip(*parts, strict=True)))


def choose_examples(ranked: RankedQueries, labels: np.ndarray, count: int, seed: int = 0) -> dict[str, list[int]]:
    """Which queries to show, of different classes as far as there are enough; all have an image of their class to find.

    About two fifths are drawn at random, the others are the worst and the best in equal parts, by average precision
    among the neighbors that are shown.

    Args:
        ranked: What the search finds.
        labels: (N,) class ids of the queries.
        count: How many to choose.
        seed: Of the draw.

    Returns:
        Queries by kind: `random`, `worst` and `best`.
    """
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(ranked.answerable))
    hits = ranked.shown_hits[drawn]
    scores = average_precision_at_r(hits, np.minimum(ranked.matches[drawn], hits.shape[1]))
    worst, best = (drawn[np.argsort(sign * scores, kind="stable")] for sign in (1, -1))
    extremes, chosen = count * 3 // 10, dict[str, list[int]]()
    for kind, order, most in (
        ("random", drawn, count - 2 * extremes),
        ("worst", worst, extremes),
        ("best", best, extremes),
    ):
        before = {query for queries in chosen.values() for query in queries}
        chosen[kind] = spread_over_classes([query for query in order.tolist() if query not in before], labels)[:most]
    return {kind: queries for kind, queries in chosen.items() if queries}


def spread_over_classes(rows: Sequence[int], labels: np.ndarray) -> list[int]:
    """`rows` with the first of every class before the others, else in their order.

    Example:
        >>> spread_over_classes([2, 0, 1], np.array([5, 7, 5]))
        [2, 1, 0]
    """
    order = np.asarray(rows, np.int64)
    is_first = np.isin(np.arange(len(order)), np.unique(labels[order], return_index=True)[1])
    return [*order[is_first].tolist(), *order[~is_first].tolist()]


# What is taken for what


@dataclasses.dataclass(frozen=True)
class Confusion:
    """Queries of one class whose nearest image is of another.

    Args:
        label: The class of the queries.
        taken_for: The class of their nearest images.
        count: How many such queries there are.
        queries: How many queries of that class have an image of it to find.
        query: The one of them whose nearest image is nearest.
        neighbor: That image's gallery row.
        distance: How far it is.
    """

    label: int
    taken_for: int
    count: int
    queries: int
    query: int
    neighbor: int
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
    wrong = np.flatnonzero(ranked.answerable & ~ranked.hits[:, 0])
    # Nearest first, so that the first of every pair is its example.
    wrong = wrong[np.argsort(ranked.distances[wrong, 0], kind="stable")]
    pairs = np.stack([labels[wrong], targets[ranked.rows[wrong, 0]]])
    kinds, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    result = []
    for a, b, count, query in zip(*kinds.tolist(), counts.tolist(), wrong[first].tolist(), strict=True):
        row, distance = int(ranked.rows[query, 0]), float(ranked.distances[query, 0])
        result.append(Confusion(a, b, count, asked[a], query, row, distance))
    return sorted(result, key=lambda c: (-c.count, c.queries, c.label, c.taken_for))
