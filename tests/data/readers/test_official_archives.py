"""The published data sets from small trees in their layouts: splits, boxes, and damage named by file and line."""

import io
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.preparations import encoded
from tests.data.trees import annotations, touch
from tfdml.data import catalog
from tfdml.data.readers import official_archives, tables
from tfdml.errors import UserError
from tfdml.io.files import remove, write_whole

CARS196_CLASSES = {"train": [14, 3, 98, 99, 196], "test": [150, 1, 98, 99]}


def _save_meta(path):
    names = np.empty((1, 196), object)
    for i in range(196):
        names[0, i] = f"Car {i + 1}"
    scipy.io.savemat(path, {"class_names": names})


@pytest.fixture
def two_tables(tmp_path):
    for part, table in (("train", "cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        names = [f"{i + 1:05d}.jpg" for i in range(len(CARS196_CLASSES[part]))]
        annotations(tmp_path / "devkit" / table, names, np.uint8(CARS196_CLASSES[part]))
        touch(tmp_path / f"cars_{part}", *names)
    _save_meta(tmp_path / "devkit" / "cars_meta.mat")
    return tmp_path


def test_classes_of_both_tables_are_split_by_number(two_tables):
    train = official_archives.read_cars196(two_tables, "train", check_counts=False)
    assert train.labels.tolist() == [13, 2, 97, 0, 97]
    assert [path.split("/")[-2:] for path in train.images.paths] == [
        ["cars_train", "00001.jpg"],
        ["cars_train", "00002.jpg"],
        ["cars_train", "00003.jpg"],
        ["cars_test", "00002.jpg"],
        ["cars_test", "00003.jpg"],
    ]
    assert train.class_names == {0: "Car 1", 2: "Car 3", 13: "Car 14", 97: "Car 98"}
    test = official_archives.read_cars196(two_tables, "test", check_counts=False)
    assert test.labels.tolist() == [98, 195, 149, 98]
    assert not set(train.classes) & set(test.classes)


@pytest.mark.parametrize("folder", [".", "devkit"])
def test_merged_table_with_its_relative_paths(tmp_path, folder):
    names = [f"car_ims/{i:06d}.jpg" for i in (1, 2, 3)]
    annotations(tmp_path / folder / "cars_annos.mat", names, np.uint8([1, 98, 99]), "relative_im_path")
    touch(tmp_path, *names)
    train = official_archives.read_cars196(tmp_path, "train", check_counts=False)
    assert train.images.paths == tuple(str(tmp_path / name) for name in names[:2])
    assert train.class_names == {0: "class 1", 97: "class 98"}
    assert official_archives.read_cars196(tmp_path, "test", check_counts=False).labels.tolist() == [98]


@pytest.mark.slow
def test_the_real_data_set_of_cars196(shared_data):
    train = official_archives.read_cars196(shared_data / "data" / "cars196", "train")
    test = official_archives.read_cars196(shared_data / "data" / "cars196", "test")
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
        (["a.jpg", "b.jpg"], [1, 2.5], r"row 2: class must be a whole number of 1 to 196, it is '2\.5'"),
        (["a.jpg", "b.jpg"], [1, "two"], r"row 2: class must be"),
        (["a.jpg", "b.jpg"], [0, 2], r"row 1: class must be"),
        (["a.jpg", "b.jpg"], [1, 197], r"cars_train_annos\.mat, row 2: class must be"),
        (["a.jpg", "b.jpg"], [1, [1, 2]], r"row 2: class must be"),
        (["a.jpg", "b\n.jpg"], [1, 2], r"row 2: fname must be text without control characters"),
        (["a.jpg", "b.jpg", "a.jpg"], [1, 2, 3], r"row 1 and row 3: fname 'a\.jpg' comes twice"),
        (["a.jpg", ""], [1, 2], r"images are missing"),
    ],
)
def test_a_faulty_row_is_named(two_tables, names, classes, message):
    path = two_tables / "devkit" / "cars_train_annos.mat"
    annotations(path, names, classes)
    with pytest.raises(UserError, match=message) as raised:
        official_archives.read_cars196(two_tables, check_counts=False)
    assert str(raised.value).isprintable()


