"""Bad files never spoil a run: a copy of Cars-196 with 50 broken files of ten kinds, checked, refused, skipped."""

import io
import os
import re

import numpy as np
import pytest
from PIL import Image

from tests.data.preparations import encoded, png
from tfdml.data import load

NUM_BROKEN = 50


def _truncated(path, good):
    path.write_bytes(good[: len(good) // 2])


def _empty(path, good):
    path.write_bytes(b"")


def _web_page(path, good):
    path.write_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>")


def _archive(path, good):
    path.write_bytes(b"PK\x03\x04" + good)


def _zeros(path, good):
    path.write_bytes(bytes(len(good)))


def _bomb(path, good):
    path.write_bytes(png(60_000, 60_000, pixels=b""))


def _tiff(path, good):
    Image.open(io.BytesIO(good)).save(path, "TIFF")


def _damaged_in_the_middle(path, good):
    data = bytearray(encoded(Image.open(io.BytesIO(good)), "PNG"))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(bytes(data))


def _folder(path, good):
    path.mkdir()


def _loop(path, good):
    path.symlink_to(path.name)


# What is written in place of an image, and a word of the reason that must be given for it.
KINDS = {
    _truncated: "truncated JPEG",
    _empty: "empty file",
    _web_page: "it begins with b'<!DOCTYPE html>",
    _archive: r"it begins with b'PK\x03\x04",
    _zeros: r"it begins with b'\x00\x00",
    _bomb: "too large",
    _tiff: "TIFF",
    _damaged_in_the_middle: "damaged",
    _folder: "a folder",
    _loop: "unreadable",
}


@pytest.fixture(scope="module")
def broken_cars(shared_data, tmp_path_factory):
    """A copy of Cars-196, by links, with 25 broken files in either split; and the reason expected for each."""
    source, copy = shared_data / "data" / "cars196", tmp_path_factory.mktemp("data") / "cars196"
    copy.mkdir()
    (copy / "devkit").symlink_to(source / "devkit")
    reasons = {}
    chosen = {}
    for split in ("train", "test"):
        paths = load("cars196", source, split).images.paths
        for number, index in enumerate(np.random.default_rng(0).choice(len(paths), NUM_BROKEN // 2, replace=False)):
            chosen[paths[index]] = list(KINDS)[number % len(KINDS)]
    for folder in ("cars_train", "cars_test"):
        (copy / folder).mkdir()
        for image in (source / folder).iterdir():
            target = copy / folder / image.name
            write = chosen.get(str(image))
            if write is None:
                os.symlink(image, target)
            else:
                write(target, image.read_bytes())
                reasons[str(target)] = KINDS[write]
    assert len(reasons) == NUM_BROKEN
    return copy, reasons


@pytest.mark.slow
def test_a_check_names_every_one_of_them(broken_cars, command):
    copy, reasons = broken_cars
    done = command("prepare", "--dataset=cars196", f"--data_dir={copy}", "--check_only", timeout=600)
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"{NUM_BROKEN} images are bad" in done.stderr
    for path, reason in reasons.items():
        assert any(path in line and reason in line for line in done.stdout.splitlines()), (path, reason)


@pytest.mark.slow
def test_training_refuses_them_in_one_line_and_writes_nothing(broken_cars, command, tiny_flags, tmp_path):
    copy, _ = broken_cars
    flags = [flag for flag in tiny_flags if "dataset" not in flag]
    done = command("train", *flags, "--dataset=cars196", f"--data_dir={copy}", f"--run_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert re.search(r"\d+ of 8054 images of cars196 \(train\) cannot be used", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_goes_on_without_them(broken_cars, command, tiny_flags, tmp_path):
    copy, _ = broken_cars
    flags = [flag for flag in tiny_flags if "dataset" not in flag]
    done = command(
        "train",
        *flags,
        "--dataset=cars196",
        f"--data_dir={copy}",
        f"--run_dir={tmp_path / 'run'}",
        "--bad_images=skip",
        "--check_images=decode",
        "--epochs=1",
        "--steps_per_epoch=250",  # 4,000 images of 8,029
        "--noreport",
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "skipping 25 of 8054 images of cars196 (train)" in done.stderr
    assert "skipping 25 of 8131 images of cars196 (test)" in done.stderr
