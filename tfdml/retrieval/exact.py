"""Exact nearest neighbors by brute force: checks of embeddings, blocks of scores, the few best of
each row."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_choice
from tfdml.registry import DISTANCES

# Called with a slice of B queries and (B, m) rows of the gallery: (B, m) bool, which are left out.
Ignored = Callable[[slice, np.ndarray], np.ndarray]
# Candidates taken beyond k, so that rounding in the block product rarely leaves open what is among
# the k returned.
_SPARE = 4
# Elements of the (queries, candidates, d) differences that are measured at once: 2 MB, which stays
# in the cache.
_MEASURED_AT_ONCE = 2**18
# Bytes of a block of scores that the cache takes well.
_BLOCK = 2**26
# Gallery rows that are converted to float64 at once.
_ROWS_AT_ONCE = 4096
# The score of the rows that fill the gallery up to whole groups: below every real score, which is
# at most about d.
_PADDING_SCORE = -1e30


def check_embeddings(embeddings: Any, what: str = "embeddings") -> np.ndarray:
    """`embeddings` as float32, refused where distances between them would mean nothing.

    Args:
        embeddings: (N, d), N and d at least 1, real and finite.
        what: What to call them in the message.

    Returns:
        (N, d) float32, C-contiguous; not a copy where none is needed.

    Raises:
        UserError: Not two axes, no row, no column, not numbers, or NaN or infinite values (counted,
            first row named).
    """
    array = np.asarray(embeddings)
    if array.ndim != 2 or 0 in array.shape:
        raise UserError(
            f"{what} must be (images, dimensions), neither of them 0; got shape {array.shape}"
        )
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise UserError(f"{what} must be real numbers; got dtype {array.dtype}")
    with np.errstate(
        over="ignore"
    ):  # a float64 too large for float32 is reported as infinite below
        array = np.ascontiguousarray(array, np.float32)
    # A sum is finite only if every term is, and costs no (N, d) mask; huge finite terms get the
    # exact test.
    with np.errstate(over="ignore", invalid="ignore"):
        suspects = np.flatnonzero(~np.isfinite(array.sum(axis=1)))
    bad = suspects[~np.isfinite(array[suspects]).all(axis=1)]
    if len(bad):
        rows = (
            f"{len(bad)} of {len(array)} rows hold NaN or infinite values (the first is row "
            f"{bad[0]})"
        )
        raise UserError(f"{what}: {rows}; look for a diverged model or a corrupt image")
    return array


def check_dimensions(queries: np.ndarray, gallery: np.ndarray) -> None:
    """Raise UserError where queries (N, d) and gallery (G, d) are not of one dimension."""
    if gallery.shape[1] != queries.shape[1]:
        raise UserError(
            f"queries have {queries.shape[1]} dimensions, the gallery {gallery.shape[1]}: use one "
            "model"
        )


def check_sides(
    queries: Any, gallery: Any = None, own_rows: Any = None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return queries, the gallery (None: all-to-all) and the gallery row of each query itself (or
    None), checked.

    Raises:
        UserError: As `check_embeddings`; they are of different dimensions; `own_rows` are not one
            gallery row for each query, or there is no gallery.
    """
    queries = check_embeddings(queries, "embeddings" if gallery is None else "query embeddings")
    if gallery is None:
        if own_rows is not None:
            raise UserError(
                "own_rows goes with a gallery; without one each query's own row is its own index"
            )
        return queries, None, None
    gallery = check_embeddings(gallery, "gallery embeddings")
    check_dimensions(queries, gallery)
    if own_rows is None:
        return queries, gallery, None
    own_rows = np.asarray(own_rows)
    if own_rows.shape != (len(queries),) or own_rows.dtype.kind not in "iu":
        raise UserError(
            f"own_rows must be one integer per query, {len(queries)}; got shape {own_rows.shape}"
        )
    if own_rows.min() < 0 or own_rows.max() >= len(gallery):
        raise UserError(f"own_rows must lie in 0 .. {len(gallery) - 1}, the rows of the gallery")
    return queries, gallery, own_rows.astype(np.int64)


