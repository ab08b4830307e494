"""Embeddings on disk: what is read back is what was written, however often the writer was stopped.

Crafted and damaged files, and those of others that are no embeddings, are refused in one line.
"""

import dataclasses
import json
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.embeddings.folders import write_folder
from tfdml.data import FileImages, ImageDataset
from tfdml.embeddings import files
from tfdml.embeddings.files import (
    EmbeddingFolder,
    ImageTable,
    StoredEmbeddings,
    holds_embeddings,
    read_embeddings,
    table_of,
    write_file,
)
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_dataset
from tfdml.retrieval.exact import is_memory_mapped

IDENTITY = {"model": "sha256:aa", "data": "sha256:bb", "batch_size": 4}
EMBEDDINGS = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
ROLES = ["train"] * 3 + ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery"]


def table(count=10, roles=None):
    names = tuple(f'a folder/ä,"{i}".jpg' for i in range(count))
    return ImageTable(
        names, np.arange(count) // 2, roles or ["test"] * count, {i: f"class {i}" for i in range(5)}
    )


def write(folder, identity=IDENTITY, stop_after=None, images=None):
    """Write the parts of four rows that are missing; stop as a killed process would. How many rows
    were there."""
    target, images = EmbeddingFolder(folder, identity), images or table()
    with target.opened():
        if target.manifest:
            return 10
        begun = target.parts()
        for number, first in enumerate(range(0, 10, 4)):
            if number == stop_after:
                break
            if number not in begun:
                rows = slice(first, first + 4)
                target.write_part(number, images.columns(rows), EMBEDDINGS[rows])
        if stop_after is None:
            target.finish(10, {"view": {"resize": 40}})
        return sum(record.rows for record in begun.values())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change(path, **values):
    value = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: item for key, item in value.items() if item != "gone"}))


def refused(look, says):
    with pytest.raises(UserError, match=says) as error:
        look()
    assert "\n" not in str(error.value)


def test_read_back_as_written(tmp_path):
    write(tmp_path / "x", images=table(roles=ROLES))
    stored = read_embeddings(tmp_path / "x")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    np.testing.assert_array_equal(stored.labels, np.arange(10) // 2)
    assert stored.embeddings.dtype == np.float32
    assert stored.roles.tolist() == ROLES
    assert stored.names == table().names
    np.testing.assert_array_equal(
        read_embeddings(tmp_path / "x" / "manifest.json").embeddings, EMBEDDINGS
    )
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert (manifest["count"], manifest["dimension"], manifest["bad_images"]) == (10, 3, 0)
    assert manifest["identity"] == IDENTITY
    assert manifest["view"] == {"resize": 40}
    assert set(manifest["files"]) == {path.name for path in (tmp_path / "x").iterdir()} - {
        "manifest.json"
    }
    assert [about["rows"] for _, about in sorted(manifest["files"].items())] == [4, 4, 2]
    for name, about in manifest["files"].items():
        assert about["sha256"] == files.files.sha256_of(tmp_path / "x" / name)
    (tmp_path / "x" / "manifest.json").unlink()
    whole = pq.read_table(tmp_path / "x")
    assert whole.schema.field("embedding").type == pa.list_(pa.float32(), 3)
    row = {"id": 3, "path": table().names[3], "label": 1, "class": "class 1", "role": "query"}
    assert whole.slice(3, 1).to_pylist() == [{**row, "embedding": EMBEDDINGS[3].tolist()}]
    assert read_embeddings(tmp_path / "x" / "part-000001.parquet").names == table().names[4:8]


def test_killed_at_any_moment_it_resumes_to_the_same_folder(tmp_path):
    """SIGKILL before each call that changes the disk."""
    write(tmp_path / "whole")
    moment = 1
    while True:
        path = tmp_path / str(moment)
        pid = os.fork()
        if pid == 0:  # it dies without cleaning up
            calls = [0]

            def killing(function, calls=calls, moment=moment):
                def called(*arguments, **options):
                    calls[0] += 1
                    if calls[0] == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*arguments, **options)

                return called

            for name in ("fsync", "replace", "unlink", "remove", "rmdir", "mkdir"):
                setattr(os, name, killing(getattr(os, name)))
            write(path)
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
        before = [name for name in content(path) if name.startswith("part-")]
        assert write(path) == min(4 * len(before), 10)
        assert content(path) == content(tmp_path / "whole")
        moment += 1
    assert moment > 10


def flipped(whole):
    """One byte of the vectors is another."""
    place = whole.index(EMBEDDINGS[5].tobytes())
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


