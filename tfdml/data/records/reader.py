"""Record files: a data set in a few large tar files, read by index, with the labels in a table.

A folder of records, as `tfdml prepare` writes it, holds

- `manifest.json`: what was prepared from what, and the size and SHA-256 of every other file;
- `train-00000-of-00012.tar` and so on: the encoded images, numbered, as any tar reads them;
- `train.parquet`: a row for each image with `shard`, `offset` and `size` (where its bytes lie), `label`, `name`, and
  where the data set has them `super_label`, `is_query` and `group`, so that a data set of millions opens without
  reading its shards.

The shards are tar files and not ArrayRecord files, which also have random access. ArrayRecord has no wheels for
Windows, reads local files only, and opens a file that is missing or was cut off as one of 0 records. Its index would
replace two columns of the table, but not the manifest, the checks and the resumption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import Images, Source, reading_threads, source_of_encoded
from tfdml.errors import UserError, short_message
from tfdml.io import files
from tfdml.io.manifests import Kinds, confined, fields, read_json

MANIFEST = "manifest.json"
FORMAT = "tfdml-records"
VERSION = 3
REMEDY = "copy the folder again from its source, or prepare it again with tfdml prepare"
ENTRY: Kinds = {"file": str, "bytes": int, "sha256": str}
SHARD: Kinds = {**ENTRY, "images": int}
_SPLIT: Kinds = {"images": int, "table": dict, "shards": list, "class_names": dict}
_OPTIONAL = ("super_label", "is_query", "group")
_CLASS_ID = re.compile(r"-?\d{1,19}")
# The columns of a table.
COLUMNS = {
    "shard": "int32",
    "offset": "int64",
    "size": "int64",
    "label": "int64",
    "name": "binary",
    "super_label": "int64",
    "is_query": "bool",
    "group": "int64",
}


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
    paths = _shards(folder, about["shards"])
    columns, names = _columns(folder, about)
    return ImageDataset(
        name=manifest["dataset"],
        split=split,
        images=RecordImages(paths, columns["shard"], columns["offset"], columns["size"], names),
        labels=columns["label"],
        class_names={int(label): name for label, name in about["class_names"].items()},
        super_labels=columns.get("super_label"),
        is_query=columns.get("is_query"),
        groups=columns.get("group"),
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


def _shards(folder: str, shards: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the paths of shards as the manifest lists them, if each has its size."""
    paths = tuple(os.path.join(folder, shard["file"]) for shard in shards)
    for path, shard, size in zip(paths, shards, reading_threads().map(files.size_of, paths), strict=True):
        if size != shard["bytes"]:
            fault = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise UserError(f"{path} {fault}; {REMEDY}")
    return paths


def _columns(folder: str, about: dict[str, Any]) -> tuple[dict[str, np.ndarray], Any]:
    """Return the columns of a table, and that of the names as Arrow's."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    path, data = os.path.join(folder, about["table"]["file"]), _read_entry(folder, about["table"])
    try:
        table = pa.parquet.read_table(pa.BufferReader(data))
        table.validate(full=True)
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "name"}
        _check_columns(table, columns, about)
    except (KeyError, OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged ({short_message(error, named=True)}); {REMEDY}") from error
    return columns, table["name"].combine_chunks()


def _check_columns(table: Any, columns: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    for name, kind in COLUMNS.items():
        missing = name not in table.column_names and name in _OPTIONAL
        if not missing and (str(table.schema.field(name).type) != kind or table[name].null_count):
            raise ValueError(f"{name} must be {kind} without null, not {table.schema.field(name).type}")
    if len(table) != about["images"]:
        raise ValueError(f"{len(table)} rows for {about['images']} images")
    shard, offset, size = (columns[name] for name in ("shard", "offset", "size"))
    if not ((shard >= 0) & (shard < len(about["shards"]))).all():
        raise ValueError("shard names one that there is not")
    length = np.array([entry["bytes"] for entry in about["shards"]])[shard]
    if not ((offset >= 0) & (size > 0) & (size <= length) & (offset <= length - size)).all():
        raise ValueError("an image lies outside its shard")
    unknown = {str(label) for label in np.unique(columns["label"])} - about["class_names"].keys()
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RecordImages(Images):
    """Images in record files, read when they are needed; each from a remote file system by a request of its own.

    Args:
        paths: The shards, local or on any file system that `fsspec` knows.
        shard: (N,) in which shard each image lies.
        offsets: (N,) where in it the image begins, in bytes.
        sizes: (N,) how many bytes it has.
        names: (N,) its name in the data set that the records were made from, a `pyarrow.BinaryArray`.
    """

    # Record files are made of images that were decoded in full.
    verified: ClassVar[bool] = True

    paths: tuple[str, ...]
    shard: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: Any

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, index: int) -> str:
        """Return the name of one image in the data set that the records were made from."""
        return os.fsdecode(self.names[int(index)].as_py())

    def place(self, index: int) -> str:
        """Where one image lies, for messages: the file that it was made from may be long gone."""
        return f"{self.paths[self.shard[index]]}, image at byte {self.offsets[index]} ({self.name(index)})"

    def take(self, indices: np.ndarray) -> RecordImages:
        """Return the images at `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        shard, offsets, sizes = (column[indices] for column in (self.shard, self.offsets, self.sizes))
        return RecordImages(self.paths, shard, offsets, sizes, self.names.take(indices))

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one image."""
        path, offset, size = self.paths[self.shard[index]], int(self.offsets[index]), int(self.sizes[index])
        try:
            if files.is_remote(path):
                filesystem, there = files.filesystem_of(path)
                data = filesystem.cat_file(there, offset, offset + size)
            else:
                with open(path, "rb", buffering=0) as file:
                    file.seek(offset)
                    data = file.read(size)
        except Exception as error:  # clients of file systems have their own error types
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise UserError(f"{path} cannot be read ({reason}); {REMEDY}") from error
        if len(data) != size:
            raise UserError(f"{path} ends within the image at byte {offset}: it is damaged; {REMEDY}")
        return data

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(size, 0) for size in self.sizes.tolist()]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        remote = any(map(files.is_remote, self.paths))
        return source_of_encoded(lambda indices: (reading_threads().map if remote else map)(self.encoded, indices))
