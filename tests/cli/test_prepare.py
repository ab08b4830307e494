"""tfdml prepare: what it prints, what it writes, how it ends."""

import numpy as np
import pytest

from tests.cli import commands
from tests.data.preparations import images_of_kinds
from tfdml.data import load


@pytest.fixture
def photos(tmp_path):
    """Four classes of six images."""
    for index, data in enumerate(images_of_kinds(24)):
        folder = tmp_path / "photos" / f"class {index // 6} é"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:02d}.jpg").write_bytes(data)
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_folder_of_photos_becomes_a_small_one(photos, tmp_path):
    flags = ["--dataset=folder", f"--data_dir={photos}", f"--out={tmp_path / 'out'}", "--shrink=20"]
    status, _, errors = commands.run("prepare", *flags)
    assert status == 0, errors
    for split in ("train", "test"):
        source, copy = (
            load("folder", photos, split),
            load("list", tmp_path / "out" / "images.csv", split),
        )
        np.testing.assert_array_equal(source.labels, copy.labels)
        assert source.class_names == copy.class_names
        assert min(min(copy.images.size(row)) for row in range(len(copy))) == 20
    assert commands.run("prepare", *flags)[0] == 2  # the folder holds files already


def test_a_check_ends_with_status_2_where_an_image_is_bad(photos, tmp_path):
    flags = ["--dataset=folder", f"--data_dir={photos}", "--check_only"]
    status, printed, errors = commands.run("prepare", *flags)
    assert (status, printed.count("are good")) == (0, 2), errors
    bad = photos / "class 0 é" / "01.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    status, printed, errors = commands.run("prepare", *flags)
    assert status == 2
    assert "1 image is bad" in errors
    assert "01.jpg" in printed
    assert commands.run("prepare", *flags, "--bad_images=skip")[0] == 0
