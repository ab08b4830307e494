"""A retriever: an exported embedder with a gallery that it searches, as numbered versions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.arguments import number
from tfdml.data.dataset import ImageDataset
from tfdml.embeddings.model_card import CARD, describe_files, fingerprint, served_version
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import Calibration, calibrate, target_of
from tfdml.evaluation.classification import TARGETS
from tfdml.export import saved_model
from tfdml.export.gallery import NO_LABEL, Gallery, GalleryItem, embedded
from tfdml.export.search_graph import (
    DECISIONS,
    MAX_NEIGHBORS,
    MAX_RESULTS,
    SEARCHES,
    copy_with_gallery,
    load_exported,
    write_graph,
)
from tfdml.io.files import Kinds, compare_files, locked, partial_folder, read_bytes, read_json, write_json
from tfdml.models import AnyEmbedder

RETRIEVER_CARD = "retriever.json"
_CARD: Kinds = {
    "items": int,
    "classes": int,
    "model": str,
    "embedding_dim": int,
    "calibration": (dict, type(None)),
    "files": dict,
}
_WARM_UP_SIDE = 256
_WARM_UP_SIZES = (1, 8)
_ATTEMPTS = 5
# Of a gallery's images, so many search it for its threshold.
_MOST_QUERIES = 10_000

# In place of items that are too far away.
_FILLERS = {"indices": -1, "ids": "", "distances": np.inf, "similarities": -1, "classes": "", "metadata": ""}

Queries = np.ndarray | bytes | str | os.PathLike | Sequence[bytes | str | os.PathLike]


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found: row i holds the neighbors of query i, nearest first, equally near ones by gallery row.

    Args:
        indices: (B, m) int64 rows of the gallery, m = min(k, N).
        ids: (B, m) str objects.
        distances: (B, m) float32, Euclidean, between vectors of length 1.
        similarities: (B, m) float32 cosines.
        classes: (B, m) str objects, the names of classes, empty for none.
        metadata: (B, m) str objects, JSON.
    """

    indices: np.ndarray
    ids: np.ndarray
    distances: np.ndarray
    similarities: np.ndarray
    classes: np.ndarray
    metadata: np.ndarray

    def within(self, distance: float) -> SearchResult:
        """Return the neighbors at most so far away; in place of the others, what `Retriever.search` names."""
        far, columns = self.distances > distance, {}
        for name, filler in _FILLERS.items():
            values = getattr(self, name)
            columns[name] = np.where(far, np.asarray(filler, values.dtype), values)
        return SearchResult(**columns)


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
        items: Iterable[GalleryItem] | ImageDataset,
        folder: str | os.PathLike,
        *,
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
        calibration: Calibration | str = "auto",
    ) -> Retriever:
        """Embed a gallery, write it as the next version of a retriever, and load that.

        Args:
            embedder: What embeds: an exported version, a folder of them, or a Keras embedder, which is exported first.
            items: The gallery: items, or the images of a data set.
            folder: Where versions lie; earlier versions stay.
            skip_bad: Leave out images that cannot be read or decoded, instead of refusing the gallery.
            report: Called with a line on every bad image, up to ten.
            calibration: The threshold of `max_distance="calibrated"`, of `accepted` and of `classify`. `fpir=0.01`: at
                most this share of the queries of unknown classes is accepted, as the gallery's images show that search
                it without their class; classes on which the embedder was trained, by its model card, are not asked
                for. `auto`: fpir=0.01, where they can show it, else that of the model card. `none`. A `Calibration`
                with `fpir`, or a JSON file of `tfdml evaluate` that has one.

        Raises:
            UserError: An item is bad or occurs twice, there is none, the folder cannot be written, or the threshold
                cannot be had.
        """
        with tempfile.TemporaryDirectory() as name:
            exported, around = Path(name) / "embedder", Path(name) / "retriever"
            if isinstance(embedder, AnyEmbedder):
                saved_model.write_saved_model(saved_model.in_float32(embedder), exported)
            else:
                exported = newest_version(Path(embedder))
            about = read_json(exported / CARD) if (exported / CARD).is_file() else {}
            loaded = load_exported(exported)
            gallery = embedded(items, loaded.signatures["embed_each"], skip_bad, report)
            threshold = _calibrated(calibration, gallery, about, report)
            write_graph(loaded, around, threshold is not None)
            if about:
                # For those who use a retriever as an embedder; the files that it lists are not here.
                card = {**about, "artifacts": {}, "signatures": _signatures(threshold)}
                write_json(around / CARD, {**card, "calibration": threshold and threshold.to_dict()})
            model = fingerprint(embedder) if isinstance(embedder, AnyEmbedder) else about.get("fingerprint", "")
            path = write_version(around, folder, gallery, threshold, model)
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
        """The version's card: items, classes, signatures, limits, files."""
        return dict(self._version.card)

    @property
    def calibration(self) -> Calibration | None:
        """The threshold that it was built with."""
        return self._version.calibration

    def __len__(self) -> int:
        return self._version.card["items"]

    def __repr__(self) -> str:
        card = self._version.card
        return f"Retriever({str(self.path)!r}: {card['items']:,} items, {card['embedding_dim']}-d)"

    def gallery(self) -> Gallery:
        """Return the items."""
        return self._version.gallery()

    def embed(self, images: Queries) -> np.ndarray:
        """(B, d) embeddings of images: encoded bytes, paths of files, or (B, H, W, 3) uint8.

        Raises:
            UserError: One of them cannot be decoded; it is named.
        """
        return self._version.embed(images)

    def search(self, queries: Queries, k: int, *, max_distance: float | str | None = None) -> SearchResult:
        """Return the k nearest items of every query; the whole gallery where k is more than it holds.

        Args:
            queries: (B, d) or (d,) floats, embeddings of any length but 0; or images: encoded bytes, paths of files, or
                (B, H, W, 3) or (H, W, 3) uint8.
            k: From 1 to `MAX_NEIGHBORS`.
            max_distance: Leave out items that are further away; "calibrated": than the threshold of `calibration`.

        Returns:
            (B, min(k, N)) neighbors; B is 1 for a single query. In place of those left out, at the end of a row: index
            -1, distance infinity, similarity -1 and empty texts.

        Raises:
            UserError: A query is bad; it is named. Or there is no calibration.
        """
        return self._version.search(queries, k, max_distance)

    def add(self, items: Iterable[GalleryItem] | ImageDataset, *, replace: bool = False) -> Path:
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

        def joined(version: LoadedVersion, gallery: Gallery) -> Gallery:
            new = embedded(items, version.loaded.signatures["embed_each"])
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
        if served_version(folder) in (None, self._version.path):
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
            gallery, calibration = change(version, version.gallery()), version.calibration
            if calibration is not None and len(gallery) >= 1.5 * calibration.num_images:
                about = read_json(version.path / CARD) if (version.path / CARD).is_file() else {}
                with contextlib.suppress(UserError):  # the version that is read warns
                    calibration = _calibrated(calibration.target, gallery, about, logging.info)
            path = write_version(version.path, folder, gallery, calibration, version.card["model"])
            self._version = LoadedVersion.read(path)
        return path


