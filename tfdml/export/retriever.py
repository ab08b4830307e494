"""A retriever: an exported embedder with a gallery that it searches, as numbered versions; and galleries' items."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml import data
from tfdml.data.dataset import ImageDataset, access_fault
from tfdml.embeddings.model_card import CARD, describe_files, fingerprint, served_version
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import Calibration, calibrate
from tfdml.export import saved_model
from tfdml.export.exporter import choose_calibration
from tfdml.export.search_graph import MAX_RESULTS, SEARCHES, load_exported, write_graph
from tfdml.io.files import Kinds, compare_files, read_bytes, read_json, write_json
from tfdml.models import AnyEmbedder
from tfdml.retrieval.exact import check_embeddings, unit_rows

RETRIEVER_CARD = "retriever.json"
_CARD: Kinds = {"items": int, "classes": int, "model": str, "embedding_dim": int, "files": dict}
NO_LABEL = -1
_BATCH_SIZE = 32
# Of a gallery's images, so many search it for its threshold.
_MOST_QUERIES = 10_000

Image = bytes | str | os.PathLike


@dataclasses.dataclass(frozen=True)
class GalleryItem:
    """One item of a gallery: an encoded image, or its embedding.

    Args:
        id: Its name, which no other item of the gallery has.
        image: The bytes of a JPEG, PNG or WebP file.
        embedding: (d,), by the retriever's own embedder; in place of `image`.
        label: The number of its class; -1 for none.
        metadata: What a search returns with it: anything that JSON can hold. `class` is the name of its class.
        fault: Why its image cannot be read, in place of image and embedding.

    Raises:
        UserError: The id is empty or no text, or there is neither image nor embedding, or both.

    Example:
        >>> GalleryItem("car-17", image=jpeg, label=3, metadata={"class": "coupe"}).metadata
        {'class': 'coupe'}
    """

    id: str
    image: bytes | None = None
    embedding: np.ndarray | None = None
    label: int = NO_LABEL
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id:
            raise UserError(f"the id of a gallery item must be a text that is not empty; got {self.id!r}")
        if (self.image is not None) + (self.embedding is not None) + bool(self.fault) != 1:
            raise UserError(f"gallery item {self.id}: give its image or its embedding, one of the two")

    def metadata_text(self) -> str:
        """Return the metadata as JSON.

        Raises:
            UserError: JSON cannot hold it.
        """
        kinds = (TypeError, ValueError, RecursionError)
        with user_errors(kinds, f"gallery item {self.id}: its metadata cannot be written as JSON: {REASON}"):
            return json.dumps(dict(self.metadata), ensure_ascii=False, sort_keys=True, allow_nan=False)


@dataclasses.dataclass(frozen=True)
class Gallery:
    """The items of a gallery, embedded.

    Args:
        embeddings: (N, d), finite, no row zero; brought to length 1 here.
        ids: N names, each once.
        labels: (N,) numbers of classes, -1 for none. Classes go by name: all items of a class get the label of its
            first one, or the next free number if that is taken.
        metadata: N texts, JSON.

    Raises:
        UserError: There is no item, an id occurs twice, or an embedding has no direction.

    Example:
        >>> Gallery(np.eye(2), ("a", "b"), np.array([0, 1]), ("{}", '{"class": "bus"}')).classes
        ['0', 'bus']
    """

    embeddings: np.ndarray
    ids: tuple[str, ...]
    labels: np.ndarray
    metadata: tuple[str, ...]

    def __post_init__(self):
        if not len(self.ids):
            raise UserError("the gallery is empty: a retriever needs at least one item")
        embeddings = check_embeddings(self.embeddings, "gallery embeddings")
        if len(zero := np.flatnonzero(~embeddings.any(axis=1))):
            raise UserError(f"gallery item {self.ids[zero[0]]}: its embedding has length 0")
        if twice := [name for name, count in collections.Counter(self.ids).items() if count > 1]:
            raise UserError(f"{len(twice)} ids occur more than once, the first is {twice[0]}: remove or replace it")
        object.__setattr__(self, "embeddings", unit_rows(embeddings))
        names, numbers, used = self.classes, {"": NO_LABEL}, {NO_LABEL}
        free = itertools.count(int(max(self.labels)) + 1)
        for name, label in zip(names, self.labels.tolist(), strict=True):
            if name not in numbers:
                numbers[name] = next(free) if label in used else label
                used.add(numbers[name])
        object.__setattr__(self, "labels", np.array([numbers[name] for name in names], np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> list[str]:
        """The name of each item's class, from its metadata, or else its label; empty where it has none."""
        return [
            str(json.loads(text).get("class", "" if label == NO_LABEL else label))
            for label, text in zip(self.labels.tolist(), self.metadata, strict=True)
        ]

    def items(self) -> Iterator[GalleryItem]:
        """Yield the items, from which another gallery can be made."""
        for name, embedding, label, text in zip(self.ids, self.embeddings, self.labels, self.metadata, strict=True):
            yield GalleryItem(name, embedding=embedding, label=int(label), metadata=json.loads(text))


