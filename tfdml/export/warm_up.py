"""Requests that TF Serving sends itself before it serves a version, so that no client waits for the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.export.request import EXAMPLE_FEATURE

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
BATCH_SIZES = (1, 8, 32)


def write_warm_up(folder: Path, side: int, batch_sizes: Sequence[int] = BATCH_SIZES) -> Path:
    """Write warm-up requests of every signature into a SavedModel's folder.

    The requests hold a synthetic image, not one of the data set: a model must not contain somebody's photograph.

    Args:
        folder: The SavedModel's.
        side: Height and width of the picture, in pixels.
        batch_sizes: The numbers of images in the requests; a server is quick for the shapes that it has seen.

    Returns:
        The path of the file, a TFRecord of `tensorflow.serving.PredictionLog`.

    Example:
        >>> write_warm_up(pathlib.Path("models/cars/1"), side=256)
        PosixPath('models/cars/1/assets.extra/tf_serving_warmup_requests')
    """
    rows = np.arange(side) * 255 // max(1, side - 1)
    picture = np.stack(np.broadcast_arrays(rows[:, None], rows[None], 255 - rows[:, None]), -1).astype(np.uint8)
    jpeg = tf.io.encode_jpeg(picture).numpy()
    feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg]))
    example = tf.train.Example(features=tf.train.Features(feature={EXAMPLE_FEATURE: feature})).SerializeToString()
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in batch_sizes:
            writer.write(prediction_log("serving_default", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_example", examples=[example] * size))
            writer.write(prediction_log("embed_each", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_images", images=np.stack([picture] * size)))
    return path


def prediction_log(signature: str, **inputs) -> bytes:
    """A serialised `tensorflow.serving.PredictionLog` of one Predict request.

    Written field by field, so that exporting does not need tensorflow-serving-api.

    Args:
        signature: The name of the signature.
        **inputs: The value of each input.
    """
    # The numbers are those of prediction_log.proto, predict.proto and model.proto.
    request = _field(1, _field(3, signature.encode()))
    for name, value in inputs.items():
        tensor = tf.make_tensor_proto(value).SerializeToString()
        request += _field(2, _field(1, name.encode()) + _field(2, tensor))
    return _field(6, _field(1, request))


def _field(number: int, content: bytes) -> bytes:
    """A field of Protocol Buffers' wire format that holds bytes: a key, the length, the content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
