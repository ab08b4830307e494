"""A copy of a data set has its images, small, and everything else that was known of them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.preparations import contents, images_of_kinds, made, picture
from tfdml.data import EncodedImages, decode_image, load, prepare
from tfdml.data.decoding import format_of
from tfdml.data.preparation import bad_images_in_words, check_images
from tfdml.data.transforms import resize_to_side
from tfdml.errors import UserError


def _held(data):
    return EncodedImages(tuple(data), tuple(f"{i}.jpg" for i in range(len(data))))


@pytest.fixture
def splits():
    images, names = _held(images_of_kinds(12)), {0: "a/b", 1: "a:b", 2: "Café", 3: "x"}
    labels = np.arange(12) // 3
    columns = {"super_labels": labels // 2, "groups": np.arange(12) % 5}
    train = made(images, labels, names, **columns).take(np.arange(6))
    return {
        "train": train,
        "test": made(images, labels, names, is_query=np.arange(12) % 3 == 0, **columns).take(range(6, 12)),
    }


def test_a_copy_keeps_what_is_known_of_the_images(splits, tmp_path):
    assert prepare(splits, tmp_path / "out") == {"train": [], "test": []}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for split, dataset in splits.items():
        copy = load("list", tmp_path / "out" / "images.csv", split)
        assert contents(copy.images, range(6)) == contents(dataset.images, range(6))
        for data, path in zip(contents(copy.images, range(6)), copy.names, strict=True):
            assert path.endswith(format_of(data).extensions)
        names = [dataset.class_names[label] for label in dataset.labels.tolist()]
        assert [copy.class_names[label] for label in copy.labels.tolist()] == names
        for field in ("super_labels", "groups", "is_query"):
            np.testing.assert_array_equal(getattr(copy, field), getattr(dataset, field))


def test_images_are_shrunk_as_training_resizes_them(tmp_path):
    turned = picture(2, (60, 50), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")
    data = [
        picture(1, (60, 45)),
        turned,
        picture(3, (32, 80), "PNG"),
        picture(4, (20, 10), "WEBP"),
        picture(5, (180, 2)),
    ]
    dataset = made(_held(data), [0, 0, 1, 1, 1])
    prepare({"train": dataset, "test": dataset.take([2])}, tmp_path / "out", shrink=32)
    copies = contents(load("list", tmp_path / "out" / "images.csv").images, range(5))
    assert copies[2:] == data[2:]
    for copy, original, size in zip(copies, data, ((32, 43), (38, 32)), strict=False):
        expected = resize_to_side(decode_image(tf.constant(original)), 32, "shorter")
        assert expected.shape[:2] == size
        assert copy == tf.io.encode_jpeg(expected, "rgb", quality=95)


def test_bad_images_end_it_or_are_left_out(tmp_path):
    good = images_of_kinds(6)
    bad = {
        b"": "empty file",
        b"text": "not a JPEG",
        good[0][:-20]: "truncated JPEG",
        picture(0, kind="GIF"): "unsupported",
    }
    dataset = made(_held([*good[:3], *bad, *good[3:]]), [0] * 5 + [1] * 5)
    faults = check_images({"train": dataset})["train"]
    assert [
        (fault.index, fault.reason.startswith(reason)) for fault, reason in zip(faults, bad.values(), strict=True)
    ] == [(row, True) for row in range(3, 7)]
    assert bad_images_in_words({"train": dataset}, {"train": faults}).startswith(
        "4 of 10 images are bad (1 empty file, "
    )
    with pytest.raises(UserError, match=r"4 of 10 images are bad .*`bad_images='skip'`"):
        prepare({"train": dataset}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    splits = {"train": dataset, "test": dataset.take([0])}
    assert prepare(splits, tmp_path / "out", bad_images="skip") == {"train": faults, "test": []}
    assert contents(load("list", tmp_path / "out" / "images.csv").images, range(6)) == good
    with pytest.raises(UserError, match="holds files already"):
        prepare({"train": dataset}, tmp_path / "out", bad_images="skip")
    with pytest.raises(UserError, match="4 of 4 images are bad"):
        prepare({"train": dataset.take(range(3, 7))}, tmp_path / "none", bad_images="skip")


@pytest.mark.parametrize("wrong", [{"shrink": -1}, {"max_pixels": 0}, {"bad_images": "drop"}, {"out": "gs://bucket/x"}])
def test_wrong_arguments(wrong, splits, tmp_path):
    with pytest.raises(UserError, match=f"`{next(iter(wrong))}"):
        prepare(splits, **{"out": tmp_path / "out", **wrong})
