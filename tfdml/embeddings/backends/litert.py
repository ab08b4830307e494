"""A LiteRT (TensorFlow Lite) file, run by its interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends.view_file import ViewFileEmbedder
from tfdml.errors import UserError, short_message


class LiteRTEmbedder(ViewFileEmbedder):
    """A .tflite file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to float embeddings.

    Args: those of `ViewFileEmbedder`.

    Raises:
        UserError: The file is no such model, its view is not known, or LiteRT is not installed.
    """

    kind = "litert"

    def _open(self, threads: int) -> list[int]:
        self._interpreter = _interpreter(self.path, threads)
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._input, self._output = inputs[0], _embedding(outputs)
        if self._input["dtype"] != np.uint8 or self._output is None or self._output["dtype"] != np.float32:
            raise self._wrong_types()
        return self._input["shape_signature"].tolist() if len(inputs) == 1 else []

    def _run(self, images: np.ndarray) -> np.ndarray:
        if self._interpreter.get_input_details()[0]["shape"][0] != len(images):
            self._interpreter.resize_tensor_input(self._input["index"], images.shape)
            self._interpreter.allocate_tensors()
        self._interpreter.set_tensor(self._input["index"], images)
        self._interpreter.invoke()
        return self._interpreter.get_tensor(self._output["index"])


def _interpreter(path: Path, threads: int) -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        if not hasattr(tf, "lite"):
            raise UserError("a .tflite file needs LiteRT: pip install 'tfdml[litert]'") from None
        Interpreter = tf.lite.Interpreter
    try:
        interpreter = Interpreter(model_path=str(path), num_threads=threads)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"`model={path}` cannot be loaded as a .tflite file: {short_message(error, 'last')}") from error
    return interpreter


def _embedding(outputs: list[dict[str, Any]]) -> Any:
    """The output that is the embedding: the only one, or the only one of two axes so named."""
    if len(outputs) > 1:
        outputs = [output for output in outputs if "embedding" in output["name"]]
    return outputs[0] if len(outputs) == 1 else None
