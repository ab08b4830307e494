"""BN-Inception: Inception with batch normalisation, the backbone of most metric learning papers."""

from __future__ import annotations

import keras

from tfdml.backbones.inception import Blocks, average_pool
from tfdml.layers.feature_maps import CeilMaxPooling2D

# Channels of 1x1 (0: none, and a stride of 2); 3x3 reduce, 3x3; double 3x3 reduce, 3x3; pool projection.
MODULES = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}


def bn_inception(input_shape=(None, None, 3), name: str = "bn_inception") -> keras.Model:
    """BN-Inception without its classifier: (B, H, W, 3) -> (B, H/32, W/32, 1024).

    The Caffe model that was ported to PyTorch as `bninception`, where it takes BGR images minus (104, 117, 128):
    convolutions with bias, each followed by batch normalisation (epsilon 1e-5) and ReLU. Layers are called as there:
    `conv1_7x7_s2`, `conv1_7x7_s2_bn`, `inception_3a_double_3x3_1` ...; the concatenation that ends a module has the
    module's name, `inception_3a` ... `inception_5b`. Modules 3c and 4e halve the map.

    Where a map of odd size is halved, which the published model cannot (its branches come out unequal; at 299 px for
    one), the pooling branch gets a window more, so that every image size works. At sizes that the published model
    takes, 224 and 256 px among them, nothing differs.

    Args:
        input_shape: Height, width and channels of the images.
        name: The model's name.

    Example:
        >>> bn_inception((224, 224, 3)).output_shape
        (None, 7, 7, 1024)

    Source: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift", ICML 2015, fig. 5, with the channels of the published Caffe model.
    """
    blocks = Blocks(epsilon=1e-5)
    x = inputs = keras.Input(input_shape, name="images")
    x = blocks.unit(x, "conv1", "7x7_s2", 64, 7, 2)
    x = CeilMaxPooling2D(3, 2, name="pool1_3x3_s2")(x)
    x = blocks.unit(x, "conv2", "3x3_reduce", 64, 1)
    x = blocks.unit(x, "conv2", "3x3", 192, 3)
    x = CeilMaxPooling2D(3, 2, name="pool2_3x3_s2")(x)
    for module, channels in MODULES.items():
        x = _module(blocks, x, f"inception_{module}", channels)
    return keras.Model(inputs, x, name=name)


def _module(blocks: Blocks, x, prefix: str, channels: tuple[int, ...]):
    point, narrow_reduce, narrow, double_reduce, double, projection = channels
    strides = 1 if point else 2
    branches = [blocks.unit(x, prefix, "1x1", point, 1)] if point else []
    branches.append(blocks.chain(x, prefix, ("3x3_reduce", narrow_reduce, 1), ("3x3", narrow, 3, strides)))
    doubled = [("double_3x3_reduce", double_reduce, 1), ("double_3x3_1", double, 3)]
    branches.append(blocks.chain(x, prefix, *doubled, ("double_3x3_2", double, 3, strides)))
    if strides == 2:
        branches.append(CeilMaxPooling2D(3, 2, cover=True, name=f"{prefix}_pool")(x))
    elif prefix.endswith("5b"):
        pooled = keras.layers.MaxPooling2D(3, 1, "same", name=f"{prefix}_pool")(x)
        branches.append(blocks.unit(pooled, prefix, "pool_proj", projection, 1))
    else:
        branches.append(blocks.unit(average_pool(x, f"{prefix}_pool"), prefix, "pool_proj", projection, 1))
    return keras.layers.Concatenate(name=prefix)(branches)
