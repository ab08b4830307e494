"""What one search of the neighbours of every query tells: ranks, nearest images, and where it went wrong."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdml.evaluation.per_query import matches_in_gallery, precision_sums
from tfdml.retrieval.exact import neighbour_blocks

# As far as the curve of Recall@K goes. Average precision at R is known for R up to this too.
DEPTH = 1000
# What is looked at of every query, at least: most find an image of their class within it.
_AT_FIRST = 32


@dataclasses.dataclass(frozen=True)
class Retrieved:
    """What was found for N queries among their `depth` nearest gallery images.

    Args:
        depth: How many neighbours were looked at.
        matches: (N,) how many gallery images share the query's class, itself not counted.
        first_hit: (N,) rank, from 1, of the nearest image of the query's class; 0: not among `depth`.
        nearest: (N,) gallery row of the nearest image.
        nearest_distance: (N,) how far it is.
        wrong: (N,) gallery row of the nearest image of another class; -1: not among `depth`.
        average_precision: (N,) AP@R; NaN where there is nothing to find or R is beyond `depth`.
    """

    depth: int
    matches: np.ndarray
    first_hit: np.ndarray
    nearest: np.ndarray
    nearest_distance: np.ndarray
    wrong: np.ndarray
    average_precision: np.ndarray

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    def recall(self) -> np.ndarray:
        """(depth,) Recall@K for K = 1 .. depth; empty where no query is answerable."""
        ranks = self.first_hit[self.answerable]
        if not len(ranks):
            return np.zeros(0)
        found = np.bincount(ranks, minlength=self.depth + 1)[1:]
        return np.cumsum(found) / len(ranks)


def retrieve(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    depth: int = DEPTH,
    distance: str = "euclidean",
) -> Retrieved | None:
    """Search every query as deep as average precision needs, and on to `depth` the few that have no hit by then.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        depth: How many neighbours to look at, fewer where the gallery is smaller.
        distance: As `nearest_neighbours`.

    Returns:
        None where there is only one image, hence no neighbour.
    """
    targets = labels if gallery_labels is None else gallery_labels
    depth = min(depth, len(targets) - (gallery is None))
    if depth < 1:
        return None
    count = len(labels)
    matches = matches_in_gallery(labels, gallery_labels)
    # One more than R neighbours: they hold an image of another class.
    shallow = min(depth, max(_AT_FIRST, int(matches.max()) + 1))
    first_hit, nearest, wrong = (np.zeros(count, np.int64) for _ in range(3))
    nearest_distance, average_precision = np.zeros(count, np.float32), np.full(count, np.nan)
    for block, rows, distances in neighbour_blocks(embeddings, gallery, k=shallow, distance=distance):
        hits = targets[rows] == labels[block, None]
        first_hit[block] = _first(hits)
        nearest[block], nearest_distance[block] = rows[:, 0], distances[:, 0]
        miss = _first(~hits)
        wrong[block] = np.where(miss > 0, rows[np.arange(len(rows)), miss - 1], -1)
        known = np.flatnonzero((matches[block] > 0) & (matches[block] <= shallow))
        if len(known):
            deepest = int(matches[block][known].max())
            scores = precision_sums(hits[known, :deepest], matches[block][known])[0]
            average_precision[np.arange(block.start, block.stop)[known]] = scores
    late = np.flatnonzero((first_hit == 0) & (matches > 0))
    if len(late) and shallow < depth:
        searched, own_rows = (embeddings, late) if gallery is None else (gallery, None)
        blocks = neighbour_blocks(embeddings[late], searched, k=depth, distance=distance, own_rows=own_rows)
        for block, rows, _ in blocks:
            first_hit[late[block]] = _first(targets[rows] == labels[late[block], None])
    return Retrieved(depth, matches, first_hit, nearest, nearest_distance, wrong, average_precision)


def _first(marked: np.ndarray) -> np.ndarray:
    """The place, from 1, of the first True of each row; 0 where there is none."""
    return np.where(marked.any(axis=1), marked.argmax(axis=1) + 1, 0)
