"""A retriever's version in memory, and how it is searched from Python."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.arguments import number
from tfdml.errors import UserError, short_message
from tfdml.export.retriever.endpoints import MAX_NEIGHBOURS
from tfdml.export.retriever.gallery import Gallery
from tfdml.export.retriever.version import INDEX, RETRIEVER_CARD, read_card
from tfdml.export.versions import version_numbers
from tfdml.io import files
from tfdml.io.manifests import compare_files
from tfdml.retrieval.exact import unit_rows
from tfdml.retrieval.faiss_index import GalleryIndex, load_index
from tfdml.retrieval.reranking import summed, weights_of

Queries = np.ndarray | bytes | str | os.PathLike | Sequence[bytes | str | os.PathLike]
_ATTEMPTS = 5


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """What a search found: row i holds the neighbours of query i, nearest first, equally near ones by gallery row.

    Args:
        indices: (B, m) int64 rows of the gallery, m = min(k, N).
        ids: (B, m) str objects.
        distances: (B, m) float32, Euclidean, between vectors of length 1.
        similarities: (B, m) float32 cosines.
        labels: (B, m) int64 class ids, -1 for none.
        metadata: (B, m) str objects, JSON.
    """

    indices: np.ndarray
    ids: np.ndarray
    distances: np.ndarray
    similarities: np.ndarray
    labels: np.ndarray
    metadata: np.ndarray


@dataclasses.dataclass(frozen=True)
class LoadedVersion:
    """One version, read whole; nothing of it is needed on disk any more.

    Args:
        path: Where it lay.
        card: Its `retriever.json`.
        loaded: The SavedModel, kept because its signatures live only as long as it does.
        columns: `ids`, `labels` and `metadata` by row, where there is an index.
        index: The index of a large gallery.
    """

    path: Path
    card: dict[str, Any]
    loaded: Any
    columns: dict[str, np.ndarray]
    index: GalleryIndex | None

    @classmethod
    def read(cls, path: Path) -> LoadedVersion:
        """Read a version.

        Raises:
            UserError: It cannot be read.
        """
        card = read_card(path)
        compare_files(path, card["files"], str(path / RETRIEVER_CARD), "copy the version again, or build it again")
        try:
            loaded = tf.saved_model.load(str(path))
            columns = {name: loaded.table[name].numpy() for name in ("ids", "labels", "metadata")}
        except Exception as error:  # whatever TensorFlow raises on a damaged graph
            raise UserError(
                f"{path} cannot be loaded as a retriever's SavedModel: {short_message(error, 'last')}"
            ) from error
        index = load_index(path / INDEX) if card["kind"] == "indexed" else None
        held = {len(column) for column in columns.values()} | ({len(index)} if index else set())
        if held != {card["items"]} or (index and index.dimension != card["embedding_dim"]):
            raise UserError(f"{path} is damaged: {RETRIEVER_CARD} states {card['items']} items; build it again")
        return cls(path, card, loaded, columns if index else {}, index)

    @classmethod
    def newest(cls, path: Path) -> LoadedVersion:
        """Read a version, or the newest one below a folder.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        for _ in range(_ATTEMPTS - 1):
            chosen = newest_version(path)
            try:
                return cls.read(chosen)
            except UserError:
                # It may have been pruned while it was read; then there is a newer one.
                if chosen == path or chosen.is_dir():
                    raise
        return cls.read(newest_version(path))

    @property
    def number(self) -> int:
        """Its number; 0 where its folder has none."""
        return int(self.path.name) if self.path.name.isdecimal() else 0

    def gallery(self) -> Gallery:
        """Its items."""
        columns = {name: column.numpy() for name, column in self.loaded.table.items()}
        vectors = columns["embeddings"] if self.index is None else self.index.vectors()
        ids, metadata = (tuple(text.decode() for text in columns[name]) for name in ("ids", "metadata"))
        return Gallery(vectors, ids, columns["labels"], metadata)

    def embed(self, images: Queries) -> np.ndarray:
        """See `Retriever.embed`."""
        if isinstance(images, np.ndarray):
            if images.dtype != np.uint8 or images.ndim not in (3, 4):
                raise UserError(f"images must be (B, H, W, 3) uint8; got {images.dtype} of shape {images.shape}")
            name, value = "images", tf.constant(images if images.ndim == 4 else images[None])
        else:
            several = [images] if isinstance(images, (bytes, str, os.PathLike)) else images
            name, value = "image_bytes", tf.constant([_bytes(image) for image in several], tf.string)
        signature = "embed_images" if name == "images" else "serving_default"
        try:
            return self.loaded.signatures[signature](**{name: value})["embedding"].numpy()
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            raise UserError(short_message(error, "last")) from error

    def search(self, queries: Queries, k: int, expand: int = 0, alpha: float = 3.0) -> Neighbours:
        """See `Retriever.search`."""
        if expand:
            queries = self._expanded(queries, expand, alpha)
        if not isinstance(k, (int, np.integer)) or not 1 <= k <= MAX_NEIGHBOURS:
            raise UserError(f"k={k}: must be a number from 1 to {MAX_NEIGHBOURS}")
        if isinstance(queries, np.ndarray) and queries.dtype != np.uint8:
            vectors = _checked(queries, self.card["embedding_dim"])
        else:
            vectors = self.embed(queries)
        k = min(int(k), self.card["items"])
        return self._in_graph(vectors, k) if self.index is None else self._by_index(self.index, vectors, k)

    def _expanded(self, queries: Queries, count: int, alpha: float) -> np.ndarray:
        """(B, d) queries, moved by their nearest items."""
        if self.index is not None:
            raise UserError(f"expand={count}: an index does not give its vectors one by one; make expand 0")
        try:
            alpha = number("alpha", alpha, at_least=0)
        except ValueError as error:
            raise UserError(str(error)) from error
        if isinstance(queries, np.ndarray) and queries.dtype != np.uint8:
            vectors = unit_rows(_checked(queries, self.card["embedding_dim"]))
        else:
            vectors = self.embed(queries)
        found = self.search(vectors, count)
        near = tf.gather(self.loaded.table["embeddings"], found.indices).numpy()
        return summed(vectors, near, weights_of(found.similarities, alpha))

    def _in_graph(self, vectors: np.ndarray, k: int) -> Neighbours:
        search = self.loaded.signatures["search_embedding"]
        try:
            found = search(embedding=tf.constant(vectors), k=tf.constant(k, tf.int32))
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            raise UserError(short_message(error, "last")) from error
        answer = {name: value.numpy() for name, value in found.items()}
        return Neighbours(**{**answer, **{name: _decoded(answer[name]) for name in ("ids", "metadata")}})

    def _by_index(self, index: GalleryIndex, vectors: np.ndarray, k: int) -> Neighbours:
        rows, squares = index.search(
            unit_rows(vectors), k=k, effort=self.card["index"]["cells_searched"], complete=True
        )
        return Neighbours(
            indices=rows,
            ids=_decoded(self.columns["ids"][rows]),
            distances=np.sqrt(squares),
            similarities=1 - squares / 2,
            labels=self.columns["labels"][rows],
            metadata=_decoded(self.columns["metadata"][rows]),
        )


