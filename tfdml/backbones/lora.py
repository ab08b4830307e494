"""Low-rank adaptation: a transformer that stays as it is, with small trained changes of its attention."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml import workarounds
from tfdml.arguments import integer

# The projections to queries and values, as Keras and KerasHub call them; Swin has one for queries, keys and values.
_ADAPTED = ("query", "value", "q_proj", "v_proj", "attention_qkv")
_OWN = ("lora_kernel_a", "lora_kernel_b")


def enable_lora(model: keras.Model, rank: int) -> int:
    """Freeze a network, and give its attention layers trainable changes of low rank.

    W x becomes W x + B A x, with A random, B zero at the start, and W frozen, in the projections to queries and values
    of every attention layer, by Keras's `enable_lora`. Where a projection has several heads, each has an A of its own,
    of rank r. Keras adds B A to W in what it saves, so that a saved network is an ordinary one; checkpoints of a run
    keep A and B.

    Args:
        model: A built network with attention layers, without low-rank changes so far.
        rank: r.

    Returns:
        How many layers were changed.

    Raises:
        ValueError: `rank` is not positive, or the network has no attention layer.

    Example:
        >>> import keras_hub
        >>> network = keras_hub.models.ViTBackbone((32, 32, 3), 8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32)
        >>> enable_lora(network, rank=4), len(network.trainable_variables)
        (6, 12)

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, eq. 3; queries and values as in
    its sec. 5.1. The factor alpha / r is 1.
    """
    rank = integer("rank", rank, at_least=1)
    # The pooling head of SigLIP, which sees one query, has attention too; it is part of the network.
    layers = workarounds.layers_of(model)
    adapted = [layer for layer in layers if layer.name in _ADAPTED and hasattr(layer, "enable_lora")]
    if not adapted:
        raise ValueError(f"LoRA changes attention layers, and {model.name} has none")
    for variable in model.variables:
        variable.trainable = False
    for layer in adapted:
        layer.enable_lora(rank)
    return len(adapted)


def plain_weights(model: keras.Model) -> list[np.ndarray]:
    """Return the weights of a model with its low-rank changes added, as `set_weights` of one without them takes them.

    Args:
        model: A built model.

    Example:
        >>> import keras_hub
        >>> network = keras_hub.models.ViTBackbone((32, 32, 3), 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32)
        >>> before = len(network.weights)
        >>> changed = enable_lora(network, rank=4)
        >>> len(network.weights) - before, len(plain_weights(network)) - before
        (4, 0)
    """
    merged: dict[int, Any] = {}
    for layer in workarounds.layers_of(model):
        if getattr(layer, "lora_enabled", False):
            # `layer.kernel` is rounded where the layer computes in half precision.
            change = ops.matmul(layer.lora_kernel_a, layer.lora_kernel_b)
            kernel = workarounds.stored_kernel(layer)
            merged[id(kernel)] = ops.add(kernel, change)
    weights = [weight for weight in model.weights if weight.name not in _OWN]
    return [ops.convert_to_numpy(merged.get(id(weight), weight)) for weight in weights]
