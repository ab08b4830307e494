"""Record folders made to do harm, or damaged beyond what checksums tell: refused in one line, nothing else read."""

import copy
import hashlib
import io
import json
import os

import numpy as np
import pytest

from tests.data.preparations import made, picture
from tfdml.data import load
from tfdml.data.checking import check
from tfdml.data.images import EncodedImages
from tfdml.data.images.faults import diagnose
from tfdml.data.pipeline import evaluation_batches, explain_failure
from tfdml.data.records import RecordSettings, find_faults, prepare
from tfdml.data.records.reader import read_manifest, verify
from tfdml.errors import UserError

EVIL = "../secret.txt"


@pytest.fixture
def folder(tmp_path):
    images = EncodedImages(tuple(picture(seed, kind="PNG") for seed in range(6)), tuple(f"photo{i}" for i in range(6)))
    prepare({"train": made(images, np.arange(6) // 2)}, tmp_path / "records", RecordSettings(shard_mb=0.008))
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "records"


def rewrite(folder, change):
    """The manifest, changed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def retold(folder, entry, data):
    """A file with other bytes, and the manifest's entry such that it fits."""
    (folder / entry["file"]).write_bytes(data)
    entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def refused(folder, says):
    for look in (lambda: load("records", folder), lambda: verify(str(folder))):
        with pytest.raises(UserError, match=says) as error:
            look()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["table", "shard", "index"])
@pytest.mark.parametrize("name", [EVIL, "/etc/passwd", "gs://bucket/x"])
def test_a_name_outside_the_folder_is_not_opened(where, name, folder, monkeypatch):
    def change(manifest):
        train = manifest["splits"]["train"]
        entry = {"table": train["table"], "shard": train["shards"][1], "index": train["shards"][1]["index"]}[where]
        entry["file"] = name

    rewrite(folder, change)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    refused(folder, "names a file outside its folder")
    assert not opened


def without(*path):
    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return change


def putting(value, *path):
    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = copy.deepcopy(value)

    return change


TRAIN = ("splits", "train")
SHARD = (*TRAIN, "shards", 0)


@pytest.mark.parametrize(
    "change",
    [
        *(without(*path) for path in (("dataset",), ("splits",), (*TRAIN, "images"), (*TRAIN, "table"))),
        *(without(*path) for path in ((*TRAIN, "shards"), (*TRAIN, "class_names"), (*SHARD, "file"))),
        *(without(*path) for path in ((*SHARD, "bytes"), (*SHARD, "index"), (*SHARD, "index", "sha256"))),
        *(putting(value, *TRAIN) for value in (None, [], 3)),
        *(putting(value, *TRAIN, "shards") for value in (None, {}, [None], ["a"], [[]])),
        *(putting(value, *SHARD, "bytes") for value in (None, "7", 1e9, True)),
        *(putting(value, *TRAIN, "class_names") for value in ([], {"a": "b"}, {"0": 0}, {"9" * 5000: "a"}, {"1": "a"})),
        putting(-1, *TRAIN, "images"),
        putting([], *TRAIN, "shards"),
        putting(3, "dataset"),
    ],
)
def test_a_malformed_manifest_is_refused(change, folder):
    rewrite(folder, change)
    with pytest.raises(UserError) as error:
        load("records", folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "change",
    [
        {"labels": None},
        {"names": None},
        {"name_ends": None},
        {"labels": np.zeros(6)},
        {"labels": np.zeros((6, 1), np.int64)},
        {"labels": np.full(6, 99)},
        {"labels": np.array([{}] * 6, object)},
        {"name_ends": np.array([1, 2, 3, 4, 5, 10**9])},
        {"name_ends": np.array([9, 8, 7, 6, 5, 4])},
        {"is_query": np.zeros(6, np.int64)},
        {"super_labels": np.zeros(5, np.int64)},
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(change, folder):
    def rewritten(manifest):
        entry = manifest["splits"]["train"]["table"]
        with np.load(folder / entry["file"]) as file:
            columns = {**file, **change}
        buffer = io.BytesIO()
        np.savez(buffer, **{name: column for name, column in columns.items() if column is not None})
        retold(folder, entry, buffer.getvalue())

    rewrite(folder, rewritten)
    with pytest.raises(UserError, match=r"train\.npz is damaged") as error:
        load("records", folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", [b"0 4", b"-1 99", b"0 -99", b"0 999999999", b"9223372036854775807 99", b"0", b"a b"])
def test_an_index_of_other_places_is_refused(row, folder):
    rewrite(folder, lambda m: retold(folder, m["splits"]["train"]["shards"][0]["index"], row + b"\n"))
    with pytest.raises(UserError, match=r"\.idx is no index of its shard"):
        load("records", folder)
    rewrite(folder, lambda m: retold(folder, m["splits"]["train"]["shards"][0]["index"], b"9" * 30 + b" 99\n"))
    with pytest.raises(UserError, match=r"\.idx is no index of its shard"):
        load("records", folder)


def test_special_files_among_records_are_not_opened(folder):
    entry = read_manifest(str(folder))["splits"]["train"]["shards"][0]["index"]
    (folder / entry["file"]).unlink()
    os.mkfifo(folder / entry["file"])
    with pytest.raises(UserError, match=r"\.idx is missing"):
        load("records", folder)


def test_a_preparation_does_not_go_on_with_a_malformed_note(folder, tmp_path):
    dataset = made(EncodedImages((picture(0),), ("a",)), [0])
    for name, content in (
        ("manifest.json", {"job": []}),
        ("job.json", {}),
        ("job.json", {"job": {}, "starts": {}}),
        ("job.json", {"job": {}, "starts": 3}),
    ):
        out = tmp_path / f"out of {name}{len(content)}{content.get('starts')}"
        out.mkdir()
        (out / name).write_text(json.dumps({"format": "tfdml-records", "version": 1, **content}))
        with pytest.raises(UserError):
            prepare({"train": dataset}, out)


def damaged(folder):
    """The data set, with a broken picture in its third record, and what messages shall call that."""
    dataset = load("records", folder)
    table = dataset.images.table
    path = table.shards.paths[table.shard[2]]
    with open(path, "r+b") as file:
        middle = int(table.offsets[2] + table.sizes[2] // 2)
        file.seek(middle)
        file.write(b"\0" * 64)
    return dataset, f"{path}, record at byte {table.offsets[2]} (photo2)"


def test_a_damaged_record_is_named_by_its_shard(folder):
    dataset, place = damaged(folder)
    (fault,) = find_faults(dataset.images)
    assert fault.index == 2
    assert fault.name == place
    assert diagnose(dataset.images)[0].name == place
    assert len(check(dataset, "skip", "decode")) == 5
    with pytest.raises(UserError, match="`bad_images='skip'`") as error:
        check(dataset, "error", "decode")
    assert place in str(error.value)


@pytest.mark.slow
def test_a_damaged_record_that_stops_a_pass_is_named_by_its_shard(folder):
    import tensorflow as tf

    from tfdml.data import EvaluationTransform

    dataset, place = damaged(folder)
    with pytest.raises(tf.errors.OpError) as caught:
        list(evaluation_batches(dataset, EvaluationTransform(28, 24), 6))
    explained = str(explain_failure(caught.value, dataset, "`its_own_argument`"))
    assert place in explained
    assert explained.endswith("leave them out with `its_own_argument`")
