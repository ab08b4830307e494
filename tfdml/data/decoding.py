"""Decodes JPEG, PNG and WebP to RGB as a person sees them, in TensorFlow graph operations alone.

The input pipeline and the exported serving graph call the same `decode_image`, so that what is
served is what was trained.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.data.limits import NARROWEST

# Images of more pixels are decoded one at a time in a process, all others side by side.
_LARGE = 2**25
# As many pixels of a transparent image are blended at once.
_BLENDED = 2**18
_LONGEST_HEADER = 32


@dataclasses.dataclass(frozen=True)
class Format:
    """An image format.

    Args:
        name: As people write it.
        start: The bytes that a file begins with.
        extensions: Of file names, in lower case. A file without one of them may be an image as
            well, see `format_of`.
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
EXTENSIONS = (*JPEG.extensions, *PNG.extensions, *WEBP.extensions)
FOREIGN = "not a JPEG, PNG or WebP image"


def format_of(head: bytes) -> Format | None:
    """Return the format of a file by its first 16 bytes; None for another.

    Example:
        >>> format_of(b"RIFF....WEBPVP8 ").name
        'WebP'
    """
    return next((image_format for image_format in FORMATS if image_format.matches(head)), None)


_EXIF = b"Exif\0\0"
_TIFF = r"(Exif\x00\x00){0,2}(II\*\x00|MM\x00\*)\C*"
_ORIENTATION_TAG = 0x0112
_SHORT, _LONG = 3, 4
# Bytes of an entry of a TIFF directory.
_ENTRY = 12
# Of a TIFF block no more is read than this.
_MOST_TIFF = 2**20
# Blocks with the name of an EXIF block; the first TIFF block among them counts.
_MOST_BLOCKS = 8
# An orientation is looked for in so many segments of a JPEG.
_MOST_SEGMENTS = 64
# Each scan of a JPEG passes over the whole image, however few bytes it has. Encoders write 3 to
# 20, the usual progressive script 10. So many pixels may be passed over, in so many scans.
_MOST_SCANNED = 2**31
_MOST_SCANS = 100
# Up to the end of a JPEG: tables and restart intervals may precede each scan.
_MOST_MARKERS = _MOST_SEGMENTS + 5 * _MOST_SCANS
_SCAN_MARKER = b"\xff\xda"
_APP1_MARKER = b"\xff\xe1"
_CMYK_CHANNELS = 4
# The beginning of a JPEG, with a segment that says no more than that Adobe's way is meant.
_ADOBE_START = b"\xff\xd8\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
# Bytes in which the next marker is looked for at once.
_STRIDE = 2**16
# Behind every file.
_END = 2**31 - 1
# In the header of a WebP.
_ANIMATION_FLAG, _EXIF_FLAG = 0x02, 0x08
# A compressed text of a PNG, and the name of a chunk that no decoder knows.
_COMPRESSED_TEXTS = (b"zTXt", b"iTXt")
_UNKNOWN_CHUNK = b"xTXt"


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decode one image to upright, opaque RGB.

    The format is recognized from the bytes, never from the file name.

    - JPEG: gray, RGB, CMYK and YCCK (Adobe's inverted ones too), baseline and progressive;
      bit-equal with libjpeg's accurate integer transform, which Pillow uses.
    - PNG: every color type and depth; 16 bits are cut to the upper 8. APNG: the default image.
    - WebP: lossy and lossless. Animations are refused.
    - Transparency (alpha channel, palette or color key) is laid over white.
    - The orientation of EXIF is applied: of the first block of a PNG or WebP, and of a JPEG where
      it is among the first 64 segments. A damaged block counts as upright. Orientations in XMP or
      in texts of a PNG are not read; `tfdml prepare` writes such images upright.
    - Color profiles and gamma are ignored.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG or WebP file.

    Returns:
        (H, W, 3) uint8.

    Raises:
        tf.errors.InvalidArgumentError: The bytes are not one of these formats, or are damaged; one
            side is more than 100 times the other; or a JPEG has more than 100 scans, or scans of
            more than 2^31 pixels in all.

    Example:
        >>> image = decode_image(jpeg)  # the bytes of a file
    """
    encoded = tf.convert_to_tensor(encoded)
    shape = _header_shape(encoded)
    size = shape[:2]
    wide = tf.reduce_max(size) <= NARROWEST * tf.maximum(tf.reduce_min(size), 1)
    narrow = [
        "too narrow:",
        size[1],
        "x",
        size[0],
        f"pixels, one side is more than {NARROWEST} times the other",
    ]
    with tf.control_dependencies([tf.debugging.Assert(wide, narrow)]):
        encoded = tf.identity(encoded)

    def decode() -> tf.Tensor:
        return tf.cond(
            is_format(encoded, JPEG),
            lambda: _decode_jpeg(encoded, shape),
            lambda: _decode_other(encoded),
        )

    return tf.ensure_shape(_in_turn(size, decode), (None, None, 3))


def narrow_fault(height: int, width: int) -> str:
    """Return what forbids an image of this size to be enlarged; empty for nothing.

    Example:
        >>> narrow_fault(2, 10_000)
        'too narrow: 10,000 x 2 pixels, one side is more than 100 times the other; crop it'
    """
    fault = (
        f"too narrow: {width:,} x {height:,} pixels, one side is more than {NARROWEST} times the "
        "other; crop it"
    )
    return fault if max(height, width) > NARROWEST * min(height, width) else ""


def box_fault(box: Sequence[int], height: int, width: int) -> str:
    """Return what is wrong with a box in an image of this size; empty for nothing.

    Example:
        >>> box_fault((0, 0, 30, 20), height=20, width=20)
        'the box 0,0,30,20 reaches beyond the image, of 20 x 20 pixels; correct it'
    """
    x1, y1, x2, y2 = box
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        text = ",".join(map(str, box))
        return f"the box {text} reaches beyond the image, of {width} x {height} pixels; correct it"
    return narrow_fault(y2 - y1, x2 - x1)


@tf.function(
    input_signature=[tf.TensorSpec((), tf.string), tf.TensorSpec((4,), tf.int32)], autograph=False
)
def encoded_crop(encoded: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    """Return the pixels of an upright image in a box, those of Pillow's `crop`, as a PNG.

    Args:
        encoded: Scalar string, see `decode_image`.
        box: (4,) int32: x1, y1, x2, y2; x2 and y2 are outside.

    Raises:
        tf.errors.InvalidArgumentError: The box reaches beyond the image, or see `decode_image`.

    Example:
        >>> decode_image(encoded_crop(jpeg, [1, 0, 6, 2])).shape
        TensorShape([2, 5, 3])
    """
    x1, y1, x2, y2 = tf.unstack(box)
    part = tf.slice(decode_image(encoded), [y1, x1, 0], [y2 - y1, x2 - x1, 3])
    return tf.io.encode_png(part, compression=1)


def _in_turn(size: tf.Tensor, decode: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return a decoded image; while it is decoded no other large one is."""

    def locked() -> tf.Tensor:
        lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name="tfdml_large_images"))
        with tf.control_dependencies([lock]):
            image = tf.identity(decode())
        with tf.control_dependencies([image]):
            released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([released]):
            return tf.identity(image)

    return tf.cond(size[0] > _LARGE // tf.maximum(size[1], 1), locked, decode)


def starts_with(encoded: tf.Tensor, start: bytes) -> tf.Tensor:
    """Whether these are the first bytes, a scalar bool."""
    return _has(encoded, 0, start)


def is_format(encoded: tf.Tensor, image_format: Format) -> tf.Tensor:
    """`Format.matches` in the graph."""
    start = starts_with(encoded, image_format.start)
    return start & _has(encoded, 8, image_format.brand) if image_format.brand else start


def not_inlined(
    *specs: tf.TensorSpec,
) -> Callable[[Callable[..., tf.Tensor]], Callable[..., tf.Tensor]]:
    """Return the decorator of a part of graphs that most images do not need, called with tensors of
    these kinds.

    Inlined, even the operations of a branch not taken cost time, together half that of decoding a
    thumbnail.
    """
    return tf.function(
        input_signature=specs, autograph=False, experimental_attributes={"_noinline": True}
    )


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
    return _header_shape(encoded)[:2]


def _header_shape(encoded: tf.Tensor) -> tf.Tensor:
    """Return the height and width, see `header_size`, and the channels of a JPEG, (3,) int64."""

    def of_jpeg() -> tf.Tensor:
        return tf.cast(tf.io.extract_jpeg_shape(encoded), tf.int64)

    def of_other() -> tf.Tensor:
        return tf.pad(_size_of_other(encoded), [[0, 1]])

    shape = tf.cond(is_format(encoded, JPEG), of_jpeg, of_other)
    return tf.ensure_shape(shape, (3,))


@not_inlined(tf.TensorSpec((), tf.string))
def _size_of_other(encoded: tf.Tensor) -> tf.Tensor:
    # With zeros behind, where the header is cut off.
    padded = tf.io.decode_raw(
        tf.strings.substr(encoded, 0, _LONGEST_HEADER), tf.uint8, fixed_length=_LONGEST_HEADER
    )
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
        return tf.cond(
            is_format(encoded, WEBP), lambda: _decode_webp(encoded), lambda: _refuse(encoded)
        )

    return tf.cond(is_format(encoded, PNG), lambda: _decode_png(encoded), webp_or_error)


def _decode_jpeg(encoded: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    # Plain: one scan, no EXIF in front of it, which may turn the image, and gray or RGB.
    pieces = _split(encoded, _SCAN_MARKER, most=2)
    has_app1 = tf.size(_split(pieces[0], _APP1_MARKER, most=1)) > 1
    is_plain = (tf.size(pieces) == 2) & ~has_app1 & (shape[2] != _CMYK_CHANNELS)
    return tf.cond(
        is_plain, lambda: _decode_plain_jpeg(encoded), lambda: _decode_other_jpeg(encoded, shape)
    )


def _decode_plain_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


@not_inlined(tf.TensorSpec((), tf.string), tf.TensorSpec((3,), tf.int64))
def _decode_other_jpeg(encoded: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Decode a JPEG that may be turned, or have several scans or four channels."""
    fault = scan_fault(encoded)
    with tf.control_dependencies([tf.debugging.Assert(fault == "", [fault])]):
        orientation = _orientation_of_jpeg(encoded)
    # All programs write CMYK inverted, as Adobe does, and the decoder takes only files with Adobe's
    # marker for that. A second marker, the file's own, would count.
    marked = tf.strings.join([_ADOBE_START, tf.strings.substr(encoded, 2, -1)])
    encoded = tf.where(shape[2] == _CMYK_CHANNELS, marked, encoded)
    with tf.control_dependencies([orientation]):
        image = _decode_plain_jpeg(tf.identity(encoded))
    return upright(image, orientation)


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    # Most files have none of these chunks.
    special = tf.strings.regex_full_match(encoded, r"\C*(tRNS|eXIf|[zi]TXt)\C*")
    encoded, keyed, orientation = tf.cond(
        special, lambda: _read_png_chunks(encoded), lambda: (encoded, False, 1)
    )
    # The decoder strips a color key unless four channels are asked for, and then gives images of
    # less than 8 bits without a key the alpha 1, 3 or 15 instead of 255: so ask for four only where
    # there is transparency.
    color_type = _byte(encoded, 25)

    def transparent() -> tf.Tensor:
        return _over_white(tf.io.decode_png(encoded, channels=4))

    def opaque() -> tf.Tensor:
        return tf.io.decode_png(encoded, channels=3)

    image = tf.cond((color_type >= 4) | keyed, transparent, opaque)
    return upright(image, orientation)


def _decode_webp(encoded: tf.Tensor) -> tf.Tensor:
    flags = _webp_flags(encoded)
    # TensorFlow 2.21's decoder writes outside its buffer when it is given an animation.
    check = tf.debugging.Assert(
        flags & _ANIMATION_FLAG == 0,
        ["animated WebP is not supported: save its first frame as a still image"],
    )
    with tf.control_dependencies([check]):
        image = tf.io.decode_webp(encoded)[0]
    image = tf.cond(tf.shape(image)[-1] == 4, lambda: _over_white(image), lambda: image)
    has_exif = flags & _EXIF_FLAG != 0
    return upright(image, tf.cond(has_exif, lambda: _orientation_of_webp(encoded), lambda: 1))


def _webp_flags(encoded: tf.Tensor) -> tf.Tensor:
    return tf.where(_has(encoded, 12, b"VP8X"), tf.cast(_byte(encoded, 20), tf.int32), 0)


def _refuse(encoded: tf.Tensor) -> tf.Tensor:
    # The bytes themselves stay out of the message: Python fails on messages that are not UTF-8.
    check = tf.debugging.Assert(False, [FOREIGN + "; bytes:", tf.strings.length(encoded)])
    with tf.control_dependencies([check]):
        return tf.zeros((0, 0, 3), tf.uint8)


def _over_white(image: tf.Tensor) -> tf.Tensor:
    """(H, W, 4) uint8 to (H, W, 3), laid over white by its alpha."""

    def blend() -> tf.Tensor:
        height, width = tf.unstack(tf.shape(image)[:2])
        count = tf.maximum(_BLENDED // tf.maximum(width, 1), 1)
        starts = tf.range(0, height, count)

        def is_left(number: tf.Tensor, _: tf.TensorArray) -> tf.Tensor:
            return number < tf.size(starts)

        def block(number: tf.Tensor, blocks: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            start = starts[number]
            rows = tf.cast(image[start : start + count], tf.uint16)
            color = rows[..., :3]
            alpha = rows[..., 3:]
            # The sum is at most 255 * 255 + 127.
            blended = (color * alpha + 255 * (255 - alpha) + 127) // 255
            return number + 1, blocks.write(number, tf.cast(blended, tf.uint8))

        blocks = tf.TensorArray(
            tf.uint8, tf.size(starts), element_shape=(None, None, 3), infer_shape=False
        )
        return tf.while_loop(is_left, block, (0, blocks), parallel_iterations=1)[1].concat()

    return tf.cond(tf.reduce_all(image[..., 3] == 255), lambda: image[..., :3], blend)


def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Return an image (H, W, 3) uint8 as an orientation, 1 to 8, wants it shown."""
    return tf.cond(orientation > 1, lambda: _oriented(image, orientation), lambda: image)


@not_inlined(tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int32))
def _oriented(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Return the image as its orientation wants it shown: transposed for 5 to 8, then mirrored."""
    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    upside_down = tf.reduce_any(orientation == [3, 4, 7, 8])
    mirrored = tf.reduce_any(orientation == [2, 3, 6, 7])
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([upside_down, mirrored, False]))


def _split(encoded: tf.Tensor, separator: bytes, most: int) -> tf.Tensor:
    """Return the pieces between the first `most` separators."""
    return tf.raw_ops.StringSplitV2(input=encoded[None], sep=separator, maxsplit=most).values


@not_inlined(tf.TensorSpec((), tf.string))
def orientation_of(encoded: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, by which an image is turned upright.

    Args:
        encoded: Scalar string, the bytes of an image.

    Example:
        >>> int(orientation_of(jpeg))
        1
    """

    def of_other() -> tf.Tensor:
        has_exif = is_format(encoded, WEBP) & (_webp_flags(encoded) & _EXIF_FLAG != 0)
        return tf.cond(has_exif, lambda: _orientation_of_webp(encoded), lambda: 1)

    def of_png_or_other() -> tf.Tensor:
        return tf.cond(is_format(encoded, PNG), lambda: _orientation_of_png(encoded), of_other)

    return tf.cond(is_format(encoded, JPEG), lambda: _orientation_of_jpeg(encoded), of_png_or_other)


@not_inlined(tf.TensorSpec((), tf.string))
def shown_size(encoded: tf.Tensor) -> tf.Tensor:
    """Return the height and width of an image as it is shown; nothing is decoded.

    Args:
        encoded: See `header_size`.

    Returns:
        (2,) int64; zeros for what is no image.

    Example:
        >>> shown_size(tf.io.encode_png(tf.zeros((4, 6, 3), tf.uint8))).numpy()
        array([4, 6])
    """
    size = header_size(encoded)
    return tf.where(orientation_of(encoded) >= 5, size[::-1], size)


def _orientation_of_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    return _orientation(_walk_jpeg(encoded, tf.constant(False))[1])


@not_inlined(tf.TensorSpec((), tf.string))
def scan_fault(encoded: tf.Tensor) -> tf.Tensor:
    """Return what is wrong with the number of an image's scans, a scalar string; empty for nothing.

    Args:
        encoded: Scalar string, the bytes of an image.

    Example:
        >>> scan_fault(jpeg).numpy()
        b''
    """
    # Films behind a JPEG, and thumbnails, hold the marker too: then the scans are counted.
    most = _most_scans(header_size(encoded))
    count = tf.size(_split(encoded, _SCAN_MARKER, _MOST_SCANS + 1), out_type=tf.int64) - 1
    fault = f"too many scans or segments, more than {{}} scans or {_MOST_MARKERS} segments"

    def counted() -> tf.Tensor:
        at, _, scans = _walk_jpeg(encoded, tf.constant(True))
        has_more = at + 2 <= tf.cast(tf.strings.length(encoded), tf.int64)
        text = tf.strings.format(fault + "; save it again", most)
        return tf.where((scans > most) | has_more, text, "")

    return tf.cond(is_format(encoded, JPEG) & (count > most), counted, lambda: "")


def _most_scans(size: tf.Tensor) -> tf.Tensor:
    """Return how many scans a JPEG of this height and width may have."""
    return tf.clip_by_value(_MOST_SCANNED // tf.maximum(tf.reduce_prod(size), 1), 1, _MOST_SCANS)


@not_inlined(tf.TensorSpec((), tf.string))
def is_cut(encoded: tf.Tensor) -> tf.Tensor:
    """Whether a JPEG lacks its end marker, a scalar bool; whatever lies behind it does not count.

    Args:
        encoded: Scalar string, the bytes of a JPEG.

    Example:
        >>> bool(is_cut(jpeg + b"a film")), bool(is_cut(jpeg[:-2]))
        (False, True)
    """
    at = _walk_jpeg(encoded, tf.constant(True))[0]
    length = tf.cast(tf.strings.length(encoded), tf.int64)
    return (at + 2 > length) & (at < _END)


@not_inlined(tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.bool))
def _walk_jpeg(encoded: tf.Tensor, to_end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Walk along the segments of a JPEG, as its decoder does.

    Args:
        encoded: The file.
        to_end: Whether to walk to the end marker; otherwise only until the EXIF block is read or
            the first scan begins.

    Returns:
        Where the walk stopped: `_END` at its goal, behind the end of the file where that is cut, or
        where there were too many segments; the TIFF block of EXIF; and the number of scans.
    """
    length = tf.cast(tf.strings.length(encoded), tf.int64)

    def step(
        at: tf.Tensor, tiff: tf.Tensor, was_exif: tf.Tensor, scans: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        marker, block, behind = _next_segment(encoded, at)
        # What is too long for a segment continues in the next.
        is_exif = (block != "") & ((tiff == "") | was_exif)
        tiff = tf.strings.substr(tf.where(is_exif, tiff + block, tiff), 0, _MOST_TIFF)
        is_scan = marker == _SCAN_MARKER[1]
        is_read = is_scan | ((tiff != "") & ~is_exif)
        is_goal = (marker == 0xD9) | (is_read & ~to_end)
        at = tf.where(is_goal, tf.constant(_END, tf.int64), behind)
        return at, tiff, is_exif, scans + tf.cast(is_scan, tf.int64)

    def is_inside(at: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return at + 2 <= length

    # Compressed data without a marker takes steps, too.
    to_goal = _MOST_MARKERS + tf.cast(length // (_STRIDE - 1), tf.int32)
    most = tf.where(to_end, to_goal, _MOST_SEGMENTS)
    zero = tf.constant(0, tf.int64)
    state = (zero + 2, tf.constant(""), tf.constant(False), zero)
    at, tiff, _, scans = tf.while_loop(
        is_inside, step, state, maximum_iterations=most, parallel_iterations=1
    )
    return at, tiff, scans


def _next_segment(encoded: tf.Tensor, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the next marker from a place on, 0 where the next bytes have none; what its segment
    holds of EXIF; and the place behind it."""
    data = tf.io.decode_raw(tf.strings.substr(encoded, at, _STRIDE), tf.uint8)
    code = data[1:]
    # Neither filling nor restarts nor 0xFF in compressed data.
    is_marker = (data[:-1] == 0xFF) & (code != 0) & (code != 0xFF) & (code & 0xF8 != 0xD0)
    place = tf.argmax(is_marker)
    marker = tf.where(is_marker[place], code[place], 0)
    start = at + place

    head = tf.strings.substr(encoded, start, 4 + len(_EXIF))
    header = tf.cast(tf.io.decode_raw(head, tf.uint8, fixed_length=4), tf.int64)
    size = tf.maximum(256 * header[2] + header[3], 2)
    is_exif = (marker == 0xE1) & _has(head, 4, _EXIF)
    size_of_exif = tf.where(is_exif, tf.maximum(size - 2 - len(_EXIF), 0), 0)
    # A segment may be cut.
    start_of_exif = tf.where(is_exif, start + 4 + len(_EXIF), 0)
    block = tf.strings.substr(encoded, start_of_exif, size_of_exif)

    has_size = (marker != 0x01) & (marker != 0xD8)
    behind = start + 2 + tf.where(has_size, size, 0)
    return marker, block, tf.where(marker == 0, at + _STRIDE - 1, behind)


@not_inlined(tf.TensorSpec((), tf.string))
def _read_png_chunks(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return a PNG without compressed texts, whether it has a transparent color or palette, and the
    orientation, 1 to 8."""
    # At most 256 entries.
    keyed = tf.strings.regex_full_match(encoded, r"\C*\x00\x00[\x00\x01]\CtRNS\C*")
    return without_texts(encoded), keyed, _orientation_of_png(encoded)


def without_texts(png: tf.Tensor) -> tf.Tensor:
    """Return a PNG whose compressed texts are renamed to chunks that a decoder skips; it would
    inflate each to 8 MB."""
    for name in _COMPRESSED_TEXTS:
        png = tf.strings.reduce_join(_split(png, name, -1), separator=_UNKNOWN_CHUNK)
    return png


def _orientation_of_png(encoded: tf.Tensor) -> tf.Tensor:
    return _orientation(_tiff_behind(encoded, b"eXIf", 0))


@not_inlined(tf.TensorSpec((), tf.string))
def _orientation_of_webp(encoded: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8."""
    return _orientation(_tiff_behind(encoded, b"EXIF", 4))


def _tiff_behind(encoded: tf.Tensor, name: bytes, skip: int) -> tf.Tensor:
    """Return the first TIFF block that follows the name of a chunk and so many bytes; empty for
    none."""
    pieces = _split(encoded, name, _MOST_BLOCKS)[1:]
    blocks = tf.strings.substr(tf.strings.join([pieces, bytes(skip)]), skip, _MOST_TIFF)
    is_tiff = tf.strings.regex_full_match(blocks, _TIFF)
    return tf.concat([tf.boolean_mask(blocks, is_tiff), [""]], 0)[0]


def only(items: tf.data.Dataset) -> Any:
    """Return the single element, without the searching for speed that pays over many."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return items.with_options(options).get_single_element()


def _orientation(tiff: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, of an EXIF block."""
    # Some programs write its name twice.
    plain = tf.strings.regex_replace(tiff, r"^(Exif\x00\x00){1,2}", "")
    stated = _orientation_of_tiff(plain)
    return tf.where((stated >= 1) & (stated <= 8), stated, 1)


def _orientation_of_tiff(tiff: tf.Tensor) -> tf.Tensor:
    """Return the number that a TIFF block's first directory states; -1 where it states none."""
    # The padding makes every read of a cut-off block fall on zeros.
    data = tf.pad(integers(tiff), [[0, 16]])
    end = tf.size(data) - 16
    little = _has(tiff, 0, b"II*\0")
    # Slices of `tf.slice` have a known size.
    offset = _number(tf.slice(data, [4], [4]), little)
    is_inside = (offset >= 8) & (offset <= tf.cast(end, tf.int64))
    is_valid = (little | _has(tiff, 0, b"MM\0*")) & is_inside
    directory = data[tf.where(is_valid, tf.cast(offset, tf.int32), end) :]
    value = tf.concat([_values_of_tag(directory, little, _ORIENTATION_TAG), [-1]], 0)[0]
    return tf.cast(tf.minimum(value, 9), tf.int32)


def _values_of_tag(directory: tf.Tensor, little: tf.Tensor, expected_tag: int) -> tf.Tensor:
    """Return the whole numbers that a TIFF directory states for a tag, (n,) int64; one for each
    entry of this tag."""
    stated = tf.cast(_number(tf.slice(directory, [0], [2]), little), tf.int32)
    entries = directory[2 : 2 + stated * _ENTRY]
    whole = tf.size(entries) // _ENTRY
    entries = tf.reshape(entries[: whole * _ENTRY], (whole, _ENTRY))
    # Of an entry: two bytes of tag, two of kind, four of count, four of value.
    tag = _number(entries[:, :2], little)
    kind = _number(entries[:, 2:4], little)
    count = _number(entries[:, 4:8], little)
    shorts = _number(entries[:, 8:10], little)
    longs = _number(entries[:, 8:12], little)
    values = tf.where(kind == _SHORT, shorts, longs)
    is_number = (kind == _SHORT) | (kind == _LONG)
    is_stated = (tag == expected_tag) & is_number & (count > 0)
    return tf.boolean_mask(values, is_stated)


def _number(data: tf.Tensor, little: tf.Tensor) -> tf.Tensor:
    """Return the int64 numbers of the bytes along the last axis, whose order is little-endian or
    big-endian."""
    places = tf.constant([1 << 8 * i for i in range(data.shape[-1])], tf.int64)
    places = tf.where(little, places, places[::-1])
    return tf.reduce_sum(tf.cast(data, tf.int64) * places, -1)


def _has(encoded: tf.Tensor, at: int, expected: bytes) -> tf.Tensor:
    """Whether these bytes are at this place, which may lie behind the end."""
    place = tf.minimum(at, tf.strings.length(encoded))
    return tf.strings.substr(encoded, place, len(expected)) == expected


def _byte(encoded: tf.Tensor, at: int) -> tf.Tensor:
    """Return the byte at a place, 0 behind the end."""
    return tf.io.decode_raw(tf.strings.substr(encoded, 0, at + 1), tf.uint8, fixed_length=at + 1)[
        at
    ]


def integers(text: tf.Tensor) -> tf.Tensor:
    """Return the bytes of a string as (n,) int32."""
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


@not_inlined(tf.TensorSpec((), tf.string))
def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decode as `decode_image`, in a graph that is traced once."""
    return decode_image(encoded)
