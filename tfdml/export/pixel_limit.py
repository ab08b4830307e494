"""The size that an encoded image states in its header, read in the graph.

A few hundred bytes can state gigabytes of pixels. A server that reads the header first refuses such an image without
decoding it. `tfdml.data.images.headers` does the same for files in Python.
"""

from __future__ import annotations

import functools

import tensorflow as tf

# What three bytes of a decoded pixel may take by default: 300 MB for the largest image.
MAX_PIXELS = 100_000_000
# Resizing holds four bytes where a decoded image has one.
_RESIZED_SHARE = 4
_HEADER = 32


def stated_size(encoded: tf.Tensor) -> tf.Tensor:
    """The height and width that an image's header states; nothing is decoded.

    Of an animated GIF it is the size of its frames side by side, because TensorFlow unpacks all to return the first.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG, GIF, BMP or WebP file.

    Returns:
        (2,) int64; zeros where the bytes are none of these formats, or end before the size.

    Raises:
        tf.errors.InvalidArgumentError: The header of a JPEG is damaged.

    Example:
        >>> stated_size(tf.io.encode_png(tf.zeros((4, 6, 3), tf.uint8))).numpy()
        array([4, 6])
    """
    jpeg = tf.strings.substr(encoded, 0, 3) == b"\xff\xd8\xff"
    size = tf.cond(
        jpeg, lambda: tf.cast(tf.io.extract_jpeg_shape(encoded)[:2], tf.int64), lambda: _size_of_other(encoded)
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


# Not inlined: see `tfdml.data.images.decoding`; of most images nothing in it is needed.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)], autograph=False, experimental_attributes={"_noinline": True}
)
def _size_of_other(encoded: tf.Tensor) -> tf.Tensor:
    header = _bytes(tf.strings.substr(encoded, 0, _HEADER))[:_HEADER]
    kinds = [
        (_is(header, 0, b"\x89PNG\r\n\x1a\n"), lambda: _png(header)),
        (_is(header, 0, b"GIF8"), functools.partial(_gif, encoded)),
        (_is(header, 0, b"BM"), lambda: _bmp(header)),
        (_is(header, 0, b"RIFF") & _is(header, 8, b"WEBP"), lambda: _webp(header)),
        (tf.constant(True), lambda: tf.zeros((2,), tf.int64)),
    ]
    kind = tf.argmax(tf.cast(tf.stack([matches for matches, _ in kinds]), tf.int32), output_type=tf.int32)
    return tf.switch_case(kind, [size for _, size in kinds])


def _png(header: tf.Tensor) -> tf.Tensor:
    return tf.stack([_little(header[23::-1], 0, 4), _little(header[19::-1], 0, 4)])


def _bmp(header: tf.Tensor) -> tf.Tensor:
    # A negative height means that the top row comes first.
    height = _little(header, 22, 4)
    return tf.stack([tf.where(height >= 2**31, 2**32 - height, height), _little(header, 18, 4)])


def _webp(header: tf.Tensor) -> tf.Tensor:
    extended = [1 + _little(header, 27, 3), 1 + _little(header, 24, 3)]
    bits = _little(header, 21, 4)
    lossless = [1 + (bits // 2**14) % 2**14, 1 + bits % 2**14]
    lossy = [_little(header, 28, 2) % 2**14, _little(header, 26, 2) % 2**14]
    size = tf.where(_is(header, 12, b"VP8L"), tf.stack(lossless), tf.stack(lossy))
    return tf.where(_is(header, 12, b"VP8X"), tf.stack(extended), size)


def _gif(encoded: tf.Tensor) -> tf.Tensor:
    # The padding makes every read of a cut-off file fall on zeros.
    data = _bytes(encoded)
    end = tf.strings.length(encoded)

    def palette(flags: tf.Tensor) -> tf.Tensor:
        colours = tf.bitwise.left_shift(tf.constant(2, tf.int64), tf.bitwise.bitwise_and(flags, 7))
        return tf.cast(tf.where(flags >= 128, 3 * colours, 0), tf.int32)

    def goes_on(at: tf.Tensor, in_block: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        del size
        return (at < end) & (in_block | (data[at] == 0x2C) | (data[at] == 0x21))

    def advance(at: tf.Tensor, in_block: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        frame = ~in_block & (data[at] == 0x2C)
        height, width = _little(data, at + 7, 2), _little(data, at + 5, 2)
        taken = tf.where(frame, tf.stack([tf.maximum(size[0], height), size[1] + width]), size)
        head = tf.where(frame, 11 + palette(data[at + 9]), 2)
        length = tf.where(in_block, tf.cast(data[at], tf.int32) + 1, head)
        return tf.minimum(at + length, end), ~in_block | (data[at] != 0), taken

    start = tf.minimum(13 + palette(data[10]), end)
    state = (start, tf.constant(False), tf.zeros((2,), tf.int64))
    return tf.while_loop(goes_on, advance, state)[2]


def _bytes(text: tf.Tensor) -> tf.Tensor:
    """The bytes of a string as int64, with zeros behind."""
    return tf.pad(tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int64), [[0, _HEADER]])


def _is(header: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    return tf.reduce_all(header[at : at + len(expected)] == list(expected))


def _little(data: tf.Tensor, at: int | tf.Tensor, size: int) -> tf.Tensor:
    """The little-endian number of `size` bytes at `at`."""
    return tf.reduce_sum(data[at : at + size] * [1 << 8 * i for i in range(size)])
