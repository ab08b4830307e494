"""Decodes JPEG, PNG and WebP to RGB as a person sees them, in TensorFlow graph operations alone.

The input pipeline and the exported serving graph call the same `decode_image`, so that what is
served is what was trained.
"""

import dataclasses
from collections.abc import Callable
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
EXTENSIONS = tuple(extension for known in FORMATS for extension in known.extensions)
FOREIGN = "not a JPEG, PNG or WebP image"


def format_of(head: bytes) -> Format | None:
    """Return the format of a file by its first 16 bytes; None for another.

    Example:
        >>> format_of(b"RIFF....WEBPVP8 ").name
        'WebP'
    """
    return next((known for known in FORMATS if known.matches(head)), None)


_EXIF = b"Exif\0\0"
_XMP_IN_JPEG = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_IN_PNG = b"XML:com.adobe.xmp\0"
_EXIF_AS_TEXT = b"Raw profile type exif\0"
_ORIENTATION_TAG = 0x0112
_SHORT, _LONG = 3, 4
# More of a TIFF block than this, more compressed text, and segments beyond this many are not read:
# a small file can hold or inflate to anything.
_MOST_TIFF = 2**20
_MOST_COMPRESSED = 2**16
_MOST_SEGMENTS = 2**14


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decode one image to upright, opaque RGB.

    The format is recognized from the bytes, never from the file name.

    - JPEG: gray, RGB, CMYK and YCCK (Adobe's inverted ones too), baseline and progressive;
      bit-equal with libjpeg's accurate integer transform, which Pillow uses.
    - PNG: every color type and depth; 16 bits are cut to the upper 8. APNG: the default image.
    - WebP: lossy and lossless. Animations are refused.
    - Transparency (alpha channel, palette or color key) is laid over white.
    - The orientation is applied, as by Pillow's `ImageOps.exif_transpose`: that of EXIF, wherever
      it is in the file, in a PNG also as text; where EXIF states none, that of XMP. A damaged block
      counts as upright.
    - Color profiles and gamma are ignored.

    Args:
        encoded: Scalar string, the bytes of a JPEG, PNG or WebP file.

    Returns:
        (H, W, 3) uint8.

    Raises:
        tf.errors.InvalidArgumentError: The bytes are not one of these formats, or are damaged; or
            one side is more than 100 times the other.

    Example:
        >>> image = decode_image(jpeg)  # the bytes of a file
    """
    encoded = tf.convert_to_tensor(encoded)
    size = header_size(encoded)
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
            is_format(encoded, JPEG), lambda: _decode_jpeg(encoded), lambda: _decode_other(encoded)
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


def is_format(encoded: tf.Tensor, known: Format) -> tf.Tensor:
    """`Format.matches` in the graph."""
    start = starts_with(encoded, known.start)
    return start & _has(encoded, 8, known.brand) if known.brand else start


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
    size = tf.cond(
        is_format(encoded, JPEG),
        lambda: tf.cast(tf.io.extract_jpeg_shape(encoded)[:2], tf.int64),
        lambda: _size_of_other(encoded),
    )
    return tf.ensure_shape(size, (2,))


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


def _decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
    return _upright(image, _orientation_of_jpeg(encoded))


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    # The decoder strips a color key unless four channels are asked for, and then gives images of
    # less than 8 bits without a key the alpha 1, 3 or 15 instead of 255: so ask for four only where
    # there is transparency.
    color_type = _byte(encoded, 25)
    # Most files have none of these, and those of many chunks take long to walk through.
    special = tf.strings.regex_full_match(
        encoded, r"\C*(tRNS|eXIf|Raw profile type exif|XML:com\.adobe\.xmp)\C*"
    )
    keyed, orientation = tf.cond(special, lambda: _read_png_chunks(encoded), lambda: (False, 1))
    image = tf.cond(
        (color_type >= 4) | keyed,
        lambda: _over_white(tf.io.decode_png(encoded, channels=4)),
        lambda: tf.io.decode_png(encoded, channels=3),
    )
    return _upright(image, orientation)


def _decode_webp(encoded: tf.Tensor) -> tf.Tensor:
    flags = tf.where(_has(encoded, 12, b"VP8X"), tf.cast(_byte(encoded, 20), tf.int32), 0)
    # TensorFlow 2.21's decoder writes outside its buffer when it is given an animation.
    check = tf.debugging.Assert(
        flags & 0x02 == 0, ["animated WebP is not supported: save its first frame as a still image"]
    )
    with tf.control_dependencies([check]):
        image = tf.io.decode_webp(encoded)[0]
    image = tf.cond(tf.shape(image)[-1] == 4, lambda: _over_white(image), lambda: image)
    return _upright(
        image, tf.cond(flags & 0x0C != 0, lambda: _orientation_of_webp(encoded, flags), lambda: 1)
    )


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

        def block(number: tf.Tensor, blocks: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            rows = image[starts[number] : starts[number] + count]
            # The sum is at most 255 * 255 + 127.
            color, alpha = tf.cast(rows[..., :3], tf.uint16), tf.cast(rows[..., 3:], tf.uint16)
            blended = (color * alpha + 255 * (255 - alpha) + 127) // 255
            return number + 1, blocks.write(number, tf.cast(blended, tf.uint8))

        blocks = tf.TensorArray(
            tf.uint8, tf.size(starts), element_shape=(None, None, 3), infer_shape=False
        )
        going = lambda number, _: number < tf.size(starts)  # noqa: E731
        return tf.while_loop(going, block, (0, blocks), parallel_iterations=1)[1].concat()

    return tf.cond(tf.reduce_all(image[..., 3] == 255), lambda: image[..., :3], blend)


def _upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    return tf.cond(orientation > 1, lambda: _oriented(image, orientation), lambda: image)


@not_inlined(tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int32))
def _oriented(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Return the image as its orientation wants it shown: transposed for 5 to 8, then mirrored."""
    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    upside_down = tf.reduce_any(orientation == [3, 4, 7, 8])
    mirrored = tf.reduce_any(orientation == [2, 3, 6, 7])
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([upside_down, mirrored, False]))


