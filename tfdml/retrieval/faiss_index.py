"""Approximate nearest neighbors by faiss: of a gallery too large to compare every query with all of it, or to hold."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdml.errors import REASON, UserError, check_choice, check_positive, user_errors
from tfdml.io.files import atomic_write, fields, parse_json
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import exact

KINDS = ("ivf", "hnsw", "flat")
# How the index keeps a vector, by the name that faiss's factory has for it.
STORAGES = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8", "binary": "LSH"}
# Rows that are read, checked and handed to faiss at once.
_BLOCK_BYTES = 2**26
# Rows that the centers of a list are found from.
_TRAINING_ROWS_PER_LIST = 64
# An index file is one of faiss with these lines behind it, which faiss does not read.
_TRAILER = b"\ntfdml-index "
_LONGEST_TRAILER = 4096


class GalleryIndex:
    """A gallery that is searched approximately; made by `build_index` or `load_index`.

    Args:
        index: The faiss index.
        distance: As `build_index`.
        kind: `"ivf"`, `"hnsw"` or `"flat"`.
        read_only: Whether its vectors stay in the file that it was read from.

    Attributes:
        dimension: d.

    `len(index)` is the number of gallery images.
    """

    def __init__(self, index: Any, distance: str, kind: str, read_only: bool = False):
        self.index = index
        self.read_only = read_only
        self.distance = distance
        self.kind = kind
        self.dimension = int(index.d)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def lists(self) -> int:
        """The lists that the gallery is divided into; 0 of the other kinds."""
        return int(self.index.nlist) if self.kind == "ivf" else 0

    @property
    def default_effort(self) -> int:
        """A sixteenth of the lists; for a graph, 128 images. A flat index ignores it."""
        return max(1, self.lists // 16) if self.kind == "ivf" else 128

    def add(self, gallery: Any) -> None:
        """Append gallery images, whose rows follow those of the index.

        Args:
            gallery: (N, d) embeddings; of a memory-mapped array one block is read after another.

        Raises:
            UserError: They are not (N, d) or not finite; the blocks before the one that is not are then in the index.
                Or the index is memory-mapped.
        """
        if self.read_only:  # faiss would end the process
            raise UserError("an index that is mapped from its file cannot grow: load it with mapped=False")
        shape = _shape_of(gallery)
        if shape[1] != self.dimension:
            raise UserError(f"gallery embeddings have {shape[1]} dimensions, the index {self.dimension}")
        for block in exact.row_blocks(shape[0], _rows_at_once(self.dimension)):
            what = f"gallery rows {block.start} .. {block.stop - 1}, counted from 0"
            self.index.add(_placed(gallery[block], self.distance, what))

    def search(
        self, queries: Any, *, k: int, effort: int | None = None, own_rows: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k nearest gallery images that the index finds for every query, nearest first.

        What `nearest_neighbors` returns, save that images may be missed: how many, `index_recall` measures. Equal
        distances that are found are ordered by gallery row. Distances of binary codes are numbers of bits.

        Args:
            queries: (N, d) embeddings.
            k: How many neighbors, at most the gallery (less one with `own_rows`).
            effort: What is searched for each query: this many lists (`ivf`), or this many images kept on the way
                through the graph (`hnsw`, at least k). More finds more and takes longer; all lists are exact. None:
                `default_effort`.
            own_rows: (N,) the gallery row that holds each query itself, left out of its neighbors.

        Returns:
            (N, k) int64 gallery rows and (N, k) float32 distances; row -1 at distance infinity where the lists
            searched hold fewer than k images.

        Raises:
            UserError: Queries that are empty, not finite or of another dimension; k or effort out of range.
        """
        queries = exact.check_embeddings(queries, "query embeddings")
        if queries.shape[1] != self.dimension:
            raise UserError(f"queries have {queries.shape[1]} dimensions, the index {self.dimension}")
        if own_rows is not None:
            own_rows = exact.check_own_rows(own_rows, len(queries), len(self))
        available = len(self) - (own_rows is not None)
        if not 1 <= k <= available:
            raise UserError(f"k must be in 1 .. {available}, the gallery images there are; got {k}")
        depth = k + (own_rows is not None)
        parameters = self._parameters(self.default_effort if effort is None else effort, depth)
        rows, distances = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        for block in exact.row_blocks(len(queries), _rows_at_once(max(self.dimension, 4 * depth))):
            points = _placed(queries[block], self.distance, "query embeddings")
            scores, near = self.index.search(points, depth, params=parameters)
            left_out = near < 0 if own_rows is None else (near < 0) | (near == own_rows[block, None])
            far = np.where(left_out, np.float32(np.inf), self._distances(scores))
            rows[block], distances[block] = exact.nearest_first(near, far, k)
        return rows, distances

    def _parameters(self, effort: int, depth: int) -> Any:
        check_positive(effort=effort)
        if self.kind == "flat":
            return None
        if self.kind == "ivf":
            return _faiss().SearchParametersIVF(nprobe=min(effort, self.lists))
        return _faiss().SearchParametersHNSW(efSearch=min(max(effort, depth), len(self)))

    def _distances(self, scores: np.ndarray) -> np.ndarray:
        """Return what `nearest_neighbors` calls the distance, from faiss's inner products or squared distances."""
        if isinstance(self.index, _faiss().IndexLSH):
            return scores
        if self.distance == "dot":
            return -scores
        if self.distance == "cosine":
            return np.maximum(1 - scores, 0)
        return np.sqrt(np.maximum(scores, 0)) if self.distance == "euclidean" else np.maximum(scores, 0)

    def save(self, path: str | os.PathLike) -> None:
        """Write the index into a file atomically; `faiss.read_index` reads it, too.

        Raises:
            UserError: The file cannot be written.
        """
        about = json.dumps({"distance": self.distance, "kind": self.kind, "count": len(self)})
        message = f"{path} cannot be written: {REASON}"
        with user_errors((OSError, RuntimeError), message), atomic_write(os.fspath(path)) as temporary:
            _faiss().write_index(self.index, temporary)
            with open(temporary, "ab") as file:
                file.write(_TRAILER + about.encode())


