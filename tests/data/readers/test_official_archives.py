"""The published data sets from small trees in their layouts: splits, roles, and damage named by
file and line."""

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from tests.data.preparations import encoded
from tests.data.trees import annotations, touch
from tfdml.data import catalog
from tfdml.data.readers import official_archives, splits
from tfdml.data.readers.official_archives import (
    read_cars196,
    read_cub200,
    read_inshop,
    read_omniglot,
    read_sop,
)
from tfdml.errors import UserError

CARS_CLASSES = {"train": [14, 3, 98, 99, 196], "test": [150, 1, 98, 99]}


@pytest.fixture
def cars(tmp_path):
    for part, table in (
        ("train", "cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat"),
    ):
        names = [f"{i + 1:05d}.jpg" for i in range(len(CARS_CLASSES[part]))]
        annotations(tmp_path / "devkit" / table, names, np.uint8(CARS_CLASSES[part]))
        touch(tmp_path / f"cars_{part}", *names)
    names = np.empty((1, 196), object)
    names[0] = [f"Car {i + 1}" for i in range(196)]
    scipy.io.savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": names})
    return tmp_path


def test_classes_of_both_tables_of_cars_are_split_by_number(cars):
    train = read_cars196(cars, "train", check_counts=False)
    assert train.labels.tolist() == [13, 2, 97, 0, 97]
    places = [
        "cars_train/00001",
        "cars_train/00002",
        "cars_train/00003",
        "cars_test/00002",
        "cars_test/00003",
    ]
    assert train.images.paths == tuple(f"{cars}/{place}.jpg" for place in places)
    assert train.class_names == {0: "Car 1", 2: "Car 3", 13: "Car 14", 97: "Car 98"}
    assert read_cars196(cars, "test", check_counts=False).labels.tolist() == [98, 195, 149, 98]


@pytest.mark.parametrize("folder", [".", "devkit"])
def test_merged_table_of_cars_with_its_relative_paths(tmp_path, folder):
    names = [f"car_ims/{i:06d}.jpg" for i in (1, 2, 3)]
    annotations(
        tmp_path / folder / "cars_annos.mat", names, np.uint8([1, 98, 99]), "relative_im_path"
    )
    touch(tmp_path, *names)
    train = read_cars196(tmp_path, "train", check_counts=False)
    assert train.images.paths == tuple(str(tmp_path / name) for name in names[:2])
    assert train.class_names == {0: "class 1", 97: "class 98"}
    assert read_cars196(tmp_path, "test", check_counts=False).labels.tolist() == [98]


def test_the_folder_of_images_decides_which_table_of_cars_is_read(cars):
    names = ["car_ims/000001.jpg", "car_ims/000002.jpg"]
    annotations(cars / "cars_annos.mat", names, np.uint8([1, 99]), "relative_im_path")
    assert len(read_cars196(cars, "train", check_counts=False)) == 5
    touch(cars, *names)
    assert len(read_cars196(cars, "train", check_counts=False)) == 1


def test_a_faulty_row_of_the_second_table_of_cars_has_its_own_number(cars):
    table = cars / "devkit" / "cars_test_annos_withlabels.mat"
    annotations(table, ["a.jpg", "b.jpg"], [1, 197])
    with pytest.raises(UserError, match=rf"{table.name}, row 2: class"):
        read_cars196(cars, check_counts=False)


@pytest.mark.slow
def test_the_real_cars(shared_data):
    train, test = (
        read_cars196(shared_data / "data" / "cars196", split) for split in ("train", "test")
    )
    assert (len(train), len(test)) == (8_054, 8_131)
    np.testing.assert_array_equal(train.classes, np.arange(98))
    np.testing.assert_array_equal(test.classes, np.arange(98, 196))
    assert train.class_names[0] == "AM General Hummer SUV 2000"
    assert test.class_names[195] == "smart fortwo Convertible 2012"
    assert train.labels[0] == 13
    assert train.images.name(0).endswith("00001.jpg")


@pytest.mark.parametrize(
    ("names", "classes", "message"),
    [
        (["a.jpg", "b.jpg"], [1, 2.5], "row 2: class .*2.5"),
        (["a.jpg", "b.jpg"], [1, 197], r"cars_train_annos\.mat, row 2: class"),
        (["a.jpg", "b.jpg", "a.jpg"], [1, 2, 3], "row 1 and .*row 3: .* comes twice"),
    ],
)
def test_faulty_rows_and_tables_of_cars_are_refused(cars, names, classes, message):
    annotations(cars / "devkit" / "cars_train_annos.mat", names, classes)
    with pytest.raises(UserError, match=message):
        read_cars196(cars, check_counts=False)
    path = cars / "devkit" / "cars_test_annos_withlabels.mat"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="MATLAB"):
        read_cars196(cars)
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        read_cars196(cars)


