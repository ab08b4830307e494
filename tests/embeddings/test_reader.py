"""Stored embeddings are read from Parquet, .npz and .npy files; crafted and damaged files are refused in one line."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embeddings.test_writer import EMBEDDINGS, table, write
from tfdml.data import EncodedImages, ImageDataset
from tfdml.embeddings.reader import ImageTable, StoredEmbeddings, holds_embeddings, read_embeddings, read_names
from tfdml.errors import UserError
from tfdml.retrieval.exact import is_memory_mapped


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "x")
    return tmp_path / "x"


def change(path, **values):
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def refused(look, says):
    with pytest.raises(UserError, match=says) as error:
        look()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *(({key: "gone"}, f"key {key} must be") for key in ("count", "dimension", "identity", "files")),
        ({"identity": []}, "its key identity must be dict"),
        ({"count": 2**70}, "manifest.json states"),
        ({"files": {"../../etc/passwd": {}}}, "names a file outside its folder"),
        ({"files": {"/etc/passwd": {}}}, "names a file outside its folder"),
        ({"dataset": 3}, "its key (dataset|model) must be dict"),
        ({"model": "x"}, "its key (dataset|model) must be dict"),
    ],
)
def test_a_malformed_manifest_is_refused(values, says, folder):
    change(folder / "manifest.json", **values)
    refused(lambda: read_embeddings(folder), says)


def npy(header):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000)}"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-6, 3)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (6, 3)}"),
        npy("(" * 90),
        npy("{'descr': " + "-" * 90),
        b"\x93NUMPY\x09\x00",
        b"",
    ],
)
def test_arrays_that_lie_are_refused(content, tmp_path):
    (tmp_path / "x.npy").write_bytes(content)
    refused(lambda: read_embeddings(tmp_path / "x.npy"), r"x\.npy cannot be read|must be numbers")


def test_folders_that_are_not_what_their_manifest_says(folder):
    change(folder / "manifest.json", count=11)
    refused(lambda: read_embeddings(folder), "states 11 images, the files hold 10")
    change(folder / "manifest.json", files={})
    refused(lambda: read_embeddings(folder), "lists no Parquet file")
    change(folder / "manifest.json", files={"part-000009.parquet": {}})
    refused(lambda: read_names(folder), r"part-000009\.parquet cannot be read as Parquet")
    change(folder / "manifest.json", version=1)
    refused(lambda: read_embeddings(folder), "is of version 1 of the format")


def test_an_array_is_memory_mapped(tmp_path):
    np.save(tmp_path / "x.npy", EMBEDDINGS)
    stored = read_embeddings(tmp_path / "x.npy")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    assert is_memory_mapped(stored.embeddings)
    assert (stored.labels, stored.roles, stored.is_query) == (None, None, None)
    refused(lambda: read_embeddings(tmp_path / "nowhere.npy"), r"nowhere\.npy cannot be read as \.npy: No such file")


def test_names_of_files_without_a_manifest(folder, tmp_path):
    shutil.copyfile(folder / "part-000001.parquet", tmp_path / "y.parquet")
    assert read_names(tmp_path / "y.parquet") == table().names[4:8]
    (folder / "manifest.json").unlink()
    assert read_names(folder) == table().names


def test_splits_stay_mapped_where_they_lie_together(tmp_path):
    roles = ["train"] * 3 + ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery"]
    write(tmp_path / "x", images=table(roles=roles))
    stored = read_embeddings(tmp_path / "x")
    np.save(tmp_path / "x.npy", EMBEDDINGS)
    stored = dataclasses.replace(stored, embeddings=read_embeddings(tmp_path / "x.npy").embeddings)
    test = stored.split("test")
    np.testing.assert_array_equal(test.embeddings, EMBEDDINGS[3:])
    assert is_memory_mapped(test.embeddings)
    np.testing.assert_array_equal(test.is_query, [True, False, False, True, False, False, False])
    np.testing.assert_array_equal(test.labels, np.arange(3, 10) // 2)
    train = stored.split("train")
    assert len(train) == 3
    assert train.is_query is None
    write(tmp_path / "y")
    with pytest.raises(UserError, match="no train images, only test"):
        read_embeddings(tmp_path / "y").split("train")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_splits_in_any_order_have_their_rows(data):
    roles = data.draw(st.lists(st.sampled_from(["train", "query", "gallery"]), min_size=1, max_size=12))
    stored = StoredEmbeddings(
        "x", np.arange(float(len(roles)))[:, None], np.arange(len(roles)), np.array(roles), tuple(map(str, roles))
    )
    for name in ("train", "test"):
        rows = [i for i, role in enumerate(roles) if (role == "train") == (name == "train")]
        if rows:
            part = stored.split(name)
            assert part.embeddings.ravel().tolist() == rows
            assert part.labels.tolist() == rows
            assert part.names == tuple(roles[i] for i in rows)


def test_archives_from_elsewhere(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=EMBEDDINGS.astype(np.float64), labels=list("aabbccddee"))
    stored = read_embeddings(tmp_path / "x.npz")
    assert stored.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert stored.split("test") is stored
    query = np.arange(10) < 4
    np.savez(tmp_path / "y.npz", embeddings=EMBEDDINGS, labels=np.arange(10), is_query=query)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "y.npz").is_query, query)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"labels": np.arange(3)}, "no array embeddings; it holds labels"),
        ({}, "no array embeddings; it is empty"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(9)}, r"10 embeddings but labels of shape \(9,\)"),
        ({"embeddings": EMBEDDINGS, "labels": np.full(10, 0.5)}, "labels must be integers"),
        ({"embeddings": EMBEDDINGS[0], "labels": np.arange(3)}, r"must be numbers .* \(3,\)"),
        ({"embeddings": EMBEDDINGS[:0], "labels": np.arange(0)}, r"must be numbers \(N, d\), not"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(10), "is_query": np.arange(10)}, "is_query must be bool"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(10), "roles": ["best"] * 10}, "unknown role 'best'"),
        ({"embeddings": np.array([{}] * 3, object)}, "cannot be read"),
    ],
)
def test_archives_that_are_not_embeddings(arrays, says, tmp_path):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=says):
        read_embeddings(tmp_path / "x.npz")


def test_files_that_are_no_archives(tmp_path):
    for data in (b"", b"text", b"PK\x03\x04 cut short"):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(UserError, match=r"cannot be read as \.npz"):
            read_embeddings(tmp_path / "x.npz")
    with pytest.raises(UserError, match="No such file"):
        read_embeddings(tmp_path / "nowhere.npz")


def test_what_holds_embeddings(tmp_path):
    write(tmp_path / "x")
    write(tmp_path / "y", stop_after=1)
    assert holds_embeddings(tmp_path / "x")
    assert holds_embeddings(tmp_path / "y")
    assert holds_embeddings(tmp_path / "vectors.npz")
    assert not holds_embeddings(tmp_path)
    stored = read_embeddings(tmp_path / "x" / "manifest.json")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)


def test_names_are_relative_to_the_data(tmp_path):
    from tfdml.data import FileImages, ImageDataset

    paths = (str(tmp_path / "a" / "1.jpg"), str(tmp_path / "b" / "2.jpg"), "/elsewhere/3.jpg")
    query = ImageDataset("x", "test", FileImages(paths), [0, 1, 1], {0: "a", 1: "b"}, is_query=[True, False, True])
    train = ImageDataset("x", "train", FileImages(paths[:1]), [7], {7: "seven"})
    for directory in (tmp_path, str(tmp_path) + "/", tmp_path / "list.csv"):
        table = ImageTable.of([train, query], directory)
        assert table.names == ("a/1.jpg", "a/1.jpg", "b/2.jpg", "/elsewhere/3.jpg")
    assert table.roles.tolist() == ["train", "query", "gallery", "query"]
    assert table.labels.tolist() == [7, 0, 1, 1]
    assert table.class_names == {7: "seven", 0: "a", 1: "b"}
    assert ImageTable.of([train, query]).names[0] == paths[0]


def test_splits_that_number_their_classes_in_two_ways_are_refused():
    sides = [
        ImageDataset(name, "test", EncodedImages((b"",), ("0.jpg",)), [0], {0: name}) for name in ("leopards", "pizza")
    ]
    refused(lambda: ImageTable.of(sides), "class id 0 is leopards in one split and pizza in another")
    assert ImageTable.of(sides[:1] * 2).class_names == {0: "leopards"}
