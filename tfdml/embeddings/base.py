"""Models that embed images, wherever they are: their interface, sets with unreadable images, several views."""

import abc
import copy
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.arguments import boolean, integer
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import ImageError, access_fault, find_faults
from tfdml.data.images import Images
from tfdml.data.pipeline import readable_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.compute import truncate
from tfdml.errors import UserError
from tfdml.io import files


class EmbeddingBackend(abc.ABC):
    """A model, wherever it is, that embeds a data set batch by batch.

    Attributes:
        path: Its file or folder, where it has one.
        kind: What it is: `"keras"`, `"saved_model"`, `"litert"` or `"onnx"`.
        address: Its path or URL.
        view: The configuration of the `EvaluationTransform` in which it sees images; None where only the model knows.
        dimension: D of a head, which embeds stored vectors (B, D) in the place of images; 0 for images.
    """

    path: Path
    kind: str
    address: str
    view: dict[str, Any] | None = None
    dimension: int = 0

    def checksum(self) -> str:
        """Return what identifies this model: `"sha256:..."` of its files."""
        return checksum_of(self.path)

    @abc.abstractmethod
    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """Yield the embeddings of one batch after another.

        Args:
            dataset: The images.
            batch_size: B.
            first: Where to begin; at a multiple of B the batches are those of a pass from the start, bit by bit.

        Yields:
            (B, d) float32, in the data set's order.

        Raises:
            UserError: An image cannot be read or is refused; it is named.
        """

    @abc.abstractmethod
    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As `stream`, without the images that cannot be read or decoded.

        Args:
            dataset: The images.
            batch_size: B.

        Yields:
            (B,) which rows of the data set, ascending, and their (B, d) float32 embeddings.
        """

    def check_input(self, dataset: ImageDataset) -> None:
        """Refuse images where the model embeds vectors, vectors where it embeds images, and those of another size."""
        given = dataset.images.lookup().dimension
        if given != self.dimension:
            takes, found = (f"vectors of {size} dimensions" if size else "images" for size in (self.dimension, given))
            advice = "a head takes `features`, and behind its embedder (`stack`) images"
            raise UserError(f"{self.address} embeds {takes}, but {dataset.name} holds {found}; {advice}")

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""
        result, done = np.zeros((0, 0), np.float32), 0
        for vectors in self.stream(dataset, batch_size):
            if not done:
                result = np.empty((len(dataset), vectors.shape[1]), np.float32)
            result[done : done + len(vectors)] = vectors
            done += len(vectors)
        return result


class TruncatedBackend(EmbeddingBackend):
    """Another backend, of whose embeddings the first dimensions are kept, scaled to length 1.

    Args:
        backend: The other one.
        dim: How many dimensions.
    """

    def __init__(self, backend: EmbeddingBackend, dim: int):
        self.backend, self.dim = backend, dim
        self.kind, self.address = backend.kind, backend.address
        self.view, self.dimension = backend.view, backend.dimension

    def checksum(self) -> str:
        """How many dimensions are kept, and that of the other one."""
        return f"{self.dim} dimensions of {self.backend.checksum()}"

    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """See `EmbeddingBackend.stream`."""
        return (truncate(vectors, self.dim) for vectors in self.backend.stream(dataset, batch_size, first))

    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `EmbeddingBackend.stream_readable`."""
        found = self.backend.stream_readable(dataset, batch_size)
        return ((rows, truncate(vectors, self.dim)) for rows, vectors in found)


class ImageRefused(Exception):
    """The model cannot take the images of a request; the message says why."""