def build_index(
    gallery: Any,
    *,
    kind: str = "ivf",
    distance: str = "euclidean",
    lists: int | None = None,
    links: int = 32,
    storage: str = "float32",
    seed: int = 0,
) -> GalleryIndex:
    """Return an index of a gallery, for approximate search.

    `ivf`: k-means divides the gallery into lists; a query is compared with the images of the few lists whose centers
    are nearest (Jegou et al., 2011, "Product quantization for nearest neighbor search", without the quantization).
    `hnsw`: every image is linked to near ones, and a query walks that graph (Malkov and Yashunin, 2018); it takes
    longer to build and more memory, and answers sooner. Its order of adding images depends on threads, so that two
    builds may differ in what they miss; `ivf` is the same every time on the same machine. `flat`: a query is compared
    with every image, as the storage keeps it.

    Args:
        gallery: (N, d) embeddings. Of a memory-mapped array, a sample to find the centers and one block after another
            are read.
        kind: `"ivf"`, `"hnsw"` or `"flat"`.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`, as `nearest_neighbors`.
        lists: How many lists `ivf` has; None: about 2 sqrt(N).
        links: How many links an image of `hnsw` has, 2 .. 256.
        storage: How the index keeps vectors: `"float32"`, as they are; `"float16"` or `"int8"`, rounded, in a half or
            a quarter of the memory, whose distances are those of the rounded vectors. Or of `flat`, `"binary"`: the
            sign of each dimension, in d / 8 bytes, compared by the number of bits that differ.
        seed: Of the sample and of k-means.

    Returns:
        The index. In memory, 4 N d bytes for `float32`; `hnsw` besides about 8 N `links`. What `int8` and `binary` find
        can be measured again by `rescore`.

    Raises:
        UserError: Embeddings that are empty or not finite (rows named), or an argument is none of the above.

    Example:
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
        >>> index = build_index(gallery, lists=20)
        >>> index.search(gallery[:2], k=1)[0].ravel().tolist()
        [0, 1]
    """
    check_choice("kind", kind, KINDS)
    check_choice("distance", distance, DISTANCES)
    check_choice("storage", storage, STORAGES)
    if storage == "binary" and kind != "flat":
        raise UserError(f"storage 'binary' goes with kind 'flat', not {kind!r}")
    size, dim = _shape_of(gallery)
    if lists is None:
        lists = min(max(1, round(2 * math.sqrt(size))), size)
    if not 1 <= lists <= size:
        raise UserError(f"lists must be in 1 .. {size}, the number of gallery images; got {lists}")
    if not 2 <= links <= 256:
        raise UserError(f"links must be in 2 .. 256; got {links}")
    faiss = _faiss()
    structure = {"ivf": f"IVF{lists},", "hnsw": f"HNSW{links},", "flat": ""}[kind]
    product = distance in ("cosine", "dot") and storage != "binary"
    metric = faiss.METRIC_INNER_PRODUCT if product else faiss.METRIC_L2
    index = faiss.index_factory(dim, structure + STORAGES[storage], metric)
    if not index.is_trained:
        count = min(size, max(_TRAINING_ROWS_PER_LIST * lists if kind == "ivf" else 0, 2**14))
        sample = np.sort(np.random.default_rng(seed).choice(size, count, replace=False))
        if kind == "ivf":
            # No warning of few images per list, and no sampling of the sample.
            index.cp.seed, index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = seed, 1, count
        index.train(_placed(gallery[sample], distance, "a sample of the gallery"))
    gallery_index = GalleryIndex(index, distance, kind)
    gallery_index.add(gallery)
    return gallery_index