def _orientation_of_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, that the segments in front of the scan state."""
    # Without the marker of an APP1 segment, which compressed data cannot contain, there is nothing
    # to walk through.
    parts = tf.raw_ops.StringSplitV2(input=encoded[None], sep=b"\xff\xe1", maxsplit=1)
    return tf.cond(tf.size(parts.values) > 1, lambda: _read_jpeg_segments(encoded), lambda: 1)


@not_inlined(tf.TensorSpec((), tf.string))
def _read_jpeg_segments(encoded: tf.Tensor) -> tf.Tensor:
    def step(
        at: tf.Tensor, head: tf.Tensor, data: tf.Tensor, tiff: tf.Tensor, xmp: tf.Tensor
    ) -> tuple:
        marker, size = data[1], 256 * data[2] + data[3]
        alone = (marker <= 0x01) | ((marker >= 0xD0) & (marker <= 0xD9))
        is_marker = (data[0] == 0xFF) & (marker != 0xFF)
        behind = tf.where(marker != 0xDA, 2 + tf.where(~alone, tf.maximum(size, 2), 0), _END)
        is_app1 = is_marker & (marker == 0xE1)
        is_exif, is_xmp = is_app1 & _has(head, 4, _EXIF), is_app1 & _has(head, 4, _XMP_IN_JPEG)
        # What is too long for a segment continues in the next.
        tiff = tiff + _slice(
            encoded, at + 4 + len(_EXIF), tf.where(is_exif, size - 2 - len(_EXIF), 0)
        )
        text = _slice(encoded, at + 4 + len(_XMP_IN_JPEG), size - 2 - len(_XMP_IN_JPEG))
        return tf.where(is_marker, behind, 1), tiff, tf.where(is_xmp, text, xmp)

    return _orientation(*_walk(encoded, 2, step, "", ""))


@not_inlined(tf.TensorSpec((), tf.string))
def _read_png_chunks(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return whether there is a transparent color or palette, and the orientation, 1 to 8."""

    def step(
        at: tf.Tensor,
        head: tf.Tensor,
        data: tf.Tensor,
        keyed: tf.Tensor,
        tiff: tf.Tensor,
        *texts: tf.Tensor,
    ) -> tuple:
        size = _number(data[3::-1], 0, 4)
        kind, chunk = tf.strings.substr(head, 4, 4), _slice(encoded, at + 4, 4 + size)
        is_text = tf.reduce_any(kind == [b"tEXt", b"zTXt", b"iTXt"])
        texts = tuple(
            tf.where(is_text & _has(head, 8, keyword), chunk, text)
            for keyword, text in zip((_EXIF_AS_TEXT, _XMP_IN_PNG), texts, strict=True)
        )
        tiff = tf.where(kind == b"eXIf", tf.strings.substr(chunk, 4, _MOST_TIFF), tiff)
        return 12 + size, keyed | (kind == b"tRNS"), tiff, *texts

    keyed, tiff, profile, xmp = _walk(encoded, 8, step, False, "", "", "")
    tiff = tf.cond(
        (tiff == "") & (profile != ""), lambda: _unhex(_text(profile, _EXIF_AS_TEXT)), lambda: tiff
    )
    xmp = tf.cond(xmp != "", lambda: _text(xmp, _XMP_IN_PNG), lambda: xmp)
    return keyed, _orientation(tiff, xmp)


