"""How many of the true neighbours an index finds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.retrieval.exact import check_sides, nearest_neighbours, unit_rows
from tfdml.retrieval.faiss_index import GalleryIndex


@dataclasses.dataclass(frozen=True)
class IndexRecall:
    """How many of the true neighbours an index finds.

    Args:
        recall: The mean, over the sampled queries, of the share of the k nearest images that are found.
        standard_error: Its standard error, the standard deviation over queries by the root of their number.
        queries: How many queries were sampled.
        k: Of how many neighbours.
        effort: As `GalleryIndex.search`.
    """

    recall: float
    standard_error: float
    queries: int
    k: int
    effort: int


def index_recall(
    index: GalleryIndex,
    gallery: Any,
    queries: Any = None,
    *,
    k: int = 10,
    efforts: Iterable[int] | None = None,
    sample: int = 1000,
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> Iterator[IndexRecall]:
    """Yield Recall@k of an index against exact search, on a sample of queries, for each effort as it is asked for.

    For one query, the share of the index's k images whose distance, recomputed in float64, is at most that of the
    k-th nearest of the exact search: so of equally near images any will do. The same queries serve all efforts.

    Args:
        index: The index.
        gallery: (G, d) the embeddings that it was built from, in memory or memory-mapped.
        queries: (N, d) to sample from; None: the gallery, each query left out of its own neighbours.
        k: How many neighbours.
        efforts: What to measure, see `GalleryIndex.search`; None: the default effort.
        sample: How many queries; all, where there are fewer.
        seed: Of the sample.
        memory_budget: Bytes that a block of the exact search may take.

    Yields:
        One result per effort.

    Raises:
        UserError: With the first result. The gallery is not that of the index, or an argument is out of range.

    Example:
        >>> from tfdml.retrieval import build_index
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
        >>> few, all_lists = index_recall(build_index(gallery, lists=20), gallery, efforts=[1, 20], sample=100)
        >>> few.recall < all_lists.recall == 1.0
        True
    """
    if len(gallery) != len(index):
        raise UserError(f"the index holds {len(index)} images, the gallery {len(gallery)}: it is of another one")
    if sample < 1:
        raise UserError(f"sample must be at least 1; got {sample}")
    pool = gallery if queries is None else queries
    chosen = np.sort(np.random.default_rng(seed).choice(len(pool), min(sample, len(pool)), replace=False))
    asked, gallery, own_rows = check_sides(pool[chosen], gallery, chosen if queries is None else None)
    options: dict[str, Any] = {"distance": index.distance, "own_rows": own_rows, "memory_budget": memory_budget}
    exact, _ = nearest_neighbours(asked, gallery, k=k, **options)
    farthest = _measured(asked, gallery, exact, index.distance).max(axis=1, keepdims=True)

    for effort in [index.default_effort] if efforts is None else efforts:
        found, _ = index.search(asked, k=k, effort=effort, own_rows=own_rows)
        near = (found >= 0) & (_measured(asked, gallery, np.maximum(found, 0), index.distance) <= farthest)
        shares = near.mean(axis=1)
        error = float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
        yield IndexRecall(float(shares.mean()), error, len(shares), k, effort)


def least_effort(index: GalleryIndex, gallery: Any, recall: float, *, k: int = 10, sample: int = 500) -> IndexRecall:
    """Return the least of the efforts 1, 2, 4, ... whose recall@k reaches what is wanted, see `index_recall`.

    Args:
        index: The index.
        gallery: (G, d) the embeddings that it was built from; the queries are some of them.
        recall: To be reached, a fraction.
        k: How many neighbours; all, where there are fewer.
        sample: How many queries.

    Returns:
        The effort with its recall; the greatest effort, where none reaches it.

    Raises:
        UserError: As `index_recall`, or the recall is not a fraction.

    Example:
        >>> from tfdml.retrieval import build_index
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
        >>> found = least_effort(build_index(gallery, lists=20), gallery, 0.9)
        >>> found.recall >= 0.9, found.effort
        (True, 8)
    """
    if not 0 < recall <= 1:
        raise UserError(f"recall={recall}: must be a fraction above 0")
    k, most = min(k, len(index) - 1), index.lists or len(index)
    if not k:  # alone in the gallery, with no neighbour to miss
        return IndexRecall(1.0, math.nan, 0, 0, 1)
    efforts = [*(2**power for power in range((most - 1).bit_length())), most]
    measured = index_recall(index, gallery, k=k, efforts=efforts, sample=sample)
    return next(result for result in measured if result.recall >= recall or result.effort == most)


def _measured(queries: np.ndarray, gallery: np.ndarray, rows: np.ndarray, distance: str) -> np.ndarray:
    """(N, k) distances in float64 from queries (N, d) to gallery rows (N, k); squared for `euclidean`.

    Sums of products and not matrix products, so that copies are at the same distance to the last bit.
    """
    measured = np.empty(rows.shape)
    for query, (vector, near) in enumerate(zip(queries.astype(np.float64), rows, strict=True)):
        images = gallery[near].astype(np.float64)
        if distance == "dot":
            measured[query] = -(images * vector).sum(axis=1)
        elif distance == "cosine":
            measured[query] = 1 - (unit_rows(images) * unit_rows(vector[None])).sum(axis=1)
        else:
            measured[query] = ((images - vector) ** 2).sum(axis=1)
    return measured
