"""A retriever: an exported embedder with a gallery that it searches, as numbered versions."""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import Calibration, calibrate
from tfdml.evaluation.calibration import (
    choose_calibration,
    images_of_drawn_classes,
    stored_calibration,
)
from tfdml.evaluation.classification import warn_of_indistinct
from tfdml.export import saved_model
from tfdml.export.saved_model import SIGNATURES, quiet, refuse
from tfdml.io.files import Kinds, compare_files, printable, read_bytes, read_json, write_json
from tfdml.models import AnyEmbedder
from tfdml.names import CLASS_OR_NONE, ID, clean
from tfdml.retrieval.addresses import RETRIEVER_CARD
from tfdml.retrieval.exact import check_embeddings, unit_rows
from tfdml.retrieval.galleries import About, Condition, Gallery, MemoryGallery, Neighbors, Rows

_CARD: Kinds = {"items": int, "classes": int, "model": str, "embedding_dim": int, "files": dict}
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
                f"{len(twice)} ids occur twice, the first is {twice[0]!r}: rename or remove it"
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
        titles = class_of_each(table.labels, table.class_names)
        classes = [
            "" if title == name else title for title, name in zip(titles, table.names, strict=True)
        ]
        metadata = [
            {"path": name} | ({"class": of} if of else {})
            for name, of in zip(table.names, classes, strict=True)
        ]
        card = card_of(backend.path)
        return cls(
            vectors,
            table.names,
            classes,
            metadata,
            read_json(card).get("fingerprint", "") if card else "",
        )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int] | np.ndarray) -> RetrieverItems:
        """Return some of the items, in this order."""
        rows = row_numbers(rows)
        columns: Any = {
            name: [getattr(self, name)[row] for row in rows]
            for name in ("ids", "classes", "metadata")
        }
        return dataclasses.replace(self, embeddings=self.embeddings[rows], **columns)

    def columns(self) -> dict[str, Any]:
        """Return what a retriever's graph holds of the items: `labels` are the numbers of classes,
        -1 for none.

        Raises:
            UserError: JSON cannot hold the metadata.
        """
        kinds = (TypeError, ValueError, RecursionError)
        with user_errors(kinds, f"the gallery's metadata cannot be written as JSON: {REASON}"):
            texts = [
                json.dumps(dict(of), ensure_ascii=False, sort_keys=True, allow_nan=False)
                for of in self.metadata
            ]
        names, labels = np.unique(np.asarray(self.classes, str), return_inverse=True)
        columns = {
            "embeddings": self.embeddings,
            "ids": list(self.ids),
            "labels": labels - (names[0] == ""),
        }
        return columns | {"classes": list(self.classes), "metadata": texts}


