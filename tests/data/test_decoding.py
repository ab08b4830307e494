"""Every kind of image decodes to what Pillow shows of it: transparency over white, turned upright."""

import contextlib
import io
import itertools
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.preparations import encoded, png
from tfdml.data import EncodedImages, EvaluationTransform, ImageDataset, TrainTransform
from tfdml.data.dataset import find_faults
from tfdml.data.decoding import FORMATS, decode_image, format_of, is_format
from tfdml.data.pipeline import decoded_source, readable_views
from tfdml.errors import UserError

HEIGHT, WIDTH = 40, 56
ROWS, COLUMNS = np.mgrid[0:HEIGHT, 0:WIDTH]
COLOR = Image.fromarray(np.stack([COLUMNS * 4, ROWS * 6, 255 - (ROWS + COLUMNS) * 2], -1).astype(np.uint8))
ALPHA = Image.fromarray(np.minimum(COLUMNS * 8, 255).astype(np.uint8))
SEE_THROUGH = Image.merge("RGBA", (*COLOR.split(), ALPHA))

decode = tf.function(decode_image, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)


def as_seen(data):
    """What a person sees, by Pillow."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode in ("LA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def assert_as_seen(data, tolerance=0):
    seen, image = as_seen(data), decode(data).numpy()
    assert image.dtype == np.uint8
    assert image.shape == seen.shape
    assert np.abs(image.astype(int) - seen).max() <= tolerance


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg(mode, subsampling, progressive):
    image = COLOR.convert(mode)
    assert_as_seen(encoded(image, "JPEG", quality=90, subsampling=subsampling, progressive=progressive))


def test_inverted_cmyk_jpeg_of_adobe():
    """Files with an Adobe marker hold CMYK upside down: read as they are, they come out as negatives."""
    data = encoded(COLOR.convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data
    image = decode(data).numpy().astype(int)
    assert np.abs(image - np.asarray(COLOR)).mean() < 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png(mode):
    assert_as_seen(encoded(SEE_THROUGH.convert(mode), "PNG"))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("transparency", [None, bytes([200, 50])])
def test_png_with_a_palette(bits, transparency):
    """libpng fills in alpha 1, 3 or 15 for palettes and grays of less than 8 bits: they came out white."""
    indices = (COLUMNS % 2**bits).astype(np.uint8)
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    image.putpalette([level for i in range(2**bits) for level in (i * 15 % 256, i * 7 % 256, 255 - i)])
    options = {} if transparency is None else {"transparency": transparency}
    assert_as_seen(encoded(image, "PNG", bits=bits, **options))


@pytest.mark.parametrize(("mode", "key"), [("RGB", COLOR.getpixel((3, 3))), ("L", COLOR.convert("L").getpixel((3, 3)))])
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
    assert decode(png(4, 1, 16, 0, b"\0" + levels.tobytes()))[0, :, 1].numpy().tolist() == [0, 1, 128, 255]
    colors = np.array([[256, 512, 65535]], ">u2")
    assert decode(png(1, 1, 16, 2, b"\0" + colors.tobytes()))[0, 0].numpy().tolist() == [1, 2, 255]
    gray_and_alpha = np.array([[2560, 32768], [51200, 65535]], ">u2")
    assert decode(png(2, 1, 16, 4, b"\0" + gray_and_alpha.tobytes()))[0, :, 0].numpy().tolist() == [132, 200]


@pytest.mark.parametrize("options", [{"quality": 80}, {"lossless": True}])
@pytest.mark.parametrize("image", [COLOR.convert("L"), COLOR, SEE_THROUGH], ids=["L", "RGB", "RGBA"])
def test_webp(image, options):
    assert_as_seen(encoded(image, "WEBP", **options))


def test_unsupported_kinds_say_so():
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a JPEG, PNG or WebP image"):
        decode(b"<!doctype html>")
    animated = encoded(COLOR, "WEBP", save_all=True, append_images=[ImageOps.mirror(COLOR)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="animated WebP is not supported"):
        decode(animated)


@given(st.sampled_from(["JPEG", "PNG", "WEBP"]), st.integers(0, 400), st.binary(min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_damaged_bytes_give_an_image_or_a_plain_error(file_format, at, junk):
    data = encoded(COLOR, file_format)
    at = min(at, len(data) - len(junk))
    with contextlib.suppress(tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError):
        assert decode(data[:at] + junk + data[at + len(junk) :]).shape[-1] == 3


def test_decodes_inside_a_saved_model(tmp_path):
    """The serving graph maps it over a batch of strings."""

    class Decoder(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)
        def __call__(self, batch):
            means = tf.map_fn(
                lambda data: tf.reduce_mean(tf.cast(decode_image(data), tf.float32), (0, 1)),
                batch,
                fn_output_signature=tf.TensorSpec((3,), tf.float32),
            )
            return {"means": means}

    tf.saved_model.save(Decoder(), str(tmp_path))
    exif = Image.Exif()
    exif[0x0112] = 6
    batch = [encoded(COLOR, "JPEG", exif=exif), encoded(SEE_THROUGH, "PNG"), encoded(SEE_THROUGH, "WEBP")]
    means = tf.saved_model.load(str(tmp_path))(tf.constant(batch))["means"]
    np.testing.assert_allclose(means, [as_seen(data).mean((0, 1)) for data in batch], atol=1e-2)


@pytest.mark.parametrize(("kind", "size"), [("JPEG", (10_000, 2)), ("PNG", (2, 10_000)), ("WEBP", (101, 1))])
def test_a_banner_is_refused_before_it_is_enlarged(kind, size):
    """Enlarged to a shorter side of 256, 10,000 x 2 pixels would become a gigabyte."""
    data = encoded(Image.new("RGB", size), kind)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too narrow"):
        decode(data)
    images = EncodedImages((data, encoded(COLOR, kind)), ("banner", "photo"))
    for check in (True, False):
        (fault,) = find_faults(images, decode=check)
        assert str(fault).startswith(f"banner: too narrow: {size[0]:,} x {size[1]:,} pixels")
    for transform in (TrainTransform("random_crop", 16, 12), TrainTransform("none", 16, 12, "squash")):
        with pytest.raises(UserError, match="banner: too narrow"):
            decoded_source(ImageDataset(images=images, labels=[0, 1]), transform, 100.0)
    rows = [row for rows, _ in readable_views(images, EvaluationTransform(16, 12), 2) for row in rows.tolist()]
    assert rows == [1]


@pytest.mark.parametrize("size", [(1, 1), (256, 300)])
def test_transparency_is_blended_exactly(size):
    rng = np.random.default_rng(size[0])
    pixels = rng.integers(0, 256, (size[1], size[0], 4), np.uint8)
    color, alpha = pixels[..., :3].astype(np.float64), pixels[..., 3:].astype(np.float64)
    expected = np.floor((color * alpha + 255 * (255 - alpha)) / 255 + 0.5)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(pixels), "PNG")), expected)


FILES = {form: encoded(Image.new("RGB", (3, 2)), form) for form in ("JPEG", "PNG", "WebP", "GIF", "TIFF")}
NO_IMAGES = {
    "wave": b"RIFF\x24\0\0\0WAVEfmt ",
    "cut off": b"RIFF\x24\0",
    "start of a JPEG": b"\xff\xd8",
    "empty": b"",
    "text": b"BM is the name of a bitmap",
    "video": b"\0\0\0\x18ftypisom\0\0\0\0",
    "thumbnails": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
}
READ = ("JPEG", "PNG", "WebP")


@pytest.mark.parametrize("name", [*FILES, *NO_IMAGES])
def test_the_format_of_a_file(name):
    data = (FILES | NO_IMAGES)[name]
    known = [form.name for form in FORMATS if form.matches(data[:16])]
    assert known == ([name] if name in READ else [])
    assert format_of(data[:16]) == next((form for form in FORMATS if form.name == name), None)
    in_graph = [form.name for form in FORMATS if is_format(tf.constant(data), form)]
    assert in_graph == known


PIXELS = np.random.default_rng(0).integers(0, 256, (18, 25, 3), np.uint8)
PLAIN = {kind: encoded(Image.fromarray(PIXELS), kind) for kind in ("JPEG", "PNG")}


def tiff(orientation, order="<", kind=3, tag=0x0112):
    """An EXIF block."""
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *([orientation, 0] if kind == 3 else [orientation]))
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    maker = struct.pack(order + "HHI4s", 0x010F, 2, 4, b"abc\0")
    return head + struct.pack(order + "H", 2) + maker + struct.pack(order + "HHI", tag, kind, 1) + value + bytes(4)


def segment(marker, data):
    """A segment of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(data)) + data


