"""One reader for tables in all formats."""

import csv
import dataclasses
import json
import os
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tfdml import names
from tfdml.errors import UserError
from tfdml.io import tables
from tfdml.io.tables import Column, read_table
from tfdml.names import CLASS, FLAG, ID, PATH, ROLE, TEXT

FORMATS = ("csv", "jsonl", "parquet", "npz")
COLUMNS = {
    "path": Column(PATH),
    "label": Column(CLASS),
    "role": Column(ROLE),
    "group": Column(CLASS),
    "id": Column(ID),
    "text": Column(TEXT),
    "junk": Column(FLAG),
    "score": None,
}


def write_table(path, columns):
    """Write a table in the format of the path's ending."""
    if path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    elif path.suffix == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        np.savez(path, **columns)
    return path


@pytest.fixture(params=FORMATS)
def write(request, tmp_path):
    """Writes a table in one of the formats, and returns its path."""
    return lambda columns: write_table(tmp_path / f"table.{request.param}", columns)


@pytest.fixture
def notes(monkeypatch):
    texts = []
    for module in (names, tables):
        monkeypatch.setattr(module, "warn", texts.append)
    return texts


def read(path, required=()):
    return read_table("list", str(path), COLUMNS, required).columns


def test_names_are_alike_in_every_format(write, notes):
    forms = [unicodedata.normalize(form, "café") for form in ("NFD", "NFC")]
    columns = {
        "path": [f"{forms[0]} ", "a.jpg"],
        "label": [f"{forms[0]} ", forms[1]],
        "role": ["query", "NA"],
        "text": ["two\nlines", "\u2028x\x85y"],
        "group": [7, 8],
    }
    assert read(write(columns)) == {
        "path": [f"{forms[0]} ", "a.jpg"],
        "label": [forms[1], forms[1]],
        "role": ["query", ""],
        "text": ["two\nlines", "x\x85y"],
        "group": ["7", "8"],
    }
    assert any("1 of the classes are written in several ways" in note for note in notes)


@pytest.mark.parametrize(
    ("labels", "note"),
    [(["NA", "bus"], "words for"), (["1", "1.0"], "numbers that others are, too")],
)
def test_words_for_missing_and_numbers_written_twice_are_noted(write, labels, note, notes):
    assert read(write({"label": labels})) == {"label": labels}
    assert [text for text in notes if "column label: 1 of the classes are" in text and note in text]


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_bytes_are_texts_or_refused(kind, tmp_path):
    path = tmp_path / f"table.{kind}"
    write_table(path, {"label": [b"bus", "Omnibüs".encode()], "id": [b"b", b"a"]})
    assert read(path) == {"label": ["bus", "Omnibüs"], "id": ["b", "a"]}
    write_table(path, {"label": [b"bus", "Omnibüs".encode("latin-1")]})
    with pytest.raises(UserError, match=rf"table\.{kind}, column label, row 2: is no UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("columns", "plain"),
    [
        ({"labels": ["a"], "PATHS ": ["b"]}, {"label": ["a"], "path": ["b"]}),
        (
            {"ids": ["a"], "Names": ["b"], "texts": ["c"]},
            {"id": ["a"], "path": ["b"], "text": ["c"]},
        ),
        ({"Label": ["a"], "labels": ["b"]}, {"label": ["a"]}),
        ({"junk": ["1"], "score": ["x"]}, {"junk": ["1"]}),
    ],
)
def test_columns_are_found_by_all_their_spellings(write, columns, plain):
    assert read(write(columns)) == plain


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["path", "is_query"], "has a column 'is_query': call it 'role', or leave it out"),
        (["path", "lable"], "has a column 'lable': call it 'label', or leave it out"),
        (["path", "lables"], "has a column 'lables': call it 'label', or leave it out"),
        (["path", "class"], "has a column 'class': call it 'label', or leave it out"),
        (["path", "paths", "rolle"], "has a column 'rolle': call it 'role'"),
        (["path", "Path"], "column 'path' is twice in 'path', 'Path'"),
        (["names", "paths"], "column 'path' is twice in 'names', 'paths'"),
        (["role"], "has no column path; it has 'role'"),
    ],
)
def test_columns_that_are_nearly_known_twice_or_missing_are_refused(write, columns, message):
    path = write({name: ["1"] for name in columns})
    with pytest.raises(UserError, match=f"list: {path} ?:? ?{message}"):
        read(path, ("path",))


