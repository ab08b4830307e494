"""The blocks that Inception networks are built of, named as in the published models."""

from __future__ import annotations

import keras


class Blocks:
    """Convolutions of one Inception network, with or without batch normalisation.

    A unit called `prefix`, `suffix` consists of the layers `prefix_suffix` (convolution), `prefix_suffix_bn` if there
    is normalisation, and `prefix_relu_suffix`: the names of the Caffe models with `/` written as `_`.

    Args:
        epsilon: Of batch normalisation; None for none.
        use_bias: Whether convolutions have a bias.
    """

    def __init__(self, epsilon: float | None = None, use_bias: bool = True):
        self.epsilon = epsilon
        self.use_bias = use_bias

    def unit(self, x, prefix: str, suffix: str, filters: int, size: int, strides: int = 1):
        """Convolution of odd size, padded by half of it on every side, [normalisation,] ReLU."""
        name = f"{prefix}_{suffix}"
        if strides > 1:
            # "same" pads unevenly where the stride meets an even size.
            x = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
        padding = "valid" if strides > 1 else "same"
        convolution = keras.layers.Conv2D(filters, size, strides, padding, use_bias=self.use_bias, name=name)
        x = convolution(x)
        if self.epsilon is not None:
            # PyTorch's default momentum, 0.1, counts the other way round.
            x = keras.layers.BatchNormalization(epsilon=self.epsilon, momentum=0.9, name=f"{name}_bn")(x)
        return keras.layers.ReLU(name=f"{prefix}_relu_{suffix.removesuffix('_s2')}")(x)

    def chain(self, x, prefix: str, *units: tuple):
        """Units one after another, each (suffix, filters, size[, strides])."""
        for suffix, *arguments in units:
            x = self.unit(x, prefix, suffix, *arguments)
        return x


def average_pool(x, name: str):
    """Return the mean over 3 x 3 positions, those outside the map counting as zeros, as in Caffe."""
    x = keras.layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    return keras.layers.AveragePooling2D(3, 1, "valid", name=name)(x)
