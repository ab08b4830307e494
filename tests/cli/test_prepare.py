"""tfdml prepare: what it prints, what it writes, how it ends."""

import numpy as np
import pytest

from tests.cli.commands import finished
from tests.data.preparations import images_of_kinds, picture
from tfdml.data import load


@pytest.fixture
def photos(tmp_path):
    """Four classes of six images."""
    for index, data in enumerate(images_of_kinds(24)):
        folder = tmp_path / "photos" / f"class {index // 6} é"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:02d}.jpg").write_bytes(data)
    return tmp_path / "photos"


def error_of(done):
    """The one line that says what was wrong."""
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    return line


@pytest.mark.slow
def test_a_folder_of_photos_becomes_a_small_one(photos, tmp_path):
    flags = ["--dataset=folder", f"--data_dir={photos}", f"--out={tmp_path / 'out'}", "--shrink=20"]
    done = finished("prepare", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train: 12 of 12 images" in done.stdout
    assert "none of the 24 images is bad" in done.stdout
    assert f"--dataset=list --data_dir={tmp_path / 'out' / 'images.csv'}" in done.stdout
    for split in ("train", "test"):
        source, copy = load("folder", photos, split), load("list", tmp_path / "out" / "images.csv", split)
        np.testing.assert_array_equal(source.labels, copy.labels)
        assert source.class_names == copy.class_names
        assert min(min(copy.images.size(row)) for row in range(len(copy))) == 20
    assert "holds files already" in error_of(finished("prepare", *flags))


@pytest.mark.slow
def test_bad_images_are_listed(photos, tmp_path):
    (photos / "class 0 é" / "00.jpg").write_bytes(b"")
    (photos / "class 3 é" / "20.jpg").write_bytes(picture(0)[:-30])
    flags = ["--dataset=folder", f"--data_dir={photos}"]
    done = finished("prepare", *flags, "--check_only")
    assert "2 images are bad" in error_of(done)
    assert f"{photos}/class 0 é/00.jpg: empty file" in done.stdout
    assert f"{photos}/class 3 é/20.jpg: truncated JPEG" in done.stdout
    assert "2 of 24 images are bad (1 empty file, 1 truncated JPEG)" in done.stdout

    out = [f"--out={tmp_path / 'out'}"]
    assert "--bad_images=skip" in error_of(finished("prepare", *flags, *out))
    assert not (tmp_path / "out").exists()
    done = finished("prepare", *flags, *out, "--bad_images=skip")
    assert done.returncode == 0, done.stderr[-2000:]
    path = tmp_path / "out" / "images.csv"
    assert len(load("list", path)) + len(load("list", path, "test")) == 22