class Retriever(Gallery):
    """Finds the items of a gallery that are nearest to images or embeddings: a `Gallery` that
    embeds images itself.

    It answers from memory: versions may be written and deleted beneath it. Any number of threads
    may call it.

    Make one with `Retriever.build` or `Retriever.load`. Another gallery is another version:

    Example:
        >>> retriever = Retriever.load("models/cars_retriever")
        >>> retriever.search(["photos/coupe/2.jpg"], k=3).ids
        array([['coupe/2.jpg', ...]], dtype=object)
        >>> gallery = retriever.gallery().take(range(1, len(retriever)))
        >>> len(retriever) - len(Retriever.build(retriever.path, gallery, "models/cars_retriever"))
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
        calibration = stored_calibration(self.card, file)
        self.calibration = calibration and calibration.for_searches("euclidean", len(self))
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(
            Exception, f"{path} cannot be loaded as a retriever: {REASON}", keep="last"
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

        Raises:
            UserError: An item is bad or occurs twice, there is none, the folder cannot be written,
                or the threshold cannot be measured.
        """
        with tempfile.TemporaryDirectory() as name:
            if isinstance(embedder, AnyEmbedder):
                exported, model = Path(name), fingerprint(embedder)
                saved_model.write_saved_model(saved_model.in_float32(embedder), exported)
            else:
                exported, model = newest_version(Path(embedder)), ""
            about = read_json(exported / CARD) if (exported / CARD).is_file() else {}
            model = model or about.get("fingerprint", "")
            backend = load_exported(exported)
            parts = [items] if isinstance(items, ImageDataset | RetrieverItems) else items
            galleries = [
                part
                if isinstance(part, RetrieverItems)
                else RetrieverItems.of_images(backend, part, directory, skip_bad, report)
                for part in parts
            ]
            gallery = joined(
                galleries,
                backend.loaded.signatures["embed_each"].structured_outputs["embedding"].shape[1],
                model,
            )
            named = np.array([bool(name) for name in gallery.classes])
            classes = np.asarray(gallery.classes, str)[named]
            warn_of_indistinct(gallery.embeddings[named], classes, "euclidean")
            threshold = _calibration(calibration, gallery, about, report)
            if threshold is not None and not threshold.basis.model:
                threshold = threshold.measured_on(model=model)
            columns = gallery.columns()
            columns |= {} if threshold is None else {"threshold": np.float32(threshold.threshold)}
            with saved_model.new_version(folder) as (hidden, path):
                write_graph(backend.loaded, hidden, columns)
                saved_model.write_warm_up(hidden, tf.saved_model.load(str(hidden)).signatures)
                common = {
                    "signatures": [*saved_model.SIGNATURES, *SEARCHES],
                    "calibration": threshold and threshold.to_dict(),
                }
                card = {
                    "items": len(gallery),
                    "classes": len({*gallery.classes} - {""}),
                    "model": model,
                    "embedding_dim": gallery.embeddings.shape[1],
                    "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
                    "max_results": MAX_RESULTS,
                    **describe_files(hidden, saved_model.model_files(hidden)),
                }
                write_json(hidden / RETRIEVER_CARD, card | common)
                if about:
                    # For those who use a retriever as an embedder; the files that it lists are not
                    # here.
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

    @property
    def about(self) -> About:
        """See `Gallery.about`."""
        return About("euclidean", self.card["embedding_dim"], self.card["model"])

    def gallery(self) -> RetrieverItems:
        """Return the items."""
        table = self._loaded.table
        vectors = table["embeddings"].numpy()
        metadata = list(map(json.loads, _texts(table["metadata"])))
        names = _texts(table["ids"]), _texts(table["classes"])
        return RetrieverItems(vectors, *names, metadata, self.card["model"])

    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """See `Gallery.rows`; the columns are `path`, where the metadata have one, and `class`."""
        return self._in_memory().rows(most, ids)

    def _rows_of_classes(self, classes: list[str]) -> Rows:
        return self._in_memory()._rows_of_classes(classes)

    def _in_memory(self) -> MemoryGallery:
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
            The neighbors of B queries, 1 for a single one. The columns are `class`; `metadata`, in
            JSON; and, where there is a threshold, `accepted`, whether an item is within it.

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
        if conditions:
            found = self._in_memory()._search(unit_rows(queries), k, conditions, exact, distance)
            columns = {name: found.columns[name] for name in ("class", "metadata")}
            if self.calibration is not None:
                columns["accepted"] = found.distances <= np.float32(self.calibration.threshold)
            return dataclasses.replace(found, columns=columns)
        most = min(k, len(self))
        blocks = np.split(queries, range(_BATCH_SIZE, len(queries), _BATCH_SIZE))
        parts = [self._answer("search_embedding", embedding=block, k=most) for block in blocks]
        answer = {name: _joined_arrays(name, parts) for name in parts[0]}
        columns = {"class": answer["classes"], "metadata": answer["metadata"]}
        if "accepted" in answer:
            columns["accepted"] = answer["accepted"]
        return Neighbors.padded(k, answer["ids"], answer["distances"], columns)

    def _answer(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        with user_errors(
            (tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"
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


def joined(galleries: Sequence[RetrieverItems], dimension: int, model: str) -> RetrieverItems:
    """Return the items of several galleries, whose embeddings have this dimension and are of this
    model."""
    for gallery in galleries:
        check_same_model(gallery.model, model, "the gallery and the embedder")
        if gallery.embeddings.shape[1] != dimension:
            raise UserError(
                f"gallery embeddings have {gallery.embeddings.shape[1]} dimensions, the embedder "
                f"{dimension}"
            )
    columns: Any = (
        [*itertools.chain(*(getattr(of, name) for of in galleries))]
        for name in ("ids", "classes", "metadata")
    )
    return RetrieverItems(
        np.concatenate(
            [np.zeros((0, dimension), np.float32), *(of.embeddings for of in galleries)]
        ),
        *columns,
    )


def _texts(column: Any) -> list[str]:
    """Return the texts of a variable of the graph."""
    return [text.decode() for text in column.numpy()]


def _joined_arrays(name: str, parts: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    return np.concatenate([part[name] for part in parts])


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
    option: Calibration | str,
    gallery: RetrieverItems,
    about: Mapping[str, Any],
    report: Callable[[str], None],
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
        }
        return calibrate(gallery.embeddings[rows], names[rows], **sides, **target)

    calibration = (
        choose_calibration(option, "fpir=0.01", measure, read_json, report)
        if isinstance(option, str)
        else option
    )
    return calibration and calibration.for_searches("euclidean")


SEARCHES = ("search_bytes", "search_embedding", "search_each")
# Neighbors of all queries of a request: what an answer may take.
MAX_RESULTS = 4_000_000
# Candidates beyond k, so that the rounding of the product rarely leaves open what is among the k.
_SPARE = 4
# In place of the neighbors of a query that is bad.
_FILLERS = {
    "indices": -1,
    "labels": -1,
    "distances": np.inf,
    "similarities": -1.0,
    "accepted": False,
    "known": False,
}

Answer = dict[str, tf.Tensor]
# The gallery: `embeddings` (N, d) float32 of length 1; `ids`, `classes` and `metadata` (N,)
# strings; `labels` (N,) int64; and `threshold`, the largest distance of an accepted item, if there
# is one.
Table = Mapping[str, Any]


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


def write_graph(loaded: Any, folder: str | os.PathLike, gallery: Table) -> None:
    """Write a retriever's SavedModel around an exported embedder.

    The embedder's signatures stay, and three are added. k is one int32, or one for each query, of
    which the largest counts; where it is more than the gallery holds, the whole gallery comes back.

    - `search_bytes`: `image_bytes` (B,) strings, `k` -> `indices`, `ids`, `distances` (Euclidean,
      of vectors of length 1), `similarities` (cosines), `labels`, `classes` (their names),
      `metadata` (JSON), each (B, k);
    - `search_embedding`: `embedding` (B, d) float32, `k` -> the same;
    - `search_each`: as `search_bytes`, and `error` (B,) strings: what is wrong with a query, whose
      row is then filled with index -1, or empty. For a server that puts the queries of several
      clients into one batch.

    The first two fail on the first query that is bad, and name it. With a threshold, each has the
    outputs `accepted` (B, k), whether a neighbor is within the threshold, and `known` (B,), whether
    any is.

    Args:
        loaded: The SavedModel of the embedder.
        folder: Where to write; an empty folder or none.
        gallery: The items.
    """
    served = {name: loaded.signatures[name] for name in SIGNATURES}
    module = tf.Module()
    # Of a retriever without its gallery.
    module.embedder = getattr(loaded, "embedder", loaded)
    with tf.device("/CPU:0"):  # where strings live
        module.table = {
            name: tf.Variable(value, trainable=False, name=name) for name, value in gallery.items()
        }

    def by_bytes(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(
            module.table, served["serving_default"](image_bytes=image_bytes)["embedding"], k
        )

    def by_embedding(embedding: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(module.table, embedding, k)

    def by_each(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        answer = served["embed_each"](image_bytes=image_bytes)
        return search_each(module.table, answer["embedding"], answer["error"], k)

    text, number = tf.TensorSpec((None,), tf.string), tf.TensorSpec(None, tf.int32)
    vectors = tf.TensorSpec((None, gallery["embeddings"].shape[1]), tf.float32)
    searches = zip(
        SEARCHES, ((by_bytes, text), (by_embedding, vectors), (by_each, text)), strict=True
    )
    module.searches = {
        name: tf.function(function, input_signature=[spec, number], autograph=False)
        for name, (function, spec) in searches
    }
    with quiet():
        tf.saved_model.save(module, str(folder), signatures={**served, **module.searches})


def search(gallery: Table, queries: tf.Tensor, k: tf.Tensor, checks: list[tf.Operation]) -> Answer:
    """Return the neighbors of queries, unless the answer would be too large.

    Args:
        gallery: What is searched.
        queries: (B, d) float32, not zero.
        k: Int32 of any shape; the largest counts.
        checks: What must run before.

    Returns:
        Tensors (B, min(k, N)), see `write_graph`.
    """
    most = tf.minimum(tf.maximum(tf.reduce_max(k), 1), tf.shape(gallery["ids"])[0])
    results = tf.cast(most, tf.int64) * tf.shape(queries, tf.int64)[0]
    limits = f"must be at least 1, and {MAX_RESULTS} neighbors in all at most"
    says = tf.strings.format(
        "k: " + limits + "; k is {}, for {} queries", (k, tf.shape(queries)[0])
    )
    checks = [
        *checks,
        tf.debugging.Assert((tf.reduce_min(k) >= 1) & (results <= MAX_RESULTS), [says]),
    ]
    # The CPU is where float32 products are float32.
    with tf.control_dependencies(checks), tf.device("/CPU:0"):
        queries = queries / tf.reduce_max(
            tf.abs(queries), 1, keepdims=True
        )  # so that squares do not overflow
        queries = queries / tf.norm(queries, axis=1, keepdims=True)
        rows, squares = nearest(queries, tf.convert_to_tensor(gallery["embeddings"]), most)
        answer = {
            name: tf.gather(gallery[name], rows)
            for name in ("ids", "labels", "classes", "metadata")
        }
        answer |= {"indices": tf.cast(rows, tf.int64), "distances": tf.sqrt(squares)}
        answer["similarities"] = 1.0 - squares / 2.0
        if "threshold" in gallery:
            answer["accepted"] = answer["distances"] <= gallery["threshold"]
            answer["known"] = tf.reduce_any(answer["accepted"], 1)
        return answer


def search_embedding(gallery: Table, embedding: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_embedding`; an embedding of another length is brought to 1."""
    finite = tf.reduce_all(tf.math.is_finite(embedding), 1)
    fault = tf.where(tf.reduce_any(embedding != 0.0, 1), "", "has length 0")
    faults = tf.where(finite, fault, "holds NaN or infinite values")
    return search(gallery, embedding, k, [refuse(faults, "embedding")])


def search_each(gallery: Table, embedding: tf.Tensor, error: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_each`, from what `embed_each` gives: what is wrong with a query
    fails no other."""
    good = (error == "")[:, None]
    # Any direction will do for the others.
    answer = search(gallery, tf.where(good, embedding, 1.0), k, [])
    for name, values in answer.items():
        filler = tf.constant(_FILLERS.get(name, ""), values.dtype)
        answer[name] = tf.where(good if values.shape.rank == 2 else good[:, 0], values, filler)
    return {**answer, "error": error}


def nearest(queries: tf.Tensor, gallery: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the k rows of the gallery that are nearest to each query, nearest first, equally near
    ones by row.

    Candidates are found by one product, then measured from differences, |q - g|^2, in float64, so
    that exact copies are at exactly 0. Where the rounding of the product leaves open what is among
    the k, candidates are found once more in float64.

    Args:
        queries: (B, d) float32 of length 1.
        gallery: (N, d) float32 of length 1.
        k: Scalar int32, at least 0.

    Returns:
        (B, min(k, N)) int32 rows and float32 squared distances.

    Example:
        >>> nearest(tf.eye(2), tf.constant([[0.6, 0.8], [1.0, 0.0]]), tf.constant(1))[0].numpy()
        array([[1],
               [0]], dtype=int32)
    """
    count = tf.shape(gallery)[0]
    k = tf.minimum(k, count)
    number = tf.minimum(k + _SPARE, count)
    slack = (8 + gallery.shape[1] ** 0.5) * float(np.finfo(np.float32).eps)

    def distances(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        query, rows = pair
        candidates = tf.cast(tf.gather(gallery, rows), tf.float64)
        return tf.reduce_sum(tf.math.squared_difference(candidates, tf.cast(query, tf.float64)), 1)

    def best(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the rows, their squared distances, and the least product of a candidate."""
        scores, candidates = tf.math.top_k(products, number)
        candidates = tf.sort(candidates, axis=1)  # top_k prefers what comes first
        squares = tf.cond(  # as nothing can be mapped to nothing
            tf.size(queries) > 0,
            lambda: tf.map_fn(
                distances,
                (queries, candidates),
                fn_output_signature=tf.TensorSpec((None,), tf.float64),
            ),
            lambda: tf.zeros(tf.shape(candidates), tf.float64),
        )
        nearness, places = tf.math.top_k(-squares, k)
        rows = tf.gather(candidates, places, batch_dims=1)
        return rows, -nearness, tf.cast(tf.reduce_min(scores, 1), tf.float64)

    def best_in_float64() -> tuple[tf.Tensor, tf.Tensor]:
        # Which shows that lengths are 1 but for rounding.
        exact = tf.cast(gallery, tf.float64)
        products = tf.matmul(tf.cast(queries, tf.float64), exact, transpose_b=True)
        return best(products - tf.reduce_sum(exact * exact, 1) / 2)[:2]

    rows, squares, last = best(tf.matmul(queries, gallery, transpose_b=True))
    settled = tf.reduce_all(1 - tf.reduce_max(squares, 1) / 2 >= last + slack)
    done = settled | (number >= count) | (k < 1)
    rows, squares = tf.cond(done, lambda: (rows, squares), best_in_float64)
    return rows, tf.cast(squares, tf.float32)