@pytest.mark.parametrize(
    "damage", [None, lambda whole: b"", lambda whole: bytes([whole[0], *whole[2:], 0]), flipped]
)
def test_a_part_that_is_gone_or_damaged_is_written_again(damage, tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "broken", stop_after=2)
    path = tmp_path / "broken" / "part-000001.parquet"
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    assert write(tmp_path / "broken") == 4
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_another_identity_or_writer_is_refused_and_nothing_changes(tmp_path):
    write(tmp_path / "x", stop_after=2)
    refused(lambda: read_embeddings(tmp_path / "x"), "unfinished")
    before = content(tmp_path / "x")
    with EmbeddingFolder(tmp_path / "x", IDENTITY).opened():
        refused(lambda: write(tmp_path / "x"), "another process is writing")
    refused(
        lambda: write(tmp_path / "x", {**IDENTITY, "model": "sha256:cc"}), "model was sha256:aa"
    )
    assert content(tmp_path / "x") == before
    write(tmp_path / "x")
    refused(lambda: write(tmp_path / "x", {**IDENTITY, "data": "other"}), "data was")


def test_a_folder_in_an_object_store():
    path = "memory://embeddings/x"
    assert write(path, stop_after=1) == 0
    assert write(path) == 4
    assert files.files.listing(path) == [
        "manifest.json",
        *(f"part-00000{i}.parquet" for i in range(3)),
    ]


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    refused(lambda: write(tmp_path / "x"), "thesis")
    (tmp_path / "y").mkdir()
    for text in ("{}", "{"):
        (tmp_path / "y" / "manifest.json").write_text(text)
        refused(lambda: write(tmp_path / "y"), "manifest")
    (tmp_path / "z").mkdir()
    pq.write_table(pa.table({"embedding": [[1.0]]}), tmp_path / "z" / "part-000000.parquet")
    refused(lambda: write(tmp_path / "z"), "part-000000")


def test_values_that_are_no_embeddings_and_parts_that_are_missing_are_refused(tmp_path):
    folder, columns = EmbeddingFolder(tmp_path, IDENTITY), table().columns(slice(4, 8))
    broken = EMBEDDINGS[4:8].copy()
    broken[1, 2] = np.nan
    with folder.opened():
        refused(lambda: folder.write_part(0, columns, broken), '"5".jpg holds NaN')
        refused(
            lambda: folder.write_part(0, {**columns, "path": ["a\udcff.jpg"] * 4}, broken),
            "rename the file",
        )
        folder.write_part(1, columns, EMBEDDINGS[4:8])
        refused(lambda: folder.finish(10), "4 embeddings of 10")


def test_groups_are_kept_and_ignored(tmp_path):
    """Of the split that has them; as integers or text; an image without one shares none."""
    labels, cameras = (
        np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2]),
        np.array([5, 5, 7, 5, 7, 7, 9, -1, -1, 5]),
    )
    data = ImageDataset(images=np.zeros((10, 4, 4, 3), np.uint8), labels=labels, groups=cameras)
    train = ImageDataset("images", "train", np.zeros((2, 4, 4, 3), np.uint8), [8, 8])
    options = {"ks": [1, 2], "metrics": ["recall", "map@r", "map"]}
    expected = evaluate_dataset(EMBEDDINGS, data, **options)
    assert expected != evaluate_dataset(
        EMBEDDINGS, dataclasses.replace(data, groups=None), **options
    )
    write_folder(
        tmp_path / "x",
        {},
        ImageTable.of([train, data]),
        np.concatenate([EMBEDDINGS[:2], EMBEDDINGS]),
    )
    whole = pq.read_table(sorted((tmp_path / "x").glob("*.parquet")))
    assert whole["group"].to_pylist() == [None, None, *cameras.tolist()]
    stored = read_embeddings(tmp_path / "x")
    assert stored.split("train").groups is None
    test = stored.split("test")
    assert evaluate_dataset(test.embeddings, test, **options) == expected
    text = {
        "embedding": list(EMBEDDINGS),
        "label": labels,
        "group": [f"camera {i}" for i in cameras],
    }
    pq.write_table(pa.table(text), tmp_path / "text.parquet")
    named = read_embeddings(tmp_path / "text.parquet")
    assert evaluate_dataset(named.embeddings, named, **options) == expected
    pq.write_table(
        pa.table({**text, "group": [None, 1, 1, 1, 1, 2, 2, 2, 2, None]}), tmp_path / "some.parquet"
    )
    assert read_embeddings(tmp_path / "some.parquet").groups.tolist() == [
        -1,
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        -10,
    ]


def test_large_and_plain_arrays_are_memory_mapped(tmp_path, monkeypatch):
    write(tmp_path / "x", images=table(roles=ROLES))
    with monkeypatch.context() as patch:
        patch.setattr(files.files, "free_memory", lambda: 100.0)
        large = read_embeddings(tmp_path / "x")
    np.save(tmp_path / "x.npy", EMBEDDINGS)
    plain = read_embeddings(tmp_path / "x.npy")
    assert (plain.labels, plain.roles, plain.is_query) == (None, None, None)
    for stored in (large, plain, large.split("test")):
        assert is_memory_mapped(stored.embeddings)
        np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS[-len(stored) :])


