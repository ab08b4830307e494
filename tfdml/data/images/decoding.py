"""Encoded images to RGB as a person sees them, in TensorFlow graph operations alone.

The input pipeline and the exported serving graph call the same `decode_image`, so that what is served is what was
trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfdml.data.images.formats import BMP, FOREIGN, GIF, JPEG, PNG, WEBP, Format
from tfdml.data.images.gif import EXTENSION, FRAME, GRAPHIC_CONTROL, PADDING, walk_blocks

_WHITE = 255
# EXIF lies in front of the image data and one of its segments holds at most this many bytes.
_HEAD_BYTES = 65536
# A TIFF block in either byte order; \C is RE2's "any byte".
_TIFF = r"(II\*\x00|MM\x00\*)"
_EXIF_IN_JPEG = r"\A\C*?Exif\x00\x00" + _TIFF
_EXIF_IN_PNG = r"\A\C*?eXIf" + _TIFF
_EXIF_IN_WEBP = r"\A\C*EXIF\C{4}(?:Exif\x00\x00)?" + _TIFF
_ORIENTATION_TAG = 0x0112


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes one image to upright, opaque RGB.

    The format is recognised from the bytes, never from the file name.

    - JPEG: grey, RGB, CMYK and YCCK (Adobe's inverted ones too), baseline and progressive; bit-equal with libjpeg's
      accurate integer transform, which Pillow uses.
    - PNG: every colour type and depth; 16 bits are cut to the upper 8. APNG: the default image.
    - GIF: the first frame. Canvas that this frame does not cover is black.
    - BMP: 8 bit palette or grey, 24 and 32 bit; the fourth channel is padding in most such files and is ignored.
      1, 4 and 16 bit and run-length-coded files are refused.
    - WebP: lossy and lossless. Animations are refused.
    - Transparency (alpha channel, palette or colour key) is laid over white.
    - The EXIF orientation of JPEG, PNG and WebP is applied, all eight values; a damaged EXIF block counts as
      upright. It is looked for in the first 64 KiB of a JPEG or PNG.
    - Colour profiles and gamma are ignored.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG, GIF, BMP or WebP file.

    Returns:
        (H, W, 3) uint8.

    Raises:
        tf.errors.InvalidArgumentError: The bytes are not one of these formats, or are damaged.

    Example:
        >>> image = decode_image(jpeg)  # the bytes of a file
    """
    jpeg = is_format(encoded, JPEG)
    image = tf.cond(jpeg, lambda: _decode_jpeg(encoded), lambda: _decode_other(encoded))
    return tf.ensure_shape(image, (None, None, 3))


def starts_with(encoded: tf.Tensor, start: bytes) -> tf.Tensor:
    """Whether these are the first bytes, a scalar bool."""
    return _has(encoded, 0, start)


def is_format(encoded: tf.Tensor, known: Format) -> tf.Tensor:
    """`Format.matches` in the graph."""
    start = starts_with(encoded, known.start)
    return start & _has(encoded, 8, known.brand) if known.brand else start


