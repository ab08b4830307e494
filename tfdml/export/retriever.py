"""A retriever: an exported embedder with a gallery that it searches, as numbered versions."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import row_numbers
from tfdml.embeddings.backends import EmbeddingBackend, SavedModelEmbedder, embed_readable
from tfdml.embeddings.files import ImageTable, check_same_model, class_of_each
from tfdml.embeddings.model_card import CARD, card_of, describe_files, fingerprint, served_version
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.evaluation import Calibration, calibrate
from tfdml.evaluation.calibration import (
    choose_calibration,
    images_of_drawn_classes,
    stored_calibration,
)
from tfdml.evaluation.classification import warn_of_indistinct
from tfdml.export import saved_model
from tfdml.export.retriever_graph import MAX_RESULTS, SEARCHES, write_graph
from tfdml.export.saved_model import SIGNATURES
from tfdml.io.files import Kinds, compare_files, printable, read_bytes, read_json, write_json
from tfdml.models import AnyEmbedder
from tfdml.names import CLASS_OR_NONE, ID, clean, warn
from tfdml.retrieval.addresses import RETRIEVER_CARD
from tfdml.retrieval.exact import check_embeddings, unit_rows
from tfdml.retrieval.galleries import About, Condition, Gallery, MemoryGallery, Neighbors, Rows
from tfdml.retrieval.identities import Identities, check_rule

_CARD: Kinds = {
    "items": int,
    "classes": int,
    "per_class": str,
    "model": str,
    "embedding_dim": int,
    "files": dict,
}
_BATCH_SIZE = 32
# Of a gallery's images, so many search it for its threshold.
_MOST_QUERIES = 10_000

Image = bytes | str | os.PathLike


@dataclasses.dataclass(frozen=True)
class RetrieverItems:
    """The items of a gallery, embedded.

    Args:
        embeddings: (N, d), finite, no row zero; brought to length 1 here.
        ids: N names, each once.
        classes: N names of classes, empty for none.
        metadata: What a search returns with each of the N: mappings that JSON can hold.
        model: The fingerprint of the model that embedded them; empty where it is not known.

    Raises:
        UserError: There is no item, an id is empty or occurs twice, an embedding has no direction,
            or they differ in number.

    Example:
        >>> gallery = RetrieverItems(np.eye(2), ("a", "b"), ("", "bus"), ({}, {"price": 3}))
        >>> gallery.take([1]).ids
        ('b',)
    """

    embeddings: np.ndarray
    ids: Sequence[str]
    classes: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    model: str = ""

    def __post_init__(self):
        if not len(self.ids):
            raise UserError("the gallery is empty: a retriever needs at least one item")
        object.__setattr__(self, "ids", tuple(clean(self.ids, ID, "gallery ids")))
        classes = clean(self.classes, CLASS_OR_NONE, "gallery classes")
        object.__setattr__(self, "classes", classes)
        embeddings = check_embeddings(self.embeddings, "gallery embeddings")
        sizes = [len(column) for column in (embeddings, self.ids, self.classes, self.metadata)]
        if len(set(sizes)) > 1:
            raise UserError(
                f"{', '.join(map(str, sizes))} embeddings, ids, classes and metadata: give as many "
                "of each"
            )
        if len(zero := np.flatnonzero(~embeddings.any(axis=1))):
            raise UserError(f"gallery item {self.ids[zero[0]]}: its embedding has length 0")
        counts = collections.Counter(self.ids)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UserError(
                f"{counted(len(twice), 'id', 'occur')} twice, the first is {twice[0]!r}: rename or "
                "remove it"
            )
        object.__setattr__(self, "embeddings", unit_rows(embeddings))

    @classmethod
    def of_images(
        cls,
        backend: EmbeddingBackend,
        dataset: ImageDataset,
        directory: str | os.PathLike = "",
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
    ) -> RetrieverItems:
        """Return the images of a data set, embedded batch by batch.

        Args:
            backend: What embeds.
            dataset: The images. The ids are their names; the metadata are `path` and, of those that
                have one, `class`.
            directory: Where the data set lies: names of files below it are relative to it.
            skip_bad: Leave out images that cannot be read or decoded.
            report: Called with a line on every bad image, up to ten.

        Raises:
            UserError: An image cannot be read or decoded, and is not to be skipped; or none is
                left.
        """
        rows, vectors, faults = embed_readable(backend, dataset, _BATCH_SIZE)
        for fault in faults[:10]:
            report(f"bad image {fault}")
        if faults and not (skip_bad and len(rows)):
            count = f"{len(faults)} of {len(dataset)} gallery images cannot be embedded"
            raise UserError(f"{count}, the first is {faults[0]}")
        table = ImageTable.of([dataset.take(rows)], directory)
        # An image in no class folder is a class of its own.
        classes = []
        metadata = []
        titles = class_of_each(table.labels, table.class_names)
        for name, title in zip(table.names, titles, strict=True):
            has_class = title != name
            classes.append(title if has_class else "")
            metadata.append({"path": name, "class": title} if has_class else {"path": name})
        card = card_of(backend.path)
        model = read_json(card).get("fingerprint", "") if card else ""
        return cls(vectors, table.names, classes, metadata, model)

    @classmethod
    def joined(cls, parts: Sequence[RetrieverItems], dimension: int, model: str) -> RetrieverItems:
        """Return the items of several galleries.

        Args:
            parts: The galleries.
            dimension: d, that of the embedder.
            model: The fingerprint of the embedder.

        Raises:
            UserError: A gallery is of another dimension or model.
        """
        ids: list[str] = []
        classes: list[str] = []
        metadata: list[Mapping[str, Any]] = []
        vectors = [np.zeros((0, dimension), np.float32)]
        for part in parts:
            check_same_model(part.model, model, "the gallery and the embedder")
            own = part.embeddings.shape[1]
            if own != dimension:
                raise UserError(
                    f"gallery embeddings have {own} dimensions, the embedder {dimension}"
                )
            ids += part.ids
            classes += part.classes
            metadata += part.metadata
            vectors.append(part.embeddings)
        return cls(np.concatenate(vectors), ids, classes, metadata)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int] | np.ndarray) -> RetrieverItems:
        """Return some of the items, in this order."""
        rows = row_numbers(rows)
        ids = [self.ids[row] for row in rows]
        classes = [self.classes[row] for row in rows]
        metadata = [self.metadata[row] for row in rows]
        return RetrieverItems(self.embeddings[rows], ids, classes, metadata, self.model)

    def of_classes(self) -> RetrieverItems:
        """Return the items that have a class; how many have none is logged.

        Raises:
            UserError: No item has one.
        """
        rows = np.flatnonzero(np.array(self.classes, object) != "")
        if not len(rows):
            raise UserError("no item has a class: build it by per_class=nearest")
        if len(rows) < len(self):
            warn(f"leaves out {counted(len(self) - len(rows), 'item')} without a class")
        return self.take(rows)

    def table(self, per_class: str = "nearest") -> dict[str, Any]:
        """Return what a retriever's graph holds, see `Table`.

        Args:
            per_class: What stands for a class. But for `nearest`, every item must have a class.

        Raises:
            UserError: JSON cannot hold the metadata.
        """
        if per_class != "nearest":
            return self._table_of_classes(per_class)
        names, numbers = np.unique(np.asarray(self.classes, str), return_inverse=True)
        labels = numbers - (names[0] == "")
        return {
            "embeddings": self.embeddings,
            "ids": list(self.ids),
            "labels": labels,
            "classes": list(self.classes),
            "metadata": _as_json(self.metadata),
        }

    def _table_of_classes(self, per_class: str) -> dict[str, Any]:
        names, numbers = np.unique(np.array(self.classes, object), return_inverse=True)
        identities = Identities(self.embeddings, numbers, per_class)
        vectors = identities.references
        squares = np.square(vectors, dtype=np.float64).sum(axis=1)
        classes = names.tolist()
        labels = np.arange(len(classes))
        metadata = _as_json([{"class": name} for name in classes])
        columns = {"ids": classes, "labels": labels, "classes": classes, "metadata": metadata}
        return {
            **columns,
            "embeddings": vectors,
            "entries": np.int32(identities.reference_classes),
            "half_squares": np.float32(squares / 2),
            "most_vectors": np.int64(identities.most),
        }


def load_exported(embedder: str | os.PathLike) -> SavedModelEmbedder:
    """Return an exported embedder, or that of a retriever, loaded.

    Args:
        embedder: The path of an exported version.

    Raises:
        UserError: The embedder cannot be loaded or has other signatures.
    """
    backend = SavedModelEmbedder(embedder)
    missing = [name for name in SIGNATURES if name not in backend.loaded.signatures]
    if missing:
        raise UserError(
            f"{embedder} is not an export of tfdml export: it has no signature {missing[0]}"
        )
    return backend


@dataclasses.dataclass(frozen=True)
class _Source:
    """What embeds the items of a retriever.

    Args:
        backend: An exported embedder, loaded.
        card: Its model card; empty where it has none.
        model: Its fingerprint; empty where it is not known.
    """

    backend: SavedModelEmbedder
    card: Mapping[str, Any]
    model: str

    @classmethod
    def of(cls, embedder: AnyEmbedder | str | os.PathLike, scratch: Path) -> _Source:
        """Load an exported version, or export a Keras embedder to an empty folder first."""
        path = scratch
        model = ""
        if isinstance(embedder, AnyEmbedder):
            model = fingerprint(embedder)
            saved_model.write_saved_model(saved_model.in_float32(embedder), path)
        else:
            path = newest_version(Path(embedder))
        card = read_json(path / CARD) if (path / CARD).is_file() else {}
        return cls(load_exported(path), card, model or card.get("fingerprint", ""))

    def embed_all(
        self,
        parts: Iterable[ImageDataset | RetrieverItems],
        directory: str | os.PathLike,
        skip_bad: bool,
        report: Callable[[str], None],
    ) -> RetrieverItems:
        """Return the items of all parts, see `Retriever.build`."""
        galleries = []
        for part in parts:
            if isinstance(part, ImageDataset):
                part = RetrieverItems.of_images(self.backend, part, directory, skip_bad, report)
            galleries.append(part)
        signature = self.backend.loaded.signatures["embed_each"]
        dimension = signature.structured_outputs["embedding"].shape[1]
        return RetrieverItems.joined(galleries, dimension, self.model)


class Retriever(Gallery):
    """Finds the items of a gallery that are nearest to images or embeddings: a `Gallery` that
    embeds images itself.

    It answers from memory: versions may be written and deleted beneath it. Any number of threads
    may call it.

    Make one with `Retriever.build` or `Retriever.load`. Another gallery is another version:

    Example:
        >>> retriever = Retriever.load("models/retriever")
        >>> retriever.search(["photos/coupe/2.jpg"], k=3).ids
        array([['coupe/2.jpg', ...]], dtype=object)
        >>> gallery = retriever.gallery().take(range(1, len(retriever)))
        >>> len(retriever) - len(Retriever.build(retriever.path, gallery, "models/retriever"))
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
        self.path = path
        self.address = printable(path)
        file = path / RETRIEVER_CARD
        remedy = "copy the version again, or build it again"
        self.card = read_json(file, _CARD, remedy)
        compare_files(path, self.card["files"], str(file), remedy)
        check_rule(self.card["per_class"])
        calibration = stored_calibration(self.card, file)
        self.calibration = calibration and calibration.for_searches(
            "euclidean", len(self), self.card["per_class"]
        )
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(
            Exception, f"{path} cannot be loaded as a retriever: {ERROR_TEXT}", keep="last"
        ):
            # Kept, as its signatures live no longer than it.
            self._loaded = tf.saved_model.load(str(path))

    @classmethod
    def build(
        cls,
        embedder: AnyEmbedder | str | os.PathLike,
        items: ImageDataset | RetrieverItems | Iterable[ImageDataset | RetrieverItems],
        folder: str | os.PathLike,
        *,
        directory: str | os.PathLike = "",
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
        calibration: Calibration | str = "auto",
        per_class: str = "nearest",
    ) -> Retriever:
        """Embed a gallery, write it as the next version of a retriever, and load that.

        Args:
            embedder: What embeds: an exported version, a retriever, a folder of versions, or a
                Keras embedder, which is exported first.
            items: The gallery: images of a data set, items that are embedded already, or several of
                these.
            folder: Where versions lie; earlier versions stay.
            directory: Where the data set lies: ids of files below it are relative to it.
            skip_bad: Leave out images that cannot be read or decoded, instead of refusing the
                gallery.
            report: Called with a line on every bad image, up to ten.
            calibration: The threshold of `accepted`. `fpir=0.01`: at most this share of the queries
                of unknown classes is accepted, as the gallery's images show that search it without
                their class; classes on which the embedder was trained, by its model card, are not
                asked for. `auto`: fpir=0.01, where they can show it. `none`. A `Calibration` with
                `fpir`, or a JSON file of `tfdml evaluate` that has one.
            per_class: What stands for a class, see `tfdml.retrieval.Identities`. By `mean` and
                `max_of_means` the retriever holds the means, and finds classes. Items without a
                class are then left out, and counted.

        Raises:
            UserError: An item is bad or occurs twice, there is none, the folder cannot be written,
                or the threshold cannot be measured or is of another rule.
        """
        check_rule(per_class)
        with tempfile.TemporaryDirectory() as scratch:
            source = _Source.of(embedder, Path(scratch))
            parts = [items] if isinstance(items, ImageDataset | RetrieverItems) else items
            gallery = source.embed_all(parts, directory, skip_bad, report)
            if per_class != "nearest":
                gallery = gallery.of_classes()
            _warn_of_indistinct_items(gallery)
            threshold = _calibration(calibration, gallery, source.card, report, per_class)
            if threshold is not None:
                threshold.check_models(source.model, source.model)
                model = threshold.basis.model or source.model
                threshold = threshold.measured_on(model=model)
            path = _write(folder, source, gallery, per_class, threshold)
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
        """Return the number of items, or of classes where those are found."""
        return self.card["items" if self._finds_items else "classes"]

    def __repr__(self) -> str:
        entries = "items" if self._finds_items else f"classes by {self.card['per_class']}"
        return f"Retriever({str(self.path)!r}: {len(self):,} {entries}, {self.about.dimension}-d)"

    @property
    def about(self) -> About:
        """See `Gallery.about`."""
        card = self.card
        return About("euclidean", card["embedding_dim"], card["model"], per_class=card["per_class"])

    @property
    def _finds_items(self) -> bool:
        return self.card["per_class"] == "nearest"

    def gallery(self) -> RetrieverItems:
        """Return the items.

        Raises:
            UserError: It holds classes.
        """
        self.check_holds_rows()
        table = self._loaded.table
        vectors = table["embeddings"].numpy()
        metadata = list(map(json.loads, _texts(table["metadata"])))
        names = _texts(table["ids"]), _texts(table["classes"])
        return RetrieverItems(vectors, *names, metadata, self.card["model"])

    def identities(self, per_class: str, groups: str = "") -> Gallery:
        """Return this retriever, whose rule was chosen when it was built.

        Args:
            per_class: As `Gallery.identities`.
            groups: As `Gallery.identities`.

        Raises:
            UserError: It was built by another rule, or there are groups.
        """
        check_rule(per_class, groups or None)
        own = self.card["per_class"]
        if per_class != own:
            raise UserError(
                f"{self.address} was built by per_class={own}: build another, or leave it",
                per_class=per_class,
            )
        return super().identities(per_class, groups)

    def class_counts(self) -> dict[str, int]:
        """See `Gallery.class_counts`."""
        return self._in_memory().class_counts()

    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """See `Gallery.rows`; the columns are `path`, where the metadata have one, and `class`."""
        return self._in_memory().rows(most, ids)

    def _rows_of_classes(self, classes: list[str]) -> Rows:
        return self._in_memory()._rows_of_classes(classes)

    def _in_memory(self) -> MemoryGallery:
        if not self._finds_items:
            table = self._loaded.table
            names = np.array(_texts(table["classes"]), object)
            classes = names[table["entries"].numpy()].tolist()
            vectors = table["embeddings"].numpy()
            return MemoryGallery(
                self.address, Rows(classes, vectors, {"class": classes}), self.about
            )
        items = self.gallery()
        paths = [str(values.get("path", "")) for values in items.metadata]
        metadata = [json.dumps(values, sort_keys=True) for values in items.metadata]
        columns = {"path": paths, "class": list(items.classes), "metadata": metadata}
        rows = Rows(list(items.ids), items.embeddings, columns)
        return MemoryGallery(self.address, rows, self.about)

    def embed(self, images: Image | Sequence[Image]) -> np.ndarray:
        """(B, d) embeddings of images: encoded bytes, or paths of files.

        Raises:
            UserError: One of them cannot be decoded; it is named.
        """
        several = [images] if isinstance(images, Image) else images
        answer = self._answer(
            "embed_each", image_bytes=tf.constant(list(map(_bytes, several)), tf.string)
        )
        for row, error in enumerate(answer["error"]):
            if error:
                image = several[row]
                place = f"image {row}" if isinstance(image, bytes) else os.fspath(image)
                raise UserError(f"{place} cannot be embedded: {error}")
        return answer["embedding"]

    def search(
        self,
        queries: np.ndarray | Image | Sequence[Image],
        k: int = 10,
        where: Mapping[str, str] | None = None,
        *,
        model: str = "",
        exact: bool = True,
    ) -> Neighbors:
        """Return the k nearest items of every query.

        Args:
            queries: (B, d) or (d,) floats, embeddings of any length but 0; or images: encoded bytes
                or paths of files.
            k: How many neighbors.
            where: As `Gallery.search`, of `id`, `path` and `class`.
            model: As `Gallery.search`; images are of its own.
            exact: As `Gallery.search`: it always is.

        Returns:
            The neighbors of B queries, 1 for a single one: items, or classes by another rule than
            `nearest`. The columns are `class`; of items `metadata`, in JSON; and, where there is a
            threshold, `accepted`, whether a neighbor is within it.

        Raises:
            UserError: A query is bad; it is named.
        """
        vectors: Any = queries
        if isinstance(queries, np.ndarray):
            vectors = np.atleast_2d(queries)
        else:
            vectors = self.embed(queries)
            model = self.card["model"]
        return super().search(vectors, k, where, model=model, exact=exact)

    def _search(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        distance: str,
    ) -> Neighbors:
        names = ("class", "metadata") if self._finds_items else ("class",)
        if conditions:
            found = self._in_memory()._search(unit_rows(queries), k, conditions, exact, distance)
            columns = {name: found.columns[name] for name in names}
            if self.calibration is not None:
                columns["accepted"] = found.distances <= np.float32(self.calibration.threshold)
            return dataclasses.replace(found, columns=columns)
        most = min(k, len(self))
        blocks = np.split(queries, range(_BATCH_SIZE, len(queries), _BATCH_SIZE))
        parts = [self._answer("search_embedding", embedding=block, k=most) for block in blocks]
        answer = {name: _joined_arrays(name, parts) for name in parts[0]}
        columns = {"class": answer["classes"], "metadata": answer["metadata"]}
        columns = {name: columns[name] for name in names}
        if "accepted" in answer:
            columns["accepted"] = answer["accepted"]
        return Neighbors.padded(k, answer["ids"], answer["distances"], columns)

    def _answer(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        with user_errors(
            (tf.errors.InvalidArgumentError, TypeError, ValueError), ERROR_TEXT, keep="last"
        ):
            outputs = self._loaded.signatures[signature](
                **{name: tf.constant(value) for name, value in inputs.items()}
            )
        arrays = {name: value.numpy() for name, value in outputs.items()}
        decode = np.vectorize(bytes.decode, otypes=[object])
        return {
            name: decode(array) if array.dtype == object else array
            for name, array in arrays.items()
        }


def _texts(column: Any) -> list[str]:
    """Return the texts of a variable of the graph."""
    return [text.decode() for text in column.numpy()]


def _joined_arrays(name: str, parts: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    return np.concatenate([part[name] for part in parts])


def _as_json(metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds = (TypeError, ValueError, RecursionError)
    with user_errors(kinds, f"the gallery's metadata cannot be written as JSON: {ERROR_TEXT}"):
        return [
            json.dumps(dict(values), ensure_ascii=False, sort_keys=True, allow_nan=False)
            for values in metadata
        ]


def _bytes(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    with user_errors(OSError, f"{image} cannot be read: {ERROR_TEXT}"):
        return read_bytes(image)


def newest_version(path: Path) -> Path:
    """Return the path of a version: itself, or the newest below it."""
    version = served_version(path)
    if version is None:
        raise UserError(f"there is no exported version at {path}")
    return version


def _write(
    folder: str | os.PathLike,
    source: _Source,
    items: RetrieverItems,
    per_class: str,
    calibration: Calibration | None,
) -> Path:
    """Write the next version of a retriever, and return its path."""
    table = items.table(per_class)
    if calibration is not None:
        table["threshold"] = np.float32(calibration.threshold)
    common = {
        "signatures": [*SIGNATURES, *SEARCHES],
        "calibration": calibration and calibration.to_dict(),
    }
    num_classes = len({*items.classes} - {""})
    dimension = items.embeddings.shape[1]
    about = {
        "items": len(items),
        "classes": num_classes,
        "per_class": per_class,
        "model": source.model,
        "embedding_dim": dimension,
        "distance": _distance_of(per_class),
        "max_results": MAX_RESULTS,
    }
    with saved_model.new_version(folder) as (hidden, path):
        write_graph(source.backend.loaded, hidden, table)
        saved_model.write_warm_up(hidden, tf.saved_model.load(str(hidden)).signatures)
        files = describe_files(hidden, saved_model.model_files(hidden))
        write_json(hidden / RETRIEVER_CARD, {**about, **files, **common})
        if source.card:
            # For those who use a retriever as an embedder; the files that it lists are not here.
            write_json(hidden / CARD, {**source.card, "artifacts": {}, **common})
    return path


def _distance_of(per_class: str) -> str:
    """Return what a card says of distances."""
    if per_class == "nearest":
        return "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine"
    return "euclidean, of a vector of length 1 to means of vectors of length 1"


def _warn_of_indistinct_items(items: RetrieverItems) -> None:
    has_class = np.array([bool(name) for name in items.classes])
    classes = np.asarray(items.classes, str)[has_class]
    warn_of_indistinct(items.embeddings[has_class], classes, "euclidean")


def _calibration(
    option: Calibration | str,
    gallery: RetrieverItems,
    about: Mapping[str, Any],
    report: Callable[[str], None],
    per_class: str = "nearest",
) -> Calibration | None:
    """Return the threshold that the argument `calibration` of `Retriever.build` means."""
    names = np.array(gallery.classes)

    def measure(target: dict[str, Any]) -> Calibration:
        asked = (names != "") & ~np.isin(names, about.get("trained_on") or [])
        rows = np.flatnonzero(asked)
        rows = rows[images_of_drawn_classes(names[rows], _MOST_QUERIES)]
        sides: dict[str, Any] = {
            "gallery": gallery.embeddings,
            "gallery_labels": names,
            "own_rows": rows,
            "per_class": per_class,
        }
        return calibrate(gallery.embeddings[rows], names[rows], **sides, **target)

    if isinstance(option, str):
        calibration = choose_calibration(option, "fpir=0.01", measure, read_json, report)
    else:
        calibration = option
    return calibration and calibration.for_searches("euclidean", per_class=per_class)
