"""A bad image in a request: an error that names it, or a defined result; never a crash, never
another's result.

What a header promises is read in the graph as Pillow reads it, without decoding.
"""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from tests.data.preparations import encoded, png
from tests.export.networks import picture
from tfdml.data import EvaluationTransform
from tfdml.data.decoding import header_size
from tfdml.export.saved_model import RequestPreprocessor


def jpeg_promising(width, height):
    """A JPEG whose frame header states another size than it was made with."""
    data = bytearray(picture(0))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def corrupt_png():
    """A PNG that is whole but for one byte in the middle of its pixels."""
    data = bytearray(picture(1, form="PNG"))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


def animated_webp():
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "green")]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


BAD = {
    "no bytes": (b"", "no bytes"),
    "text": (b"hello, world", "not a JPEG, PNG or WebP image"),
    "bytes that are no text": (b"\xff\xfe\xfd\x00" * 9, "not a JPEG, PNG or WebP image"),
    "a sound": (b"RIFF\x24\0\0\0WAVEfmt ", "no size"),
    "truncated JPEG": (picture(2)[:600], "damaged"),
    "JPEG cut in its header": (picture(2)[:60], "damaged"),
    "truncated PNG": (picture(2, form="PNG")[:300], "damaged"),
    "corrupt PNG": (corrupt_png(), "damaged"),
    "GIF": (picture(2, form="GIF"), "not a JPEG, PNG or WebP image"),
    "truncated WebP": (picture(2, form="WEBP")[:100], "damaged"),
    "animated WebP": (animated_webp(), "damaged"),
    "PNG bomb": (
        png(30_000, 30_000, pixels=b""),
        "30000 x 30000 pixels, more than the limit of 500000",
    ),
    "JPEG bomb": (
        jpeg_promising(30_000, 30_000),
        "30000 x 30000 pixels, more than the limit of 500000",
    ),
    "PNG without size": (png(0, 10), "no size"),
    "line of pixels": (picture(3, 1, 5000, "PNG"), "5000 x 1 pixels, so narrow"),
}


@pytest.fixture(scope="module")
def served(shop):
    return tf.saved_model.load(str(shop.embedder / "1"))  # refuses images above conftest.LIMIT


def embed(served, images, signature="serving_default"):
    return served.signatures[signature](image_bytes=tf.constant(images, tf.string))


@pytest.mark.slow
def test_each_image_of_a_batch_gets_its_own_result_or_error_and_the_first_bad_one_is_named(served):
    good = {place: picture(place, 40 + place) for place in (0, 3, 7)}
    bad = dict(zip((place for place in range(20) if place not in good), BAD.values(), strict=False))
    images = [
        good[place] if place in good else bad[place][0] for place in range(len(good) + len(bad))
    ]
    answer = embed(served, images, "embed_each")
    alone = {place: embed(served, [image])["embedding"][0].numpy() for place, image in good.items()}
    for place, (vector, error) in enumerate(
        zip(answer["embedding"], answer["error"].numpy(), strict=True)
    ):
        if place in good:
            assert error == b""
            np.testing.assert_allclose(vector, alone[place], atol=1e-6)
        else:
            assert bad[place][1] in error.decode()
            np.testing.assert_array_equal(vector, np.zeros(8))
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"image_bytes\[1\] of 2: "
            ) as raised:
                embed(served, [good[0], images[place]])
            assert bad[place][1] in str(raised.value)


@pytest.mark.slow
def test_empty_batches_and_images_of_one_pixel(served):
    assert embed(served, [], "embed_each")["embedding"].shape == (0, 8)
    of_images = served.signatures["embed_images"]
    vectors = embed(served, [picture(5, 1, 1, form) for form in ("JPEG", "PNG", "WEBP")])[
        "embedding"
    ]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    for shape in ((2, 0, 5, 3), (1, 5, 0, 3), (1, 1, 5000, 3), (1, 1000, 1000, 3)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="images: "):
            of_images(images=tf.zeros(shape, tf.uint8))


def in_python(data):
    """Height and width, as Pillow has them."""
    kind = {b"\xff\xd8": JpegImageFile, b"\x89P": PngImageFile, b"RI": WebPImageFile}[data[:2]]
    return kind(io.BytesIO(data)).size[::-1]


ENCODED = {
    "jpeg": picture(0, 61, 37),
    "progressive jpeg": picture(0, 20, 300, progressive=True),
    "png": picture(0, 37, 61, "PNG"),
    "large png": png(70_000, 90_000, pixels=b""),
    "webp": picture(0, 44, 33, "WEBP"),
    "lossless webp": picture(0, 34, 45, "WEBP", lossless=True),
    "extended webp": picture(0, 17, 300, "WEBP", exif=Image.Exif().tobytes() or b"Exif\0\0"),
}


def test_sizes_are_those_that_python_reads():
    for data in ENCODED.values():
        assert tuple(header_size(tf.constant(data)).numpy()) == in_python(data)
    for data in (b"", b"B", b"hello, world", b"RIFF1234WAVEfmt ", b"\x89PNG\r\n\x1a\n", b"GIF89a"):
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
        ((1000, 1000), "shorter", ""),
        ((1001, 1000), "shorter", "1000 x 1001 pixels, more than the limit of 1000000"),
        ((0, 5), "shorter", "no size"),
        # Resized to 100 x 100: 25 times as long is the most that a quarter of the pixels allows.
        ((1, 25), "shorter", ""),
        ((26, 1), "shorter", "so narrow"),
        ((1, 100), "squash", ""),
        ((101, 1), "squash", "so narrow that one side is more than 100 times the other"),
        ((2, 201), "pad", "so narrow"),
    ],
)
def test_faults_of_sizes(size, mode, says):
    views = RequestPreprocessor(EvaluationTransform(100, 100, mode), max_pixels=1_000_000)
    fault = views.size_fault(tf.constant(size, tf.int64)).numpy().decode()
    assert says in fault
    assert bool(says) == bool(fault)
    # A resize that is itself beyond the limit forbids no square.
    beyond = RequestPreprocessor(EvaluationTransform(500, 500), max_pixels=1000)
    assert beyond.size_fault(tf.constant([9, 9], tf.int64)).numpy() == b""