def test_tables_that_are_missing_or_not_the_official_ones_are_refused(two_tables):
    path = two_tables / "devkit" / "cars_test_annos_withlabels.mat"
    table = np.zeros((1, 1), dtype=[("fname", object)])
    table["fname"][0, 0] = "00001.jpg"
    scipy.io.savemat(path, {"annotations": table})
    with pytest.raises(UserError, match=r"has no annotations\.fname and class; .*with labels"):
        official_archives.read_cars196(two_tables)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cars_test_annos_withlabels\.mat is no MATLAB file"):
        official_archives.read_cars196(two_tables)
    path.unlink()
    with pytest.raises(UserError, match=r"found no cars_test_annos_withlabels\.mat"):
        official_archives.read_cars196(two_tables)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_damage_is_read_or_refused_in_one_line_of_cars196(data):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "cars_annos.mat")
        annotations(path, ["car_ims/1.jpg", "car_ims/2.jpg"], np.uint8([1, 2]), "relative_im_path")
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
        with pytest.raises(UserError) as raised:  # the images are missing even where the table is whole
            official_archives.read_cars196(folder, check_counts=False)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("cars196: ")


# Image id, class, file: out of order on purpose.
CUB200_ROWS = [(7, 101, "101.White_Pelican/b.jpg"), (2, 1, "001.Albatross/a.jpg"), (4, 100, "100.Brown_Pelican/c.jpg")]


def _write_of_cub200(root, rows=CUB200_ROWS, end="\n"):
    touch(root / "images", *(path for _, _, path in rows))
    tables = {
        "images.txt": [f"{i} {path}" for i, _, path in rows],
        "image_class_labels.txt": [f"{i} {number}" for i, number, _ in reversed(rows)],
        "classes.txt": ["1 001.Albatross", "100 100.Brown_Pelican", "101 101.White_Pelican"],
    }
    for name, lines in tables.items():
        (root / name).write_bytes("".join(line + end for line in lines).encode())
    return root


@pytest.fixture
def birds(tmp_path):
    return _write_of_cub200(tmp_path / "CUB_200_2011")


def test_split_by_class_number_in_the_order_of_ids(birds):
    train = official_archives.read_cub200(birds, "train", check_counts=False)
    assert train.images.paths == tuple(
        str(birds / "images" / path) for path in ("001.Albatross/a.jpg", "100.Brown_Pelican/c.jpg")
    )
    assert train.labels.tolist() == [0, 99]
    assert train.class_names == {0: "001.Albatross", 99: "100.Brown_Pelican"}
    test = official_archives.read_cub200(birds, "test", check_counts=False)
    assert test.labels.tolist() == [100]
    assert test.class_names == {100: "101.White_Pelican"}


@pytest.mark.parametrize("end", ["\r\n", "  \n\n", "\r"])
def test_line_ends_blanks_and_order_change_nothing(tmp_path, birds, end):
    other = _write_of_cub200(tmp_path / "other", CUB200_ROWS[::-1], end)
    expected = official_archives.read_cub200(birds, check_counts=False)
    found = official_archives.read_cub200(other, check_counts=False)
    assert [path.replace("/other/", "/CUB_200_2011/") for path in found.images.paths] == list(expected.images.paths)
    np.testing.assert_array_equal(found.labels, expected.labels)
    assert found.class_names == expected.class_names


