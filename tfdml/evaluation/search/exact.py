"""Exact nearest neighbours by brute force, one block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.search.scoring import Space, frame_of, placed, placed_together, ranked_blocks
from tfdml.evaluation.search.scoring import unit_rows as unit_rows
from tfdml.pairwise import DISTANCES


def check_embeddings(embeddings: Any, what: str = "embeddings") -> np.ndarray:
    """`embeddings` as float32, refused where distances between them would mean nothing.

    Args:
        embeddings: (N, d), N and d at least 1, real and finite.
        what: What to call them in the message.

    Returns:
        (N, d) float32, C-contiguous; not a copy where none is needed.

    Raises:
        UserError: Not two axes, no row, no column, not numbers, or NaN or infinite values (counted, first row named).
    """
    array = np.asarray(embeddings)
    if array.ndim != 2 or 0 in array.shape:
        raise UserError(f"{what} must be (images, dimensions), neither of them 0; got shape {array.shape}")
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise UserError(f"{what} must be real numbers; got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # a float64 too large for float32 is reported as infinite below
        array = np.ascontiguousarray(array, np.float32)
    # A sum is finite only if every term is, and costs no (N, d) mask; huge finite terms get the exact test.
    with np.errstate(over="ignore", invalid="ignore"):
        suspects = np.flatnonzero(~np.isfinite(array.sum(axis=1)))
    bad = suspects[~np.isfinite(array[suspects]).all(axis=1)]
    if len(bad):
        raise UserError(
            f"{what}: {len(bad)} of {len(array)} rows hold NaN or infinite values (the first is row {bad[0]}); "
            "look for a diverged model or a corrupt image"
        )
    return array


def check_dimensions(queries: np.ndarray, gallery: np.ndarray) -> None:
    """Raise UserError where queries (N, d) and gallery (G, d) are not of one dimension."""
    if gallery.shape[1] != queries.shape[1]:
        raise UserError(
            f"queries have {queries.shape[1]} dimensions, the gallery {gallery.shape[1]}; "
            "both must come from the same model"
        )


def check_own_rows(own_rows: Any, num_queries: int, num_gallery: int) -> np.ndarray:
    """`own_rows` as one gallery row per query.

    Raises:
        UserError: Not integers, not one per query, or outside the gallery.
    """
    array = np.asarray(own_rows)
    if array.shape != (num_queries,) or array.dtype.kind not in "iu":
        raise UserError(f"own_rows must be one integer per query, {num_queries}; got shape {array.shape}")
    if array.min() < 0 or array.max() >= num_gallery:
        raise UserError(f"own_rows must lie in 0 .. {num_gallery - 1}, the rows of the gallery")
    return array.astype(np.int64)


def neighbour_blocks(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    distance: str = "euclidean",
    own_rows: Any = None,
    memory_budget: int = 256 * 2**20,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """The neighbours that `nearest_neighbours` returns, one block of queries at a time.

    For when (N, k) is too large to hold. Same arguments, same results. A gallery that is memory-mapped (`np.memmap`,
    or a slice of one) is searched chunk by chunk, for embeddings beyond the memory; the result is the same.

    Yields:
        The slice of queries, their (B, k) int64 gallery rows and their (B, k) float32 distances.

    Raises:
        UserError: As `nearest_neighbours`, before anything is computed.
    """
    if distance not in DISTANCES:
        raise UserError(f"unknown distance {distance!r}; one of {', '.join(DISTANCES)}")
    all_to_all = gallery is None
    queries = check_embeddings(queries, "embeddings" if all_to_all else "query embeddings")
    if all_to_all:
        if own_rows is not None:
            raise UserError("own_rows goes with a gallery; without one each query's own row is its own index")
        gallery, own_rows = queries, np.arange(len(queries))
    else:
        gallery = check_embeddings(gallery, "gallery embeddings")
        check_dimensions(queries, gallery)
    if own_rows is not None:
        own_rows = check_own_rows(own_rows, len(queries), len(gallery))
    available = len(gallery) - (own_rows is not None)
    if not 1 <= k <= available:
        besides = " besides the query itself" if own_rows is not None else ""
        raise UserError(f"k must be in 1 .. {available}, the gallery images there are{besides}; got {k}")
    if is_memory_mapped(gallery):
        return _mapped_blocks(queries, gallery, k, distance, own_rows, memory_budget)
    return _blocks(placed_together(queries, gallery, distance), k, own_rows, memory_budget)


def is_memory_mapped(array: np.ndarray) -> bool:
    """Whether an array, or what it is a view of, lies in a file that is mapped into memory.

    Example:
        >>> is_memory_mapped(np.zeros(3)[1:])
        False
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap):
            return True
        owner = owner.base
    return False


def _blocks(
    space: Space, k: int, own_rows: np.ndarray | None, memory_budget: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    for block, indices, measured in ranked_blocks(space, k, own_rows, memory_budget):
        yield block, indices, space.in_callers_scale(measured)


def nearest_neighbours(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    distance: str = "euclidean",
    own_rows: Any = None,
    memory_budget: int = 256 * 2**20,
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest gallery images of every query, nearest first, by exact search.

    Every query is compared with every gallery image: one matrix product per block of queries, then the few best
    of each row. All-to-all (no `gallery`), a query is left out of its own neighbours by identity: copies of it
    stay, at distance 0. Equal distances are ordered by gallery row, lower first.

    Precision: candidates are chosen by float32 products of embeddings shifted to the gallery's mean, whose error
    is about 1e-7 of the squared spread; a few more than k are chosen, and those are measured and ordered by
    sum((q - g)^2) in float32. So copies are at exactly 0, and the block size does not change a distance. Only where
    more than four images crowd within that error of the k-th may another of them be returned in its place. On a
    GPU, TF32 is switched off meanwhile.

    Args:
        queries: (N, d) embeddings, normalised or not.
        gallery: (G, d) embeddings to search; None: the queries themselves.
        k: How many neighbours, at most G (less one where the query's own row is left out).
        distance: `"euclidean"`: |q - g|; `"sqeuclidean"`: |q - g|^2; `"cosine"`: 1 - cos(q, g), where a zero
            vector has cosine 0 with everything; `"dot"`: -<q, g>.
        own_rows: (N,) the gallery row that holds each query itself, for queries that are a part of the gallery.
        memory_budget: Bytes that a block may take, beside about three copies of the gallery; of one that is
            memory-mapped, three copies of a chunk of about this size.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances.

    Raises:
        UserError: Embeddings that are empty, not finite, or of different dimensions; k out of range; an unknown
            distance.

    Example:
        >>> import numpy as np
        >>> indices, distances = nearest_neighbours(np.array([[0.0], [1.0], [3.0]]), k=1)
        >>> indices.ravel().tolist(), distances.ravel().tolist()
        ([1, 0, 1], [1.0, 1.0, 2.0])
    """
    blocks = list(
        neighbour_blocks(queries, gallery, k=k, distance=distance, own_rows=own_rows, memory_budget=memory_budget)
    )
    return np.concatenate([indices for _, indices, _ in blocks]), np.concatenate([d for _, _, d in blocks])


def _mapped_blocks(
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