def chunk(kind, data):
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def oriented(orientation, **block):
    """Images that state an orientation, by the place."""
    jpeg, png_file, block = PLAIN["JPEG"], PLAIN["PNG"], tiff(orientation, **block)
    here, scan, data = segment(0xE1, b"Exif\0\0" + block), jpeg.index(b"\xff\xda"), png_file.index(b"IDAT") - 4
    photoshop = segment(0xED, b"Photoshop 3.0\0" + b"\xff\xe1\0\x08Exif\0\0" * 4_000) * 3
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(np.random.default_rng(1).bytes(70_000), 0))
    yield "before JFIF", jpeg[:2] + here + jpeg[2:]
    yield "behind JFIF", jpeg[:20] + here + jpeg[20:]
    yield "behind Photoshop's", jpeg[:20] + photoshop + here + jpeg[20:]
    yield "before the scan", jpeg[:scan] + here + jpeg[scan:]
    yield "written twice", jpeg[:20] + segment(0xE1, b"Exif\0\0Exif\0\0" + block) + jpeg[20:]
    yield "PNG, behind a profile", png_file[:data] + profile + chunk(b"eXIf", block) + png_file[data:]
    yield "PNG, behind the data", png_file[:-12] + chunk(b"eXIf", block) + png_file[-12:]
    for name, exif in (("WebP", b"Exif\0\0" + block), ("WebP, without its name", block)):
        yield name, encoded(Image.fromarray(PIXELS), "WEBP", lossless=True, exif=exif)


