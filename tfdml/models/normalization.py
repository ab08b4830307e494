"""The BatchNorm layers of a network: what they use in training, and where they cost nothing."""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection
from typing import Any

import keras
from keras import ops

from tfdml import workarounds
from tfdml.backbones.networks import ancestors_of


def batch_norms(model: keras.Model) -> list:
    """Return the BatchNorm layers of a network."""
    return [
        x for x in workarounds.layers_of(model) if isinstance(x, keras.layers.BatchNormalization)
    ]


def keep_statistics(model: keras.Model, batch_norm: str, unfolded: Collection[str] = ()) -> None:
    """Make the BatchNorm layers of a network use their moving statistics in training; of `"frozen"`
    none trains.

    BatchNorm is then an affine map of each channel. Where it follows a convolution, this applies
    the map to its kernel, of which there is less than of the feature map:
    scale (kernel * x - mean) + beta = (scale kernel) * x + (beta - scale mean), with
    scale = gamma / sqrt(variance + epsilon). The convolution then returns the normalized map.

    Args:
        model: The network.
        batch_norm: As of `Embedder`.
        unfolded: Names of convolutions that return their own map.
    """
    pairs = _normalized_convolutions(model)
    for layer in [*batch_norms(model), *(convolution for convolution, _ in pairs)]:
        vars(layer).pop("call", None)
    for layer in batch_norms(model):
        if batch_norm == "frozen":
            layer.trainable = False
        if batch_norm != "train":
            # Of these layers alone: dropout and other random layers around them are in training.
            layer.call = functools.partial(_call_in_inference, layer)
    if batch_norm == "train":
        return
    for convolution, norm in pairs:
        if convolution.name not in unfolded:
            convolution.call = functools.partial(_call_normalized, convolution, norm)
            norm.call = _return_inputs


def _call_in_inference(layer: Any, inputs: Any, training: Any = None, **options: Any) -> Any:
    return type(layer).call(layer, inputs, training=False, **options)


def _return_inputs(inputs: Any, **options: Any) -> Any:
    return inputs


def _call_normalized(convolution: Any, norm: Any, inputs: Any) -> Any:
    """Return the map of a convolution, normalized by moving statistics."""
    scale = ops.rsqrt(norm.moving_variance + norm.epsilon)
    if norm.scale:
        scale = scale * norm.gamma
    shift = -norm.moving_mean
    if convolution.use_bias:
        shift = shift + ops.cast(convolution.bias, scale.dtype)
    shift = shift * scale
    if norm.center:
        shift = shift + norm.beta
    kernel = ops.cast(convolution.kernel, scale.dtype)
    if isinstance(convolution, keras.layers.DepthwiseConv2D):
        scale = ops.reshape(scale, kernel.shape[-2:])
    kernel = ops.cast(kernel * scale, inputs.dtype)
    return _convolve(convolution, inputs, kernel) + ops.cast(shift, inputs.dtype)


def _convolve(convolution: Any, inputs: Any, kernel: Any) -> Any:
    convolve = ops.conv
    if isinstance(convolution, keras.layers.DepthwiseConv2D):
        convolve = ops.depthwise_conv
    return convolve(
        inputs,
        kernel,
        strides=convolution.strides,
        padding=convolution.padding,
        dilation_rate=convolution.dilation_rate,
        data_format=convolution.data_format,
    )


def _normalized_convolutions(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return the convolutions of a network whose map a BatchNorm layer reads and nothing else, each
    with this layer."""
    pairs = []
    for part in workarounds.layers_of(model):
        if isinstance(part, keras.Model) and getattr(part, "inputs", None):
            pairs += _pairs_of_graph(part)
    return pairs


def _pairs_of_graph(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return those of a functional model, without the layers within its layers."""
    tensors = ancestors_of(model)
    readers = collections.defaultdict(list)
    calls: collections.Counter = collections.Counter()
    for tensor in tensors.values():
        reader, inputs = workarounds.producer_of(tensor)
        calls[reader] += 1
        for read in inputs:
            readers[id(read)].append(reader)
    for output in model.outputs:
        readers[id(output)].append(None)
    pairs = []
    for number, tensor in tensors.items():
        convolution, _ = workarounds.producer_of(tensor)
        if len(readers[number]) != 1 or not _is_plain(convolution):
            continue
        (norm,) = readers[number]
        is_norm = type(norm) is keras.layers.BatchNormalization and norm.axis in (-1, 3)
        if is_norm and calls[convolution] == calls[norm] == 1:
            pairs.append((convolution, norm))
    return pairs


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a convolution of Keras's, of maps with channels last, and nothing else."""
    if type(layer) not in (keras.layers.Conv2D, keras.layers.DepthwiseConv2D):
        return False
    is_linear = layer.activation is keras.activations.linear
    return is_linear and layer.data_format == "channels_last"