class EncodedImagesBackend(EmbeddingBackend):
    """A backend that takes encoded images, as a client would send them."""

    @abc.abstractmethod
    def request(self, encoded_images: list[bytes]) -> np.ndarray:
        """(B, d) embeddings of B encoded images.

        Raises:
            ImageRefused: One of the images cannot be decoded.
            UserError: The model is not available.
        """

    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """See `EmbeddingBackend.stream`."""
        self.check_input(dataset)
        images = dataset.images
        for start in range(first, len(images), batch_size):
            rows = range(start, min(start + batch_size, len(images)))
            batch = [encoded_image(images, row) for row in rows]
            try:
                vectors = self.request(batch)
            except ImageRefused as error:
                raise self._blamed(error, images, rows, batch) from error
            yield checked_vectors(vectors, len(batch), self.address)

    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `EmbeddingBackend.stream_readable`."""
        for rows, batch in readable_batches(dataset.images, batch_size, bytes):
            vectors, accepted = self.request_each(batch)
            if accepted.any():
                yield rows[accepted], checked_vectors(vectors[accepted], accepted.sum(), self.address)

    def request_each(self, encoded_images: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(B, d) embeddings of B encoded images, anything where there is none, and (B,) bool whether there is one.

        Raises:
            UserError: The model is not available.
        """
        try:
            return self.request(encoded_images), np.ones(len(encoded_images), bool)
        except ImageRefused:
            if len(encoded_images) == 1:
                return np.zeros((1, 0), np.float32), np.zeros(1, bool)
        each = [self.request_each([image]) for image in encoded_images]
        dimension = max(vectors.shape[1] for vectors, _ in each)
        rows = [vectors if vectors.size else np.zeros((1, dimension), np.float32) for vectors, _ in each]
        return np.concatenate(rows), np.concatenate([accepted for _, accepted in each])

    def _blamed(self, error: ImageRefused, images: Images, rows: range, batch: list[bytes]) -> UserError:
        """Which image of a refused batch it was, by sending each alone."""
        for row, image in zip(rows, batch, strict=True):
            try:
                self.request([image])
            except ImageRefused as refused:
                return UserError(f"{self.address} refuses {images.place(row)}: {refused}")
        return UserError(f"{self.address} refuses the batch of {images.place(rows[0])}: {error}")


def checked_vectors(vectors: np.ndarray, count: int, address: str) -> np.ndarray:
    """Return what a model answered, as (count, d) float32.

    Raises:
        UserError: It is not one vector per image.
    """
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != count or vectors.dtype.kind != "f":
        raise UserError(f"{address} must give floats ({count}, d); it gave {vectors.dtype} of shape {vectors.shape}")
    return vectors.astype(np.float32)


