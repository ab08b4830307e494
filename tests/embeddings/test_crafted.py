"""Folders of embeddings made to do harm: refused in one line."""

import json
import os

import numpy as np
import pytest

from tfdml.embeddings.image_table import ImageTable
from tfdml.embeddings.reader import read_embeddings
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError

IDENTITY = {"model": "sha256:aa"}


def table():
    return ImageTable(tuple(f"{i}.jpg" for i in range(6)), np.arange(6) // 2, ["test"] * 6)


@pytest.fixture
def folder(tmp_path):
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
        writer.append(np.random.default_rng(0).normal(size=(6, 3)))
        writer.finish()
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
        *(({key: "gone"}, f"has no key {key}") for key in ("count", "dimension", "identity", "files")),
        ({"identity": []}, "its key identity must be an object, not a list"),
        ({"count": 2**70}, "manifest.json states"),
        ({"files": {"../../etc/passwd": {}}}, "names a file outside its folder"),
        ({"files": {"/etc/passwd": {}}}, "names a file outside its folder"),
        ({"dataset": 3}, "dataset and model must be objects"),
        ({"model": "x"}, "dataset and model must be objects"),
    ],
)
def test_a_malformed_manifest_is_refused(values, says, folder):
    change(folder / "manifest.json", **values)
    refused(lambda: read_embeddings(folder), says)


@pytest.mark.parametrize(
    "values",
    [
        *({key: "gone"} for key in ("identity", "rows", "dimension", "sha256")),
        {"rows": "1"},
        {"rows": -1},
        {"rows": 2**70},
        {"dimension": 0},
        {"identity": None},
    ],
)
def test_a_malformed_note_of_progress_is_refused(values, tmp_path):
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
        writer.append(np.ones((2, 3)))
    change(tmp_path / "x" / "progress.json", **values)
    refused(lambda: EmbeddingWriter(tmp_path / "x", IDENTITY, table()).__enter__(), "progress.json.*delete")


def test_deep_json_is_refused(folder):
    (folder / "manifest.json").write_text("[" * 100_000)
    refused(lambda: read_embeddings(folder), "nested more than")


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
@pytest.mark.parametrize("name", ["embeddings.npy", "labels.npy"])
def test_arrays_that_lie_are_refused(name, content, folder):
    (folder / name).write_bytes(content)
    refused(lambda: read_embeddings(folder), rf"{name} cannot be read|must be numbers|labels of shape")


def test_special_files_are_not_opened(folder, tmp_path):
    (folder / "labels.npy").unlink()
    os.mkfifo(folder / "labels.npy")
    refused(lambda: read_embeddings(folder), r"labels\.npy cannot be read: a FIFO, not a regular file")
    os.mkfifo(tmp_path / "fifo.npz")
    refused(lambda: read_embeddings(tmp_path / "fifo.npz"), "cannot be read as .npz: .*a FIFO")
