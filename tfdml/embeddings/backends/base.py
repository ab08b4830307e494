"""The interface of everything that embeds images."""

from __future__ import annotations

import abc
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import Images
from tfdml.errors import UserError


class EmbeddingBackend(abc.ABC):
    """A model, wherever it is, that embeds a data set batch by batch.

    Attributes:
        kind: What it is: `"keras"`, `"saved_model"`, `"litert"`, `"grpc"` or `"rest"`.
        address: Its path or URL.
        view: The configuration of the `EvaluationTransform` in which it sees images; None where only the model knows.
    """

    kind: str
    address: str
    view: dict[str, Any] | None = None

    @abc.abstractmethod
    def checksum(self) -> str:
        """What identifies this model: `"sha256:..."` of its files, or the version that an endpoint serves."""

    @abc.abstractmethod
    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """The embeddings of one batch after another.

        Args:
            dataset: The images.
            batch_size: B.
            first: Where to begin; at a multiple of B the batches are those of a pass from the start, bit by bit.

        Yields:
            (B, d) float32, in the data set's order.

        Raises:
            UserError: An image cannot be read or is refused; it is named.
        """

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""
        result, done = np.zeros((0, 0), np.float32), 0
        for vectors in self.stream(dataset, batch_size):
            if not done:
                result = np.empty((len(dataset), vectors.shape[1]), np.float32)
            result[done : done + len(vectors)] = vectors
            done += len(vectors)
        return result


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
        images = dataset.images
        for start in range(first, len(images), batch_size):
            rows = range(start, min(start + batch_size, len(images)))
            batch = [encoded_image(images, row) for row in rows]
            try:
                vectors = self.request(batch)
            except ImageRefused as error:
                raise self._blamed(error, images, rows, batch) from error
            yield checked_vectors(vectors, len(batch), self.address)

    def _blamed(self, error: ImageRefused, images: Images, rows: range, batch: list[bytes]) -> UserError:
        """Which image of a refused batch it was, by sending each alone."""
        for row, image in zip(rows, batch, strict=True):
            try:
                self.request([image])
            except ImageRefused as refused:
                return UserError(f"{self.address} refuses {images.place(row)}: {refused}")
        return UserError(f"{self.address} refuses the batch of {images.place(rows[0])}: {error}")


def checked_vectors(vectors: np.ndarray, count: int, address: str) -> np.ndarray:
    """What a model answered, as (count, d) float32.

    Raises:
        UserError: It is not one vector per image.
    """
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != count or vectors.dtype.kind != "f":
        raise UserError(
            f"{address} must give (images, dimensions) floats, here ({count}, d); it gave {vectors.dtype} of shape "
            f"{vectors.shape}"
        )
    return vectors.astype(np.float32)


def short_reason(error: BaseException | str) -> str:
    r"""One line of what TensorFlow says over many: what an assertion says, or the last line before it names its graph.

    Example:
        >>> short_reason("Graph execution error:\n\nDetected at node a\nInvalid PNG data\n\t [[{{node a}}]]")
        'Invalid PNG data'
        >>> short_reason("assertion failed: [image_bytes[0] of 1: no bytes]\n\t [[{{node b}}]]")
        'image_bytes[0] of 1: no bytes'
    """
    text = str(getattr(error, "message", None) or error)
    before = text.partition("[[{{node")[0]
    asserted = re.search(r"assertion failed: \[(.+)\]", before)
    if asserted:
        return " ".join(asserted[1].split())[:300]
    lines = [" ".join(line.split()) for line in before.splitlines() if line.strip()]
    return lines[-1][:300] if lines else " ".join(text.split())[:300] or type(error).__name__


def encoded_batches(images: Images, batch_size: int) -> Iterator[list[bytes]]:
    """The encoded bytes of images, in order; arrays are encoded as PNG, which loses nothing."""
    for first in range(0, len(images), batch_size):
        yield [encoded_image(images, index) for index in range(first, min(first + batch_size, len(images)))]


def encoded_image(images: Images, index: int) -> bytes:
    """The encoded bytes of one image.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return images.encoded(index)
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
        raise UserError(f"{images.place(index)} cannot be read: {reason}") from error


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files below a folder, as `"sha256:..."`."""
    if path.is_file():
        return f"sha256:{storage.sha256_of(path)}"
    digest = hashlib.sha256()
    for part in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        digest.update(f"{part.relative_to(path).as_posix()}\0{checksum_of(part)}\0".encode())
    return f"sha256:{digest.hexdigest()}"