@not_inlined(tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
def _orientation_of_webp(encoded: tf.Tensor, flags: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, that the chunks state which the flags of the header
    announce."""

    def step(
        at: tf.Tensor, head: tf.Tensor, data: tf.Tensor, tiff: tf.Tensor, xmp: tf.Tensor
    ) -> tuple:
        size, kind = _number(data, 4, 4), tf.strings.substr(head, 0, 4)
        is_exif = (kind == b"EXIF") & (tiff == "") & (flags & 0x08 != 0)
        is_xmp = (kind == b"XMP ") & (xmp == "") & (flags & 0x04 != 0)
        tiff, xmp = (
            tf.where(this, _slice(encoded, at + 8, tf.where(this, size, 0)), text)
            for this, text in ((is_exif, tiff), (is_xmp, xmp))
        )
        return 8 + size + size % 2, tiff, xmp

    return _orientation(*_walk(encoded, 12, step, "", ""))


# Behind every file.
_END = 2**31 - 1


def _walk(
    encoded: tf.Tensor, first: int, step: Callable[..., tuple], *state: Any
) -> list[tf.Tensor]:
    """Return what becomes of a state along the segments of a file.

    Args:
        encoded: The file.
        first: Where its first segment begins.
        step: Gives for the place of a segment, its first 40 bytes, the first 8 of these as int64,
            and the state: the size of the segment, and the new state.
        *state: At the beginning.
    """
    length = tf.cast(tf.strings.length(encoded), tf.int64)

    def body(at: tf.Tensor, *state: tf.Tensor) -> tuple:
        head = tf.strings.substr(encoded, at, 40)
        data = tf.cast(tf.io.decode_raw(head, tf.uint8, fixed_length=8), tf.int64)
        size, *after = step(at, head, data, *state)
        return at + tf.cast(size, tf.int64), *after

    start = (tf.constant(first, tf.int64), *map(tf.constant, state))
    # Of the last segment there must be a header.
    going = lambda at, *_: at + 8 <= length  # noqa: E731
    return tf.while_loop(
        going, body, start, maximum_iterations=_MOST_SEGMENTS, parallel_iterations=1
    )[1:]


def _slice(encoded: tf.Tensor, at: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Return so many bytes from a place on, which may lie behind the end."""
    length = tf.cast(tf.strings.length(encoded), tf.int64)
    at, size = tf.cast(at, tf.int64), tf.cast(size, tf.int64)
    return tf.strings.substr(encoded, tf.minimum(at, length), tf.clip_by_value(size, 0, length))


def _text(chunk: tf.Tensor, keyword: bytes) -> tf.Tensor:
    """Return the text of a chunk of a PNG, which begins with its type; empty where it is
    damaged."""
    kind, body = tf.strings.substr(chunk, 0, 4), _slice(chunk, 4 + len(keyword), _END)
    # Of international text: whether it is compressed, by what, then two texts that end with a zero.
    parts = tf.raw_ops.StringSplitV2(
        input=_slice(body, 2, _END)[None], sep=b"\0", maxsplit=2
    ).values
    international = tf.cond(tf.size(parts) == 3, lambda: parts[-1], lambda: "")
    compressed = tf.where(kind == b"iTXt", _has(body, 0, b"\1"), kind == b"zTXt")
    data = tf.where(
        kind == b"iTXt", international, tf.where(kind == b"zTXt", _slice(body, 1, _END), body)
    )
    return tf.cond(compressed, lambda: _inflate(data), lambda: data)


def _inflate(data: tf.Tensor) -> tf.Tensor:
    """Return what zlib compressed; an empty string where that cannot be read, or is too long."""
    data = tf.where(tf.strings.length(data) > _MOST_COMPRESSED, "", data)
    # A data set is TensorFlow's only way to continue after an operation has failed.
    inflated = tf.data.Dataset.from_tensors(data).map(
        tf.autograph.experimental.do_not_convert(lambda data: tf.io.decode_compressed(data, "ZLIB"))
    )
    return only(inflated.ignore_errors().concatenate(tf.data.Dataset.from_tensors("")).take(1))


def only(items: tf.data.Dataset) -> Any:
    """Return the single element, without the searching for speed that pays over many."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return items.with_options(options).get_single_element()


def _unhex(text: tf.Tensor) -> tf.Tensor:
    """Return the bytes of a profile that is written as text: three lines, then digits."""
    lines = tf.raw_ops.StringSplitV2(input=text[None], sep=b"\n", maxsplit=3).values
    digits = tf.cond(
        tf.size(lines) == 4, lambda: tf.strings.regex_replace(lines[-1], r"\s", ""), lambda: ""
    )
    codes = integers(_slice(digits, 0, 2 * _MOST_TIFF))
    # In ASCII digits begin at 48, letters at 65 and 97.
    values = tf.where(codes < 58, codes - 48, codes % 32 + 9)
    values = tf.reshape(values[: tf.size(values) // 2 * 2], (-1, 2))
    values = tf.clip_by_value(16 * values[:, 0] + values[:, 1], 0, 255)
    return tf.strings.reduce_join(tf.gather([bytes([i]) for i in range(256)], values))


def _orientation(tiff: tf.Tensor, xmp: tf.Tensor) -> tf.Tensor:
    """Return the orientation, 1 to 8, of an EXIF block, or of XMP where that states none."""
    for _ in range(2):  # some programs write it twice
        tiff = tf.where(_has(tiff, 0, _EXIF), _slice(tiff, len(_EXIF), _END), tiff)
    stated = _orientation_of_tiff(tf.strings.substr(tiff, 0, _MOST_TIFF))
    orientation = tf.where(stated >= 0, stated, _orientation_of_xmp(xmp))
    return tf.where((orientation >= 1) & (orientation <= 8), orientation, 1)


def _orientation_of_tiff(tiff: tf.Tensor) -> tf.Tensor:
    """Return the number that a TIFF block's first directory states; -1 where it states none."""
    # The padding makes every read of a cut-off block fall on zeros.
    data = tf.pad(integers(tiff), [[0, 16]])
    end = tf.size(data) - 16
    little = _has(tiff, 0, b"II*\0")

    def number(row: tf.Tensor) -> tf.Tensor:
        """Return the number of the bytes along the last axis."""
        places = tf.constant([1 << 8 * i for i in range(row.shape[-1])], tf.int64)
        return tf.reduce_sum(tf.cast(row, tf.int64) * tf.where(little, places, places[::-1]), -1)

    offset = number(tf.slice(data, [4], [4]))
    valid = (little | _has(tiff, 0, b"MM\0*")) & (offset >= 8) & (offset <= tf.cast(end, tf.int64))
    offset = tf.where(valid, tf.cast(offset, tf.int32), end)
    entries = data[offset + 2 :][
        : 12 * tf.cast(number(tf.slice(data, offset[None], [2])), tf.int32)
    ]
    entries = tf.reshape(entries[: tf.size(entries) // 12 * 12], (-1, 12))
    kind = number(entries[:, 2:4])
    values = tf.where(kind == _SHORT, number(entries[:, 8:10]), number(entries[:, 8:12]))
    stated = (number(entries[:, :2]) == _ORIENTATION_TAG) & ((kind == _SHORT) | (kind == _LONG))
    values = tf.concat([tf.boolean_mask(values, stated & (number(entries[:, 4:8]) > 0)), [-1]], 0)
    return tf.cast(tf.minimum(values[0], 9), tf.int32)


def _orientation_of_xmp(xmp: tf.Tensor) -> tf.Tensor:
    """Return the first digit that is stated, as an attribute or an element; 1 where none is."""
    pattern = r'\C*?tiff:Orientation(?:="|>)([0-9])\C*'
    digit = tf.strings.regex_replace(xmp, f"^{pattern}$", r"\1")
    return tf.strings.to_number(
        tf.where(tf.strings.regex_full_match(xmp, pattern), digit, "1"), tf.int32
    )


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


def _number(data: tf.Tensor, at: int, size: int) -> tf.Tensor:
    """Return the little-endian number of `size` bytes at `at`."""
    return tf.reduce_sum(
        data[at : at + size] * tf.constant([1 << 8 * i for i in range(size)], data.dtype)
    )


@not_inlined(tf.TensorSpec((), tf.string))
def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decode as `decode_image`, in a graph that is traced once."""
    return decode_image(encoded)
