"""GoogLeNet (Inception v1), in its two published forms."""

from __future__ import annotations

import keras

from tfdml.arguments import one_of
from tfdml.backbones.inception import Blocks
from tfdml.layers.feature_maps import CeilMaxPooling2D, LocalResponseNormalization

# Channels of 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection (Szegedy et al., table 1).
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(input_shape=(None, None, 3), variant: str = "caffe", name: str | None = None) -> keras.Model:
    """GoogLeNet without its classifiers: (B, H, W, 3) -> (B, H/32, W/32, 1024).

    Layers are called as in the Caffe model, `/` written as `_`: `conv1_7x7_s2`, `pool1_3x3_s2`, `pool1_norm1`,
    `inception_3a_1x1` ... The concatenation that ends a module has the module's name, `inception_3a` ...
    `inception_5b`.

    Args:
        input_shape: Height, width and channels of the images.
        variant: `"caffe"`: the network of the paper as BVLC trained it, with biases and local response
            normalisation. `"batch_norm"`: torchvision's, where each convolution has batch normalisation (epsilon 1e-3)
            and no bias, there is no local response normalisation, what is called 5x5 has kernels of 3 x 3, and the
            fourth pooling is 2 x 2.
        name: The model's name; by default `googlenet` or `googlenet_bn`.

    Raises:
        ValueError: `variant` is neither of these.

    Example:
        >>> googlenet((224, 224, 3)).output_shape
        (None, 7, 7, 1024)

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, table 1.
    """
    one_of("variant", variant, ("caffe", "batch_norm"))
    caffe = variant == "caffe"
    blocks = Blocks() if caffe else Blocks(epsilon=1e-3, use_bias=False)
    wide = 5 if caffe else 3

    x = inputs = keras.Input(input_shape, name="images")
    x = blocks.unit(x, "conv1", "7x7_s2", 64, 7, 2)
    x = CeilMaxPooling2D(3, 2, name="pool1_3x3_s2")(x)
    if caffe:
        x = LocalResponseNormalization(name="pool1_norm1")(x)
    x = blocks.unit(x, "conv2", "3x3_reduce", 64, 1)
    x = blocks.unit(x, "conv2", "3x3", 192, 3)
    if caffe:
        x = LocalResponseNormalization(name="conv2_norm2")(x)
    x = CeilMaxPooling2D(3, 2, name="pool2_3x3_s2")(x)
    for module, channels in MODULES.items():
        x = _module(blocks, x, f"inception_{module}", channels, wide)
        if module == "3b":
            x = CeilMaxPooling2D(3, 2, name="pool3_3x3_s2")(x)
        elif module == "4e" and caffe:
            x = CeilMaxPooling2D(3, 2, name="pool4_3x3_s2")(x)
        elif module == "4e":
            x = CeilMaxPooling2D(2, 2, name="pool4_2x2_s2")(x)
    return keras.Model(inputs, x, name=name or ("googlenet" if caffe else "googlenet_bn"))


def _module(blocks: Blocks, x, prefix: str, channels: tuple[int, ...], wide: int):
    point, narrow_reduce, narrow, wide_reduce, wide_channels, projection = channels
    pooled = keras.layers.MaxPooling2D(3, 1, "same", name=f"{prefix}_pool")(x)
    branches = [
        blocks.unit(x, prefix, "1x1", point, 1),
        blocks.chain(x, prefix, ("3x3_reduce", narrow_reduce, 1), ("3x3", narrow, 3)),
        blocks.chain(x, prefix, ("5x5_reduce", wide_reduce, 1), ("5x5", wide_channels, wide)),
        blocks.unit(pooled, prefix, "pool_proj", projection, 1),
    ]
    return keras.layers.Concatenate(name=prefix)(branches)
