"""Ranking a gallery for every query: one float32 product, then the few best of each row measured from differences."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

# Candidates taken beyond k, so that rounding in the block product cannot decide what is among the k returned.
_SPARE = 4
# Elements of the (queries, candidates, d) differences that are measured at once: 1 MB, which stays in the cache.
_MEASURED_AT_ONCE = 2**18
# The score of the rows that fill the gallery up to whole groups: below every real score, which is at most about d.
_PADDING_SCORE = -1e30


@dataclasses.dataclass(frozen=True)
class Space:
    """Queries and gallery, transformed so that one product ranks them and plain differences measure them."""

    queries: np.ndarray
    gallery: np.ndarray
    distance: str
    unit: float  # what a length of 1 is in the caller's scale

    def gallery_bias(self) -> np.ndarray | float:
        """What to add to <q, g>: |q - g|^2 is smallest where <q, g> - |g|^2 / 2 is largest."""
        if self.distance in ("euclidean", "sqeuclidean"):
            return -0.5 * np.einsum("gd,gd->g", self.gallery, self.gallery)
        return 0.0

    @functools.cached_property
    def zero_gallery(self) -> Any:
        """(G,) bool: gallery rows without a direction."""
        return np.logical_not(np.any(self.gallery, axis=1))

    def in_callers_scale(self, measured: np.ndarray) -> np.ndarray:
        """The float32 distances that the caller asked for, from those of `measure`."""
        if self.distance == "cosine":
            return measured
        scaled = measured.astype(np.float64) * self.unit**2
        if self.distance == "euclidean":
            scaled = np.sqrt(scaled)
        with np.errstate(over="ignore"):
            return scaled.astype(np.float32)


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows (N, d) divided by their length; a zero row stays zero."""
    tiny = np.finfo(np.float32).tiny
    rows = rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True), tiny)  # so that squares do not overflow
    return rows / np.maximum(np.sqrt(np.einsum("nd,nd->n", rows, rows)), tiny)[:, None]


def _power_of_two(x: float) -> float:
    """The largest power of two that is at most x, within what float32 can also invert; 1 for 0."""
    return float(2.0 ** np.clip(np.floor(np.log2(x)), -100, 126)) if x > 0 else 1.0


