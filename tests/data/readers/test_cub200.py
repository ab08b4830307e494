import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data import catalogue
from tfdml.data.readers import cub200
from tfdml.data.readers import label_files as files
from tfdml.errors import UserError

# Image id, class, file: out of order on purpose.
ROWS = [(7, 101, "101.White_Pelican/b.jpg"), (2, 1, "001.Albatross/a.jpg"), (4, 100, "100.Brown_Pelican/c.jpg")]


def _write(root, rows=ROWS, end="\n"):
    (root / "images").mkdir(parents=True, exist_ok=True)
    tables = {
        "images.txt": [f"{i} {path}" for i, _, path in rows],
        "image_class_labels.txt": [f"{i} {number}" for i, number, _ in reversed(rows)],
        "classes.txt": ["1 001.Albatross", "100 100.Brown_Pelican", "101 101.White_Pelican"],
    }
    for name, lines in tables.items():
        (root / name).write_bytes("".join(line + end for line in lines).encode())
    for _, _, path in rows:
        file = root / "images" / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
    return root


@pytest.fixture
def birds(tmp_path):
    return _write(tmp_path / "CUB_200_2011")


def test_split_by_class_number_in_the_order_of_ids(birds):
    train = cub200.read(birds, "train", check_counts=False)
    assert train.images.paths == tuple(
        str(birds / "images" / path) for path in ("001.Albatross/a.jpg", "100.Brown_Pelican/c.jpg")
    )
    assert train.labels.tolist() == [0, 99]
    assert train.class_names == {0: "001.Albatross", 99: "100.Brown_Pelican"}
    test = cub200.read(birds, "test", check_counts=False)
    assert test.labels.tolist() == [100]
    assert test.class_names == {100: "101.White_Pelican"}


@pytest.mark.parametrize("end", ["\r\n", "  \n\n", "\r"])
def test_line_ends_blanks_and_order_change_nothing(tmp_path, birds, end):
    other = _write(tmp_path / "other", ROWS[::-1], end)
    expected = cub200.read(birds, check_counts=False)
    found = cub200.read(other, check_counts=False)
    assert [path.replace("/other/", "/CUB_200_2011/") for path in found.images.paths] == list(expected.images.paths)
    np.testing.assert_array_equal(found.labels, expected.labels)
    assert found.class_names == expected.class_names


def test_byte_order_mark_is_no_part_of_the_first_id(birds):
    path = birds / "images.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(cub200.read(birds, check_counts=False)) == 2


def test_parent_folder_and_alias_will_do(birds):
    inner = catalogue.load("cub200", birds, check_counts=False)
    outer = catalogue.load("cub", birds.parent, check_counts=False)
    assert outer.name == "cub200"
    assert outer.images.paths == inner.images.paths


def test_remote_file_system(birds):
    import tensorflow as tf

    for file in filter(Path.is_file, birds.rglob("*")):
        target = f"ram://cub-test/{file.relative_to(birds.parent)}"
        tf.io.gfile.makedirs(target.rsplit("/", 1)[0])
        with tf.io.gfile.GFile(target, "wb") as handle:
            handle.write(file.read_bytes() or b"x")
    dataset = cub200.read("ram://cub-test", "test", check_counts=False)
    assert dataset.images.paths == ("ram://cub-test/CUB_200_2011/images/101.White_Pelican/b.jpg",)
    tf.io.gfile.remove("ram://cub-test/CUB_200_2011/images/001.Albatross/a.jpg")
    with pytest.raises(UserError, match=r"1 of 2 images are missing, the first is ram://\S*a\.jpg"):
        cub200.read("ram://cub-test", "train", check_counts=False)


def test_wrong_count_says_expected_and_found_and_what_to_do(birds):
    with pytest.raises(
        UserError, match=r"expected 5,864 train images in \S*labels\.txt, found 2; .*check_counts=False"
    ):
        cub200.read(birds)


def test_missing_image_is_named(birds):
    (birds / "images" / "100.Brown_Pelican" / "c.jpg").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images are missing, the first is \S*/100\.Brown_Pelican/c\.jpg; unp"):
        cub200.read(birds, check_counts=False)