def is_plain_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Whether this is a JPEG whose tables follow the JFIF header without any EXIF between, as in most data sets."""
    return starts_with(encoded, JPEG.start + b"\xe0\x00\x10JFIF") & _has(encoded, 20, b"\xff\xdb")


# Not inlined because even the operations of a branch not taken cost time, together half that of decoding a thumbnail.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)], autograph=False, experimental_attributes={"_noinline": True}
)
def _decode_other(encoded: tf.Tensor) -> tf.Tensor:
    decoders: list[tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]] = [
        (is_format(encoded, PNG), _decode_png),
        (is_format(encoded, GIF), _decode_gif),
        (is_format(encoded, BMP), _decode_bmp),
        (is_format(encoded, WEBP), _decode_webp),
        (tf.constant(True), _refuse),
    ]
    kind = tf.argmax(tf.cast(tf.stack([matches for matches, _ in decoders]), tf.int32), output_type=tf.int32)
    return tf.switch_case(kind, [functools.partial(decode, encoded) for _, decode in decoders])


def _decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.cond(is_plain_jpeg(encoded), lambda: image, lambda: _upright(image, _head(encoded), _EXIF_IN_JPEG))


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    # The decoder strips a colour key unless four channels are asked for, and then gives images of less than
    # 8 bits without a key the alpha 1, 3 or 15 instead of 255: so ask for four only where there is transparency.
    colour_type = _number(_header(encoded, 26), 25, 1)
    keyed = tf.strings.regex_full_match(_head(encoded), r"\C*tRNS\C*")
    image = tf.cond(
        (colour_type >= 4) | keyed,
        lambda: _over_white(tf.io.decode_png(encoded, channels=4)),
        lambda: tf.io.decode_png(encoded, channels=3),
    )
    return _upright(image, _head(encoded), _EXIF_IN_PNG)


def _decode_gif(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(_paint_gif_transparency(encoded), channels=3, expand_animations=False)


def _decode_bmp(encoded: tf.Tensor) -> tf.Tensor:
    header = _header(encoded, 54)
    bits, compression = _number(header, 28, 2), _number(header, 30, 4)
    # The decoder takes no notice of this field: it would read compressed data as pixels.
    check = tf.debugging.Assert(
        (_number(header, 14, 4) >= 40) & ((compression == 0) | ((compression == 3) & (bits == 32))),
        [
            "BMP of this kind is not supported (run-length-coded, 16 bit or OS/2): save it as PNG. Compression:",
            compression,
        ],
    )
    with tf.control_dependencies([check]):
        image = tf.io.decode_bmp(encoded)
    return tf.cond(bits == 8, lambda: _through_palette(image, encoded, header), lambda: image[..., :3])


def _through_palette(image: tf.Tensor, encoded: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """The colours of a palette BMP; TensorFlow's decoder gives the bare (H, W, 1) palette indices."""
    start = 14 + _number(header, 14, 4)
    size = tf.clip_by_value(_number(header, 10, 4) - start, 0, 1024)
    palette = integers(_cut(encoded, start, size))
    palette = tf.reshape(tf.pad(palette, [[0, 1024 - tf.size(palette)]]), (256, 4))[:, 2::-1]
    return tf.gather(tf.cast(palette, tf.uint8), tf.cast(image[..., 0], tf.int32))


def _decode_webp(encoded: tf.Tensor) -> tf.Tensor:
    flags = tf.where(_has(encoded, 12, b"VP8X"), _number(_header(encoded, 21), 20, 1), 0)
    # TensorFlow 2.21's decoder writes outside its buffer when it is given an animation.
    check = tf.debugging.Assert(
        flags & 0x02 == 0, ["animated WebP is not supported: save its first frame as a still image"]
    )
    with tf.control_dependencies([check]):
        image = tf.io.decode_webp(encoded)[0]
    image = tf.cond(tf.shape(image)[-1] == 4, lambda: _over_white(image), lambda: image)
    return tf.cond(flags & 0x08 != 0, lambda: _upright(image, encoded, _EXIF_IN_WEBP), lambda: image)


def _refuse(encoded: tf.Tensor) -> tf.Tensor:
    # The bytes themselves stay out of the message: Python fails on messages that are not UTF-8.
    check = tf.debugging.Assert(False, [FOREIGN + "; bytes:", tf.strings.length(encoded)])
    with tf.control_dependencies([check]):
        return tf.zeros((0, 0, 3), tf.uint8)


