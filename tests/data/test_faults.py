import functools
import re
import struct

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.preparations import picture, png
from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import decode_image
from tfdml.data.faults import check, find_faults
from tfdml.data.images import EncodedImages, FileImages
from tfdml.errors import UserError

inspect = functools.partial(find_faults, decode=False)
GOOD = {
    "jpeg": picture(0),
    "jpeg_gray": picture(0, mode="L"),
    "jpeg_progressive": picture(0, progressive=True),
    "jpeg_tiny": picture(0, size=(1, 1), quality=1),
    "jpeg_cmyk": picture(0, mode="CMYK"),
    "png": picture(0, kind="PNG"),
    "png_one_bit": picture(0, kind="PNG", mode="1"),
    "png_palette": picture(0, kind="PNG", mode="P"),
    "png_alpha": picture(0, kind="PNG", mode="RGBA"),
    "webp": picture(0, kind="WEBP"),
    "webp_lossless": picture(0, kind="WEBP", lossless=True),
    "webp_alpha": picture(0, kind="WEBP", mode="RGBA"),
}
# With bytes after the end, as some cameras and servers append.
GOOD |= {
    "jpeg_newline": GOOD["jpeg"] + b"\r\n",
    "jpeg_trailer": GOOD["jpeg"] + b"SEFT" * 1000,
    "png_trailer": GOOD["png"] + b"\0" * 1000,
}

BAD = {
    "empty": (b"", "empty file"),
    "jpeg_no_end": (GOOD["jpeg"][:-2], "truncated JPEG"),
    "png_no_end": (GOOD["png"][:-12], "truncated PNG"),
    "webp_short": (GOOD["webp"][:-10], "truncated WebP"),
    "text": (b"hello, I am no image\n", "not a JPEG, PNG or WebP image, but text"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "but a pointer of Git LFS; run git lfs pull",
    ),
    "noise": (b"\x01\xfe\x80\x03" * 40, "but of no format that is known here"),
    "gif": (picture(0, kind="GIF"), "not a JPEG, PNG or WebP image, but a GIF; convert it"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(40), "but HEIC, AVIF or a film; convert it"),
    "webp_animated": (
        picture(0, kind="WEBP", save_all=True, append_images=[Image.new("RGB", (40, 30))]),
        "unsupported type: animated WebP",
    ),
}


def _encoded(*data: bytes) -> EncodedImages:
    return EncodedImages(data, tuple(f"image{i}" for i in range(len(data))))


def _files(folder, contents: dict[str, bytes]) -> FileImages:
    paths = {folder / f"{name}.jpg": data for name, data in contents.items()}
    for path, data in paths.items():
        path.write_bytes(data)
    return FileImages(tuple(map(str, paths)))


SECRET = b"hunter:x:0:0:secret"


@pytest.mark.parametrize(
    "start", [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBP"]
)
@pytest.mark.parametrize("end", [b"", b"\xff\xda\xff\xd9", b"IEND\xaeB`\x82"])
def test_no_message_quotes_a_file_that_a_list_names(start, end, tmp_path):
    data = start + SECRET * 8 + end
    faults = inspect(_files(tmp_path, {"passwd": data})) + find_faults(_encoded(data))
    assert len(faults) == 2
    for fault in faults:
        assert "hunter" not in fault.reason
        assert "secret" not in fault.reason


def test_good_images_have_no_fault(tmp_path):
    assert inspect(_files(tmp_path, GOOD)) == []
    assert find_faults(_encoded(*GOOD.values())) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_told_apart(name, tmp_path):
    data, reason = BAD[name]
    images = _files(tmp_path, {"good": GOOD["png"], name: data})
    (fault,) = inspect(images)
    assert fault.index == 1
    assert fault.name == images.paths[1]
    assert fault.reason.startswith(reason) or reason in fault.reason
    assert inspect(_encoded(GOOD["webp"], data))[0].reason == fault.reason
    assert find_faults(images) == [fault]


def _decodes(data: bytes) -> bool:
    # TensorFlow raises the second where an error message quotes bytes that are not UTF-8.
    try:
        return decode_image(data).shape[-1] == 3
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError):
        return False


def _patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


