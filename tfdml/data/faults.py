"""Which images of a data set cannot be used: missing, damaged or unsupported files."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf
from absl import logging
from PIL import ExifTags, Image

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import (
    FOREIGN,
    PNG,
    WEBP,
    Format,
    box_fault,
    decode_whole,
    encoded_crop,
    format_of,
    is_cut,
    narrow_fault,
    orientation_of,
    scan_fault,
    shown_size,
)
from tfdml.data.images import Images, in_threads, read_header
from tfdml.data.limits import DECODER_LIMIT
from tfdml.errors import UserError, short_message
from tfdml.io.files import access_fault

_NAMED_IN_MESSAGES = 3
# Enough for any format's signature, and to show what another file is.
_HEAD = 32
_TAIL = 256
# What other files begin with, and what a message says of them.
_OTHER_KINDS = {
    b"GIF8": "a GIF; convert it",
    b"BM": "a BMP; convert it",
    b"II*\0": "a TIFF; convert it",
    b"MM\0*": "a TIFF; convert it",
    b"8BPS": "a PSD; convert it",
    b"%PDF": "a PDF; convert it",
    b"PK\3\4": "a zip archive; unpack it",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"version https://git-lfs": "a pointer of Git LFS; run git lfs pull",
    b"<": "HTML or XML",
}
_TEXT = {*range(32, 127), *b"\t\n\r"}

_JPEG_END = b"\xff\xd9"
# Texts of a PNG that may state an orientation, by Pillow's names.
_TURNING_TEXTS = ("XML:com.adobe.xmp", "Raw profile type exif")
_PNG_END = b"IEND\xaeB`\x82"
# What TensorFlow's message holds when reading or decoding an image failed: the operation's name or
# our own words.
_IMAGE_FAILURE = re.compile(
    r"ReadFile|Decode(AndCrop)?(Jpeg|Png|WebP)|ExtractJpegShape|Unknown image file format|"
    rf"{FOREIGN}|animated WebP|too narrow|too many scans"
)


@dataclasses.dataclass(frozen=True)
class ImageError:
    """What is wrong with one image.

    Args:
        index: Its place in the images inspected.
        name: Its path or name.
        reason: In words, e.g. `"truncated JPEG (no end-of-image marker)"`.
    """

    index: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def check(
    dataset: ImageDataset, bad_images: str = "error", check_images: str = "headers"
) -> ImageDataset:
    """Check all images of a data set before it is used.

    Args:
        dataset: The data set.
        bad_images: `"error"` to stop at bad images, `"skip"` to leave them out and log how many.
        check_images: `"headers"`: the header and the end of each file; `"decode"`: every image is
            decoded, at about a millisecond each.

    Returns:
        The data set, without the bad images; as it is where its vectors are embedded.

    Raises:
        UserError: There are bad images and `bad_images` is `"error"`, or no image is left.

    Example:
        >>> len(check(tfdml.data.load("folder", "photos"), bad_images="skip"))
        120
    """
    if dataset.vectors is not None:
        return dataset
    faults = find_faults(dataset.images, decode=check_images == "decode")
    if not faults:
        return dataset
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    if bad_images == "error":
        raise UserError(
            f"{where} cannot be used: {_named(faults)}; mend them, or set bad_images=skip"
        )
    if len(faults) == len(dataset):
        raise UserError(f"none of the {where} can be used: {_named(faults)}")
    logging.warning("skipping %s: %s", where, _named(faults))
    return dataset.take(np.setdiff1d(np.arange(len(dataset)), [fault.index for fault in faults]))


def find_faults(
    images: Images, decode: bool = True, max_pixels: int = DECODER_LIMIT
) -> list[ImageError]:
    """Check images, on all cores by the decoder that training uses, or by their header and end
    alone.

    JPEG, PNG and WebP are supported, recognized by content and not by name.

    Args:
        images: The images. Arrays have nothing to check.
        decode: Decode images in full, at about a millisecond each. Damage in the middle of a file
            is not found otherwise.
        max_pixels: An image whose header states more pixels is bad: a small file can exhaust the
            memory.

    Returns:
        The bad images, in order.

    Example:
        >>> find_faults(tfdml.data.EncodedImages((b"",), ("a.jpg",)))[0].reason
        'empty file'
    """

    if images.decoded:
        return []

    def header_fault(index: int) -> tuple[str, int]:
        try:
            with images.open(index) as file:
                return _header_fault(file, max_pixels, images.box(index))
        except Exception as error:  # clients of file systems have their own error types
            return access_fault(error), 1

    verdicts: Iterator[tuple[str, int]]
    if decode:
        # The shape alone: many images wait for their turn.
        examined = converted_images(images, lambda data, _: decode_whole(data).shape, max_pixels)
        verdicts = ((fault, turn) for _, fault, turn in examined)
    else:
        verdicts = in_threads(header_fault, range(len(images)))
    faults = []
    turned = []
    for index, (fault, turn) in enumerate(verdicts):
        if fault:
            faults.append(ImageError(index, images.name(index), fault))
        elif turn > 1:
            turned.append(images.name(index))
    warn_of_turned(turned, len(images))
    return faults


def warn_of_turned(names: Sequence[str], total: int) -> None:
    """Warn of images whose orientation the decoder does not read, if there are any.

    Args:
        names: Of these images.
        total: How many images there are in all.
    """
    if names:
        logging.warning(
            "%d of %d images are used as they are stored, for XMP or a text turns them, not EXIF: "
            "%s; `tfdml prepare` writes them upright",
            len(names),
            total,
            _named(names),
        )


def converted_images(
    images: Images, convert: Callable[[tf.Tensor, int], Any], max_pixels: int = DECODER_LIMIT
) -> Iterator[tuple[Any, str, int]]:
    """Yield what a function makes of each image, what is wrong with the image, or an empty text,
    and the orientation, 1 to 8, that Pillow finds and the decoder does not.

    Args:
        images: The images.
        convert: Called in threads with the bytes of an image and that orientation. Raises
            TensorFlow's errors where it cannot decode them.
        max_pixels: As for `find_faults`.

    Example:
        >>> images = tfdml.data.EncodedImages((jpeg[: len(jpeg) // 2],), ("a.jpg",))
        >>> next(converted_images(images, lambda data, turn: tfdml.data.decode_image(data)))
        (None, 'truncated JPEG (no end-of-image marker)', 1)
    """

    def convert_or_fault(index: int) -> tuple[Any, str, int]:
        box = images.box(index)
        try:
            with images.open(index) as file:
                data = file.read()
        except Exception as error:  # clients of file systems have their own error types
            return None, access_fault(error), 1
        fault, turn = _header_fault(io.BytesIO(data), max_pixels, box, is_whole=True)
        if fault:
            return None, fault, 1
        try:
            encoded = tf.constant(data) if box is None else encoded_crop(data, box)
            return convert(encoded, turn), "", turn
        except (
            tf.errors.OpError,
            UnicodeDecodeError,
        ) as error:  # the second where a message quotes bytes
            return None, f"damaged: {short_message(error, 'last')}", 1

    return in_threads(convert_or_fault, range(len(images)), os.cpu_count() or 1)


def explain_failure(
    error: BaseException,
    dataset: ImageDataset,
    leave_out: str = "check_images=decode and bad_images=skip",
) -> UserError | None:
    """Find the images behind an exception that iteration over batches, or `fit`, raised.

    Reads and decodes every image of the data set, at about a millisecond each.

    Args:
        error: The exception.
        dataset: The data set that the batches came from.
        leave_out: By which arguments such images are left out (the default's are those of
            `tfdml.data.faults.check`); empty where they cannot be.

    Returns:
        An error that names the images and what is wrong with them; None if the exception has
        another cause.

    Example:
        >>> try:
        ...     history = model.fit(batches, steps_per_epoch=100)
        ... except tf.errors.OpError as error:
        ...     raise (explain_failure(error, train) or error) from None
    """
    if not (isinstance(error, tf.errors.OpError) and _IMAGE_FAILURE.search(str(error))):
        return None
    logging.warning(
        "an image of %s cannot be read; looking for it among %d", dataset.name, len(dataset)
    )
    faults = find_faults(dataset.images)
    if not faults:
        return None
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    advice = f", or leave them out with {leave_out}" if leave_out else ""
    return UserError(f"{where} cannot be decoded: {_named(faults)}; fix or remove them{advice}")


def _named(items: Sequence[object]) -> str:
    """Return the first few of several, on one line."""
    named = "; ".join(str(item).replace("\n", " ") for item in items[:_NAMED_IN_MESSAGES])
    return named + (
        f"; and {len(items) - _NAMED_IN_MESSAGES} more" if len(items) > _NAMED_IN_MESSAGES else ""
    )


def _kind_of(head: bytes) -> str:
    """Return what a file seems to be, and what to do with it, in words of ours: a list may name any
    file, and a message holds nothing of it."""
    for start, words in _OTHER_KINDS.items():
        if head.startswith(start):
            return words
    if head[4:8] == b"ftyp":
        return "HEIC, AVIF or a film; convert it"
    return "text" if _TEXT.issuperset(head) else "of no format that is known here"


def _header_fault(
    file: BinaryIO, max_pixels: int, box: tuple[int, ...] | None, is_whole: bool = False
) -> tuple[str, int]:
    """Return what a file's header and end say against it, empty for nothing, and the orientation
    that Pillow alone finds, 1 for none.

    Args:
        file: The file.
        max_pixels: See `find_faults`.
        box: See `Images.box`.
        is_whole: Whether the file is in memory, so that what lies behind a PNG's pixels is read.
    """
    head = file.read(_HEAD)
    if not head:
        return "empty file", 1
    kind = format_of(head)
    if kind is None:
        return f"{FOREIGN}, but {_kind_of(head)}", 1
    if fault := _end_fault(file, kind, head):
        return fault, 1
    try:
        image = read_header(file, kind)
        fault = _content_fault(image, kind, max_pixels)
        if not fault and "progressive" in image.info:
            file.seek(0)
            fault = scan_fault(tf.constant(file.read())).numpy().decode()
    except Exception as error:  # Pillow and TensorFlow raise many types on damaged data
        reason = re.sub(r"b(['\"]).*?\1", "...", short_message(error))
        return f"damaged or unsupported {kind.name} ({reason})", 1
    if fault:
        return fault, 1
    turn = _unread_turn(image, file, is_whole)
    if box is None:
        return "", turn
    if turn > 1:
        return "XMP or a text turns it, and not its box; write it upright without a box first", 1
    file.seek(0)
    height, width = shown_size(tf.constant(file.read())).numpy().tolist()
    return box_fault(box, height, width), 1


def _content_fault(image: Image.Image, kind: Format, max_pixels: int) -> str:
    width, height = image.size
    if not width or not height:
        return f"damaged {kind.name} (no size in its header)"
    if width * height > max_pixels:
        return f"too large: {width:,} x {height:,} pixels, more than {max_pixels:,}; shrink it"
    if getattr(image, "n_frames", 1) > 1 and kind is WEBP:
        return "unsupported type: animated WebP; save one frame of it"
    return narrow_fault(height, width)


def _unread_turn(image: Image.Image, file: BinaryIO, is_whole: bool) -> int:
    """Return the orientation that Pillow finds where the decoder finds none, 1 for none."""
    try:
        if is_whole and _has_text_behind(image, file):
            image.load()
        # Not that of a PNG, which always loads the image.
        turn = int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises many types on damaged blocks, which count as upright
        return 1
    if turn not in range(2, 9):
        return 1
    file.seek(0)
    return 1 if orientation_of(tf.constant(file.read())) > 1 else turn


def _has_text_behind(image: Image.Image, file: BinaryIO) -> bool:
    """Whether a PNG states an orientation as text that its header lacks."""
    file.seek(0)
    data = file.read()
    return image.format == "PNG" and any(
        key.encode() in data and key not in image.info for key in _TURNING_TEXTS
    )


def _end_fault(file: BinaryIO, kind: Format, head: bytes) -> str:
    """Return what is wrong with the end of a file of a supported format, by its last bytes where
    these will do; empty for nothing."""
    size = file.seek(0, os.SEEK_END)
    if kind is WEBP:
        stated = int.from_bytes(head[4:8], "little") + 8
        return "truncated WebP (shorter than its header says)" if size < max(stated, 30) else ""
    end = _PNG_END if kind is PNG else _JPEG_END
    file.seek(max(size - _TAIL, 0))
    if end in file.read() and (kind is PNG or size > _TAIL):
        return ""
    file.seek(0)
    data = file.read()
    if kind is PNG:
        return "" if end in data else "truncated PNG (no IEND chunk)"
    # Phones append films, whose bytes are any; a thumbnail has an end marker as well.
    return "truncated JPEG (no end-of-image marker)" if is_cut(tf.constant(data)) else ""
