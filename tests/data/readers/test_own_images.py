"""Class folders and lists as data sets."""

import csv
import functools
import io
import json
import os
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.preparations import encoded
from tests.data.trees import touch
from tests.io.test_tables import write_table
from tfdml.data import catalog
from tfdml.data.readers import image_files, own_images
from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_dataset
from tfdml.io.files import write_whole


def _relative(root, dataset):
    return [str(Path(path).relative_to(root)) for path in dataset.images.paths]


def test_the_last_classes_are_the_test_split(tmp_path):
    touch(
        tmp_path,
        "dog/1.jpg",
        "cat/2.PNG",
        "cat/1.jpeg",
        "ant/9.webp",
        "emu/deep/er/3.Png",
        "emu/0.webp",
        "emu/9.gif",
    )
    train, test = (
        own_images.read_folder(tmp_path, "train"),
        own_images.read_folder(tmp_path, "test"),
    )
    assert _relative(tmp_path, train) == ["ant/9.webp", "cat/1.jpeg", "cat/2.PNG"]
    assert train.labels.tolist() == [0, 1, 1]
    assert train.class_names == {0: "ant", 1: "cat"}
    assert _relative(tmp_path, test) == ["dog/1.jpg", "emu/0.webp", "emu/deep/er/3.Png"]
    assert test.labels.tolist() == [2, 3, 3]
    assert test.class_names == {2: "dog", 3: "emu"}


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("Training", "holdout"), ("TRAIN", "VAL")]
)
def test_usual_names_of_folders_are_splits(tmp_path, train, test):
    touch(
        tmp_path,
        f"{train}/b/1.jpg",
        f"{train}/d/1.jpg",
        f"{test}/c/1.jpg",
        "@eaDir/x/1.jpg",
        "__MACOSX/train/1.jpg",
    )
    names = {
        split: own_images.read_folder(tmp_path, split).class_names
        for split in ("train", "test", "all")
    }
    assert names == {"train": {0: "b", 2: "d"}, "test": {1: "c"}, "all": {0: "b", 1: "c", 2: "d"}}


def test_validation_next_to_test_is_left_out(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "valid/b/1.jpg", "valid/b/2.jpg", "test/c/1.jpg")
    assert (
        len(own_images.read_folder(tmp_path)) == len(own_images.read_folder(tmp_path, "test")) == 1
    )
    assert len(own_images.read_folder(tmp_path, "all")) == 4


@pytest.mark.parametrize("above", ["", "test/"])
def test_query_and_gallery_folders_are_roles(tmp_path, above):
    touch(
        tmp_path,
        "train/a/1.jpg",
        f"{above}query/b/1.jpg",
        f"{above}gallery/b/2.jpg",
        f"{above}query/d/1.jpg",
    )
    test = own_images.read_folder(tmp_path, "test")
    assert _relative(tmp_path, test) == [
        f"{above}{name}" for name in ("gallery/b/2.jpg", "query/b/1.jpg", "query/d/1.jpg")
    ]
    assert test.is_query.tolist() == [False, True, True]
    assert len(catalog.load("folder", tmp_path, "gallery")) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no image"),
        (["only/1.jpg"], "one class only"),
        (["train/a/1.jpg", "test/a/1.jpg", "bus/1.jpg"], "splits"),
        (["train/1.jpg", "val/1.jpg", "bus/1.jpg"], "train/, val/"),
        (["train/a/1.jpg", "Train/b/1.jpg", "test/c/1.jpg"], "one split"),
        (["train/a/1.jpg"], "test split"),
        (["query/a/1.jpg", "train/a/1.jpg"], "gallery"),
        (["query/a/1.jpg", "gallery/b/1.jpg"], "gallery"),
    ],
)
def test_folders_without_two_classes_or_that_look_like_splits_are_refused(tmp_path, files, message):
    touch(tmp_path, *files)
    with pytest.raises(UserError, match=message):
        own_images.read_folder(tmp_path, "test")


