"""Finds missing, damaged and unsupported image files before training, by their first and last bytes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import os
import warnings
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
from PIL import Image

from tfdml.data.images.base import Images
from tfdml.data.images.headers import MAX_PIXELS, HeaderFault, Window, pixels

# Enough to distinguish text from other data; the headers themselves are shorter.
_HEAD = 512
_TAIL = 256
# A GIF's end is two bytes, which longer stretches of image data hold by chance.
_GIF_SLACK = 16
_PER_TASK = 256
# Most of the time goes to waiting for the disk or the network.
_THREADS = 16

_JPEG_END, _JPEG_SCAN = b"\xff\xd9", b"\xff\xda"
_PNG_END = b"IEND\xaeB`\x82"
_UNSUPPORTED = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "BigTIFF",
    b"MM\0+": "BigTIFF",
    b"8BPS": "Photoshop",
    b"\0\0\1\0": "icon (ICO)",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"gimp xcf": "GIMP",
    b"DDS ": "DDS",
    b"v/1\x01": "OpenEXR",
}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"}
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"hevm", b"mif1", b"msf1")
_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip-compressed data",
    b"%PDF": "a PDF document",
    b"7z\xbc\xaf": "a 7-zip archive",
    b"Rar!": "a RAR archive",
    b"version https://git-lfs": "a Git LFS pointer (fetch the files with git lfs pull)",
    b"\x89HDF": "an HDF5 file",
    b"MATLAB": "a MATLAB file",
    b"\x1aE\xdf\xa3": "a video (Matroska)",
}


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


def inspect(images: Images, max_pixels: int = MAX_PIXELS) -> list[ImageError]:
    """Checks the header and the end of every image, without decoding any.

    Supported are JPEG, PNG, GIF, BMP and WebP, recognised by content and not by name: what
    `tfdml.data.decode_image` decodes. Damage
    in the middle of a file goes unnoticed here: see `diagnose`.

    Args:
        images: Files or encoded images; arrays have nothing to check, and record files were checked when they were
            made.
        max_pixels: An image whose header states more pixels is bad: a small file can exhaust the memory.

    Returns:
        The bad images, ascending by index.

    Example:
        >>> inspect(EncodedImages((b"<html>",), ("a.jpg",)))[0].reason
        'not an image: it looks like an HTML page'
    """
    if images.verified:
        return []

    def task(start: int) -> list[ImageError]:
        found = ((i, _fault(images, i, max_pixels)) for i in range(start, min(start + _PER_TASK, len(images))))
        return [ImageError(i, images.place(i), reason) for i, reason in found if reason]

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return [fault for faults in pool.map(task, range(0, len(images), _PER_TASK)) for fault in faults]


def diagnose(images: Images, indices: Sequence[int] | np.ndarray | None = None) -> list[ImageError]:
    """Decodes images in full to name the ones that cannot be, for use after an input pipeline has failed.

    Args:
        images: The images.
        indices: Which of them to decode; all by default, at milliseconds each.

    Returns:
        The bad images, in the order of `indices`.

    Example:
        >>> diagnose(EncodedImages((b"",), ("a.jpg",)))[0].reason
        'empty file'
    """
    if images.decoded:
        return []
    faults = []
    for index in range(len(images)) if indices is None else map(int, indices):
        reason = _fault(images, index, MAX_PIXELS) or _decoding_fault(images, index)
        if reason:
            faults.append(ImageError(index, images.place(index), reason))
    return faults


def content_fault(data: bytes, max_pixels: int = MAX_PIXELS) -> str | None:
    """What is wrong with the bytes of an image, judged as `inspect` does; None if nothing is.

    Example:
        >>> content_fault(b"")
        'empty file'
    """
    return _content_fault(io.BytesIO(data), max_pixels)


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
    return f"unreadable ({getattr(error, 'strerror', None) or error})"


def _fault(images: Images, index: int, max_pixels: int) -> str | None:
    try:
        with images.open(index) as file:
            return _content_fault(file, max_pixels)
    except Exception as error:  # tf.io.gfile has its own error types
        return access_fault(error)


def _decoding_fault(images: Images, index: int) -> str | None:
    try:
        with warnings.catch_warnings(), images.open(index) as file:
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(file.read())) as image:
                image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many types on damaged data
        return f"damaged: {error}"
    return None


def _content_fault(file: BinaryIO, max_pixels: int) -> str | None:
    head = file.read(_HEAD)
    if not head:
        return "empty file"
    file.seek(0, os.SEEK_END)
    size = file.tell()
    try:
        stated = pixels(Window(file, head, size))
    except HeaderFault as fault:
        return str(fault)
    if stated is None:
        return _foreign(head)
    if stated[0] * stated[1] > max_pixels:
        return f"too large: {stated[0]:,} x {stated[1]:,} pixels, more than {max_pixels:,}; shrink it"
    file.seek(max(size - _TAIL, 0))
    return _end_fault(file, head, size, file.read())


def _end_fault(file: BinaryIO, head: bytes, size: int, tail: bytes) -> str | None:
    """Whether the image data ends as it should; the headers of BMP and WebP have been checked for it already."""
    if head.startswith(b"\xff\xd8"):
        return _jpeg_fault(file, size, tail)
    if head.startswith(b"\x89PNG"):
        return None if _PNG_END in tail or _PNG_END in _all(file) else "truncated PNG (no IEND chunk)"
    if head.startswith(b"GIF8"):
        return None if b"\0;" in tail[-_GIF_SLACK:] else "truncated GIF (no trailer)"
    return None


def _jpeg_fault(file: BinaryIO, size: int, tail: bytes) -> str | None:
    if size > _TAIL and _JPEG_END in tail:
        return None
    # Some cameras append data of their own, and an embedded thumbnail has an end marker as well: the whole file
    # must have one after the last start of a scan. Scan data cannot contain either marker.
    data = _all(file)
    scan = data.rfind(_JPEG_SCAN)
    if scan < 0 or data.rfind(_JPEG_END) < scan:
        return "truncated JPEG (no end-of-image marker)"
    return None


def _all(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _foreign(head: bytes) -> str:
    """What a file without the header of a supported image looks like."""
    for magic, kind in _UNSUPPORTED.items():
        if head.startswith(magic):
            return f"unsupported type: {kind}; convert it to JPEG or PNG"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        kind = "HEIC" if brand in _HEIF_BRANDS else _BRANDS.get(brand, "video (MP4)")
        return f"unsupported type: {kind}; convert it to JPEG or PNG"
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            return f"not an image: it looks like {kind}"
    if not head.strip(b"\0"):
        return "not an image: it holds only zero bytes"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text:
        return "unsupported type: SVG; convert it to JPEG or PNG"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "not an image: it looks like an HTML page"
    if text.startswith(b"<?xml"):
        return "not an image: it looks like XML"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in head):
        return "not an image: it looks like text"
    return "not an image: its header is of no image type known here"
