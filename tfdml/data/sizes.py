"""How large images are, from their headers alone."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np
from PIL import Image

from tfdml.data.dataset import ArrayImages, EncodedImages, FileImages, Images, RecordImages

_ORIENTATION_TAG = 0x0112


def stated_size(images: Images, index: int) -> tuple[int, int] | None:
    """Height and width of one image as it is shown, before it is cut to a box.

    Args:
        images: The images.
        index: Which one.

    Returns:
        (height, width), or None for what cannot be read or is no image.

    Example:
        >>> stated_size(ArrayImages(np.zeros((1, 28, 32, 3), np.uint8), ("a",)), 0)
        (28, 32)
    """
    if isinstance(images, ArrayImages):
        return images.data.shape[1], images.data.shape[2]
    try:
        with _open(images, index) as file, Image.open(file) as image:
            width, height = image.size
            return (width, height) if image.getexif().get(_ORIENTATION_TAG, 1) >= 5 else (height, width)
    except Exception:  # a file system's own errors, and a dozen types that Pillow raises on damaged headers
        return None


def _open(images: EncodedImages | FileImages | RecordImages, index: int) -> BinaryIO:
    if isinstance(images, EncodedImages):
        return io.BytesIO(images.data[index])
    if isinstance(images, RecordImages):
        return io.BytesIO(images.read(np.array([index]))[0])
    path = images.paths[index]
    if "://" in path:
        import tensorflow as tf  # only needed for remote file systems, and slow to import

        return tf.io.gfile.GFile(path, "rb")
    return open(path, "rb")
