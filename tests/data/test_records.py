"""Record files give the same images, labels and batches as what they were made from, bit by bit.

Preparing them: every bad image is named, an interruption costs nothing, nothing is half written.
"""

import copy
import errno
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.data.preparations import assert_same, contents, images_of_kinds, made, picture, shuffled
from tests.fork_server import fork_server
from tfdml.data import load
from tfdml.data.dataset import check as check_images
from tfdml.data.dataset import explain_failure, find_faults
from tfdml.data.decoding import decode_image
from tfdml.data.images import ArrayImages, EncodedImages, FileImages
from tfdml.data.pipeline import class_balanced, evaluation_batches
from tfdml.data.records import (
    RecordSettings,
    bad_images_in_words,
    check,
    cut_into_shards,
    plan,
    prepare,
    read_manifest,
    verify,
)
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.io.files import LOCK, listing, remove, write_json


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Files of every kind and several sizes, with names that are hard to carry, super-labels and roles."""
    folder = tmp_path_factory.mktemp("photos of 写真é")
    paths = []
    for number, data in enumerate(images_of_kinds(24)):
        path = os.fsencode(folder) + b"/a b\xff%d.jpg" % number
        with open(path, "wb") as file:
            file.write(data)
        paths.append(os.fsdecode(path))
    labels = np.arange(24) // 4 * 10**12 + 7
    names = {int(label): f"class {label}\udcfe 写" for label in set(labels.tolist())}
    return made(
        FileImages(tuple(paths)),
        labels,
        names,
        super_labels=labels // 2,
        is_query=np.arange(24) % 3 == 0,
        groups=labels % 5,
    )


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    """The same as records, in several shards."""
    folder = str(tmp_path_factory.mktemp("records") / "of these")
    prepare({"train": source, "test": source.take(np.arange(8))}, folder, RecordSettings(shard_mb=0.01))
    return folder


@pytest.fixture(scope="module")
def records(folder):
    """The train split, read."""
    return load("records", folder)


def test_everything_but_the_place_is_the_same(source, records, folder):
    assert len(set(records.images.shard.tolist())) > 2
    assert records.name == source.name
    assert records.split == source.split
    assert records.class_names == source.class_names
    for column in ("labels", "super_labels", "is_query", "groups"):
        np.testing.assert_array_equal(getattr(records, column), getattr(source, column))
    assert [records.images.name(i) for i in range(24)] == list(source.images.paths)
    assert len(load("records", folder, "query")) + len(load("records", folder, "gallery")) == 8


def test_records_are_read_in_any_order(source, records):
    order = np.random.default_rng(0).permutation(24)
    expected = [pathlib.Path(source.images.paths[i]).read_bytes() for i in order]
    assert contents(records.images, order) == expected
    assert contents(records.take(order).images, np.arange(24)) == expected
    assert [records.take(order).images.name(i) for i in range(24)] == [source.images.paths[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random_crop", "random_resized_crop"])
def test_batches_are_equal_bit_by_bit(source, records, kind):
    transform = TrainTransform(kind, resize=24, image_size=20)
    assert_same(
        class_balanced(source, 3, 2, transform, seed=5, num_steps=6),
        class_balanced(records, 3, 2, transform, seed=5, num_steps=6),
    )
    assert_same(shuffled(source, 6, transform, num_steps=4), shuffled(records, 6, transform, num_steps=4, cache=True))
    view = EvaluationTransform(24, 20)
    assert_same(evaluation_batches(source, view, 7), evaluation_batches(records, view, 7))


def test_other_tools_read_the_shards_and_the_table(source, folder):
    data = []
    for path in sorted(pathlib.Path(folder).glob("train-*.tar")):
        with tarfile.open(path) as archive:
            data += [archive.extractfile(member).read() for member in archive]
            assert {name.rpartition(".")[2] for name in archive.getnames()} <= {"jpg", "png", "webp"}
    assert data == contents(source.images, range(24))
    table = pq.read_table(pathlib.Path(folder) / "train.parquet").to_pydict()
    assert table["name"] == list(map(os.fsencode, source.images.paths))
    assert table["label"] == source.labels.tolist()
    assert table["super_label"] == source.super_labels.tolist()
    assert table["is_query"] == source.is_query.tolist()


@pytest.mark.one_quick_case
@pytest.mark.parametrize("held", ["encoded", "arrays"])
def test_images_held_in_memory(held, tmp_path):
    arrays = np.random.default_rng(0).integers(0, 256, (8, 30, 26, 3), np.uint8)
    names = tuple(f"image {i}" for i in range(8))
    images = ArrayImages(arrays, names)
    if held == "encoded":
        images = EncodedImages(tuple(tf.io.encode_png(array).numpy() for array in arrays), names)
    dataset = made(images, np.arange(8) // 2)
    prepare({"train": dataset}, tmp_path / "out")
    records = load("records", tmp_path / "out")
    transform = TrainTransform("random_crop", resize=24, image_size=20)
    assert_same(shuffled(dataset, 4, transform, num_steps=3), shuffled(records, 4, transform, num_steps=3))
    assert [records.images.name(i) for i in range(8)] == list(names)
    with pytest.raises(UserError, match=r"no test split; it holds train"):
        load("records", tmp_path / "out", "test")


def test_a_remote_file_system():
    dataset = made(EncodedImages(tuple(images_of_kinds(12)), tuple(map(str, range(12)))), np.arange(12) // 2)
    prepare({"train": dataset}, "memory://records/of these", RecordSettings(shard_mb=0.01))
    records = load("records", "memory://records/of these")
    assert contents(records.images, np.arange(12)[::-1]) == list(dataset.images.data[::-1])
    verify("memory://records/of these")
    assert not [name for name in listing("memory://records/of these") if name.startswith(".")]


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the records, to be damaged."""
    return pathlib.Path(shutil.copytree(folder, tmp_path / "records"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train-00001-of-*.tar", None, "is missing|No such file"),
        ("train-00001-of-*.tar", lambda data: data[:-5], "bytes instead of|its SHA-256"),
        ("train.parquet", None, "cannot be read .No such file"),
        ("train.parquet", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:], "is damaged: its SHA-256"),
        ("manifest.json", None, "no finished record files"),
        ("manifest.json", lambda data: data[:-20], "cannot be read"),
        ("manifest.json", lambda data: data.replace(b'"version": 4', b'"version": 9'), "version 4"),
    ],
)
def test_damage_is_named_when_the_folder_is_opened(name, change, says, copied):
    (path,) = copied.glob(name)
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    for look in (lambda: load("records", copied), lambda: verify(str(copied))):
        with pytest.raises(UserError, match=says) as error:
            look()
        assert path.name in str(error.value)
        assert "tfdml prepare" in str(error.value)
        assert "\n" not in str(error.value)


