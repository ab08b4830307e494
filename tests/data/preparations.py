"""Small pictures, data sets of them, and the comparison of their batches."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import ShuffleSampler
from tfdml.data.transforms import TrainTransform

KINDS = ("JPEG", "PNG", "WEBP")


def encoded(image, kind, **options):
    """The bytes of a Pillow image in a format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width, height, bits=8, colors=2, pixels=None, key=None, interlace=0):
    """A PNG put together by hand, of kinds and sizes that Pillow does not write.

    Args:
        width: As the header states it.
        height: As the header states it.
        bits: Bits of a sample.
        colors: The color type.
        pixels: Rows, each after the byte of its filter. Black by default.
        key: The transparent color.
        interlace: The interlace method.
    """

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    if pixels is None:
        samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colors]
        pixels = bytes((1 + (width * bits * samples + 7) // 8) * height)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colors, 0, 0, interlace)),
            chunk(b"PLTE", bytes(3 << bits)) if colors == 3 else b"",
            b"" if key is None else chunk(b"tRNS", key),
            chunk(b"IDAT", zlib.compress(pixels)),
            chunk(b"IEND", b""),
        ]
    )


def picture(seed, size=(40, 30), kind="JPEG", mode="RGB", **options):
    """The bytes of a random picture, (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return encoded(Image.fromarray(pixels).convert(mode), kind, **options)


def images_of_kinds(count):
    """Pictures of all kinds in turn, of several sizes."""
    return [
        picture(i, (30 + 3 * (i % 4), 40 - 2 * (i % 3)), KINDS[i % len(KINDS)])
        for i in range(count)
    ]


def made(images, labels, names=None, split="train", **columns):
    """A data set of these images."""
    labels = np.asarray(labels)
    names = names or {int(label): f"class {label}" for label in set(labels.tolist())}
    return ImageDataset("made", split, images, labels, names, **columns)


def contents(images, rows):
    """The bytes of some images."""
    return [images.encoded(row) for row in rows]


def shuffled(dataset, batch_size, transform=TrainTransform(), **stream):  # noqa: B008
    """Training batches in shuffled order."""
    return training_batches(dataset, ShuffleSampler(len(dataset), batch_size), transform, **stream)


def assert_same(batches, others):
    """Batches of data sets, or lists of them, have the same images and labels."""
    batches, others = (
        each if isinstance(each, list) else list(each.as_numpy_iterator())
        for each in (batches, others)
    )
    assert len(batches) == len(others) > 0
    for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True):
        np.testing.assert_array_equal(images, other_images)
        np.testing.assert_array_equal(labels, other_labels)