def test_remote_file_system(birds):
    for file in filter(Path.is_file, birds.rglob("*")):
        target = f"memory://cub-test/{file.relative_to(birds.parent)}"
        write_whole(target, file.read_bytes())
    dataset = official_archives.read_cub200("memory://cub-test", "test", check_counts=False)
    assert dataset.images.paths == ("memory://cub-test/CUB_200_2011/images/101.White_Pelican/b.jpg",)
    remove("memory://cub-test/CUB_200_2011/images/001.Albatross/a.jpg")
    with pytest.raises(UserError, match=r"1 of 2 images are missing, first memory://\S*a\.jpg"):
        official_archives.read_cub200("memory://cub-test", "train", check_counts=False)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (official_archives.read_cub200, r"no images\.txt in {0} or {0}/CUB_200_2011;"),
        (official_archives.read_inshop, r"found no list_eval_partition\.txt in {0} or its Eval/ or Anno/"),
        (official_archives.read_sop, r"sop: found no Ebay_train\.txt in"),
    ],
)
def test_missing_tables_are_named_with_the_places_searched(tmp_path, read, message):
    with pytest.raises(UserError, match=message.format(tmp_path)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("images.txt", None, r"images\.txt"),
        ("image_class_labels.txt", None, r"image_class_labels\.txt is missing"),
        ("images.txt", "1 a.jpg\n2\n", r"images\.txt, line 2: expected 2 columns, found 1"),
        ("images.txt", "\n \n", r"images\.txt has no row"),
        ("images.txt", "x a.jpg\n", r"images\.txt, line 1: id must be a whole number"),
        ("images.txt", "2 a.jpg\n4 b.jpg\n2 c.jpg\n", r"line 1 and line 3: id '2' comes twice"),
        (
            "images.txt",
            "2 a\n4 b\n7 c\n9 d\n",
            r"images\.txt, line 4: id must be in \S*image_class_labels\.txt, it is '9'",
        ),
        ("images.txt", "2 a.jpg\n\n4 b.jpg\n7 a.jpg\n", r"line 1 and line 4: path 'a\.jpg' comes twice"),
        ("images.txt", "2 a.jpg\n4 b.jpg", r"image_class_labels\.txt, line 3: id must be in \S*images\.txt, it is '7'"),
        (
            "image_class_labels.txt",
            "2 1\n4 201\n7 3\n",
            r"line 2: class must be a whole number of 1 to 200, it is '201'",
        ),
        ("image_class_labels.txt", "2 1\n4 1_0\n7 3\n", r"line 2: class must be"),
        ("image_class_labels.txt", "2 1\n4 \u0663\n7 3\n", r"line 2: class must be"),
        ("image_class_labels.txt", f"2 1\n4 {'9' * 5000}\n7 3\n", r"line 2: class must be"),
    ],
)
def test_a_faulty_table_is_named(birds, file, text, message):
    if text is None:
        (birds / file).unlink()
    else:
        (birds / file).write_text(text)
    with pytest.raises(UserError, match=message):
        official_archives.read_cub200(birds, check_counts=False)


def test_the_real_tables(shared_data, tmp_path, monkeypatch):
    root = tmp_path / "CUB_200_2011"
    shutil.copytree(shared_data / "data" / "annotations" / "CUB_200_2011", root)
    with pytest.raises(UserError, match=r"5864 of 5864 images are missing, first \S*Albatross_0046_18\.jpg"):
        official_archives.read_cub200(tmp_path)
    monkeypatch.setattr(tables, "require_files", lambda name, paths, advice: tuple(paths))
    train, test = (official_archives.read_cub200(tmp_path, split) for split in ("train", "test"))
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


def _text(rows):
    return (
        "\n".join([str(len(rows)), INSHOP_HEADER, *(f"{name:<70} {item} {status}" for name, item, status in rows)])
        + "\n"
    )


def _write_of_inshop(root, images="", partition="Eval"):
    touch(root / images, *(name for name, _, _ in INSHOP_ROWS))
    (root / partition).mkdir(exist_ok=True)
    (root / partition / "list_eval_partition.txt").write_text(_text(INSHOP_ROWS))
    return root


@pytest.fixture
def shop(tmp_path):
    return _write_of_inshop(tmp_path)


@pytest.mark.parametrize("images", ["", "Img"])
@pytest.mark.parametrize("partition", ["Eval", "Anno", "."])
def test_both_splits_wherever_the_parts_lie(tmp_path, images, partition):
    root = _write_of_inshop(tmp_path, images, partition)
    train = official_archives.read_inshop(root, check_counts=False)
    assert train.images.paths == tuple(str(root / images / INSHOP_ROWS[i][0]) for i in (0, 3))
    assert train.labels.tolist() == [2, 2]
    assert train.class_names == {2: "id_00000002"}
    assert train.is_query is None
    test = official_archives.read_inshop(root, "test", check_counts=False)
    assert test.images.paths == tuple(str(root / images / INSHOP_ROWS[i][0]) for i in (1, 2, 4, 5))
    assert test.labels.tolist() == [7, 80, 7, 80]
    assert test.is_query.tolist() == [True, False, False, True]


