"""Decodes JPEG, PNG and WebP to RGB as a person sees them, in TensorFlow graph operations alone.

The input pipeline and the exported serving graph call the same `decode_image`, so that what is served is what was
trained.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

# TensorFlow's decoders hold at most 2^29 values, that is so many pixels of three.
DECODER_LIMIT = 178_956_970
# By default in a server, where an image takes up to ten bytes a pixel: 1 GB for the largest.
SERVING_LIMIT = 100_000_000
# A side may be this many times the other: enlarged until its shorter side fits, a line of pixels would fill the memory.
NARROWEST = 100
_LONGEST_HEADER = 32


@dataclasses.dataclass(frozen=True)
class Format:
    """An image format.

    Args:
        name: As people write it.
        start: The bytes that a file begins with.
        extensions: Of file names, in lower case. A file without one of them may be an image as well, see `format_of`.
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


# The entry of EXIF's orientation, before its value, in the two orders of bytes.
_LITTLE_ENDIAN, _BIG_ENDIAN = b"\x12\x01\x03\0\x01\0\0\0", b"\x01\x12\0\x03\0\0\0\x01"
# EXIF is one of a JPEG's first segments, of at most 64 KiB each.
_START = 2**17


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decode one image to upright, opaque RGB.

    The format is recognized from the bytes, never from the file name.

    - JPEG: gray, RGB, CMYK and YCCK (Adobe's inverted ones too), baseline and progressive; bit-equal with libjpeg's
      accurate integer transform, which Pillow uses.
    - PNG: every color type and depth; 16 bits are cut to the upper 8. APNG: the default image.
    - WebP: lossy and lossless. Animations are refused.
    - Transparency (alpha channel, palette or color key) is laid over white.
    - The orientation that EXIF states is applied, as browsers do.
    - Color profiles and gamma are ignored.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG or WebP file.

    Returns:
        (H, W, 3) uint8.

    Raises:
        tf.errors.InvalidArgumentError: The bytes are not one of these formats, or are damaged; or one side is more than
            100 times the other.

    Example:
        >>> image = decode_image(jpeg)  # the bytes of a file
    """
    encoded = tf.convert_to_tensor(encoded)
    size = header_size(encoded)
    wide = tf.reduce_max(size) <= NARROWEST * tf.maximum(tf.reduce_min(size), 1)
    narrow = ["too narrow:", size[1], "x", size[0], f"pixels, one side is more than {NARROWEST} times the other"]
    with tf.control_dependencies([tf.debugging.Assert(wide, narrow)]):
        encoded = tf.identity(encoded)

    image = tf.cond(is_format(encoded, JPEG), lambda: _decode_jpeg(encoded), lambda: _decode_other(encoded))
    return tf.ensure_shape(image, (None, None, 3))


def narrow_fault(height: int, width: int) -> str:
    """Return what forbids an image of this size to be enlarged; empty for nothing.

    Example:
        >>> narrow_fault(2, 10_000)
        'too narrow: 10,000 x 2 pixels, one side is more than 100 times the other; crop it'
    """
    fault = f"too narrow: {width:,} x {height:,} pixels, one side is more than {NARROWEST} times the other; crop it"
    return fault if max(height, width) > NARROWEST * min(height, width) else ""


def starts_with(encoded: tf.Tensor, start: bytes) -> tf.Tensor:
    """Whether these are the first bytes, a scalar bool."""
    return _has(encoded, 0, start)


def is_format(encoded: tf.Tensor, known: Format) -> tf.Tensor:
    """`Format.matches` in the graph."""
    start = starts_with(encoded, known.start)
    return start & _has(encoded, 8, known.brand) if known.brand else start


def not_inlined(*specs: tf.TensorSpec) -> Callable[[Callable[..., tf.Tensor]], Callable[..., tf.Tensor]]:
    """Return the decorator of a part of graphs that most images do not need, called with tensors of these kinds.

    Inlined, even the operations of a branch not taken cost time, together half that of decoding a thumbnail.
    """
    return tf.function(input_signature=specs, autograph=False, experimental_attributes={"_noinline": True})


def header_size(encoded: tf.Tensor) -> tf.Tensor:
    """Return the height and width that an image's header states; nothing is decoded.

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


@not_inlined(tf.TensorSpec((), tf.string))
def _size_of_other(encoded: tf.Tensor) -> tf.Tensor:
    # With zeros behind, where the header is cut off.
    padded = tf.io.decode_raw(tf.strings.substr(encoded, 0, _LONGEST_HEADER), tf.uint8, fixed_length=_LONGEST_HEADER)
    header = tf.cast(padded, tf.int64)

    def number(data: tf.Tensor) -> tf.Tensor:
        """Return the little-endian number of bytes."""
        return tf.reduce_sum(data * [1 << 8 * i for i in range(data.shape[0])])

    def chunk(name: bytes) -> tf.Tensor:
        return tf.reduce_all(header[12:16] == list(name))

    bits = number(header[21:25])
    png = tf.stack([number(header[23:19:-1]), number(header[19:15:-1])])
    extended = 1 + tf.stack([number(header[27:30]), number(header[24:27])])
    lossless = 1 + tf.stack([bits // 2**14 % 2**14, bits % 2**14])
    lossy = tf.stack([number(header[28:30]), number(header[26:28])]) % 2**14
    webp = tf.where(chunk(b"VP8X"), extended, tf.where(chunk(b"VP8L"), lossless, lossy))
    none = tf.zeros((2,), tf.int64)
    return tf.where(is_format(encoded, PNG), png, tf.where(is_format(encoded, WEBP), webp, none))


@not_inlined(tf.TensorSpec((), tf.string))
def _decode_other(encoded: tf.Tensor) -> tf.Tensor:
    def webp_or_error() -> tf.Tensor:
        return tf.cond(is_format(encoded, WEBP), lambda: _decode_webp(encoded), lambda: _refuse(encoded))

    return tf.cond(is_format(encoded, PNG), lambda: _decode_png(encoded), webp_or_error)


def _decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
    return _upright(image, _behind(tf.strings.substr(encoded, 0, _START), b"Exif\0\0"))


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    color_type = _byte(encoded, 25)
    keyed = _behind(encoded, b"tRNS") != ""
    image = tf.cond(
        (color_type >= 4) | keyed,
        lambda: _over_white(tf.io.decode_png(encoded, channels=4)),
        lambda: tf.io.decode_png(encoded, channels=3),
    )
    return _upright(image, _behind(encoded, b"eXIf"))


def _decode_webp(encoded: tf.Tensor) -> tf.Tensor:
    flags = tf.where(_has(encoded, 12, b"VP8X"), tf.cast(_byte(encoded, 20), tf.int32), 0)
    check = tf.debugging.Assert(
        flags & 0x02 == 0, ["animated WebP is not supported: save its first frame as a still image"]
    )
    with tf.control_dependencies([check]):
        image = tf.io.decode_webp(encoded)[0]
    image = tf.cond(tf.shape(image)[-1] == 4, lambda: _over_white(image), lambda: image)
    exif = _behind(encoded, b"EXIF")
    return _upright(image, tf.strings.substr(exif, tf.minimum(4, tf.strings.length(exif)), _START))  # behind its size


def _refuse(encoded: tf.Tensor) -> tf.Tensor:
    # The bytes themselves stay out of the message: Python fails on messages that are not UTF-8.
    check = tf.debugging.Assert(False, [FOREIGN + "; bytes:", tf.strings.length(encoded)])
    with tf.control_dependencies([check]):
        return tf.zeros((0, 0, 3), tf.uint8)


def _over_white(image: tf.Tensor) -> tf.Tensor:
    """(H, W, 4) uint8 to (H, W, 3), laid over white by its alpha."""

    def blend() -> tf.Tensor:
        color, alpha = tf.cast(image[..., :3], tf.uint16), tf.cast(image[..., 3:], tf.uint16)
        return tf.cast((color * alpha + 255 * (255 - alpha) + 127) // 255, tf.uint8)

    return tf.cond(tf.reduce_all(image[..., 3] == 255), lambda: image[..., :3], blend)


def _behind(encoded: tf.Tensor, start: bytes) -> tf.Tensor:
    """Return what follows the first `start`; empty without one."""
    parts = tf.raw_ops.StringSplitV2(input=encoded[None], sep=start, maxsplit=1).values
    return tf.cond(tf.size(parts) > 1, lambda: parts[-1], lambda: "")


def _upright(image: tf.Tensor, exif: tf.Tensor) -> tf.Tensor:
    """Return an image as its EXIF says that it is to be turned."""
    return tf.cond(exif != "", lambda: _oriented(image, _orientation(exif)), lambda: image)


def _orientation(exif: tf.Tensor) -> tf.Tensor:
    exif = tf.where(starts_with(exif, b"Exif\0\0"), tf.strings.substr(exif, 6, -1), exif)  # as some WebPs have it
    little = starts_with(exif, b"II*\0")
    value = _behind(exif, tf.where(little, _LITTLE_ENDIAN, _BIG_ENDIAN))
    # The value has two bytes, the first of them 0 where the largest comes first.
    number = tf.cast(tf.where(little, _byte(value, 0), _byte(value, 1)), tf.int32)
    is_exif = little | starts_with(exif, b"MM\0*")
    return tf.where(is_exif & (number >= 1) & (number <= 8), number, 1)


@not_inlined(tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int32))
def _oriented(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Return the image as its orientation wants it shown: transposed for 5 to 8, then mirrored."""
    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    upside_down = tf.reduce_any(orientation == [3, 4, 7, 8])
    mirrored = tf.reduce_any(orientation == [2, 3, 6, 7])
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([upside_down, mirrored, False]))


def _has(encoded: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    """Whether these bytes are at this place, which may lie behind the end."""
    place = tf.minimum(at, tf.strings.length(encoded))
    return tf.strings.substr(encoded, place, len(expected)) == expected


def _byte(encoded: tf.Tensor, at: int) -> tf.Tensor:
    """Return the byte at a place, 0 behind the end."""
    return tf.io.decode_raw(tf.strings.substr(encoded, 0, at + 1), tf.uint8, fixed_length=at + 1)[at]


@not_inlined(tf.TensorSpec((), tf.string))
def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decode as `decode_image`, in a graph that is traced once."""
    return decode_image(encoded)