@dataclasses.dataclass(frozen=True)
class LoadedVersion:
    """One version, read whole; nothing of it is needed on disk any more.

    Args:
        path: Where it lay.
        card: Its `retriever.json`.
        loaded: The SavedModel, kept because its signatures live only as long as it does.
        calibration: The threshold that it was built with.
    """

    path: Path
    card: dict[str, Any]
    loaded: Any
    calibration: Calibration | None

    @classmethod
    def read(cls, path: Path) -> LoadedVersion:
        """Read a version.

        Raises:
            UserError: It cannot be read.
        """
        file, remedy = path / RETRIEVER_CARD, "copy the version again, or build it again"
        if not file.exists():
            raise UserError(f"there is no retriever at {path}: it has no {RETRIEVER_CARD}")
        card = read_json(file, _CARD)
        compare_files(path, card["files"], str(file), remedy)
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(Exception, f"{path} cannot be loaded as a retriever: {REASON}", keep="last"):
            loaded = tf.saved_model.load(str(path))
            held = {len(loaded.table[name].numpy()) for name in ("embeddings", "ids", "labels", "metadata", "classes")}
        if held != {card["items"]}:
            raise UserError(f"{path} is damaged: {RETRIEVER_CARD} states {card['items']} items; build it again")
        stored = card["calibration"] and saved_model.read_calibration(card["calibration"], str(file))
        return cls(path, card, loaded, stored and stored.for_searches("euclidean", card["items"]))

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

    def threshold(self, max_distance: float | str) -> float:
        """Return the `max_distance` of a search as a number.

        Raises:
            UserError: It is none, or there is no calibration.
        """
        if max_distance != "calibrated":
            with user_errors(ValueError, f'{REASON}; or give "calibrated"'):
                return number("max_distance", max_distance, at_least=0)
        if self.calibration is None:
            raise UserError(
                f"max_distance=calibrated: {self.path} was built without a threshold: build it with "
                "`calibrate=fpir=0.01`, or give a number"
            )
        return self.calibration.threshold

    def gallery(self) -> Gallery:
        """Its items."""
        columns = {name: column.numpy() for name, column in self.loaded.table.items()}
        ids, metadata = (tuple(text.decode() for text in columns[name]) for name in ("ids", "metadata"))
        return Gallery(columns["embeddings"], ids, columns["labels"], metadata)

    def embed(self, images: Queries) -> np.ndarray:
        """See `Retriever.embed`."""
        if isinstance(images, np.ndarray):
            if images.dtype != np.uint8 or images.ndim not in (3, 4):
                raise UserError(f"images must be (B, H, W, 3) uint8; got {images.dtype} of shape {images.shape}")
            return self._answer("embed_images", images=images if images.ndim == 4 else images[None])["embedding"]
        several = [images] if isinstance(images, (bytes, str, os.PathLike)) else images
        answer = self._answer("embed_each", image_bytes=tf.constant([_bytes(image) for image in several], tf.string))
        if len(bad := np.flatnonzero(answer["error"] != b"")):
            first = several[bad[0]]
            place = f"image {bad[0]}" if isinstance(first, bytes) else os.fspath(first)
            count = f"{len(bad)} of {len(several)} images cannot be embedded, the first is "
            raise UserError(f"{count if len(several) > 1 else ''}{place}: {answer['error'][bad[0]].decode()}")
        return answer["embedding"]

    def search(self, queries: Queries, k: int, max_distance: float | str | None) -> SearchResult:
        """See `Retriever.search`."""
        limit = None if max_distance is None else self.threshold(max_distance)
        if not isinstance(k, (int, np.integer)) or not 1 <= k <= MAX_NEIGHBORS:
            raise UserError(f"k={k}: must be a number from 1 to {MAX_NEIGHBORS}")
        if isinstance(queries, np.ndarray) and queries.dtype != np.uint8:
            vectors = _checked(queries, self.card["embedding_dim"])
        else:
            vectors = self.embed(queries)
        columns = self._answer("search_embedding", embedding=vectors, k=np.int32(k))
        texts = {name: _decoded(columns.pop(name)) for name in ("ids", "metadata")}
        names = tf.gather(self.loaded.table["classes"], np.maximum(columns["indices"], 0))
        texts["classes"] = np.where(columns["indices"] < 0, "", _decoded(names.numpy()))
        result = SearchResult(**{name: columns[name] for name in ("indices", "distances", "similarities")}, **texts)
        return result if limit is None else result.within(limit)

    def _answer(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        with user_errors((tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"):
            answer = self.loaded.signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in answer.items()}


def newest_version(path: Path) -> Path:
    """Return the path of a version: itself, or the newest below it."""
    version = served_version(path)
    if version is None:
        raise UserError(f"there is no exported version at {path}")
    return version


def _checked(queries: np.ndarray, dimensions: int) -> np.ndarray:
    if queries.ndim == 1:
        queries = queries[None]
    if queries.dtype.kind not in "fiu" or queries.ndim != 2 or queries.shape[1] != dimensions:
        raise UserError(f"queries must be (images, {dimensions}) real numbers; got {queries.dtype} {queries.shape}")
    with np.errstate(over="ignore"):
        return queries.astype(np.float32)


def _bytes(image: bytes | str | os.PathLike) -> bytes:
    if isinstance(image, bytes):
        return image
    with user_errors((OSError, TypeError), f"{image} cannot be read: {REASON}"):
        return read_bytes(Path(image))


def _decoded(texts: np.ndarray) -> np.ndarray:
    return np.array([text.decode() for text in texts.ravel()], object).reshape(texts.shape)


def write_version(
    source: Path, folder: str | os.PathLike, gallery: Gallery, calibration: Calibration | None, model: str
) -> Path:
    """Write a gallery as the next version.

    Args:
        source: A retriever's SavedModel, with or without a gallery, and its cards.
        folder: Where versions lie.
        gallery: The items.
        calibration: Its threshold.
        model: The fingerprint of its embedder; empty where it is not known.

    Returns:
        The path of the version.
    """
    with saved_model.new_version(folder) as version:
        copy_with_gallery(source, version.folder, gallery, calibration.threshold if calibration else None)
        decides = calibration is not None
        saved_model.write_warm_up(version.folder, _WARM_UP_SIDE, False, _searches(gallery, decides))
        card = {
            "items": len(gallery),
            "classes": len(np.unique(gallery.labels[gallery.labels != NO_LABEL])),
            "model": model,
            "embedding_dim": gallery.embedding_dim,
            "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
            "signatures": _signatures(calibration),
            "calibration": calibration and calibration.to_dict(),
            "max_neighbors": MAX_NEIGHBORS,
            "max_results": MAX_RESULTS,
            "files": describe_files(version.folder, saved_model.model_files(version.folder))["files"],
        }
        write_json(version.folder / RETRIEVER_CARD, card)
        if (source / CARD).is_file():
            shutil.copyfile(source / CARD, version.folder / CARD)
    return version.path


def _calibrated(
    wanted: Calibration | str, gallery: Gallery, about: dict[str, Any], report: Callable[[str], None]
) -> Calibration | None:
    """Return the threshold that the argument `calibration` of `Retriever.build` means.

    Args:
        wanted: The argument.
        gallery: The gallery.
        about: The embedder's model card; empty where there is none.
        report: Called with what the threshold is, or why there is none.

    Raises:
        UserError: It cannot be had.
    """
    if wanted == "none":
        return None
    if isinstance(wanted, str) and wanted != "auto" and not wanted.startswith(TARGETS):
        wanted = saved_model.calibration_of_file(wanted)
    if isinstance(wanted, Calibration):
        return wanted.for_searches("euclidean")
    target = target_of("fpir=0.01" if wanted == "auto" else wanted, "calibrate", kinds=("fpir",))
    names = np.array(gallery.classes)
    asked = (gallery.labels != NO_LABEL) & ~np.isin(names, about.get("trained_on") or [])
    classes, counts = np.unique(names[asked], return_counts=True)
    # Whole classes, drawn at random.
    drawn = np.random.default_rng(0).permutation(len(classes))
    drawn = drawn[: 1 + np.searchsorted(np.cumsum(counts[drawn]), _MOST_QUERIES)]
    rows = np.flatnonzero(asked & np.isin(names, classes[drawn]))
    try:
        if not len(rows):
            raise UserError("no image of the gallery is of a class that was not trained on")
        sides: dict[str, Any] = {"gallery": gallery.embeddings, "gallery_labels": names, "own_rows": rows}
        with user_errors(UserError, f"the gallery cannot show the threshold: {REASON}"):
            calibration = calibrate(gallery.embeddings[rows], names[rows], **sides, **target)
    except UserError as error:
        if wanted != "auto":
            raise
        stored = about.get("calibration")
        if not stored or stored["kind"] != "fpir":
            report(f"no threshold for 'unknown': {error}")
            return None
        calibration = saved_model.read_calibration(stored, CARD)
    report(str(calibration))
    return calibration


def _signatures(calibration: Calibration | None) -> list[str]:
    return [*saved_model.SIGNATURES, *SEARCHES, *(() if calibration is None else DECISIONS)]


def _searches(gallery: Gallery, decides: bool) -> Iterator[bytes]:
    """Warm-up requests of the search signatures."""
    gray = tf.io.encode_jpeg(tf.fill((_WARM_UP_SIDE, _WARM_UP_SIDE, 3), tf.constant(127, tf.uint8))).numpy()
    for size in _WARM_UP_SIZES:
        k = np.full(size, 10, np.int32)
        yield saved_model.prediction_log("search_bytes", image_bytes=[gray] * size, k=k)
        yield saved_model.prediction_log("search_embedding", embedding=gallery.embeddings[:1].repeat(size, axis=0), k=k)
        yield saved_model.prediction_log("search_each", image_bytes=[gray] * size, k=k)
        if decides:
            yield saved_model.prediction_log("classify", image_bytes=[gray] * size, k=k)


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
        gone = saved_model.version_numbers(folder)[:-keep]
        for number in gone:
            # Away from its number in one step: nobody may read half a version.
            with partial_folder(folder) as hidden:
                os.rename(folder / str(number), hidden / str(number))
    return gone