def test_roles_follow_the_images(shop):
    test = official_archives.read_inshop(shop, "test", check_counts=False)
    assert test.take([3, 1]).is_query.tolist() == [True, False]
    assert test.select_classes([80]).is_query.tolist() == [False, True]
    assert test.contiguous().is_query.tolist() == [True, False, False, True]
    queries, gallery = (catalog.load("inshop", shop, split, check_counts=False) for split in ("query", "gallery"))
    assert (queries.labels.tolist(), gallery.labels.tolist()) == ([7, 80], [80, 7])
    assert (queries.split, gallery.split, queries.is_query) == ("query", "gallery", None)


def test_a_role_that_is_not_there_is_named(shop, tmp_path):
    test = official_archives.read_inshop(shop, "test", check_counts=False)
    with pytest.raises(UserError, match="the test split has no query image"):
        _ = test.take([1, 2]).queries
    with pytest.raises(UserError, match="the test split has no gallery image"):
        _ = test.take([0]).gallery
    with pytest.raises(UserError, match="glyphs: the test split is not divided into queries and a gallery"):
        catalog.load("glyphs", split="query", images_per_class=1, size=16)


def test_counts_of_every_part_are_checked(shop, monkeypatch):
    with pytest.raises(UserError, match=r"expected 25,882 train images in \S*list_eval_partition\.txt, found 2"):
        official_archives.read_inshop(shop)
    with pytest.raises(UserError, match=r"expected 14,218 query images .*, found 2"):
        official_archives.read_inshop(shop, "test")
    monkeypatch.setitem(official_archives.NUM_IMAGES["inshop"], "query", 2)
    with pytest.raises(UserError, match=r"expected 12,612 gallery images .*, found 2"):
        official_archives.read_inshop(shop, "test")
    monkeypatch.setitem(official_archives.NUM_IMAGES["inshop"], "gallery", 2)
    with pytest.raises(UserError, match=r"expected 3,985 test items .*, found 2"):
        official_archives.read_inshop(shop, "test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no header 'image_name item_id evaluation_status' in line 2"),
        (f"{INSHOP_HEADER}\n{' '.join(INSHOP_ROWS[0])}\n", r"has no header"),
        (f"1\n{INSHOP_HEADER}\nimg/a.jpg id_00000001\n", r"line 3: expected 3 columns, found 2"),
        (f"1\n{INSHOP_HEADER}\nimg/a.jpg id_00000001 val\n", r"must be train, query or gallery, it is 'val'"),
        (
            f"1\n{INSHOP_HEADER}\nimg/a.jpg id_-0000001 train\n",
            r"line 3: item_id must be the like of id_00000002, it is",
        ),
        (f"2\n{INSHOP_HEADER}\nimg/a.jpg id_1 train\n\nimg/a.jpg id_1 train\n", r"line 3 and line 5: .* comes twice"),
        (
            f"2\n{INSHOP_HEADER}\nimg/a.jpg id_1 train\nimg/b.jpg id_1 query\nimg/c.jpg id_1 gallery\n",
            r"line 3 and line 4: item 1 has split train and test",
        ),
        (f"2\n{INSHOP_HEADER}\nimg/a.jpg id_1 query\nimg/b.jpg id_2 gallery\n", r"line 3: no query has its class"),
    ],
)
def test_a_faulty_list_is_named_of_inshop(shop, text, message):
    (shop / "Eval" / "list_eval_partition.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        official_archives.read_inshop(shop)


def test_the_real_split(shared_data, tmp_path, monkeypatch):
    rows, class_of = [], {}
    for status in ("train", "query", "gallery"):
        lines = (shared_data / "data" / "annotations" / "inshop" / f"inshop_{status}.txt").read_text().splitlines()
        for line in lines[1:]:
            _, number, _, name = line.split()
            rows.append((name, name.split("/")[3], status))
            class_of[str(tmp_path / name)] = int(number)
    (tmp_path / "list_eval_partition.txt").write_text(_text(rows))
    (tmp_path / "img").mkdir()
    monkeypatch.setattr(tables, "require_files", lambda name, paths, advice: tuple(paths))
    train, test = (official_archives.read_inshop(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test.queries), len(test.gallery)) == (25_882, 14_218, 12_612)
    assert (train.num_classes, test.num_classes) == (3_997, 3_985)
    assert not set(train.classes) & set(test.classes)
    assert set(test.queries.classes) == set(test.gallery.classes)
    for dataset in (train, test):
        # Our labels and the numbers of the lists name the same classes.
        pairs = {(label, class_of[path]) for label, path in zip(dataset.labels, dataset.images.paths, strict=True)}
        assert len(pairs) == len({number for _, number in pairs}) == dataset.num_classes
    np.testing.assert_array_equal(train.labels[:2], [2, 2])


# Out of order on purpose: ids must follow the names.
OMNIGLOT_CLASSES = ["Greek/character02", "Arcadian/character10", "Greek/character01", "Arcadian/character09"]


def _png(level: int) -> bytes:
    return encoded(Image.new("L", (5, 5), level), "PNG")


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
    _write_zip(tmp_path / "images_background.zip", "images_background", OMNIGLOT_CLASSES)
    _write_zip(tmp_path / "images_evaluation.zip", "images_evaluation", ["Tifinagh/character01"], per_class=3)
    return tmp_path


def test_ids_follow_the_sorted_names(archives):
    train = official_archives.read_omniglot(archives, "train", check_counts=False)
    assert train.class_names == dict(enumerate(sorted(OMNIGLOT_CLASSES)))
    assert np.bincount(train.labels).tolist() == [20] * 4
    assert train.images.name(0) == "images_background/Arcadian/character09/0003_01.png"
    pixel = np.asarray(Image.open(io.BytesIO(train.images.data[0])))[0, 0]
    assert pixel == OMNIGLOT_CLASSES.index("Arcadian/character09")


def test_unpacked_folders_give_the_same_labels(archives):
    expected = official_archives.read_omniglot(archives, "train", check_counts=False)
    with zipfile.ZipFile(archives / "images_background.zip") as archive:
        archive.extractall(archives)
    (archives / "images_background.zip").unlink()
    unpacked = official_archives.read_omniglot(archives, "train", check_counts=False)
    np.testing.assert_array_equal(unpacked.labels, expected.labels)
    assert unpacked.class_names == expected.class_names
    assert unpacked.images.paths == tuple(str(archives / name) for name in expected.images.names)


def test_damaged_member(archives):
    path = archives / "images_background.zip"
    data = bytearray(path.read_bytes())
    start = data.index(b"character01/0002_01.png") + len("character01/0002_01.png")
    data[start + 10 : start + 30] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is no whole zip archive .*get it again"):
        official_archives.read_omniglot(archives, "train", check_counts=False)
    path.unlink()
    with pytest.raises(UserError, match=r"found neither \S*images_background\.zip"):
        official_archives.read_omniglot(archives)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match="no image"):
        official_archives.read_omniglot(archives, check_counts=False)