def test_other_columns_are_named(write, notes):
    path = write({"path": ["a"], "paths": ["b"], "idx": ["1"], "color": ["red"]})
    assert read(path) == {"path": ["a"]}
    (note,) = notes
    assert note.startswith(f"list: {path}: other columns than path, label, ")
    assert note.endswith("are ignored: 'paths', 'idx', 'color'")


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"path": ["a", "b"], "label": ["x", " "]}, "column label, {}: is empty"),
        ({"path": ["a", ""], "id": ["1", "2"]}, "column path, {}: is empty"),
        ({"label": ["a", "b\x00c"]}, "column label, {}: must be text without control"),
    ],
)
def test_what_is_no_name_is_refused_with_its_place(write, columns, fault):
    path = write(columns)
    place = "line 3" if path.suffix == ".csv" else "line 2" if path.suffix == ".jsonl" else "row 2"
    with pytest.raises(UserError, match=re.escape(f"list: {path}, {fault.format(place)}")):
        read(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "npz"])
def test_numbers_with_fractions_are_no_names_and_flags_are(kind, tmp_path):
    path = write_table(tmp_path / f"table.{kind}", {"junk": [True, False]})
    assert read(path) == {"junk": ["true", "false"]}
    write_table(path, {"label": [1.5, 2.0]})
    with pytest.raises(UserError, match=r"(row|line) 1: must be a text or an integer, it is 1\.5"):
        read(path)


def test_a_csv_keeps_spaces_of_paths_but_not_those_behind_the_delimiter(tmp_path, notes):
    path = tmp_path / "list.csv"
    path.write_text('path, label\na.jpg, bus\n"b.jpg ", "two\nlines "\n" c.jpg",van\nd.jpg ,\n')
    with pytest.raises(UserError, match="column label, line 3: must be text without control"):
        read(path)
    path.write_text('path, text\na.jpg, bus\n"b.jpg ", "two\nlines "\n" c.jpg",van\nd.jpg ,x\n')
    assert read(path) == {
        "path": ["a.jpg", "b.jpg ", " c.jpg", "d.jpg "],
        "text": ["bus", "two\nlines", "van", "x"],
    }


ARROW = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "large_dictionary": pa.dictionary(pa.uint32(), pa.large_string()),
}


@pytest.mark.parametrize("kind", ARROW)
@pytest.mark.parametrize("coded", [True, False])
def test_texts_of_every_type_of_parquet_are_read(kind, coded, tmp_path):
    texts = ["bus", "van", "bus"]
    values = [text.encode() for text in texts] if kind == "binary" else texts
    table = pa.table({"path": pa.array(["a", "b", "c"]), "label": pa.array(values, ARROW[kind])})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=coded, row_group_size=2)
    assert read(tmp_path / "x.parquet")["label"] == texts


@pytest.mark.parametrize(
    "kind",
    [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda text: pa.list_(text, 2)],
)
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_lists_of_every_type_of_parquet_are_read(kind, text, tmp_path):
    rows = [["cat ", "a|b"], ["dog", "pet"]]
    pq.write_table(pa.table({"labels": pa.array(rows, kind(text))}), tmp_path / "x.parquet")
    columns = {"labels": Column(CLASS, several=True)}
    table = read_table("", str(tmp_path / "x.parquet"), columns)
    assert table.columns == {"labels": [["cat", "a|b"], ["dog", "pet"]]}