def frame_of(queries: np.ndarray, gallery: np.ndarray, distance: str) -> tuple[np.ndarray, float]:
    """The shift (d,) and the unit by which float32 products neither cancel nor overflow."""
    shift = np.zeros(gallery.shape[1], np.float32)
    if distance == "cosine":
        return shift, 1.0
    if distance != "dot":
        # Distances do not change when everything moves by the gallery's mean, and the squares that cancel are then
        # smallest. On a coarse grid of powers of two the subtraction adds no error of its own to simple data.
        sample = gallery[:: -(-len(gallery) // 4096)].astype(np.float64)
        grid = _power_of_two(float(np.sqrt(sample.var(axis=0).mean()))) / 8
        shift = (np.round(sample.mean(axis=0) / grid) * grid).astype(np.float32)
    sides = [gallery] if queries is gallery else [gallery, queries]
    extremes = [np.abs(edge - shift).max() for side in sides for edge in (side.min(axis=0), side.max(axis=0))]
    return shift, _power_of_two(float(max(extremes)))


def placed(rows: np.ndarray, distance: str, shift: np.ndarray, unit: float) -> np.ndarray:
    """Rows (N, d) as the search compares them: of length 1 for cosine, else shifted and scaled."""
    if distance == "cosine":
        return unit_rows(rows)
    rows = rows - shift
    rows *= np.float32(1 / unit)
    return rows


def placed_together(queries: np.ndarray, gallery: np.ndarray, distance: str) -> Space:
    """Queries and gallery in the frame that `frame_of` finds for them."""
    shift, unit = frame_of(queries, gallery, distance)
    moved = placed(gallery, distance, shift, unit)
    return Space(moved if queries is gallery else placed(queries, distance, shift, unit), moved, distance, unit)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Products in float32 proper: GPUs round the factors to 10 bits (TF32) where they are allowed to."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        allowed = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(allowed)
    elif keras.backend.backend() == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            yield
    else:
        yield


def _group_size(gallery_size: int, candidates: int) -> int:
    """Gallery rows per group (a power of two near sqrt(G / m)); 1 where grouping would not pay."""
    if gallery_size < 32 * candidates:
        return 1
    return int(_power_of_two((gallery_size / candidates) ** 0.5))


def _top_columns(scores: Any, candidates: int, group: int) -> Any:
    """(B, m) int32 columns of the largest scores of each row, equal scores by lower column.

    A row's m largest lie in the m groups of consecutive columns whose maxima are largest: any other group's elements
    come after those m maxima. So most of the row is read once, for the maxima, and only m groups are searched.
    """
    if group == 1:
        return ops.top_k(scores, candidates)[1]
    rows, columns = scores.shape
    groups = columns // group
    grouped = ops.reshape(scores, (rows, groups, group))
    # Ascending group order keeps columns ascending, so that top_k's "lower position first" means lower column.
    chosen = ops.sort(ops.top_k(ops.max(grouped, axis=2), candidates)[1], axis=1)
    row_start = ops.expand_dims(ops.arange(rows, dtype="int32") * groups, 1)
    kept = ops.take(ops.reshape(scores, (rows * groups, group)), chosen + row_start, axis=0)
    place = ops.top_k(ops.reshape(kept, (rows, candidates * group)), candidates)[1]
    return ops.take_along_axis(chosen, place // group, axis=1) * group + place % group


def measure(space: Space, block: slice, columns: np.ndarray) -> np.ndarray:
    """(B, m) distances of a block of queries to the gallery rows `columns` (B, m), before `in_callers_scale`.

    From differences, so that exact copies are at exactly 0. In NumPy on every backend: m is small, and a few rows at
    a time never leave the processor's cache.
    """
    queries = space.queries[block]
    measured = np.empty(columns.shape, np.float32)
    step = max(1, _MEASURED_AT_ONCE // (columns.shape[1] * queries.shape[1]))
    for start in range(0, len(columns), step):
        rows = slice(start, start + step)
        near = space.gallery[columns[rows]]
        if space.distance == "dot":
            measured[rows] = -np.einsum("bmd,bd->bm", near, queries[rows])
        else:
            near -= queries[rows, None]
            np.einsum("bmd,bmd->bm", near, near, out=measured[rows])
    if space.distance == "cosine":  # |q - g|^2 / 2 = 1 - cos of unit vectors; zero vectors have cosine 0 with all
        zero = np.logical_not(np.any(queries, axis=1))[:, None] | space.zero_gallery[columns]
        return np.where(zero, np.float32(1), measured / 2)
    return measured


def score_table(space: Space, columns: int) -> Any:
    """(d + 1, columns) tensor of the gallery; columns beyond it score below every image.

    The bias rides along as one more row of the product, which saves a pass over every block.
    """
    size, dim = space.gallery.shape
    table = np.zeros((dim + 1, columns), np.float32)
    table[:dim, :size] = space.gallery.T
    table[dim, :size] = space.gallery_bias()
    table[dim, size:] = _PADDING_SCORE
    return ops.convert_to_tensor(table)


def block_scores(space: Space, table: Any, block: slice) -> Any:
    """(B, columns) tensor, larger for nearer gallery images, from `score_table`'s table."""
    rows = space.queries[block]
    queries = np.ones((len(rows), rows.shape[1] + 1), np.float32)
    queries[:, :-1] = rows
    with _full_float32():
        return ops.matmul(ops.convert_to_tensor(queries), table)


def one_ahead(compute: Callable[[slice], Any], count: int, size: int) -> Iterator[tuple[slice, Any]]:
    """Slices of up to `size` that cover `count`, and what `compute` makes of each.

    The next is computed in a thread while the caller works on one: the product keeps the processor busy meanwhile.
    """
    blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if len(blocks) == 1:
        yield blocks[0], compute(blocks[0])
        return
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        coming = worker.submit(compute, blocks[0])
        for i, block in enumerate(blocks):
            found = coming.result()
            if i + 1 < len(blocks):
                coming = worker.submit(compute, blocks[i + 1])
            yield block, found


def ranked_blocks(
    space: Space, k: int, own_rows: np.ndarray | None, memory_budget: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """The k nearest of every query, with distances as measured in the space; its own row is infinitely far."""
    size = len(space.gallery)
    candidates = min(k + (own_rows is not None) + _SPARE, size)
    group = _group_size(size, candidates)
    padded = -(-size // group) * group
    per_query = 4 * (padded + padded // group + 2 * candidates * (group + 4))
    rows = max(1, min(memory_budget // per_query, len(space.queries)))
    table = score_table(space, padded)

    def columns_of(block: slice) -> np.ndarray:
        columns = _top_columns(block_scores(space, table, block), candidates, group)
        return ops.convert_to_numpy(columns).astype(np.int64)

    for block, indices in one_ahead(columns_of, len(space.queries), rows):
        distances = measure(space, block, indices)
        if own_rows is not None:
            distances = np.where(indices == own_rows[block, None], np.float32(np.inf), distances)
        order = np.lexsort((indices, distances), axis=-1)[:, :k]
        yield block, np.take_along_axis(indices, order, axis=1), np.take_along_axis(distances, order, axis=1)
