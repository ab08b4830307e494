"""An ONNX file, run by ONNX Runtime."""

from __future__ import annotations

import numpy as np

from tfdml.embeddings.backends.view_file import ViewFileEmbedder
from tfdml.errors import UserError, short_message


class OnnxEmbedder(ViewFileEmbedder):
    """An .onnx file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to float embeddings.

    Args: those of `ViewFileEmbedder`.

    Raises:
        UserError: The file is no such model, its view is not known, or ONNX Runtime is not installed.
    """

    kind = "onnx"

    def _open(self, threads: int) -> list[int]:
        try:
            import onnxruntime
        except ImportError:
            raise UserError("an .onnx file needs ONNX Runtime: pip install 'tfdml[onnx]'") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own kinds derive from nothing narrower
            raise UserError(
                f"`model={self.path}` cannot be loaded as an .onnx file: {short_message(error, 'last')}"
            ) from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(outputs) > 1:
            outputs = [output for output in outputs if "embedding" in output.name]
        types = [given.type for given in (*inputs, *outputs)]
        if types != ["tensor(uint8)", "tensor(float)"]:
            raise self._wrong_types()
        self._input, self._output = inputs[0].name, outputs[0].name
        return [size if isinstance(size, int) else 0 for size in inputs[0].shape]

    def _run(self, images: np.ndarray) -> np.ndarray:
        return self._session.run([self._output], {self._input: images})[0]
