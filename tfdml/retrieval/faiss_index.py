"""Approximate nearest neighbors by faiss: of a gallery too large to compare every query with all of it, or to hold."""

import json
import os
from typing import Any

import numpy as np

from tfdml.errors import REASON, UserError, check_choice, user_errors
from tfdml.io.files import atomic_write, fields, parse_json
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import exact

# Rows that are read, checked and handed to faiss at once.
_BLOCK_BYTES = 2**26
# Rows that an index is trained on at most: faiss takes 256 for each list.
_TRAINING_ROWS = 2**20
# An index file is one of faiss with these lines behind it, which faiss does not read.
_TRAILER = b"\ntfdml-index "
_LONGEST_TRAILER = 4096


class GalleryIndex:
    """A gallery that is searched by a faiss index; made by `build_index` or `load_index`.

    Args:
        index: The faiss index.
        distance: As `build_index`.

    Attributes:
        dimension: d.

    `len(index)` is the number of gallery images.
    """

    def __init__(self, index: Any, distance: str):
        self.index, self.distance, self.dimension = index, distance, int(index.d)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def add(self, gallery: Any) -> None:
        """Append gallery images, whose rows follow those of the index.

        Args:
            gallery: (N, d) embeddings; of a memory-mapped array one block is read after another.

        Raises:
            UserError: They are not (N, d) or not finite; the blocks before the one that is not are then in the index.
        """
        size, dimension = _shape_of(gallery)
        if dimension != self.dimension:
            raise UserError(f"gallery embeddings have {dimension} dimensions, the index {self.dimension}")
        for block in exact.row_blocks(size, _rows_at_once(self.dimension)):
            what = f"gallery rows {block.start} .. {block.stop - 1}, counted from 0"
            self.index.add(_placed(gallery[block], self.distance, what))

    def tune(self, parameters: str) -> None:
        """Set how much is searched; a saved index keeps it.

        Args:
            parameters: As faiss's `ParameterSpace` reads them, such as `"nprobe=64"` or `"efSearch=128"`.

        Raises:
            UserError: The index has no such parameter.
        """
        with user_errors(RuntimeError, f"`parameters={parameters}`: {REASON}", keep="first"):
            _faiss().ParameterSpace().set_index_parameters(self.index, parameters)

    def search(self, queries: Any, *, k: int, own_rows: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the k nearest gallery images that the index finds for every query, nearest first.

        What `nearest_neighbors` returns, save that images may be missed. Equal distances that are found are ordered by
        gallery row. Distances of `LSH` are numbers of bits.

        Args:
            queries: (N, d) embeddings.
            k: How many neighbors, at most the gallery (less one with `own_rows`).
            own_rows: (N,) the gallery row that holds each query itself, left out of its neighbors.

        Returns:
            (N, k) int64 gallery rows and (N, k) float32 distances; row -1 at distance infinity where fewer than k
            images are found.

        Raises:
            UserError: Queries that are empty, not finite or of another dimension; k out of range.
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
        rows, distances = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        for block in exact.row_blocks(len(queries), _rows_at_once(max(self.dimension, 4 * depth))):
            scores, near = self.index.search(_placed(queries[block], self.distance, "query embeddings"), depth)
            left_out = near < 0 if own_rows is None else (near < 0) | (near == own_rows[block, None])
            far = np.where(left_out, np.float32(np.inf), self._distances(scores))
            rows[block], distances[block] = exact.nearest_first(near, far, k)
        return rows, distances

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
        about = json.dumps({"distance": self.distance, "count": len(self)})
        message = f"{path} cannot be written: {REASON}"
        with user_errors((OSError, RuntimeError), message), atomic_write(os.fspath(path)) as temporary:
            _faiss().write_index(self.index, temporary)
            with open(temporary, "ab") as file:
                file.write(_TRAILER + about.encode())


def build_index(
    gallery: Any, factory: str = "Flat", *, distance: str = "euclidean", parameters: str = ""
) -> GalleryIndex:
    """Return a faiss index of a gallery.

    Args:
        gallery: (N, d) embeddings. Of a memory-mapped array, a sample to train on and one block after another are read.
        factory: What `faiss.index_factory` makes: `"Flat"` compares with every image, `"IVF2000,Flat"` with those of
            some of 2,000 lists, `"HNSW32"` walks a graph; `"SQ8"` and `"LSH"` keep 8 bits and one bit of a dimension.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`, as `nearest_neighbors`.
        parameters: As `GalleryIndex.tune`. Without them faiss searches one list of an IVF index.

    Returns:
        The index. What its codes find can be measured again by `rescore`.

    Raises:
        UserError: Embeddings that are empty or not finite (rows named), or an argument is none of the above.

    Example:
        >>> gallery = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
        >>> index = build_index(gallery, "IVF20,Flat", parameters="nprobe=4")
        >>> index.search(gallery[:2], k=1)[0].ravel().tolist()
        [0, 1]
    """
    check_choice("distance", distance, DISTANCES)
    size, dimension = _shape_of(gallery)
    faiss = _faiss()
    by_product = distance in ("cosine", "dot") and factory != "LSH"  # which compares bits, whatever the distance
    metric = faiss.METRIC_INNER_PRODUCT if by_product else faiss.METRIC_L2
    with user_errors(RuntimeError, f"`factory={factory}` of {size:,} images: {REASON}", keep="last"):
        index = faiss.index_factory(dimension, factory, metric)
        if not index.is_trained:
            sample = np.sort(np.random.default_rng(0).choice(size, min(size, _TRAINING_ROWS), replace=False))
            index.train(_placed(gallery[sample], distance, "a sample of the gallery"))
    gallery_index = GalleryIndex(index, distance)
    if parameters:
        gallery_index.tune(parameters)
    gallery_index.add(gallery)
    return gallery_index


def load_index(path: str | os.PathLike) -> GalleryIndex:
    """Return the index of a file that `GalleryIndex.save` wrote.

    Raises:
        UserError: There is no such file, or it is damaged or something else.
    """
    with user_errors((OSError, RuntimeError), f"{path} cannot be read: {REASON}"):
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_TRAILER))
            _, trailer, text = file.read().rpartition(_TRAILER)
        if not trailer:
            raise UserError(f"{path} is not an index that was saved here, or not whole; build it again")
        about = fields(parse_json(text, str(path)), {"distance": str, "count": int}, str(path))
        index = _faiss().read_index(os.fspath(path))
    if about["count"] != index.ntotal:
        raise UserError(f"{path} is damaged: it holds {index.ntotal} images of {about['count']}; build it again")
    return GalleryIndex(index, about["distance"])


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
        >>> rows, _ = build_index(gallery, "LSH").search(gallery[:2], k=40)
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
