"""Exact neighbours in a gallery that lies in a memory-mapped file: one chunk of it after another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfdml.evaluation.search.scoring import Space, frame_of, placed, ranked_blocks


def mapped_blocks(
    queries: np.ndarray,
    gallery: np.ndarray,
    k: int,
    distance: str,
    own_rows: np.ndarray | None,
    memory_budget: int,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """What `neighbour_blocks` yields, holding a block of queries and a chunk of the gallery at a time.

    The k nearest of the whole are among the k nearest of each chunk, and distances are measured in one frame, so
    that the result is that of a search in memory. The gallery is read once, and once more for every block of queries.

    Args:
        queries: (N, d) float32.
        gallery: (G, d) float32.
        k: How many neighbours.
        distance: As `nearest_neighbours`.
        own_rows: (N,) the gallery row of each query itself, or None.
        memory_budget: Bytes that a block of queries, a chunk of the gallery and their scores may take, each.

    Yields:
        The slice of queries, their (B, k) int64 gallery rows and their (B, k) float32 distances.
    """
    shift, unit = frame_of(queries, gallery, distance)
    dim = gallery.shape[1]
    # Three copies of a chunk are alive at once; of a query, two, and two lists of neighbours that are being merged.
    chunk_rows = min(max(memory_budget // (12 * dim), k), len(gallery))
    block_rows = max(memory_budget // (8 * dim + 72 * k), 1)
    for start in range(0, len(queries), block_rows):
        block = slice(start, min(start + block_rows, len(queries)))
        moved = placed(queries[block], distance, shift, unit)
        rows = np.zeros((len(moved), 0), np.int64)
        measured = np.zeros((len(moved), 0), np.float32)
        for first in range(0, len(gallery), chunk_rows):
            chunk = placed(gallery[first : first + chunk_rows], distance, shift, unit)
            space = Space(moved, chunk, distance, unit)
            # The row of a query that lies in another chunk is outside this one, and so meets no column.
            own = None if own_rows is None else own_rows[block] - first
            parts = list(ranked_blocks(space, min(k, len(chunk)), own, memory_budget))
            rows = np.concatenate([rows, first + np.concatenate([found for _, found, _ in parts])], axis=1)
            measured = np.concatenate([measured, np.concatenate([far for _, _, far in parts])], axis=1)
            order = np.lexsort((rows, measured), axis=-1)[:, :k]
            rows, measured = np.take_along_axis(rows, order, axis=1), np.take_along_axis(measured, order, axis=1)
        yield block, rows, space.in_callers_scale(measured)