def test_missing_folder_names_both_places(tmp_path):
    with pytest.raises(UserError, match=rf"no images\.txt in {tmp_path} or {tmp_path}/CUB_200_2011;"):
        cub200.read(tmp_path)


def test_missing_table_is_named(birds):
    (birds / "image_class_labels.txt").unlink()
    with pytest.raises(UserError, match=r"image_class_labels\.txt is missing"):
        cub200.read(birds)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("images.txt", "1 a.jpg\n2\n", r"images\.txt, line 2: expected 2 columns \(image_id path\), found 1: '2'"),
        ("images.txt", "\n \n", r"images\.txt has no row"),
        ("images.txt", "x a.jpg\n", r"images\.txt, line 1: image_id is 'x'; expected a whole number"),
        (
            "images.txt",
            "2 a.jpg\n4 b.jpg\n2 c.jpg\n",
            r"images\.txt, lines 1 and 3: image_id '2' comes twice \(1 rows repeat",
        ),
        ("images.txt", "2 a\n4 b\n7 c\n9 d\n", r"image 9 is in \S*images\.txt but not in \S*image_class_labels\.txt"),
        ("images.txt", "2 a.jpg\n\n4 b.jpg\n7 a.jpg\n", r"images\.txt, lines 1 and 4: path 'a\.jpg' comes twice"),
        ("images.txt", "2 a.jpg\n4 b.j", r"images\.txt but not|image 7 is in \S*labels\.txt but not in \S*images\.txt"),
        (
            "images.txt",
            "2 a b.jpg\n4 c.jpg\n7 d.jpg\n",
            r"images\.txt, line 1: expected 2 columns .*, found 3: '2 a b\.jpg'",
        ),
        ("images.txt", "2 a.jpg\n4\0 b.jpg\n7 d.jpg\n", r"images\.txt, line 2: a NUL byte"),
        ("image_class_labels.txt", "2 1\n\n4 -3\n7 3\n", r"labels\.txt, line 3: class is '-3'"),
        ("image_class_labels.txt", "2 1\n4 1.5\n7 3\n", r"labels\.txt, line 2: class is '1\.5'"),
        ("image_class_labels.txt", "2 1\n4 201\n7 3\n", r"labels\.txt, line 2: class is '201'; .* from 1 to 200"),
        ("image_class_labels.txt", "2 1\n4 0\n7 3\n", r"labels\.txt, line 2: class is '0'"),
        ("image_class_labels.txt", "2 1\n4 1_0\n7 3\n", r"labels\.txt, line 2: class is '1_0'"),
        ("image_class_labels.txt", "2 1\n4 ٣\n7 3\n", r"labels\.txt, line 2: class is '٣'"),
        (
            "image_class_labels.txt",
            f"2 1\n4 {'9' * 5000}\n7 3\n",
            r"labels\.txt, line 2: class is '999\d+\.\.\.; expected",
        ),
    ],
)
def test_a_faulty_table_is_named(birds, file, text, message):
    (birds / file).write_text(text)
    with pytest.raises(UserError, match=message):
        cub200.read(birds, check_counts=False)


def test_text_in_another_encoding_names_the_line(birds):
    (birds / "classes.txt").write_bytes(b"1 a\n2 \xe9\n")
    with pytest.raises(UserError, match=r"classes\.txt, line 2: not UTF-8"):
        cub200.read(birds, check_counts=False)


@settings(max_examples=60, deadline=None)
@given(
    file=st.sampled_from(["images.txt", "image_class_labels.txt", "classes.txt"]),
    data=st.binary(max_size=40) | st.text("0123456789 \n\r\t.a\x85\x00", max_size=40).map(str.encode),
)
def test_any_bytes_are_read_or_refused_in_one_line(file, data):
    with tempfile.TemporaryDirectory() as folder:
        root = _write(Path(folder))
        (root / file).write_bytes(data)
        try:
            labels = cub200.read(root, check_counts=False).labels
        except UserError as error:
            message = str(error)
        else:
            assert set(labels.tolist()) <= set(range(100))
            return
    assert len(message.splitlines()) == 1
    assert message.startswith("cub200: ")


