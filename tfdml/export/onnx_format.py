"""ONNX files: uint8 views in, unit vectors out."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.backbones import TokenBackbone
from tfdml.errors import UserError, short_message
from tfdml.export.network import frozen_module, quiet
from tfdml.models import AnyEmbedder

# Old enough for runtimes in the field, new enough for every operation in use.
_OPSET = 17


def _complement_of_erf(graph: Any, node: Any, name: str, arguments: list) -> None:
    """1 - erf(x): TensorFlow's exact GELU, which transformers have, uses erfc, and ONNX has no such operation."""
    del name, arguments
    one = graph.make_const(f"{node.name}_one", np.array(1, np.float32)).output[0]
    node.type = "Erf"
    difference = graph.insert_new_node_on_output("Sub", node.output[0], name=f"{node.name}_complement")
    graph.replace_inputs(difference, [one, node.output[0]])


def check_onnx() -> None:
    """Raise a `UserError` where the libraries that write and run ONNX files are missing."""
    missing = []
    for name in ("onnx", "tf2onnx", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UserError(f"`formats='onnx'` needs {', '.join(missing)}: pip install 'tfdml[onnx]'")


def convert_onnx(embedder: AnyEmbedder) -> bytes:
    """The bytes of an ONNX file from `images` (B, S, S, 3) uint8 to `embedding` (B, d) float32 of length 1.

    The images are views: after resizing and the crop, which the model card describes. B is free.

    Args:
        embedder: A built embedder.

    Returns:
        The file, of operator set 17.

    Raises:
        UserError: tf2onnx is missing, or cannot convert the embedder.

    Example:
        >>> model = convert_onnx(embedder)
        >>> pathlib.Path("embedder.onnx").write_bytes(model) == len(model)
        True
    """
    check_onnx()
    import tf2onnx

    spec = tf.TensorSpec((None, embedder.image_size, embedder.image_size, 3), tf.uint8, name="images")

    # Not frozen beforehand: tf2onnx knows the loops of the moments only as it finds them itself. But it takes the
    # constant tensors that layers of transformers keep for inputs.
    @tf.function(input_signature=[spec], autograph=False)
    def embed(images: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embedder(images, training=False)}

    if isinstance(getattr(embedder, "backbone", None), TokenBackbone):
        embed = frozen_module(embedder, embedder.image_size).embed

    try:
        with quiet():
            model, _ = tf2onnx.convert.from_function(
                embed, input_signature=[spec], opset=_OPSET, custom_op_handlers={"Erfc": (_complement_of_erf, [])}
            )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"tf2onnx cannot convert this embedder: {short_message(error)}") from error
    return model.SerializeToString()
