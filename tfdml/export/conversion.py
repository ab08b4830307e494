"""LiteRT (TensorFlow Lite) and ONNX files of an embedder: uint8 views in, unit vectors out."""

import copy
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.tools import flatbuffer_utils

from tfdml.backbones import TokenBackbone
from tfdml.embeddings.backends import litert_interpreter
from tfdml.embeddings.compute import slices
from tfdml.errors import ERROR_TEXT, UserError, check_choice, user_errors
from tfdml.export.options import PRECISIONS
from tfdml.export.saved_model import frozen_module, quiet, view_spec
from tfdml.models import (
    AnyEmbedder,
    AttentionEnsemble,
    Embedder,
    Head,
    MomentEmbedder,
    TruncatedEmbedder,
)
from tfdml.workarounds import litert_schema

_PIXEL_RANGE = (0, 255)
_BATCH_SIZE = 32
_AS_SMALL = "export litert_dynamic_range, which is as small"
# The ONNX operator set: old enough for runtimes in the field, new enough for every operation in
# use.
_OPSET = 17


def convert_litert(
    embedder: AnyEmbedder, precision: str = "float32", representative: np.ndarray | None = None
) -> bytes:
    """Return the bytes of a .tflite file from `images` (B, S, S, 3) uint8 to `embedding` (B, d)
    float32 of length 1.

    A `Head` takes `vectors` (B, D) float32.

    The images are views: after resizing and the crop, which the model card describes. B is free;
    the interpreter is resized to it. The signature is `serving_default`.

    - `"float32"`: weights and arithmetic;
    - `"float16"`: weights in half precision, half the size;
    - `"dynamic_range"`: weights in 8 bits, a scale per channel; activations are quantized as they
      come;
    - `"int8"`: weights and activations in 8 bits, with ranges measured on `representative` images.
      The network up to the projection is integer arithmetic alone. Its result is made float again,
      its mean error over the images is subtracted, and it is divided by its length, which 8 bits
      would give with errors of percents.

    Args:
        embedder: A built `Embedder`, `AttentionEnsemble` or `MomentEmbedder`.
        precision: One of `PRECISIONS`; a head, an ensemble, moments, a whitening, cut vectors and a
            network that normalizes as it goes (LayerNorm: transformers, ConvNeXt) have no `"int8"`.
        representative: (N, S, S, 3) uint8 views of training images, for `"int8"`; some hundreds are
            enough.

    Returns:
        The file.

    Raises:
        UserError: The embedder cannot be converted, or images are missing.

    Example:
        >>> model = convert_litert(embedder, "float16")
        >>> import pathlib
        >>> pathlib.Path("embedder.tflite").write_bytes(model) == len(model)
        True
    """
    check_choice("precision", precision, PRECISIONS)
    if precision != "int8":
        return _converted(_module(embedder), precision)
    if isinstance(embedder, Head | AttentionEnsemble) or not isinstance(embedder, Embedder):
        raise UserError(
            f"int8 takes no moments, whitening, head or ensemble, and no cut vectors: {_AS_SMALL}"
        )
    if representative is None or not len(representative):
        raise UserError(
            "int8 needs representative images: pass views of some hundreds of training images"
        )

    def projection(images: tf.Tensor) -> tf.Tensor:
        # The range is stated, not measured: clients send pixels as they are, with scale 1 and zero
        # point 0.
        images = tf.quantization.fake_quant_with_min_max_args(images, *_PIXEL_RANGE)
        return embedder.represent(images, training=False)["projection"]

    module = frozen_module(projection, embedder.view_shape, tf.float32)
    codes = _read_model(_converted(module, "float32")).operatorCodes
    if litert_schema().BuiltinOperator.RSQRT in {code.builtinCode for code in codes}:
        raise UserError(
            f"int8 takes no network that normalizes over channels, as transformers do: {_AS_SMALL}"
        )
    file = _converted(module, precision, representative)
    return finish_int8(file, _mean_error(file, module, representative))


