import io
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data import cars196, inspection
from tfdml.data.dataset import ArrayImages, EncodedImages, FileImages, ImageDataset
from tfdml.errors import UserError


def _encode(kind: str, mode: str = "RGB", size=(40, 30), **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")
    return file.getvalue()


GOOD = {
    "jpeg": _encode("JPEG"),
    "jpeg_grey": _encode("JPEG", "L"),
    "jpeg_progressive": _encode("JPEG", progressive=True),
    "jpeg_tiny": _encode("JPEG", size=(1, 1), quality=1),
    "jpeg_cmyk": _encode("JPEG", "CMYK"),
    "png": _encode("PNG"),
    "png_one_bit": _encode("PNG", "1"),
    "png_palette": _encode("PNG", "P"),
    "png_alpha": _encode("PNG", "RGBA"),
    "gif": _encode("GIF"),
    "gif_animated": _encode("GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))]),
    "bmp": _encode("BMP"),
    "bmp_palette": _encode("BMP", "P"),
    "bmp_grey": _encode("BMP", "L"),
    "bmp_alpha": _encode("BMP", "RGBA"),
    "webp": _encode("WEBP"),
    "webp_lossless": _encode("WEBP", lossless=True),
    "webp_alpha": _encode("WEBP", "RGBA"),
}
# With bytes after the end, as some cameras and servers append.
GOOD |= {
    "jpeg_newline": GOOD["jpeg"] + b"\r\n",
    "jpeg_trailer": GOOD["jpeg"] + b"SEFT" * 1000,
    "png_trailer": GOOD["png"] + b"\0" * 1000,
    "gif_newline": GOOD["gif"] + b"\n",
}

BAD = {
    "empty": (b"", "empty file"),
    "jpeg_half": (GOOD["jpeg"][: len(GOOD["jpeg"]) // 2], "truncated JPEG"),
    "jpeg_no_end": (GOOD["jpeg"][:-2], "truncated JPEG"),
    "jpeg_header_only": (GOOD["jpeg"][:100], "truncated JPEG"),
    "png_half": (GOOD["png"][: len(GOOD["png"]) // 2], "truncated PNG"),
    "png_no_end": (GOOD["png"][:-12], "truncated PNG"),
    "gif_half": (GOOD["gif"][: len(GOOD["gif"]) // 2], "truncated GIF"),
    "bmp_short": (GOOD["bmp"][:-10], "truncated BMP"),
    "webp_short": (GOOD["webp"][:-10], "truncated WebP"),
    "text": (b"hello, I am no image\n", "not an image: it looks like text"),
    "html": (b"\n<!DOCTYPE html><html>404</html>", "not an image: it looks like an HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    "zip": (_zip(), "not an image: it looks like a zip archive"),
    "pdf": (b"%PDF-1.7 ...", "not an image: it looks like a PDF"),
    "zeros": (bytes(5000), "not an image: it holds only zero bytes"),
    "noise": (b"\x01\xfe\x80\x03" * 40, "not an image: its header"),
    "tiff": (_encode("TIFF"), "unsupported type: TIFF"),
    "ico": (_encode("ICO"), "unsupported type: icon"),
    "avif": (b"\0\0\0\x1cftypavif\0\0\0\0", "unsupported type: AVIF"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "unsupported type: HEIC"),
    "mp4": (b"\0\0\0\x18ftypisom\0\0\0\0", "unsupported type: video"),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="x">', "unsupported type: SVG"),
    "webp_animated": (
        _encode("WEBP", save_all=True, append_images=[Image.new("RGB", (40, 30))]),
        "unsupported type: animated WebP",
    ),
    "bmp_run_length": (
        GOOD["bmp_palette"][:30] + b"\1\0\0\0" + GOOD["bmp_palette"][34:],
        "unsupported type: compressed BMP",
    ),
    "bmp_os2": (GOOD["bmp"][:14] + b"\x0c" + GOOD["bmp"][15:], "unsupported type: BMP of OS/2"),
    "bmp_one_bit": (_encode("BMP", "1"), "unsupported type: BMP with 1 bits"),
}


def _encoded(*data: bytes) -> EncodedImages:
    return EncodedImages(data, tuple(f"image{i}" for i in range(len(data))))


def _files(folder, contents: dict[str, bytes]) -> FileImages:
    paths = []
    for name, data in contents.items():
        path = folder / f"{name}.jpg"
        path.write_bytes(data)
        paths.append(str(path))
    return FileImages(tuple(paths))


def _dataset(images) -> ImageDataset:
    labels = np.arange(len(images)) // 2
    return ImageDataset("mine", "train", images, labels, {int(c): f"c{c}" for c in labels})


def test_good_images_have_no_fault(tmp_path):
    assert inspection.inspect(_files(tmp_path, GOOD)) == []
    assert inspection.diagnose(_encoded(*GOOD.values())) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_told_apart(name, tmp_path):
    data, reason = BAD[name]
    images = _files(tmp_path, {"good": GOOD["png"], name: data})
    (fault,) = inspection.inspect(images)
    assert fault.index == 1
    assert fault.name == images.paths[1]
    assert fault.reason.startswith(reason) or reason in fault.reason
    assert inspection.inspect(_encoded(GOOD["gif"], data))[0].reason == fault.reason
    assert inspection.diagnose(images) == [fault]


def test_the_verdict_is_that_of_the_decoder():
    import tensorflow as tf

    from tfdml.data.decoding import decode_image

    for data in GOOD.values():
        assert decode_image(data).shape[-1] == 3
    # Of half a GIF the decoder gives what is there, and leaves the rest black.
    for name in set(BAD) - {"gif_half"}:
        # TensorFlow raises the second where an error message quotes bytes that are not UTF-8.
        with pytest.raises((tf.errors.InvalidArgumentError, UnicodeDecodeError)):
            decode_image(BAD[name][0])


def test_a_thumbnail_does_not_hide_the_cut():
    whole = _encode("JPEG", size=(100, 80), exif=b"Exif\0\0" + GOOD["jpeg_tiny"])
    assert inspection.inspect(_encoded(whole)) == []
    thumbnail_end = whole.index(b"\xff\xd9") + 2
    assert thumbnail_end < len(whole) // 2
    assert inspection.inspect(_encoded(whole[:-100]))[0].reason.startswith("truncated JPEG")


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["jpeg", "png", "webp", "bmp"]), cut=st.floats(0, 1))
def test_a_cut_anywhere_is_found(kind, cut):
    data = GOOD[kind]
    faults = inspection.inspect(_encoded(data[: int(cut * (len(data) - 2))]))
    assert [fault.index for fault in faults] == [0]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_no_bytes_break_the_inspection(data):
    for fault in inspection.inspect(_encoded(data)) + inspection.diagnose(_encoded(data)):
        assert fault.reason


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    images = _files(tmp_path, {"good": GOOD["jpeg"], "locked": GOOD["jpeg"]})
    (tmp_path / "sub.jpg").mkdir()
    images = FileImages((*images.paths, str(tmp_path / "sub.jpg"), str(tmp_path / "gone.jpg")))

    def open_unless_locked(path, *args, **kwargs):
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(inspection, "open", open_unless_locked, raising=False)
    assert [(fault.index, fault.reason) for fault in inspection.inspect(images)] == [
        (1, "unreadable (no permission)"),
        (2, "a folder, not a file"),
        (3, "missing"),
    ]


def test_faults_of_many_files_come_in_order():
    bad = range(0, 1500, 7)
    data = [b"" if i in bad else GOOD["jpeg_tiny"] for i in range(1500)]
    assert [fault.index for fault in inspection.inspect(_encoded(*data))] == list(bad)


def test_arrays_have_nothing_to_inspect():
    images = ArrayImages(np.zeros((3, 4, 4, 3), np.uint8), ("a", "b", "c"))
    assert inspection.inspect(images) == inspection.diagnose(images) == []


def test_check_names_the_first_paths_the_count_and_the_flag(tmp_path):
    names = ["good", *(f"bad{i}" for i in range(5))]
    images = _files(tmp_path, {name: GOOD["png"] if name == "good" else b"text" for name in names})
    with pytest.raises(UserError) as error:
        inspection.check(_dataset(images))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("5 of 6 images of mine (train) cannot be used: ")
    assert f"{images.paths[1]}: not an image: it looks like text" in message
    assert images.paths[3] in message
    assert images.paths[4] not in message
    assert "--bad_images=skip" in message


def test_check_can_skip_with_one_warning(tmp_path, caplog):
    images = _files(tmp_path, {"a": GOOD["png"], "b": b"", "c": b"text", "d": b"", "e": GOOD["gif"]})
    with caplog.at_level("WARNING", logger="absl"):
        kept = inspection.check(_dataset(images), on_bad="skip")
    assert kept.images.paths == (images.paths[0], images.paths[4])
    assert kept.labels.tolist() == [0, 2]
    assert kept.class_names == {0: "c0", 2: "c2"}
    assert len(caplog.records) == 1
    assert "skipping 3 of 5 images of mine (train)" in caplog.text
    assert f"{images.paths[1]}: empty file" in caplog.text


def test_check_returns_a_sound_data_set_as_it_is():
    dataset = _dataset(_encoded(GOOD["png"], GOOD["jpeg"]))
    assert inspection.check(dataset) is dataset


def test_check_refuses_to_skip_everything():
    with pytest.raises(UserError, match=r"none of the 2 .* can be used: image0: empty file"):
        inspection.check(_dataset(_encoded(b"", b"")), on_bad="skip")


def test_check_refuses_another_policy():
    with pytest.raises(UserError, match="unknown policy 'ignore'"):
        inspection.check(_dataset(_encoded(GOOD["png"])), on_bad="ignore")


def test_diagnose_finds_damage_in_the_middle():
    data = bytearray(GOOD["png"])
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    images = _encoded(GOOD["jpeg"], bytes(data), GOOD["webp"])
    assert inspection.inspect(images) == []
    (fault,) = inspection.diagnose(images)
    assert fault.index == 1
    assert fault.reason.startswith("damaged: ")
    assert inspection.diagnose(images, indices=np.array([0, 2])) == []
    assert [fault.index for fault in inspection.diagnose(images, indices=[2, 1])] == [1]


def test_remote_file_system():
    import tensorflow as tf

    paths = []
    for name in ("jpeg_progressive", "jpeg_half"):
        paths.append(f"ram://inspection-{name}.jpg")
        with tf.io.gfile.GFile(paths[-1], "wb") as file:
            file.write(BAD[name][0] if name in BAD else GOOD[name])
    images = FileImages((*paths, "ram://inspection-gone.jpg"))
    expected = [(1, "truncated JPEG (no end-of-image marker)"), (2, "missing")]
    assert [(fault.index, fault.reason) for fault in inspection.inspect(images)] == expected
    assert [(fault.index, fault.reason) for fault in inspection.diagnose(images)] == expected


@pytest.mark.shared_data
def test_the_real_images_are_sound(shared_data):
    for split in ("train", "test"):
        dataset = cars196.read(os.path.join(shared_data, "data", "cars196"), split)
        assert inspection.check(dataset) is dataset
