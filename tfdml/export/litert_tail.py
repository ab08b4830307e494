"""The last step of an int8 LiteRT model, in float32: its vectors brought to length 1."""

from __future__ import annotations

import copy
from typing import Any

import flatbuffers
import numpy as np

from tfdml.errors import UserError


def finish_int8(file: bytes, error: np.ndarray, heads: int = 1) -> bytes:
    """A .tflite file of an int8 network, whose float output x becomes (x - error) / |x - error|, in float32.

    The converter would quantise the normalisation too, and lengths would be off by several percent; so it converts the
    network without it. `error` is what quantisation adds to every vector alike.

    Args:
        file: A model from uint8 images to vectors (B, d) float32, whose last step is to dequantise.
        error: (d,) float32.
        heads: M; with several, each d/M components are normalised on their own first.

    Returns:
        The file, whose output is `embedding`.

    Raises:
        UserError: The model does not take pixels as they are.

    Source: the correction is that of Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
    Correction", ICCV 2019, sec. 4.2, measured on images, of the last layer alone.
    """
    from tensorflow.lite.python import schema_py_generated as schema

    model = read_model(file)
    graph = model.subgraphs[0]
    (given,), (last,) = graph.inputs, graph.outputs
    pixels = graph.tensors[given].quantization
    if graph.tensors[given].type != schema.TensorType.UINT8 or (pixels.scale[0], pixels.zeroPoint[0]) != (1, 0):
        raise UserError("LiteRT's converter did not keep pixels as they are at the input of the int8 model")
    tail = _Tail(model, schema)
    size = graph.tensors[last].shape[-1]
    vectors = tail.subtract(last, error)
    if heads > 1:
        vectors = tail.reshape(vectors, size // heads)
        vectors = tail.normalize(vectors)
        vectors = tail.reshape(vectors, size)
    vectors = tail.normalize(vectors)
    graph.tensors[vectors].name = b"embedding"
    graph.outputs = [vectors]
    for signature in model.signatureDefs:
        for output in signature.outputs:
            output.tensorIndex = vectors
    return write_model(model)


def read_model(file: bytes) -> Any:
    """The tables of a .tflite file."""
    from tensorflow.lite.tools import flatbuffer_utils

    return flatbuffer_utils.convert_bytearray_to_object(bytearray(file))


def write_model(model: Any) -> bytes:
    """The .tflite file of its tables, equal vectors written once.

    Of a small int8 network an eighth is zero points, a zero of 8 bytes for each channel of each tensor.
    """
    builder = _SharingBuilder(len(model.buffers) << 10)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


class _SharingBuilder(flatbuffers.Builder):
    def __init__(self, size: int):
        super().__init__(size)
        self._written: dict[tuple[str, bytes], int] = {}

    def CreateNumpyVector(self, x: np.ndarray) -> int:
        key = (x.dtype.str, x.tobytes())
        if key not in self._written:
            self._written[key] = super().CreateNumpyVector(x)
        return self._written[key]


class _Tail:
    """Operations put behind a model's last; tensors go by their index."""

    def __init__(self, model: Any, schema: Any):
        self.model, self.graph, self.schema = model, model.subgraphs[0], schema

    def normalize(self, vectors: int) -> int:
        kind, options = self.schema.BuiltinOptions.L2NormOptions, self.schema.L2NormOptionsT()
        code = self.schema.BuiltinOperator.L2_NORMALIZATION
        return self._operator(code, [vectors], self.graph.tensors[vectors].shape[-1], kind, options)

    def subtract(self, vectors: int, constant: np.ndarray) -> int:
        inputs = [vectors, self._constant(constant.astype(np.float32), self.schema.TensorType.FLOAT32)]
        kind, options = self.schema.BuiltinOptions.SubOptions, self.schema.SubOptionsT()
        return self._operator(self.schema.BuiltinOperator.SUB, inputs, constant.size, kind, options)

    def reshape(self, vectors: int, size: int) -> int:
        """To rows of `size`, as many as there are."""
        inputs = [vectors, self._constant(np.array([-1, size], np.int32), self.schema.TensorType.INT32)]
        kind, options = self.schema.BuiltinOptions.ReshapeOptions, self.schema.ReshapeOptionsT()
        return self._operator(self.schema.BuiltinOperator.RESHAPE, inputs, size, kind, options)

    def _constant(self, value: np.ndarray, kind: int) -> int:
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(value.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        tensor = self.schema.TensorT()
        tensor.name = f"constant_{len(self.graph.tensors)}".encode()
        tensor.type, tensor.shape, tensor.buffer = kind, list(value.shape), len(self.model.buffers) - 1
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def _operator(self, builtin: int, inputs: list[int], size: int, kind: int, options: Any) -> int:
        code = self.schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = builtin
        code.version = 1
        self.model.operatorCodes.append(code)
        result = copy.copy(self.graph.tensors[inputs[0]])
        result.name = f"tail_{len(self.graph.tensors)}".encode()
        result.shape, result.shapeSignature = [1, size], [-1, size]
        self.graph.tensors.append(result)
        operator = self.schema.OperatorT()
        operator.opcodeIndex = len(self.model.operatorCodes) - 1
        operator.inputs, operator.outputs = inputs, [len(self.graph.tensors) - 1]
        operator.builtinOptionsType, operator.builtinOptions = kind, options
        self.graph.operators.append(operator)
        return operator.outputs[0]
