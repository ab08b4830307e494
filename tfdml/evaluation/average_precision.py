"""Average precision over the whole ranking of the gallery, exact, one block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from keras import ops

from tfdml.errors import UserError
from tfdml.evaluation.search.scoring import block_scores, one_ahead, placed_together, score_table
from tfdml.pairwise import DISTANCES

# Up to this many relevant images, comparing a row with each of their scores is faster than sorting the row.
_COUNTED = 64


def full_average_precision(
    queries: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None,
    gallery_labels: np.ndarray,
    distance: str,
    own_rows: np.ndarray | None,
    memory_budget: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """AP of every query: the mean, over its R relevant gallery images, of the precision at the rank of each.

    AP = 1/R sum_{i = 1..R} i / rank_i, where rank_i is the place of the i-th relevant image in the ranking of the
    whole gallery by distance, equal distances by gallery row. No row is sorted by index: the rank of an image is one
    more than the number of images before it, which are counted.

    The ranking is that of float32 products of embeddings shifted to the gallery's mean: images whose squared distances
    differ by less than about 1e-7 of the squared spread may change places. Exact copies never do: they share a score.

    Args:
        queries: (N, d) float32.
        labels: (N,) class ids of the queries.
        gallery: (G, d) float32; None: the queries.
        gallery_labels: (G,) class ids of what is searched.
        distance: As `nearest_neighbours`.
        own_rows: (N,) the gallery row of each query itself, left out of its ranking; None: there is none.
        memory_budget: Bytes that a block may take, beside about three copies of the gallery.
        progress: Called after every block with the number of queries done.

    Returns:
        (N,) float64; NaN where R = 0.

    Raises:
        UserError: An unknown distance.
    """
    if distance not in DISTANCES:
        raise UserError(f"unknown distance {distance!r}; one of {', '.join(DISTANCES)}")
    space = placed_together(queries, queries if gallery is None else gallery, distance)
    size = len(space.gallery)
    copies, originals = _copies(space.gallery)
    table = score_table(space, size)
    by_class = np.argsort(gallery_labels, kind="stable")
    in_order = gallery_labels[by_class]
    first, last = np.searchsorted(in_order, labels, "left"), np.searchsorted(in_order, labels, "right")

    def scores_of(block: slice) -> np.ndarray:
        scores = ops.convert_to_numpy(block_scores(space, table, block))
        if len(copies):  # a product need not give equal columns equal results in their last bit
            scores = np.array(scores)
            scores[:, copies] = scores[:, originals]
        return scores

    result = np.full(len(queries), np.nan)
    rows = max(1, min(memory_budget // (12 * size), len(queries)))  # three at once: in use, coming, and its copy
    for block, scores in one_ahead(scores_of, len(queries), rows):
        for query in range(block.start, block.stop):
            relevant = by_class[first[query] : last[query]]
            own = -1 if own_rows is None else int(own_rows[query])
            relevant = relevant[relevant != own]
            if len(relevant):
                ranks = 1 + np.sort(_images_before(scores[query - block.start], relevant, own))
                result[query] = np.mean(np.arange(1, len(ranks) + 1) / ranks)
        if progress is not None:
            progress(block.stop)
    return result


def _copies(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of rows that equal an earlier one, and of the first that they equal."""
    rows = np.ascontiguousarray(rows) + np.float32(0)  # so that -0 has the bytes of 0
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    originals = first[inverse]
    copies = np.flatnonzero(originals != np.arange(len(rows)))
    return copies, originals[copies]


def _images_before(scores: np.ndarray, relevant: np.ndarray, own: int) -> np.ndarray:
    """(R,) how many images come before each of `relevant`: better score, or the same and a lower row; not `own`."""
    wanted = scores[relevant]
    if len(relevant) <= _COUNTED:
        before = np.array(
            [
                np.count_nonzero(scores[:row] >= score) + np.count_nonzero(scores[row:] > score)
                for row, score in zip(relevant, wanted, strict=True)
            ]
        )
    else:
        ascending = np.sort(scores)
        not_better = np.searchsorted(ascending, wanted, "right")
        before = len(scores) - not_better
        for i in np.flatnonzero(not_better - np.searchsorted(ascending, wanted, "left") > 1):
            before[i] += np.count_nonzero(scores[: relevant[i]] == wanted[i])
    if own >= 0:
        before = before - ((scores[own] > wanted) | ((scores[own] == wanted) & (own < relevant)))
    return before
