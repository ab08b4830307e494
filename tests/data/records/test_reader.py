"""Record files give the same images, labels and batches as what they were made from, bit by bit."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.data.preparations import images_of_kinds, made
from tfdml.data import load
from tfdml.data.augmentation.train import EvaluationTransform, TrainTransform
from tfdml.data.batches import class_balanced, shuffled
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages, EncodedImages, FileImages
from tfdml.data.images.faults import inspect
from tfdml.data.images.record_images import Shards
from tfdml.data.pipeline import evaluation_batches, explain_failure
from tfdml.data.records import RecordSettings, prepare
from tfdml.data.records.reader import read_manifest, verify
from tfdml.errors import UserError


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
    return made(FileImages(tuple(paths)), labels, names, super_labels=labels // 2, is_query=np.arange(24) % 3 == 0)


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
    assert len({int(shard) for shard in records.images.table.shard}) > 2
    assert records.name == source.name
    assert records.split == source.split
    assert records.class_names == source.class_names
    for column in ("labels", "super_labels", "is_query"):
        np.testing.assert_array_equal(getattr(records, column), getattr(source, column))
    assert [records.images.name(i) for i in range(24)] == list(source.images.paths)
    assert len(load("records", folder, "query")) + len(load("records", folder, "gallery")) == 8


def test_records_are_read_in_any_order(source, records):
    order = np.random.default_rng(0).permutation(24)
    expected = [pathlib.Path(source.images.paths[i]).read_bytes() for i in order]
    assert records.images.read(order) == expected
    assert records.take(order).images.read(np.arange(24)) == expected
    assert [records.take(order).images.name(i) for i in range(24)] == [source.images.paths[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random_crop", "random_resized_crop"])
def test_batches_are_equal_bit_by_bit(source, records, kind):
    transform = TrainTransform(kind, resize=24, image_size=20)
    assert_same(
        class_balanced(source, 3, 2, transform, seed=5, num_steps=6),
        class_balanced(records, 3, 2, transform, seed=5, num_steps=6),
    )
    assert_same(
        shuffled(source, 6, transform, seed=5, num_steps=6), shuffled(records, 6, transform, seed=5, num_steps=6)
    )
    assert_same(shuffled(source, 6, transform, num_steps=4), shuffled(records, 6, transform, num_steps=4, cache=True))
    view = EvaluationTransform(24, 20)
    assert_same(evaluation_batches(source, view, 7), evaluation_batches(records, view, 7))


def test_other_tools_read_the_shards(source, folder):
    shards = sorted(tf.io.gfile.glob(f"{folder}/train-*.tfrecord"))
    found = [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(shards)]
    assert len(found) == 24
    for index, example in enumerate(found):
        feature = example.features.feature
        assert feature["image/filename"].bytes_list.value[0] == os.fsencode(source.images.paths[index])
        assert feature["image/class/label"].int64_list.value[0] == source.labels[index]
        assert feature["image/class/super_label"].int64_list.value[0] == source.super_labels[index]
        assert feature["image/role"].bytes_list.value[0] == (b"gallery", b"query")[int(source.is_query[index])]
        assert feature["image/format"].bytes_list.value[0] in (b"jpeg", b"png", b"gif", b"bmp", b"webp")


def test_the_index_is_the_one_that_dali_makes(folder):
    for shard in tf.io.gfile.glob(f"{folder}/*.tfrecord"):
        lines, data, at = [], pathlib.Path(shard).read_bytes(), 0
        while at < len(data):
            size = 16 + int.from_bytes(data[at : at + 8], "little")
            lines.append(f"{at} {size}\n")
            at += size
        assert pathlib.Path(shard).with_suffix(".idx").read_text() == "".join(lines)


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
    prepare({"train": dataset}, "ram://records/of these", RecordSettings(shard_mb=0.01))
    records = load("records", "ram://records/of these")
    assert records.images.read(np.arange(12)[::-1]) == list(dataset.images.data[::-1])
    verify("ram://records/of these")
    assert not [name for name in tf.io.gfile.listdir("ram://records/of these") if name.startswith(".")]


def test_open_files_are_bounded_and_closed(records):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    paths = records.images.table.shards.paths
    before = descriptors()
    shards = Shards(paths * 100)
    for number in range(len(paths) * 100):
        shards.read(number, 0, int(records.images.table.sizes[records.images.table.shard == number % len(paths)][0]))
    assert descriptors() - before <= len(paths)
    del shards
    assert descriptors() == before


def test_a_shard_that_two_threads_open_at_once_stays_open_until_it_is_read(records):
    table = records.images.table
    shards = Shards(table.shards.paths)
    shards._open = shards._open.__wrapped__  # as for the thread whose file is not the one that is kept
    for _ in range(3):
        assert len(shards.read(0, 0, int(table.sizes[0]))) == table.sizes[0] - 16


def test_records_need_no_inspection(records):
    assert inspect(records.images) == []


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the records, to be damaged."""
    return pathlib.Path(shutil.copytree(folder, tmp_path / "records"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train-00001-of-*.tfrecord", None, "is missing"),
        ("train-00001-of-*.tfrecord", lambda data: data[:-5], "bytes instead of"),
        ("train-00001-of-*.idx", None, "is missing"),
        ("train-00001-of-*.idx", lambda data: data[:-5], "bytes instead of"),
        ("train-00001-of-*.idx", lambda data: b"1" + data[1:], "checksum"),
        ("train.npz", None, "is missing"),
        ("train.npz", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:], "checksum"),
        ("manifest.json", None, "no finished record files"),
        ("manifest.json", lambda data: data[:-20], "cannot be read"),
        ("manifest.json", lambda data: data.replace(b'"version": 1', b'"version": 9'), "version 1"),
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
        assert "bin/prepare" in str(error.value)
        assert "\n" not in str(error.value)


def test_damage_within_a_shard(copied):
    dataset = load("records", copied)
    path = copied / read_manifest(str(copied))["splits"]["train"]["shards"][0]["file"]
    data = bytearray(path.read_bytes())
    data[0] ^= 1  # the first record's length
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path.name} holds no record .* damaged"):
        dataset.images.read(np.array([0]))
    with pytest.raises(UserError, match=f"1 of .* damaged: .*{path.name} is damaged .its checksum"):
        verify(str(copied))


def test_a_shard_that_vanishes_while_it_is_used(copied):
    dataset = load("records", copied)
    for path in copied.glob("*.tfrecord"):
        path.unlink()
    with pytest.raises(UserError, match=r"tfrecord cannot be read \(No such file"):
        dataset.images.read(np.array([3]))


def test_training_on_a_shard_that_vanished_ends_with_one_line(copied):
    """The message comes through TensorFlow, which wraps it in a traceback of its own."""
    dataset = load("records", copied)
    for path in copied.glob("*.tfrecord"):
        path.unlink()
    with pytest.raises(tf.errors.OpError) as caught:
        next(iter(class_balanced(dataset, 2, 2, TrainTransform("random_crop", resize=28, image_size=24))))
    explained = explain_failure(caught.value, dataset)
    assert re.fullmatch(r".*tfrecord cannot be read \(No such file[^\n]*", str(explained))


def test_manifest_tells_what_was_prepared(source, folder):
    manifest = read_manifest(folder)
    assert json.dumps(manifest)
    train = manifest["splits"]["train"]
    assert (train["images"], train["classes"], train["super_classes"], train["queries"]) == (24, 6, 6, 8)
    assert sum(shard["images"] for shard in train["shards"]) == 24
    assert manifest["job"]["shrink"] == 0
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
