"""Decodes JPEG, PNG and WebP to RGB as a person sees them, whole or only a part, in TensorFlow graph operations alone.

The input pipeline and the exported serving graph call the same `decode_image`, so that what is served is what was
trained.
"""

import dataclasses
import re
from collections.abc import Callable

import tensorflow as tf

# TensorFlow's decoders hold at most 2^29 values, that is so many pixels of three.
DECODER_LIMIT = 178_956_970
# What three bytes of a decoded pixel may take in a server by default: 300 MB for the largest image.
SERVING_LIMIT = 100_000_000


@dataclasses.dataclass(frozen=True)
class Format:
    """An image format.

    Args:
        name: As people write it.
        start: The bytes that a file begins with.
        extensions: Of file names, in lower case. A file without one of them may be an image as well, see `kind_of`.
        brand: The bytes from the ninth on; empty for any.
    """

    name: str
    start: bytes
    extensions: tuple[str, ...]
    brand: bytes = b""

    def matches(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of the format.

        Example:
            >>> PNG.matches(b"GIF89a"), WEBP.matches(b"RIFF....WEBPVP8 ")
            (False, True)
        """
        return head.startswith(self.start) and head[8:].startswith(self.brand)


JPEG = Format("JPEG", b"\xff\xd8\xff", (".jpg", ".jpeg", ".jpe", ".jfif"))
PNG = Format("PNG", b"\x89PNG\r\n\x1a\n", (".png",))
WEBP = Format("WebP", b"RIFF", (".webp",), b"WEBP")
FORMATS = (JPEG, PNG, WEBP)
# Images that are recognized and not read.
_FOREIGN_KINDS = {
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{4}\0{4}",
    "TIFF": rb"II\*\0|MM\0\*|II\+\0\x08|MM\0\+\0\x08",
    "HEIC": rb".{4}ftyp(hei|hev|mif1|msf1)",
    "AVIF": rb".{4}ftypavi[fs]",
    "JPEG 2000": rb"\0{3}\x0cjP  |\xff\x4f\xff\x51",
    "JPEG XL": rb"\0{3}\x0cJXL |\xff\x0a",
    "ICO": rb"\0\0\x01\0[^\0]\0",
    "PSD": rb"8BPS\0[\x01\x02]",
    "DDS": rb"DDS \x7c\0",
}
# The extensions of file names, by which images are found in folders; what a file is, its bytes say.
EXTENSIONS = tuple(extension for known in FORMATS for extension in known.extensions)
FOREIGN = "not a JPEG, PNG or WebP image"


def format_of(head: bytes) -> Format | None:
    """Return the format of a file by its first 16 bytes; None for another.

    Example:
        >>> format_of(b"RIFF....WEBPVP8 ").name
        'WebP'
    """
    return next((known for known in FORMATS if known.matches(head)), None)


def kind_of(head: bytes) -> str:
    """Return what kind of image a file is by its first 32 bytes, whatever its name; empty for no image.

    `"JPEG"`, `"PNG"` and `"WebP"` are read; `"GIF"`, `"BMP"`, `"TIFF"`, `"HEIC"` and others are images that have to be
    converted. `tfdml.data.images.kinds_of` does the same for files.

    Example:
        >>> kind_of(b"GIF89a"), kind_of(b"%PDF-1.7")
        ('GIF', '')
    """
    known = format_of(head)
    foreign = (name for name, start in _FOREIGN_KINDS.items() if re.match(start, head, re.DOTALL))
    return known.name if known else next(foreign, "")


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
    """Decode one image to upright, opaque RGB.

    The format is recognized from the bytes, never from the file name.

    - JPEG: gray, RGB, CMYK and YCCK (Adobe's inverted ones too), baseline and progressive; bit-equal with libjpeg's
      accurate integer transform, which Pillow uses.
    - PNG: every color type and depth; 16 bits are cut to the upper 8. APNG: the default image.
    - WebP: lossy and lossless. Animations are refused.
    - Transparency (alpha channel, palette or color key) is laid over white.
    - The EXIF orientation of JPEG, PNG and WebP is applied, all eight values; a damaged EXIF block counts as
      upright. It is looked for in the first 64 KiB of a JPEG or PNG.
    - Color profiles and gamma are ignored.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG or WebP file.

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


def not_inlined(*specs: tf.TensorSpec) -> Callable[[Callable[..., tf.Tensor]], Callable[..., tf.Tensor]]:
    """Return the decorator of a part of graphs that most images do not need, called with tensors of these kinds.

    Inlined, even the operations of a branch not taken cost time, together half that of decoding a thumbnail.
    """
    return tf.function(input_signature=specs, autograph=False, experimental_attributes={"_noinline": True})


@not_inlined(tf.TensorSpec((), tf.string))
def _decode_other(encoded: tf.Tensor) -> tf.Tensor:
    def webp_or_error() -> tf.Tensor:
        return tf.cond(is_format(encoded, WEBP), lambda: _decode_webp(encoded), lambda: _refuse(encoded))

    return tf.cond(is_format(encoded, PNG), lambda: _decode_png(encoded), webp_or_error)


def _decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.cond(is_plain_jpeg(encoded), lambda: image, lambda: _upright(image, _head(encoded), _EXIF_IN_JPEG))


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    # The decoder strips a color key unless four channels are asked for, and then gives images of less than
    # 8 bits without a key the alpha 1, 3 or 15 instead of 255: so ask for four only where there is transparency.
    color_type = _number(_header(encoded, 26), 25, 1)
    keyed = tf.strings.regex_full_match(_head(encoded), r"\C*tRNS\C*")
    image = tf.cond(
        (color_type >= 4) | keyed,
        lambda: _over_white(tf.io.decode_png(encoded, channels=4)),
        lambda: tf.io.decode_png(encoded, channels=3),
    )
    return _upright(image, _head(encoded), _EXIF_IN_PNG)


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
        color, alpha = tf.cast(image[..., :3], tf.int32), tf.cast(image[..., 3:], tf.int32)
        return tf.cast((color * alpha + _WHITE * (255 - alpha) + 127) // 255, tf.uint8)

    return tf.cond(tf.reduce_all(image[..., 3] == 255), lambda: image[..., :3], blend)


def _upright(image: tf.Tensor, searched: tf.Tensor, pattern: str) -> tf.Tensor:
    """Turn and mirror the image as the TIFF block that follows `pattern` in `searched` says, if there is one."""
    tiff = tf.strings.regex_replace(searched, pattern, r"\1", replace_global=False)
    return tf.cond(tf.strings.length(tiff) < tf.strings.length(searched), lambda: _oriented(image, tiff), lambda: image)


def _orientation(tiff: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, that a TIFF block's first directory states; 1 where it states none."""
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


@not_inlined(tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.string))
def _oriented(image: tf.Tensor, tiff: tf.Tensor) -> tf.Tensor:
    """Return the image as its EXIF orientation wants it shown: transposed for 5 to 8, then mirrored."""
    orientation = _orientation(tf.strings.substr(tiff, 0, _HEAD_BYTES))
    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    upside_down = tf.reduce_any(orientation == [3, 4, 7, 8])
    mirrored = tf.reduce_any(orientation == [2, 3, 6, 7])
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([upside_down, mirrored, False]))


def _has(encoded: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    """Whether these bytes are at this place, which may lie behind the end."""
    place = tf.minimum(at, tf.strings.length(encoded))
    return tf.strings.substr(encoded, place, len(expected)) == expected


def _head(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, _HEAD_BYTES)


def _header(encoded: tf.Tensor, size: int) -> tf.Tensor:
    """Return the first `size` bytes as (size,) int32, zeros where the string ends before."""
    data = integers(tf.strings.substr(encoded, 0, size))
    return tf.pad(data, [[0, size - tf.size(data)]])


def integers(text: tf.Tensor) -> tf.Tensor:
    """Return the bytes of a string as (n,) int32."""
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


def _number(data: tf.Tensor, at: int, size: int) -> tf.Tensor:
    """Return the little-endian number of `size` bytes at `at`."""
    return tf.reduce_sum(data[at : at + size] * [1 << 8 * i for i in range(size)])


# Where a JPEG's colors have less resolution than its brightness, the decoder fills in the columns at the edge of a
# part from one side alone; it decodes rows exactly.
_FRINGE = 1


def whole(size: tf.Tensor) -> tf.Tensor:
    """Return the part that is all of an image of this size, for `decode_part`."""
    return tf.concat([[0, 0], size], 0)


def cut(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Return the part of an image (H, W, 3) that a window (4,) names: top, left, height and width."""
    return tf.slice(image, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))


def chosen_part(image: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the part of a decoded image that `choose` names, given its size; what it named; and that size."""
    size = tf.shape(image)[:2]
    window = choose(size)
    return cut(image, window), window, size


def decode_part(encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decode a part of an image that depends on the image's size, bit-equal to that part of `decode_image`.

    Of most JPEGs nothing else is turned into pixels; damage beyond the part then goes unnoticed. All other images,
    and JPEGs that may have to be turned upright, are decoded whole and cut.

    Args:
        encoded: Scalar string, see `decode_image`.
        choose: Gives, for the height and width of the image (2,) int32, the part (4,) int32: top, left, height, width.

    Returns:
        The part (h, w, 3) uint8, what `choose` said (4,) int32, and the height and width (2,) int32 that it was given.

    Raises:
        tf.errors.InvalidArgumentError: See `decode_image`.

    Example:
        >>> upper_half = lambda size: tf.stack([0, 0, size[0] // 2, size[1]])
        >>> part, window, size = decode_part(tf.constant(jpeg), upper_half)
    """

    def from_jpeg() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        size = tf.io.extract_jpeg_shape(encoded)[:2]
        window = choose(size)
        top, left, height, width = tf.unstack(window)
        before = tf.minimum(left, _FRINGE)
        after = tf.minimum(size[1] - left - width, _FRINGE)
        around = tf.stack([top, left - before, height, before + width + after])
        part = tf.io.decode_and_crop_jpeg(encoded, around, channels=3, dct_method="INTEGER_ACCURATE")
        return tf.slice(part, tf.stack([0, before, 0]), tf.stack([height, width, 3])), window, size

    jpeg = is_plain_jpeg(encoded)
    part, window, size = tf.cond(jpeg, from_jpeg, lambda: chosen_part(decode_whole(encoded), choose))
    return tf.ensure_shape(part, (None, None, 3)), tf.ensure_shape(window, (4,)), tf.ensure_shape(size, (2,))


@not_inlined(tf.TensorSpec((), tf.string))
def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decode as `decode_image`, in a graph that is traced once."""
    return decode_image(encoded)
