import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data.readers import cars196
from tfdml.errors import UserError

CLASSES = {"train": [14, 3, 98, 99, 196], "test": [150, 1, 98, 99]}


def _save_annotations(path, name_field, names, classes):
    """Writes a table as the official one is: a 1 x N struct array."""
    boxes = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"]
    fields = [*boxes, "class", name_field]
    table = np.zeros((1, len(names)), dtype=[(field, object) for field in fields])
    for row, (name, number) in enumerate(zip(names, classes, strict=True)):
        for box in boxes:
            table[box][0, row] = np.uint8(1)
        table["class"][0, row] = np.uint8(number)
        table[name_field][0, row] = name
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {"annotations": table})


def _save_meta(path):
    names = np.empty((1, 196), object)
    for i in range(196):
        names[0, i] = f"Car {i + 1}"
    scipy.io.savemat(path, {"class_names": names})


@pytest.fixture
def two_tables(tmp_path):
    for part, table in (("train", "cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        names = [f"{i + 1:05d}.jpg" for i in range(len(CLASSES[part]))]
        _save_annotations(tmp_path / "devkit" / table, "fname", names, CLASSES[part])
        (tmp_path / f"cars_{part}").mkdir()
        for name in names:
            (tmp_path / f"cars_{part}" / name).write_bytes(b"")
    _save_meta(tmp_path / "devkit" / "cars_meta.mat")
    return tmp_path


def test_classes_of_both_tables_are_split_by_number(two_tables):
    train = cars196.read(two_tables, "train", check_counts=False)
    assert train.labels.tolist() == [13, 2, 97, 0, 97]
    assert [path.split("/")[-2:] for path in train.images.paths] == [
        ["cars_train", "00001.jpg"],
        ["cars_train", "00002.jpg"],
        ["cars_train", "00003.jpg"],
        ["cars_test", "00002.jpg"],
        ["cars_test", "00003.jpg"],
    ]
    assert train.class_names == {0: "Car 1", 2: "Car 3", 13: "Car 14", 97: "Car 98"}
    test = cars196.read(two_tables, "test", check_counts=False)
    assert test.labels.tolist() == [98, 195, 149, 98]
    assert not set(train.classes) & set(test.classes)


@pytest.mark.parametrize("folder", [".", "devkit"])
def test_merged_table_with_its_relative_paths(tmp_path, folder):
    names = [f"car_ims/{i:06d}.jpg" for i in (1, 2, 3)]
    _save_annotations(tmp_path / folder / "cars_annos.mat", "relative_im_path", names, [1, 98, 99])
    (tmp_path / "car_ims").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    train = cars196.read(tmp_path, "train", check_counts=False)
    assert train.images.paths == tuple(str(tmp_path / name) for name in names[:2])
    assert train.class_names == {0: "class 1", 97: "class 98"}
    assert cars196.read(tmp_path, "test", check_counts=False).labels.tolist() == [98]


def test_the_image_folder_decides_between_the_forms(two_tables):
    _save_annotations(two_tables / "devkit" / "cars_annos.mat", "relative_im_path", ["car_ims/000001.jpg"], [1])
    assert len(cars196.read(two_tables, "train", check_counts=False)) == 5
    (two_tables / "car_ims").mkdir()
    (two_tables / "car_ims" / "000001.jpg").write_bytes(b"")
    assert len(cars196.read(two_tables, "train", check_counts=False)) == 1


def test_wrong_count_says_what_was_expected_and_found(two_tables):
    with pytest.raises(UserError, match=r"test split should have 8131 images, .* list 4; unpack"):
        cars196.read(two_tables, "test")


def test_missing_images_are_counted_and_the_first_named(two_tables):
    (two_tables / "cars_train" / "00002.jpg").unlink()
    (two_tables / "cars_test" / "00003.jpg").unlink()
    with pytest.raises(UserError, match=r"2 of 5 images are missing, the first is \S*cars_train/00002\.jpg"):
        cars196.read(two_tables, "train", check_counts=False)


def test_missing_image_folder_is_found(two_tables):
    for path in (two_tables / "cars_test").iterdir():
        path.unlink()
    (two_tables / "cars_test").rmdir()
    with pytest.raises(UserError, match=r"2 of 4 images are missing, the first is \S*cars_test/00001\.jpg"):
        cars196.read(two_tables, "test", check_counts=False)


def test_missing_table_is_named(two_tables):
    (two_tables / "devkit" / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(UserError, match=r"found no cars_test_annos_withlabels\.mat"):
        cars196.read(two_tables)


def test_damaged_table_is_named(two_tables):
    path = two_tables / "devkit" / "cars_train_annos.mat"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cars_train_annos\.mat is not a readable MATLAB file"):
        cars196.read(two_tables)


def test_table_without_labels_is_refused(two_tables):
    path = two_tables / "devkit" / "cars_test_annos_withlabels.mat"
    table = np.zeros((1, 1), dtype=[("fname", object)])
    table["fname"][0, 0] = "00001.jpg"
    scipy.io.savemat(path, {"annotations": table})
    with pytest.raises(UserError, match=r"has no annotations\.class; .*with labels"):
        cars196.read(two_tables)


def test_class_out_of_range_is_refused(two_tables):
    table = two_tables / "devkit" / "cars_train_annos.mat"
    _save_annotations(table, "fname", ["00001.jpg", "00002.jpg"], [5, 197])
    with pytest.raises(UserError, match=r"cars_train_annos\.mat, row 2: class is 197; expected a whole number from 1"):
        cars196.read(two_tables)


def test_the_real_data_set(shared_data):
    train = cars196.read(shared_data / "data" / "cars196", "train")
    test = cars196.read(shared_data / "data" / "cars196", "test")
    assert (len(train), len(test)) == (8_054, 8_131)
    np.testing.assert_array_equal(train.classes, np.arange(98))
    np.testing.assert_array_equal(test.classes, np.arange(98, 196))
    assert train.class_names[0] == "AM General Hummer SUV 2000"
    assert test.class_names[195] == "smart fortwo Convertible 2012"
    assert train.labels[0] == 13
    assert train.images.name(0).endswith("00001.jpg")


def _save_rows(path, names, classes):
    """A table whose cells are whatever is given."""
    table = np.zeros((1, len(names)), dtype=[("class", object), ("fname", object)])
    table["class"][0], table["fname"][0] = classes, names
    scipy.io.savemat(path, {"annotations": table})


@pytest.mark.parametrize(
    ("names", "classes", "message"),
    [
        (
            ["a.jpg", "b.jpg"],
            [1, 2.5],
            r"row 2: class is (np\.float64\()?2\.5\)?; expected a whole number from 1 to 196",
        ),
        (["a.jpg", "b.jpg"], [1, float("nan")], r"row 2: class is .*nan"),
        (["a.jpg", "b.jpg"], [1, "two"], r"row 2: class is .*'two'"),
        (["a.jpg", "b.jpg"], [-1, 2], r"row 1: class is -1;"),
        (["a.jpg", "b.jpg"], [2**40, 2], r"row 1: class is 1099511627776;"),
        (["a.jpg", "b.jpg"], [1, [1, 2]], r"row 2: class is array"),
        (["a.jpg", ""], [1, 2], r"row 2: fname is .*; expected a file name"),
        (["a.jpg", 7], [1, 2], r"row 2: fname is 7; expected a file name"),
        (["a.jpg", "b\n.jpg"], [1, 2], r"row 2: fname is .*'b\\n\.jpg'"),
        (["a.jpg", "b.jpg", "a.jpg"], [1, 2, 1], r"rows 1 and 3: fname .*'a\.jpg'.* comes twice"),
        (["a.jpg", "b.jpg", "a.jpg"], [1, 2, 3], r"rows 1 and 3: fname .*'a\.jpg'.* comes twice"),
    ],
)
def test_a_faulty_row_is_named(two_tables, names, classes, message):
    path = two_tables / "devkit" / "cars_train_annos.mat"
    _save_rows(path, names, classes)
    with pytest.raises(UserError, match=message) as raised:
        cars196.read(two_tables, check_counts=False)
    assert str(path) in str(raised.value)
    assert str(raised.value).isprintable()


def test_spaces_and_other_scripts_in_names(two_tables):
    names = ["röd bil.jpg", "車.jpg"]
    _save_rows(two_tables / "devkit" / "cars_train_annos.mat", names, [1, 2])
    for name in names:
        (two_tables / "cars_train" / name).write_bytes(b"")
    train = cars196.read(two_tables, check_counts=False)
    assert [Path(path).name for path in train.images.paths[:2]] == names


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_read_or_refused_in_one_line(data):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "cars_annos.mat")
        _save_annotations(path, "relative_im_path", ["car_ims/1.jpg", "car_ims/2.jpg"], [1, 2])
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
        with pytest.raises(UserError) as raised:  # the images are missing even where the table is whole
            cars196.read(folder, check_counts=False)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("cars196: ")


def _save_boxes(path, names, boxes):
    fields = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    table = np.zeros((1, len(names)), dtype=[(field, object) for field in (*fields, "class", "fname")])
    table["class"][0], table["fname"][0] = [1] * len(names), names
    for row, box in enumerate(boxes):
        for field, value in zip(fields, box, strict=True):
            table[field][0, row] = value
    scipy.io.savemat(path, {"annotations": table})


def test_boxes_count_from_one_with_their_end(two_tables):
    names = ["00001.jpg", "00002.jpg"]
    for name in names:
        Image.new("RGB", (300, 280)).save(two_tables / "cars_train" / name)
    # Numbers of 8 bits, as MATLAB saves small ones, must not wrap round.
    _save_boxes(two_tables / "devkit" / "cars_train_annos.mat", names, [np.uint8([1, 2, 255, 255]), [10, 20, 300, 280]])
    train = cars196.read(two_tables, check_counts=False, crop_boxes=True)
    assert train.images.boxes[:2].tolist() == [[1, 0, 255, 255], [19, 9, 280, 300]]
    assert cars196.read(two_tables, check_counts=False).images.boxes is None


@pytest.mark.parametrize("value", [float("nan"), 1e12, "left", [1, 2]])
def test_a_box_of_no_numbers_is_refused(two_tables, value):
    _save_boxes(two_tables / "devkit" / "cars_train_annos.mat", ["00001.jpg"], [[1, 1, value, 5]])
    with pytest.raises(UserError, match=r"bbox_x2 is .*; expected pixels"):
        cars196.read(two_tables, check_counts=False, crop_boxes=True)


def test_the_boxes_of_the_real_tables(shared_data):
    """The images there were shrunk since, so that the boxes themselves no longer apply."""
    paths, _, tables = cars196._rows(shared_data / "data" / "cars196")
    boxes = cars196._boxes(tables)
    assert boxes.shape == (16_185, 4)
    assert paths[0].endswith("cars_train/00001.jpg")
    assert boxes[0].tolist() == [115, 38, 375, 569]
    assert boxes[:, :2].min() == 0
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    with pytest.raises(UserError, match=r"bounding boxes lie outside their images.* of 192 x 192 pixels"):
        cars196.read(shared_data / "data" / "cars196", crop_boxes=True)