def test_images_are_those_by_content(tmp_path):
    heads = {
        name: encoded(Image.new("RGB", (4, 4)), name)
        for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    }
    names = [
        f"{kind}{end}"
        for kind in ("JPEG", "PNG", "WEBP")
        for end in ("", ".jfif", ".JPE", ".data", ".v1.0")
    ]
    for name in names:
        touch(tmp_path, f"a/{name}", content=heads[name.split(".")[0]])
    for name, kind in (("x", "GIF"), ("y.gif", "GIF"), ("z.bmp", "BMP"), ("z.tif", "TIFF")):
        touch(tmp_path, f"a/{name}", content=heads[kind])
    touch(
        tmp_path,
        "a/notes.TXT",
        "a/empty",
        "a/.hidden.jpg",
        "a/~lock.jpg",
        "a/Thumbs.db",
        "a/.DS_Store",
        "a/._1.jpg",
    )
    touch(tmp_path, "a/desktop.ini", "a/@eaDir/1.jpg", "b/1.jpg")
    assert _relative(tmp_path, own_images.read_folder(tmp_path)) == sorted(
        f"a/{name}" for name in names
    )


def test_linked_folders_inside_a_class_are_followed_once(tmp_path):
    touch(tmp_path, "elsewhere/2.jpg", "tree/a/1.jpg", "tree/b/deep/1.jpg")
    (tmp_path / "tree" / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "tree" / "a")
    (tmp_path / "tree" / "b" / "deep" / "self").symlink_to(tmp_path / "tree" / "b")
    dataset = own_images.read_folder(tmp_path / "tree", "all")
    assert _relative(tmp_path / "tree", dataset) == ["a/1.jpg", "a/more/2.jpg", "b/deep/1.jpg"]


def test_images_named_by_files_folders_and_patterns(tmp_path):
    touch(tmp_path, "a/car[1].png", "a/car1.png", "a/b,c.jpg", "a/x.txt", "a/.y.jpg")

    def name(source):
        return [os.path.basename(path) for path in image_files.images_named("queries", source)]

    assert name(f"{tmp_path}/a/car[1].png") == ["car[1].png"]
    assert name(f"{tmp_path}/a/x.txt") == ["x.txt"]
    assert name(f"{tmp_path}/a") == name(f"{tmp_path}/*/*") == ["b,c.jpg", "car1.png", "car[1].png"]
    for source in ("none.jpg", "a/*.gif", "a/*.txt"):
        with pytest.raises(UserError, match=f"{tmp_path}/{source.split('/')[0]}"):
            name(f"{tmp_path}/{source}")


def test_images_without_class_folders_are_classes_of_their_own(tmp_path):
    touch(tmp_path, "3.jpg", "1.jpg", "2.png", "notes.txt")
    train = own_images.read_folder(tmp_path, test_fraction=0.3)
    assert (_relative(tmp_path, train), train.labels.tolist()) == (["1.jpg", "2.png"], [0, 1])
    assert _relative(tmp_path, own_images.read_folder(tmp_path, "test", test_fraction=0.3)) == [
        "3.jpg"
    ]
    assert len(own_images.read_folder(tmp_path, "all")) == 3
    with pytest.raises(UserError, match="test_fraction"):
        own_images.read_folder(tmp_path, test_fraction=1.5)


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\udcff"])
def test_names_that_no_report_can_hold_are_refused(tmp_path, name):
    touch(tmp_path, f"{name}/1.jpg", f"{name}/2.jpg", "b/1.jpg")
    with pytest.raises(UserError, match="must be text without control characters, it is") as raised:
        own_images.read_folder(tmp_path)
    assert str(raised.value).isprintable()