def neighbor_blocks(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    distance: str = "euclidean",
    own_rows: Any = None,
    memory_budget: int = 256 * 2**20,
    ignored: Ignored | None = None,
    most_ignored: int = 0,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Return the neighbors that `nearest_neighbors` returns, one block of queries at a time.

    For when (N, k) is too large to hold. Same arguments, same results. A gallery that is
    memory-mapped (`np.memmap`, or a slice of one) is searched chunk by chunk, for embeddings beyond
    the memory; the result is the same.

    Args:
        queries: As `nearest_neighbors`.
        gallery: As `nearest_neighbors`.
        k: As `nearest_neighbors`.
        distance: As `nearest_neighbors`.
        own_rows: As `nearest_neighbors`.
        memory_budget: As `nearest_neighbors`.
        ignored: Called with a slice of queries and their candidates (B, m), rows of the gallery;
            (B, m) bool, which of them are left out. Where fewer than k are left, the row is -1 and
            the distance infinite.
        most_ignored: The most rows that `ignored` leaves out for one query.

    Yields:
        The slice of queries, their (B, k) int64 gallery rows and their (B, k) float32 distances.

    Raises:
        UserError: As `nearest_neighbors`, before anything is computed.
    """
    check_choice("distance", distance, DISTANCES)
    queries, gallery, own_rows = check_sides(queries, gallery, own_rows)
    if gallery is None:
        gallery = queries
        own_rows = np.arange(len(queries))
    available = len(gallery) - (own_rows is not None)
    if not 1 <= k <= available:
        besides = " besides the query itself" if own_rows is not None else ""
        raise UserError(
            f"k must be in 1 .. {available}, the gallery images there are{besides}; got {k}"
        )
    if own_rows is not None:
        ignored = _or_own(own_rows, ignored)
        most_ignored += 1
    space = Space(queries, gallery, frame_of(queries, gallery, distance))
    ranked = _ranked_by_chunks if is_memory_mapped(gallery) else ranked_blocks
    blocks = ranked(space, k, memory_budget, ignored, most_ignored)
    return ((block, rows, in_float32(distances, distance)) for block, rows, distances in blocks)


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


def nearest_neighbors(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    distance: str = "euclidean",
    own_rows: Any = None,
    memory_budget: int = 256 * 2**20,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest gallery images of every query, nearest first, by exact search.

    Every query is compared with every gallery image: one matrix product per block of queries, then
    the few best of each row. All-to-all (no `gallery`), a query is left out of its own neighbors by
    identity: copies of it stay, at distance 0. Equal distances are ordered by gallery row, lower
    first.

    The neighbors are those of float64. Candidates are chosen by float32 products of embeddings
    shifted to the gallery's median, a few more than k, then measured and ordered by sum((q - g)^2)
    in float64. Where rounding could have left out a nearer image, because many are about as near,
    or far from the median, the query is searched once more in float64. So copies are at exactly 0,
    and the block size does not change a distance. What remains: of more images than 8 k within
    1e-12 of the k-th, some of which are no copies, the first rows are taken. Where Keras is loaded
    and has a GPU, the products are its own, with TF32 switched off.

    Args:
        queries: (N, d) embeddings, normalized or not.
        gallery: (G, d) embeddings to search; None: the queries themselves.
        k: How many neighbors, at most G (less one where the query's own row is left out).
        distance: `"euclidean"`: |q - g|; `"sqeuclidean"`: |q - g|^2; `"cosine"`: 1 - cos(q, g),
            where a zero vector has cosine 0 with everything; `"dot"`: -<q, g>.
        own_rows: (N,) the gallery row that holds each query itself, for queries that are a part of
            the gallery.
        memory_budget: Bytes that a block may take, next to about three copies of the gallery; of
            one that is memory-mapped, three copies of a chunk of about this size.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances.

    Raises:
        UserError: Embeddings that are empty, not finite, or of different dimensions; k out of
            range; an unknown distance.

    Example:
        >>> import numpy as np
        >>> indices, distances = nearest_neighbors(np.array([[0.0], [1.0], [3.0]]), k=1)
        >>> indices.ravel().tolist(), distances.ravel().tolist()
        ([1, 0, 1], [1.0, 1.0, 2.0])
    """
    blocks = neighbor_blocks(
        queries, gallery, k=k, distance=distance, own_rows=own_rows, memory_budget=memory_budget
    )
    return _joined(blocks)


def _joined(
    blocks: Iterable[tuple[slice, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and distances of all queries from those of blocks of queries."""
    parts = list(blocks)
    rows = np.concatenate([near for _, near, _ in parts])
    distances = np.concatenate([far for _, _, far in parts])
    return rows, distances


def _or_own(own_rows: np.ndarray, ignored: Ignored | None) -> Ignored:
    """Return `ignored` that also leaves out the row that holds each query itself."""

    def hidden(block: slice, rows: np.ndarray) -> np.ndarray:
        own = rows == own_rows[block, None]
        return own if ignored is None else own | ignored(block, rows)

    return hidden


def _shifted(ignored: Ignored, query: int, row: int) -> Ignored:
    """Return `ignored` for queries and gallery rows that are counted from others."""
    return lambda block, rows: ignored(slice(block.start + query, block.stop + query), rows + row)


def row_blocks(count: int, size: int) -> list[slice]:
    """Return slices that cover `count` rows, at most `size` in each.

    Example:
        >>> row_blocks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def nearest_first(rows: np.ndarray, distances: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest of each query's (B, m) rows and distances, of equal distances the lower
    row first."""
    order = np.lexsort((rows, distances), axis=-1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(distances, order, axis=1)


def left_over(rows: np.ndarray, left_out: np.ndarray, depth: int) -> np.ndarray:
    """Return the first `depth` of each row that are not left out, in their order; -1 where there
    are fewer.

    Example:
        >>> left_over(np.array([[5, 6, 7]]), np.array([[False, True, False]]), 3)
        array([[ 5,  7, -1]])
    """
    place = np.cumsum(~left_out, axis=1) - 1
    query, column = np.nonzero(~left_out & (place < depth))
    result = np.full((len(rows), depth), -1, rows.dtype)
    result[query, place[query, column]] = rows[query, column]
    return result


@dataclasses.dataclass(frozen=True)
class Frame:
    """How rows are placed so that one float32 product ranks them; made by `frame_of`.

    Args:
        distance: As `nearest_neighbors`.
        shift: (d,) what is subtracted.
        unit: What rows are divided by.
    """

    distance: str
    shift: np.ndarray
    unit: float

    def place(self, rows: np.ndarray) -> np.ndarray:
        """Rows (N, d) as the search compares them: of length 1 for cosine, else shifted and
        scaled."""
        if self.distance == "cosine":
            return unit_rows(rows)
        rows = rows - self.shift
        rows *= np.float32(1 / self.unit)
        return rows


@dataclasses.dataclass(frozen=True)
class Space:
    """Queries and gallery: as they are, to measure them, and placed."""

    queries: np.ndarray
    gallery: np.ndarray
    frame: Frame

    @functools.cached_property
    def placed_gallery(self) -> np.ndarray:
        """The gallery in the frame."""
        return self.frame.place(self.gallery)

    @functools.cached_property
    def placed_queries(self) -> np.ndarray:
        """The queries in the frame."""
        return (
            self.placed_gallery if self.queries is self.gallery else self.frame.place(self.queries)
        )

    @functools.cached_property
    def longest(self) -> float:
        """The largest length of a placed gallery row."""
        return float(np.sqrt(_squares(self.placed_gallery).max()))


def in_float32(distances: np.ndarray, distance: str) -> np.ndarray:
    """Return the float32 distances that the caller asked for, from those of `measure`."""
    with np.errstate(over="ignore"):
        return (np.sqrt(distances) if distance == "euclidean" else distances).astype(np.float32)


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.einsum("...d,...d->...", rows, rows)


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows (..., d) divided by their length; a zero row stays zero."""
    tiny = np.finfo(np.float32).tiny
    rows = rows / np.maximum(
        np.abs(rows).max(axis=-1, keepdims=True), tiny
    )  # so that squares do not overflow
    return rows / np.maximum(np.sqrt(_squares(rows)), tiny)[..., None]


def _power_of_two(x: float) -> float:
    """Return the largest power of two that is at most x, within what float32 can also invert; 1 for
    0."""
    return float(2.0 ** np.clip(np.floor(np.log2(x)), -100, 126)) if x > 0 else 1.0


def frame_of(queries: np.ndarray, gallery: np.ndarray, distance: str) -> Frame:
    """Return the frame in which float32 products neither cancel nor overflow."""
    shift = np.zeros(gallery.shape[1], np.float32)
    if distance == "cosine":
        return Frame(distance, shift, 1.0)
    if distance != "dot":
        # Distances do not change when everything moves by the gallery's center, and the squares
        # that cancel are then small. The median is moved by no outlier. On a coarse grid of powers
        # of two the subtraction adds no error of its own to simple data.
        sample = gallery[:: -(-len(gallery) // 4096)].astype(np.float64)
        center = np.median(sample, axis=0)
        spread = np.abs(sample - center)
        grid = _power_of_two(float(np.median(spread) or spread.mean())) / 8
        shift = (np.round(center / grid) * grid).astype(np.float32)
    largest = 0.0
    for side in [gallery] if queries is gallery else [gallery, queries]:
        lowest = np.abs(side.min(axis=0) - shift).max()
        highest = np.abs(side.max(axis=0) - shift).max()
        largest = max(largest, float(lowest), float(highest))
    return Frame(distance, shift, _power_of_two(largest))


def _has_gpu() -> bool:
    """Whether Keras is loaded and computes on a GPU."""
    keras = sys.modules.get("keras")
    backend = "" if keras is None else keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    if backend == "jax":
        import jax

        return jax.default_backend() == "gpu"
    if backend == "torch":
        import torch

        return torch.cuda.is_available()
    return False


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Products in float32 proper: GPUs round the factors to 10 bits (TF32) where they are allowed
    to."""
    import keras

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


def _product_with(table: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from (B, d) to the float32 product with a table (d, G): of NumPy, or of
    Keras where that has a GPU."""
    if not _has_gpu():
        return lambda rows: rows @ table
    from keras import ops

    on_gpu = ops.convert_to_tensor(table)

    def product(rows: np.ndarray) -> np.ndarray:
        with _full_float32():
            return ops.convert_to_numpy(ops.matmul(ops.convert_to_tensor(rows), on_gpu))

    return product


def _group_size(gallery_size: int, candidates: int) -> int:
    """Gallery rows per group (a power of two near sqrt(G / m)); 1 where grouping would not pay."""
    if gallery_size < 32 * candidates:
        return 1
    return int(_power_of_two((gallery_size / candidates) ** 0.5))


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """(B, count) columns of the largest values of each row, in no order."""
    return np.argpartition(values, values.shape[1] - count, axis=1)[:, -count:]


def _top_columns(scores: np.ndarray, candidates: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(B, m) columns of the largest scores of each row, in no order; (B,) the least of these
    scores.

    A row's m largest lie in the m groups of columns whose maxima are largest: any other group's
    elements come after those m maxima. So most of the row is read once, for the maxima, and only m
    groups are searched. The columns of a group are far apart, so that maxima are those of whole
    rows of numbers.
    """
    if group == 1:
        columns = _largest(scores, candidates)
    else:
        rows, size = scores.shape
        groups = size // group
        grouped = scores.reshape(rows, group, groups)
        nearest_groups = _largest(grouped.max(axis=1), candidates)
        steps = groups * np.arange(group)
        members = (nearest_groups[:, :, None] + steps).reshape(rows, candidates * group)
        best = _largest(np.take_along_axis(scores, members, axis=1), candidates)
        columns = np.take_along_axis(members, best, axis=1)
    return columns, np.take_along_axis(scores, columns, axis=1).min(axis=1)


def measure(
    queries: np.ndarray, gallery: np.ndarray, rows: np.ndarray, distance: str
) -> np.ndarray:
    """(B, m) float64 distances of queries (B, d) to the gallery's rows (B, m), those of `euclidean`
    squared.

    From differences, so that exact copies are at exactly 0. A few rows at a time never leave the
    processor's cache.
    """
    distances = np.empty(rows.shape)
    step = max(1, _MEASURED_AT_ONCE // (rows.shape[1] * queries.shape[1]))
    for part in row_blocks(len(rows), step):
        near, own = (
            np.asarray(side, np.float64) for side in (gallery[rows[part]], queries[part, None])
        )
        if distance == "dot":
            distances[part] = -np.einsum("bmd,bld->bm", near, own)
            continue
        near, own = (unit_rows(near), unit_rows(own)) if distance == "cosine" else (near, own)
        distances[part] = _squares(near - own)
        if (
            distance == "cosine"
        ):  # |q - g|^2 / 2 = 1 - cos of unit vectors; zero vectors have cosine 0 with all
            zero = np.logical_not(near.any(axis=-1) & own.any(axis=-1))
            distances[part] = np.where(zero, 1.0, distances[part] / 2)
    return distances


def scorer(space: Space, columns: int, slack: float = 0.0) -> Callable[[slice], np.ndarray]:
    """Return the function from a slice of queries to their (B, columns) scores, larger for nearer
    gallery images; columns beyond the gallery score below every image.

    With `slack` the score of each row is higher by this share of half its squared length.

    The bias rides along as one more row of the product, which saves a pass over every block.
    """
    size, dim = space.placed_gallery.shape
    table = np.zeros((dim + 1, columns), np.float32)
    table[:dim, :size] = space.placed_gallery.T
    # |q - g|^2 is smallest where <q, g> - |g|^2 / 2 is largest.
    if space.frame.distance in ("euclidean", "sqeuclidean"):
        table[dim, :size] = np.float32(-0.5 * (1 - slack)) * _squares(space.placed_gallery)
    table[dim, size:] = _PADDING_SCORE
    product = _product_with(table)

    def scores_of(block: slice) -> np.ndarray:
        rows = space.placed_queries[block]
        queries = np.ones((len(rows), dim + 1), np.float32)
        queries[:, :dim] = rows
        return product(queries)

    return scores_of


def one_ahead(
    compute: Callable[[slice], Any], count: int, size: int
) -> Iterator[tuple[slice, Any]]:
    """Slices of up to `size` that cover `count`, and what `compute` makes of each.

    The next is computed in a thread while the caller works on one: the product keeps the processor
    busy meanwhile.
    """
    blocks = row_blocks(count, size)
    if len(blocks) == 1:
        yield blocks[0], compute(blocks[0])
        return
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        coming = worker.submit(compute, blocks[0])
        for i, block in enumerate(blocks):
            result = coming.result()
            if i + 1 < len(blocks):
                coming = worker.submit(compute, blocks[i + 1])
            yield block, result


def ranked_blocks(
    space: Space, k: int, memory_budget: int, ignored: Ignored | None = None, most_ignored: int = 0
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield the k nearest of every query, with distances as of `measure`; ignored rows are -1,
    infinitely far."""
    size, dim = space.gallery.shape
    candidates = min(k + most_ignored + _SPARE, size)
    group = _group_size(size, candidates)
    padded = -(-size // group) * group
    # Scores; maxima of groups and their order; members of the best groups.
    per_query = 4 * padded + 12 * (padded // group) + 28 * candidates * group
    queries_at_once = max(1, min(min(memory_budget, _BLOCK) // per_query, len(space.queries)))
    # The rounding error of a score is below this share of (|q|^2 + |g|^2) / 2: of sums in any usual
    # order.
    slack = (8 + dim**0.5) * float(np.finfo(np.float32).eps)
    scores_of = scorer(space, padded, slack)

    def columns_of(block: slice) -> tuple[np.ndarray, np.ndarray]:
        columns, least = _top_columns(scores_of(block), candidates, group)
        return columns, least.astype(np.float64)

    for block, (columns, least) in one_ahead(columns_of, len(space.queries), queries_at_once):
        near, far = _measured(space, block, columns, k, ignored)
        if candidates < size:
            is_settled = _settled(space, block, far[:, -1], least, slack)
            unsure = block.start + np.flatnonzero(~is_settled)
            columns_in_float64 = _float64_columns(space, unsure, candidates, memory_budget)
            for query, wider in zip(unsure, columns_in_float64, strict=True):
                place = query - block.start
                own = slice(query, query + 1)
                near[place], far[place] = _measured(space, own, wider[None], k, ignored)
        yield block, near, far


def _measured(
    space: Space, block: slice, columns: np.ndarray, k: int, ignored: Ignored | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest of the candidates (B, m) of a block of queries, and their distances."""
    distances = measure(space.queries[block], space.gallery, columns, space.frame.distance)
    if ignored is not None:
        is_hidden = ignored(block, columns)
        columns = np.where(is_hidden, -1, columns)
        distances = np.where(is_hidden, np.inf, distances)
    return nearest_first(columns, distances, k)


def _ranked_by_chunks(
    space: Space, k: int, memory_budget: int, ignored: Ignored | None = None, most_ignored: int = 0
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """As `ranked_blocks`, one chunk of the gallery at a time.

    The k nearest of the whole are among the k nearest of each chunk, and all are measured in one
    frame.
    """
    size, dim = space.gallery.shape
    # Three copies of a chunk are alive at once; of a query, two, and two lists of neighbors that
    # are being merged.
    chunks = row_blocks(size, min(max(memory_budget // (12 * dim), k), size))
    queries_at_once = max(memory_budget // (8 * dim + 96 * k), 1)
    for block in row_blocks(len(space.queries), queries_at_once):
        count = block.stop - block.start
        rows = np.zeros((count, 0), np.int64)
        distances = np.zeros((count, 0))
        for chunk in chunks:
            part = Space(space.queries[block], space.gallery[chunk], space.frame)
            hidden = None if ignored is None else _shifted(ignored, block.start, chunk.start)
            depth = min(k, chunk.stop - chunk.start)
            near, far = _joined(ranked_blocks(part, depth, memory_budget, hidden, most_ignored))
            near = np.where(near < 0, near, chunk.start + near)
            rows = np.concatenate([rows, near], axis=1)
            distances = np.concatenate([distances, far], axis=1)
            rows, distances = nearest_first(rows, distances, k)
        yield block, rows, distances


def _settled(
    space: Space, block: slice, farthest: np.ndarray, last: np.ndarray, slack: float
) -> np.ndarray:
    """(B,) bool, whether no row that is no candidate can be among the k nearest.

    Args:
        space: Queries and gallery.
        block: The queries.
        farthest: (B,) the distance of the k-th nearest candidate.
        last: (B,) the score of the last candidate, which no other row's is above.
        slack: Of the rounding of scores.
    """
    if space.frame.distance == "cosine":
        return 1 - farthest >= last + slack
    squares = _squares(space.placed_queries[block].astype(np.float64))
    farthest = farthest / space.frame.unit**2
    if space.frame.distance == "dot":
        return -farthest >= last + slack * np.sqrt(squares) * space.longest
    # Numbers that are too small for float32 count as 0 in a score.
    return (squares * (1 - slack) - farthest) / 2 >= last + space.queries.shape[1] * np.finfo(
        np.float32
    ).tiny


def _float64_columns(
    space: Space, queries: np.ndarray, count: int, memory_budget: int
) -> Iterator[np.ndarray]:
    """Yield for each query the gallery rows that may be among its `count` nearest, by products in
    float64."""
    queries_at_once = max(1, memory_budget // (16 * len(space.gallery)))
    for some in row_blocks(len(queries), queries_at_once):
        yield from _float64_columns_of_block(space, queries[some], count)


def _float64_columns_of_block(
    space: Space, queries: np.ndarray, count: int
) -> Iterator[np.ndarray]:
    points = space.frame.place(space.queries[queries].astype(np.float64))
    half = np.empty((len(queries), len(space.gallery)))
    for part in row_blocks(len(space.gallery), _ROWS_AT_ONCE):
        rows = space.frame.place(space.gallery[part].astype(np.float64))
        half[:, part] = -points @ rows.T
        if space.frame.distance in ("euclidean", "sqeuclidean"):
            half[:, part] += _squares(rows) / 2
    for row, squared in zip(half, _squares(points), strict=True):
        limit = np.partition(row, count - 1)[count - 1]
        rounding = 1e-12 * (squared + abs(limit))
        columns = np.flatnonzero(row <= limit + rounding)
        if len(columns) > 8 * count:
            nearer = np.argsort(row[columns] > limit - rounding, kind="stable")
            columns = np.sort(columns[nearer[: 8 * count]])
        yield columns