def encoded_image(images: Images, index: int) -> bytes:
    """Return the encoded bytes of one image.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return images.encoded(index)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"{images.place(index)} cannot be read: {access_fault(error)}") from error


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files below a folder, as `"sha256:..."`."""
    if path.is_file():
        return f"sha256:{files.sha256_of(path)}"
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
        (M,) which images of the set could be read, ascending, their (M, d) float32 embeddings, and what is wrong with
        the others.

    Raises:
        UserError: An embedding is not finite; as the backend.

    Example:
        >>> images = tfdml.data.EncodedImages((jpeg, jpeg[:300]), ("1.jpg", "2.jpg"))
        >>> dataset = tfdml.data.ImageDataset("cars", "test", images, [0, 0], {0: "coupe"})
        >>> backend = tfdml.embeddings.load_backend("models/cars_jrd")
        >>> rows, vectors, faults = embed_readable(backend, dataset, batch_size=100)
        >>> [str(fault) for fault in faults]
        ['2.jpg: truncated JPEG (no end-of-image marker)']
    """
    found = list(backend.stream_readable(dataset, batch_size))
    rows = np.concatenate([rows for rows, _ in found]) if found else np.zeros(0, np.int64)
    vectors = np.concatenate([vectors for _, vectors in found]) if found else np.zeros((0, 0), np.float32)
    diverged = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(diverged):
        raise UserError(f"the embedding of {dataset.images.name(rows[diverged[0]])} holds NaN or infinite values")
    left_out = np.setdiff1d(np.arange(len(dataset)), rows)
    known = {fault.index: fault for fault in find_faults(dataset.images, left_out)}
    # One may be readable again by now.
    faults = [known.get(i) or ImageError(i, dataset.images.place(i), "cannot be decoded") for i in left_out.tolist()]
    return rows, vectors, faults


# Of the room that a crop has, in halves from the top and from the left: the centre, and the four corners.
_PLACES = {1: ((1, 1),), 5: ((1, 1), (0, 0), (0, 2), (2, 0), (2, 2))}


@dataclasses.dataclass(frozen=True)
class ViewTransform(EvaluationTransform):
    """An evaluation view whose crop lies elsewhere, or is mirrored.

    Args:
        top: Halves of the room that are above the crop: 0, 1 or 2.
        left: Halves of the room that are to its left.
        mirrored: Whether left and right change places after the crop.

    Example:
        >>> ViewTransform(resize=40, image_size=32, top=0, left=2)(tf.zeros((40, 60, 3), tf.uint8)).shape
        TensorShape([32, 32, 3])
    """

    top: int = 1
    left: int = 1
    mirrored: bool = False

    def place(self, size: tuple) -> list:
        """Return the top and left edge of the crop in a resized image of this height and width."""
        return [
            (edge - self.image_size) * halves // 2 for edge, halves in zip(size, (self.top, self.left), strict=True)
        ]

    def finish(self, part: tf.Tensor, window: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """See `EvaluationTransform.finish`."""
        if self.resize_mode == "pad":
            return self(part)
        view = super().finish(part, window, size)
        return tf.reverse(view, [-2]) if self.mirrored else view

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """See `EvaluationTransform.__call__`."""
        views = super().__call__(images)
        return tf.reverse(views, [-2]) if self.mirrored else views


@dataclasses.dataclass(frozen=True)
class Views:
    """Which views of an image are embedded: f = sum_v f_v, scaled to length 1, over crops and, with `flip`, their
    mirror images.

    Args:
        flip: Whether each crop is also embedded mirrored.
        crops: 1: the centre; 5: the four corners too, where `resize` leaves room around `image_size`.

    Raises:
        ValueError: `crops` is neither.

    Example:
        >>> len(Views(flip=True, crops=5).of(EvaluationTransform(resize=256, image_size=224)))
        10

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012, sec. 4.1.
    """

    flip: bool = True
    crops: int = 1

    def __post_init__(self):
        boolean("flip", self.flip)
        if integer("crops", self.crops, at_least=1) not in _PLACES:
            raise ValueError(f"crops must be 1 or 5, not {self.crops}")

    def of(self, transform: EvaluationTransform) -> list[ViewTransform]:
        """Return the views, that of the transform itself first.

        Raises:
            UserError: Several crops are asked for and the image is not resized to more than one.
        """
        if self.crops > 1 and transform.resize == transform.image_size:
            raise UserError(f"views(crops={self.crops}): images of {transform.resize} px leave no room for other crops")
        plain = {field.name: getattr(transform, field.name) for field in dataclasses.fields(EvaluationTransform)}
        mirrored = (False, True) if self.flip else (False,)
        return [
            ViewTransform(**plain, top=top, left=left, mirrored=m)
            for top, left in _PLACES[self.crops]
            for m in mirrored
        ]


def embed_views(backend: EmbeddingBackend, dataset: ImageDataset, batch_size: int, views: Views) -> np.ndarray:
    """Return the averaged embeddings of a data set; a pass for each view.

    Args:
        backend: A Keras embedder, LiteRT or ONNX file; a SavedModel has its one view inside.
        dataset: The images.
        batch_size: B.
        views: Which.

    Returns:
        (N, d) float32 of length 1; 0 where the views cancel.

    Raises:
        UserError: The model has one view, or there is no room for crops; as `EmbeddingBackend.embed`.
    """
    transform = getattr(backend, "transform", None)
    if not isinstance(transform, EvaluationTransform) or backend.dimension:
        raise UserError(f"{backend.address} has one view: name a run on images, or its .keras, .tflite or .onnx file")
    total: Any = np.float32(0)
    for view in views.of(transform):
        other = copy.copy(backend)
        other.transform = view  # type: ignore[attr-defined]
        total = total + other.embed(dataset, batch_size)
    return total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), np.finfo(np.float32).tiny)