@pytest.fixture
def write(tmp_path):
    """Writes a list and its images a.jpg to f.jpg, and returns its path."""
    touch(tmp_path, *(f"{letter}.jpg" for letter in "abcdef"))

    def write(text, name="list.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def _both(path, **options):
    return own_images.read_list(path, "train", **options), own_images.read_list(
        path, "test", **options
    )


def _names(dataset):
    return [path.rsplit("/", 1)[1] for path in dataset.images.paths]


def test_classes_in_both_splits_and_splits_in_classes_are_warned_of(write, tmp_path, caplog):
    touch(
        tmp_path / "x",
        *(f"{name}/{split}/1.jpg" for name in ("bottle", "cable") for split in ("train", "test")),
    )
    with caplog.at_level("WARNING", logger="absl"):
        _both(write("path,label,split\na.jpg,1,train\nb.jpg,1,test\nc.jpg,1,test\nd.jpg,2,train\n"))
        assert len(own_images.read_folder(tmp_path / "x", "all")) == 4
    assert "1 class is in both" in caplog.text
    assert "in classes are no splits" in caplog.text


def test_a_word_for_missing_in_a_list_is_noted_once(write, caplog):
    path = write(
        "path,label,text\na.jpg,NA,none\nb.jpg,bus,a bus\nc.jpg,NA,none\nd.jpg,van,a van\n"
    )
    with caplog.at_level("WARNING"):
        ImageTable.of(_both(path))
    assert caplog.text.count('words for "missing"') == 2


def test_names_are_numbered_in_sorted_order_over_both_splits(write):
    path = write(
        "path,label,split\na.jpg,dog,test\nb.jpg,cat,train\nc.jpg,ant,test\nd.jpg,Ökapi,train\n"
    )
    train, test = _both(path)
    assert train.class_names == {1: "cat", 3: "Ökapi"}
    assert (test.class_names, test.labels.tolist()) == ({0: "ant", 2: "dog"}, [2, 0])
    assert (test.super_labels, test.groups, test.is_query) == (None, None, None)


def test_paths_are_relative_to_the_list_or_absolute(tmp_path, monkeypatch):
    touch(tmp_path, "lists/é, 1/a b.jpg", "elsewhere/b.jpg")
    path = tmp_path / "lists" / "all.csv"
    path.write_text(f'path,label\n"é, 1/a b.jpg",1\n{tmp_path}/elsewhere/b.jpg,2\n')
    train, test = _both(path)
    assert train.images.paths == (f"{tmp_path}/lists/é, 1/a b.jpg",)
    assert test.images.paths == (f"{tmp_path}/elsewhere/b.jpg",)
    monkeypatch.chdir(path.parent)
    assert catalog.load("list", "all.csv").images.paths == ("é, 1/a b.jpg",)


def test_parquet_gives_what_csv_gives(write, tmp_path):
    rows = f"a.jpg,{2**53 + 1},train,\nb.jpg,7,test,query\n./b.jpg,7,test,query\n"
    text = f"path,label,split,role\n{rows}"
    text += "c.jpg,7,test,gallery\n"
    as_csv = _both(write(text))
    assert as_csv[0].labels.tolist() == [2**53 + 1]
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = {name: [row[name] or None for row in rows] for name in rows[0]}
    columns["label"] = [int(label) for label in columns["label"]]
    columns["roles"] = ["another column"] * len(rows)
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    for found, expected in zip(_both(tmp_path / "list.parquet"), as_csv, strict=True):
        assert found.images == expected.images
        assert found.class_names == expected.class_names
        np.testing.assert_array_equal(found.labels, expected.labels)
        np.testing.assert_array_equal(found.is_query, expected.is_query)


def test_roles_alone_are_splits(write):
    path = write(
        "path,label,role\na.jpg,1,query\nb.jpg,1,gallery\nc.jpg,2,gallery\nd.jpg,2,query\ne.jpg,-1,junk\n"
    )
    test = own_images.read_list(path, "test")
    assert test.is_query.tolist() == [True, False, False, True]
    assert _names(catalog.load("list", path, "query")) == ["a.jpg", "d.jpg"]
    assert _names(catalog.load("list", path, "gallery")) == ["b.jpg", "c.jpg"]
    with pytest.raises(UserError, match=r"list\.csv has no row of the train split"):
        own_images.read_list(path)
    train, test = _both(
        write("path,label,role\na.jpg,1,Train\nf.jpg,1,\nb.jpg,2,query\nc.jpg,2,gallery\n")
    )
    assert (_names(train), train.is_query, test.is_query.tolist()) == (
        ["a.jpg", "f.jpg"],
        None,
        [True, False],
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize(
    ("start", "end"),
    [("", "\n"), ("\ufeff", "\r\n"), ("sep={}\n", "\n"), ('\ufeff"sep={}"\r\n', "\r\n")],
)
def test_every_way_that_a_spreadsheet_or_pandas_writes_a_list(write, delimiter, start, end):
    rows = [["", "Unnamed: 0", " Label ", "PATH", "Super Label", "Split", "color"]]
    rows += [["0", "7", " x, y ", " a.jpg", "s;t", "Train", "red"], [" "] * 7]
    rows += [["1", "8", 'say "é"', "b.jpg", "s;t", "test", "blue"]]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(rows)
    path = write(start.format(delimiter) + text.getvalue())
    train, test = _both(path)
    assert (_names(train), train.class_names, test.class_names) == (
        ["a.jpg"],
        {1: "x, y"},
        {0: 'say "é"'},
    )
    assert train.super_labels.tolist() == [0]


def _forms(text):
    return [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]


@pytest.mark.parametrize("on_disk", [0, 1])
@pytest.mark.parametrize("in_list", [0, 1])
def test_names_in_either_unicode_form_are_one(tmp_path, on_disk, in_list):
    touch(tmp_path, f"{_forms('é')[on_disk]}/{_forms('ñ')[on_disk]}.jpg", "b.jpg", "c.jpg")
    path = tmp_path / "list.csv"
    labels = _forms("café")
    name = f"{_forms('é')[in_list]}/{_forms('ñ')[in_list]}.jpg"
    path.write_text(
        f"path,label,split\n{name},{labels[0]},train\nb.jpg,{labels[1]},train\nc.jpg,x,test\n"
    )
    (tmp_path / "pairs.csv").write_text(
        f"a,b,similar\n{_forms('é')[1 - in_list]}/{_forms('ñ')[in_list]}.jpg,b.jpg,1\n"
    )
    train = own_images.read_list(path, pairs="pairs.csv")
    assert train.class_names == {0: labels[0]}
    assert os.path.exists(train.images.paths[0])
    assert train.pairs.rows.tolist() == [[0, 1]]


def test_pairs_of_queries_and_gallery_have_junk(write):
    path = write(
        "path,role\na.jpg,query\nb.jpg,gallery\nc.jpg,gallery\nd.jpg,query\ne.jpg,gallery\n"
    )
    write("a,b,similar\na.jpg,b.jpg,1\na.jpg,c.jpg,Junk\nd.jpg,e.jpg,1\n", "pairs.csv")
    test = own_images.read_list(path, "test", pairs="pairs.csv")
    # The query a.jpg is nearest to its junk, then to b.jpg.
    points = np.array([[0.0], [2.0], [1.0], [9.0], [8.0]])
    metrics = evaluate_dataset(points, test, metrics=["recall@1", "map"])
    assert (metrics["recall@1"], metrics["map"], metrics["num_queries"]) == (1, 1, 2)
    path = write(
        "path,role,label\na.jpg,query,1\nb.jpg,gallery,1\nc.jpg,gallery,2\nd.jpg,query,2\ne.jpg,gallery,2\n"
    )
    with pytest.raises(
        UserError, match=r"pairs\.csv has junk, which a list with the column label cannot use"
    ):
        own_images.read_list(path, "test", pairs="pairs.csv")


def test_repeated_rows_are_dropped(write):
    path = write("path,label\na.jpg,1\nb.jpg,2\na.jpg,1\n./a.jpg,1\n")
    assert _names(own_images.read_list(path)) == ["a.jpg"]
    path.write_text(f"{path.read_text()}{path.with_name('a.jpg')},3\n")
    with pytest.raises(UserError, match="two values of label"):
        own_images.read_list(path)


ROLES = "path,label,split,role\nf.jpg,9,train,\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.jpg,1\n\nb.jpg,\n", "column label, line 4: is empty"),
        ("path,label,split\na.jpg,1,train\nb.jpg,2,x\n", "line 3: split"),
        (
            "path,label\na.jpg,1\nb.jpg,9223372036854775808\n",
            "line 3: label must be an integer of 64 bits",
        ),
        (
            "path,label\na.jpg,1\nb.jpg,2\na.jpg,3\n",
            "line 2 and line 4: .* has two values of label",
        ),
        ("path,label,split\na.jpg,1,test\nb.jpg,2,test\n", "train split"),
        (
            "path,label\na.jpg,1\nno.jpg,1\nnone.jpg,1\nb.jpg,2\n",
            r"2 of 3 images are missing, .*/no\.jpg",
        ),
        (ROLES + "a.jpg,1,test,query\nb.jpg,1,test,\n", "line 4: .* role"),
        (ROLES + "e.jpg,9,train,query\na.jpg,1,test,query\n", "line 3: .* role"),
        (ROLES + "a.jpg,2,test,gallery\nb.jpg,1,test,query\n", "line 4: no query"),
        (b"path,label\na.jpg,1\n\xff\xfe,2\n", "UTF-8"),
        ('{"path": "a.jpg", "label": 1}\n' + "[" * 100_000, "line 2: .* JSON"),
    ],
)
def test_a_faulty_list_names_file_and_line(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=message):
        own_images.read_list(path)


