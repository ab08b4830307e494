import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data import catalogue
from tfdml.data.readers import inshop
from tfdml.data.readers import label_files as files
from tfdml.errors import UserError

HEADER = "image_name item_id evaluation_status"
ROWS = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000007/01_1_front.jpg", "id_00000007", "query"),
    ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "gallery"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
    ("img/MEN/Denim/id_00000080/01_3_back.jpg", "id_00000080", "query"),
]


def _text(rows):
    return "\n".join([str(len(rows)), HEADER, *(f"{name:<70} {item} {status}" for name, item, status in rows)]) + "\n"


def _write(root, images="", partition="Eval"):
    for name, _, _ in ROWS:
        file = root / images / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (root / partition).mkdir(exist_ok=True)
    (root / partition / "list_eval_partition.txt").write_text(_text(ROWS))
    return root


@pytest.fixture
def shop(tmp_path):
    return _write(tmp_path)


@pytest.mark.parametrize("images", ["", "Img"])
@pytest.mark.parametrize("partition", ["Eval", "Anno", "."])
def test_both_splits_wherever_the_parts_lie(tmp_path, images, partition):
    root = _write(tmp_path, images, partition)
    train = inshop.read(root, check_counts=False)
    assert train.images.paths == tuple(str(root / images / ROWS[i][0]) for i in (0, 3))
    assert train.labels.tolist() == [2, 2]
    assert train.class_names == {2: "id_00000002"}
    assert train.is_query is None
    test = inshop.read(root, "test", check_counts=False)
    assert test.images.paths == tuple(str(root / images / ROWS[i][0]) for i in (1, 2, 4, 5))
    assert test.labels.tolist() == [7, 80, 7, 80]
    assert test.is_query.tolist() == [True, False, False, True]


def test_queries_and_gallery_by_name(shop):
    queries = catalogue.load("inshop", shop, "query", check_counts=False)
    gallery = catalogue.load("inshop", shop, "gallery", check_counts=False)
    assert queries.labels.tolist() == [7, 80]
    assert gallery.labels.tolist() == [80, 7]
    assert (queries.split, gallery.split) == ("query", "gallery")
    assert queries.is_query is None
    assert [path[len(str(shop)) + 1 :] for path in queries.images.paths] == [ROWS[1][0], ROWS[5][0]]


def test_roles_follow_the_images(shop):
    test = inshop.read(shop, "test", check_counts=False)
    assert test.take([3, 1]).is_query.tolist() == [True, False]
    assert test.select_classes([80]).is_query.tolist() == [False, True]
    assert test.contiguous().is_query.tolist() == [True, False, False, True]
    assert test.contiguous().queries.labels.tolist() == [0, 1]


def test_a_role_that_is_not_there_is_named(shop, tmp_path):
    test = inshop.read(shop, "test", check_counts=False)
    with pytest.raises(UserError, match="the test split has no query image"):
        _ = test.take([1, 2]).queries
    with pytest.raises(UserError, match="the test split has no gallery image"):
        _ = test.take([0]).gallery
    with pytest.raises(UserError, match="glyphs: the test split is not divided into queries and a gallery"):
        catalogue.load("glyphs", split="query", images_per_class=1, size=16)


def test_counts_of_every_part_are_checked(shop, monkeypatch):
    with pytest.raises(UserError, match=r"expected 25,882 train images in \S*list_eval_partition\.txt, found 2"):
        inshop.read(shop)
    with pytest.raises(UserError, match=r"expected 14,218 query images .*, found 2"):
        inshop.read(shop, "test")
    monkeypatch.setitem(inshop.NUM_IMAGES, "query", 2)
    with pytest.raises(UserError, match=r"expected 12,612 gallery images .*, found 2"):
        inshop.read(shop, "test")
    monkeypatch.setitem(inshop.NUM_IMAGES, "gallery", 2)
    with pytest.raises(UserError, match=r"expected 3,985 test items .*, found 2"):
        inshop.read(shop, "test")


def test_missing_image_is_named(shop):
    (shop / ROWS[4][0]).unlink()
    with pytest.raises(UserError, match=rf"1 of 4 images are missing, the first is {shop}/{ROWS[4][0]}; unpack img\.z"):
        inshop.read(shop, "test", check_counts=False)


