"""Record files: a data set in a few large TFRecord shards, read by index, with the labels beside them.

A folder of records, as `bin/prepare` writes it, holds

- `manifest.json`: what was prepared from what, and the size and SHA-256 of every other file;
- `train-00000-of-00012.tfrecord` and so on: `tf.train.Example` records with `image/encoded`, `image/format`,
  `image/filename`, `image/class/label`, `image/class/text`, and where the data set has them
  `image/class/super_label` and `image/role`;
- `train-00000-of-00012.idx`: where each record of that shard lies, a line `offset size`, as NVIDIA DALI's
  tfrecord2idx writes it;
- `train.npz`: labels and names of all images, so that a data set of millions opens without reading its shards.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdml.data import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.record_images import REMEDY, RecordImages, RecordTable, Shards
from tfdml.errors import UserError

MANIFEST = "manifest.json"
FORMAT = "tfdml-records"
VERSION = 1
# Most of the time goes to waiting for the network.
_THREADS = 16


def read(data_dir: str | os.PathLike, split: str = "train") -> ImageDataset:
    """Reads a split of record files: the images, labels, names and order of the data set they were made from.

    Args:
        data_dir: The folder that `bin/prepare` wrote, local or on any file system that `tf.io.gfile` knows.
        split: `"train"` or `"test"`.

    Raises:
        UserError: The folder holds no finished records or not this split, or a file of it is missing or damaged.

    Example:
        >>> read("records/cars196", "test").num_classes  # doctest: +SKIP
        98
    """
    folder = os.fspath(data_dir)
    manifest = read_manifest(folder)
    if split not in manifest["splits"]:
        raise UserError(f"{folder} has no {split} split; it was prepared with --splits={','.join(manifest['splits'])}")
    about = manifest["splits"][split]
    columns = _columns(folder, about["table"])
    images = _images(folder, about["shards"], columns)
    if not len(images) == len(columns["labels"]) == about["images"]:
        raise UserError(
            f"{folder}: the manifest counts {about['images']} {split} images, the table {len(columns['labels'])}, the "
            f"shards {len(images)}; {REMEDY}"
        )
    return ImageDataset(
        name=manifest["dataset"],
        split=split,
        images=images,
        labels=columns["labels"],
        class_names={int(label): name for label, name in about["class_names"].items()},
        super_labels=columns.get("super_labels"),
        is_query=columns.get("is_query"),
    )


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a folder of record files.

    Raises:
        UserError: There is none, or it cannot be understood.

    Example:
        >>> read_manifest("records/cars196")["dataset"]  # doctest: +SKIP
        'cars196'
    """
    path = os.path.join(folder, MANIFEST)
    if storage.size_of(path) is None:
        raise UserError(
            f"{folder} holds no finished record files: it has no {MANIFEST}; run bin/prepare --out={folder} to its end"
        )
    try:
        manifest = json.loads(storage.read_bytes(path))
        known = manifest["format"] == FORMAT and isinstance(manifest["splits"], dict)
    except Exception as error:  # tf.io.gfile has its own error types
        raise UserError(f"{path} cannot be read ({type(error).__name__}); {REMEDY}") from error
    if not known or manifest["version"] != VERSION:
        raise UserError(f"{path} is not of {FORMAT}, version {VERSION}; prepare the folder again with bin/prepare")
    return manifest


def verify(folder: str, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Compares every file of a folder of records with the checksums in its manifest.

    Args:
        folder: The folder.
        progress: Called with the bytes read so far, and all there are.

    Returns:
        The manifest.

    Raises:
        UserError: Files are missing or damaged; the message names them.

    Example:
        >>> verify("records/cars196")["splits"]["train"]["images"]  # doctest: +SKIP
        8054
    """
    manifest = read_manifest(folder)
    entries = []
    for about in manifest["splits"].values():
        entries.append(about["table"])
        for shard in about["shards"]:
            entries += [shard, shard["index"]]
    total, done, faults = sum(entry["bytes"] for entry in entries), 0, []
    for entry in entries:
        try:
            _read_entry(folder, entry)
        except UserError as error:
            faults.append(str(error).removesuffix(f"; {REMEDY}"))
        done += entry["bytes"]
        progress(done, total)
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(f"{len(faults)} of {len(entries)} files are damaged: {'; '.join(faults[:5])}{more}; {REMEDY}")
    return manifest


def _columns(folder: str, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    data = _read_entry(folder, entry)
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return dict(file)


def _images(folder: str, shards: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> RecordImages:
    def places(shard: dict[str, Any]) -> np.ndarray:
        path = os.path.join(folder, shard["file"])
        size = storage.size_of(path)
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise UserError(f"{path} {found}; {REMEDY}")
        index = _read_entry(folder, shard["index"])
        return np.array(index.split(), np.int64).reshape(-1, 2)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(places, shards))
    lies = np.concatenate(found) if found else np.zeros((0, 2), np.int64)
    table = RecordTable(
        shards=Shards(tuple(os.path.join(folder, shard["file"]) for shard in shards)),
        shard=np.repeat(np.arange(len(shards)), [len(rows) for rows in found]),
        offsets=lies[:, 0],
        sizes=lies[:, 1],
        names=columns["names"].tobytes(),
        name_ends=columns["name_ends"],
    )
    return RecordImages(table, np.arange(len(lies)))


def _read_entry(folder: str, entry: dict[str, Any]) -> bytes:
    """A file that the manifest lists, if it is as it should be."""
    path = os.path.join(folder, entry["file"])
    try:
        data = storage.read_bytes(path)
    except Exception as error:  # tf.io.gfile has its own error types
        missing = storage.size_of(path) is None
        reason = "is missing" if missing else f"cannot be read ({type(error).__name__})"
        raise UserError(f"{path} {reason}; {REMEDY}") from error
    if len(data) != entry["bytes"]:
        raise UserError(f"{path} has {len(data):,} bytes instead of {entry['bytes']:,}; {REMEDY}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise UserError(f"{path} is damaged (its checksum is not the manifest's); {REMEDY}")
    return data