def test_folders_and_lists_on_a_remote_file_system():
    root = "memory://folder-test"
    for file in ("a/1.jpg", "a/.hidden/2.jpg", "a/deep/3.jpg", "b/1.jpg"):
        write_whole(f"{root}/{file}", b"x")
    dataset = own_images.read_folder(root, "train")
    assert dataset.images.paths == (f"{root}/a/1.jpg", f"{root}/a/deep/3.jpg")
    assert dataset.class_names == {0: "a"}
    root = "memory://listing-test"
    for name, data in (
        ("in/a.jpg", "x"),
        ("b.jpg", "x"),
        ("list.csv", f"path,label\nin/a.jpg,1\n{root}/b.jpg,2\n"),
    ):
        write_whole(f"{root}/{name}", data.encode())
    train, test = _both(f"{root}/list.csv")
    assert (train.images.paths, test.images.paths) == ((f"{root}/in/a.jpg",), (f"{root}/b.jpg",))


_CELL = st.sampled_from(
    ["a.jpg", "b.jpg", "c.jpg", "1", "2", "x", "train", "test", "query", "gallery", "", '"', "\0"]
)


@settings(max_examples=100, deadline=None)
@given(
    header=st.sampled_from(
        ["", "path,label\n", "path,label,split,role\n", "path,label,super_label\n", '{"path": "']
    ),
    body=st.binary(max_size=30)
    | st.lists(st.lists(_CELL, min_size=2, max_size=4).map(",".join), max_size=5).map(
        lambda r: "\n".join(r).encode()
    ),
    suffix=st.sampled_from([".csv", ".jsonl"]),
    split=st.sampled_from(["train", "test"]),
)
def test_any_bytes_are_read_or_refused_in_one_line(header, body, suffix, split):
    with tempfile.TemporaryDirectory() as folder:
        touch(folder, "a.jpg", "b.jpg", "c.jpg")
        path = Path(folder, "list" + suffix)
        path.write_bytes(header.encode() + body)
        try:
            dataset = own_images.read_list(path, split)
        except UserError as error:
            message = str(error)
        else:
            assert set(_names(dataset)) <= {"a.jpg", "b.jpg", "c.jpg"}
            assert set(dataset.class_names) == set(dataset.labels.tolist())
            return
    assert len(message.splitlines()) == 1
    assert message.startswith("list: ")
    assert message.isprintable()


