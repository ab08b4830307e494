"""Bad files never spoil a run: a copy of Cars-196 with 48 broken files of eight kinds, checked, refused, skipped."""

import io
import os
import re

import numpy as np
import pytest
from PIL import Image

from tests.data.preparations import encoded, png
from tfdml.data import load


def _damaged_in_the_middle(good):
    data = bytearray(encoded(Image.open(io.BytesIO(good)), "PNG"))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    return bytes(data)


# What is written in place of an image, by a word of the reason that must be given for it.
KINDS = {
    "truncated JPEG": lambda good: good[: len(good) // 2],
    "empty file": lambda good: b"",
    "it begins with b'<!DOCTYPE html>": lambda good: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    r"it begins with b'PK\x03\x04": lambda good: b"PK\x03\x04" + good,
    r"it begins with b'\x00\x00": lambda good: bytes(len(good)),
    "too large": lambda good: png(60_000, 60_000, pixels=b""),
    "TIFF": lambda good: encoded(Image.open(io.BytesIO(good)), "TIFF"),
    "damaged": _damaged_in_the_middle,
}


@pytest.fixture(scope="module")
def broken_cars(shared_data, tmp_path_factory):
    """A copy of Cars-196, by links, with 24 broken files in either split; and the reason expected for each."""
    source, copy = shared_data / "data" / "cars196", tmp_path_factory.mktemp("data") / "cars196"
    copy.mkdir()
    (copy / "devkit").symlink_to(source / "devkit")
    chosen = {}
    for split in ("train", "test"):
        paths = load("cars196", source, split).images.paths
        for number, index in enumerate(np.random.default_rng(0).choice(len(paths), 24, replace=False)):
            chosen[paths[index]] = list(KINDS)[number % len(KINDS)]
    reasons = {}
    for folder in ("cars_train", "cars_test"):
        (copy / folder).mkdir()
        for image in (source / folder).iterdir():
            target, kind = copy / folder / image.name, chosen.get(str(image))
            if kind is None:
                os.symlink(image, target)
            else:
                target.write_bytes(KINDS[kind](image.read_bytes()))
                reasons[str(target)] = kind
    assert len(reasons) == 48
    return copy, reasons


@pytest.mark.slow
def test_each_is_named_refused_and_left_out(broken_cars, command, tiny_flags, tmp_path):
    copy, reasons = broken_cars
    done = command("prepare", "--dataset=cars196", f"--data_dir={copy}", "--check_only", timeout=600)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "48 images are bad" in done.stderr
    for path, reason in reasons.items():
        assert any(path in line and reason in line for line in done.stdout.splitlines()), (path, reason)

    flags = [flag for flag in tiny_flags if "dataset" not in flag]
    flags += ["--dataset=cars196", f"--data_dir={copy}", f"--run_dir={tmp_path / 'run'}"]
    done = command("train", *flags)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert re.search(r"\d+ of 8054 images of cars196 \(train\) cannot be used", line)
    assert not (tmp_path / "run").exists()

    # 4,000 images of 8,030.
    length = ["--epochs=1", "--steps_per_epoch=250", "--noreport"]
    done = command("train", *flags, "--bad_images=skip", *length, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "skipping 24 of 8054 images of cars196 (train)" in done.stderr
    assert "skipping 24 of 8131 images of cars196 (test)" in done.stderr