def test_missing_list_is_named(tmp_path):
    with pytest.raises(UserError, match=rf"found no list_eval_partition\.txt in {tmp_path} or its Eval/ or Anno/"):
        inshop.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 2: expected the header 'image_name item_id evaluation_status', found ''"),
        (f"{HEADER}\n{' '.join(ROWS[0])}\n", r"line 2: expected the header"),
        (f"1\n{HEADER}\nimg/a.jpg id_00000001\n", r"line 3: expected 3 columns .*, found 2"),
        (
            f"1\n{HEADER}\nimg/a.jpg id_00000001 val\n",
            r"line 3: evaluation_status is 'val'; expected train, query or gal",
        ),
        (f"1\n{HEADER}\nimg/a.jpg 1 train\n", r"line 3: item_id is '1'; expected the like of id_00000002"),
        (f"1\n{HEADER}\nimg/a.jpg id_-0000001 train\n", r"line 3: item_id is 'id_-0000001'"),
        (f"1\n{HEADER}\nimg/a.jpg id_{'9' * 19} train\n", r"line 3: item_id is 'id_9{19}'"),
        (
            f"2\n{HEADER}\nimg/a.jpg id_1 train\n\nimg/a.jpg id_1 train\n",
            r"lines 3 and 5: image_name 'img/a\.jpg' comes twice",
        ),
        (
            f"2\n{HEADER}\nimg/a.jpg id_1 train\nimg/b.jpg id_1 query\nimg/c.jpg id_1 gallery\n",
            r"lines 3 and 4: item 1 has split train and test",
        ),
        (
            f"2\n{HEADER}\nimg/a.jpg id_1 query\nimg/b.jpg id_2 gallery\n",
            r"queries and gallery have no class in common \(the first query: line 3, id_1\)",
        ),
        (
            f"3\n{HEADER}\nimg/a.jpg id_1 train\nimg/b.jpg id_1 train\n",
            r"line 1: the list should have '3' rows, found 2",
        ),
        ("1\n" + "\0".join(HEADER), r"line 2: a NUL byte"),
    ],
)
def test_a_faulty_list_is_named(shop, text, message):
    (shop / "Eval" / "list_eval_partition.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        inshop.read(shop)


@settings(max_examples=60, deadline=None)
@given(
    start=st.sampled_from([b"", f"1\n{HEADER}\n".encode(), f"1\n{HEADER}\nimg/a.jpg id_3 ".encode()]),
    data=st.binary(max_size=40) | st.text("train id_019\n\r\t./\x85\x00", max_size=40).map(str.encode),
)
def test_any_bytes_are_read_or_refused_in_one_line(start, data):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "list_eval_partition.txt").write_bytes(start + data)
        with pytest.raises(UserError) as raised:
            inshop.read(folder, check_counts=False)
    assert len(str(raised.value).splitlines()) == 1


def test_the_real_split(shared_data, tmp_path, monkeypatch):
    rows, class_of = [], {}
    for status in ("train", "query", "gallery"):
        lines = (shared_data / "data" / "annotations" / "inshop" / f"inshop_{status}.txt").read_text().splitlines()
        for line in lines[1:]:
            _, number, _, name = line.split()
            rows.append((name, name.split("/")[3], status))
            class_of[str(tmp_path / name)] = int(number)
    (tmp_path / "list_eval_partition.txt").write_text(_text(rows))
    monkeypatch.setattr(files, "require_files", lambda *arguments: None)
    train, test = (inshop.read(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test.queries), len(test.gallery)) == (25_882, 14_218, 12_612)
    assert (train.num_classes, test.num_classes) == (3_997, 3_985)
    assert not set(train.classes) & set(test.classes)
    assert set(test.queries.classes) == set(test.gallery.classes)
    for dataset in (train, test):
        # Our labels and the numbers of the lists name the same classes.
        pairs = {(label, class_of[path]) for label, path in zip(dataset.labels, dataset.images.paths, strict=True)}
        assert len(pairs) == len({number for _, number in pairs}) == dataset.num_classes
    np.testing.assert_array_equal(train.labels[:2], [2, 2])


def test_queries_that_the_gallery_cannot_answer_are_counted(shop, caplog):
    rows = [*ROWS, ("img/MEN/Denim/id_00000081/01_1_front.jpg", "id_00000081", "query")]
    (shop / "Eval" / "list_eval_partition.txt").write_text(_text(rows))
    with caplog.at_level("WARNING", logger="absl"):
        inshop.read(shop, check_counts=False)
    assert "the classes of 1 of 3 queries of" in caplog.text
    assert "(the first: line 9, id_00000081)" in caplog.text


@settings(max_examples=30, deadline=None)
@given(st.permutations(ROWS))
def test_shuffled_rows_give_the_same_ids(rows):
    with tempfile.TemporaryDirectory() as folder:
        root = _write(Path(folder))
        expected = inshop.read(root, "test", check_counts=False)
        (root / "Eval" / "list_eval_partition.txt").write_text(_text(rows))
        found = inshop.read(root, "test", check_counts=False)
    as_rows = [
        sorted(zip(d.images.paths, d.labels.tolist(), d.is_query.tolist(), strict=True)) for d in (expected, found)
    ]
    assert as_rows[0] == as_rows[1]
    assert found.class_names == expected.class_names