LISTED = "path,split,id\na.jpg,train,one\nb.jpg,train,two\nc.jpg,train,three\nd.jpg,train,four\n"
LISTED += "e.jpg,test,five\nf.jpg,test,six\n"
GIVEN = [
    ("a.jpg", "two", True),
    ("./c.jpg", "b.jpg", False),
    ("e.jpg", "six", True),
    ("a.jpg", "f.jpg", False),
]


def test_pairs_of_a_list_are_by_path_or_id_and_stay_within_a_split(write):
    path = write(LISTED)
    write("a,b,similar\n" + "".join(f"{a},{b},{int(same)}\n" for a, b, same in GIVEN), "pairs.csv")
    train, test = _both(path, pairs="pairs.csv")
    assert train.pairs.scored().tolist() == [[0, 1, 1], [1, 2, 0]]
    assert test.pairs.scored().tolist() == [[0, 1, 1]]
    assert train.targets.tolist() == [0, 1, 2, 3]
    # Similar pairs link images to classes, and are what is right for a query.
    assert len({*train.labels[:2]}) == 1
    assert train.num_classes == 3
    assert {*train.protocol.lists[0]} == {0, 1, 4, 5}
    taken = train.take([2, 1, 3])
    assert taken.pairs.rows.tolist() == [[0, 1]]
    assert taken.pairs.is_similar.tolist() == [0]


