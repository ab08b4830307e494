"""Images are turned upright as by Pillow where EXIF states their orientation."""

import io
import itertools
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tests.data.graphs import VIEW, decode, exported_or_refused
from tests.data.preparations import encoded
from tfdml.data import EncodedImages
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import check
from tfdml.data.preparation import check_images, prepare

PIXELS = np.random.default_rng(0).integers(0, 256, (18, 25, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS)


def tiff(orientation, order="<", kind=3, tag=0x0112, before=0):
    """An EXIF block; `before` pads it in front of its directory."""
    value = struct.pack(
        order + ("HH" if kind == 3 else "I"), *([orientation, 0] if kind == 3 else [orientation])
    )
    head = (
        (b"II*\0" if order == "<" else b"MM\0*")
        + struct.pack(order + "I", 8 + before)
        + bytes(before)
    )
    maker = struct.pack(order + "HHI4s", 0x010F, 2, 4, b"abc\0")
    entry = struct.pack(order + "HHI", tag, kind, 1) + value
    return head + struct.pack(order + "H", 2) + maker + entry + bytes(4)


def xmp(orientation, element=False):
    """An XMP packet that states an orientation."""
    stated = f">{orientation}</tiff:Orientation>" if element else f'="{orientation}"'
    start = "<tiff:Orientation" if element else "<rdf:Description tiff:Orientation"
    return f"<x:xmpmeta tiff:Orientation = ''>{start}{stated}</x:xmpmeta>".encode()


def segment(marker, data):
    """A segment of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(data)) + data


def chunk(kind, data):
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif_segment(data):
    """The segment of a JPEG that holds a TIFF block."""
    return segment(0xE1, b"Exif\0\0" + data)


def xmp_segment(data):
    """The segment of a JPEG that holds a packet."""
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + data)


PNG_PROFILE = chunk(b"iCCP", b"p\0\0" + zlib.compress(np.random.default_rng(1).bytes(70_000), 0))
PNG = encoded(IMAGE, "PNG")
JPEG = encoded(IMAGE, "JPEG", quality=95)
_FRAME, _SCAN = JPEG.index(b"\xff\xc0"), JPEG.index(b"\xff\xda")
PROFILE = segment(0xE2, b"ICC_PROFILE\0\1\2" + bytes(60_000)) + segment(
    0xE2, b"ICC_PROFILE\0\2\2" + b"\xff\xda" * 20_000
)
PHOTOSHOP = segment(0xED, b"Photoshop 3.0\0" + b"\xff\xe1\0\x08Exif\0\0" * 4_000) * 3


def jpegs(orientation, other, **block):
    """JPEGs that state an orientation, by the place; some state another one where it does not
    count."""
    here, there = exif_segment(tiff(orientation, **block)), xmp_segment(xmp(orientation))
    long = tiff(orientation, before=65_600, **block)
    inserted = {
        "before JFIF": (2, here),
        "behind JFIF": (20, here),
        "behind a comment": (20, segment(0xFE, b"x" * 20_000) + here),
        "behind a profile": (20, PROFILE + here),
        "behind Photoshop's": (20, PHOTOSHOP + here),
        "behind the tables": (_FRAME, here),
        "before the scan": (_SCAN, here),
        "behind filling": (20, b"\xff\xff\xff" + here),
        "in two segments": (20, exif_segment(long[:60_000]) + exif_segment(long[60_000:])),
        "written twice": (20, exif_segment(b"Exif\0\0" + tiff(orientation, **block))),
        "EXIF next to XMP": (20, xmp_segment(xmp(other)) + here),
        "EXIF of no meaning": (20, exif_segment(tiff(9, **block)) + there),
        "behind much filling": (20, b"\xff" * 70_000 + here),
        "in the last segment that is read": (20, segment(0xFE, b"") * 62 + here),
    }
    return {name: JPEG[:at] + data + JPEG[at:] for name, (at, data) in inserted.items()}


def as_text(data):
    """An EXIF block as ImageMagick writes it into a PNG."""
    data = b"Exif\0\0" + data
    lines = [data.hex()[i : i + 72] for i in range(0, 2 * len(data), 72)]
    return f"\nexif\n{len(data):8}\n{chr(10).join(lines)}\n".encode()


def texts(keyword, text):
    """Chunks of a PNG that hold a text, by their kind."""
    yield "tEXt", chunk(b"tEXt", keyword + b"\0" + text)
    yield "zTXt", chunk(b"zTXt", keyword + b"\0\0" + zlib.compress(text))
    yield "iTXt", chunk(b"iTXt", keyword + b"\0\0\0en\0\0" + text)
    yield "compressed iTXt", chunk(b"iTXt", keyword + b"\0\1\0\0x\0" + zlib.compress(text))


def pngs(orientation, other, **block):
    """PNGs that state an orientation, by the place."""
    here = chunk(b"eXIf", tiff(orientation, **block))
    start, end = PNG.index(b"IDAT") - 4, PNG.index(b"IEND") - 4
    inserted = {
        "before the data": (start, here),
        "behind a profile": (start, PNG_PROFILE + here),
        "behind the data": (end, here),
        "EXIF next to XMP and text": (
            start,
            b"".join(part for name, part in texts(b"XML:com.adobe.xmp", xmp(other)))
            + b"".join(part for name, part in texts(b"Raw profile type exif", as_text(tiff(other))))
            + here,
        ),
    }
    return {name: PNG[:at] + part + PNG[at:] for name, (at, part) in inserted.items()}


def webps(orientation, other, **block):
    """WebPs that state an orientation, by the place."""
    options = {
        "EXIF": {"exif": b"Exif\0\0" + tiff(orientation, **block)},
        "EXIF without its name": {"exif": tiff(orientation, **block)},
        "EXIF next to XMP": {
            "exif": tiff(orientation, **block),
            "xmp": xmp(other),
            "icc_profile": bytes(70_001),
        },
    }
    return {
        name: encoded(IMAGE, "WEBP", lossless=True, **values) for name, values in options.items()
    }


def as_seen(data):
    """The image upright, by Pillow."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("files", [jpegs, pngs, webps])
def test_every_place_and_orientation(files):
    blocks = itertools.cycle(itertools.product("<>", (3, 4)))
    for orientation, (order, kind) in zip(range(1, 9), blocks, strict=False):
        made = files(orientation, orientation % 8 + 1, order=order, kind=kind)
        views = exported_or_refused(tf.constant(list(made.values())))
        for view, (name, data) in zip(views, made.items(), strict=True):
            seen, where = (
                as_seen(data),
                f"{name}, orientation {orientation}, order {order}, type {kind}",
            )
            turned = orientation >= 5 and name != "EXIF of no meaning"
            assert (seen.shape[0] > seen.shape[1]) == turned, where
            np.testing.assert_array_equal(decode(data), seen, where)
            np.testing.assert_array_equal(view, VIEW(tf.constant(seen)), where)
            assert EncodedImages((data,), ("x",)).size(0) == seen.shape[:2], where


DAMAGED = {
    "EXIF cut off": JPEG[:20] + exif_segment(tiff(6))[:20],
    "a segment that ends behind the file": JPEG[:20] + b"\xff\xe1\xff\xffExif\0\0" + JPEG[20:],
    "a directory elsewhere": JPEG[:20]
    + exif_segment(tiff(6).replace(b"\x08\0\0\0", b"\xff\xff\xff\xff"))
    + JPEG[20:],
    "more entries than there are": JPEG[:20]
    + exif_segment(tiff(6)[:8] + b"\xff\xff" + tiff(5, tag=1)[10:])
    + JPEG[20:],
}
DAMAGED |= {
    name: PNG[:33] + part + PNG[33:]
    for name, part in {
        "zTXt that is not compressed": chunk(
            b"zTXt", b"Raw profile type exif\0\0" + as_text(tiff(6))
        ),
        "zTXt cut off": chunk(
            b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(as_text(tiff(6)))[:20]
        ),
    }.items()
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_orientations_count_as_upright(name):
    data = DAMAGED[name]
    if name in ("EXIF cut off", "a segment that ends behind the file"):  # so is the image
        with pytest.raises(tf.errors.InvalidArgumentError):
            decode(data)
    else:
        assert decode(data).shape == PIXELS.shape


def only_pillow(orientation):
    """Images that XMP or a text of a PNG turns, by the place."""
    there, none = xmp_segment(xmp(orientation)), exif_segment(tiff(7, tag=0x0113))
    start, end = PNG.index(b"IDAT") - 4, PNG.index(b"IEND") - 4
    packet = xmp(orientation, element=True)
    made = {
        "JPEG": JPEG[:20] + there + JPEG[20:],
        "JPEG with EXIF without one": JPEG[:20] + there + none + JPEG[20:],
        "JPEG with EXIF behind 64 segments": JPEG[:20]
        + segment(0xFE, b"") * 70
        + exif_segment(tiff(orientation))
        + JPEG[20:],
        "WebP": encoded(IMAGE, "WEBP", lossless=True, xmp=packet),
    }
    for name, part in texts(b"Raw profile type exif", as_text(tiff(orientation))):
        made[f"PNG, EXIF in {name}"] = PNG[:start] + part + PNG[start:]
    for name, part in texts(b"XML:com.adobe.xmp", packet):
        made[f"PNG, XMP in {name}"] = PNG[:start] + PNG_PROFILE + part + PNG[start:]
        made[f"PNG, XMP in {name} behind the data"] = PNG[:end] + part + PNG[end:]
    return made


@pytest.mark.parametrize("orientation", [2, 6])
def test_what_pillow_alone_turns_is_counted_and_prepared_upright(orientation, tmp_path, caplog):
    made = only_pillow(orientation)
    upright = {"upright": JPEG, "by EXIF": JPEG[:20] + exif_segment(tiff(6)) + JPEG[20:]}
    images = EncodedImages((*made.values(), *upright.values()), (*made, *upright))
    dataset = ImageDataset(images=images, labels=np.zeros(len(images), int))
    for name, data in made.items():
        np.testing.assert_array_equal(decode(data), decode(without_orientation(data)), name)
        assert EncodedImages((data,), ("x",)).size(0) == PIXELS.shape[:2], name

    with caplog.at_level("WARNING", logger="absl"):
        check(dataset)
    # Behind the data of a PNG no header is read.
    assert f"{len(made) - 4} of {len(images)} images are used as they are stored" in caplog.text
    assert "`tfdml prepare` writes them upright" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="absl"):
        assert check_images({"all": dataset}) == {"all": []}
    assert f"{len(made)} of {len(images)} images are used as they are stored" in caplog.text

    prepare({"all": dataset}, tmp_path / "copy")
    copies = [path.read_bytes() for path in sorted(tmp_path.glob("copy/all/*/*"))]
    for (name, data), copy in zip(made.items(), copies, strict=False):
        assert copy == tf.io.encode_jpeg(as_seen(data), "rgb", quality=95).numpy(), name
    assert copies[-2:] == [*upright.values()]


def without_orientation(data):
    """The same image, with nothing that states an orientation."""
    return (
        data.replace(b"tiff:Orientation", b"tiff:Otherstated")
        .replace(b"Exif\0\0", b"Exix\0\0")
        .replace(b"XML:com.adobe.xmp", b"XML:com.other.xmp")
        .replace(b"Raw profile type exif", b"Raw profile type exix")
    )
