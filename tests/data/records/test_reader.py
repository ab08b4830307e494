"""Record files give the same images, labels and batches as what they were made from, bit by bit."""

import copy
import hashlib
import json
import os
import pathlib
import re
import shutil
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tests.data.preparations import contents, images_of_kinds, made, picture
from tfdml.data import load
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import check, explain_failure, find_faults, inspect
from tfdml.data.images import ArrayImages, EncodedImages, FileImages
from tfdml.data.pipeline import class_balanced, evaluation_batches, shuffled
from tfdml.data.records import RecordSettings, prepare
from tfdml.data.records.reader import read_manifest, verify
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.io.files import listing


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


def assert_same(batches, others):
    batches, others = list(batches.as_numpy_iterator()), list(others.as_numpy_iterator())
    assert len(batches) == len(others) > 0
    for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True):
        np.testing.assert_array_equal(images, other_images)
        np.testing.assert_array_equal(labels, other_labels)


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


def test_records_need_no_inspection(records):
    assert inspect(records.images) == []


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the records, to be damaged."""
    return pathlib.Path(shutil.copytree(folder, tmp_path / "records"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train-00001-of-*.tar", None, "is missing"),
        ("train-00001-of-*.tar", lambda data: data[:-5], "bytes instead of"),
        ("train.parquet", None, "is missing"),
        ("train.parquet", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:], "checksum"),
        ("manifest.json", None, "no finished record files"),
        ("manifest.json", lambda data: data[:-20], "cannot be read"),
        ("manifest.json", lambda data: data.replace(b'"version": 3', b'"version": 9'), "version 3"),
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
    path = copied / read_manifest(str(copied))["splits"]["train"]["shards"][0]["file"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"1 of .* damaged: .*{path.name} is damaged .its checksum"):
        verify(str(copied))
    path.write_bytes(data[:600])
    with pytest.raises(UserError, match=f"{path.name} ends within the image at byte 512: it is damaged"):
        dataset.images.encoded(0)


def test_a_shard_that_vanishes_while_it_is_used(copied):
    dataset = load("records", copied)
    for path in copied.glob("*.tar"):
        path.unlink()
    with pytest.raises(UserError, match=r"tar cannot be read \(No such file"):
        contents(dataset.images, np.array([3]))


def test_training_on_a_shard_that_vanished_ends_with_one_line(copied):
    """The message comes through TensorFlow, which wraps it in a traceback of its own."""
    dataset = load("records", copied)
    for path in copied.glob("*.tar"):
        path.unlink()
    with pytest.raises(tf.errors.OpError) as caught:
        next(iter(class_balanced(dataset, 2, 2, TrainTransform("random_crop", resize=28, image_size=24))))
    explained = explain_failure(caught.value, dataset)
    assert re.fullmatch(r".*tar cannot be read \(No such file[^\n]*", str(explained))


def test_manifest_tells_what_was_prepared(source, folder):
    manifest = read_manifest(folder)
    assert json.dumps(manifest)
    train = manifest["splits"]["train"]
    assert (train["images"], train["classes"], train["super_classes"], train["queries"]) == (24, 6, 6, 8)
    assert sum(shard["images"] for shard in train["shards"]) == 24
    assert manifest["identity"]["shrink"] == 0
    assert train["bad_images"] == []


def test_omniglot_from_records_trains_as_from_its_archives(shared_data, tmp_path):
    source = load("omniglot", shared_data / "data" / "omniglot", "test").select_classes(np.arange(964, 984))
    prepare({"test": source}, tmp_path / "out")
    records = load("records", tmp_path / "out", "test")
    transform = TrainTransform("random_resized_crop", image_size=28)
    assert_same(
        class_balanced(source, 8, 4, transform, seed=1, num_steps=4),
        class_balanced(records, 8, 4, transform, seed=1, num_steps=4),
    )
    assert isinstance(records, ImageDataset)


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


def retold(crafted, entry, data):
    """A file with other bytes, and the manifest's entry such that it fits."""
    (crafted / entry["file"]).write_bytes(data)
    entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def refused(crafted, says):
    for look in (lambda: load("records", crafted), lambda: verify(str(crafted))):
        with pytest.raises(UserError, match=says) as error:
            look()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["table", "shard"])
