"""Finds images that cannot be used: missing, damaged or unsupported files."""

import dataclasses
import io
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
import tensorflow as tf
from absl import logging
from PIL import Image

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import DECODER_LIMIT, FOREIGN, PNG, WEBP, Format, decode_whole, format_of
from tfdml.data.images import Images, in_threads, read_header
from tfdml.errors import UserError, short_message

_NAMED_IN_MESSAGES = 3
# Enough for any format's signature, and to show what another file is.
_HEAD = 32
_TAIL = 256

_JPEG_END, _JPEG_SCAN = b"\xff\xd9", b"\xff\xda"
_PNG_END = b"IEND\xaeB`\x82"
# Formats that every supported Pillow recognises, whose images can be converted.
_CONVERTIBLE = ("BMP", "DDS", "GIF", "ICO", "JPEG2000", "PSD", "TIFF")
# A message of ours that came through TensorFlow, such as that of a damaged record file.
_USER_ERROR = re.compile(r"UserError: (.+)")
# What TensorFlow's message holds when reading or decoding an image failed: the operation's name or our own words.
_IMAGE_FAILURE = re.compile(
    r"ReadFile|Decode(AndCrop)?(Jpeg|Png|WebP)|ExtractJpegShape|Unknown image file format|"
    rf"{FOREIGN}|animated WebP"
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


def check(dataset: ImageDataset, bad_images: str = "error", check_images: str = "headers") -> ImageDataset:
    """Check all images of a data set before it is used.

    Args:
        dataset: The data set.
        bad_images: `"error"` to stop at bad images, `"skip"` to leave them out and log how many.
        check_images: `"headers"`: the header and the end of each file; `"decode"`: every image is decoded, at about a
            millisecond each.

    Returns:
        The data set, without the bad images.

    Raises:
        UserError: There are bad images and `bad_images` is `"error"`, or no image is left.

    Example:
        >>> len(check(load("folder", "photos"), bad_images="skip"))
        6
    """
    faults = find_faults(dataset.images, decode=check_images == "decode")
    if not faults:
        return dataset
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    if bad_images == "error":
        raise UserError(f"{where} cannot be used: {_named(faults)}; mend them, or set `bad_images='skip'`")
    if len(faults) == len(dataset):
        raise UserError(f"none of the {where} can be used: {_named(faults)}")
    logging.warning("skipping %s: %s", where, _named(faults))
    return dataset.take(np.setdiff1d(np.arange(len(dataset)), [fault.index for fault in faults]))


def find_faults(
    images: Images,
    indices: Sequence[int] | np.ndarray | None = None,
    decode: bool = True,
    max_pixels: int = DECODER_LIMIT,
) -> list[ImageError]:
    """Check images, on all cores by the decoder that training uses, or by their header and end alone.

    JPEG, PNG and WebP are supported, recognised by content and not by name.

    Args:
        images: The images. Arrays have nothing to check, and record files were checked when they were made.
        indices: Which of them to check; all by default.
        decode: Decode images in full, at about a millisecond each. Damage in the middle of a file is not found
            otherwise.
        max_pixels: An image whose header states more pixels is bad: a small file can exhaust the memory.

    Returns:
        The bad images, in the order of `indices`.

    Example:
        >>> find_faults(EncodedImages((b"",), ("a.jpg",)))[0].reason
        'empty file'
    """

    def fault(index: int) -> str | None:
        try:
            if decode:
                return decoding_fault(images.encoded(index), decode_whole, max_pixels)
            with images.open(index) as file:
                return _content_fault(file, max_pixels)
        except Exception as error:  # clients of file systems have their own error types
            return access_fault(error)

    if images.decoded or (images.verified and not decode):
        return []
    chosen = range(len(images)) if indices is None else [int(index) for index in indices]
    threads = {"threads": os.cpu_count() or 1} if decode else {}
    reasons = zip(chosen, in_threads(fault, chosen, **threads), strict=True)
    return [ImageError(index, images.place(index), reason) for index, reason in reasons if reason]


def decoding_fault(data: bytes, decode: Callable[[tf.Tensor], object], max_pixels: int = DECODER_LIMIT) -> str | None:
    """Return what is wrong with the bytes of an image, which are decoded; None if nothing is.

    Args:
        data: The bytes.
        decode: The decoder.
        max_pixels: As for `find_faults`.

    Example:
        >>> decoding_fault(jpeg[: len(jpeg) // 2], tfdml.data.decode_image)
        'truncated JPEG (no end-of-image marker)'
    """
    fault = _content_fault(io.BytesIO(data), max_pixels)
    if fault:
        return fault
    try:
        decode(tf.constant(data))
    except (tf.errors.OpError, UnicodeDecodeError) as error:  # the second where a message quotes bytes
        return f"damaged: {short_message(error, 'last')}"
    return None


def access_fault(error: Exception) -> str:
    """Why a file cannot be read, in words, from the exception that reading it raised.

    Example:
        >>> access_fault(FileNotFoundError())
        'missing'
    """
    if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError":  # the second is TensorFlow's
        return "missing"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file"
    if isinstance(error, PermissionError) or type(error).__name__ == "PermissionDeniedError":
        return "unreadable (no permission)"
    return f"unreadable ({getattr(error, 'strerror', None) or short_message(error, 'last')})"


def explain_failure(
    error: BaseException, dataset: ImageDataset, leave_out: str = "`check_images='decode'` and `bad_images='skip'`"
) -> UserError | None:
    """Find the images behind an exception that iteration over batches, or `fit`, raised.

    Reads and decodes every image of the data set, at about a millisecond each.

    Args:
        error: The exception.
        dataset: The data set that the batches came from.
        leave_out: By which arguments such images are left out (the default's are those of `tfdml.data.faults.check`);
            empty where they cannot be.

    Returns:
        An error that names the images and what is wrong with them; None if the exception has another cause.

    Example:
        >>> try:
        ...     history = model.fit(batches, steps_per_epoch=100)
        ... except tf.errors.OpError as error:
        ...     raise (explain_failure(error, dataset) or error) from None
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    raised_below = _USER_ERROR.search(str(error))
    if raised_below:
        return UserError(raised_below[1])
    if not _IMAGE_FAILURE.search(str(error)):
        return None
    logging.warning("an image of %s cannot be read; looking for it among %d", dataset.name, len(dataset))
    faults = find_faults(dataset.images)
    if not faults:
        return None
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    advice = f", or leave them out with {leave_out}" if leave_out else ""
    return UserError(f"{where} cannot be decoded: {_named(faults)}; fix or remove them{advice}")


def _named(items: Sequence[object]) -> str:
    """Return the first few of several, on one line."""
    named = "; ".join(str(item).replace("\n", " ") for item in items[:_NAMED_IN_MESSAGES])
    return named + (f"; and {len(items) - _NAMED_IN_MESSAGES} more" if len(items) > _NAMED_IN_MESSAGES else "")


def _content_fault(file: BinaryIO, max_pixels: int) -> str | None:
    head = file.read(_HEAD)
    if not head:
        return "empty file"
    kind = format_of(head)
    if kind is None:
        return _foreign(file, head)
    ended = _end_fault(file, kind, head)
    if ended:
        return ended
    try:
        image = read_header(file, kind)
    except Image.DecompressionBombError as error:
        return f"too large: {error}"
    except Exception as error:  # Pillow raises many types on damaged data
        return f"damaged or unsupported {kind.name.upper()} ({short_message(error)})"
    width, height = image.size
    if not width or not height:
        return f"damaged {kind.name.upper()} (no size in its header)"
    if width * height > max_pixels:
        return f"too large: {width:,} x {height:,} pixels, more than {max_pixels:,}; shrink it"
    if getattr(image, "n_frames", 1) > 1 and kind is WEBP:
        return "unsupported type: animated WebP; save one frame of it"
    return None


def _end_fault(file: BinaryIO, kind: Format, head: bytes) -> str | None:
    """Return what is wrong with the end of a file of a supported format, by its last bytes where these will do."""
    size = file.seek(0, os.SEEK_END)
    if kind is WEBP:
        stated = int.from_bytes(head[4:8], "little") + 8
        return "truncated WebP (shorter than its header says)" if size < max(stated, 30) else None
    end = _PNG_END if kind is PNG else _JPEG_END
    file.seek(max(size - _TAIL, 0))
    if end in file.read() and (kind is PNG or size > _TAIL):
        return None
    file.seek(0)
    data = file.read()
    if kind is PNG:
        return None if end in data else "truncated PNG (no IEND chunk)"
    # Some cameras append data of their own, and an embedded thumbnail has an end marker as well: the whole file
    # must have one after the last start of a scan. Scan data cannot contain either marker.
    scan = data.rfind(_JPEG_SCAN)
    return "truncated JPEG (no end-of-image marker)" if scan < 0 or data.rfind(end) < scan else None


def _foreign(file: BinaryIO, head: bytes) -> str:
    """Return the kind of a file without the header of a supported image."""
    file.seek(0)
    try:
        with warnings.catch_warnings(action="ignore"):
            kind = Image.open(file, formats=_CONVERTIBLE).format
    except Exception:  # many types on damaged data
        return f"{FOREIGN}: it begins with {head!r}"
    return f"unsupported type: {kind}; convert it to JPEG or PNG"
