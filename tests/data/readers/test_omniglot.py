import io
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data.readers import omniglot
from tfdml.errors import UserError

# Out of order on purpose: ids must follow the names.
CLASSES = ["Greek/character02", "Arcadian/character10", "Greek/character01", "Arcadian/character09"]


def _png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (5, 5), level).save(file, "PNG")
    return file.getvalue()


def _write_zip(path, stem, classes, per_class=20):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{stem}/", b"")
        archive.writestr(f"{stem}/.DS_Store", b"x")
        archive.writestr(f"__MACOSX/{stem}/Greek/character01/._0001_01.png", b"x")
        for number, name in enumerate(classes):
            for drawer in range(per_class):
                archive.writestr(f"{stem}/{name}/{number:04d}_{drawer + 1:02d}.png", _png(number))


@pytest.fixture
def archives(tmp_path):
    _write_zip(tmp_path / "images_background.zip", "images_background", CLASSES)
    _write_zip(tmp_path / "images_evaluation.zip", "images_evaluation", ["Tifinagh/character01"], per_class=3)
    return tmp_path


def test_ids_follow_the_sorted_names(archives):
    train = omniglot.read(archives, "train", check_counts=False)
    assert train.class_names == dict(enumerate(sorted(CLASSES)))
    assert np.bincount(train.labels).tolist() == [20] * 4
    assert train.images.name(0) == "images_background/Arcadian/character09/0003_01.png"
    pixel = np.asarray(Image.open(io.BytesIO(train.images.data[0])))[0, 0]
    assert pixel == CLASSES.index("Arcadian/character09")


def test_evaluation_ids_start_at_964(archives):
    test = omniglot.read(archives, "test", check_counts=False)
    assert test.labels.tolist() == [964] * 3
    assert test.class_names == {964: "Tifinagh/character01"}


def test_unpacked_folders_give_the_same_labels(archives):
    expected = omniglot.read(archives, "train", check_counts=False)
    with zipfile.ZipFile(archives / "images_background.zip") as archive:
        archive.extractall(archives)
    (archives / "images_background.zip").unlink()
    unpacked = omniglot.read(archives, "train", check_counts=False)
    np.testing.assert_array_equal(unpacked.labels, expected.labels)
    assert unpacked.class_names == expected.class_names
    assert unpacked.images.paths == tuple(str(archives / name) for name in expected.images.names)


def test_counts_are_checked(archives):
    with pytest.raises(UserError, match=r"expected 964 classes in \S*images_background\.zip, found 4"):
        omniglot.read(archives, "train")


def test_images_per_class_are_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(omniglot._NUM_CLASSES, "train", 2)
    _write_zip(tmp_path / "images_background.zip", "images_background", CLASSES[:2], per_class=19)
    with pytest.raises(UserError, match=r"expected 20 images per class .* found 19 of Arcadian/character10 \(2"):
        omniglot.read(tmp_path, "train")


def test_missing_archive(tmp_path):
    with pytest.raises(UserError, match=r"found neither \S*images_evaluation\.zip"):
        omniglot.read(tmp_path, "test")


def test_truncated_archive(archives):
    path = archives / "images_background.zip"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"images_background\.zip is not a whole zip archive .*download it again"):
        omniglot.read(archives, "train")


def test_damaged_member(archives):
    path = archives / "images_background.zip"
    data = bytearray(path.read_bytes())
    start = data.index(b"character01/0002_01.png") + len("character01/0002_01.png")
    data[start + 10 : start + 30] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a whole zip archive"):
        omniglot.read(archives, "train", check_counts=False)


def test_archive_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "images_background.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match="holds no images_background/<alphabet>/<character>"):
        omniglot.read(tmp_path, "train")


def test_the_real_data_set(shared_data):
    train = omniglot.read(shared_data / "data" / "omniglot", "train")
    test = omniglot.read(shared_data / "data" / "omniglot", "test")
    assert (len(train), len(test)) == (19_280, 13_180)
    np.testing.assert_array_equal(train.classes, np.arange(964))
    np.testing.assert_array_equal(test.classes, np.arange(964, 964 + 659))
    assert train.class_names[0] == "Alphabet_of_the_Magi/character01"
    assert Image.open(io.BytesIO(test.images.data[-1])).size == (105, 105)


def test_a_member_that_is_there_twice_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "images_background.zip", "w") as archive:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                archive.writestr("images_background/Greek/character01/0001_01.png", _png(1))
    with pytest.raises(UserError, match=r"holds 'images_background/Greek/character01/0001_01\.png' twice"):
        omniglot.read(tmp_path, "train", check_counts=False)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_read_or_refused_in_one_line(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images_background.zip")
        _write_zip(path, "images_background", CLASSES[:2], per_class=1)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
        try:
            dataset = omniglot.read(folder, "train", check_counts=False)
        except UserError as error:
            message = str(error)
        else:
            assert set(dataset.class_names) == set(dataset.labels.tolist())
            return
    assert len(message.splitlines()) == 1
    assert message.startswith("omniglot: ")
