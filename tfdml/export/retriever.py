"""A retriever: an exported embedder with a gallery that it searches, as numbered versions."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.arguments import number
from tfdml.data.dataset import ImageDataset
from tfdml.embeddings.model_card import CARD, describe_files
from tfdml.errors import UserError, short_message
from tfdml.evaluation.approximate_search import least_effort
from tfdml.export.gallery import NO_LABEL, Gallery, GalleryItem, UnreadableItem, embedded, items_of_dataset
from tfdml.export.network import in_float32
from tfdml.export.saved_model import SIGNATURES, model_files, prediction_log, write_saved_model, write_warm_up
from tfdml.export.search_graph import MAX_NEIGHBOURS, MAX_RESULTS, SEARCHES, copy_with_gallery, write_graph
from tfdml.export.versions import new_version, version_numbers
from tfdml.io.files import locked, partial_folder, read_bytes, scratch_folder, write_json
from tfdml.io.manifests import Kinds, compare_files, fields, read_json
from tfdml.models import AnyEmbedder
from tfdml.retrieval.exact import unit_rows
from tfdml.retrieval.faiss_index import GalleryIndex, build_index, load_index
from tfdml.retrieval.reranking import summed, weights_of

RETRIEVER_CARD = "retriever.json"
INDEX = "gallery.faiss"
# Above it a search through all of it would take tens of milliseconds for each query.
EXACT_LIMIT = 200_000
_CARD: Kinds = {
    "items": int,
    "classes": int,
    "embedding_dim": int,
    "exact_limit": int,
    "recall_wanted": float,
    "index": (dict, type(None)),
    "files": dict,
}
# What recall is measured at, and on how many items.
_NEIGHBOURS = 10
_QUERIES = 500
# k-means asks for 39 vectors a cell at least.
_SMALLEST_CELL = 39
_WARM_UP_SIDE = 256
_WARM_UP_SIZES = (1, 8)
_ATTEMPTS = 5

Queries = np.ndarray | bytes | str | os.PathLike | Sequence[bytes | str | os.PathLike]


@dataclasses.dataclass(frozen=True)
class SearchResult:
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


class Retriever:
    """Finds the items of a gallery that are nearest to images or embeddings.

    It answers from memory: versions may be written, replaced and pruned beneath it. `search` may be called from any
    number of threads, also while another thread calls `add`, `remove` or `refresh`.

    Make one with `Retriever.build` or `Retriever.load`.

    Example:
        >>> retriever = Retriever.load("models/cars_retriever")
        >>> retriever.search(["photos/coupe/2.jpg"], k=3).ids
        array([['coupe/2.jpg', ...]], dtype=object)
        >>> retriever.add([GalleryItem("new", image=jpeg)])
        PosixPath('models/cars_retriever/6')
    """

    def __init__(self, version: LoadedVersion):
        self._version = version

    @classmethod
    def build(
        cls,
        embedder: AnyEmbedder | str | os.PathLike,
        items: Iterable[GalleryItem | UnreadableItem] | ImageDataset,
        folder: str | os.PathLike,
        *,
        exact_limit: int = EXACT_LIMIT,
        recall: float = 0.99,
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
    ) -> Retriever:
        """Embed a gallery, write it as the next version of a retriever, and load that.

        Args:
            embedder: What embeds: an exported version, a folder of them, or a Keras embedder, which is exported first.
            items: The gallery: items, or the images of a data set.
            folder: Where versions lie; earlier versions stay.
            exact_limit: Galleries of more items are searched by a faiss index beside the SavedModel.
            recall: Recall@10 that such an index is to reach on the gallery's own items, as a fraction.
            skip_bad: Leave out images that cannot be read or decoded, instead of refusing the gallery.
            report: Called with a line on every bad image, up to ten.

        Raises:
            UserError: An item is bad or occurs twice, there is none, or the folder cannot be written.
        """
        if isinstance(items, ImageDataset):
            items = items_of_dataset(items)
        with scratch_folder() as name:
            exported, around = Path(name) / "embedder", Path(name) / "retriever"
            if isinstance(embedder, AnyEmbedder):
                write_saved_model(in_float32(embedder), exported)
            else:
                exported = newest_version(Path(embedder))
            loaded = write_graph(exported, around)
            if (exported / CARD).is_file():
                # For those who use a retriever as an embedder; the files that it lists are not here.
                card = {**read_json(exported / CARD), "artefacts": {}, "signatures": [*SIGNATURES, *SEARCHES]}
                write_json(around / CARD, card)
            gallery = embedded(items, loaded.signatures["embed_each"], skip_bad, report)
            _check_dimensions(gallery, loaded)
            path = write_version(around, Path(folder), gallery, exact_limit, recall)
        return cls(LoadedVersion.read(path))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Retriever:
        """Return a retriever into memory.

        Args:
            path: One version, or a folder of them, of which the newest is taken.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        return cls(LoadedVersion.newest(Path(path)))

    @property
    def path(self) -> Path:
        """The version in memory."""
        return self._version.path

    @property
    def card(self) -> dict[str, Any]:
        """The version's card: kind, items, index and its measured recall."""
        return dict(self._version.card)

    def __len__(self) -> int:
        return self._version.card["items"]

    def __repr__(self) -> str:
        card = self._version.card
        return f"Retriever({str(self.path)!r}: {card['items']:,} items, {card['embedding_dim']}-d, {card['kind']})"

    def gallery(self) -> Gallery:
        """Return the items."""
        return self._version.gallery()

    def embed(self, images: Queries) -> np.ndarray:
        """(B, d) embeddings of images: encoded bytes, paths of files, or (B, H, W, 3) uint8.

        Raises:
            UserError: One of them cannot be decoded; it is named.
        """
        return self._version.embed(images)

    def search(self, queries: Queries, k: int, *, expand: int = 0, alpha: float = 3.0) -> SearchResult:
        """Return the k nearest items of every query; the whole gallery where k is more than it holds.

        With `expand`, queries are first moved by their nearest items (`tfdml.retrieval.expand_queries`),
        and searched again.

        Args:
            queries: (B, d) or (d,) floats, embeddings of any length but 0; or images: encoded bytes, paths of files, or
                (B, H, W, 3) or (H, W, 3) uint8.
            k: From 1 to `MAX_NEIGHBOURS`.
            expand: How many items a query is moved by; 0: it is searched as it is. Not where there is an index.
            alpha: The exponent of their similarities, at least 0; 0: all weigh as much as the query.

        Returns:
            (B, min(k, N)) neighbours; B is 1 for a single query.

        Raises:
            UserError: A query is bad; it is named. Or the retriever cannot expand queries.
        """
        return self._version.search(queries, k, expand, alpha)

    def add(self, items: Iterable[GalleryItem | UnreadableItem] | ImageDataset, *, replace: bool = False) -> Path:
        """Write a version with more items, and load it.

        It is added to the newest version there is, whoever wrote it. Two that add at once wait for one another.

        Args:
            items: The new items; they come last.
            replace: Let items take the place of those with their ids.

        Returns:
            The path of the new version.

        Raises:
            UserError: An item is bad, or its id is in the gallery already; no version is written.
        """
        added = items_of_dataset(items) if isinstance(items, ImageDataset) else items

        def joined(version: LoadedVersion, gallery: Gallery) -> Gallery:
            new = embedded(added, version.loaded.signatures["embed_each"])
            _check_dimensions(new, version.loaded)
            old = set(gallery.ids).intersection(new.ids) if replace else set()
            if len(old) == len(gallery):
                return new
            return (gallery.without(old) if old else gallery).joined(new)

        return self._change(joined)

    def remove(self, ids: Iterable[str]) -> Path:
        """Write a version without some items, and load it; as `add`.

        Raises:
            UserError: An id is not in the gallery, or none would be left; no version is written.
        """
        gone = [ids] if isinstance(ids, str) else list(ids)
        return self._change(lambda _, gallery: gallery.without(gone))

    def refresh(self) -> bool:
        """Load the newest version, if there is a newer one than that in memory.

        Returns:
            Whether there was.
        """
        folder = self._version.path.parent
        if max(version_numbers(folder), default=0) <= self._version.number:
            return False
        self._version = LoadedVersion.newest(folder)
        return True

    def _change(self, change: Callable[[LoadedVersion, Gallery], Gallery]) -> Path:
        if not self._version.path.name.isdecimal():
            raise UserError(f"{self._version.path} is no numbered version: it cannot be followed by another")
        folder = self._version.path.parent
        with locked(folder, "folder", wait=True):
            self.refresh()
            version = self._version
            card = version.card
            gallery = change(version, version.gallery())
            limits = card["exact_limit"], card["recall_wanted"]
            path = write_version(version.path, folder, gallery, *limits, like=version.index)
            self._version = LoadedVersion.read(path)
        return path


