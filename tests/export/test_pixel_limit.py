"""What a header promises is read in the graph as Pillow reads it, without decoding."""

import io
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from tfdml.export.pixel_limit import header_size, size_fault


def picture(width, height, form, **options):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3)).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png_promising(width, height):
    """A PNG of a hundred bytes whose header states any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def in_python(data):
    """Height and width, as Pillow has them."""
    kind = {b"\xff\xd8": JpegImageFile, b"\x89P": PngImageFile, b"RI": WebPImageFile}[data[:2]]
    return kind(io.BytesIO(data)).size[::-1]


ENCODED = {
    "jpeg": picture(37, 61, "JPEG"),
    "progressive jpeg": picture(300, 20, "JPEG", progressive=True),
    "png": picture(61, 37, "PNG"),
    "large png": png_promising(70_000, 90_000),
    "webp": picture(33, 44, "WEBP"),
    "lossless webp": picture(45, 34, "WEBP", lossless=True),
    "extended webp": picture(300, 17, "WEBP", exif=Image.Exif().tobytes() or b"Exif\0\0"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_sizes_are_those_that_python_reads(name):
    assert tuple(header_size(tf.constant(ENCODED[name])).numpy()) == in_python(ENCODED[name])


@pytest.mark.parametrize("data", [b"", b"B", b"hello, world", b"RIFF1234WAVEfmt ", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_what_states_no_size_has_none(data):
    np.testing.assert_array_equal(header_size(tf.constant(data)), [0, 0])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([name for name in ENCODED if "jpeg" not in name]), st.data())
def test_files_that_are_cut_off_never_fail(name, data):
    whole = ENCODED[name]
    part = whole[: data.draw(st.integers(0, len(whole)))]
    size = header_size(tf.constant(part)).numpy()
    assert (size >= 0).all()


@pytest.mark.parametrize(
    ("size", "mode", "says"),
    [
        ((1, 1), "shorter", ""),
        ((1000, 1000), "shorter", ""),
        ((1001, 1000), "shorter", "1000 x 1001 pixels, more than the limit of 1000000"),
        ((0, 5), "shorter", "no size"),
        ((5, 0), "squash", "no size"),
        ((2**32 - 1, 2**32 - 1), "shorter", "more than the limit"),
        # Resized to 100 x 100: 25 times as long is the most that a quarter of the pixels allows.
        ((1, 25), "shorter", ""),
        ((26, 1), "shorter", "so narrow"),
        ((26, 1), "squash", ""),
        ((1, 26), "pad", ""),
    ],
)
def test_faults_of_sizes(size, mode, says):
    fault = size_fault(tf.constant(size, tf.int64), 100, mode, 1_000_000).numpy().decode()
    assert says in fault
    assert bool(says) == bool(fault)


def test_a_resize_that_is_itself_beyond_the_limit_forbids_no_square():
    assert size_fault(tf.constant([9, 9], tf.int64), 500, "shorter", 1000).numpy() == b""
