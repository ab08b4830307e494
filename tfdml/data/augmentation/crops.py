"""Where a training crop lies in an image, worked out from the image's size and uniform draws."""

from __future__ import annotations

import math

import tensorflow as tf

# A random resized crop that has not fitted after this many tries is the largest central one.
TRIES = 10


def random_part(size: tf.Tensor, draws: tf.Tensor, scale: tuple[float, float], ratio: tuple[float, float]) -> tf.Tensor:
    """A part of random area and proportions: the first of ten tries that fits, else the largest central one.

    Args:
        size: (2,) int32, height and width of the image.
        draws: (2 + 2 * `TRIES`,) float32, uniform on [0, 1); any that follow are not used.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height, drawn evenly on a log scale.

    Returns:
        (4,) int32: top, left, height and width.
    """
    height, width = tf.unstack(tf.cast(size, tf.float32))
    area = height * width * between(draws[2 : 2 + TRIES], *scale)
    low, high = ratio
    ratios = tf.exp(between(draws[2 + TRIES : 2 + 2 * TRIES], math.log(low), math.log(high)))
    heights, widths = tf.round(tf.sqrt(area / ratios)), tf.round(tf.sqrt(area * ratios))
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # Where no try fits: the largest central part with a permitted ratio.
    fallback_height = tf.minimum(height, tf.maximum(1.0, tf.round(width / low)))
    fallback_width = tf.minimum(width, tf.maximum(1.0, tf.round(height * high)))
    found = tf.reduce_any(fits)
    first = tf.argmax(tf.cast(fits, tf.int32))
    part_height = tf.cast(tf.where(found, heights[first], fallback_height), tf.int32)
    part_width = tf.cast(tf.where(found, widths[first], fallback_width), tf.int32)
    part = tf.stack([part_height, part_width])
    room = size - part
    return tf.concat([tf.where(found, random_offset(draws[:2], room), room // 2), part], 0)


def multi_resolution(
    size: tuple[tf.Tensor, tf.Tensor], draw: tf.Tensor, crop: int, resolutions: tuple[float, float]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Height and width of the image when its longer side is a random multiple of the crop (HORDE: Jacob et al., 2019).

    Args:
        size: Height and width of the image.
        draw: Uniform on [0, 1).
        crop: Pixels of the crop.
        resolutions: Smallest and largest longer side, as multiples of `crop`.

    Returns:
        Two int32; proportions are kept to the nearest pixel.
    """
    longer = tf.maximum(1, tf.cast(tf.round(crop * between(draw, *resolutions)), tf.int32))
    reference = tf.maximum(*size)
    height, width = (tf.maximum(1, (2 * edge * longer + reference) // (2 * reference)) for edge in size)
    return height, width


def random_offset(draws: tf.Tensor, room: tf.Tensor) -> tf.Tensor:
    """Whole numbers from 0 to `room`, evenly, from uniform draws."""
    # The product can round up to room + 1 itself.
    return tf.minimum(tf.cast(draws * tf.cast(room + 1, tf.float32), tf.int32), room)


def between(draw: tf.Tensor, low: float, high: float) -> tf.Tensor:
    """A uniform draw from [0, 1) stretched to [low, high)."""
    return low + draw * (high - low)