# Image id, class, file: out of order on purpose.
BIRDS = [
    (7, 101, "101.White_Pelican/b.jpg"),
    (2, 1, "001.Albatross/a.jpg"),
    (4, 100, "100.Brown_Pelican/c.jpg"),
]


def _write_birds(root, rows=BIRDS, end="\n"):
    touch(root / "images", *(path for _, _, path in rows))
    files = {
        "images.txt": [f"{i} {path}" for i, _, path in rows],
        "image_class_labels.txt": [f"{i} {number}" for i, number, _ in reversed(rows)],
        "classes.txt": ["1 001.Albatross", "100 100.Brown_Pelican", "101 101.White_Pelican"],
    }
    for name, lines in files.items():
        (root / name).write_bytes("".join(line + end for line in lines).encode())
    return root


@pytest.mark.parametrize("end", ["\n", "\r\n", "  \n\n", "\r"])
def test_birds_are_split_by_class_number_in_the_order_of_ids(tmp_path, end):
    root = _write_birds(tmp_path / "CUB_200_2011", BIRDS[:: 1 if end == "\n" else -1], end)
    train, test = (read_cub200(tmp_path, split, check_counts=False) for split in ("train", "test"))
    assert train.images.paths == tuple(str(root / "images" / BIRDS[row][2]) for row in (1, 2))
    assert train.labels.tolist() == [0, 99]
    assert train.class_names == {0: "001.Albatross", 99: "100.Brown_Pelican"}
    assert (test.labels.tolist(), test.class_names) == ([100], {100: "101.White_Pelican"})


