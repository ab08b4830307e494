"""Which images a pattern or a list names."""

import glob
import itertools
import os

import pytest

from tfdml.cluster import inputs
from tfdml.errors import UserError
from tfdml.io import files

pa = pytest.importorskip("pyarrow", reason="pip install 'tfdml[ray]'")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = ["a.jpg", "b.JPG", "note.txt", "x/c.jpg", "x/y/d.png", "x/y/e.jpg", "z (1)/f%20#.jpg", "xx/g.jpg"]


@pytest.fixture
def tree(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "*.jpg",
        "**/*.jpg",
        "x/**/*",
        "x/*",
        "*/*.jpg",
        "?.jpg",
        "**/y/*",
        "x*/*.jpg",
        "**/*(1)/*",
        "*/y/?.png",
        "none/*x",
    ],
)
def test_a_pattern_names_what_the_shell_would(pattern, tree):
    expected = [path for path in glob.glob(f"{tree}/{pattern}", recursive=True) if os.path.isfile(path)]
    if pattern.startswith("none"):
        with pytest.raises(UserError, match="there is no folder"):
            list(files.find(f"{tree}/{pattern}"))
    else:
        assert sorted(files.find(f"{tree}/{pattern}")) == sorted(expected)
        assert list(files.find(f"{tree}/{pattern}")) == list(files.find(f"{tree}/{pattern}"))


def test_relative_patterns_folders_and_single_files(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert list(files.find("x/*.jpg")) == [f"{tree}/x/c.jpg"]
    assert list(files.find("*.jpg")) == [f"{tree}/a.jpg"]
    images = [f"{tree}/{name}" for name in NAMES if name != "note.txt"]
    assert sorted(files.find("x/..", (".jpg", ".png"))) == sorted(images)
    assert list(files.find("note.txt")) == [f"{tree}/note.txt"]
    found = list(itertools.chain.from_iterable(each["path"] for each in inputs.listed("x/*.jpg,a.jpg")))
    assert found == [f"{tree}/x/c.jpg", f"{tree}/a.jpg"]
    with pytest.raises(UserError, match=f"no file or folder {tree}/nowhere"):
        list(files.find("nowhere"))


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_lists_give_paths_labels_and_roles(form, tmp_path):
    rows = {
        "path": ["a.jpg", "/data/b.jpg", "s3://bucket/c d.jpg"],
        "label": ["oak", "ash", "oak"],
        "role": ["query", "gallery", "gallery"],
    }
    source = tmp_path / f"list.{form}"
    if form == "parquet":
        pq.write_table(pa.table({**rows, "width": [1, 2, 3]}), source)
    else:
        lines = [",".join(rows), *(",".join(row) for row in zip(*rows.values(), strict=True))]
        source.write_text("\n".join(lines) + "\n")
    (images,) = inputs.listed(str(source))
    assert images == {
        "path": [f"{tmp_path}/a.jpg", "/data/b.jpg", "s3://bucket/c d.jpg"],
        "label": [1, 0, 1],
        "class": ["oak", "ash", "oak"],
        "role": ["query", "gallery", "gallery"],
    }


@pytest.mark.parametrize(
    ("labels", "ids"), [([7, 3, 7], [7, 3, 7]), (["7", "3", "7"], [7, 3, 7]), (["07", "3", "7"], [0, 1, 2])]
)
def test_integers_are_class_ids(labels, ids, tmp_path):
    pq.write_table(pa.table({"path": ["a", "b", "c"], "label": labels}), tmp_path / "list.parquet")
    (images,) = inputs.listed(str(tmp_path / "list.parquet"))
    assert images["label"] == ids
    assert images["role"] == [None] * 3


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"file": ["a"]}, "no column path; it has file"),
        ({"path": ["a", None]}, "a row has no path"),
        ({"path": ["a", "b"], "label": [1, None]}, "some rows have no label"),
        ({"path": ["a"], "role": ["best"]}, "unknown role 'best'"),
    ],
)
def test_lists_that_are_none(rows, says, tmp_path):
    pq.write_table(pa.table(rows), tmp_path / "list.parquet")
    with pytest.raises(UserError, match=says):
        list(inputs.listed(str(tmp_path / "list.parquet")))


@pytest.mark.parametrize("form", ["pattern", "csv", "parquet"])
def test_many_paths_are_each_listed_once_and_in_order(form, tmp_path, monkeypatch):
    """More than are listed at a time, in parts of another size."""
    paths = [f"/photos/{number}.jpg" for number in range(2 * 65_536 + 5)]
    source = str(tmp_path / f"list.{form}")
    if form == "pattern":
        monkeypatch.setattr(files, "find", lambda *_: paths)
    elif form == "csv":
        (tmp_path / "list.csv").write_text("path\n" + "\n".join(paths) + "\n")
    else:
        pq.write_table(pa.table({"path": paths}), source)
    parts = [part["path"] for part in inputs.in_parts(inputs.listed(source), 50_000)]
    assert [len(part) for part in parts] == [50_000, 50_000, 31_077]
    assert list(itertools.chain.from_iterable(parts)) == paths


def test_files_that_are_no_lists(tmp_path):
    (tmp_path / "list.parquet").write_bytes(b"PAR1")
    (tmp_path / "list.csv").write_bytes(b"path\n\xff\xfe\n")
    for name in ("list.parquet", "list.csv", "nowhere.csv"):
        with pytest.raises(UserError, match="cannot be read"):
            list(inputs.listed(str(tmp_path / name)))