def test_the_real_data_set_of_omniglot(shared_data):
    train = official_archives.read_omniglot(shared_data / "data" / "omniglot", "train")
    test = official_archives.read_omniglot(shared_data / "data" / "omniglot", "test")
    assert (len(train), len(test)) == (19_280, 13_180)
    np.testing.assert_array_equal(train.classes, np.arange(964))
    np.testing.assert_array_equal(test.classes, np.arange(964, 964 + 659))
    assert train.class_names[0] == "Alphabet_of_the_Magi/character01"
    assert Image.open(io.BytesIO(test.images.data[-1])).size == (105, 105)


SOP_HEADER = "image_id class_id super_class_id path"
TRAIN = ["1 2 1 bicycle_final/222_0.JPG", "2 2 1 bicycle_final/222_1.JPG", "3 1 12 toaster_final/111_0.JPG"]
TEST = ["59552 11319 4 coffee_maker_final/333_0.JPG"]


def _write_of_sop(root, train=TRAIN, test=TEST):
    root.mkdir(exist_ok=True)
    for name, rows in (("Ebay_train.txt", train), ("Ebay_test.txt", test)):
        (root / name).write_text("".join(line + "\n" for line in [SOP_HEADER, *rows]))
        touch(root, *(row.split()[-1] for row in rows))
    return root


