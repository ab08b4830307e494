"""Record files: a data set in a few large TFRecord shards, read by index, with the labels in a table.

A folder of records, as `tfdml prepare` writes it, holds

- `manifest.json`: what was prepared from what, and the size and SHA-256 of every other file;
- `train-00000-of-00012.tfrecord` and so on: `tf.train.Example` records with `image/encoded`, `image/format`,
  `image/filename`, `image/class/label`, `image/class/text`, and where the data set has them
  `image/class/super_label` and `image/role`;
- `train.npz`: the labels and names of all images and the lengths of their records, so that a data set of millions opens
  without reading its shards.

The shards are TFRecord files and not ArrayRecord files, which also have random access. ArrayRecord has no wheels for
Windows, reads local files only, and opens a file that is missing or was cut off as one of 0 records. Its index would
replace the lengths in the table, but not the manifest, the checks and the resumption.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import os
import re
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import Images, Source, source_of_encoded
from tfdml.errors import UserError, short_message
from tfdml.io import files
from tfdml.io.manifests import Kinds, confined, fields, read_json

MANIFEST = "manifest.json"
FORMAT = "tfdml-records"
VERSION = 2
ENCODED = "image/encoded"
REMEDY = "copy the folder again from its source, or prepare it again with tfdml prepare"
ENTRY: Kinds = {"file": str, "bytes": int, "sha256": str}
SHARD: Kinds = {**ENTRY, "images": int}
_SPLIT: Kinds = {"images": int, "table": dict, "shards": list, "class_names": dict}
_CLASS_ID = re.compile(r"-?\d{1,19}")
# A TFRecord's frame: the length and its checksum before the data, the data's checksum after it.
_BEFORE, _AFTER = 12, 4
_OPEN_FILES = 64
# Most of the time goes to waiting for the network.
_THREADS = 32


def read(data_dir: str | os.PathLike, split: str = "train") -> ImageDataset:
    """Read a split of record files: the images, labels, names and order of the data set they were made from.

    Args:
        data_dir: The folder that `tfdml prepare` wrote, local or on any file system that `fsspec` knows.
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
    table = RecordTable.of(folder, about["shards"], columns)
    return ImageDataset(
        name=manifest["dataset"],
        split=split,
        images=RecordImages(table, np.arange(len(table.sizes))),
        labels=columns["labels"],
        class_names={int(label): name for label, name in about["class_names"].items()},
        super_labels=columns.get("super_labels"),
        is_query=columns.get("is_query"),
    )


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a folder of record files.

    Raises:
        UserError: There is none, or it cannot be understood.

    Example:
        >>> read_manifest("records/cars196")["dataset"]
        'cars196'
    """
    path = os.path.join(folder, MANIFEST)
    if files.size_of(path) is None:
        raise UserError(f"{folder} holds no finished record files: it has no {MANIFEST}; run tfdml prepare to its end")
    manifest = read_json(path, remedy=REMEDY)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UserError(f"{path} is not of {FORMAT}, version {VERSION}; prepare the folder again with tfdml prepare")
    fields(manifest, {"dataset": str, "splits": dict}, path, REMEDY)
    for split, about in manifest["splits"].items():
        _check_split(folder, about, f"{path}: splits.{split}")
    return manifest


def _check_split(folder: str, about: Any, where: str) -> None:
    """Refuses an entry that lacks something, or names a file outside the folder."""
    fields(about, _SPLIT, where, REMEDY)
    entries = {"table": about["table"], **{f"shards[{i}]": shard for i, shard in enumerate(about["shards"])}}
    for name, entry in entries.items():
        place = f"{where}.{name}"
        confined(folder, fields(entry, ENTRY if name == "table" else SHARD, place, REMEDY)["file"], place)
    for label, name in about["class_names"].items():
        if not isinstance(name, str) or not _CLASS_ID.fullmatch(label):
            raise UserError(f"{where}.class_names must be from class ids to names, but has {label[:40]!r}; {REMEDY}")


def verify(folder: str, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Compare every file of a folder of records with the checksums in its manifest.

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
        entries += [about["table"], *about["shards"]]
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
        _check_columns(columns, about)
    except Exception as error:  # whatever NumPy raises on a damaged table
        raise UserError(f"{path} is damaged ({short_message(error, named=True)}); {REMEDY}") from error
    return columns


def _check_columns(columns: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    for name, kinds in (
        ("labels", "iu"), ("sizes", "iu"), ("name_ends", "iu"), ("super_labels", "iu"), ("is_query", "b"),
    ):  # fmt: skip
        column = columns.get(name) if name in ("super_labels", "is_query") else columns[name]
        if column is not None and (column.shape != (about["images"],) or column.dtype.kind not in kinds):
            raise ValueError(f"{name} is {column.dtype} of shape {column.shape}, for {about['images']} images")
    names, ends, sizes = columns["names"], columns["name_ends"], columns["sizes"].astype(np.int64)
    if names.dtype != np.uint8 or (np.diff(ends, prepend=0) < 0).any() or ends.max(initial=0) > names.size:
        raise ValueError("name_ends does not divide names")
    counts = [shard["images"] for shard in about["shards"]]
    if sum(counts) != about["images"] or min(counts, default=0) < 0 or (sizes < _BEFORE + _AFTER).any():
        raise ValueError("sizes are not those of the shards' records")
    for shard, part in zip(about["shards"], np.split(sizes, np.cumsum(counts)[:-1]) if counts else [], strict=True):
        if part.sum() != shard["bytes"]:
            raise ValueError(f"sizes are not those of the records of {shard['file']}")
    unknown = {str(label) for label in np.unique(columns["labels"])} - about["class_names"].keys()
    if unknown:
        raise ValueError(f"class {min(unknown)} has no name in the {MANIFEST}")


def _read_entry(folder: str, entry: dict[str, Any]) -> bytes:
    """Return a file that the manifest lists, if it is as it should be."""
    path = os.path.join(folder, entry["file"])
    try:
        data = files.read_bytes(path)
    except Exception as error:  # clients of file systems have their own error types
        missing = files.size_of(path) is None
        reason = "is missing" if missing else f"cannot be read ({type(error).__name__})"
        raise UserError(f"{path} {reason}; {REMEDY}") from error
    if len(data) != entry["bytes"]:
        raise UserError(f"{path} has {len(data):,} bytes instead of {entry['bytes']:,}; {REMEDY}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise UserError(f"{path} is damaged (its checksum is not the manifest's); {REMEDY}")
    return data


class Shards:
    """Random access to the records of a data set's shards, for many threads at once.

    Local shards are kept open, a bounded number of them; each record of a remote one is a request of its own.

    Args:
        paths: The shards, local or on any file system that `fsspec` knows.
    """

    def __init__(self, paths: tuple[str, ...]):
        self.paths = paths
        # One that is dropped while another thread reads from it is closed after that read: see `_Open`.
        self._open = functools.lru_cache(_OPEN_FILES)(_Open)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return the data of the record that takes `size` bytes at `offset`.

        Raises:
            UserError: The shard is missing or unreadable, or no such record lies there.
        """
        path = self.paths[shard]
        try:
            if files.is_remote(path) or not hasattr(os, "pread"):  # which Windows lacks
                framed = _read_range(path, offset, size)
            else:
                # A name of its own keeps it open: of two that threads open at once, the cache keeps only one.
                file = self._open(path)
                framed = os.pread(file.descriptor, size, offset)
        except Exception as error:  # clients of file systems have their own error types
            raise UserError(
                f"{path} cannot be read ({getattr(error, 'strerror', None) or type(error).__name__}); {REMEDY}"
            ) from error
        if len(framed) != size or struct.unpack_from("<Q", framed)[0] != size - _BEFORE - _AFTER:
            raise UserError(f"{path} holds no record of {size} bytes at byte {offset}: it is damaged; {REMEDY}")
        return framed[_BEFORE:-_AFTER]