def test_splits_in_any_order_have_their_rows():
    roles = np.array(["gallery", "train", "query", "train", "gallery"])
    stored = StoredEmbeddings(
        tuple("abcde"), np.arange(5), roles, source="x", embeddings=np.arange(5.0)[:, None]
    )
    for name, rows, is_query in (
        ("train", [1, 3], None),
        ("test", [0, 2, 4], [False, True, False]),
    ):
        part = stored.split(name)
        assert part.embeddings[:, 0].tolist() == part.labels.tolist() == rows
        assert part.names == tuple("abcde"[row] for row in rows)
        assert part.is_query is is_query or part.is_query.tolist() == is_query
    refused(lambda: part.split("train"), "no train images")


def test_classes_of_a_folder_go_by_name_and_rows_in_order_of_the_files(tmp_path):
    """Two files that number their classes each from 0; and one that has names alone, in float64."""
    for number, names in enumerate((["bus", "coupe", "bus"], ["pizza", "bus", "pizza"])):
        columns = {
            "id": range(3),
            "path": [f"{number}/{row}" for row in range(3)],
            "label": [0, 1, 0],
            "class": names,
        }
        write_file(tmp_path / f"{number}.parquet", table_of(columns, np.eye(3, dtype=np.float32)))
    stored = read_embeddings(tmp_path)
    assert stored.classes.tolist() == ["bus", "coupe", "bus", "pizza", "bus", "pizza"]
    assert stored.labels.tolist() == [0, 1, 0, 2, 0, 2]
    one = read_embeddings(tmp_path / "1.parquet")
    assert (one.labels.tolist(), one.class_names) == ([0, 1, 0], {0: "pizza", 1: "bus"})
    assert stored.names == ("0/0", "0/1", "0/2", "1/0", "1/1", "1/2")
    pq.write_table(
        pa.table({"embedding": [[1.0], [0.1]], "label": ["x", "a"]}), tmp_path / "names.parquet"
    )
    plain = read_embeddings(tmp_path / "names.parquet")
    assert (plain.classes.tolist(), plain.roles, plain.names) == (["x", "a"], None, ("0", "1"))
    np.testing.assert_array_equal(plain.embeddings, np.float32([[1.0], [0.1]]))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"vector": [[1.0]]}, "no column embedding"),
        ({"embedding": [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]]}, "as many numbers"),
        ({"embedding": pa.array([], pa.list_(pa.float32(), 2))}, "no row"),
        ({"embedding": [[1.0], [2.0]], "label": [1, None]}, "column label, row 2: is empty"),
        ({"embedding": [[1.0], [2.0]], "role": ["best", "test"]}, "role"),
    ],
)
def test_parquet_that_holds_no_embeddings(columns, says, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    refused(lambda: read_embeddings(tmp_path / "x.parquet"), says)


def npy(header):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_damaged_and_missing_files_are_refused(tmp_path):
    refused(lambda: read_embeddings(tmp_path / "nowhere"), "no embeddings at")
    refused(lambda: read_embeddings(tmp_path), "holds no finished embeddings")
    assert not holds_embeddings(tmp_path)
    assert holds_embeddings(tmp_path / "vectors.npz")
    lies = [
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (6, 3)}"),
        npy("(" * 90),
    ]
    contents = {"npy": lies, "npz": [b"PK\x03\x04 cut short"], "parquet": [b"PAR1 cut short"]}
    for arrays, says in (
        ({"embeddings": EMBEDDINGS, "labels": np.arange(9)}, "columns differ in their number"),
        ({"embeddings": EMBEDDINGS, "labels": np.zeros((10, 2))}, "labels must have shape"),
        ({"embeddings": EMBEDDINGS[0]}, "numbers"),
        ({"embeddings": np.array([{}] * 3, object)}, "cannot be read"),
    ):
        np.savez(tmp_path / "x.npz", **arrays)
        refused(lambda: read_embeddings(tmp_path / "x.npz"), says)
    for suffix, damaged in contents.items():
        path = tmp_path / f"x.{suffix}"
        for data in (*damaged, b"", b"text"):
            path.write_bytes(data)
            refused(lambda path=path: read_embeddings(path), r"cannot be read|must be numbers")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"count": "gone"}, "key count must be"),
        ({"count": 11}, "states 11 images, the files hold 10"),
        ({"files": {"../../etc/passwd": {}}}, "names a file outside its folder"),
        ({"files": {"part-000009.parquet": {}}}, "cannot be read as Parquet: "),
        ({"version": 1}, "not of a folder of embeddings of format version 3"),
    ],
)
def test_folders_that_are_not_what_their_manifest_says(values, says, tmp_path):
    write(tmp_path / "x")
    change(tmp_path / "x" / "manifest.json", **values)
    refused(lambda: read_embeddings(tmp_path / "x"), says)


