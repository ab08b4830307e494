"""The encoded bytes of single images, wherever they lie."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ArrayImages, EncodedImages, Images, RecordImages
from tfdml.data.sources import source_of


def encoded_image(images: Images, index: int) -> bytes:
    """The encoded bytes of one image; an array, or what its bounding box leaves of a file, as PNG, which loses nothing.

    Args:
        images: The images.
        index: Which one.

    Raises:
        OSError: A local file cannot be read.
        tf.errors.OpError: A remote file cannot be read.
        UserError: A record file is damaged.

    Example:
        >>> encoded_image(EncodedImages((b"bytes",), ("a.jpg",)), 0)
        b'bytes'
    """
    if isinstance(images, EncodedImages):
        return images.data[index]
    if isinstance(images, RecordImages):
        return images.read(np.array([index]))[0]
    if isinstance(images, ArrayImages):
        return tf.io.encode_png(images.data[index]).numpy()
    if images.boxes is not None:
        source = source_of(images)
        (row,) = zip(*source.columns(np.array([index])), strict=True)
        return tf.io.encode_png(source.read(*row)).numpy()
    path = images.paths[index]
    if "://" in path:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    with open(path, "rb") as file:
        return file.read()
