"""Images are turned upright by their EXIF, as by Pillow."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tests.data.preparations import encoded
from tfdml.data import EvaluationTransform
from tfdml.data.decoding import decode_image
from tfdml.export.saved_model import RequestPreprocessor

PIXELS = np.random.default_rng(0).integers(0, 256, (18, 25, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS)
VIEW = EvaluationTransform(12, 8)

decode = tf.function(decode_image, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)


@tf.function(input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)
def exported(batch):
    """What an exported graph does before the network."""
    return RequestPreprocessor(VIEW).all_or_error(batch, "image_bytes")


def tiff(orientation, order="<", tag=0x0112):
    """An EXIF block."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    maker = struct.pack(order + "HHI4s", 0x010F, 2, 4, b"abc\0")
    entry = struct.pack(order + "HHIHH", tag, 3, 1, orientation, 0)
    return head + struct.pack(order + "H", 2) + maker + entry + bytes(4)


def inserted(data, at, part):
    return data[:at] + part + data[at:]


def files(block):
    """Images that state an orientation, by the place."""
    jpeg, comment = encoded(IMAGE, "JPEG", quality=95), b"\xff\xfe\x4e\x22" + b"x" * 20_000
    segment = b"\xff\xe1" + struct.pack(">H", 8 + len(block)) + b"Exif\0\0" + block
    return {
        "JPEG": inserted(jpeg, 20, segment),
        "JPEG, behind a comment": inserted(jpeg, 20, comment + segment),
        "PNG": encoded(IMAGE, "PNG", exif=block),
        "WebP": encoded(IMAGE, "WEBP", lossless=True, exif=block),
        "WebP, with a name": encoded(IMAGE, "WEBP", lossless=True, exif=b"Exif\0\0" + block),
    }


def as_seen(data):
    """The image upright, by Pillow."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", range(10))
def test_every_place_and_orientation(orientation, order):
    images = files(tiff(orientation, order))
    views = exported(tf.constant(list(images.values())))
    for view, (name, data) in zip(views, images.items(), strict=True):
        seen = as_seen(data)
        assert (seen.shape[0] > seen.shape[1]) == (orientation in (5, 6, 7, 8)), name
        np.testing.assert_array_equal(decode(data), seen, name)
        np.testing.assert_array_equal(view, VIEW(tf.constant(seen)), name)


@pytest.mark.parametrize("block", [b"", tiff(6)[:20], b"XX*\0" + tiff(6)[4:], tiff(6, tag=0x0113)])
def test_blocks_without_an_orientation_count_as_upright(block):
    for name, data in files(block).items():
        assert decode(data).shape == PIXELS.shape, name
