"""What an image costs is bounded before it is decoded, at every entrance."""

import io
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.data.graphs import VIEW, decode
from tests.data.graphs import exported as exported_batch
from tests.data.preparations import encoded, picture
from tests.data.test_orientation import chunk, exif_segment, segment, tiff
from tfdml.data import EncodedImages, ImageDataset, decoding
from tfdml.data.decoding import orientation_of, scan_fault
from tfdml.data.faults import check, explain_failure, find_faults
from tfdml.data.pipeline import readable_views
from tfdml.data.preparation import check_images
from tfdml.errors import UserError

JPEG, PNG = picture(0), picture(0, kind="PNG")
TURNED = exif_segment(tiff(6))


def with_scans(count, size=(40, 30), between=b""):
    """A progressive JPEG of so many scans, all but the first of them empty."""
    data = encoded(Image.new("RGB", (16, 16)), "JPEG", progressive=True, subsampling=0)
    frame, first = data.index(b"\xff\xc2"), data.index(b"\xff\xda")
    second = data.index(b"\xff", first + 2)
    while data[second + 1] in (0, 0xFF):
        second = data.index(b"\xff", second + 1)
    header = data[first : first + 2 + int.from_bytes(data[first + 2 : first + 4], "big")]
    sized = data[: frame + 5] + struct.pack(">HH", size[1], size[0]) + data[frame + 9 : second]
    return sized + (between + header) * (count - 1) + b"\xff\xd9"


def exported(data):
    """What an exported graph finds wrong with an image."""
    return exported_batch(tf.constant([data, JPEG]))[1][0].numpy().decode()


FILM = np.random.default_rng(0).bytes(20_000) + b"\xff\xda" * 300
ALLOWED = {
    "100 scans": with_scans(100),
    "few scans of 100 megapixels": with_scans(2, (10_000, 9_999)),
    "tables in front of each scan": with_scans(100, between=segment(0xFE, b"\xff\xda\xff\xd9") * 3),
    "a film": JPEG + FILM,
    "a film behind a progressive image": picture(0, progressive=True) + FILM,
    "a thumbnail and a profile": JPEG[:2] + segment(0xE2, b"\xff\xda" * 20_000) * 2 + JPEG[2:],
}
REFUSED = {
    "101 scans": (with_scans(101), "more than 100 scans"),
    "1,500 scans": (with_scans(1500), "more than 100 scans"),
    "22 scans of 100 megapixels": (with_scans(22, (10_000, 9_999)), "more than 21 scans"),
    "a false end": (with_scans(101, between=segment(0xFE, b"\xff\xd9")), "more than 100 scans"),
    "segments without end": (
        with_scans(100, between=segment(0xFE, b"\xff\xda") * 6),
        "or 564 segments",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_normal_images_are_in_bounds(name):
    data = ALLOWED[name]
    assert scan_fault(data) == b""
    assert find_faults(EncodedImages((data,), ("a",)), decode=False) == []
    if "megapixels" not in name:
        assert exported(data) == ""
        np.testing.assert_array_equal(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_jpeg_of_too_many_scans_is_refused_at_every_entrance(name):
    data, reason = REFUSED[name]
    images = EncodedImages((JPEG, data), ("good", "bad"))
    dataset = ImageDataset(images=images, labels=[0, 1])
    assert reason in scan_fault(data).numpy().decode()
    assert reason in exported(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=reason) as error:
        decode(data)
    assert "bad: too many scans" in str(explain_failure(error.value, dataset))
    for decoded in (True, False):
        (fault,) = find_faults(images, decode=decoded)
        assert (fault.index, reason in fault.reason) == (1, True)
    with pytest.raises(UserError, match="bad: too many scans"):
        check(dataset)
    with pytest.raises(UserError, match="too many scans"):
        images.picture(1)
    assert [fault.index for fault in check_images({"all": dataset})["all"]] == [1]
    rows = [row for rows, _ in readable_views(images, VIEW, 2) for row in rows.tolist()]
    assert rows == [0]


def test_so_many_segments_are_read_and_no_more():
    behind = {
        count: JPEG[:20] + segment(0xFE, b"") * count + TURNED + JPEG[20:] for count in (62, 63)
    }
    assert [orientation_of(data).numpy() for data in behind.values()] == [6, 1]
    assert decode(behind[62]).shape == (*decode(behind[63]).shape[1::-1], 3)


def test_filling_is_passed_in_one_step():
    filled = JPEG[:20] + (b"\xff" * 1000 + segment(0xFE, b"")) * 62 + TURNED + JPEG[20:]
    assert orientation_of(filled).numpy() == 6
    assert orientation_of(JPEG[:20] + b"\xff" * 16_384 + TURNED + JPEG[20:]).numpy() == 6


@pytest.mark.parametrize("at", [33, -12])
def test_texts_of_a_png_are_not_inflated(at, monkeypatch):
    """The decoder would inflate each to 8 MB."""
    bomb = zlib.compress(bytes(2**20))
    texts = chunk(b"zTXt", b"a\0\0" + bomb) + chunk(b"iTXt", b"b\0\1\0\0\0" + bomb)
    data = PNG[:at] + texts * 5 + chunk(b"eXIf", tiff(6)) + PNG[at:]
    np.testing.assert_array_equal(decode(data), np.rot90(decode(PNG), -1))
    read = []
    image = tf.zeros((2, 2, 3), tf.uint8)
    monkeypatch.setattr(tf.io, "decode_png", lambda given, channels: read.append(given) or image)
    decoding._decode_png(tf.constant(data))
    (hidden,) = (given.numpy() for given in read)
    assert (hidden.count(b"TXt"), hidden.count(b"xTXt"), len(hidden)) == (10, 10, len(data))
