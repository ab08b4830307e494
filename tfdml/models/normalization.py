"""The BatchNorm layers of a network: what they use in training, and convolutions that stand for
them."""

from __future__ import annotations

import collections
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Block:
    """A convolution of a network and the layers around it that it can stand for.

    Args:
        pad: The layer of zeros whose map it alone reads, if there is one.
        convolution: The convolution.
        norm: The BatchNorm layer that alone reads its map.
    """

    pad: Any
    convolution: Any
    norm: Any

    def join(self) -> None:
        """Have the convolution return what the norm would, and the others what they get."""
        self.convolution.call = functools.partial(_call_block, self)
        self.norm.call = _return_inputs
        if self.pad is not None:
            self.pad.call = _return_inputs

    def separate(self) -> None:
        """Give each layer its own call."""
        for layer in self._layers():
            vars(layer).pop("call", None)

    def has_any(self, names: Collection[str]) -> bool:
        """Whether one of its layers has one of these names."""
        return any(layer.name in names for layer in self._layers())

    def _layers(self) -> list[Any]:
        others = [self.convolution, self.norm]
        return others if self.pad is None else [self.pad, *others]


def keep_statistics(model: keras.Model, batch_norm: str, separate: Collection[str] = ()) -> None:
    """Make the BatchNorm layers of a network use their moving statistics in training; of `"frozen"`
    none trains.

    BatchNorm is then an affine map of each channel. Where it follows a convolution, this applies
    the map to its kernel, of which there is less than of the feature map:
    scale (kernel * x - mean) + beta = (scale kernel) * x + (beta - scale mean), with
    scale = gamma / sqrt(variance + epsilon). The convolution then returns the normalized map. It
    also adds the zeros of a layer before it, which most often are those of `padding="same"`.

    Args:
        model: The network.
        batch_norm: As of `Embedder`.
        separate: Names of layers that keep their own maps.
    """
    blocks = _blocks_of(model)
    for block in blocks:
        block.separate()
    for layer in batch_norms(model):
        vars(layer).pop("call", None)
        if batch_norm == "frozen":
            layer.trainable = False
        if batch_norm != "train":
            # Of these layers alone: dropout and other random layers around them are in training.
            layer.call = functools.partial(_call_in_inference, layer)
    if batch_norm == "train":
        return
    for block in blocks:
        if not block.has_any(separate):
            block.join()


def _call_in_inference(layer: Any, inputs: Any, training: Any = None, **options: Any) -> Any:
    return type(layer).call(layer, inputs, training=False, **options)


def _return_inputs(inputs: Any, **options: Any) -> Any:
    return inputs


def _call_block(block: Block, inputs: Any) -> Any:
    """Return the map of a convolution of padded inputs, normalized by moving statistics."""
    convolution, norm = block.convolution, block.norm
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
    if _is_depthwise(convolution):
        scale = ops.reshape(scale, kernel.shape[-2:])
    kernel = ops.cast(kernel * scale, inputs.dtype)
    maps = _convolve(block, inputs, kernel)
    return maps + ops.cast(shift, inputs.dtype)


def _convolve(block: Block, inputs: Any, kernel: Any) -> Any:
    convolution, padding = block.convolution, block.convolution.padding
    if block.pad is not None:
        if block.pad.padding == _zeros_of_same(convolution, inputs.shape[1:3]):
            padding = "same"
        else:
            inputs = ops.pad(inputs, ((0, 0), *block.pad.padding, (0, 0)))
    convolve = ops.depthwise_conv if _is_depthwise(convolution) else ops.conv
    return convolve(
        inputs,
        kernel,
        strides=convolution.strides,
        padding=padding,
        dilation_rate=convolution.dilation_rate,
        data_format=convolution.data_format,
    )


def _zeros_of_same(convolution: Any, size: tuple) -> tuple | None:
    """Return how many rows and columns `padding="same"` adds on each side of a map of this size;
    None where the size is not known."""
    if None in size:
        return None
    zeros = []
    for axis in range(2):
        stride = convolution.strides[axis]
        reach = convolution.dilation_rate[axis] * (convolution.kernel_size[axis] - 1) + 1
        both = max((-(-size[axis] // stride) - 1) * stride + reach - size[axis], 0)
        zeros.append((both // 2, both - both // 2))
    return tuple(zeros)


def _is_depthwise(convolution: Any) -> bool:
    return isinstance(convolution, keras.layers.DepthwiseConv2D)


def _blocks_of(model: keras.Model) -> list[Block]:
    """Return the convolutions of a network whose map a BatchNorm layer reads and nothing else."""
    blocks = []
    for part in workarounds.layers_of(model):
        if workarounds.follows_its_graph(part):
            blocks += _Graph(part).blocks()
    return blocks


class _Graph:
    """The calls of a functional model, without those within its layers.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self.tensors = ancestors_of(model)
        self.readers: dict[int, list] = collections.defaultdict(list)
        self.calls: collections.Counter = collections.Counter()
        for tensor in self.tensors.values():
            reader, inputs = workarounds.producer_of(tensor)
            self.calls[reader] += 1
            for read in inputs:
                self.readers[id(read)].append(reader)
        for output in model.outputs:
            self.readers[id(output)].append(None)

    def blocks(self) -> list[Block]:
        """Return the convolutions that can stand for the layers around them."""
        blocks = []
        for tensor in self.tensors.values():
            convolution, inputs = workarounds.producer_of(tensor)
            norm = self._only_reader(tensor)
            if not _is_plain(convolution) or self.calls[convolution] > 1:
                continue
            if type(norm) is keras.layers.BatchNormalization and norm.axis in (-1, 3):
                blocks.append(Block(self._pad_of(convolution, *inputs), convolution, norm))
        return blocks

    def _only_reader(self, tensor: Any) -> Any:
        """Return the layer that alone reads a tensor, and nothing else; None: there is none."""
        readers = self.readers[id(tensor)]
        if len(readers) != 1 or self.calls[readers[0]] > 1:
            return None
        return readers[0]

    def _pad_of(self, convolution: Any, tensor: Any) -> Any:
        """Return the layer of zeros that a convolution alone reads; None: there is none."""
        pad, _ = workarounds.producer_of(tensor)
        is_pad = type(pad) is keras.layers.ZeroPadding2D and pad.data_format == "channels_last"
        is_alone = self._only_reader(tensor) is convolution and self.calls[pad] == 1
        if is_pad and is_alone and convolution.padding == "valid":
            return pad
        return None


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a convolution of Keras's, of maps with channels last, and nothing else."""
    if type(layer) not in (keras.layers.Conv2D, keras.layers.DepthwiseConv2D):
        return False
    is_linear = layer.activation is keras.activations.linear
    return is_linear and layer.data_format == "channels_last"
