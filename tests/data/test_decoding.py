"""Every kind of image decodes to what Pillow shows of it: transparency over white, turned
upright."""

import contextlib
import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.graphs import VIEW, decode, exported
from tests.data.preparations import encoded, png
from tfdml.data import EncodedImages, EvaluationTransform, ImageDataset, TrainTransform
from tfdml.data.decoding import decode_image
from tfdml.data.faults import find_faults
from tfdml.data.pipeline import decoded_source, readable_views
from tfdml.errors import UserError

HEIGHT, WIDTH = 40, 56
ROWS, COLUMNS = np.mgrid[0:HEIGHT, 0:WIDTH]
COLOR = Image.fromarray(
    np.stack([COLUMNS * 4, ROWS * 6, 255 - (ROWS + COLUMNS) * 2], -1).astype(np.uint8)
)
ALPHA = Image.fromarray(np.minimum(COLUMNS * 8, 255).astype(np.uint8))
SEE_THROUGH = Image.merge("RGBA", (*COLOR.split(), ALPHA))


def as_seen(data):
    """What a person sees, by Pillow."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode in ("LA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def assert_as_seen(data):
    np.testing.assert_array_equal(decode(data), as_seen(data), strict=True)


MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("L", "RGB", "RGBA"),
}
OPTIONS = {
    "JPEG": [
        {"quality": 90, "subsampling": s, "progressive": p} for s in (0, 2) for p in (False, True)
    ],
    "PNG": [{}],
    "WEBP": [{"quality": 80}, {"lossless": True}],
}


@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes]
)
def test_every_mode_of_every_kind(kind, mode):
    image = (COLOR if kind == "JPEG" else SEE_THROUGH).convert(mode)
    for options in OPTIONS[kind]:
        assert_as_seen(encoded(image, kind, **options))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("transparency", [None, bytes([200, 50])])
def test_png_with_a_palette(bits, transparency):
    """libpng fills in alpha 1, 3 or 15 for palettes and grays of less than 8 bits: they came out
    white."""
    indices = (COLUMNS % 2**bits).astype(np.uint8)
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    image.putpalette(
        [level for i in range(2**bits) for level in (i * 15 % 256, i * 7 % 256, 255 - i)]
    )
    options = {} if transparency is None else {"transparency": transparency}
    for length in (0, 70_000, 300_000):  # of a profile in front
        profile = np.random.default_rng(1).bytes(length)
        assert_as_seen(encoded(image, "PNG", bits=bits, icc_profile=profile, **options))


@pytest.mark.parametrize(
    ("mode", "key"), [("RGB", COLOR.getpixel((3, 3))), ("L", COLOR.convert("L").getpixel((3, 3)))]
)
def test_png_with_a_transparent_color(mode, key):
    data = encoded(COLOR.convert(mode), "PNG", transparency=key)
    assert_as_seen(data)
    assert decode(data)[3, 3].numpy().tolist() == [255] * 3


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_png_with_few_grays(depth):
    values = np.arange(8) % 2**depth
    row = int("".join(f"{value:0{depth}b}" for value in values), 2).to_bytes(1 + depth, "big")
    gray = values * (255 // (2**depth - 1))
    assert decode(png(8, 1, depth, 0, row))[0, :, 0].numpy().tolist() == gray.tolist()
    keyed = decode(png(8, 1, depth, 0, row, key=struct.pack(">H", 1)))[0, :, 0].numpy()
    assert keyed.tolist() == np.where(values == 1, 255, gray).tolist()


def test_png_of_16_bits():
    """Pillow cuts 16 bit grays off at 255, which shows nearly everything as white."""
    levels = np.array([0, 300, 32768, 65535], ">u2")
    assert decode(png(4, 1, 16, 0, b"\0" + levels.tobytes()))[0, :, 1].numpy().tolist() == [
        0,
        1,
        128,
        255,
    ]
    colors = np.array([[256, 512, 65535]], ">u2")
    assert decode(png(1, 1, 16, 2, b"\0" + colors.tobytes()))[0, 0].numpy().tolist() == [1, 2, 255]
    gray_and_alpha = np.array([[2560, 32768], [51200, 65535]], ">u2")
    assert decode(png(2, 1, 16, 4, b"\0" + gray_and_alpha.tobytes()))[0, :, 0].numpy().tolist() == [
        132,
        200,
    ]


@given(
    st.sampled_from(["JPEG", "PNG", "WEBP"]), st.integers(0, 400), st.binary(min_size=1, max_size=8)
)
@settings(max_examples=80, deadline=None)
def test_damaged_bytes_give_an_image_or_a_plain_error(file_format, at, junk):
    data = encoded(COLOR, file_format)
    at = min(at, len(data) - len(junk))
    with contextlib.suppress(tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError):
        assert decode(data[:at] + junk + data[at + len(junk) :]).shape[-1] == 3


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("kind", "size"), [("JPEG", (10_000, 2)), ("PNG", (2, 10_000)), ("WEBP", (101, 1))]
)
def test_a_banner_is_refused_before_it_is_enlarged(kind, size):
    """Enlarged to a shorter side of 256, 10,000 x 2 pixels would become a gigabyte."""
    data = encoded(Image.new("RGB", size), kind)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too narrow"):
        decode(data)
    images = EncodedImages((data, encoded(COLOR, kind)), ("banner", "photo"))
    for check in (True, False):
        (fault,) = find_faults(images, decode=check)
        assert str(fault).startswith(f"banner: too narrow: {size[0]:,} x {size[1]:,} pixels")
    with pytest.raises(UserError, match="banner: too narrow"):
        decoded_source(
            ImageDataset(images=images, labels=[0, 1]), TrainTransform("random_crop", 16, 12), 100.0
        )
    rows = [
        row
        for rows, _ in readable_views(images, EvaluationTransform(16, 12), 2)
        for row in rows.tolist()
    ]
    assert rows == [1]


@pytest.mark.parametrize("size", [(1, 1), (90, 3), (3, 90), (1024, 1030)])
def test_transparency_is_blended_exactly_in_blocks(size):
    rng = np.random.default_rng(size[0])
    pixels = rng.integers(0, 256, (size[1], size[0], 4), np.uint8)
    color, alpha = pixels[..., :3].astype(np.float64), pixels[..., 3:].astype(np.float64)
    expected = np.floor((color * alpha + 255 * (255 - alpha)) / 255 + 0.5)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(pixels), "PNG")), expected)


def test_cmyk_without_adobes_marker_is_inverted_as_well():
    """Pillow and browsers show it so; the decoder alone takes it for the negative."""
    for options in ({}, {"progressive": True}, {"quality": 50}):
        data = encoded(COLOR.convert("CMYK"), "JPEG", **options)
        start = data.index(b"\xff\xee\0\x0eAdobe")
        unmarked = data[:start] + data[start + 16 :]
        assert b"Adobe" not in unmarked
        assert_as_seen(data)
        assert_as_seen(unmarked)
        np.testing.assert_array_equal(decode(unmarked), decode(data))


FILMS = {
    "zeros": bytes(5000),
    "any bytes": np.random.default_rng(0).bytes(200_000),
    "the marker of a scan": b"\xff\xda" * 500 + bytes(300),
    "the marker of an end": b"\xff\xd9" + bytes(300),
    "a scan without an end": b"\xff\xd9\xff\xda" + bytes(300),
    "a JPEG": encoded(COLOR.rotate(90), "JPEG", exif=b"Exif\0\0MM\0*" + bytes(40)),
    "a cut JPEG": encoded(COLOR.rotate(90), "JPEG")[:-50] + bytes(300),
    "an MP4": struct.pack(">I4s4s", 24, b"ftyp", b"mp42") + bytes(12) + b"\xff\xda\0\x0c" * 99,
}


@pytest.mark.parametrize("film", FILMS)
@pytest.mark.parametrize("progressive", [False, True])
def test_what_lies_behind_a_jpeg_does_not_count(film, progressive):
    data = encoded(COLOR, "JPEG", progressive=progressive)
    images = EncodedImages((data + FILMS[film], data[:-2] + bytes(300)), ("film", "cut"))
    np.testing.assert_array_equal(decode(data + FILMS[film]), decode(data))
    views, errors = exported(tf.constant(images.data))
    assert [error == b"" for error in errors.numpy()] == [True, False]
    np.testing.assert_array_equal(views[0], VIEW(decode(data)))
    for decoded in (True, False):
        (fault,) = find_faults(images, decode=decoded)
        assert (fault.index, fault.reason[:14]) == (1, "truncated JPEG")


def test_a_large_image_is_refused_in_our_words():
    for side in (13_400, 20_000, 60_000):
        images = EncodedImages((png(side, side, 1, 0, pixels=b""),), ("large",))
        for decoded in (True, False):
            (fault,) = find_faults(images, decode=decoded)
            assert fault.reason.startswith(f"too large: {side:,} x {side:,} pixels, more than")


def test_a_header_of_much_filling_is_refused_before_pillow_reads_it_byte_by_byte():
    data = encoded(COLOR, "JPEG")
    filled = data[:2] + b"\xff" * 10**6 + data[2:]
    (fault,) = find_faults(EncodedImages((filled,), ("filled",)), decode=False)
    assert "too much filling in its header" in fault.reason
