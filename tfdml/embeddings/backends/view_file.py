"""A model in one file that sees views: images after resizing and the crop, which the file itself does not know."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches, readable_views
from tfdml.data.resizing import BLACK
from tfdml.data.transforms import EvaluationTransform, as_color
from tfdml.embeddings.backends.base import EmbeddingBackend, checked_vectors, checksum_of
from tfdml.embeddings.backends.model_card import CARD, compare_with_card, view_of_card
from tfdml.errors import UserError


class ViewFileEmbedder(EmbeddingBackend):
    """A file from (1 or B, S, S, 3) uint8 views to (1 or B, d) float embeddings.

    Args:
        path: The file.
        resize: Pixels to which images are resized before the central crop; 0: as the export's model card says, which
            lies beside the file or in the folder above.
        resize_mode: How they are resized; empty: as the card says, else `"shorter"`.
        image_size: The size of the crop, checked against the file's input; 0: not checked.
        pad_color: The colour around the image in the square of `resize_mode="pad"`; empty: as the card says, else
            black.
        threads: That compute; 0: as many as there are CPUs.

    Raises:
        UserError: The file is no such model, or its view is not known.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        resize: int = 0,
        resize_mode: str = "",
        image_size: int = 0,
        pad_color: str = "",
        threads: int = 0,
    ):
        self.path = Path(path)
        self.address = str(path)
        if not self.path.is_file():
            raise UserError(f"there is no file {path}")
        compare_with_card(self.path)
        shape = self._open(threads or os.cpu_count() or 1)
        if len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2] or shape[1] < 1:
            raise UserError(f"`model={path}`: its input must be square images (B, S, S, 3), not {shape}")
        if image_size not in (0, shape[1]):
            raise UserError(f"`image_size={image_size}`, but {path} takes images of {shape[1]} px")
        # How many images it takes at once; 0 for any number.
        self._rows = max(shape[0], 0)
        self.transform = _view(self.path, shape[1], resize, resize_mode, pad_color)
        self.view = self.transform.get_config()

    @abc.abstractmethod
    def _open(self, threads: int) -> list[int]:
        """Load the file; the shape of its input, at most 0 where it is free."""

    @abc.abstractmethod
    def _run(self, images: np.ndarray) -> np.ndarray:
        """The vectors of (B, S, S, 3) uint8 images, as many as the file takes at once."""

    def checksum(self) -> str:
        """Of the file."""
        return checksum_of(self.path)

    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """See `EmbeddingBackend.stream`."""
        rest = dataset.take(np.arange(first, len(dataset))) if first else dataset
        try:
            for images, _ in evaluation_batches(rest, self.transform, batch_size):
                yield checked_vectors(self._embed(images.numpy()), len(images), self.address)
        except tf.errors.OpError as error:
            raise (explain_failure(error, rest, leave_out="`bad_images='skip'`") or error) from None

    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `EmbeddingBackend.stream_readable`."""
        for images, rows in readable_views(dataset.images, self.transform, batch_size):
            yield rows, checked_vectors(self._embed(images), len(images), self.address)

    def _embed(self, images: np.ndarray) -> np.ndarray:
        rows = self._rows or len(images)
        parts = []
        for start in range(0, len(images), rows):
            batch = images[start : start + rows]
            missing = rows - len(batch)
            filled = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)]) if missing else batch
            parts.append(self._run(filled)[: len(batch)])
        return np.concatenate(parts)

    def _wrong_types(self) -> UserError:
        return UserError(f"`model={self.path}`: it must take uint8 images and give one float32 output, the embedding")


def _view(path: Path, image_size: int, resize: int, resize_mode: str, pad_color: str) -> EvaluationTransform:
    stored = view_of_card(path.parent.parent / CARD) or view_of_card(path.parent / CARD)
    if stored is None and not resize:
        raise UserError(
            f"`model={path}`: such a file sees images after resizing and the crop, and there is no {CARD} that "
            "says how: pass `resize` and, unless the shorter side is meant, `resize_mode`"
        )
    if stored is not None and stored["image_size"] != image_size:
        raise UserError(
            f"`model={path}` takes images of {image_size} px, but its {CARD} states {stored['image_size']} px"
        )
    known = {"resize_mode": "shorter", "pad_color": BLACK, **(stored or {})}
    color = as_color(pad_color or known["pad_color"])
    return EvaluationTransform(resize or known["resize"], image_size, resize_mode or known["resize_mode"], color)