def items_of_folder(folder: str | os.PathLike) -> Iterator[GalleryItem]:
    """Every image below a folder, read when its turn comes; in place of one that cannot be read, why.

    Args:
        folder: A folder of class folders, or of images, as `load("folder", folder, "all")` reads it. The paths below
            it are the ids. Images of a folder without class folders have no class.

    Raises:
        UserError: There is no such folder, or it holds no image.

    Example:
        >>> [item.id for item in items_of_folder("photos")]
        ['bus/0.jpg', 'bus/1.jpg', 'bus/2.jpg', 'coupe/0.jpg', ...]
    """
    return items_of_dataset(data.load("folder", folder, "all"), folder)


def items_of_dataset(dataset: ImageDataset, directory: str | os.PathLike = "") -> Iterator[GalleryItem]:
    """Yield the images of a data set with their labels and class names; see `items_of_folder`.

    Args:
        dataset: The images.
        directory: Where the data set lies: ids of files below it are relative to it.
    """
    prefix = os.path.join(os.fspath(directory), "") if directory else ""
    for row, label in enumerate(dataset.labels.tolist()):
        name = dataset.images.name(row).removeprefix(prefix)
        title = dataset.class_names.get(label, str(label))
        # An image in no class folder is a class of its own.
        about = {"path": name} if title == name else {"path": name, "class": title}
        try:
            yield GalleryItem(
                name, dataset.images.encoded(row), label=label if "class" in about else -1, metadata=about
            )
        except (OSError, UserError, tf.errors.OpError) as error:
            yield GalleryItem(name, fault=access_fault(error))


