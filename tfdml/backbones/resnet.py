"""ResNet-50 as torchvision has it (v1.5)."""

from __future__ import annotations

import keras

# Blocks and inner channels of each stage (He et al., table 1).
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def resnet50_v1_5(input_shape=(None, None, 3), name: str = "resnet50_v1_5") -> keras.Model:
    """ResNet-50 v1.5 without its classifier: (B, H, W, 3) -> (B, H/32, W/32, 2048).

    The version of torchvision and of most PyTorch checkpoints: the 3 x 3 convolution of a block has its stride. In
    `keras.applications.ResNet50`, as in Caffe, the first 1 x 1 convolution has it, so that weights of one are not
    weights of the other, although every shape agrees. Layers are called as in keras.applications: `conv1_conv`,
    `conv2_block1_1_conv` ... `conv5_block3_out`. Convolutions have no bias; batch normalisation has epsilon 1e-5.

    Args:
        input_shape: Height, width and channels of the images.
        name: The model's name.

    Example:
        >>> resnet50_v1_5((224, 224, 3)).output_shape
        (None, 7, 7, 2048)

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1, with the stride moved.
    """
    x = inputs = keras.Input(input_shape, name="images")
    x = _convolution(x, "conv1", 64, 7, 2, ending="")
    x = keras.layers.ReLU(name="conv1_relu")(x)
    # Zeros outside change no maximum of what a ReLU gives.
    x = keras.layers.ZeroPadding2D(1, name="pool1_pad")(x)
    x = keras.layers.MaxPooling2D(3, 2, name="pool1_pool")(x)
    for stage, (blocks, channels) in enumerate(STAGES, start=2):
        for block in range(1, blocks + 1):
            strides = 2 if stage > 2 and block == 1 else 1
            x = _block(x, f"conv{stage}_block{block}", channels, strides, project=block == 1)
    return keras.Model(inputs, x, name=name)


def _block(x, name: str, channels: int, strides: int, project: bool):
    shortcut = _convolution(x, name, 4 * channels, 1, strides, ending="_0") if project else x
    x = keras.layers.ReLU(name=f"{name}_1_relu")(_convolution(x, name, channels, 1, 1, ending="_1"))
    x = keras.layers.ReLU(name=f"{name}_2_relu")(_convolution(x, name, channels, 3, strides, ending="_2"))
    x = _convolution(x, name, 4 * channels, 1, 1, ending="_3")
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.ReLU(name=f"{name}_out")(x)


def _convolution(x, name: str, filters: int, size: int, strides: int, ending: str):
    if size > 1 and strides > 1:
        x = keras.layers.ZeroPadding2D(size // 2, name=f"{name}{ending}_pad")(x)
    padding = "same" if strides == 1 else "valid"
    x = keras.layers.Conv2D(filters, size, strides, padding, use_bias=False, name=f"{name}{ending}_conv")(x)
    return keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=f"{name}{ending}_bn")(x)
