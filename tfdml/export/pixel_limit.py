"""The size that an encoded image states in its header, read in the graph.

A few hundred bytes can state gigabytes of pixels. A server that reads the header first refuses such an image without
decoding it. `tfdml.data.faults` does the same for files in Python.
"""

from __future__ import annotations

import tensorflow as tf

from tfdml.data.decoding import JPEG, PNG, WEBP, integers, is_format

# Resizing holds four bytes where a decoded image has one.
_RESIZED_SHARE = 4
_HEADER = 32


def header_size(encoded: tf.Tensor) -> tf.Tensor:
    """The height and width that an image's header states; nothing is decoded.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG or WebP file.

    Returns:
        (2,) int64; zeros where the bytes are none of these formats, or end before the size.

    Raises:
        tf.errors.InvalidArgumentError: The header of a JPEG is damaged.

    Example:
        >>> header_size(tf.io.encode_png(tf.zeros((4, 6, 3), tf.uint8))).numpy()
        array([4, 6])
    """
    size = tf.cond(
        is_format(encoded, JPEG),
        lambda: tf.cast(tf.io.extract_jpeg_shape(encoded)[:2], tf.int64),
        lambda: _size_of_other(encoded),
    )
    return tf.ensure_shape(size, (2,))


def size_fault(size: tf.Tensor, resize: int, mode: str, max_pixels: int) -> tf.Tensor:
    """What forbids an image of this size to be decoded and resized; empty where nothing does.

    Args:
        size: (2,) int64, height and width.
        resize: See `tfdml.data.EvaluationTransform`.
        mode: Likewise.
        max_pixels: Most pixels of an image. A quarter of it is what the resized image may have: a line of pixels, small
            as it is, becomes huge when its shorter side is enlarged.

    Returns:
        Scalar string.

    Example:
        >>> size_fault(tf.constant([30000, 30000], tf.int64), 256, "shorter", 100_000_000).numpy()
        b'30000 x 30000 pixels, more than the limit of 100000000'
    """
    height, width = tf.unstack(size)
    shorter, longer = tf.maximum(tf.minimum(height, width), 1), tf.maximum(height, width)
    resized = resize * resize * (longer // shorter if mode == "shorter" else 1)
    most_resized = max(max_pixels // _RESIZED_SHARE, resize * resize)
    stated = tf.strings.format("{} x {} pixels", (width, height))
    narrow = tf.strings.join([stated, f", so narrow that the resized image has more than {most_resized}"])
    message = tf.where(resized > most_resized, narrow, "")
    # Divided, as the product of such sides may overflow.
    large = height > max_pixels // tf.maximum(width, 1)
    message = tf.where(large, tf.strings.join([stated, f", more than the limit of {max_pixels}"]), message)
    return tf.where((height < 1) | (width < 1), "its header states no size: it is damaged or cut off", message)


# Not inlined: see `tfdml.data.decoding`; of most images nothing in it is needed.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)], autograph=False, experimental_attributes={"_noinline": True}
)
def _size_of_other(encoded: tf.Tensor) -> tf.Tensor:
    header = _bytes(tf.strings.substr(encoded, 0, _HEADER))[:_HEADER]
    kinds = [
        (is_format(encoded, PNG), lambda: _png(header)),
        (is_format(encoded, WEBP), lambda: _webp(header)),
        (tf.constant(True), lambda: tf.zeros((2,), tf.int64)),
    ]
    kind = tf.argmax(tf.cast(tf.stack([matches for matches, _ in kinds]), tf.int32), output_type=tf.int32)
    return tf.switch_case(kind, [size for _, size in kinds])


def _png(header: tf.Tensor) -> tf.Tensor:
    return tf.stack([_little(header[23::-1], 0, 4), _little(header[19::-1], 0, 4)])


def _webp(header: tf.Tensor) -> tf.Tensor:
    extended = [1 + _little(header, 27, 3), 1 + _little(header, 24, 3)]
    bits = _little(header, 21, 4)
    lossless = [1 + (bits // 2**14) % 2**14, 1 + bits % 2**14]
    lossy = [_little(header, 28, 2) % 2**14, _little(header, 26, 2) % 2**14]
    size = tf.where(_is(header, 12, b"VP8L"), tf.stack(lossless), tf.stack(lossy))
    return tf.where(_is(header, 12, b"VP8X"), tf.stack(extended), size)


def _bytes(text: tf.Tensor) -> tf.Tensor:
    """The bytes of a string as int64, with zeros behind."""
    return tf.pad(tf.cast(integers(text), tf.int64), [[0, _HEADER]])


def _is(header: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    return tf.reduce_all(header[at : at + len(expected)] == list(expected))


def _little(data: tf.Tensor, at: int | tf.Tensor, size: int) -> tf.Tensor:
    """The little-endian number of `size` bytes at `at`."""
    return tf.reduce_sum(data[at : at + size] * [1 << 8 * i for i in range(size)])