def embed_items(
    items: Iterable[GalleryItem], embed_each: Any, skip_bad: bool = False, report: Callable[[str], None] = logging.info
) -> Gallery:
    """Return the items as a gallery, embedded batch by batch; images are released at once.

    Args:
        items: The items.
        embed_each: The embedder's signature `embed_each`.
        skip_bad: Leave out images that cannot be read or decoded.
        report: Called with a line on every bad image, up to ten.

    Raises:
        UserError: An image cannot be read or decoded, and is not to be skipped; or no item is left.
    """
    shape = (embed_each.structured_outputs["embedding"].shape[1],)
    rows: list[tuple[np.ndarray, str, int, str]] = []
    bad: list[str] = []
    items = iter(items)
    while batch := list(itertools.islice(items, _BATCH_SIZE)):
        images = [item.image for item in batch if item.image is not None]
        answer = embed_each(image_bytes=tf.constant(images, tf.string))
        answers = zip(answer["embedding"].numpy(), map(bytes.decode, answer["error"].numpy()), strict=True)
        for item in batch:
            answer_of_item = (item.embedding, item.fault) if item.image is None else next(answers)
            vector, error = np.asarray(answer_of_item[0]), answer_of_item[1]
            if error:
                bad.append(f"{item.id}: {error}")
            elif vector.shape != shape:
                raise UserError(f"gallery item {item.id}: its embedding has the shape {vector.shape}, not {shape}")
            else:
                rows.append((vector, item.id, item.label, item.metadata_text()))
    for line in bad[:10]:
        report(f"bad image {line}")
    if bad and (not skip_bad or not rows):
        raise UserError(
            f"{len(bad)} of {len(bad) + len(rows)} gallery images cannot be embedded, the first is {bad[0]}"
        )
    vectors, ids, labels, metadata = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Gallery(np.array(vectors), ids, np.array(labels, np.int64), metadata)


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found: row i holds the neighbors of query i, nearest first, equally near ones by gallery row.

    Args:
        indices: (B, m) int64 rows of the gallery, m = min(k, N).
        ids: (B, m) str objects.
        distances: (B, m) float32, Euclidean, between vectors of length 1.
        similarities: (B, m) float32 cosines.
        labels: (B, m) int64 numbers of classes, -1 for none.
        classes: (B, m) str objects, the names of classes, empty for none.
        metadata: (B, m) str objects, JSON.
        accepted: (B, m) bool, whether an item is within the threshold; None where there is none.
        known: (B,) bool, whether any is.
    """

    indices: np.ndarray
    ids: np.ndarray
    distances: np.ndarray
    similarities: np.ndarray
    labels: np.ndarray
    classes: np.ndarray
    metadata: np.ndarray
    accepted: np.ndarray | None = None
    known: np.ndarray | None = None


class Retriever:
    """Finds the items of a gallery that are nearest to images or embeddings.

    It answers from memory: versions may be written and deleted beneath it. Any number of threads may call it.

    Make one with `Retriever.build` or `Retriever.load`. Another gallery is another version:

    Example:
        >>> retriever = Retriever.load("models/cars_retriever")
        >>> retriever.search(["photos/coupe/2.jpg"], k=3).ids
        array([['coupe/2.jpg', ...]], dtype=object)
        >>> items = [*retriever.gallery().items(), GalleryItem("new", image=jpeg)]
        >>> len(Retriever.build(retriever.path, items, "models/cars_retriever")) - len(retriever)
        1

    Attributes:
        path: The version in memory.
        card: The version's card: items, classes, signatures, limits, files.
        calibration: The threshold that it was built with; None: there is none.

    Args:
        path: The path of a version.

    Raises:
        UserError: It cannot be read.
    """

    def __init__(self, path: Path):
        self.path, file, remedy = path, path / RETRIEVER_CARD, "copy the version again, or build it again"
        self.card = read_json(file, _CARD, remedy)
        compare_files(path, self.card["files"], str(file), remedy)
        calibration = self.card.get("calibration") and Calibration.from_dict(self.card["calibration"], file)
        self.calibration = calibration and calibration.for_searches("euclidean", len(self))
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(Exception, f"{path} cannot be loaded as a retriever: {REASON}", keep="last"):
            # Kept, as its signatures live no longer than it.
            self._loaded = tf.saved_model.load(str(path))

    @classmethod
    def build(
        cls,
        embedder: AnyEmbedder | str | os.PathLike,
        items: Iterable[GalleryItem] | ImageDataset,
        folder: str | os.PathLike,
        *,
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
        calibration: Calibration | str = "auto",
    ) -> Retriever:
        """Embed a gallery, write it as the next version of a retriever, and load that.

        Args:
            embedder: What embeds: an exported version, a retriever, a folder of versions, or a Keras embedder, which is
                exported first.
            items: The gallery: items, or the images of a data set.
            folder: Where versions lie; earlier versions stay.
            skip_bad: Leave out images that cannot be read or decoded, instead of refusing the gallery.
            report: Called with a line on every bad image, up to ten.
            calibration: The threshold of `accepted`. `fpir=0.01`: at most this share of the queries of unknown classes
                is accepted, as the gallery's images show that search it without their class; classes on which the
                embedder was trained, by its model card, are not asked for. `auto`: fpir=0.01, where they can show it.
                `none`. A `Calibration` with `fpir`, or a JSON file of `tfdml evaluate` that has one.

        Raises:
            UserError: An item is bad or occurs twice, there is none, the folder cannot be written, or the threshold
                cannot be measured.
        """
        with tempfile.TemporaryDirectory() as name:
            if isinstance(embedder, AnyEmbedder):
                exported, model = Path(name), fingerprint(embedder)
                saved_model.write_saved_model(saved_model.in_float32(embedder), exported)
            else:
                exported, model = newest_version(Path(embedder)), ""
            about = read_json(exported / CARD) if (exported / CARD).is_file() else {}
            loaded = load_exported(exported)
            items = items_of_dataset(items) if isinstance(items, ImageDataset) else items
            gallery = embed_items(items, loaded.signatures["embed_each"], skip_bad, report)
            threshold = _calibration(calibration, gallery, about, report)
            columns = {"embeddings": gallery.embeddings, "ids": gallery.ids, "labels": gallery.labels}
            columns |= {"classes": gallery.classes, "metadata": gallery.metadata}
            columns |= {} if threshold is None else {"threshold": np.float32(threshold.threshold)}
            with saved_model.new_version(folder) as (hidden, path):
                write_graph(loaded, hidden, columns)
                saved_model.write_warm_up(hidden, tf.saved_model.load(str(hidden)).signatures)
                common = {
                    "signatures": [*saved_model.SIGNATURES, *SEARCHES],
                    "calibration": threshold and threshold.to_dict(),
                }
                card = {
                    "items": len(gallery),
                    "classes": len({*gallery.classes} - {""}),
                    "model": model or about.get("fingerprint", ""),
                    "embedding_dim": gallery.embeddings.shape[1],
                    "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
                    "max_results": MAX_RESULTS,
                    **describe_files(hidden, saved_model.model_files(hidden)),
                }
                write_json(hidden / RETRIEVER_CARD, card | common)
                if about:
                    # For those who use a retriever as an embedder; the files that it lists are not here.
                    write_json(hidden / CARD, {**about, "artifacts": {}, **common})
        return cls(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Retriever:
        """Return a retriever into memory.

        Args:
            path: One version, or a folder of them, of which the newest is taken.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        return cls(newest_version(Path(path)))

    def __len__(self) -> int:
        return self.card["items"]

    def __repr__(self) -> str:
        return f"Retriever({str(self.path)!r}: {len(self):,} items, {self.card['embedding_dim']}-d)"

    def gallery(self) -> Gallery:
        """Return the items."""
        columns = {name: column.numpy() for name, column in self._loaded.table.items()}
        ids, metadata = (tuple(text.decode() for text in columns[name]) for name in ("ids", "metadata"))
        return Gallery(columns["embeddings"], ids, columns["labels"], metadata)

    def embed(self, images: Image | Sequence[Image]) -> np.ndarray:
        """(B, d) embeddings of images: encoded bytes, or paths of files.

        Raises:
            UserError: One of them cannot be decoded; it is named.
        """
        several = [images] if isinstance(images, Image) else images
        answer = self._answer("embed_each", image_bytes=tf.constant(list(map(_bytes, several)), tf.string))
        for row, error in enumerate(answer["error"]):
            if error:
                image = several[row]
                place = f"image {row}" if isinstance(image, bytes) else os.fspath(image)
                raise UserError(f"{place} cannot be embedded: {error}")
        return answer["embedding"]

    def search(self, queries: np.ndarray | Image | Sequence[Image], k: int) -> SearchResult:
        """Return the k nearest items of every query; the whole gallery where k is more than it holds.

        Args:
            queries: (B, d) or (d,) floats, embeddings of any length but 0; or images: encoded bytes or paths of files.
            k: How many neighbors.

        Returns:
            (B, min(k, N)) neighbors; B is 1 for a single query.

        Raises:
            UserError: A query is bad; it is named.
        """
        vectors = np.atleast_2d(queries) if isinstance(queries, np.ndarray) else self.embed(queries)
        shape = (len(vectors), self.card["embedding_dim"])
        if vectors.dtype.kind not in "fiu" or vectors.shape != shape:
            raise UserError(f"queries must be real numbers of shape {shape}; got {vectors.dtype} {vectors.shape}")
        blocks = np.split(vectors.astype(np.float32), range(_BATCH_SIZE, len(vectors), _BATCH_SIZE))
        parts = [self._answer("search_embedding", embedding=block, k=k) for block in blocks]
        return SearchResult(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _answer(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        with user_errors((tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"):
            outputs = self._loaded.signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
        arrays = {name: value.numpy() for name, value in outputs.items()}
        decode = np.vectorize(bytes.decode, otypes=[object])
        return {name: decode(array) if array.dtype == object else array for name, array in arrays.items()}


def _bytes(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    with user_errors(OSError, f"{image} cannot be read: {REASON}"):
        return read_bytes(image)


def newest_version(path: Path) -> Path:
    """Return the path of a version: itself, or the newest below it."""
    version = served_version(path)
    if version is None:
        raise UserError(f"there is no exported version at {path}")
    return version


def _calibration(
    option: Calibration | str, gallery: Gallery, about: Mapping[str, Any], report: Callable[[str], None]
) -> Calibration | None:
    """Return the threshold that the argument `calibration` of `Retriever.build` means."""
    names = np.array(gallery.classes)

    def measure(target: dict[str, Any]) -> Calibration:
        asked = (names != "") & ~np.isin(names, about.get("trained_on") or [])
        classes, counts = np.unique(names[asked], return_counts=True)
        # Whole classes, drawn at random.
        drawn = np.random.default_rng(0).permutation(len(classes))
        drawn = drawn[: 1 + np.searchsorted(np.cumsum(counts[drawn]), _MOST_QUERIES)]
        rows = np.flatnonzero(asked & np.isin(names, classes[drawn]))
        sides: dict[str, Any] = {"gallery": gallery.embeddings, "gallery_labels": names, "own_rows": rows}
        return calibrate(gallery.embeddings[rows], names[rows], **sides, **target)

    calibration = choose_calibration(option, "fpir=0.01", measure, report) if isinstance(option, str) else option
    return calibration and calibration.for_searches("euclidean")