def test_triplets_of_a_list_and_pairs_that_are_none(write):
    path = write(LISTED)
    write("anchor,positive,negative\na.jpg,b.jpg,c.jpg\nb.jpg,a.jpg,d.jpg\n", "triplets.csv")
    train = own_images.read_list(path, pairs="triplets.csv")
    assert train.pairs.rows.tolist() == [[0, 1, 2], [1, 0, 3]]
    assert train.pairs.scored().tolist() == [[0, 1, 1], [0, 2, 0], [1, 3, 0]]
    for rows, message in (
        ("a.jpg,g.jpg,1", "line 2: b must be"),
        ("a.jpg,b.jpg,1\nb.jpg,a.jpg,0", "similar and not"),
    ):
        write(f"a,b,similar\n{rows}\n", "pairs.csv")
        with pytest.raises(UserError, match=message):
            own_images.read_list(path, pairs="pairs.csv")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_label_sets_of_a_list_are_rows_of_0_and_1(write, kind):
    sets = [["cat", "pet"], ["dog", "pet"], [], ["car"]]
    rows = {
        "path": ["a.jpg", "b.jpg", "c.jpg", "d.jpg"],
        "split": ["train"] * 3 + ["test"],
        "labels": sets,
    }
    path = write("", f"list.{kind}")
    if kind == "parquet":
        pq.write_table(pa.table(rows), path)
    elif kind == "jsonl":
        path = write(
            "\n".join(json.dumps({k: rows[k][i] for k in rows}) for i in range(4)), "list.jsonl"
        )
    else:
        path = write(
            "path,split,labels\na.jpg,train,cat|pet\nb.jpg,train,dog | "
            "pet\nc.jpg,train,\nd.jpg,test,car\n"
        )
    train, test = _both(path)
    assert train.label_rows.tolist() == [[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert test.label_rows.tolist() == [[1, 0, 0, 0]]
    assert train.targets is train.label_rows
    assert [train.class_names[label] for label in train.labels] == ["cat", "dog", ""]


def test_levels_of_a_list_are_learned_and_measured(write):
    path = write("path,split,label,super_label\na.jpg,train,1,0\nb.jpg,train,2,0\nc.jpg,test,3,1\n")
    train = own_images.read_list(path, levels=True)
    assert train.targets.tolist() == train.protocol.levels.tolist() == [[1, 0], [2, 0]]
    path = write(
        "path,split,labels\na.jpg,train,500|fiat|car\nb.jpg,train,fury|bus\nc.jpg,test,500|fiat|car\n"
    )
    with pytest.raises(UserError, match="line 3: labels has 2 levels and 3 in the first line"):
        own_images.read_list(path, levels=True)
    path = write(
        "path,split,labels\na.jpg,train,500|fiat|car\nb.jpg,train,fury|audi|car\nc.jpg,test,90|fiat|car\n"
    )
    train = own_images.read_list(path, levels=True)
    assert train.targets.tolist() == train.protocol.levels.tolist() == [[0, 1, 0], [2, 0, 0]]
    assert (train.labels.tolist(), train.super_labels.tolist(), train.class_names[2]) == (
        [0, 2],
        [1, 0],
        "fury",
    )
    with pytest.raises(
        UserError, match=r"levels=true needs a column labels or super_label, and .* has neither"
    ):
        own_images.read_list(write("path,split,label\na.jpg,train,1\nb.jpg,test,2\n"), levels=True)


@pytest.mark.parametrize(
    "written", ["photos//", "photos/.", "./photos", "photos/", "photos/../photos", "./photos//."]
)
def test_a_folder_is_the_same_however_it_is_written(written, tmp_path, monkeypatch):
    touch(tmp_path / "photos", "train/a/1.jpg", "train/a/2.jpg", "test/b/1.jpg", "x.jpg")
    monkeypatch.chdir(tmp_path)
    for read in (own_images.read_folder, functools.partial(catalog.load, "folder")):
        train = read(written)
        assert train.images.paths == ("photos/train/a/1.jpg", "photos/train/a/2.jpg")
        assert train.class_names == {0: "a"}


def test_a_folder_behind_a_link_is_not_another(tmp_path):
    touch(tmp_path, "there/a/1.jpg", "there/b/1.jpg", "here/c/1.jpg", "here/d/1.jpg", "there/in/x")
    (tmp_path / "link").symlink_to(tmp_path / "there" / "in")
    dataset = own_images.read_folder(f"{tmp_path}/link/..", "all")
    assert sorted(dataset.class_names.values()) == ["a", "b"]


@pytest.mark.parametrize("written", ["memory://slash-test/", "memory://slash-test//"])
def test_a_folder_of_a_store_is_the_same_with_slashes_at_its_end(written):
    for file in ("a/1.jpg", "b/1.jpg", "c.jpg"):
        write_whole(f"memory://slash-test/{file}", b"x")
    assert own_images.read_folder(written, "all").class_names == {0: "a", 1: "b"}


SYSTEM_FOLDERS = (
    "#recycle",
    "#snapshot",
    "@eaDir",
    "@Recycle",
    "@Recently-Snapshot",
    "$RECYCLE.BIN",
    "lost+found",
    "System Volume Information",
    "__MACOSX",
)


def test_folders_of_systems_are_no_classes_and_are_counted(tmp_path, caplog):
    touch(tmp_path, "a/1.jpg", "b/1.jpg", "a/Thumbs.db", "a/@eaDir/1.jpg", ".Trash-1000/a/1.jpg")
    for folder in SYSTEM_FOLDERS:
        touch(tmp_path, f"{folder}/1.jpg", f"{folder}/c/2.jpg")
    with caplog.at_level("WARNING", logger="absl"):
        datasets = [own_images.read_folder(tmp_path, split) for split in ("train", "test", "all")]
    assert datasets[-1].class_names == {0: "a", 1: "b"}
    assert caplog.text.count(": left out ") == 1
    assert f"{len(SYSTEM_FOLDERS) + 1} system folder, 1 hidden" in caplog.text

    assert image_files.images_named("queries", str(tmp_path)) == [
        str(tmp_path / name) for name in ("a/1.jpg", "b/1.jpg")
    ]
    caplog.clear()
    with caplog.at_level("WARNING", logger="absl"):
        paths = image_files.images_named("queries", f"{tmp_path}/**/1.jpg")
    assert paths == [str(tmp_path / name) for name in ("a/1.jpg", "b/1.jpg")]
    assert "in a hidden or system folder" in caplog.text
    # A folder that a pattern names itself is wanted.
    assert len(image_files.images_named("queries", f"{tmp_path}/#recycle/*.jpg")) == 1


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "npz"])
def test_paths_of_lists_keep_their_spaces_in_every_format(kind, tmp_path):
    touch(tmp_path, "a.jpg", "b.jpg ", "c.jpg")
    columns = {"path": ["a.jpg", "b.jpg ", "c.jpg"], "label": ["bus", "van ", "x"]}
    columns["split"] = ["train", "train", "test"]
    path = write_table(tmp_path / f"list.{kind}", columns)
    train = own_images.read_list(path)
    assert _names(train) == ["a.jpg", "b.jpg "]
    assert sorted(train.class_names.values()) == ["bus", "van"]
    write_table(path, {**columns, "path": ["a.jpg ", "b.jpg ", "c.jpg"]})
    with pytest.raises(UserError, match=r"first '.*/a\.jpg '; did you mean '.*/a\.jpg'\?"):
        own_images.read_list(path)


