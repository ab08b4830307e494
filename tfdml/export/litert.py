"""LiteRT (TensorFlow Lite) files: uint8 views in, unit vectors out, in four precisions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.errors import UserError, short_message
from tfdml.export.litert_tail import finish_int8, read_model
from tfdml.export.network import Network, frozen_module, quiet
from tfdml.models import AnyEmbedder, AttentionEnsemble, Embedder, MomentEmbedder, WhitenedEmbedder

PRECISIONS = ("float32", "float16", "dynamic_range", "int8")
_PIXEL_RANGE = (0, 255)
_WITH_WEIGHTS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
_BATCH_SIZE = 32


def convert_litert(
    embedder: AnyEmbedder, precision: str = "float32", representative: np.ndarray | None = None
) -> bytes:
    """The bytes of a .tflite file from `images` (B, S, S, 3) uint8 to `embedding` (B, d) float32 of length 1.

    The images are views: after resizing and the crop, which the model card describes. B is free; the interpreter is
    resized to it. The signature is `serving_default`.

    - `"float32"`: weights and arithmetic;
    - `"float16"`: weights in half precision, half the size;
    - `"dynamic_range"`: weights in 8 bits, a scale per channel; activations are quantised as they come;
    - `"int8"`: weights and activations in 8 bits, with ranges measured on `representative` images. The network up to
      the projection is integer arithmetic alone. Its result is made float again, what it is off by on average over
      the images is taken away, and it is divided by its length, which 8 bits would give with errors of percents. Of a
      network that normalises as it goes (LayerNorm: transformers, ConvNeXt) the layers with weights alone are in 8
      bits; normalisations, attention and the sums of branches, which such steps ruin, stay float.

    Args:
        embedder: A built `Embedder`, `AttentionEnsemble` or `MomentEmbedder`.
        precision: One of `PRECISIONS`; `MomentEmbedder` and `WhitenedEmbedder` have no `"int8"`.
        representative: (N, S, S, 3) uint8 views of training images, for `"int8"`; some hundreds are enough.

    Returns:
        The file.

    Raises:
        UserError: The embedder cannot be converted, or images are missing.

    Example:
        >>> model = convert_litert(embedder, "float16")
        >>> pathlib.Path("embedder.tflite").write_bytes(model) == len(model)
        True
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    if precision != "int8":
        return _converted(_module(embedder, embedder.image_size), precision)
    if isinstance(embedder, MomentEmbedder):
        raise UserError(
            "int8 is too coarse for products of projections, of which moments are made (cosines down to 0.5 were "
            "measured): export an embedder with all moments as litert_dynamic_range, which is as small"
        )
    if isinstance(embedder, WhitenedEmbedder):
        raise UserError(
            "int8 ends with the projection, and the whitening comes behind its normalisation: export a whitened "
            "embedder as litert_dynamic_range, which is as small"
        )
    if representative is None or not len(representative):
        raise UserError("int8 needs representative images: pass views of some hundreds of training images")
    module = _module(_before_normalisation(embedder), embedder.image_size, tf.float32)
    if "RSQRT" in _operators(_converted(module, "float32")):
        return _in_part(_module(embedder, embedder.image_size), representative)
    file = _converted(module, precision, representative)
    heads = embedder.heads if isinstance(embedder, AttentionEnsemble) else 1
    return finish_int8(file, _mean_error(file, module, representative), heads)


def _module(network: Network, size: int, dtype: tf.DType = tf.uint8) -> tf.Module:
    if not isinstance(network, MomentEmbedder):
        return frozen_module(network, size, dtype)
    # LiteRT's variables of lists, which a loop over blocks of moments would need, cannot be made constants.
    layer = network.moments.moments
    layer.in_blocks = False
    try:
        return frozen_module(network, size, dtype)
    finally:
        layer.in_blocks = True


def _before_normalisation(embedder: Embedder) -> Network:
    def network(images: tf.Tensor) -> tf.Tensor:
        # The range is stated, not measured: clients send pixels as they are, with scale 1 and zero point 0.
        images = tf.quantization.fake_quant_with_min_max_args(images, *_PIXEL_RANGE)
        return embedder.represent(images, training=False)["projection"]

    return network


def _converter(module: tf.Module) -> tf.lite.TFLiteConverter:
    return tf.lite.TFLiteConverter.from_concrete_functions([module.embed.get_concrete_function()], module)


def _converted(module: tf.Module, precision: str, representative: np.ndarray | None = None) -> bytes:
    converter = _converter(module)
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if representative is not None:
        images = representative
        converter.representative_dataset = lambda: ([image[None].astype(np.float32)] for image in images)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = tf.uint8
        converter.inference_output_type = tf.float32
    return _made(converter.convert, precision)


def _in_part(module: tf.Module, representative: np.ndarray) -> bytes:
    """In 8 bits where there are weights, in float32 elsewhere."""
    floats = set(_operator_names().values()) - _WITH_WEIGHTS
    converter = _converter(module)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([image[None]] for image in representative)

    def convert() -> bytes:
        # TensorFlow's way to leave operations out of quantisation.
        options = tf.lite.experimental.QuantizationDebugOptions(denylisted_ops=sorted(floats))
        made = tf.lite.experimental.QuantizationDebugger(converter=converter, debug_options=options)
        return made.get_nondebug_quantized_model()

    return _made(convert, "int8")


def _made(convert: Callable[[], bytes], precision: str) -> bytes:
    try:
        with quiet():
            file = bytes(convert())
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise UserError(
            f"LiteRT cannot convert this embedder to {precision}: {short_message(error, 'first')}"
        ) from error
    # A conversion that failed within can return an empty model.
    if not read_model(file).signatureDefs:
        raise UserError(f"LiteRT's converter made no model of this embedder for {precision}")
    return file


def _operators(file: bytes) -> set[str]:
    """The names of the operations of a .tflite file."""
    names = _operator_names()
    return {names[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in read_model(file).operatorCodes}


def _operator_names() -> dict[int, str]:
    from tensorflow.lite.python import schema_py_generated as schema

    return {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}


def _mean_error(file: bytes, module: tf.Module, views: np.ndarray) -> np.ndarray:
    """By how much a quantised network is off, (d,), on average over views."""
    run = _interpreter(file).get_signature_runner()
    total: Any = 0.0
    for first in range(0, len(views), _BATCH_SIZE):
        batch = views[first : first + _BATCH_SIZE]
        exact = module.embed(tf.cast(batch, tf.float32))["embedding"].numpy()
        total += (run(images=batch)["embedding"] - exact).sum(axis=0, dtype=np.float64)
    return (total / len(views)).astype(np.float32)


def _interpreter(file: bytes) -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        with quiet():
            return tf.lite.Interpreter(model_content=file)
    return Interpreter(model_content=file, num_threads=os.cpu_count())
