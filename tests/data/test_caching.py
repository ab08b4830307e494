"""How much memory decoded images take, told from their headers."""

import io

import numpy as np
import pytest
from PIL import Image

from tfdml import memory
from tfdml.data import caching
from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.caching import decoded_bytes, decoded_source, memory_to_spare
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages, EncodedImages, FileImages
from tfdml.errors import UserError


def encoded(size, **options):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "JPEG", **options)
    return file.getvalue()


def dataset(images):
    return ImageDataset("made", "train", images, np.zeros(len(images)), {0: ""})


MIXED = EncodedImages(tuple(encoded((40 + i % 3, 60)) for i in range(9)), ("",) * 9)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("kind", ["random_crop", "random_resized_crop", "multi_resolution"])
@pytest.mark.parametrize("mode", ["shorter", "squash", "pad"])
def test_the_estimate_is_what_the_cache_takes(kind, mode, monkeypatch):
    data, transform = dataset(MIXED), TrainTransform(kind, resize=24, image_size=20, resize_mode=mode)
    said = []
    monkeypatch.setattr(caching.logging, "info", lambda message, *values: said.append(message % values))
    source = decoded_source(data, transform, limit_mb=10)
    taken = sum(
        np.asarray(source.columns(np.array([i]))[0][0]).nbytes
        if source.size
        else len(source.columns(np.array([i]))[0][0])
        for i in range(9)
    )
    assert decoded_bytes(data, transform) == pytest.approx(taken, abs=9)
    assert any("caching 9 decoded images of made: about 0 MB" in line for line in said)


def test_no_more_is_kept_than_the_limit():
    transform = TrainTransform("random_resized_crop", image_size=20)
    taken = decoded_bytes(dataset(MIXED), transform) / caching.MEGABYTE
    assert decoded_source(dataset(MIXED), transform, limit_mb=1.01 * taken) is not None
    with pytest.raises(UserError, match="more than the limit of 0 MB: train without"):
        decoded_source(dataset(MIXED), transform, limit_mb=0.95 * taken)


def test_estimates_of_many_images_read_a_few_headers(monkeypatch):
    asked = []
    monkeypatch.setattr(EncodedImages, "size", lambda images, index: asked.append(index) or (10, 20))
    images = EncodedImages((b"",) * 5000, ("",) * 5000)
    assert decoded_bytes(dataset(images), TrainTransform("random_resized_crop", image_size=8)) == 5000 * 600
    assert len(set(asked)) == 64
    assert {0, 4999} <= set(asked)


def test_boxes_and_arrays_count_and_unreadable_files_do_not(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded((100, 80)))
    transform = TrainTransform("random_resized_crop", image_size=8)
    files = FileImages((str(path), str(tmp_path / "missing.jpg")), np.array([[10, 20, 500, 50], [0, 0, 9, 9]]))
    assert decoded_bytes(dataset(files), transform) == 2 * 3 * 70 * 30
    arrays = ArrayImages(np.zeros((4, 6, 7, 3), np.uint8), ("",) * 4)
    assert decoded_bytes(dataset(arrays), transform) == 4 * 6 * 7 * 3
    assert decoded_bytes(dataset(EncodedImages((b"text",), ("a",))), transform) == 0


def test_sizes_are_those_of_the_upright_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    images = EncodedImages((encoded((50, 20)), encoded((50, 20), exif=exif), b"?"), ("a", "b", "c"))
    assert [images.size(index) for index in range(3)] == [(20, 50), (50, 20), None]


def test_half_of_the_free_memory_is_the_most(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4096 kB\n"}
    monkeypatch.setattr(memory, "_text", lambda path: files.get(path, ""))
    assert memory_to_spare(100) == 2 * 2**20
    assert memory_to_spare(1) == 2**20
    files.update({"/sys/fs/cgroup/memory.max": "3000000\n", "/sys/fs/cgroup/memory.current": "1000000\n"})
    assert memory_to_spare(100) == 1_000_000
    files.update({"/sys/fs/cgroup/memory.max": "max\n"})
    assert memory_to_spare(100) == 2 * 2**20
    files.clear()
    assert memory_to_spare(100) == 100 * 2**20