def test_every_place_and_orientation():
    blocks = itertools.cycle(itertools.product("<>", (3, 4)))
    for orientation, (order, kind) in zip(range(1, 9), blocks, strict=False):
        for name, data in oriented(orientation, order=order, kind=kind):
            seen = as_seen(data)
            assert (seen.shape[0] > seen.shape[1]) == (orientation >= 5), name
            np.testing.assert_array_equal(decode(data), seen, f"{name}, orientation {orientation}")
            assert EncodedImages((data,), ("x",)).size(0) == seen.shape[:2], name


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("length", [0, 300_000])
def test_a_palette_is_transparent_behind_a_profile_of_any_size(length, bits):
    palette = Image.fromarray(PIXELS[..., 0] & np.uint8(2**bits - 1), "P")
    palette.putpalette(bytes(np.random.default_rng(2).integers(0, 256, 3 << bits, np.uint8)))
    profile = np.random.default_rng(1).bytes(length)
    assert_as_seen(encoded(palette, "PNG", bits=bits, transparency=bytes([200, 50, 0]), icc_profile=profile))


@pytest.mark.parametrize(
    "block",
    [
        tiff(6)[:20],
        tiff(9),
        tiff(6, tag=0x0113),
        b"XX*\0" + tiff(6)[4:],
        tiff(6).replace(b"\x08\0\0\0", b"\xff\xff\xff\xff"),
        tiff(6)[:8] + b"\xff\xff" + tiff(5, tag=1)[10:],
        b"",
    ],
)
def test_damaged_orientations_count_as_upright(block):
    data = PLAIN["JPEG"][:20] + segment(0xE1, b"Exif\0\0" + block) + PLAIN["JPEG"][20:]
    np.testing.assert_array_equal(decode(data), decode(PLAIN["JPEG"]))