def test_parts_of_a_table_are_one_and_rows_are_named_by_part(tmp_path):
    first = {"path": ["a", "b"], "group": [1, None], "label": [2, 3]}
    pq.write_table(pa.table(first), tmp_path / "1.parquet")
    pq.write_table(pa.table({"path": ["c"], "label": [4]}), tmp_path / "2.parquet")
    parts = [str(tmp_path / f"{number}.parquet") for number in (1, 2)]
    group = dataclasses.replace(CLASS, may_be_empty=True)
    columns = {"path": Column(PATH), "label": Column(CLASS, numbers=True), "group": Column(group)}
    table = read_table("", str(tmp_path), columns, parts=parts)
    labels = table.columns.pop("label")
    assert (labels.dtype, labels.tolist()) == (np.int64, [2, 3, 4])
    assert table.columns == {"path": ["a", "b", "c"], "group": ["1", "", ""]}
    with pytest.raises(UserError, match=r"column group, 1\.parquet, row 2: is empty"):
        read_table("", str(tmp_path), COLUMNS, parts=parts)
    pq.write_table(pa.table({"path": ["c", ""], "label": [4, 5]}), tmp_path / "2.parquet")
    with pytest.raises(UserError, match=r"column path, 2\.parquet, row 2: is empty"):
        read_table("", str(tmp_path), columns, parts=parts)


def test_equal_texts_are_one_object_and_large_tables_are_refused(tmp_path, monkeypatch):
    column = pa.DictionaryArray.from_arrays(np.zeros(300_000, np.int32), ["x" * 5000])
    table = pa.table({"label": column})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False)
    assert os.path.getsize(tmp_path / "x.parquet") < 100_000
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    labels = read(tmp_path / "x.parquet")["label"]
    pa.set_memory_pool(usual)
    assert len(labels) == 300_000
    assert pool.max_memory() < 2**26
    assert all(label is labels[0] for label in labels)
    monkeypatch.setattr(tables.files, "free_memory", lambda: 4e6)
    with pytest.raises(UserError, match=r"x\.parquet would take 5 MB of memory, of at most 2 MB"):
        read(tmp_path / "x.parquet")


def test_an_npz_states_what_it_may_take(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", path=["a" * 1000, *"b" * 999], other=np.zeros(10**6))
    assert len(read(tmp_path / "x.npz")["path"]) == 1000
    monkeypatch.setattr(tables, "_MOST_OF_FIXED_WIDTH", 10**6)
    with pytest.raises(UserError, match=r"x\.npz, path would take 4 MB .* at most 1 MB: .*Parquet"):
        read(tmp_path / "x.npz")
    monkeypatch.setattr(tables.files, "free_memory", lambda: 4e6)
    with pytest.raises(UserError, match=r"x\.npz would take 4 MB of memory, of at most 2 MB"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"path": ["a"], "label": ["x", "y"]},
            "columns differ in their number of rows: path 1",
        ),
        ({"path": []}, "has no row"),
        ({"path": "a"}, r"path has the shape \(\); give one value for each row"),
        ({"path": [["a"]]}, r"path has the shape \(1, 1\); give one value for each row"),
        ({"path": np.array([{}])}, "cannot be read as .npz: Object arrays"),
    ],
)
def test_arrays_that_are_no_table_are_refused(columns, message, tmp_path):
    np.savez(tmp_path / "x.npz", **{name: np.array(cells) for name, cells in columns.items()})
    with pytest.raises(UserError, match=message):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("kind", ["parquet", "npz"])
@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut short", b"PAR1 cut short"])
def test_damaged_files_are_refused_with_their_name(kind, content, tmp_path):
    path = tmp_path / f"x.{kind}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"list: {path} cannot be read as \.?\w+: ") as raised:
        read(path)
    assert len(str(raised.value).splitlines()) == 1
