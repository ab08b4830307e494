"""The network alone, its weights made constants: what converters to other formats start from."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

Network = Callable[[tf.Tensor], tf.Tensor]


def frozen_module(network: Network, size: int, dtype: tf.DType = tf.uint8) -> tf.Module:
    """A network as a module whose function `embed` has no variables.

    Args:
        network: From images (B, size, size, 3) to embeddings (B, d), such as an embedder.
        size: Height and width of the images.
        dtype: Of the images.

    Returns:
        A module with `embed(images)`, which returns `{"embedding": (B, d)}`.

    Example:
        >>> frozen_module(embedder, 96).embed(views)["embedding"].shape
        TensorShape([32, 128])
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    spec = tf.TensorSpec((None, size, size, 3), dtype, name="images")
    traced = tf.function(lambda images: network(images), input_signature=[spec], autograph=False)
    frozen = convert_variables_to_constants_v2(traced.get_concrete_function())
    module = tf.Module()
    module.embed = tf.function(lambda images: {"embedding": frozen(images)[0]}, input_signature=[spec], autograph=False)
    return module