def test_the_real_tables_of_birds(shared_data, tmp_path, monkeypatch):
    root = tmp_path / "CUB_200_2011"
    shutil.copytree(shared_data / "data" / "annotations" / "CUB_200_2011", root)
    with pytest.raises(
        UserError, match=r"5864 of 5864 images are missing, first \S*Albatross_0046_18\.jpg"
    ):
        read_cub200(tmp_path)
    monkeypatch.setattr(splits, "require_files", lambda name, paths, advice: tuple(paths))
    train, test = (read_cub200(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (5_864, 5_924)
    np.testing.assert_array_equal(train.classes, np.arange(100))
    np.testing.assert_array_equal(test.classes, np.arange(100, 200))
    assert train.class_names[0] == "001.Black_footed_Albatross"
    # The folder of an image repeats its class.
    for dataset in (train, test):
        folders = [int(Path(path).parent.name.split(".")[0]) for path in dataset.images.paths]
        np.testing.assert_array_equal(dataset.labels + 1, folders)


INSHOP_HEADER = "image_name item_id evaluation_status"
INSHOP_ROWS = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000007/01_1_front.jpg", "id_00000007", "query"),
    ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "gallery"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
    ("img/MEN/Denim/id_00000080/01_3_back.jpg", "id_00000080", "query"),
]


def _partition(rows):
    lines = [f"{name:<70} {item} {status}" for name, item, status in rows]
    return "\n".join([str(len(rows)), INSHOP_HEADER, *lines, ""])


def _write_shop(root, images="", partition="Eval"):
    touch(root / images, *(name for name, _, _ in INSHOP_ROWS))
    (root / partition).mkdir(exist_ok=True)
    (root / partition / "list_eval_partition.txt").write_text(_partition(INSHOP_ROWS))
    return root


@pytest.mark.parametrize("images", ["", "Img"])
@pytest.mark.parametrize("partition", ["Eval", "Anno", "."])
def test_both_splits_of_the_shop_wherever_the_parts_lie(tmp_path, images, partition):
    root = _write_shop(tmp_path, images, partition)
    train, test = (read_inshop(root, split, check_counts=False) for split in ("train", "test"))
    assert train.images.paths == tuple(str(root / images / INSHOP_ROWS[i][0]) for i in (0, 3))
    assert (train.labels.tolist(), train.class_names, train.is_query) == (
        [2, 2],
        {2: "id_00000002"},
        None,
    )
    assert test.images.paths == tuple(str(root / images / INSHOP_ROWS[i][0]) for i in (1, 2, 4, 5))
    assert test.labels.tolist() == [7, 80, 7, 80]
    assert test.is_query.tolist() == [True, False, False, True]


def test_roles_follow_the_images(tmp_path):
    shop = _write_shop(tmp_path)
    test = read_inshop(shop, "test", check_counts=False)
    assert test.take([3, 1]).is_query.tolist() == [True, False]
    assert test.select_classes([80]).is_query.tolist() == [False, True]
    assert test.contiguous().is_query.tolist() == [True, False, False, True]
    queries, gallery = (
        catalog.load("inshop", shop, split, check_counts=False) for split in ("query", "gallery")
    )
    assert (queries.labels.tolist(), gallery.labels.tolist()) == ([7, 80], [80, 7])
    assert (queries.split, gallery.split, queries.is_query) == ("query", "gallery", None)
    with pytest.raises(UserError, match="not divided"):
        catalog.load("glyphs", split="query", images_per_class=1, size=16)


def test_counts_of_every_part_are_checked(tmp_path, monkeypatch):
    shop = _write_shop(tmp_path)
    with pytest.raises(UserError, match="expected 25,882 train images"):
        read_inshop(shop)
    for part, number in (("query", "14,218"), ("gallery", "12,612")):
        with pytest.raises(UserError, match=f"expected {number} {part} images"):
            read_inshop(shop, "test")
        monkeypatch.setitem(official_archives.NUM_IMAGES["inshop"], part, 2)
        with pytest.raises(UserError, match=f"expected 3,985 {part} classes"):
            read_inshop(shop, "test")
        monkeypatch.setitem(official_archives.NUM_CLASSES["inshop"], part, 2)
    assert len(read_inshop(shop, "test")) == 4


def test_the_real_split_of_the_shop(shared_data, tmp_path, monkeypatch):
    rows, class_of = [], {}
    for status in ("train", "query", "gallery"):
        lines = (
            (shared_data / "data" / "annotations" / "inshop" / f"inshop_{status}.txt")
            .read_text()
            .splitlines()
        )
        for line in lines[1:]:
            _, number, _, name = line.split()
            rows.append((name, name.split("/")[3], status))
            class_of[str(tmp_path / name)] = int(number)
    (tmp_path / "list_eval_partition.txt").write_text(_partition(rows))
    (tmp_path / "img").mkdir()
    monkeypatch.setattr(splits, "require_files", lambda name, paths, advice: tuple(paths))
    train, test = (read_inshop(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test.queries), len(test.gallery)) == (25_882, 14_218, 12_612)
    assert (train.num_classes, test.num_classes) == (3_997, 3_985)
    assert not set(train.classes) & set(test.classes)
    assert set(test.queries.classes) == set(test.gallery.classes)
    for dataset in (train, test):
        # Our labels and the numbers of the lists name the same classes.
        pairs = {
            (label, class_of[path])
            for label, path in zip(dataset.labels, dataset.images.paths, strict=True)
        }
        assert len(pairs) == len({number for _, number in pairs}) == dataset.num_classes
    np.testing.assert_array_equal(train.labels[:2], [2, 2])


# Out of order on purpose: ids must follow the names.
CHARACTERS = [
    "Greek/character02",
    "Arcadian/character10",
    "Greek/character01",
    "Arcadian/character09",
]


@pytest.fixture
def characters(tmp_path):
    with zipfile.ZipFile(tmp_path / "images_background.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images_background/", b"")
        archive.writestr("images_background/.DS_Store", b"x")
        archive.writestr("__MACOSX/images_background/Greek/character01/._0001_01.png", b"x")
        for level, name in enumerate(CHARACTERS):
            for drawer in range(20):
                image = encoded(Image.new("L", (5, 5), level), "PNG")
                archive.writestr(
                    f"images_background/{name}/{level:04d}_{drawer + 1:02d}.png", image
                )
    return tmp_path


def test_ids_of_characters_follow_the_sorted_names_in_archives_and_folders(characters):
    train = read_omniglot(characters, check_counts=False)
    assert train.class_names == dict(enumerate(sorted(CHARACTERS)))
    assert np.bincount(train.labels).tolist() == [20] * 4
    assert train.images.name(0) == "images_background/Arcadian/character09/0003_01.png"
    pixel = np.asarray(Image.open(io.BytesIO(train.images.data[0])))[0, 0]
    assert pixel == CHARACTERS.index("Arcadian/character09")
    with pytest.raises(UserError, match=r"expected 19,280 train images in .*, found 80"):
        read_omniglot(characters)
    with zipfile.ZipFile(characters / "images_background.zip") as archive:
        archive.extractall(characters)
    (characters / "images_background.zip").unlink()
    unpacked = read_omniglot(characters, check_counts=False)
    np.testing.assert_array_equal(unpacked.labels, train.labels)
    assert unpacked.class_names == train.class_names
    assert unpacked.images.paths == tuple(str(characters / name) for name in train.images.names)


def test_a_damaged_or_empty_archive_of_characters_is_refused(characters):
    path = characters / "images_background.zip"
    data = bytearray(path.read_bytes())
    start = data.index(b"character01/0002_01.png") + len("character01/0002_01.png")
    data[start + 10 : start + 30] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is no whole zip archive .*get it again"):
        read_omniglot(characters, check_counts=False)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match="no image"):
        read_omniglot(characters, check_counts=False)