def _module(embedder: AnyEmbedder) -> tf.Module:
    whole = embedder.embedder if isinstance(embedder, TruncatedEmbedder) else embedder
    if not isinstance(whole, MomentEmbedder):
        return frozen_module(embedder, embedder.view_shape)
    # LiteRT's variables of lists, which a loop over blocks of moments would need, cannot be made
    # constants.
    layer = whole.moments.moments
    layer.in_blocks = False
    try:
        return frozen_module(embedder, embedder.view_shape)
    finally:
        layer.in_blocks = True


def _converted(
    module: tf.Module, precision: str, representative: np.ndarray | None = None
) -> bytes:
    # tf.lite is to leave TensorFlow (tensorflow#102071). Keras 3.15 calls this converter too,
    # litert-torch reads PyTorch, and litert-converter 0.5 MLIR: nothing else makes a file of a
    # TensorFlow model.
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [module.embed.get_concrete_function()], module
    )
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if representative is not None:
        converter.representative_dataset = functools.partial(_inputs, representative)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = tf.uint8
        converter.inference_output_type = tf.float32
    kinds = (RuntimeError, ValueError, tf.errors.OpError)
    with (
        user_errors(kinds, f"LiteRT cannot convert to {precision}: {ERROR_TEXT}", keep="first"),
        quiet(),
    ):
        file = bytes(converter.convert())
    # A conversion that failed within can return an empty model.
    if not _read_model(file).signatureDefs:
        raise UserError(f"LiteRT's converter made no model of this embedder for {precision}")
    return file