def test_boxes_of_a_photo_are_images_of_their_own(tmp_path, write):
    rows = "photo.jpg,1,0,0,8.0,9\nphoto.jpg,1,2,3,9,9\nphoto.jpg,2,,,,\nphoto.jpg,1,0,0,8,9\n"
    touch(tmp_path, "photo.jpg")
    path = write(f"path,label,x1,y1,X_2,y2\n{rows}")
    dataset = own_images.read_list(path, "train")
    assert _names(dataset) == ["photo.jpg#xywh=0,0,8,9", "photo.jpg#xywh=2,3,7,6"]
    assert _names(own_images.read_list(path, "test")) == ["photo.jpg"]
    parquet = tmp_path / "list.parquet"
    boxes = {"x1": [0, 2, None], "y1": [0, 3, None], "x2": [8, 9, None], "y2": [9.0, 9.0, None]}
    columns = {"path": ["photo.jpg"] * 3, "label": [1, 1, 2], **boxes}
    pq.write_table(pa.table(columns), parquet)
    assert own_images.read_list(parquet, "train").names == dataset.names


@pytest.mark.parametrize(
    "box", ["8,0,8,9", "9,0,8,9", "0,0,8,", "nan,0,8,9", "-1,0,8,9", "0.5,0,8,9", "1e1,0,80,9"]
)
def test_boxes_that_are_none_are_counted_and_named(write, box):
    path = write(f"path,label,x1,y1,x2,y2\na.jpg,1,0,0,1,1\na.jpg,1,{box}\nb.jpg,2,{box}\n")
    with pytest.raises(UserError, match=f"line 3: 2 of 3 boxes are none, the first is '{box}'"):
        own_images.read_list(path)


def test_boxes_without_a_column_or_with_one_of_another_form_are_refused(write):
    with pytest.raises(UserError, match="line 2: 1 of 1 boxes are none, the first is '1,2,3,'"):
        own_images.read_list(write("path,label,x1,y1,x2\na.jpg,1,1,2,3\n"))
    with pytest.raises(UserError, match="a column 'xmin': call it 'x1'"):
        own_images.read_list(write("path,label,xmin\na.jpg,1,1\n"))
