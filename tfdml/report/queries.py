"""What one search of every query finds: its neighbours, Recall@K, and queries to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.errors import UserError
from tfdml.evaluation.per_query import dataset_roles, left_over, precision_sums, retrieval_task
from tfdml.evaluation.relevance import Relevance
from tfdml.report.rendering import render
from tfdml.retrieval.exact import check_embeddings, neighbour_blocks

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from matplotlib.figure import Figure

    from tfdml.data.dataset import ImageDataset

# As far as the curve of Recall@K goes. Average precision at R is known for R up to this too.
_DEPTH = 1000
# What is looked at of every query, at least: most find an image of their class within it.
_AT_FIRST = 32
# Neighbours that are kept, to be shown.
_KEPT = 8
_GROUPS = {
    "random": ("Typical", "drawn at random"),
    "worst": ("Hardest", "fewest neighbours of the query’s own class"),
    "best": ("Best", "most neighbours of the query’s own class"),
    "better": ("Better", "another run finds more than {first}"),
    "worse": ("Worse", "another run finds less than {first}"),
}


@dataclasses.dataclass(frozen=True)
class RankedQueries:
    """What N queries find among their `depth` nearest gallery images.

    Args:
        depth: How many neighbours were looked at.
        matches: (N,) how many gallery images share the query's class, itself not counted.
        first_hit: (N,) rank, from 1, of the nearest image of the query's class; 0: not among `depth`.
        wrong: (N,) gallery row of the nearest image of another class; -1: not among `depth`.
        average_precision: (N,) AP@R; NaN where there is nothing to find or R is beyond `depth`.
        rows: (N, k) gallery rows of the 8 nearest images, fewer where the gallery is smaller.
        distances: (N, k) how far they are.
        hits: (N, k) whether they are of the query's class.
    """

    depth: int
    matches: np.ndarray
    first_hit: np.ndarray
    wrong: np.ndarray
    average_precision: np.ndarray
    rows: np.ndarray
    distances: np.ndarray
    hits: np.ndarray

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    def recall(self) -> np.ndarray:
        """(depth,) Recall@K for K = 1 .. depth; empty where no query is answerable."""
        ranks = self.first_hit[self.answerable]
        found = np.bincount(ranks, minlength=self.depth + 1)[1:]
        return np.cumsum(found) / len(ranks) if len(ranks) else np.zeros(0)

    def neighbours(self, query: int) -> Iterator[tuple[int, float, bool]]:
        """Row, distance, and whether it is of the query's class, of each neighbour that is kept."""
        return zip(*(values[query].tolist() for values in (self.rows, self.distances, self.hits)), strict=True)

    def right(self, query: int) -> str:
        """How many of the neighbours that are kept are right, in words."""
        return f"{int(self.hits[query].sum())} of {len(self.hits[query])} right"


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
    """Search every query as deep as average precision needs, and on to `depth` the few that have no hit by then.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        relevance: As `evaluate_retrieval`, without levels. No image that is ignored is among the neighbours.
        depth: How many neighbours to look at, fewer where the gallery is smaller.
        distance: As `nearest_neighbours`.

    Returns:
        None where there is only one image, hence no neighbour.
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, relevance=relevance)
    depth = min(depth, task.available - task.relevance.most_ignored)
    if depth < 1:
        return None
    matches = task.matches

    def found(queries: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        own_rows = None if task.own is None else task.own[queries]
        options: dict[str, Any] = {"k": task.depth_with_ignored(k), "distance": distance, "own_rows": own_rows}
        for block, rows, distances in neighbour_blocks(task.queries[queries], task.searched, **options):
            ignored = task.relevance.ignored(queries[block], rows)
            place = left_over(np.broadcast_to(np.arange(rows.shape[1]), rows.shape), ignored, k)
            rows, distances = np.take_along_axis(rows, place, axis=1), np.take_along_axis(distances, place, axis=1)
            yield queries[block], rows, distances, task.relevance.of(queries[block], rows)

    # One more than R neighbours: they hold an image of another class.
    shallow = min(depth, max(_AT_FIRST, int(matches.max()) + 1))
    first_hit, wrong = np.zeros(len(labels), np.int64), np.zeros(len(labels), np.int64)
    average_precision, kept = np.full(len(labels), np.nan), []
    for block, rows, distances, hits in found(np.arange(len(labels)), shallow):
        first_hit[block], miss = _first(hits), _first(~hits)
        wrong[block] = np.where(miss > 0, rows[np.arange(len(rows)), miss - 1], -1)
        known = np.flatnonzero((matches[block] > 0) & (matches[block] <= shallow))
        if len(known):
            deepest = int(matches[block][known].max())
            average_precision[block[known]] = precision_sums(hits[known, :deepest], matches[block][known])[0]
        kept.append([values[:, :_KEPT].copy() for values in (rows, distances, hits)])
    late = np.flatnonzero((first_hit == 0) & (matches > 0))
    if len(late) and shallow < depth:
        for block, _, _, hits in found(late, depth):
            first_hit[block] = _first(hits)
    nearest = (np.concatenate(values) for values in zip(*kept, strict=True))
    return RankedQueries(depth, matches, first_hit, wrong, average_precision, *nearest)


def _first(marked: np.ndarray) -> np.ndarray:
    """Return the place, from 1, of the first True of each row; 0 where there is none."""
    return np.where(marked.any(axis=1), marked.argmax(axis=1) + 1, 0)


def choose_examples(
    ranked: Sequence[RankedQueries], labels: np.ndarray, count: int, seed: int = 0
) -> dict[str, list[int]]:
    """Which queries to show.

    Of one run, about two fifths are drawn at random, the rest are the worst and the best in equal parts, by average
    precision among the neighbours that are kept. Of several, a third each are better than under the first run and worse
    than under it, by the run that differs most, the others are drawn. All are of different classes as far as there are
    enough, and have an image of their class to find.

    Args:
        ranked: What each run finds for the same queries.
        labels: (N,) class ids of the queries.
        count: How many to choose.
        seed: Of the draw.

    Returns:
        Queries by kind: `random`, `worst` and `best`, or `random`, `better` and `worse`.
    """
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(ranked[0].answerable))
    matches = np.minimum(ranked[0].matches[drawn], ranked[0].hits.shape[1])
    scores = [precision_sums(run.hits[drawn], matches)[0] for run in ranked]
    orders: dict[str, tuple[np.ndarray, int]]
    if len(ranked) == 1:
        worst, best = (drawn[np.argsort(sign * scores[0], kind="stable")] for sign in (1, -1))
        extremes = count * 3 // 10
        orders = {"random": (drawn, count - 2 * extremes), "worst": (worst, extremes), "best": (best, extremes)}
    else:
        gains = np.stack(scores[1:]) - scores[0]
        orders = {
            kind: (drawn[order := np.argsort(-gain, kind="stable")][gain[order] > 0], count // 3)
            for kind, gain in (("better", gains.max(axis=0)), ("worse", -gains.min(axis=0)))
        }
        orders["random"] = drawn, count - 2 * (count // 3)
    chosen: dict[str, list[int]] = {}
    for kind, (order, most) in orders.items():
        taken = {query for queries in chosen.values() for query in queries}
        fresh = [query for query in order.tolist() if query not in taken]
        chosen[kind] = spread_over_classes(fresh, labels)[:most]
    return {kind: chosen[kind] for kind in _GROUPS if chosen.get(kind)}


def spread_over_classes(rows: Sequence[int], labels: np.ndarray) -> list[int]:
    """`rows` with the first of every class before the others, else in their order.

    Example:
        >>> spread_over_classes([2, 0, 1], np.array([5, 7, 5]))
        [2, 1, 0]
    """
    order = np.asarray(rows, np.int64)
    is_first = np.isin(np.arange(len(order)), np.unique(labels[order], return_index=True)[1])
    return [*order[is_first].tolist(), *order[~is_first].tolist()]


def examples_html(
    runs: Mapping[str, RankedQueries | None], queries: ImageDataset, gallery: ImageDataset, count: int
) -> Markup:
    """Return some queries in groups, each with its neighbours under every run.

    Args:
        runs: What each run finds, by its name.
        queries: The images that are searched for.
        gallery: Those that are searched.
        count: How many queries.
    """
    ranked = {name: run for name, run in runs.items() if run is not None}
    chosen = choose_examples(list(ranked.values()), queries.labels, count) if ranked else {}
    groups = [(*_GROUPS[kind], rows) for kind, rows in chosen.items()]
    return render("examples.html", groups=groups, ranked=ranked, queries=queries, gallery=gallery)


def show_neighbors(
    dataset: ImageDataset, embeddings: Any, *, num_queries: int = 5, k: int = 6, seed: int = 0
) -> Figure:
    """Draw queries with their nearest images: green frames for their own class, red ones for others.

    A notebook displays the figure; `figure.savefig("neighbors.png")` writes it. Queries are of different classes, drawn
    at random. With query and gallery roles (In-Shop), queries are searched in the gallery.

    Args:
        dataset: The images.
        embeddings: (N, d), one row per image.
        num_queries: The number of queries, one row each.
        k: The number of neighbors, at most 8.
        seed: Of the draw.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        UserError: Not as many embeddings as images, no image to find, or a number out of range.

    Example:
        >>> figure = tfdml.report.show_neighbors(test, embeddings, num_queries=2, k=3)
        >>> len(figure.axes)
        8
    """
    from matplotlib.figure import Figure

    if num_queries < 1 or not 1 <= k <= _KEPT:
        raise UserError(f"num_queries must be at least 1 and k between 1 and {_KEPT}; got {num_queries} and {k}")
    embeddings = check_embeddings(embeddings)
    if len(embeddings) != len(dataset.labels):
        raise UserError(f"{len(embeddings)} embeddings for the {len(dataset.labels)} images of {dataset.name}")
    of_queries, of_gallery = dataset_roles(dataset)
    labels, searched = dataset.labels[of_queries], of_queries if of_gallery is None else of_gallery
    gallery = () if of_gallery is None else (embeddings[of_gallery], dataset.labels[of_gallery])
    ranked = rank_queries(embeddings[of_queries], labels, *gallery, depth=_KEPT)
    if ranked is None or not ranked.answerable.any():
        raise UserError(f"{dataset.name}: no image has another one of its class to find")
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(ranked.answerable))
    chosen = spread_over_classes(drawn.tolist(), labels)[:num_queries]
    k = min(k, ranked.rows.shape[1])
    figure = Figure((1.1 * (k + 1), 1.2 * len(chosen)), layout="constrained")
    for row, query in zip(figure.subplots(len(chosen), k + 1, squeeze=False), chosen, strict=True):
        shown = [(of_queries[query], "black")]
        shown += [(searched[i], "#1a7f37" if hit else "#cf222e") for i, _, hit in [*ranked.neighbours(query)][:k]]
        for axes, (index, color) in zip(row, shown, strict=True):
            axes.imshow(dataset.images.picture(int(index)))
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(color=color, linewidth=3)
        row[0].set_title("query" if query == chosen[0] else "", fontsize=9)
        row[1].set_title("nearest images" if query == chosen[0] else "", fontsize=9, loc="left")
    return figure