class _Open:
    """An open file, closed when the last thread that reads from it releases it."""

    def __init__(self, path: str):
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


def _read_range(path: str, offset: int, size: int) -> bytes:
    filesystem, there = files.filesystem_of(path)
    return filesystem.cat_file(there, offset, offset + size)


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "records")


@dataclasses.dataclass(frozen=True, eq=False)
class RecordTable:
    """Where each record of a split lies, and what its image is called.

    Args:
        shards: The shards.
        shard: (N,) which shard.
        offsets: (N,) where in it the record begins, in bytes.
        sizes: (N,) how many bytes it takes, frame included.
        names: The names of all images, as bytes one after the other.
        name_ends: (N,) where each name ends in `names`.
    """

    shards: Shards
    shard: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: bytes
    name_ends: np.ndarray

    @classmethod
    def of(cls, folder: str, shards: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> RecordTable:
        """Return the table of shards as the manifest lists them, if each has its size."""
        paths = tuple(os.path.join(folder, shard["file"]) for shard in shards)
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(files.size_of, paths))
        for path, shard, size in zip(paths, shards, found, strict=True):
            if size != shard["bytes"]:
                fault = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
                raise UserError(f"{path} {fault}; {REMEDY}")
        sizes = columns["sizes"].astype(np.int64)
        shard_of = np.repeat(np.arange(len(shards)), [shard["images"] for shard in shards])
        starts = np.cumsum([0, *(shard["bytes"] for shard in shards)])
        offsets = np.cumsum(sizes) - sizes - starts[shard_of]
        return cls(Shards(paths), shard_of, offsets, sizes, columns["names"].tobytes(), columns["name_ends"])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RecordImages(Images):
    """Images in record files, read when they are needed.

    Args:
        table: Where the records are.
        rows: (N,) the rows of the table that these images are.
    """

    # Record files are made of images that were decoded in full.
    verified: ClassVar[bool] = True

    table: RecordTable
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """Return the name of one image in the data set that the records were made from."""
        row = int(self.rows[index])
        ends = self.table.name_ends
        return os.fsdecode(self.table.names[ends[row - 1] if row else 0 : ends[row]])

    def place(self, index: int) -> str:
        """Where the record of one image lies, for messages: the file that it was made from may be long gone."""
        row = int(self.rows[index])
        shard = self.table.shards.paths[self.table.shard[row]]
        return f"{shard}, record at byte {self.table.offsets[row]} ({self.name(index)})"

    def take(self, indices: np.ndarray) -> RecordImages:
        """Return the images at `indices`, in that order."""
        return RecordImages(self.table, self.rows[indices])

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one image."""
        return self.read(np.array([index]))[0]

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(int(size), 0) for size in self.table.sizes[self.rows]]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_encoded(self.read)

    def read(self, indices: np.ndarray) -> list[bytes]:
        """Return the encoded bytes of images.

        Args:
            indices: (n,) which images.

        Returns:
            n strings of bytes, in that order.

        Raises:
            UserError: A shard is missing or damaged.
        """
        table, rows = self.table, self.rows[indices]
        places = zip(table.shard[rows].tolist(), table.offsets[rows].tolist(), table.sizes[rows].tolist(), strict=True)
        if any("://" in path for path in table.shards.paths):
            return list(_threads().map(lambda place: self._image(*place), places))
        return [self._image(*place) for place in places]

    def _image(self, shard: int, offset: int, size: int) -> bytes:
        data = self.table.shards.read(shard, offset, size)
        try:
            return tf.train.Example.FromString(data).features.feature[ENCODED].bytes_list.value[0]
        except Exception as error:  # the parser's own type, or no such field
            path = self.table.shards.paths[shard]
            raise UserError(f"{path} has no image in its record at byte {offset}: it is damaged; {REMEDY}") from error