def test_the_real_characters(shared_data):
    train, test = (
        read_omniglot(shared_data / "data" / "omniglot", split) for split in ("train", "test")
    )
    assert (len(train), len(test)) == (19_280, 13_180)
    np.testing.assert_array_equal(train.classes, np.arange(964))
    np.testing.assert_array_equal(test.classes, np.arange(964, 964 + 659))
    assert train.class_names[0] == "Alphabet_of_the_Magi/character01"
    assert Image.open(io.BytesIO(test.images.data[-1])).size == (105, 105)


SOP_HEADER = "image_id class_id super_class_id path"
TRAIN = [
    "1 2 1 bicycle_final/222_0.JPG",
    "2 2 1 bicycle_final/222_1.JPG",
    "3 1 12 toaster_final/111_0.JPG",
]
TEST = ["59552 11319 4 coffee_maker_final/333_0.JPG"]


@pytest.fixture
def products(tmp_path):
    for name, rows in (("Ebay_train.txt", TRAIN), ("Ebay_test.txt", TEST)):
        touch(tmp_path, name, content="\n".join([SOP_HEADER, *rows]).encode())
        touch(tmp_path, *(row.split()[-1] for row in rows))
    return tmp_path


def test_products_have_their_super_classes(products):
    train, test = (read_sop(products, split, check_counts=False) for split in ("train", "test"))
    assert train.images.paths == tuple(str(products / row.split()[-1]) for row in TRAIN)
    assert train.labels.tolist() == [1, 1, 0]
    assert train.super_labels.tolist() == [0, 0, 11]
    assert train.class_names == {0: "toaster 1", 1: "bicycle 2"}
    assert (test.labels.tolist(), test.class_names) == ([11_318], {11_318: "coffee maker 11319"})
    assert test.is_query is None
    with pytest.raises(UserError, match="expected 59,551 train images"):
        read_sop(products)


LABELS, PARTITION = "image_class_labels.txt", "list_eval_partition.txt"


@pytest.mark.parametrize(
    ("read", "file", "text", "message"),
    [
        (read_cub200, LABELS, None, "missing"),
        (read_cub200, "images.txt", "1 a.jpg\n2\n", "line 2"),
        (read_cub200, "images.txt", "2 a.jpg\n\n4 b.jpg\n7 a.jpg\n", "line 1 and line 4"),
        (read_cub200, "images.txt", "2 a.jpg\n4 b.jpg", r"class_labels\.txt, line 3: id"),
        (read_cub200, LABELS, "2 1\n4 201\n7 3\n", "line 2: class"),
        (read_inshop, PARTITION, "", "header"),
        (
            read_inshop,
            PARTITION,
            f"1\n{INSHOP_HEADER}\nimg/a.jpg id_1 query\nimg/b.jpg id_2 gallery\n",
            "no query",
        ),
        (
            read_sop,
            "Ebay_train.txt",
            f"{SOP_HEADER}\n1 5 2 a.JPG\n2 5 3 b.JPG\n",
            "two super-classes",
        ),
    ],
)
def test_a_faulty_table_is_named_with_its_line(tmp_path, read, file, text, message):
    root = _write_birds(tmp_path)
    if text is None:
        (root / file).unlink()
    else:
        (root / file).write_text(text)
    with pytest.raises(UserError, match=message):
        read(root, check_counts=False)