@pytest.mark.parametrize("name", [EVIL, "/etc/passwd", "gs://bucket/x"])
def test_a_name_outside_the_folder_is_not_opened(where, name, crafted, monkeypatch):
    def change(manifest):
        train = manifest["splits"]["train"]
        entry = {"table": train["table"], "shard": train["shards"][1]}[where]
        entry["file"] = name

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
SHARD = (*TRAIN, "shards", 0)


@pytest.mark.parametrize(
    "change",
    [
        *(without(*path) for path in (("dataset",), ("splits",), (*TRAIN, "images"), (*TRAIN, "table"))),
        *(without(*path) for path in ((*TRAIN, "shards"), (*TRAIN, "class_names"), (*SHARD, "file"))),
        *(without(*path) for path in ((*SHARD, "bytes"), (*SHARD, "images"), (*SHARD, "sha256"))),
        *(putting(value, *TRAIN) for value in (None, [], 3)),
        *(putting(value, *TRAIN, "shards") for value in (None, {}, [None], ["a"], [[]])),
        *(putting(value, *SHARD, "bytes") for value in (None, "7", 1e9, True)),
        *(putting(value, *TRAIN, "class_names") for value in ([], {"a": "b"}, {"0": 0}, {"9" * 5000: "a"}, {"1": "a"})),
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
        *({name: None} for name in ("shard", "offset", "size", "label", "name")),
        {"shard": np.full(6, 9, np.int32)},
        {"shard": np.full(6, -1, np.int32)},
        {"shard": np.zeros(6)},
        {"offset": np.full(6, -1)},
        {"offset": np.full(6, 2**62)},
        {"size": np.zeros(6, np.int64)},
        {"size": np.full(6, 10**6)},
        {"size": np.full(6, 2**63 - 1)},
        {"label": np.zeros(6)},
        {"label": np.full(6, 99)},
        {"label": [0, 0, 1, 1, 2, None]},
        {"name": list("abcdef")},
        {"is_query": np.zeros(6, np.int64)},
        {"super_label": [b"x"] * 6},
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(change, crafted):
    def rewritten(manifest):
        entry = manifest["splits"]["train"]["table"]
        table = pq.read_table(crafted / entry["file"])
        columns = {**{name: table[name] for name in table.column_names}, **change}
        made = pa.table({name: column for name, column in columns.items() if column is not None})
        pq.write_table(made, crafted / entry["file"])
        retold(crafted, entry, (crafted / entry["file"]).read_bytes())

    rewrite(crafted, rewritten)
    with pytest.raises(UserError, match=r"train\.parquet is damaged") as error:
        load("records", crafted)
    assert "\n" not in str(error.value)


def test_special_files_among_records_are_not_opened(crafted):
    entry = read_manifest(str(crafted))["splits"]["train"]["shards"][0]
    (crafted / entry["file"]).unlink()
    os.mkfifo(crafted / entry["file"])
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
        (out / name).write_text(json.dumps({"format": "tfdml-records", "version": 3, **content}))
        with pytest.raises(UserError):
            prepare({"train": dataset}, out)


def damaged(crafted):
    """The data set, with a broken picture in its third record, and what messages shall call that."""
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
    assert len(check(dataset, "skip", "decode")) == 5
    with pytest.raises(UserError, match="`bad_images='skip'`") as error:
        check(dataset, "error", "decode")
    assert place in str(error.value)


@pytest.mark.slow
def test_a_damaged_record_that_stops_a_pass_is_named_by_its_shard(crafted):
    import tensorflow as tf

    from tfdml.data import EvaluationTransform

    dataset, place = damaged(crafted)
    with pytest.raises(tf.errors.OpError) as caught:
        list(evaluation_batches(dataset, EvaluationTransform(28, 24), 6))
    explained = str(explain_failure(caught.value, dataset, "`its_own_argument`"))
    assert place in explained
    assert explained.endswith("leave them out with `its_own_argument`")
