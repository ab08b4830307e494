"""Models that embed images: their interface, sets with unreadable images, several views.

And the models in files (Keras, SavedModel, LiteRT, ONNX), and `load_backend`, from a path or
address to its model.
"""

import abc
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.arguments import boolean, integer
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import ImageError, explain_failure, find_faults
from tfdml.data.images import Images
from tfdml.data.pipeline import evaluation_batches, own_threads, readable_batches, readable_views
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.compute import embed_batches
from tfdml.embeddings.files import truncate
from tfdml.embeddings.model_card import (
    CARD,
    card_of,
    compare_with_card,
    fingerprint,
    served_version,
    view_of,
    view_of_card,
)
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.flags import parse_flags
from tfdml.io.files import access_fault, in_store, is_remote, local_copy, read_json, sha256_of
from tfdml.models import AnyEmbedder, TextEmbedder
from tfdml.names import TEXT, clean
from tfdml.registry import import_modules
from tfdml.run_folder import (
    EMBEDDER_FILE,
    FLAGS_FILE,
    METRICS_FILE,
    RESULT_FILE,
    SEED_PREFIX,
    TEXT_EMBEDDER_FILE,
)


class EmbeddingBackend(abc.ABC):
    """A model, wherever it is, that embeds a data set batch by batch.

    Args:
        path: Its file or folder.
        truncate_dim: How many first dimensions of its embeddings are kept, scaled to length 1; 0:
            all, as they are.

    Attributes:
        kind: What it is: `"keras"`, `"saved_model"`, `"litert"` or `"onnx"`.
        address: Its path or URL.
        transform: The view in which it is fed images; None where it takes them as they are.
        view: The configuration of its view; None where only the model knows.
        dimension: D of a head, which embeds stored vectors (B, D) in the place of images; 0 for
            images.
        embeds_texts: Whether it also has a tower of texts.
    """

    kind: str
    embeds_texts: bool = False
    truncate_dim: int = 0
    transform: EvaluationTransform | None = None
    view: dict[str, Any] | None = None
    dimension: int = 0

    def __init__(self, path: str | os.PathLike, truncate_dim: int = 0):
        self.path = Path(path)
        self.address = str(path)
        self.truncate_dim = truncate_dim

    def checksum(self) -> str:
        """Return what identifies this model: `"sha256:..."` of its files."""
        return self._cut(checksum_of(self.path))

    def fingerprint(self) -> str:
        """Return what identifies its embedder in every format; its checksum where no model card is
        there."""
        card = card_of(self.path)
        return self._cut(
            (read_json(card).get("fingerprint") if card else None) or checksum_of(self.path)
        )

    def _cut(self, text: str) -> str:
        return f"{self.truncate_dim} dimensions of {text}" if self.truncate_dim else text

    def stream(
        self, dataset: ImageDataset, batch_size: int, padded: int = 0
    ) -> Iterator[np.ndarray]:
        """Yield the embeddings of one batch after another.

        Args:
            dataset: The images.
            batch_size: B.
            padded: How many images the model computes at once, where it is compiled for a number of
                them: so that part of a set is computed as it is in a pass over the whole. 0: those
                of the largest batch.

        Yields:
            (B, d) float32, in the data set's order.

        Raises:
            UserError: An image cannot be read or is refused; it is named.
        """
        self._check_input(dataset)
        yield from map(
            self._first, self._stream(dataset, batch_size, padded or min(batch_size, len(dataset)))
        )

    def stream_readable(
        self, dataset: ImageDataset, batch_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As `stream`, without the images that cannot be read or decoded; all of stored vectors.

        Args:
            dataset: The images.
            batch_size: B.

        Yields:
            (B,) which rows of the data set, ascending, and their (B, d) float32 embeddings.
        """
        self._check_input(dataset)
        if dataset.vectors is not None:
            vectors = self.embed(dataset, batch_size)
            yield np.arange(len(vectors)), vectors
            return
        for rows, vectors in self._stream_readable(dataset.images, batch_size):
            yield rows, self._first(vectors)

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""
        return np.concatenate(list(self.stream(dataset, batch_size)))

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of texts, (N, d) float32, which are compared with those of images.

        Raises:
            UserError: The model has no tower of texts, or a text is refused; it is named.
        """
        if not self.embeds_texts:
            raise UserError(f"{self.address} embeds images alone: name a model of images and texts")
        plain = clean(texts, TEXT, "texts", lambda row: f"text {row}")
        return self._first(self._floats(self._embed_texts(plain), len(plain)))

    def _embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """See `embed_texts`."""
        raise NotImplementedError

    @abc.abstractmethod
    def _stream(self, dataset: ImageDataset, batch_size: int, padded: int) -> Iterator[np.ndarray]:
        """See `stream`; `padded` is not 0."""

    @abc.abstractmethod
    def _stream_readable(
        self, images: Images, batch_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `stream_readable`."""

    def _check_input(self, dataset: ImageDataset) -> None:
        """Refuse images where the model embeds vectors, vectors where it embeds images, and those
        of another size."""
        if dataset.dimension != self.dimension:
            takes, holds = (
                f"vectors of {dimension} dimensions" if dimension else "images"
                for dimension in (self.dimension, dataset.dimension)
            )
            advice = "a head takes features, and behind its embedder (stack) images"
            raise UserError(
                f"{self.address} embeds {takes}, but {dataset.name} holds {holds}; {advice}"
            )

    def _first(self, vectors: np.ndarray) -> np.ndarray:
        return truncate(vectors, self.truncate_dim) if self.truncate_dim else vectors

    def _floats(self, vectors: np.ndarray, count: int) -> np.ndarray:
        """Return what the model answers to so many images as float32; anything but one vector each
        is refused."""
        if vectors.ndim != 2 or len(vectors) != count or vectors.dtype.kind != "f":
            it_gave = f"it gave {vectors.dtype} of shape {vectors.shape}"
            raise UserError(f"{self.address} must give floats ({count}, d); {it_gave}")
        return vectors.astype(np.float32)


def encoded_image(images: Images, index: int) -> bytes:
    """Return the encoded bytes of one image.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return images.encoded(index)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"{images.name(index)} cannot be read: {access_fault(error)}") from error


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files below a folder, as
    `"sha256:..."`."""
    if path.is_file():
        return f"sha256:{sha256_of(path)}"
    digest = hashlib.sha256()
    for part in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        digest.update(f"{part.relative_to(path).as_posix()}\0{checksum_of(part)}\0".encode())
    return f"sha256:{digest.hexdigest()}"


def embed_readable(
    backend: EmbeddingBackend, dataset: ImageDataset, batch_size: int
) -> tuple[np.ndarray, np.ndarray, list[ImageError]]:
    """Embed the images of a set that can be read, in one pass.

    Args:
        backend: The model.
        dataset: The images.
        batch_size: B.

    Returns:
        (M,) which images of the set could be read, ascending, their (M, d) float32 embeddings, and
        what is wrong with the others.

    Raises:
        UserError: As the backend.

    Example:
        >>> images = tfdml.data.EncodedImages((jpeg, jpeg[:300]), ("1.jpg", "2.jpg"))
        >>> dataset = tfdml.data.ImageDataset("cars", "test", images, [0, 0], {0: "coupe"})
        >>> backend = tfdml.embeddings.load_backend("models/cars_jrd")
        >>> rows, vectors, faults = embed_readable(backend, dataset, batch_size=100)
        >>> [str(fault) for fault in faults]
        ['2.jpg: truncated JPEG (no end-of-image marker)']
    """
    batches = list(backend.stream_readable(dataset, batch_size)) or [
        (np.zeros(0, np.int64), np.zeros((0, 0), "<f4"))
    ]
    rows, vectors = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    left_out = np.setdiff1d(np.arange(len(dataset)), rows)
    reasons = {fault.index: fault.reason for fault in find_faults(dataset.images.take(left_out))}
    # One may be readable again by now.
    faults = [
        ImageError(index, dataset.images.name(index), reasons.get(place, "cannot be decoded"))
        for place, index in enumerate(left_out.tolist())
    ]
    return rows, vectors, faults


# Of the room that a crop has, in halves from the top and from the left: the center, and the four
# corners.
_PLACES = {1: ((1, 1),), 5: ((1, 1), (0, 0), (0, 2), (2, 0), (2, 2))}


@dataclasses.dataclass(frozen=True)
class ViewTransform(EvaluationTransform):
    """An evaluation view whose crop lies elsewhere, or is mirrored.

    Args:
        top: Halves of the room that are above the crop: 0, 1 or 2.
        left: Halves of the room that are to its left.
        mirrored: Whether left and right change places after the crop.

    Example:
        >>> ViewTransform(resize=40, image_size=32, top=0, left=2)(tf.zeros((40, 60, 3),
        ...     tf.uint8)).shape
        TensorShape([32, 32, 3])
    """

    top: int = 1
    left: int = 1
    mirrored: bool = False

    def place(self, size: tuple) -> list:
        """Return the top and left edge of the crop in a resized image of this height and width."""
        return [
            (edge - self.image_size) * halves // 2
            for edge, halves in zip(size, (self.top, self.left), strict=True)
        ]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """See `EvaluationTransform.__call__`."""
        views = super().__call__(images)
        return tf.reverse(views, [-2]) if self.mirrored else views


def views_of(
    transform: EvaluationTransform, flip: bool = True, crops: int = 1
) -> list[ViewTransform]:
    """Return several views of an image, that of the transform itself first; see `embed_views`.

    Raises:
        ValueError: `crops` is neither 1 nor 5.
        UserError: Several crops are asked for and the image is not resized to more than one.

    Example:
        >>> len(views_of(EvaluationTransform(resize=256, image_size=224), crops=5))
        10
    """
    if integer("crops", crops, at_least=1) not in _PLACES:
        raise ValueError(f"crops must be 1 or 5, not {crops}")
    if crops > 1 and transform.resize == transform.image_size:
        raise UserError(
            f"images of {transform.resize} px leave no room for other crops", crops=crops
        )
    fields = dataclasses.fields(EvaluationTransform)
    plain = {field.name: getattr(transform, field.name) for field in fields}
    sides = (False, True) if boolean("flip", flip) else (False,)
    return [
        ViewTransform(**plain, top=top, left=left, mirrored=mirrored)
        for (top, left), mirrored in itertools.product(_PLACES[crops], sides)
    ]


def embed_views(
    backend: EmbeddingBackend,
    dataset: ImageDataset,
    batch_size: int,
    *,
    flip: bool = True,
    crops: int = 1,
) -> np.ndarray:
    """Return the mean embeddings of several views of each image: f = sum_v f_v, scaled to length 1;
    a pass for each.

    Args:
        backend: A Keras embedder, LiteRT or ONNX file; a SavedModel has its one view inside.
        dataset: The images.
        batch_size: B.
        flip: Whether each crop is also embedded mirrored.
        crops: 1: the center; 5: the four corners too, where `resize` leaves room around
            `image_size`.

    Returns:
        (N, d) float32 of length 1; 0 where the views cancel.

    Raises:
        ValueError: `crops` is neither 1 nor 5.
        UserError: The model has one view, or there is no room for crops; as
            `EmbeddingBackend.embed`.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks",
    NIPS 2012, sec. 4.1.
    """
    if backend.transform is None or backend.dimension:
        raise UserError(
            f"{backend.address} has one view: name a run on images, or its .keras, .tflite or "
            ".onnx file"
        )
    total: Any = np.float32(0)
    for view in views_of(backend.transform, flip, crops):
        other = copy.copy(backend)
        other.transform = view
        total = total + other.embed(dataset, batch_size)
    return total / np.maximum(
        np.linalg.norm(total, axis=1, keepdims=True), np.finfo(np.float32).tiny
    )


class _ViewBackend(EmbeddingBackend):
    """A model that is fed by the evaluation pipeline."""

    transform: EvaluationTransform

    @abc.abstractmethod
    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        """Yield the vectors of one batch after another, of images or of tuples that begin with
        images."""

    def _stream(self, dataset: ImageDataset, batch_size: int, padded: int) -> Iterator[np.ndarray]:
        batches = own_threads(evaluation_batches(dataset, self.transform, batch_size))
        try:
            yield from self._vectors(batches, padded)
        except tf.errors.OpError as error:
            raise (explain_failure(error, dataset, leave_out="bad_images=skip") or error) from None

    def _stream_readable(
        self, images: Images, batch_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, views in readable_views(images, self.transform, batch_size):
            yield rows, next(self._vectors([views], min(batch_size, len(images))))


class KerasEmbedder(_ViewBackend):
    """A Keras embedder of images, or a `Head` of stored vectors, fed by the evaluation pipeline.

    Args:
        path: A run folder or a .keras file.
        truncate_dim: As `EmbeddingBackend`.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """

    kind = "keras"

    def __init__(self, path: str | os.PathLike, truncate_dim: int = 0):
        super().__init__(path, truncate_dim)
        self.path = _file(path)
        self.embedder = load_embedder(path)
        self.text_path = self.path.parent / TEXT_EMBEDDER_FILE
        self.transform = EvaluationTransform.of(self.embedder)
        self.view = view_of(self.embedder)
        self.dimension = self.view.get("dimension", 0)

    def fingerprint(self) -> str:
        """See `EmbeddingBackend.fingerprint`."""
        return self._cut(fingerprint(self.embedder))

    @functools.cached_property
    def text_embedder(self) -> TextEmbedder | None:
        """The tower of texts; None where there is none, or one of stored vectors."""
        there = self.text_path.is_file() and self.text_path != self.path
        tower = load_embedder(self.text_path) if there else None
        return tower if isinstance(tower, TextEmbedder) else None

    @property
    def embeds_texts(self) -> bool:  # type: ignore[override]
        """Whether it also has a tower of texts."""
        return self.text_embedder is not None

    def _embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        assert self.text_embedder is not None
        return self.text_embedder.embed_texts(list(texts))

    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        return embed_batches(self.embedder, batches, batch_size=batch_size)


# Arguments of layers and tokenizers that are read as a file where they are a text.
_FILE_KEYS = ("vocabulary", "merges", "proto", "filepath")


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path / EMBEDDER_FILE if path.is_dir() else path


def epochs_missing(run: str | os.PathLike) -> str:
    """Return how far a run has come that has not ended, such as `"3 of 6 epochs"`; empty for all
    other folders.

    Args:
        run: A run folder, or a file in it.
    """
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    flags, metrics = folder / FLAGS_FILE, folder / METRICS_FILE
    if not flags.is_file() or not metrics.is_file() or (folder / RESULT_FILE).is_file():
        return ""
    epoch = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["epoch"]
    return f"{epoch} of {parse_flags(flags.read_text(encoding='utf-8')).get('epochs', '?')} epochs"


def _check_places(path: Path, config: Any, key: str = "") -> None:
    """Refuse the configuration of a `.keras` file that names something outside of it, which its
    classes would open: an address, a preset, or the file of a vocabulary.

    Raises:
        UserError: It does.
    """
    if isinstance(config, str):
        if key in _FILE_KEYS or re.match("hub:|[a-z][a-z0-9+.-]*:/", config):
            raise UserError(
                f"{path} names another place, {key}={config[:100]!r}, which is not opened for a "
                "file; if you trust it, fetch that yourself, build the model and save it again"
            )
    elif isinstance(config, dict):
        for name, value in config.items():
            _check_places(path, value, name)
    elif isinstance(config, list):
        for value in config:  # words of a vocabulary may look like anything
            if not isinstance(value, str):
                _check_places(path, value)


def load_embedder(path: str | os.PathLike) -> AnyEmbedder:
    """Return the Keras embedder of a run folder or a .keras file; warns where the run has not
    ended.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """
    path = _file(path)
    if not path.is_file():
        of_seeds = sorted(path.parent.glob(f"{SEED_PREFIX}*/{EMBEDDER_FILE}"))
        ask = (
            f"name the run of one seed, such as {of_seeds[0].parent}"
            if of_seeds
            else "has the run finished?"
        )
        raise UserError(f"there is no embedder at {path}; {ask}")
    if missing := epochs_missing(path):
        logging.warning("%s has not ended: its embedder is the best of %s", path.parent, missing)
    compare_with_card(path)
    flags = path.parent / FLAGS_FILE
    if flags.is_file():
        with user_errors(UserError, f"{flags}: {ERROR_TEXT}"):
            import_modules(parse_flags(flags.read_text(encoding="utf-8")).get("import", ""))
    embedder = load_keras_model(path)
    if not isinstance(embedder, AnyEmbedder):
        raise UserError(f"{path} holds a {type(embedder).__name__}, not an Embedder")
    return embedder


def load_keras_model(path: Path) -> keras.Model:
    """Return the model of a .keras file, which runs no code of its own and opens no other place.

    Raises:
        UserError: It is damaged, or not such a file.
    """
    # Unknown layers, and whatever else Keras raises on a foreign file.
    with user_errors(Exception, f"{path} cannot be loaded: {ERROR_TEXT}", named=True):
        # Keras looks neither for damage nor for what is no archive, such as a legacy HDF5 model.
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
            _check_places(path, json.loads(archive.read("config.json")))
        # Code in the file, such as that of a Lambda layer, is refused; `safe_mode` is Keras's
        # default.
        advice = "If a module of yours registers it, name it with --import"
        with user_errors(
            TypeError, f"{path} cannot be loaded: {ERROR_TEXT} {advice}", keep="first"
        ):
            return keras.saving.load_model(path, compile=False, safe_mode=True)


class SavedModelEmbedder(EmbeddingBackend):
    """A SavedModel of `tfdml export`, by its signature `embed_each`, which says what is wrong with
    each image.

    Args:
        path: The path of a version.
        truncate_dim: As `EmbeddingBackend`.

    Raises:
        UserError: It cannot be loaded, or has no such signature.
    """

    kind = "saved_model"

    def __init__(self, path: str | os.PathLike, truncate_dim: int = 0):
        super().__init__(path, truncate_dim)
        self.view = view_of_card(card_of(self.path))
        compare_with_card(self.path)
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(
            Exception, f"cannot be loaded as SavedModel: {ERROR_TEXT}", keep="last", model=path
        ):
            # Kept, because what the signature refers to lives only as long as this.
            self.loaded = tf.saved_model.load(str(path))
        if "embed_each" not in self.loaded.signatures:
            names = ", ".join(self.loaded.signatures)
            raise UserError(
                f"the SavedModel has no signature embed_each, only {names}: export it again",
                model=path,
            )
        self.embeds_texts = "embed_texts" in self.loaded.signatures

    def _stream(self, dataset: ImageDataset, batch_size: int, padded: int) -> Iterator[np.ndarray]:
        images = dataset.images
        for start in range(0, len(images), batch_size):
            batch = [
                encoded_image(images, row)
                for row in range(start, min(start + batch_size, len(images)))
            ]
            vectors, reasons = self.request(batch)
            if any(reasons):
                row = next(row for row, reason in enumerate(reasons) if reason)
                raise UserError(
                    f"{self.address} refuses {images.name(start + row)}: {reasons[row]}"
                )
            yield vectors

    def _stream_readable(
        self, images: Images, batch_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, batch in readable_batches(images, batch_size, bytes):
            vectors, reasons = self.request(batch)
            accepted = [not reason for reason in reasons]
            if any(accepted):
                yield rows[accepted], vectors[accepted]

    def request(self, encoded_images: list[bytes]) -> tuple[np.ndarray, list[str]]:
        """(B, d) embeddings of B encoded images, and what is wrong with each, or nothing."""
        answer = self.loaded.signatures["embed_each"](image_bytes=tf.constant(encoded_images))
        reasons = [reason.decode() for reason in answer["error"].numpy()]
        return self._floats(answer["embedding"].numpy(), len(encoded_images)), reasons

    def _embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        with user_errors(
            tf.errors.InvalidArgumentError, f"{self.address}: {ERROR_TEXT}", keep="last"
        ):
            return self.loaded.signatures["embed_texts"](texts=tf.constant(list(texts), tf.string))[
                "embedding"
            ].numpy()


_KIND_OF_FILE = {".tflite": "litert", ".onnx": "onnx"}


class ViewFile(_ViewBackend):
    """A .tflite or .onnx file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to
    float embeddings.

    Args:
        path: The file. Its export's model card lies next to it or in the folder above.
        truncate_dim: As `EmbeddingBackend`.
        threads: That compute; 0: as many as there are CPUs.

    Raises:
        UserError: The file is no such model, its view is not known, or what runs it is not
            installed.
    """

    def __init__(self, path: str | os.PathLike, truncate_dim: int = 0, threads: int = 0):
        super().__init__(path, truncate_dim)
        if not self.path.is_file():
            raise UserError(f"there is no file {path}")
        compare_with_card(self.path)
        self.kind = _KIND_OF_FILE[self.path.suffix]
        self._run, types, shape = open_file(self.path, threads)
        if (
            types != ["uint8", "float32"]
            or len(shape) != 4
            or shape[3] != 3
            or shape[1] != shape[2]
        ):
            form = "uint8 images (B, S, S, 3) and give one float32 output, the embedding"
            raise UserError(f"it must take {form}, not {', '.join(types)} and {shape}", model=path)
        # How many images it takes at once; 0 for any number.
        self._rows = max(shape[0], 0)
        self.view = view_of_card(card_of(self.path))
        if self.view is None:
            raise UserError(
                f"no {CARD} describes its view: copy that of its export next to it", model=path
            )
        if self.view["image_size"] != shape[1]:
            raise UserError(
                f"takes {shape[1]} px, but its {CARD} states {self.view['image_size']} px",
                model=path,
            )
        self.transform = EvaluationTransform(**self.view)

    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        for batch in batches:
            images = np.asarray(batch[0] if isinstance(batch, tuple) else batch)
            rows = self._rows or len(images)
            filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % rows, axis=0)])
            parts = [
                self._run(filled[first : first + rows]) for first in range(0, len(filled), rows)
            ]
            yield self._floats(np.concatenate(parts)[: len(images)], len(images))


def open_file(
    path: Path, threads: int = 0
) -> tuple[Callable[[np.ndarray], np.ndarray], list[str], list[int]]:
    """Load a .tflite or .onnx file.

    Args:
        path: The file.
        threads: That compute; 0: as many as there are CPUs.

    Returns:
        The function from inputs, as many as the file takes at once, to embeddings; the types of its
        inputs and outputs, and the shape of the input, at most 0 where it is free.

    Raises:
        UserError: It cannot be loaded, or what runs it is not installed.
    """
    opened = _open_litert if path.suffix == ".tflite" else _open_onnx
    return opened(path, threads or os.cpu_count() or 1)


def _open_litert(
    path: Path, threads: int
) -> tuple[Callable[[np.ndarray], np.ndarray], list[str], list[int]]:
    kind = litert_interpreter()
    message = f"model={path} cannot be loaded as a .tflite file: {ERROR_TEXT}"
    with user_errors((ValueError, RuntimeError), message, keep="last"):
        interpreter = kind(model_path=str(path), num_threads=threads)
        interpreter.allocate_tensors()
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    outputs = [output for output in outputs if len(outputs) == 1 or "embedding" in output["name"]]

    def run(images: np.ndarray) -> np.ndarray:
        if interpreter.get_input_details()[0]["shape"][0] != len(images):
            interpreter.resize_tensor_input(inputs[0]["index"], images.shape)
            interpreter.allocate_tensors()
        interpreter.set_tensor(inputs[0]["index"], images)
        interpreter.invoke()
        return interpreter.get_tensor(outputs[0]["index"])

    types = [np.dtype(part["dtype"]).name for part in (*inputs, *outputs)]
    return run, types, inputs[0]["shape_signature"].tolist()


def litert_interpreter() -> Any:
    """Return the class of LiteRT's interpreter, or TensorFlow's where LiteRT is not installed."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        if not hasattr(tf, "lite"):
            raise UserError("a .tflite file needs LiteRT: pip install 'tfdml[litert]'") from None
        return tf.lite.Interpreter
    return Interpreter


def _open_onnx(
    path: Path, threads: int
) -> tuple[Callable[[np.ndarray], np.ndarray], list[str], list[int]]:
    with user_errors(ImportError, "an .onnx file needs ONNX Runtime: pip install 'tfdml[onnx]'"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its own kinds of errors derive from nothing narrower.
    with user_errors(
        Exception, f"cannot be loaded as an .onnx file: {ERROR_TEXT}", keep="last", model=path
    ):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    outputs = [output for output in outputs if len(outputs) == 1 or "embedding" in output.name]
    names = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}
    types = [names.get(part.type, part.type) for part in (*inputs, *outputs)]
    shape = [size if isinstance(size, int) else 0 for size in inputs[0].shape]
    return lambda images: session.run([outputs[0].name], {inputs[0].name: images})[0], types, shape


def load_backend(
    model: str | os.PathLike, *, threads: int = 0, truncate_dim: int = 0
) -> EmbeddingBackend:
    """Return the model at a path, or at a URL in a store.

    Args:
        model: A run folder, a .keras file, a SavedModel, a folder of versions (the newest that
            holds a SavedModel is taken), or a .tflite or .onnx file.
        threads: That a .tflite or .onnx file computes with; 0: as many as there are CPUs.
        truncate_dim: Keep this many first dimensions of the embeddings, scaled to length 1; 0: all.

    Returns:
        The source, loaded.

    Raises:
        UserError: There is none of these, or it cannot be loaded.

    Example:
        >>> load_backend("runs/cars_jrd").embed(test, batch_size=100).shape
        (256, 16)
    """
    if is_remote(model) and not in_store(model):
        raise UserError(
            "is the address of a server: name the file or folder that it loads", model=model
        )
    path = Path(local_copy(model))
    if path.suffix in _KIND_OF_FILE:
        return ViewFile(path, truncate_dim, threads)
    version = served_version(path)
    if version is not None:
        return SavedModelEmbedder(version, truncate_dim)
    model_files = [file for file in path.rglob("*") if file.suffix in _KIND_OF_FILE]
    if model_files:
        names = ", ".join(sorted(str(file.relative_to(path)) for file in model_files))
        raise UserError(f"holds no SavedModel: name one of {names}", model=model)
    return KerasEmbedder(path, truncate_dim)