@pytest.fixture
def products(tmp_path):
    return _write_of_sop(tmp_path / "Stanford_Online_Products")


def test_official_split_with_its_super_classes(products):
    train = official_archives.read_sop(products, check_counts=False)
    assert train.images.paths == tuple(str(products / row.split()[-1]) for row in TRAIN)
    assert train.labels.tolist() == [1, 1, 0]
    assert train.super_labels.tolist() == [0, 0, 11]
    assert train.class_names == {0: "toaster 1", 1: "bicycle 2"}
    test = official_archives.read_sop(products, "test", check_counts=False)
    assert test.labels.tolist() == [11_318]
    assert test.class_names == {11_318: "coffee maker 11319"}
    assert test.is_query is None


def test_image_and_class_counts_are_checked(products, monkeypatch):
    with pytest.raises(UserError, match=r"expected 59,551 train images in \S*Ebay_train\.txt, found 3; .*again"):
        official_archives.read_sop(products)
    monkeypatch.setitem(official_archives.NUM_IMAGES["sop"], "train", 3)
    with pytest.raises(UserError, match=r"expected 11,318 train classes in \S*Ebay_train\.txt, found 2"):
        official_archives.read_sop(products)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1 1 a.JPG\n", r"has no header 'image_id .* path' in line 1"),
        (f"{SOP_HEADER}\n", r"Ebay_train\.txt has no row"),
        (f"{SOP_HEADER}\n1 1 1 a.JPG\n2 1 1 b c.JPG\n", r"line 3: expected 4 columns, found 5"),
        (f"{SOP_HEADER}\n1 0 1 a.JPG\n", r"line 2: class_id must be a whole number"),
        (f"{SOP_HEADER}\n1 5 13 a.JPG\n", r"line 2: super_class_id must be a whole number of 1 to 12"),
        (f"{SOP_HEADER}\n1 {2**63} 1 a.JPG\n", r"line 2: class_id must be a whole number"),
        (f"{SOP_HEADER}\n1 5 2 a.JPG\n\n2 5 2 a.JPG\n", r"line 2 and line 4: path 'a\.JPG' comes twice"),
        (f"{SOP_HEADER}\n1 5 2 a.JPG\n2 5 3 b.JPG\n", r"line 2 and line 3: class_id 5 has super_class_id 2 and 3"),
    ],
)
def test_a_faulty_list_is_named_of_sop(products, text, message):
    (products / "Ebay_train.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        official_archives.read_sop(products, check_counts=False)


TABLES = {
    "images.txt": (official_archives.read_cub200, b""),
    "image_class_labels.txt": (official_archives.read_cub200, b""),
    "classes.txt": (official_archives.read_cub200, b""),
    "list_eval_partition.txt": (official_archives.read_inshop, f"1\n{INSHOP_HEADER}\nimg/a.jpg id_3 ".encode()),
    "Ebay_train.txt": (official_archives.read_sop, SOP_HEADER.encode() + b"\n"),
}


@settings(max_examples=100, deadline=None)
@given(
    file=st.sampled_from(sorted(TABLES)),
    headed=st.booleans(),
    data=st.binary(max_size=40) | st.text("train id_0123456789 \n\r\t./\x85\x00", max_size=40).map(str.encode),
)
def test_any_bytes_are_read_or_refused_in_one_line(file, headed, data):
    read, header = TABLES[file]
    with tempfile.TemporaryDirectory() as folder:
        _write_of_cub200(Path(folder))
        Path(folder, file).write_bytes(header * headed + data)
        try:
            labels = read(folder, check_counts=False).labels
        except UserError as error:
            message = str(error)
        else:
            assert set(labels.tolist()) <= set(range(100))
            return
    assert len(message.splitlines()) == 1
    assert message.startswith(("cub200: ", "inshop: ", "sop: "))