def _check_dimensions(gallery: Gallery, loaded: Any) -> None:
    wanted = loaded.signatures["serving_default"].structured_outputs["embedding"].shape[1]
    if gallery.embedding_dim != wanted:
        raise UserError(f"gallery embeddings have {gallery.embedding_dim} dimensions, the embedder gives {wanted}")


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
        card = _read_card(path)
        remedy = "copy the version again, or build it again"
        compare_files(path, card["files"], str(path / RETRIEVER_CARD), remedy)
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
            return self._answer("embed_images", images=images if images.ndim == 4 else images[None])["embedding"]
        several = [images] if isinstance(images, (bytes, str, os.PathLike)) else images
        encoded = tf.constant([_bytes(image) for image in several], tf.string)
        return self._answer("serving_default", image_bytes=encoded)["embedding"]

    def search(self, queries: Queries, k: int, expand: int = 0, alpha: float = 3.0) -> SearchResult:
        """See `Retriever.search`."""
        if isinstance(queries, np.ndarray) and queries.dtype != np.uint8:
            vectors = _checked(queries, self.card["embedding_dim"])
        else:
            vectors = self.embed(queries)
        if expand:
            vectors = self._expanded(vectors, expand, alpha)
        return self._nearest(vectors, k)

    def _expanded(self, vectors: np.ndarray, count: int, alpha: float) -> np.ndarray:
        """(B, d) queries, moved by their nearest items."""
        if self.index is not None:
            raise UserError(f"expand={count}: an index does not give its vectors one by one; make expand 0")
        try:
            alpha = number("alpha", alpha, at_least=0)
        except ValueError as error:
            raise UserError(str(error)) from error
        vectors = unit_rows(vectors)
        found = self._nearest(vectors, count)
        near = tf.gather(self.loaded.table["embeddings"], found.indices).numpy()
        return summed(vectors, near, weights_of(found.similarities, alpha))

    def _nearest(self, vectors: np.ndarray, k: int) -> SearchResult:
        if not isinstance(k, (int, np.integer)) or not 1 <= k <= MAX_NEIGHBOURS:
            raise UserError(f"k={k}: must be a number from 1 to {MAX_NEIGHBOURS}")
        k = min(int(k), self.card["items"])
        if self.index is None:
            found = self._answer("search_embedding", embedding=vectors, k=np.int32(k))
        else:
            effort = self.card["index"]["cells_searched"]
            rows, squares = self.index.search(unit_rows(vectors), k=k, effort=effort, complete=True)
            columns = {name: column[rows] for name, column in self.columns.items()}
            found = {"indices": rows, "distances": np.sqrt(squares), "similarities": 1 - squares / 2, **columns}
        return SearchResult(**{**found, **{name: _decoded(found[name]) for name in ("ids", "metadata")}})

    def _answer(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        try:
            answer = self.loaded.signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            raise UserError(short_message(error, "last")) from error
        return {name: value.numpy() for name, value in answer.items()}


def newest_version(path: Path) -> Path:
    """Return the path of a version: itself, or the newest below it."""
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
        return read_bytes(Path(image))
    except (OSError, TypeError) as error:
        raise UserError(f"{image} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _decoded(texts: np.ndarray) -> np.ndarray:
    return np.array([text.decode() for text in texts.ravel()], object).reshape(texts.shape)


def write_version(
    source: Path, folder: Path, gallery: Gallery, exact_limit: int, recall: float, like: GalleryIndex | None = None
) -> Path:
    """Write a gallery as the next version.

    Args:
        source: A retriever's SavedModel, with or without a gallery, and its cards.
        folder: Where versions lie.
        gallery: The items.
        exact_limit: Galleries of more items are searched by an index.
        recall: Recall@10 that the index is to reach, as a fraction.
        like: An index of nearly the same items, whose cells are taken over, which saves their search.

    Returns:
        The path of the version.
    """
    index = None if len(gallery) <= exact_limit else _index(gallery.embeddings, like)
    card = {
        "kind": "exact" if index is None else "indexed",
        "items": len(gallery),
        "classes": len(np.unique(gallery.labels[gallery.labels != NO_LABEL])),
        "embedding_dim": gallery.embedding_dim,
        "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
        "signatures": [*SIGNATURES, *(SEARCHES if index is None else ())],
        "max_neighbours": MAX_NEIGHBOURS,
        "max_results": MAX_RESULTS,
        "exact_limit": exact_limit,
        "recall_wanted": recall,
        "index": None if index is None else _index_card(index, gallery.embeddings, recall),
    }
    with new_version(folder) as version:
        copy_with_gallery(source, version.folder, gallery, in_graph=index is None)
        files = model_files(version.folder)
        if index is not None:
            index.save(version.folder / INDEX)
            files.append(version.folder / INDEX)
        write_warm_up(version.folder, _WARM_UP_SIDE, () if index is not None else _searches(gallery))
        write_json(version.folder / RETRIEVER_CARD, {**card, "files": describe_files(version.folder, files)["files"]})
        if (source / CARD).is_file():
            shutil.copyfile(source / CARD, version.folder / CARD)
    return version.path


def _searches(gallery: Gallery) -> Iterator[bytes]:
    """Warm-up requests of the search signatures."""
    grey = tf.io.encode_jpeg(tf.fill((_WARM_UP_SIDE, _WARM_UP_SIDE, 3), tf.constant(127, tf.uint8))).numpy()
    for size in _WARM_UP_SIZES:
        k = np.full(size, 10, np.int32)
        yield prediction_log("search_bytes", image_bytes=[grey] * size, k=k)
        yield prediction_log("search_embedding", embedding=gallery.embeddings[:1].repeat(size, axis=0), k=k)
        yield prediction_log("search_each", image_bytes=[grey] * size, k=k)


def _read_card(path: Path) -> dict[str, Any]:
    """Return the card of a retriever's version.

    Raises:
        UserError: It has none, or not one of ours.
    """
    file = path / RETRIEVER_CARD
    if not file.exists():
        raise UserError(f"there is no retriever at {path}: it has no {RETRIEVER_CARD}")
    card = read_json(file)
    if card.get("kind") not in ("exact", "indexed"):
        raise UserError(f"{file} is not of a retriever")
    fields(card, _CARD, str(file))
    if card["kind"] == "indexed":
        cells = fields(card["index"], {"cells_searched": int}, f"{file}: index")["cells_searched"]
        if cells < 1:
            raise UserError(f"{file} is damaged: its index searches {cells} cells")
    return card


def _index(embeddings: np.ndarray, like: GalleryIndex | None) -> GalleryIndex:
    count = len(embeddings)
    if like is not None and count / 2 <= len(like) <= 2 * count:
        return build_index(embeddings, distance="sqeuclidean", centres=like.centres())
    cells = max(1, min(int(4 * count**0.5), count // _SMALLEST_CELL))
    return build_index(embeddings, distance="sqeuclidean", lists=cells)


def _index_card(index: GalleryIndex, embeddings: np.ndarray, recall: float) -> dict[str, Any]:
    """How many cells are to be searched for the wanted recall, and what it is then."""
    found = least_effort(index, embeddings, recall, k=_NEIGHBOURS, sample=_QUERIES)
    return {
        "type": "IVFFlat, L2",
        "cells": index.lists,
        "cells_searched": found.effort,
        f"recall@{_NEIGHBOURS}": found.recall,
        "measured_on": f"{found.queries} items of the gallery, each left out of its own neighbours",
    }


def prune(folder: str | os.PathLike, keep: int = 2) -> list[int]:
    """Delete all but the newest versions; a process that has loaded one keeps it.

    Args:
        folder: Where versions lie.
        keep: How many stay; servers may be loading the newest, and serve the one before meanwhile.

    Returns:
        The numbers of those that are gone.

    Raises:
        UserError: None would stay.

    Example:
        >>> prune("models/cars_retriever", keep=3)
        [1, 2, 3]
    """
    if keep < 1:
        raise UserError(f"keep={keep}: at least the newest version stays")
    folder = Path(folder)
    with locked(folder, "folder", wait=True):
        gone = version_numbers(folder)[:-keep]
        for number in gone:
            # Away from its number in one step: nobody may read half a version.
            hidden = partial_folder(folder)
            os.rename(folder / str(number), Path(hidden) / str(number))
            shutil.rmtree(hidden, ignore_errors=True)
    return gone