def load_index(path: str | os.PathLike, *, mapped: bool = False) -> GalleryIndex:
    """Return the index of a file that `GalleryIndex.save` wrote.

    Args:
        path: The file.
        mapped: Whether to leave the vectors of an `ivf` index on disk, mapped into memory: for galleries beyond it.

    Raises:
        UserError: There is no such file, or it is damaged or something else.
    """
    with user_errors((OSError, RuntimeError), f"{path} cannot be read: {REASON}"):
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_TRAILER))
            _, trailer, text = file.read().rpartition(_TRAILER)
        if not trailer:
            raise UserError(f"{path} is not an index that was saved here, or not whole; build it again")
        about = fields(parse_json(text, str(path)), {"kind": str, "distance": str, "count": int}, str(path))
        mapped = mapped and about["kind"] == "ivf"
        index = _faiss().read_index(os.fspath(path), _faiss().IO_FLAG_MMAP if mapped else 0)
    if about["count"] != index.ntotal:
        raise UserError(f"{path} is damaged: it holds {index.ntotal} images of {about['count']}; build it again")
    return GalleryIndex(index, about["distance"], about["kind"], read_only=mapped)


@dataclasses.dataclass(frozen=True)
class IndexRecall:
    """How many of the true neighbors an index finds.

    Args:
        recall: The mean, over the sampled queries, of the share of the k nearest images that are found.
        standard_error: Its standard error, the standard deviation over queries by the root of their number.
        queries: How many queries were sampled.
        k: Of how many neighbors.
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
) -> Iterator[IndexRecall]:
    """Yield Recall@k of an index against exact search, on a sample of queries, for each effort as it is asked for.

    For one query, the share of the index's k images whose distance, recomputed in float64, is at most that of the
    k-th nearest of the exact search: so of equally near images any will do. The same queries serve all efforts.

    Args:
        index: The index.
        gallery: (G, d) the embeddings that it was built from, in memory or memory-mapped.
        queries: (N, d) to sample from; None: the gallery, each query left out of its own neighbors.
        k: How many neighbors.
        efforts: What to measure, see `GalleryIndex.search`; None: the default effort.
        sample: How many queries; all, where there are fewer.
        seed: Of the sample.

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
    check_positive(sample=sample)
    pool = gallery if queries is None else queries
    picks = np.sort(np.random.default_rng(seed).choice(len(pool), min(sample, len(pool)), replace=False))
    queries, gallery, own_rows = exact.check_sides(pool[picks], gallery, picks if queries is None else None)
    nearest, _ = exact.nearest_neighbors(queries, gallery, k=k, distance=index.distance, own_rows=own_rows)
    farthest = exact.measure(queries, gallery, nearest, index.distance).max(axis=1, keepdims=True)

    for effort in [index.default_effort] if efforts is None else efforts:
        rows, _ = index.search(queries, k=k, effort=effort, own_rows=own_rows)
        distances = exact.measure(queries, gallery, np.maximum(rows, 0), index.distance)
        shares = ((rows >= 0) & (distances <= farthest)).mean(axis=1)
        error = float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
        yield IndexRecall(float(shares.mean()), error, len(shares), k, effort)


