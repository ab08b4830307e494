import numpy as np
import pytest
import scipy.io

from tfdml.data import cars196
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
    with pytest.raises(UserError, match=r"00002\.jpg has class 197"):
        cars196.read(two_tables)


@pytest.mark.shared_data
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
