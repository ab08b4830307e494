"""A LiteRT (TensorFlow Lite) file, run by its interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.augmentation.evaluation import EvaluationTransform, as_color
from tfdml.data.augmentation.resizing import BLACK
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches, explain_failure
from tfdml.data.readable_views import readable_views
from tfdml.embeddings.backends.base import EmbeddingBackend, checked_vectors, checksum_of
from tfdml.embeddings.backends.model_card import CARD, compare_with_card, view_of_card
from tfdml.errors import UserError, short_message


class LiteRTEmbedder(EmbeddingBackend):
    """A .tflite file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to float embeddings.

    Args:
        path: The file.
        resize: Pixels to which images are resized before the central crop; 0: as the export's model card says, which
            lies beside the file or in the folder above.
        resize_mode: How they are resized; empty: as the card says, else `"shorter"`.
        image_size: The size of the crop, checked against the file's input; 0: not checked.
        pad_color: The colour around the image in the square of `resize_mode="pad"`; empty: as the card says, else
            black.
        threads: Of the interpreter; 0: as many as there are CPUs.

    Raises:
        UserError: The file is no such model, or its view is not known.
    """

    kind = "litert"

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
        if self.path.is_file():
            compare_with_card(self.path)
        self._interpreter = _interpreter(self.path, threads)
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._input, self._output = inputs[0], _embedding(outputs)
        shape = self._input["shape_signature"].tolist()
        if len(inputs) != 1 or len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2] or shape[1] < 1:
            raise UserError(f"`model={path}`: its input must be square images (B, S, S, 3), not {shape}")
        if self._input["dtype"] != np.uint8 or self._output is None or self._output["dtype"] != np.float32:
            raise UserError(f"`model={path}`: it must take uint8 images and give one float32 output, the embedding")
        if image_size not in (0, shape[1]):
            raise UserError(f"`image_size={image_size}`, but {path} takes images of {shape[1]} px")
        self._rows = 0 if shape[0] < 0 else shape[0]
        self.transform = _view(self.path, shape[1], resize, resize_mode, pad_color)
        self.view = self.transform.get_config()

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
        if not self._rows and self._interpreter.get_input_details()[0]["shape"][0] != rows:
            self._interpreter.resize_tensor_input(self._input["index"], (rows, *images.shape[1:]))
            self._interpreter.allocate_tensors()
        parts = []
        for start in range(0, len(images), rows):
            batch = images[start : start + rows]
            missing = rows - len(batch)
            filled = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)]) if missing else batch
            self._interpreter.set_tensor(self._input["index"], filled)
            self._interpreter.invoke()
            parts.append(self._interpreter.get_tensor(self._output["index"])[: len(batch)])
        return np.concatenate(parts)


def _interpreter(path: Path, threads: int) -> Any:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        if not hasattr(tf, "lite"):
            raise UserError("a .tflite file needs LiteRT: pip install 'tfdml[litert]'") from None
        Interpreter = tf.lite.Interpreter
    try:
        interpreter = Interpreter(model_path=str(path), num_threads=threads or os.cpu_count())
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"`model={path}` cannot be loaded as a .tflite file: {short_message(error, 'last')}") from error
    return interpreter


def _embedding(outputs: list[dict[str, Any]]) -> Any:
    """The output that is the embedding: the only one, or the only one of two axes so named."""
    if len(outputs) > 1:
        outputs = [output for output in outputs if "embedding" in output["name"]]
    return outputs[0] if len(outputs) == 1 else None


def _view(path: Path, image_size: int, resize: int, resize_mode: str, pad_color: str) -> EvaluationTransform:
    stored = view_of_card(path.parent.parent / CARD) or view_of_card(path.parent / CARD)
    if stored is None and not resize:
        raise UserError(
            f"`model={path}`: a .tflite file sees images after resizing and the crop, and there is no {CARD} that "
            "says how: pass `resize` and, unless the shorter side is meant, `resize_mode`"
        )
    if stored is not None and stored["image_size"] != image_size:
        raise UserError(
            f"`model={path}` takes images of {image_size} px, but its {CARD} states {stored['image_size']} px"
        )
    known = {"resize_mode": "shorter", "pad_color": BLACK, **(stored or {})}
    color = as_color(pad_color or known["pad_color"])
    return EvaluationTransform(resize or known["resize"], image_size, resize_mode or known["resize_mode"], color)