def rescore(
    queries: Any, gallery: Any, rows: Any, *, k: int, distance: str = "euclidean"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest of each query's candidates by exact distances, nearest first, equal ones by gallery row.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) float32 or float16 embeddings, in memory or memory-mapped; only candidates are read.
        rows: (N, m) gallery rows, such as a search of codes returns them; -1 for none.
        k: How many neighbors, at most m.
        distance: As `nearest_neighbors`.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances; row -1 at distance infinity where there are fewer.

    Raises:
        UserError: The shapes do not go together, a row or k is out of range, or an embedding is not finite.

    Example:
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 32)).astype(np.float32)
        >>> rows, _ = build_index(gallery, kind="flat", storage="binary").search(gallery[:2], k=40)
        >>> rescore(gallery[:2], gallery, rows, k=10)[0][:, 0].tolist()
        [0, 1]
    """
    queries, rows = exact.check_embeddings(queries, "query embeddings"), np.asarray(rows)
    check_choice("distance", distance, DISTANCES)
    if _shape_of(gallery)[1] != queries.shape[1] or rows.ndim != 2 or len(rows) != len(queries):
        raise UserError(f"queries {queries.shape}, gallery {np.shape(gallery)} and rows {rows.shape} must go together")
    if not 1 <= k <= rows.shape[1] or rows.max() >= len(gallery):
        raise UserError(f"k={k} must be in 1 .. {rows.shape[1]}, and rows below {len(gallery)}, not {rows.max()}")
    far = exact.measure(queries, gallery, np.maximum(rows, 0), distance)
    if not np.isfinite(far).all():
        raise UserError("gallery embeddings hold NaN or infinite values")
    rows, far = exact.nearest_first(rows, np.where(rows < 0, np.inf, far), k)
    return rows, exact.in_float32(far, distance)


def _faiss() -> Any:
    """Return the module, of which its type hints know only a part."""
    import faiss

    return faiss


def _shape_of(gallery: Any) -> tuple[int, int]:
    shape = np.shape(gallery)
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"gallery embeddings must be (images, dimensions), neither of them 0; got shape {shape}")
    return shape


def _rows_at_once(numbers: int) -> int:
    """How many rows of so many numbers are read, checked and handed to faiss at once."""
    return max(1, _BLOCK_BYTES // (4 * numbers))


def _placed(rows: Any, distance: str, what: str) -> np.ndarray:
    """Rows as the index compares them: checked, and of length 1 for cosine."""
    rows = exact.check_embeddings(rows, what)
    return exact.unit_rows(rows) if distance == "cosine" else rows