def _over_white(image: tf.Tensor) -> tf.Tensor:
    """(H, W, 4) uint8 to (H, W, 3), laid over white by its alpha."""

    def blend() -> tf.Tensor:
        colour, alpha = tf.cast(image[..., :3], tf.int32), tf.cast(image[..., 3:], tf.int32)
        return tf.cast((colour * alpha + _WHITE * (255 - alpha) + 127) // 255, tf.uint8)

    return tf.cond(tf.reduce_all(image[..., 3] == 255), lambda: image[..., :3], blend)


def _upright(image: tf.Tensor, searched: tf.Tensor, pattern: str) -> tf.Tensor:
    """The image turned and mirrored as the TIFF block that follows `pattern` in `searched` says, if there is one."""
    tiff = tf.strings.regex_replace(searched, pattern, r"\1", replace_global=False)
    return tf.cond(
        tf.strings.length(tiff) < tf.strings.length(searched),
        lambda: _oriented(image, tiff),
        lambda: image,
    )


def _orientation(tiff: tf.Tensor) -> tf.Tensor:
    """The orientation, 1 to 8, that a TIFF block's first directory states; 1 where it states none."""
    # The padding makes every read of a cut-off block fall on zeros.
    data = tf.pad(integers(tiff), [[0, 16]])
    end = tf.size(data) - 16
    little = data[0] == ord("I")

    def number(byte_axis_last: tf.Tensor) -> tf.Tensor:
        low, high = byte_axis_last[..., 0], byte_axis_last[..., 1]
        return tf.where(little, low + 256 * high, 256 * low + high)

    offset = tf.where(little, _number(data, 4, 4), _number(data[7:3:-1], 0, 4))
    offset = tf.where((offset >= 8) & (offset <= end), offset, end)
    entries = data[offset + 2 :][: 12 * number(data[offset : offset + 2])]
    entries = tf.reshape(entries[: tf.size(entries) // 12 * 12], (-1, 12))
    stated = tf.where(number(entries[:, :2]) == _ORIENTATION_TAG, number(entries[:, 8:10]), 0)
    orientation = tf.reduce_max(tf.concat([stated, [0]], 0))
    return tf.where((orientation >= 1) & (orientation <= 8), orientation, 1)


@tf.function(
    input_signature=[tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.string)],
    autograph=False,
    experimental_attributes={"_noinline": True},
)
def _oriented(image: tf.Tensor, tiff: tf.Tensor) -> tf.Tensor:
    """The image as its EXIF orientation wants it shown: transposed for 5 to 8, then mirrored."""
    orientation = _orientation(tf.strings.substr(tiff, 0, _HEAD_BYTES))
    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    upside_down = tf.reduce_any(orientation == [3, 4, 7, 8])
    mirrored = tf.reduce_any(orientation == [2, 3, 6, 7])
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([upside_down, mirrored, False]))


def _paint_gif_transparency(encoded: tf.Tensor) -> tf.Tensor:
    """The GIF with its first frame's transparent palette entry made opaque white.

    TensorFlow shows transparent pixels as black, which cannot be distinguished from black ones afterwards.
    """
    data = tf.pad(integers(_head(encoded)), [[0, PADDING]])
    end = tf.size(data) - PADDING
    # Over comments and the like to the graphic control block or the frame itself.
    at, _ = walk_blocks(data, lambda at: (data[at] == EXTENSION) & (data[at + 1] != GRAPHIC_CONTROL))
    local_palette = (data[at + 8] == FRAME) & (data[at + 17] >= 128)
    colour = tf.where(local_palette, at + 18, 13) + 3 * data[at + 6]
    transparent = (data[at] == EXTENSION) & (data[at + 1] == GRAPHIC_CONTROL) & (data[at + 3] & 1 == 1)

    def painted() -> tf.Tensor:
        return _replaced(_replaced(encoded, at + 3, b"\x00"), colour, b"\xff\xff\xff")

    return tf.cond(transparent & (tf.maximum(at, colour) + 8 <= end), painted, lambda: encoded)


def _replaced(text: tf.Tensor, at: tf.Tensor, new: bytes) -> tf.Tensor:
    """`text` with the bytes at `at` overwritten by `new`."""
    length = tf.strings.length(text)
    return tf.strings.join([_cut(text, 0, at), new, _cut(text, at + len(new), length)])


def _cut(text: tf.Tensor, at: int | tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    """At most `size` bytes from `at` on; none where the string ends before (an error with substr alone)."""
    return tf.strings.substr(text, tf.minimum(at, tf.strings.length(text)), size)


def _has(encoded: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    """Whether the bytes at `at` are `expected`."""
    return _cut(encoded, at, len(expected)) == expected


def _head(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, _HEAD_BYTES)


def _header(encoded: tf.Tensor, size: int) -> tf.Tensor:
    """The first `size` bytes as (size,) int32, zeros where the string ends before."""
    data = integers(tf.strings.substr(encoded, 0, size))
    return tf.pad(data, [[0, size - tf.size(data)]])


def integers(text: tf.Tensor) -> tf.Tensor:
    """The bytes of a string as (n,) int32."""
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


def _number(data: tf.Tensor, at: int, size: int) -> tf.Tensor:
    """The little-endian number of `size` bytes at `at`."""
    return tf.reduce_sum(data[at : at + size] * [1 << 8 * i for i in range(size)])