_FRAME = GOOD["jpeg"].index(b"\xff\xc0")
# Every kind of file, whether it decodes or not.
KINDS = {
    **{
        f"png_{bits}_bits_colors_{colors}": png(5, 4, bits, colors)
        for bits in (1, 2, 4, 8, 16)
        for colors in (0, 2, 3, 4, 6)
        if not (bits == 16 and colors == 3)
    },
    "png_interlaced_wrongly": png(5, 4, colors=0, interlace=9),
    "png_too_wide": png(1_000_001, 4, bits=1, colors=0),
    **{
        f"jpeg_sof_{kind}": _patched(GOOD["jpeg"], _FRAME + 1, bytes([0xC0 + kind]))
        for kind in (0, 1, 3, 5, 6, 7, 11)
    },
    "jpeg_12_bits": _patched(GOOD["jpeg"], _FRAME + 4, b"\x0c"),
    "jpeg_no_height": _patched(GOOD["jpeg"], _FRAME + 5, b"\0\0"),
    "jpeg_of_two_channels": _patched(GOOD["jpeg"], _FRAME + 9, b"\2"),
    "jpeg_too_large": _patched(GOOD["jpeg"], _FRAME + 5, b"\xff\xf0\xff\xf0"),
    "jpeg_long_exif": picture(0, exif=b"Exif\0\0" + bytes(60_000)),
    "webp_no_key_frame": _patched(GOOD["webp"], 20, bytes([GOOD["webp"][20] | 1])),
    "webp_lossless_unsigned": _patched(GOOD["webp_lossless"], 20, b"\0"),
    "webp_exif": picture(0, kind="WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
}


# Rare kinds whose headers are sound, and which the decoder does not take.
UNDECODED = {
    *(f"jpeg_sof_{kind}" for kind in (3, 5, 6, 7, 11)),
    "png_interlaced_wrongly",
    "png_too_wide",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_verdict_on_a_kind_is_that_of_the_decoder(name):
    decodes, images = _decodes(KINDS[name]), _encoded(KINDS[name])
    assert decodes == (not find_faults(images))
    if name not in UNDECODED:
        assert decodes == (not inspect(images))


BOMBS = {
    "jpeg": _patched(GOOD["jpeg"], _FRAME + 5, struct.pack(">HH", 60_000, 50_000)),
    "jpeg_behind_exif": KINDS["jpeg_long_exif"].replace(
        struct.pack(">BHH", 8, 30, 40), struct.pack(">BHH", 8, 60_000, 50_000)
    ),
    "png": png(60_000, 50_000, colors=0, pixels=b""),
    "webp": _patched(KINDS["webp_exif"], 24, b"\xff\xff\x00\xff\xff\x00"),
    "webp_lossless": _patched(GOOD["webp_lossless"], 21, b"\xff\xff\xff\x0f"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_its_header(name, tmp_path):
    images = _files(tmp_path, {name: BOMBS[name]})
    (fault,) = inspect(images)
    assert re.search(r"\b178,?956,?970\b", fault.reason)
    assert find_faults(images) == [fault]


def test_a_thumbnail_does_not_hide_the_cut():
    whole = picture(0, size=(100, 80), exif=b"Exif\0\0" + GOOD["jpeg_tiny"])
    assert inspect(_encoded(whole)) == []
    thumbnail_end = whole.index(b"\xff\xd9") + 2
    assert thumbnail_end < len(whole) // 2
    assert inspect(_encoded(whole[:-100]))[0].reason.startswith("truncated JPEG")


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["jpeg", "png", "webp"]), cut=st.floats(0, 1))
def test_a_cut_anywhere_is_found(kind, cut):
    data = GOOD[kind]
    faults = inspect(_encoded(data[: int(cut * (len(data) - 2))]))
    assert [fault.index for fault in faults] == [0]


def test_files_that_cannot_be_opened(tmp_path):
    images = _files(tmp_path, {"good": GOOD["jpeg"]})
    (tmp_path / "sub.jpg").mkdir()
    faults = inspect(
        FileImages((*images.paths, str(tmp_path / "sub.jpg"), str(tmp_path / "gone.jpg")))
    )
    assert [(fault.index, fault.reason) for fault in faults] == [
        (1, "a folder, not a file"),
        (2, "missing"),
    ]


def test_check_names_the_first_bad_images_or_skips_them_with_a_warning(tmp_path, caplog):
    contents = {
        "good": GOOD["png"],
        **{f"bad{i}": b"text" for i in range(4)},
        "empty": b"",
        "last": GOOD["webp"],
    }
    images = _files(tmp_path, contents)
    dataset = ImageDataset("mine", "train", images, np.arange(7) // 2)
    with pytest.raises(UserError) as error:
        check(dataset)
    assert str(error.value).startswith("5 of 7 images of mine (train)")
    assert images.paths[1] in str(error.value)
    with caplog.at_level("WARNING", logger="absl"):
        good = check(dataset, bad_images="skip")
    assert good.images.paths == (images.paths[0], images.paths[6])
    assert (good.labels.tolist(), good.class_names) == ([0, 3], {0: "0", 3: "3"})
    assert caplog.text.count("skipping 5 of 7 images of mine (train)") == 1


def test_decoding_finds_damage_that_headers_do_not_show():
    good = GOOD["png"]
    images = EncodedImages((good, _patched(good, len(good) // 2, bytes(8)), good), ("a", "b", "c"))
    dataset = ImageDataset("toy", "train", images, np.array([0, 0, 1]), {0: "x", 1: "y"})
    assert len(check(dataset)) == 3
    (fault,) = find_faults(images)
    assert (fault.index, fault.name, fault.reason[:9]) == (1, "b", "damaged: ")
    assert find_faults(images.take([0, 2])) == []
    assert check(dataset, "skip", "decode").images.names == ("a", "c")
