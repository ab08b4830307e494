"""A small convolutional network to train from scratch on small images."""

from __future__ import annotations

import keras


def conv4(input_shape=(None, None, 3), width: int = 64, name: str = "conv4") -> keras.Model:
    """Return the four-block network of the few-shot literature: (B, H, W, 3) -> (B, H/16, W/16, width).

    Each block is a 3 x 3 convolution, batch normalisation, ReLU and 2 x 2 max pooling.

    Args:
        input_shape: Height, width and channels of the images; at least 16 pixels each way.
        width: Channels of every block.
        name: The model's name.

    Example:
        >>> conv4((64, 64, 3)).output_shape
        (None, 4, 4, 64)

    Source: Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016, sec. 4.1.
    """
    x = inputs = keras.Input(input_shape, name="images")
    for block in range(1, 5):
        x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{block}")(x)
        x = keras.layers.BatchNormalization(name=f"bn{block}")(x)
        x = keras.layers.ReLU(name=f"relu{block}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{block}")(x)
    return keras.Model(inputs, x, name=name)