def _inputs(images: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Yield the inputs of the network, image by image, as the converter wants them."""
    for image in images:
        yield [image[None].astype(np.float32)]


def _read_model(file: bytes) -> Any:
    """Return the tables of a .tflite file."""
    return flatbuffer_utils.convert_bytearray_to_object(bytearray(file))


def _mean_error(file: bytes, module: tf.Module, views: np.ndarray) -> np.ndarray:
    """Return the mean error of a quantized network over views, (d,)."""
    run = litert_interpreter()(
        model_content=file, num_threads=os.cpu_count()
    ).get_signature_runner()
    total: Any = 0.0
    for batch in slices(views, _BATCH_SIZE):
        exact = module.embed(tf.cast(batch, tf.float32))["embedding"].numpy()
        total += (run(images=batch)["embedding"] - exact).sum(axis=0, dtype=np.float64)
    return (total / len(views)).astype(np.float32)


def finish_int8(file: bytes, error: np.ndarray) -> bytes:
    """Return a .tflite file of an int8 network, whose float output x becomes (x - error) / |x -
    error|, in float32.

    The converter would quantize the normalization too, and lengths would be off by several percent;
    so it converts the network without it. `error` is what quantization adds to every vector alike.

    Args:
        file: A model from uint8 images to vectors (B, d) float32, whose last step is to dequantize.
        error: (d,) float32.

    Returns:
        The file, whose output is `embedding`.

    Raises:
        UserError: The model does not take pixels as they are.

    Source: the correction is that of Nagel et al., "Data-Free Quantization Through Weight
    Equalization and Bias Correction", ICCV 2019, sec. 4.2, measured on images, of the last layer
    alone.
    """
    schema = litert_schema()
    model = _read_model(file)
    graph = model.subgraphs[0]
    pixels = graph.tensors[graph.inputs[0]]
    scale = (pixels.quantization.scale[0], pixels.quantization.zeroPoint[0])
    if pixels.type != schema.TensorType.UINT8 or scale != (1, 0):
        raise UserError(
            "LiteRT's converter did not keep pixels as they are at the input of the int8 model"
        )
    offset = _append_constant(model, "mean_error", error.astype(np.float32))
    difference = _append_operation(model, "SUB", "SubOptions", [graph.outputs[0], offset])
    vectors = _append_operation(model, "L2_NORMALIZATION", "L2NormOptions", [difference])
    graph.tensors[vectors].name = b"embedding"
    graph.outputs = [vectors]
    for signature in model.signatureDefs:
        for output in signature.outputs:
            output.tensorIndex = vectors
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def _append_constant(model: Any, name: str, value: np.ndarray) -> int:
    """Add a constant of float32 to a model; return the index of its tensor."""
    schema = litert_schema()
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(value.tobytes(), np.uint8)
    model.buffers.append(buffer)
    tensor = schema.TensorT()
    tensor.name = name.encode()
    tensor.type = schema.TensorType.FLOAT32
    tensor.shape = list(value.shape)
    tensor.buffer = len(model.buffers) - 1
    tensors = model.subgraphs[0].tensors
    tensors.append(tensor)
    return len(tensors) - 1


def _append_operation(model: Any, name: str, options: str, inputs: list[int]) -> int:
    """Add an operation behind the last of a model, whose result is like its first input; return the
    index of the result's tensor.

    Args:
        model: The model.
        name: The operation, as the schema calls it.
        options: The schema's class of its options.
        inputs: Indices of tensors.
    """
    schema = litert_schema()
    graph = model.subgraphs[0]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
    code.version = 1
    model.operatorCodes.append(code)
    result = copy.copy(graph.tensors[inputs[0]])
    result.name = name.lower().encode()
    graph.tensors.append(result)
    operator = schema.OperatorT()
    operator.opcodeIndex = len(model.operatorCodes) - 1
    operator.inputs = inputs
    operator.outputs = [len(graph.tensors) - 1]
    operator.builtinOptionsType = getattr(schema.BuiltinOptions, options)
    operator.builtinOptions = getattr(schema, f"{options}T")()
    graph.operators.append(operator)
    return operator.outputs[0]


def check_onnx() -> None:
    """Raise a `UserError` where the libraries that write and run ONNX files are missing."""
    missing = [
        name
        for name in ("onnx", "tf2onnx", "onnxruntime")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'tfdml[onnx]'", formats="onnx")


def convert_onnx(embedder: AnyEmbedder) -> bytes:
    """Return the bytes of an ONNX file from `images` (B, S, S, 3) uint8 to `embedding` (B, d)
    float32 of length 1.

    The images are views: after resizing and the crop, which the model card describes. B is free. A
    `Head` takes `vectors` (B, D) float32.

    Args:
        embedder: A built embedder.

    Returns:
        The file, of operator set 17.

    Raises:
        UserError: tf2onnx is missing, or cannot convert the embedder.

    Example:
        >>> model = convert_onnx(embedder)
        >>> import pathlib
        >>> pathlib.Path("embedder.onnx").write_bytes(model) == len(model)
        True
    """
    check_onnx()
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)

    spec = view_spec(embedder.view_shape)

    # Not frozen beforehand: tf2onnx knows the loops of the moments only as it finds them itself.
    # But it takes the constant tensors that layers of transformers keep for inputs.
    @tf.function(input_signature=[spec], autograph=False)
    def embed(images: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embedder(images, training=False)}

    if isinstance(getattr(embedder, "backbone", None), TokenBackbone):
        embed = frozen_module(embedder, embedder.view_shape).embed

    def complement_of_erf(graph: Any, node: Any, *_: Any, **__: Any) -> None:
        """1 - erf(x): TensorFlow's exact GELU, which transformers have, uses erfc, and ONNX has no
        such operation."""
        one = graph.make_const(f"{node.name}_one", np.array(1, np.float32)).output[0]
        node.type = "Erf"
        difference = graph.insert_new_node_on_output(
            "Sub", node.output[0], name=f"{node.name}_complement"
        )
        graph.replace_inputs(difference, [one, node.output[0]])

    kinds = (ValueError, RuntimeError, NotImplementedError)
    with user_errors(kinds, f"tf2onnx cannot convert this embedder: {ERROR_TEXT}"), quiet():
        model, _ = tf2onnx.convert.from_function(
            embed,
            input_signature=[spec],
            opset=_OPSET,
            custom_op_handlers={"Erfc": (complement_of_erf, [])},
        )
    return model.SerializeToString()