def test_damage_within_a_shard(copied):
    dataset = load("records", copied)
    path = copied / read_manifest(str(copied))["splits"]["train"]["shards"][0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"1 of .* damaged: .*{path.name} is damaged: its SHA-256"):
        verify(str(copied))
    path.write_bytes(data[:600])
    with pytest.raises(UserError, match=f"{path.name} ends within the image at byte 512: it is damaged"):
        dataset.images.encoded(0)


def test_training_on_a_shard_that_vanished_ends_with_one_line(copied):
    """The message comes through TensorFlow, which wraps it in a traceback of its own."""
    dataset = load("records", copied)
    for path in copied.glob("*.tar"):
        path.unlink()
    with pytest.raises(tf.errors.OpError) as caught:
        next(iter(class_balanced(dataset, 2, 2, TrainTransform("random_crop", resize=28, image_size=24))))
    explained = explain_failure(caught.value, dataset)
    assert re.fullmatch(r".*tar is missing[^\n]*", str(explained))


def test_manifest_tells_what_was_prepared(source, folder):
    manifest = read_manifest(folder)
    assert json.dumps(manifest)
    train = manifest["splits"]["train"]
    assert (train["images"], train["classes"]) == (24, 6)
    assert {*train["shards"], "train.parquet"} <= {*manifest["files"]}
    assert manifest["identity"]["shrink"] == 0
    assert train["bad_images"] == []


EVIL = "../secret.txt"


