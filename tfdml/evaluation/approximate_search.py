"""What an approximate search loses: an index, a quantised gallery, a gallery in a database."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdml.embeddings.reader import StoredEmbeddings
from tfdml.errors import UserError
from tfdml.evaluation.per_query import (
    NeighbourSearch,
    RetrievalTask,
    left_over,
    retrieval_task,
    values_per_query,
)
from tfdml.evaluation.relevance import Relevance
from tfdml.evaluation.retrieval import dataset_protocol, evaluate_retrieval
from tfdml.memory import require_memory
from tfdml.retrieval.database import MOST, GalleryDatabase
from tfdml.retrieval.exact import check_sides, nearest_neighbours, unit_rows
from tfdml.retrieval.faiss_index import GalleryIndex, row_blocks

_KIND = re.compile(r"int8|pq([1-9]\d*)?")
# Rows of the gallery that the quantiser is fitted to.
_TRAINING_ROWS = 2**16
# Numbers of the embedding for each byte of pq, where none are named.
_NUMBERS_PER_BYTE = 8
# Of galleries in databases, by default.
METRICS = ("recall", "map@r", "r_precision")
# Queries that are asked at once.
_ASKED = 100


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
    efforts: Sequence[int] | None = None,
    sample: int = 1000,
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> list[IndexRecall]:
    """Recall@k of an index against exact search, on a sample of queries.

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

    Returns:
        One result per effort.

    Raises:
        UserError: The gallery is not that of the index, or an argument is out of range.

    Example:
        >>> from tfdml.retrieval import build_index
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
        >>> few, all_lists = index_recall(build_index(gallery, lists=20), gallery, efforts=[1, 20], sample=100)
        >>> few.recall < all_lists.recall == 1.0
        True
    """
    efforts = [index.default_effort] if efforts is None else efforts
    return list(_recalls(index, gallery, queries, k, efforts, sample, seed, memory_budget))


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
    measured = _recalls(index, gallery, None, k, efforts, sample)
    return next(result for result in measured if result.recall >= recall or result.effort == most)


def _recalls(
    index: GalleryIndex,
    gallery: Any,
    queries: Any,
    k: int,
    efforts: Iterable[int],
    sample: int,
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> Iterator[IndexRecall]:
    """See `index_recall`; one result after another, as they are asked for."""
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

    for effort in efforts:
        found, _ = index.search(asked, k=k, effort=effort, own_rows=own_rows)
        near = (found >= 0) & (_measured(asked, gallery, np.maximum(found, 0), index.distance) <= farthest)
        shares = near.mean(axis=1)
        error = float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
        yield IndexRecall(float(shares.mean()), error, len(shares), k, effort)


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


def quantised_recall(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    relevance: Relevance | None = None,
    kinds: Sequence[str] = ("int8", "pq"),
    distance: str = "euclidean",
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> dict[str, dict[str, float]]:
    """Recall@1 where the gallery is quantised, the queries are not, and all of the gallery is compared.

    `int8`: 8 bits a number, between its least and greatest value (faiss's SQ8). `pqM`: each vector is cut into M
    pieces, and each piece is the nearest of 256 centres, one byte (Jegou et al., 2011, "Product quantization for
    nearest neighbor search"); `pq` takes a byte for every 8 numbers, or the nearest number of pieces that the
    dimension has.
    The quantiser is fitted to a seeded sample of the gallery.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) their class ids.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery.
        relevance: As `evaluate_retrieval`, without levels.
        kinds: Of `int8`, `pq` and `pqM`.
        distance: As `evaluate_retrieval`.
        seed: Of the sample.
        memory_budget: Of the exact search, for float32.

    Returns:
        For `float32` and each kind `recall@1`, `bytes` of a vector in the gallery, and `lost`, by how much the recall
        is below that of float32.

    Raises:
        UserError: An unknown kind; M does not divide the dimension; as `evaluate_retrieval`.

    Example:
        >>> points = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32) + np.arange(600)[:, None] // 6
        >>> found = quantised_recall(points, np.arange(600) // 6, kinds=["int8"])
        >>> found["float32"]["bytes"], found["int8"]["bytes"]
        (32, 8)
    """
    check_kinds(kinds)
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, relevance=relevance)
    dimension = task.queries.shape[1]
    structures = {kind: _structure(kind, dimension) for kind in kinds}
    values = values_per_query(task, ["recall@1"], distance, memory_budget)["recall@1"]
    exact = float(values[task.answerable].mean())
    result = {"float32": {"recall@1": exact, "bytes": 4 * dimension, "lost": 0.0}}
    for kind, structure in structures.items():
        index = _filled(structure, task.searched, distance, seed)
        hits = values_per_query(task, ["recall@1"], distance, 0, neighbours=_nearest_of(index, task, distance))
        recall = float(hits["recall@1"][task.answerable].mean())
        result[kind] = {"recall@1": recall, "bytes": int(index.sa_code_size()), "lost": exact - recall}
    return result


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise a `UserError` where one of these is no `kinds` of `quantised_recall`."""
    for kind in kinds:
        if _KIND.fullmatch(kind) is None:
            raise UserError(f"unknown quantisation {kind!r}; int8, pq, or pq with a number of bytes, such as pq64")


def _structure(kind: str, dimension: int) -> str:
    """Return what faiss's factory calls it."""
    if kind == "int8":
        return "SQ8"
    divisors = [pieces for pieces in range(1, dimension + 1) if dimension % pieces == 0]
    pieces = int(kind[2:] or min(divisors, key=lambda count: abs(count - dimension / _NUMBERS_PER_BYTE)))
    if pieces not in divisors:
        raise UserError(f"{kind}: {pieces} does not divide the {dimension} dimensions; one of {divisors[-12:]} does")
    return f"PQ{pieces}"


def _filled(structure: str, gallery: np.ndarray, distance: str, seed: int) -> Any:
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT if distance in ("cosine", "dot") else faiss.METRIC_L2
    index: Any = faiss.index_factory(gallery.shape[1], structure, metric)
    count = min(len(gallery), _TRAINING_ROWS)
    chosen = np.sort(np.random.default_rng(seed).choice(len(gallery), count, replace=False))
    if structure.startswith("PQ"):
        if count < 256:
            raise UserError(
                f"product quantisation fits 256 centres: it takes as many images at least; there are {count}"
            )
        index.pq.cp.min_points_per_centroid = 1  # no warning of few images
        index.do_polysemous_training = False  # orders the codes for a search that is not made here, for seconds a byte
    index.train(_placed(gallery[chosen], distance))
    for block in row_blocks(gallery.shape):
        index.add(_placed(gallery[block], distance))
    return index


def _nearest_of(index: Any, task: RetrievalTask, distance: str) -> NeighbourSearch:
    """Return the search for the nearest images in an index, the query itself left out."""
    own = task.own

    def neighbours(depth: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        for block in row_blocks(task.queries.shape):
            found = index.search(_placed(task.queries[block], distance), depth + (own is not None))[1]
            left_out = np.zeros(found.shape, bool) if own is None else found == own[block, None]
            yield block, left_over(found, left_out, depth), np.zeros(0)

    return neighbours


def _placed(rows: np.ndarray, distance: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows, np.float32)
    return unit_rows(rows) if distance == "cosine" else rows


@dataclasses.dataclass(frozen=True)
class GalleryMetrics:
    """Metrics of one gallery, as `evaluate_retrieval` returns them.

    Args:
        found: Of what the database finds.
        exact: Of the exact search over the same rows.
        left_out: Metrics that need more neighbours than a search of the database returns.
        images: How many rows of the split were measured.
        classes: Of how many classes.
    """

    found: dict[str, Any]
    exact: dict[str, Any]
    left_out: tuple[str, ...]
    images: int
    classes: int


def read_rows(gallery: GalleryDatabase) -> StoredEmbeddings:
    """All rows of a gallery, by id.

    Raises:
        UserError: They have no labels, or do not fit into the memory.
    """
    about = gallery.about
    if about is not None and about.attributes.get("label") != "integer":
        raise UserError(f"`uri={gallery.address}` has no attribute label of integers: nothing tells what is a hit")
    if about is not None:
        advice = "measure a part of it, indexed as a table of its own"
        require_memory(3 * 4 * len(gallery) * about.dimension, f"the vectors of {gallery.address}", advice)
    parts = list(gallery.rows())
    ids = np.array([name for part in parts for name in part.ids], object)
    if not len(ids):
        raise UserError(f"`uri={gallery.address}` holds no rows")
    order = np.argsort(ids)
    labels = np.array([label for part in parts for label in part.attributes["label"]], np.int64)
    roles = np.array([role for part in parts for role in part.attributes.get("role", ())])
    return StoredEmbeddings(
        str(gallery.address),
        np.concatenate([part.vectors for part in parts])[order],
        labels[order],
        roles[order] if len(roles) else None,
        tuple(ids[order]),
    )


def evaluate_gallery(
    gallery: GalleryDatabase,
    split: str = "test",
    ks: Sequence[int] | Callable[[Any], Sequence[int]] = (1, 2, 4, 8),
    metrics: Sequence[str] = METRICS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> GalleryMetrics:
    """Search a gallery's queries in the database, and score what is found.

    Rows with the role `query` are searched among those with the role `gallery`; without such roles each row of the
    split among all others. A neighbour that the database does not find is no hit. The distance is the gallery's.

    Args:
        gallery: With the attributes `label` and, where it has queries or training images, `role`.
        split: `"test"` or `"train"`, by role.
        ks: The K of Recall@K, or what gives them for the rows.
        metrics: As `evaluate_retrieval`, without `map` and clustering.
        progress: Called with the queries searched in the database, and how many there are.

    Returns:
        The metrics, and those of the exact search. `map@r` and `r_precision` are left out where a class has more images
        than a search returns, 4,095.

    Raises:
        UserError: The gallery has no labels or no such split; a metric or K as in `evaluate_retrieval`; or the database
            fails.

    Example:
        >>> with connect(f"lancedb://{os.path.abspath('galleries')}?index=ivf") as gallery:
        ...     gallery.upsert(test.images.names, embeddings, {"label": labels})
        ...     gallery.optimize()
        ...     measured = evaluate_gallery(gallery, ks=(1, 10))
        >>> round(measured.found["recall@1"], 1), round(measured.exact["recall@1"], 1)
        (0.6, 0.6)
    """
    everything = read_rows(gallery)
    part = everything.split(split)
    chosen = ks(part) if callable(ks) else ks
    arrays = dataset_protocol(part.embeddings, part)  # type: ignore[arg-type]  # which has labels and roles
    task = retrieval_task(**arrays)
    too_deep = task.depth_with_ignored(int(task.matches.max())) > MOST - 1
    left_out = tuple(name for name in metrics if too_deep and name in ("map@r", "r_precision"))
    kept = [name for name in metrics if name not in left_out]
    options: dict[str, Any] = {"ks": chosen, "metrics": kept, "distance": gallery.distance}
    search = _search(gallery, part, _searched_roles(everything, part), progress)
    found = evaluate_retrieval(**arrays, **options, neighbours=search)
    exact = evaluate_retrieval(**arrays, **options)
    assert part.labels is not None
    return GalleryMetrics(found, exact, left_out, len(part), len(np.unique(part.labels)))


def _searched_roles(everything: StoredEmbeddings, part: StoredEmbeddings) -> dict[str, str]:
    """Return the filter that leaves what is searched."""
    if part.is_query is not None:
        return {"role": "gallery"}
    if len(part) == len(everything) or part.roles is None:
        return {}
    roles = sorted(set(part.roles.tolist()))
    if len(roles) > 1:
        raise UserError(
            f"`uri={everything.source}`: the roles {' and '.join(roles)} would be searched together, which no filter "
            "of one value leaves; index them as a table of their own"
        )
    return {"role": roles[0]}


def _search(
    gallery: GalleryDatabase, part: StoredEmbeddings, condition: dict[str, str], progress: Callable[[int, int], None]
) -> Callable[[int], Iterator[tuple[slice, np.ndarray, np.ndarray]]]:
    """Return the search of the database as `evaluate_retrieval` takes it."""
    names = np.array(part.names, object)
    is_query = part.is_query
    asked = np.arange(len(part)) if is_query is None else np.flatnonzero(is_query)
    targets = names if is_query is None else names[~is_query]
    row_of = {name: row for row, name in enumerate(targets)}

    def neighbours(depth: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        for start in range(0, len(asked), _ASKED):
            block = slice(start, min(start + _ASKED, len(asked)))
            queries = asked[block]
            # One more, where a query is among what is searched.
            found = gallery.search(part.embeddings[queries], depth + (is_query is None), condition)
            rows = np.full((len(queries), depth), -1, np.int64)
            distances = np.full(rows.shape, np.inf, np.float32)
            for query, name in enumerate(names[queries]):
                kept = [i for i, other in enumerate(found.ids[query]) if other is not None and other != name][:depth]
                rows[query, : len(kept)] = [row_of.get(other, -1) for other in found.ids[query, kept]]
                distances[query, : len(kept)] = found.distances[query, kept]
            progress(block.stop, len(asked))
            yield block, rows, distances

    return neighbours