def test_names_are_relative_to_the_data(tmp_path):
    paths = (str(tmp_path / "a" / "1.jpg"), str(tmp_path / "b" / "2.jpg"), "/elsewhere/3.jpg")
    query = ImageDataset(
        "x", "test", FileImages(paths), [0, 1, 1], {0: "a", 1: "b"}, is_query=[True, False, True]
    )
    train = ImageDataset("x", "train", FileImages(paths[:1]), [7], {7: "seven"})
    for directory in (tmp_path, str(tmp_path) + "/", tmp_path / "list.csv"):
        images = ImageTable.of([train, query], directory)
        assert images.names == ("a/1.jpg", "a/1.jpg", "b/2.jpg", "/elsewhere/3.jpg")
    assert images.roles.tolist() == ["train", "query", "gallery", "query"]
    assert images.labels.tolist() == [7, 0, 1, 1]
    assert images.class_names == {7: "seven", 0: "a", 1: "b"}
    assert ImageTable.of([train, query]).names[0] == paths[0]
    other = dataclasses.replace(train, class_names={7: "pizza"})
    refused(
        lambda: ImageTable.of([train, other]),
        "class id 7 is seven in one split and pizza in another",
    )


KINDS = ["parquet", "npz"]


def write_vectors(path, **columns):
    """Write four vectors and columns as Parquet or .npz."""
    vectors = np.eye(4, dtype=np.float32)
    if path.suffix == ".npz":
        np.savez(path, embeddings=vectors, **columns)
    else:
        pq.write_table(pa.table({"embedding": list(vectors), **columns}), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_files_from_elsewhere_are_read_or_refused_by_name(kind, tmp_path):
    path = tmp_path / f"x.{kind}"
    roles = [True, False, False, True]
    stored = read_embeddings(
        write_vectors(path, Labels=[b"a", b"b ", b"a", b"b"], is_query=roles, names=list("wxyz"))
    )
    assert stored.classes.tolist() == ["a", "b", "a", "b"]
    assert stored.roles.tolist() == ["query", "gallery", "gallery", "query"]
    assert stored.names == tuple("wxyz")
    assert read_embeddings(write_vectors(path, ids=[7, 8, 9, 5])).names == tuple("7895")
    for column, says in (
        ("lable", "'lable': call it 'label'"),
        ("is_gallery", "'is_gallery': call it 'role'"),
        ("split", "'split': call it 'role'"),
    ):
        write_vectors(path, **{column: list("abcd")})
        refused(lambda: read_embeddings(path), says)
    both = write_vectors(path, role=["test"] * 4, is_query=roles)
    refused(lambda: read_embeddings(both), "has the columns role and is_query: leave out one")
    write_vectors(path, role=["test", "best", "test", "test"])
    refused(lambda: read_embeddings(path), r"row 2: role must be one of .* it is 'best'")
    write_vectors(path, label=[0.5, 1, 2, 3])
    refused(lambda: read_embeddings(path), rf"x\.{kind}: .*0\.5 is not a whole number")


@pytest.mark.parametrize("name", ["part-2", "2.pq", "2.PARQUET", "below/2.parquet"])
def test_a_folder_whose_parts_would_be_read_by_half_is_refused(name, tmp_path):
    (tmp_path / "below").mkdir()
    write_vectors(tmp_path / "1.parquet")
    assert len(read_embeddings(tmp_path)) == 4
    (tmp_path / name).write_bytes((tmp_path / "1.parquet").read_bytes())
    refused(lambda: read_embeddings(tmp_path), f"1 Parquet files would be left out, such as {name}")


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda t: pa.list_(t, 2)]
)
@pytest.mark.parametrize("number", [pa.float16(), pa.float64(), pa.int8()])
def test_vectors_of_every_type_of_parquet_are_read(kind, number, tmp_path):
    vectors = pa.array([[1, 2], [3, 4], [5, 6]], kind(number))
    pq.write_table(pa.table({"Embeddings": vectors}), tmp_path / "x.parquet")
    assert read_embeddings(tmp_path / "x.parquet").embeddings.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_vector_that_is_missing_is_refused_with_the_name_of_its_file(tmp_path):
    pq.write_table(pa.table({"embedding": [[1.0], None]}), tmp_path / "x.parquet")
    refused(lambda: read_embeddings(tmp_path / "x.parquet"), r"x\.parquet: embedding must be a li")