def test_the_real_tables(shared_data, tmp_path, monkeypatch):
    root = tmp_path / "CUB_200_2011"
    shutil.copytree(shared_data / "data" / "annotations" / "CUB_200_2011", root)
    with pytest.raises(UserError, match=r"5864 of 5864 images are missing, the first is \S*Albatross_0046_18\.jpg"):
        cub200.read(tmp_path)
    monkeypatch.setattr(files, "require_files", lambda *arguments: None)
    train, test = (cub200.read(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (5_864, 5_924)
    np.testing.assert_array_equal(train.classes, np.arange(100))
    np.testing.assert_array_equal(test.classes, np.arange(100, 200))
    assert train.class_names[0] == "001.Black_footed_Albatross"
    # The folder of an image repeats its class.
    for dataset in (train, test):
        folders = [int(Path(path).parent.name.split(".")[0]) for path in dataset.images.paths]
        np.testing.assert_array_equal(dataset.labels + 1, folders)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(3)), st.permutations(range(3)))
def test_shuffled_rows_give_the_same_ids(images, labels):
    with tempfile.TemporaryDirectory() as folder:
        root = _write(Path(folder))
        expected = cub200.read(root, check_counts=False)
        for file, order in (("images.txt", images), ("image_class_labels.txt", labels)):
            lines = (root / file).read_text().splitlines()
            (root / file).write_text("\n".join(lines[i] for i in order))
        found = cub200.read(root, check_counts=False)
    assert found.images == expected.images
    np.testing.assert_array_equal(found.labels, expected.labels)


def test_the_real_tables_with_placeholders_for_the_images(shared_data, tmp_path):
    root = tmp_path / "CUB_200_2011"
    shutil.copytree(shared_data / "data" / "annotations" / "CUB_200_2011", root)
    for line in (root / "images.txt").read_text().splitlines():
        path = root / "images" / line.split()[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    train, test = (catalogue.load("cub200", tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test), train.num_classes, test.num_classes) == (5_864, 5_924, 100, 100)
    path.unlink()
    with pytest.raises(UserError, match=f"1 of 5924 images are missing, the first is {path}"):
        cub200.read(tmp_path, "test")


def test_images_are_cut_to_their_boxes(birds):
    for _, _, path in ROWS:
        Image.new("RGB", (40, 30)).save(birds / "images" / path)
    (birds / "bounding_boxes.txt").write_text("4 3.0 2.0 20.0 10.0\n2 0.0 0.0 40.0 30.0\n7 1.0 1.0 5.0 5.0\n")
    train = cub200.read(birds, check_counts=False, crop_boxes=True)
    assert train.images.boxes.tolist() == [[0, 0, 30, 40], [2, 3, 12, 23]]
    assert cub200.read(birds, "test", check_counts=False, crop_boxes=True).images.boxes.tolist() == [[1, 1, 6, 6]]
    assert cub200.read(birds, check_counts=False).images.boxes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 0 0 40 30\n", "has no box of image 4"),
        ("2 0 0 40 30\n4 1 2 nan 3\n", "impossible number"),
        ("2 0 0 40 30\n4 1 2 1e30 3\n", "impossible number"),
        ("2 0 0 40 30\n4 1 2 wide 3\n", "is no number"),
        ("2 0 0 40 30\n4 1 2 3\n", "line 2: expected 5 columns"),
        ("2 0 0 40 30\n4 1 2 0 9\n", "boxes are empty, the first is that of .*c.jpg: rows 2 to 11, columns 1 to 1"),
    ],
)
def test_wrong_boxes_are_refused(birds, text, message):
    (birds / "bounding_boxes.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        cub200.read(birds, check_counts=False, crop_boxes=True)


def test_the_real_boxes(shared_data):
    table = shared_data / "data" / "annotations" / "CUB_200_2011" / "bounding_boxes.txt"
    boxes = cub200._boxes(str(table), list(range(1, 11_789)))
    assert boxes.shape == (11_788, 4)
    assert boxes[0].tolist() == [27, 60, 331, 385]
    assert boxes.min() == 0
    assert (boxes[:, 2:] > boxes[:, :2]).all()