@pytest.fixture
def crafted(tmp_path):
    images = EncodedImages(tuple(picture(seed, kind="PNG") for seed in range(6)), tuple(f"photo{i}" for i in range(6)))
    prepare({"train": made(images, np.arange(6) // 2)}, tmp_path / "records", RecordSettings(shard_mb=0.008))
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "records"


def rewrite(crafted, change):
    """The manifest, changed."""
    manifest = json.loads((crafted / "manifest.json").read_text())
    change(manifest)
    (crafted / "manifest.json").write_text(json.dumps(manifest))


def refused(crafted, says):
    for look in (lambda: load("records", crafted), lambda: verify(str(crafted))):
        with pytest.raises(UserError, match=says) as error:
            look()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [EVIL, "/etc/passwd", "gs://bucket/x"])
def test_a_name_outside_the_folder_is_not_opened(name, crafted, monkeypatch):
    def change(manifest):
        manifest["files"][name] = manifest["files"]["train.parquet"]
        manifest["splits"]["train"]["table"] = name

    rewrite(crafted, change)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    refused(crafted, "names a file outside its folder")
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
TABLE = ("files", "train.parquet")


@pytest.mark.parametrize(
    "change",
    [
        *(without(*path) for path in (("dataset",), ("splits",), ("files",), (*TRAIN, "images"), (*TRAIN, "table"))),
        *(without(*path) for path in ((*TRAIN, "shards"), TABLE, (*TABLE, "bytes"), (*TABLE, "sha256"))),
        *(putting(value, *TRAIN) for value in (None, [], 3)),
        *(putting(value, *TRAIN, "shards") for value in (None, {}, [None], ["a"], [[]])),
        *(putting(value, *TRAIN, "table") for value in (None, "a", ["train.parquet"])),
        *(putting(value, *TABLE, "bytes") for value in (None, "7", 1e9, True)),
        putting(-1, *TRAIN, "images"),
        putting([], *TRAIN, "shards"),
        putting(3, "dataset"),
    ],
)
def test_a_malformed_manifest_is_refused(change, crafted):
    rewrite(crafted, change)
    with pytest.raises(UserError) as error:
        load("records", crafted)
    assert str(crafted) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ("shard", "offset", "size", "label", "class", "name")),
        {"shard": np.full(6, 9, np.int32)},
        {"shard": np.full(6, -1, np.int32)},
        {"shard": np.zeros(6)},
        {"offset": np.full(6, -1)},
        {"offset": np.full(6, 2**62)},
        {"shard": np.zeros(6, np.int32), "offset": lambda length: np.full(6, length - 1)},
        {"size": np.zeros(6, np.int64)},
        {"size": np.full(6, 10**6)},
        {"size": np.full(6, 2**63 - 1)},
        {"label": np.zeros(6)},
        {"label": [0, 0, 1, 1, 2, None]},
        {"name": list("abcdef")},
        {"class": list("abcdef")},
        {"is_query": np.zeros(6, np.int64)},
        {"super_label": [b"x"] * 6},
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(change, crafted):
    def rewritten(manifest):
        path, entry = crafted / "train.parquet", manifest["files"]["train.parquet"]
        table = pq.read_table(path)
        length = manifest["files"][manifest["splits"]["train"]["shards"][0]]["bytes"]
        changed = {name: column(length) if callable(column) else column for name, column in change.items()}
        columns = {**{name: table[name] for name in table.column_names}, **changed}
        made = pa.table({name: column for name, column in columns.items() if column is not None})
        pq.write_table(made, path)
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    rewrite(crafted, rewritten)
    with pytest.raises(UserError, match=r"train\.parquet is damaged") as error:
        load("records", crafted)
    assert "\n" not in str(error.value)


def test_special_files_among_records_are_not_opened(crafted):
    shard = crafted / read_manifest(str(crafted))["splits"]["train"]["shards"][0]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(UserError, match=r"\.tar is missing"):
        load("records", crafted)


def test_a_preparation_does_not_go_on_with_a_malformed_note(crafted, tmp_path):
    dataset = made(EncodedImages((picture(0),), ("a",)), [0])
    for name, content in (
        ("manifest.json", {"identity": []}),
        ("progress.json", {}),
        ("progress.json", {"identity": {}, "plan": {}}),
        ("progress.json", {"identity": {}, "plan": 3}),
    ):
        out = tmp_path / f"out of {name}{len(content)}{content.get('plan')}"
        out.mkdir()
        (out / name).write_text(json.dumps({"format": "tfdml-records", "version": 4, **content}))
        with pytest.raises(UserError):
            prepare({"train": dataset}, out)


def damaged(crafted):
    """The data set, with a broken picture in its third record, and its name in messages."""
    dataset = load("records", crafted)
    images = dataset.images
    path = images.paths[images.shard[2]]
    with open(path, "r+b") as file:
        file.seek(int(images.offsets[2] + images.sizes[2] // 2))
        file.write(b"\0" * 64)
    return dataset, f"{path}, image at byte {images.offsets[2]} (photo2)"


def test_a_damaged_record_is_named_by_its_shard(crafted):
    dataset, place = damaged(crafted)
    (fault,) = find_faults(dataset.images)
    assert fault.index == 2
    assert fault.name == place
    assert len(check_images(dataset, "skip", "decode")) == 5
    with pytest.raises(UserError, match="`bad_images='skip'`") as error:
        check_images(dataset, "error", "decode")
    assert place in str(error.value)


@pytest.mark.slow
def test_a_damaged_record_that_stops_a_pass_is_named_by_its_shard(crafted):
    dataset, place = damaged(crafted)
    with pytest.raises(tf.errors.OpError) as caught:
        list(evaluation_batches(dataset, EvaluationTransform(28, 24), 6))
    explained = str(explain_failure(caught.value, dataset, "`its_own_argument`"))
    assert place in explained
    assert explained.endswith("leave them out with `its_own_argument`")


SMALL = RecordSettings(shard_mb=0.01)


def files(folder, contents, split="train", per_class=4, **columns):
    """A data set of files with these contents; None for a file that is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, data in enumerate(contents):
        paths.append(str(folder / f"image {index}é.jpg"))
        if data is not None:
            pathlib.Path(paths[-1]).write_bytes(data)
    return made(FileImages(tuple(paths)), np.arange(len(paths)) // per_class, split=split, **columns)


def encoded(*data):
    return made(EncodedImages(tuple(data), tuple(f"image{i}" for i in range(len(data)))), np.arange(len(data)) // 2)


def leftovers(folder):
    return [name for name in os.listdir(folder) if name.startswith((".", "progress"))]


def whole(folder):
    """The bytes of everything that records are made of."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".tar", ".parquet")}


def broken(count):
    """Good images, and bad ones of many kinds with the reason that each must get."""
    good = images_of_kinds(count)
    middle = bytearray(picture(1, kind="PNG"))
    middle[len(middle) // 2 : len(middle) // 2 + 50] = bytes(50)
    bad = {
        b"": "empty file",
        None: "missing",
        b"<html>": "not a JPEG, PNG or WebP image: it begins with b'<html>'",
        b"plain text": "not a JPEG, PNG or WebP image: it begins with b'plain text'",
        good[0][:-20]: "truncated JPEG",
        bytes(middle): "damaged",
        picture(0, kind="GIF"): "unsupported type: GIF",
    }
    return good, bad


def test_every_bad_image_is_named_with_its_reason(tmp_path):
    good, bad = broken(12)
    dataset = files(tmp_path / "images", [*good, *bad])
    reports = check({"train": dataset})
    found = reports["train"].faults
    assert [fault.index for fault in found] == list(range(12, 12 + len(bad)))
    for fault, reason in zip(found, bad.values(), strict=True):
        assert fault.name == dataset.images.paths[fault.index]
        assert fault.reason.startswith(reason)
    text = bad_images_in_words(reports)
    assert f"{len(bad)} of {len(dataset)} images are bad (" in text
    assert "2 not a JPEG, PNG or WebP image" in text
    assert "1 damaged" in text
    assert "\n" not in text


def test_bad_images_end_it_or_are_left_out(tmp_path):
    good, bad = broken(12)
    dataset = files(tmp_path / "images", [*good[:5], *bad, *good[5:]])
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"7 of 19 images are bad .*bad_images.txt.*`bad_images='skip'`"):
        prepare({"train": dataset}, out, SMALL)
    assert not (out / "manifest.json").exists()
    lines = (out / "bad_images.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == list(dataset.images.paths[5:12])
    with pytest.raises(UserError, match="no finished record files"):
        load("records", out)

    reports = prepare({"train": dataset}, out, RecordSettings(shard_mb=0.01, bad_images="skip"))
    assert reports["train"].resumed > 0
    records = load("records", out)
    kept = [*range(5), *range(12, 19)]
    assert records.labels.tolist() == dataset.labels[kept].tolist()
    assert contents(records.images, np.arange(12)) == good
    assert [records.images.name(i) for i in range(12)] == [dataset.images.paths[i] for i in kept]
    assert set(records.class_names) == set(records.labels.tolist())
    assert len(verify(str(out))["splits"]["train"]["bad_images"]) == 7
    assert leftovers(out) == []


def test_mended_images_are_taken_and_the_rest_is_kept(tmp_path):
    good = images_of_kinds(12)
    dataset = files(tmp_path / "images", [*good[:7], good[7][:50], *good[8:]])
    out = tmp_path / "out"
    with pytest.raises(UserError, match="1 of 12 images are bad"):
        prepare({"train": dataset}, out, SMALL)
    pathlib.Path(dataset.images.paths[7]).write_bytes(good[7])
    reports = prepare({"train": dataset}, out, SMALL)
    found = reports["train"]
    assert 0 < found.resumed < len(found.files)
    assert contents(load("records", out).images, np.arange(12)) == good
    assert not (out / "bad_images.txt").exists()


def test_nothing_is_left_if_all_are_bad(tmp_path):
    with pytest.raises(UserError, match="no image of the train split is left"):
        prepare({"train": encoded(b"", b"")}, tmp_path / "out", RecordSettings(bad_images="skip"))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_shrinking(kind, tmp_path):
    upright = picture(1, (60, 45), "JPEG")
    turned = picture(2, (60, 50), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")
    small = [picture(3, (32, 80), "PNG"), picture(4, (20, 10), "WEBP")]
    dataset = encoded(upright, turned, *small)
    prepare({"train": dataset}, tmp_path / "out", RecordSettings(shrink=32, shrink_format=kind))
    records = load("records", tmp_path / "out")
    first, second, *rest = contents(records.images, np.arange(4))
    assert rest == small
    for data, original, size in ((first, upright, (32, 43)), (second, turned, (38, 32))):
        expected = TrainTransform("random_crop", resize=32, image_size=32).prepare(decode_image(original))
        assert data[:4] == (b"\x89PNG" if kind == "png" else b"\xff\xd8\xff\xe0")
        assert expected.shape[:2] == size
        found = decode_image(data)
        if kind == "png":
            np.testing.assert_array_equal(found, expected)
        else:
            assert np.abs(found.numpy().astype(int) - expected.numpy()).mean() < 12  # noise, the worst for a JPEG


class Stopped(Exception):
    pass


def stop_after(count):
    def progress(done, total, bad):
        if done == count:
            raise Stopped

    return progress


@pytest.mark.parametrize("after", [1, 7, 13, 23])
def test_an_interruption_costs_only_the_shard_under_way(after, tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    prepare({"train": dataset, "test": dataset}, tmp_path / "uninterrupted", SMALL)

    out = tmp_path / "out"
    with pytest.raises(Stopped):
        prepare({"train": dataset, "test": dataset}, out, SMALL, progress=stop_after(after))
    with pytest.raises(UserError, match="no finished record files"):
        load("records", out)
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    reports = prepare({"train": dataset, "test": dataset}, out, SMALL)
    assert reports["train"].resumed == len(finished)
    assert all((out / name).stat().st_mtime_ns == time for name, time in finished.items())
    assert whole(out) == whole(tmp_path / "uninterrupted")
    assert leftovers(out) == []


@pytest.mark.slow
def test_a_killed_process_is_taken_over_from(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    script = f"""
import os, signal
import numpy as np
from tests.data.preparations import made
from tfdml.data.images import FileImages
from tfdml.data.records import RecordSettings, prepare

def kill(done, total, bad):
    if done == 13:
        os.kill(os.getpid(), signal.SIGKILL)

dataset = made(FileImages({dataset.images.paths!r}), np.arange(24) // 4)
prepare({{"train": dataset}}, {str(out)!r}, RecordSettings(shard_mb=0.01), progress=kill)
"""
    killed = fork_server().run_script(script)
    assert killed.returncode == -9
    reports = prepare({"train": dataset}, out, SMALL)
    assert reports["train"].resumed > 0
    assert leftovers(out) == []
    assert len(load("records", out)) == 24


def test_a_shard_cut_short_is_made_again(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        prepare(
            {"train": dataset},
            out,
            SMALL,
            progress=lambda done, *_: (_ for _ in ()).throw(Stopped) if done == 20 else 0,
        )
    first, *_, last = sorted(out.glob("*.tar"))
    first.write_bytes(first.read_bytes()[:-1])
    last.unlink()
    prepare({"train": dataset}, out, SMALL)
    verify(str(out))


def test_finished_is_finished(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    prepare({"train": dataset}, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare({"train": dataset}, tmp_path / "out") == {}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_another_job_is_refused_by_name(finished, tmp_path):
    dataset, out = encoded(*images_of_kinds(6)), tmp_path / "out"
    if finished:
        prepare({"train": dataset}, out)
    else:
        with pytest.raises(UserError, match="bad"):
            prepare({"train": encoded(b"", *images_of_kinds(6)[1:])}, out)
    with pytest.raises(UserError, match="shrink was 0 and is now 20"):
        prepare({"train": dataset}, out, RecordSettings(shrink=20))
    with pytest.raises(UserError, match="images of train was "):
        prepare({"train": dataset.take([0, 1, 2])}, out)
    with pytest.raises(UserError, match="images of test was null"):
        prepare({"train": dataset, "test": dataset}, out)


@pytest.mark.parametrize("name", ["precious.txt", "manifest.json", "progress.json"])
def test_a_folder_of_others_is_refused_untouched(name, tmp_path):
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(UserError, match=r"name a(nother| new folder)"):
        prepare({"train": encoded(picture(0))}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(UserError, match="is a file"):
        prepare({"train": encoded(picture(0))}, tmp_path / name)


def test_two_at_once_in_one_folder(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    started, go_on = threading.Event(), threading.Event()

    def hold(done, total, bad):
        started.set()
        go_on.wait(60)

    thread = threading.Thread(target=lambda: prepare({"train": dataset}, tmp_path / "out", progress=hold))
    thread.start()
    assert started.wait(60)
    try:
        with pytest.raises(UserError, match=f"`out={tmp_path}/out`: another process is writing into it"):
            prepare({"train": dataset}, tmp_path / "out")
    finally:
        go_on.set()
        thread.join()
    assert len(load("records", tmp_path / "out")) == 6


def test_a_remote_lock(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    out = "memory://preparation/locked"
    write_json(f"{out}/{LOCK}", {"token": "another's"})
    with pytest.raises(UserError, match=f"delete {out}/{LOCK}"):
        prepare({"train": dataset}, out)
    remove(f"{out}/{LOCK}")
    prepare({"train": dataset}, out)
    assert LOCK not in listing(out)


def full_disk():
    """How members are added to an archive on a disk that has no room for the second shard."""

    def addfile(archive, member, file):
        addfile.real(archive, member, file)
        if "-00001-" in archive.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    addfile.real = tarfile.TarFile.addfile
    return addfile


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "addfile", full_disk())
        with pytest.raises(
            UserError, match=r"train-00001-of-.* the disk is full, and .* needs about [\d.,]+ (MB|bytes) \("
        ):
            prepare({"train": dataset}, out, SMALL)
    assert [path.name[:11] for path in sorted(out.glob("*.tar"))] == ["train-00000"]
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    reports = prepare({"train": dataset}, out, SMALL)
    assert reports["train"].resumed == 1
    verify(str(out))


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".partial-1-train-00000-of-00001.tar").write_bytes(b"half")
    prepare({"train": dataset}, tmp_path / "out", SMALL)
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_disk_that_is_really_full(small_disk, tmp_path, monkeypatch):
    tiny_disk = small_disk(2**20)
    dataset = files(tmp_path / "images", [picture(i, (300, 200), "PNG") for i in range(8)])
    with pytest.raises(UserError, match=r"the records need about 1\.\d MB, and 1\.0 MB are free"):
        prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    assert os.listdir(tiny_disk / "out") == []

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**40}))
    with pytest.raises(UserError, match=r"tar cannot be written: the disk is full, and this file needs about 0\.\d MB"):
        prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    kept = sorted(path.name for path in (tiny_disk / "out").glob("*.tar"))
    assert 0 < len(kept) < 4
    assert not [name for name in os.listdir(tiny_disk / "out") if name.startswith(".")]
    subprocess.run(["mount", "-o", "remount,size=4m", tiny_disk], check=True)
    reports = prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    assert reports["train"].resumed == len(kept)
    verify(str(tiny_disk / "out"))


def test_a_plan_writes_nothing(tmp_path):
    dataset = files(tmp_path / "images", [*images_of_kinds(5), None])
    size = sum(map(len, images_of_kinds(5)))
    assert plan({"train": dataset}, RecordSettings(shard_mb=1e-6)) == {"train": (6, size, list(range(6)))}
    assert os.listdir(tmp_path) == ["images"]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_shards_are_cut_where_they_are_full(sizes, limit):
    starts = cut_into_shards(sizes, limit)
    assert starts[:1] == ([0] if sizes else [])
    for start, stop in itertools.pairwise([*starts, len(sizes)]):
        assert sum(sizes[start : stop - 1]) < limit
        assert sum(sizes[start:stop]) >= limit or stop == len(sizes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shrink": -1}, {"shard_mb": 0}, {"max_pixels": 0}, {"shrink_format": "webp"},
        {"bad_images": "ignore"}, {"shard_mb": float("nan")},
    ],
)  # fmt: skip
def test_wrong_settings_are_named(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=rf"`{name}[=`]"):
        RecordSettings(**wrong)
