"""Other images have another checksum, whatever they are called; special files are named and not
opened."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from tests.data.preparations import encoded
from tfdml.data import ImageDataset
from tfdml.data import images as data_images
from tfdml.data.faults import check
from tfdml.data.images import (
    ArrayImages,
    EncodedImages,
    FileImages,
    OptionalImages,
    images_checksum,
)
from tfdml.data.pipeline import evaluation_batches, training_batches
from tfdml.data.sampling import ShuffleSampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.io.files import write_whole

SIZE = 20_000


@pytest.fixture
def files(tmp_path):
    """Three files of one size."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.jpg" for i in range(3)]
    for path in paths:
        path.write_bytes(rng.bytes(SIZE))
    return FileImages(tuple(map(str, paths)))


def test_files_that_are_swapped_changed_or_gone_are_noticed(files, tmp_path):
    before = images_checksum(files)
    assert images_checksum(files) == before
    contents = [(tmp_path / f"{i}.jpg").read_bytes() for i in range(3)]
    for change in ("begin", "end", "length"):
        data = bytearray(contents[1])
        data[0 if change == "begin" else -1] ^= 1
        (tmp_path / "1.jpg").write_bytes(contents[1] + b"x" if change == "length" else bytes(data))
        assert images_checksum(files) != before
    (tmp_path / "1.jpg").write_bytes(contents[2])
    (tmp_path / "2.jpg").write_bytes(contents[1])
    assert images_checksum(files) != before
    assert images_checksum(FileImages(tuple(files.paths[i] for i in (0, 2, 1)))) == before
    (tmp_path / "1.jpg").unlink()
    assert images_checksum(files) != before


def test_pictures_are_upright_opaque_and_rgb(tmp_path):
    half, exif = Image.new("RGBA", (4, 2), (255, 0, 0, 0)), Image.Exif()
    half.putpixel((0, 0), (0, 0, 255, 255))
    exif[0x0112] = 6  # turn a quarter clockwise
    data, names = (encoded(half, "PNG", exif=exif), b"not an image"), ("a.png", "c.jpg")
    for name, content in zip(names, data, strict=True):
        (tmp_path / name).write_bytes(content)
    for images in (
        FileImages(tuple(str(tmp_path / name) for name in names)),
        EncodedImages(data, names),
    ):
        assert images.picture(0).shape == (4, 2, 3)
        assert images.picture(0)[0].tolist() == [[255, 255, 255], [0, 0, 255]]
        with pytest.raises(UserError, match=r"c\.jpg cannot be read as an image"):
            images.picture(1)


def test_vectors_come_in_whole_batches_as_they_are(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(7, 5)).astype("float32")
    dataset = ImageDataset(vectors=vectors, labels=np.arange(7) % 2)
    assert (dataset.dimension, dataset.names[1], dataset.images.picture(1).shape) == (
        5,
        "1",
        (64, 64, 3),
    )
    sampler = ShuffleSampler(7, 4, seed=1)
    batches = list(
        training_batches(
            dataset, sampler, TrainTransform(), num_steps=2, cache=True
        ).as_numpy_iterator()
    )
    for step, (found, labels) in enumerate(batches):
        np.testing.assert_array_equal(found, vectors[sampler.batch(step)])
        np.testing.assert_array_equal(labels, sampler.batch(step) % 2)
    found = np.concatenate(
        [batch for batch, _ in evaluation_batches(dataset, EvaluationTransform(), 3)]
    )
    np.testing.assert_array_equal(found, vectors)
    assert check(dataset) is dataset
    other = vectors.copy()
    other[3, 2] += 1
    same, changed = (dataclasses.replace(dataset, vectors=each) for each in (vectors, other))
    assert changed.checksum() != dataset.checksum() == same.checksum()
    np.testing.assert_array_equal(changed.take([3, 0]).vectors, other[[3, 0]])
    np.testing.assert_array_equal(dataset.join(changed).vectors, np.concatenate([vectors, other]))
    for wrong, message in (
        (vectors[0], "numbers"),
        (vectors[:3], r"7 images but vectors of shape \(3"),
        (vectors > 0, "numbers"),
    ):
        with pytest.raises(UserError, match=message):
            ImageDataset(vectors=wrong, labels=dataset.labels)


def test_an_address_in_a_table_of_vectors_is_not_opened_outside_its_folder():
    write_whole("memory://mine/a.png", b"bytes")
    for folder, readable in (("memory://mine", True), ("memory://other", False), ("", False)):
        images = OptionalImages(("memory://mine/a.png",), folder)
        if readable:
            assert images.encoded(0) == b"bytes"
        else:
            with pytest.raises(OSError, match=r"is an address|other/"):
                images.encoded(0)


def test_what_is_taken_from_images_is_not_checked_again(monkeypatch):
    kinds = (
        FileImages(("a", "b", "c")),
        EncodedImages((b"a", b"b", b"c"), ("a", "b", "c")),
        ArrayImages(np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3), ("a", "b", "c")),
        OptionalImages(("a", "b", "c"), "photos"),
    )
    monkeypatch.setattr(data_images, "clean", None)
    for images in kinds:
        part = images.take(np.array([2, 0]))
        assert (type(part), len(part), len(images)) == (type(images), 2, 3)
        assert (part.name(0), part.name(1)) == (images.name(2), images.name(0))
    np.testing.assert_array_equal(kinds[2].take(np.array([2])).pixels(), kinds[2].pixels()[2:])


@pytest.mark.parametrize("side", [16, 20])
def test_a_header_without_width_or_height_states_no_size(side):
    png = encoded(Image.new("RGB", (6, 4)), "PNG")
    empty = png[:side] + bytes(4) + png[side + 4 :]
    images = EncodedImages((png, empty), ("good", "empty"))
    assert (images.size(0), images.size(1)) == ((4, 6), None)