def newest_version(path: Path) -> Path:
    """The path of a version: itself, or the newest below it."""
    if (path / "saved_model.pb").is_file():
        return path
    numbers = version_numbers(path)
    if not numbers:
        raise UserError(f"there is no exported version at {path}")
    return path / str(numbers[-1])


def _checked(queries: np.ndarray, dimensions: int) -> np.ndarray:
    if queries.ndim == 1:
        queries = queries[None]
    if queries.dtype.kind not in "fiu" or queries.ndim != 2 or queries.shape[1] != dimensions:
        raise UserError(
            f"queries must be (images, {dimensions}) real numbers; got {queries.dtype} of shape {queries.shape}"
        )
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(queries, np.float32)
    for what, bad in (
        ("holds NaN or infinite values", ~np.isfinite(vectors).all(axis=1)),
        ("has length 0", ~vectors.any(axis=1)),
    ):
        if bad.any():
            raise UserError(f"embedding[{bad.argmax()}] of {len(vectors)}: {what}; bad in all: {bad.sum()}")
    return vectors


def _bytes(image: bytes | str | os.PathLike) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return files.read_bytes(Path(image))
    except (OSError, TypeError) as error:
        raise UserError(f"{image} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _decoded(texts: np.ndarray) -> np.ndarray:
    return np.array([text.decode() for text in texts.ravel()], object).reshape(texts.shape)
