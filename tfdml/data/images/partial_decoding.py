"""Decodes only the part of an image that a view needs, where the format allows it."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdml.data.images.decoding import decode_image, is_plain_jpeg

# Where a JPEG's colours have less resolution than its brightness, the decoder fills in the columns at the edge of a
# part from one side alone; it decodes rows exactly.
_FRINGE = 1
_NO_PIXEL = "the bounding box lies outside the image"


def whole(size: tf.Tensor) -> tf.Tensor:
    """The part that is all of an image of this size, for `decode_part`."""
    return tf.concat([[0, 0], size], 0)


def decode_part(
    encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor], box: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decodes a part of an image that depends on the image's size, bit-equal to that part of `decode_image`.

    Of most JPEGs nothing else is turned into pixels; damage beyond the part then goes unnoticed. All other images,
    and JPEGs that may have to be turned upright, are decoded whole and cut.

    Args:
        encoded: Scalar string, see `decode_image`.
        choose: Gives, for the height and width of the image (2,) int32, the part (4,) int32: top, left, height, width.
        box: (4,) int32: top, left, bottom and right of a bounding box. What lies outside counts as no part of the
            image; the box itself may reach beyond the image.

    Returns:
        The part (h, w, 3) uint8, what `choose` said (4,) int32, and the height and width (2,) int32 that it was given.

    Raises:
        tf.errors.InvalidArgumentError: See `decode_image`; or the box has no pixel of the image.

    Example:
        >>> upper_half = lambda size: tf.stack([0, 0, size[0] // 2, size[1]])
        >>> part, window, size = decode_part(tf.constant(jpeg), upper_half)
    """

    def placed(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if box is None:
            window = choose(size)
            return window, window, size
        corner, size = _clipped(box, size)
        window = choose(size)
        return window + tf.concat([corner, [0, 0]], 0), window, size

    def from_jpeg() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        shape = tf.io.extract_jpeg_shape(encoded)[:2]
        window, chosen, size = placed(shape)
        top, left, height, width = tf.unstack(window)
        before = tf.minimum(left, _FRINGE)
        after = tf.minimum(shape[1] - left - width, _FRINGE)
        around = tf.stack([top, left - before, height, before + width + after])
        part = tf.io.decode_and_crop_jpeg(encoded, around, channels=3, dct_method="INTEGER_ACCURATE")
        return tf.slice(part, tf.stack([0, before, 0]), tf.stack([height, width, 3])), chosen, size

    def from_whole() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        image = _decode_whole(encoded)
        window, chosen, size = placed(tf.shape(image)[:2])
        part = tf.slice(image, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))
        return part, chosen, size

    part, window, size = tf.cond(is_plain_jpeg(encoded), from_jpeg, from_whole)
    return tf.ensure_shape(part, (None, None, 3)), tf.ensure_shape(window, (4,)), tf.ensure_shape(size, (2,))


# Not inlined: see `tfdml.data.images.decoding`; of most images nothing in it is needed.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)], autograph=False, experimental_attributes={"_noinline": True}
)
def _decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    return decode_image(encoded)


def _clipped(box: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The first corner, and the height and width, of the part of a box that lies on an image of this size."""
    first, last = tf.clip_by_value(box[:2], 0, size), tf.clip_by_value(box[2:], 0, size)
    check = tf.debugging.Assert(tf.reduce_all(last > first), [_NO_PIXEL, box, size])
    with tf.control_dependencies([check]):
        return tf.identity(first), last - first
