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
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdml import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.images.record_images import REMEDY, RecordImages, RecordTable, Shards
from tfdml.errors import UserError, short_message
from tfdml.manifests import Kinds, confined, fields, read_json

MANIFEST = "manifest.json"
FORMAT = "tfdml-records"
VERSION = 1
_SPLIT: Kinds = {"images": int, "table": dict, "shards": list, "class_names": dict}
ENTRY: Kinds = {"file": str, "bytes": int, "sha256": str}
SHARD: Kinds = {**ENTRY, "index": dict}
_CLASS_ID = re.compile(r"-?\d{1,19}")
# A TFRecord without data.
_SMALLEST_RECORD = 16
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
        >>> read("records/cars196", "test").num_classes
        98
    """
    folder = os.fspath(data_dir)
    manifest = read_manifest(folder)
    if split not in manifest["splits"]:
        raise UserError(f"{folder} has no {split} split; it holds {', '.join(manifest['splits'])}")
    about = manifest["splits"][split]
    columns = _columns(folder, about)
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
        >>> read_manifest("records/cars196")["dataset"]
        'cars196'
    """
    path = os.path.join(folder, MANIFEST)
    if storage.size_of(path) is None:
        raise UserError(f"{folder} holds no finished record files: it has no {MANIFEST}; run bin/prepare to its end")
    manifest = read_json(path, remedy=REMEDY)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UserError(f"{path} is not of {FORMAT}, version {VERSION}; prepare the folder again with bin/prepare")
    fields(manifest, {"dataset": str, "splits": dict}, path, REMEDY)
    for split, about in manifest["splits"].items():
        _check_split(folder, about, f"{path}: splits.{split}")
    return manifest


def _check_split(folder: str, about: Any, where: str) -> None:
    """Refuses an entry that lacks something, or names a file outside the folder."""
    fields(about, _SPLIT, where, REMEDY)
    _check_entry(folder, about["table"], f"{where}.table")
    for number, shard in enumerate(about["shards"]):
        place = f"{where}.shards[{number}]"
        _check_entry(folder, fields(shard, SHARD, place, REMEDY), place)
        _check_entry(folder, shard["index"], f"{place}.index")
    for label, name in about["class_names"].items():
        if not isinstance(name, str) or not _CLASS_ID.fullmatch(label):
            raise UserError(f"{where}.class_names must be from class ids to names, but has {label[:40]!r}; {REMEDY}")


def _check_entry(folder: str, entry: Any, where: str) -> None:
    confined(folder, fields(entry, ENTRY, where, REMEDY)["file"], where)


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
        >>> sorted(verify("records/cars196")["splits"])
        ['test', 'train']
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


def _columns(folder: str, about: dict[str, Any]) -> dict[str, np.ndarray]:
    path, data = os.path.join(folder, about["table"]["file"]), _read_entry(folder, about["table"])
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            columns = dict(file)
        _check_columns(columns, about["class_names"])
    except Exception as error:  # whatever NumPy raises on a damaged table
        raise UserError(f"{path} is damaged ({short_message(error, named=True)}); {REMEDY}") from error
    return columns


def _check_columns(columns: dict[str, np.ndarray], class_names: dict[str, str]) -> None:
    names, ends = columns["names"], columns["name_ends"]
    for name, kinds in (("labels", "iu"), ("name_ends", "iu"), ("super_labels", "iu"), ("is_query", "b")):
        column = columns.get(name, ends)
        if column.shape != ends.shape or column.ndim != 1 or (column.dtype.kind not in kinds and name in columns):
            raise ValueError(f"{name} is {column.dtype} of shape {column.shape}")
    if names.dtype != np.uint8 or (np.diff(ends, prepend=0) < 0).any() or ends.max(initial=0) > names.size:
        raise ValueError("name_ends does not divide names")
    unknown = {str(label) for label in np.unique(columns["labels"])} - class_names.keys()
    if unknown:
        raise ValueError(f"class {min(unknown)} has no name in the {MANIFEST}")


def _images(folder: str, shards: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> RecordImages:
    def places(shard: dict[str, Any]) -> np.ndarray:
        path = os.path.join(folder, shard["file"])
        size = storage.size_of(path)
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise UserError(f"{path} {found}; {REMEDY}")
        return _places(folder, shard["index"], shard["bytes"])

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


def _places(folder: str, entry: dict[str, Any], shard_bytes: int) -> np.ndarray:
    """(n, 2) offset and size of every record of a shard."""
    data = _read_entry(folder, entry)
    try:
        rows = np.array(data.split(), np.int64).reshape(-1, 2)
        offsets, sizes = rows.T
        if (offsets < 0).any() or (sizes < _SMALLEST_RECORD).any() or (offsets > shard_bytes - sizes).any():
            raise ValueError("a record lies outside the shard")
    except (ValueError, OverflowError) as error:
        raise UserError(f"{os.path.join(folder, entry['file'])} is no index of its shard; {REMEDY}") from error
    return rows


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
