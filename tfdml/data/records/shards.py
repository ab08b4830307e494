"""Writes one shard of record files, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdml import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.images.formats import format_of
from tfdml.data.images.record_images import ENCODED
from tfdml.data.records.workers import Examined

# A TFRecord's length and two checksums.
_FRAME = 16


def cut_into_shards(sizes: Sequence[int], shard_bytes: float) -> list[int]:
    """Where each shard begins.

    Args:
        sizes: (N,) bytes of each image.
        shard_bytes: A shard ends with the image that makes it this large.

    Returns:
        The index of the first image of each shard.

    Example:
        >>> cut_into_shards([3, 3, 3, 3, 3], 6)
        [0, 2, 4]
    """
    starts, held = [], shard_bytes
    for index, size in enumerate(sizes):
        if held >= shard_bytes:
            starts.append(index)
            held = 0
        held += size
    return starts


def write_shard(folder: str, stem: str, dataset: ImageDataset, images: Iterable[Examined]) -> dict[str, Any]:
    """Writes `stem.tfrecord` and `stem.idx`.

    Args:
        folder: Where.
        stem: The name of the shard, without suffix.
        dataset: Where the labels and names come from.
        images: The images, in order.

    Returns:
        The shard's entry in the manifest: file, number of images, bytes, SHA-256, and the same for the index.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> examined = [Examined(row, jpeg, "") for row in range(3)]
        >>> write_shard(".", "train-00000-of-00001", train, examined)["images"]
        3
    """
    path = os.path.join(folder, f"{stem}.tfrecord")
    images = list(images)
    lines, offset = [], 0
    with storage.atomic_write(path, sum(len(image.data) for image in images)) as temporary:
        with tf.io.TFRecordWriter(temporary) as writer:
            for image in images:
                record = _example(dataset, image).SerializeToString(deterministic=True)
                writer.write(record)
                lines.append(f"{offset} {len(record) + _FRAME}\n")
                offset += len(record) + _FRAME
        digest = storage.sha256_of(temporary)
    index = "".join(lines).encode()
    storage.write_whole(os.path.join(folder, f"{stem}.idx"), index)
    return {
        "file": f"{stem}.tfrecord",
        "images": len(images),
        "bytes": offset,
        "sha256": digest,
        "index": {"file": f"{stem}.idx", "bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()},
    }


def _example(dataset: ImageDataset, image: Examined) -> tf.train.Example:
    kind = format_of(image.data[:16])
    label = int(dataset.labels[image.index])
    features = {
        ENCODED: _bytes(image.data),
        "image/format": _bytes(kind.name.encode() if kind else b""),
        "image/filename": _bytes(os.fsencode(dataset.images.name(image.index))),
        "image/class/label": _integer(label),
        "image/class/text": _bytes(os.fsencode(dataset.class_names[label])),
    }
    if dataset.super_labels is not None:
        features["image/class/super_label"] = _integer(int(dataset.super_labels[image.index]))
    if dataset.is_query is not None:
        features["image/role"] = _bytes(b"query" if dataset.is_query[image.index] else b"gallery")
    return tf.train.Example(features=tf.train.Features(feature=features))


def _bytes(value: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _integer(value: int) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
