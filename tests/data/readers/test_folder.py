import pathlib
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.readers import folder
from tfdml.errors import UserError


def _tree(root, *files):
    for file in files:
        path = pathlib.Path(root, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def _relative(root, dataset):
    return [str(pathlib.Path(path).relative_to(root)) for path in dataset.images.paths]


def test_the_last_classes_are_the_test_split(tmp_path):
    _tree(
        tmp_path, "dog/1.jpg", "cat/2.PNG", "cat/1.jpeg", "ant/9.webp", "emu/deep/er/3.Png", "emu/0.webp", "emu/9.gif"
    )
    train, test = folder.read(tmp_path, "train"), folder.read(tmp_path, "test")
    assert _relative(tmp_path, train) == ["ant/9.webp", "cat/1.jpeg", "cat/2.PNG"]
    assert train.labels.tolist() == [0, 1, 1]
    assert train.class_names == {0: "ant", 1: "cat"}
    assert _relative(tmp_path, test) == ["dog/1.jpg", "emu/0.webp", "emu/deep/er/3.Png"]
    assert test.labels.tolist() == [2, 3, 3]
    assert test.class_names == {2: "dog", 3: "emu"}


def test_all_is_the_whole_folder(tmp_path):
    _tree(tmp_path, "dog/1.jpg", "cat/1.jpeg", "ant/9.webp")
    whole = folder.read(tmp_path, "all")
    assert _relative(tmp_path, whole) == ["ant/9.webp", "cat/1.jpeg", "dog/1.jpg"]
    assert whole.labels.tolist() == [0, 1, 2]
    assert whole.class_names == {0: "ant", 1: "cat", 2: "dog"}
    assert whole.names == whole.images.paths


def test_all_holds_both_of_train_and_test(tmp_path):
    _tree(tmp_path, "train/b/1.jpg", "train/a/1.jpg", "test/c/1.jpg")
    whole = folder.read(tmp_path, "all")
    assert _relative(tmp_path, whole) == ["train/a/1.jpg", "train/b/1.jpg", "test/c/1.jpg"]
    assert whole.labels.tolist() == [0, 1, 2]
    assert whole.class_names == {0: "a", 1: "b", 2: "c"}


def test_all_may_be_a_single_class(tmp_path):
    _tree(tmp_path, "cat/1.jpg", "cat/2.jpg")
    assert folder.read(tmp_path, "all").labels.tolist() == [0, 0]


def test_hidden_and_other_files_are_ignored(tmp_path):
    _tree(tmp_path, "a/1.jpg", "a/._1.jpg", "a/notes.txt", "a/Thumbs.db", "a/.cache/2.jpg", "b/1.jpg")
    _tree(tmp_path, ".git/x.jpg", "readme.jpg.txt")
    assert _relative(tmp_path, folder.read(tmp_path, "train")) == ["a/1.jpg"]
    assert folder.read(tmp_path, "test").class_names == {1: "b"}


@settings(max_examples=25, deadline=None)
@given(
    classes=st.sets(st.text("abcXYZ019 _-é", min_size=1, max_size=4), min_size=2, max_size=9),
    fraction=st.floats(0.01, 0.99),
)
def test_splits_partition_the_classes(classes, fraction):
    with tempfile.TemporaryDirectory() as root:
        _tree(root, *(f"{name}/{i}.jpg" for name in classes for i in range(2)))
        train = folder.read(root, "train", test_fraction=fraction)
        test = folder.read(root, "test", test_fraction=fraction)
    names = sorted(classes)
    assert {**train.class_names, **test.class_names} == dict(enumerate(names))
    assert train.num_classes + test.num_classes == len(names)
    assert max(train.classes) < min(test.classes)
    # Within half a class of the share asked for, where both sides can have one.
    assert test.num_classes == np.clip(test.num_classes, 1, len(names) - 1)
    wanted = np.clip(fraction * len(names), 1, len(names) - 1)
    assert abs(test.num_classes - wanted) <= 0.5 + 1e-9


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    _tree(tmp_path, "train/b/1.jpg", "train/d/1.jpg", "test/a/1.jpg", "test/c/1.jpg", "val/e/1.jpg")
    train, test = folder.read(tmp_path, "train"), folder.read(tmp_path, "test")
    assert train.class_names == {1: "b", 3: "d"}
    assert test.class_names == {0: "a", 2: "c"}
    assert _relative(tmp_path, test) == ["test/a/1.jpg", "test/c/1.jpg"]


def test_shared_classes_keep_one_id_and_are_reported(tmp_path, caplog):
    _tree(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "test/b/2.jpg", "test/c/1.jpg")
    with caplog.at_level("WARNING", logger="absl"):
        train, test = folder.read(tmp_path, "train"), folder.read(tmp_path, "test")
    assert train.class_names == {0: "a", 1: "b"}
    assert test.class_names == {1: "b", 2: "c"}
    assert "1 classes are in both train and test of" in caplog.text
    assert "(the first is b)" in caplog.text


def test_disjoint_classes_are_not_reported(tmp_path, caplog):
    _tree(tmp_path, "train/a/1.jpg", "test/b/1.jpg", "test/b/2.jpg")
    with caplog.at_level("WARNING", logger="absl"):
        folder.read(tmp_path, "test")
    assert caplog.text == ""


def test_loose_images_are_reported(tmp_path, caplog):
    _tree(tmp_path, "a/1.jpg", "b/1.jpg", "x.jpg", "y.png", "z.txt")
    with caplog.at_level("WARNING", logger="absl"):
        assert len(folder.read(tmp_path)) == 1
    assert "ignoring 2 images outside the class folders" in caplog.text


def test_links_to_class_folders_are_followed(tmp_path):
    _tree(tmp_path, "elsewhere/1.jpg", "tree/a/1.jpg")
    (tmp_path / "tree" / "b").symlink_to(tmp_path / "elsewhere")
    assert _relative(tmp_path, folder.read(tmp_path / "tree", "test")) == ["tree/b/1.jpg"]


def test_empty_class_folder_is_named(tmp_path):
    _tree(tmp_path, "a/1.jpg", "b/readme.txt")
    with pytest.raises(UserError, match=rf"class folder {tmp_path}/b has no image"):
        folder.read(tmp_path, "test")


def test_flat_folder_says_what_is_expected(tmp_path):
    _tree(tmp_path, "1.jpg", "2.jpg")
    with pytest.raises(UserError, match=r"found 2 images but no class folder in .*<class>/<image>\.jpg"):
        folder.read(tmp_path)


def test_empty_folder(tmp_path):
    with pytest.raises(UserError, match="found no class folder"):
        folder.read(tmp_path)


def test_one_class_cannot_be_split(tmp_path):
    _tree(tmp_path, "only/1.jpg")
    with pytest.raises(UserError, match=r"one class only \('only'\)"):
        folder.read(tmp_path)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_fraction_out_of_range(tmp_path, fraction):
    with pytest.raises(UserError, match="test_fraction must lie between 0 and 1"):
        folder.read(tmp_path, test_fraction=fraction)


def test_remote_file_system():
    import tensorflow as tf

    root = "ram://folder-test"
    for file in ("a/1.jpg", "a/.hidden/2.jpg", "a/deep/3.jpg", "b/1.jpg"):
        tf.io.gfile.makedirs(f"{root}/{file}".rsplit("/", 1)[0])
        with tf.io.gfile.GFile(f"{root}/{file}", "wb") as handle:
            handle.write(b"x")
    dataset = folder.read(root, "train")
    assert dataset.images.paths == (f"{root}/a/1.jpg", f"{root}/a/deep/3.jpg")
    assert dataset.class_names == {0: "a"}


def test_classes_of_one_image_are_counted(tmp_path, caplog):
    _tree(tmp_path, "a/1.jpg", "b/1.jpg", "b/2.jpg", "c/1.jpg", "d/1.jpg", "d/2.jpg")
    with caplog.at_level("WARNING", logger="absl"):
        folder.read(tmp_path)
    assert "1 of 2 train classes have one image only (the first is a): they give no positive pair" in caplog.text


def test_spaces_and_other_scripts_in_names(tmp_path):
    _tree(tmp_path, "blå bil/bild 1.jpg", "車 /写真.jpg")
    train, test = folder.read(tmp_path), folder.read(tmp_path, "test")
    assert {**train.class_names, **test.class_names} == {0: "blå bil", 1: "車 "}
    assert _relative(tmp_path, test) == ["車 /写真.jpg"]


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\udcff"])
def test_names_that_no_report_can_hold_are_refused(tmp_path, name):
    _tree(tmp_path, f"{name}/1.jpg", f"{name}/2.jpg", "b/1.jpg")
    with pytest.raises(
        UserError, match="folder: 2 names have control characters or are not UTF-8, the first"
    ) as raised:
        folder.read(tmp_path)
    assert str(raised.value).isprintable()


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    _tree(tmp_path, "a/1.jpg", "a/more/2.jpg", "b/1.jpg")
    scandir = folder.os.scandir

    def refuse(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(UserError, match=rf"a folder below {tmp_path}/a cannot be read \(.*Permission denied.*more"):
        folder.read(tmp_path)
