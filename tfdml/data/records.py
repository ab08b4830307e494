"""Record files: a data set in a few large tar files, read by index, with the labels in a table.

A folder of records, as `tfdml prepare` writes it, holds

- `manifest.json`: what was prepared from what, and the size and SHA-256 of every other file;
- `train-00000-of-00012.tar` and so on: the encoded images, numbered, as any tar reads them;
- `train.parquet`: a row for each image with `shard`, `offset` and `size` (where its bytes lie), `label`, `class`,
  `name`, and where the data set has them `super_label`, `is_query` and `group`, so that a data set of millions opens
  without reading its shards.

The shards are tar files and not ArrayRecord files, which also have random access. ArrayRecord has no wheels for
Windows, reads local files only, and opens a file that is missing or was cut off as one of 0 records. Its index would
replace two columns of the table, but not the manifest, the checks and the resumption.

A preparation examines every image, writes the shards, and the manifest last. Interrupted and called again, it resumes
with the shards that are not yet there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import datetime
import functools
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset, ImageError, access_fault, decoding_fault, find_faults
from tfdml.data.decoding import DECODER_LIMIT, decode_image, format_of
from tfdml.data.images import Images, Source, reading_threads, source_of_encoded
from tfdml.data.transforms import TrainTransform
from tfdml.errors import REASON, UserError, check_choice, user_errors
from tfdml.io import files
from tfdml.io.folders import MANIFEST, PROGRESS, ResumableFolder
from tfdml.io.manifests import Kinds, compare_files, confined, fields, read_json

FORMAT = "tfdml-records"
VERSION = 4
REMEDY = "copy the folder again from its source, or prepare it again with tfdml prepare"
_FILE: Kinds = {"bytes": int, "sha256": str}
_SPLIT: Kinds = {"images": int, "table": str, "shards": list}
# Columns that a table may lack, and what they are in a data set.
_OPTIONAL = {"super_label": "super_labels", "is_query": "is_query", "group": "groups"}
# The columns of a table.
COLUMNS = {
    "shard": "int32",
    "offset": "int64",
    "size": "int64",
    "label": "int64",
    "class": "binary",
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
    paths, columns = _read_split(folder, manifest["splits"][split], manifest["files"])
    classes, rows = np.unique(columns["label"], return_index=True)
    names = columns["class"].take(rows).to_pylist()
    class_names = dict(zip(classes.tolist(), map(os.fsdecode, names), strict=True))
    images = RecordImages(paths, *(columns[name] for name in ("shard", "offset", "size", "name")))
    optional = {field: columns.get(column) for column, field in _OPTIONAL.items()}
    return ImageDataset(manifest["dataset"], split, images, columns["label"], class_names, **optional)


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
    fields(manifest, {"dataset": str, "splits": dict, "files": dict}, path, REMEDY)
    for name, entry in manifest["files"].items():
        confined(folder, name, f"{path}: files")
        fields(entry, _FILE, f"{path}: files.{name}", REMEDY)
    for split, about in manifest["splits"].items():
        named = [fields(about, _SPLIT, f"{path}: splits.{split}", REMEDY)["table"], *about["shards"]]
        if not all(isinstance(name, str) and name in manifest["files"] for name in named):
            raise UserError(f"{path}: splits.{split} names files that are not in its files; {REMEDY}")
    return manifest


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
    total, done, faults = sum(entry["bytes"] for entry in manifest["files"].values()), 0, []
    for name, entry in manifest["files"].items():
        try:
            compare_files(folder, {name: entry}, MANIFEST, "")
        except UserError as error:
            faults.append(str(error))
        done += entry["bytes"]
        progress(done, total)
    if faults:
        count = f"{len(faults)} of {len(manifest['files'])} files are damaged"
        raise UserError(f"{count}: {'; '.join(faults[:_NAMED_IN_MESSAGES])}; {REMEDY}")
    return manifest


def _read_split(folder: str, about: dict[str, Any], known: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the paths of the shards, each of its size, and the columns of the table, binary ones as Arrow's."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    paths = tuple(os.path.join(folder, name) for name in about["shards"])
    expected = [known[name]["bytes"] for name in about["shards"]]
    for path, size, found in zip(paths, expected, reading_threads().map(files.size_of, paths), strict=True):
        if found != size:
            fault = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise UserError(f"{path} {fault}; {REMEDY}")
    path = os.path.join(folder, about["table"])
    compare_files(folder, {about["table"]: known[about["table"]]}, MANIFEST, REMEDY)
    kinds = (KeyError, OSError, ValueError, pa.ArrowException)
    with user_errors(kinds, f"{path} is damaged ({REASON}); {REMEDY}", named=True):
        table = pa.parquet.read_table(pa.BufferReader(files.read_bytes(path)))
        table.validate(full=True)
        columns = {
            name: table[name].combine_chunks() if kind == "binary" else table[name].to_numpy()
            for name, kind in COLUMNS.items()
            if name in table.column_names or name not in _OPTIONAL
        }
        _check_columns(table, columns, about["images"], np.array(expected))
    return paths, columns


def _check_columns(table: Any, columns: dict[str, Any], images: int, shard_bytes: np.ndarray) -> None:
    for name in columns:
        kind = table.schema.field(name).type
        if str(kind) != COLUMNS[name] or table[name].null_count:
            raise ValueError(f"{name} must be {COLUMNS[name]} without null, not {kind}")
    if len(table) != images:
        raise ValueError(f"{len(table)} rows for {images} images")
    shard, offset, size = (columns[name] for name in ("shard", "offset", "size"))
    if not ((shard >= 0) & (shard < len(shard_bytes))).all():
        raise ValueError("shard names one that there is not")
    length = shard_bytes[shard]
    if not ((offset >= 0) & (size > 0) & (size <= length) & (offset <= length - size)).all():
        raise ValueError("an image lies outside its shard")


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
            raise UserError(f"{path} is {access_fault(error)}; {REMEDY}") from error
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


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """How images are checked and stored.

    Args:
        shrink: Images whose shorter side is longer than this many pixels are resized to it and encoded again; 0 keeps
            every byte. Smaller images are never enlarged or touched.
        shrink_format: jpeg (quality 95) or png (lossless), for the images that are resized.
        shard_mb: MiB of source images in a shard.
        bad_images: error, to end without records if an image is bad, or skip, to leave the bad ones out.
        max_pixels: An image whose header states more is bad, and is not decoded.

    Raises:
        UserError: A value is out of range.

    Example:
        >>> RecordSettings(shrink=256).shrink_format
        'jpeg'
    """

    shrink: int = 0
    shrink_format: str = "jpeg"
    shard_mb: float = 128.0
    bad_images: str = "error"
    max_pixels: int = DECODER_LIMIT

    def __post_init__(self):
        if self.shrink < 0:
            raise UserError(f"`shrink={self.shrink}`: give the pixels of the shorter side, or 0 for no change")
        for name in ("shard_mb", "max_pixels"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"`{name}={getattr(self, name)}` must be more than 0, and finite")
        check_choice("`shrink_format`", self.shrink_format, ("jpeg", "png"))
        check_choice("`bad_images`", self.bad_images, ("error", "skip"))


_JPEG_QUALITY = 95

Progress = Callable[[int, int, int], None]  # images done, of how many, bad ones among them


def examine(images: Images, index: int, settings: RecordSettings) -> tuple[bytes, str | None]:
    """Read, decode and convert an image.

    Args:
        images: The images.
        index: Which one.
        settings: The preparation's settings.

    Returns:
        The bytes for its record, and what is wrong with it, or None.

    Example:
        >>> examine(EncodedImages((jpeg[:100],), ("1.jpg",)), 0, RecordSettings())[1]
        'truncated JPEG (no end-of-image marker)'
    """
    try:
        data = images.encoded(index)
    except Exception as error:  # clients of file systems have their own error types
        return b"", access_fault(error)
    convert, converted = _converter(settings.shrink, settings.shrink_format), [b""]
    fault = decoding_fault(data, lambda encoded: converted.append(convert(encoded).numpy()), settings.max_pixels)
    return converted[-1] or data, fault


@functools.cache
def _converter(side: int, kind: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """From an image's bytes to those of the shrunk one, or to an empty string where it stays as it is."""

    def encoded(image: tf.Tensor) -> tf.Tensor:
        # Resized as in training, so that training at this size does not resize again.
        shrunk = TrainTransform("random_crop", resize=side, image_size=side).prepare(image)
        return tf.io.encode_png(shrunk) if kind == "png" else tf.io.encode_jpeg(shrunk, "rgb", quality=_JPEG_QUALITY)

    @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
    def convert(data: tf.Tensor) -> tf.Tensor:
        image = decode_image(data)
        size = tf.shape(image)
        # Even an image that stays as it is must be decoded.
        with tf.control_dependencies([tf.debugging.assert_positive(size)]):
            same = tf.constant(b"")
            return tf.cond(tf.reduce_min(size[:2]) > side, lambda: encoded(image), lambda: same) if side else same

    return convert


_NAMED_IN_MESSAGES = 5


@dataclasses.dataclass
class SplitReport:
    """What a preparation found in one split.

    Args:
        dataset: The split.
        faults: The bad images.
        files: The manifest's entries of the shards, by name, where any were written.
        places: By shard, of each image in it the offset and the size, in bytes.
        resumed: How many shards an earlier run had written.
    """

    dataset: ImageDataset
    faults: list[ImageError] = dataclasses.field(default_factory=list)
    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    places: list[list[list[int]]] = dataclasses.field(default_factory=list)
    resumed: int = 0

    def add(self, part: Mapping[str, Any]) -> None:
        """Add what is known of a shard."""
        for index, reason in part["faults"].items():
            self.faults.append(ImageError(int(index), self.dataset.images.place(int(index)), reason))
        self.files |= part["files"]
        self.places += [part["places"]] if part["files"] else []

    @property
    def kept(self) -> np.ndarray:
        """The indices of the images that have a record."""
        return np.setdiff1d(np.arange(len(self.dataset)), [fault.index for fault in self.faults])

    def about(self, table: str) -> dict[str, Any]:
        """Return the split's part of the manifest."""
        bad = [{"name": fault.name, "reason": fault.reason} for fault in self.faults]
        classes = len(np.unique(self.dataset.labels[self.kept]))
        shards = list(self.files)
        return {"images": len(self.kept), "classes": classes, "table": table, "shards": shards, "bad_images": bad}


def bad_images_in_words(reports: Mapping[str, SplitReport]) -> str:
    """How many images are bad, for which reasons, and the first of them.

    Args:
        reports: What was found, by split.

    Example:
        >>> bad_images_in_words({})
        'none of the 0 images is bad'
    """
    faults = [fault for found in reports.values() for fault in found.faults]
    total = sum(len(found.dataset) for found in reports.values())
    if not faults:
        return f"none of the {total:,} images is bad"
    # A reason without its details.
    reasons = collections.Counter(re.split(r":| \(|;", one_line(fault.reason))[0] for fault in faults)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    named = "; ".join(one_line(str(fault)) for fault in faults[:_NAMED_IN_MESSAGES])
    more = "; ..." if len(faults) > _NAMED_IN_MESSAGES else ""
    return f"{len(faults):,} of {total:,} images are bad ({counts}): {named}{more}"


def one_line(text: str) -> str:
    """Return a name or a reason without line ends and tabs.

    Example:
        >>> one_line("a" + chr(10) + "b")
        'a b'
    """
    return " ".join(text.split()) if any(c in text for c in "\n\r\t") else text


BAD_IMAGES = "bad_images.txt"
_MEGABYTE = 2**20
# Images that are checked between two reports of progress.
_BLOCK = 1024


def check(
    splits: Mapping[str, ImageDataset], settings: RecordSettings | None = None, progress: Progress = lambda *_: None
) -> dict[str, SplitReport]:
    """Decode every image; writes nothing.

    Args:
        splits: The data set's splits by name.
        settings: The preparation's settings.
        progress: Called now and then.

    Returns:
        The bad images, by split.

    Example:
        >>> check({"train": load("folder", "photos")})["train"].faults
        []
    """
    max_pixels = (settings or RecordSettings()).max_pixels
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    total, done, bad = sum(map(len, splits.values())), 0, 0
    for found in reports.values():
        for start in range(0, len(found.dataset), _BLOCK):
            rows = range(len(found.dataset))[start : start + _BLOCK]
            found.faults += find_faults(found.dataset.images, rows, max_pixels=max_pixels)
            done, bad = done + len(rows), sum(len(report.faults) for report in reports.values())
            progress(done, total, bad)
    return reports


def plan(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, tuple[int, int, list[int]]]:
    """Return what a preparation would write, without reading an image.

    Args:
        splits: The data set's splits by name.
        settings: The preparation's settings.

    Returns:
        Images, bytes of them as they are now, and the first image of each shard, by split.

    Example:
        >>> images, image_bytes, starts = plan({"train": load("folder", "photos")}, RecordSettings())["train"]
        >>> images, starts
        (6, [0])
    """
    planned = {}
    for split, dataset in splits.items():
        sizes = [stamp[0] for stamp in dataset.images.stamps()]
        planned[split] = (len(dataset), sum(sizes), cut_into_shards(sizes, settings.shard_mb * _MEGABYTE))
    return planned


def prepare(
    splits: Mapping[str, ImageDataset],
    out: str | os.PathLike,
    settings: RecordSettings | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, SplitReport]:
    """Check a data set and writes it as record files that `load("records", out, split)` reads.

    Interrupted and called again with the same arguments, it keeps the shards that are complete and continues. The
    manifest is written last: a folder without it is not yet a data set.

    Args:
        splits: The data set's splits by name.
        out: A new or empty folder, local or on any file system that `fsspec` knows.
        settings: How images are checked and stored.
        source: Where the data set came from (`data_dir`, `options`), for the manifest.
        progress: Called now and then.

    Returns:
        What was found and written, by split; empty where an earlier run had finished.

    Raises:
        UserError: Images are bad and `bad_images` is `"error"`; the folder holds something else, is being written by
            another process, or is full.

    Example:
        >>> splits = {split: load("cars196", "data/cars196", split) for split in ("train", "test")}
        >>> reports = prepare(splits, "records/cars196_256", RecordSettings(shrink=256))
        >>> load("records", "records/cars196_256", "train").num_classes
        98
    """
    out, settings = os.fspath(out), settings or RecordSettings()
    folder = ResumableFolder(out, "out", FORMAT, VERSION, _identity(splits, settings))
    with folder.opened():
        if folder.manifest:
            for split in splits:
                read(out, split)
            return {}
        reports = _write_shards(folder, splits, settings, progress)
        _report_bad_images(reports, out, settings)
        known = {f"{split}.parquet": _write_table(found, split, out) for split, found in reports.items()}
        for found in reports.values():
            known |= found.files
        entries = {
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "dataset": next(iter(splits.values())).name,
            "source": dict(source or {}),
            "splits": {split: found.about(f"{split}.parquet") for split, found in reports.items()},
            "files": known,
        }
        folder.finish(entries)
    return reports


def _write_shards(
    folder: ResumableFolder, splits: Mapping[str, ImageDataset], settings: RecordSettings, progress: Progress
) -> dict[str, SplitReport]:
    """Examine the images shard by shard, and write those that an earlier run has not written."""
    starts = _starts(folder, splits, settings)
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    total, done, bad = sum(map(len, splits.values())), 0, 0
    strict = settings.bad_images == "error"
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1, "prepare")
    try:
        for split, dataset in splits.items():
            stamps = dataset.images.stamps()
            examining = functools.partial(examine, dataset.images, settings=settings)
            for number, (start, stop) in enumerate(itertools.pairwise([*starts[split], len(dataset)])):
                stem = f"{split}-{number:05d}-of-{len(starts[split]):05d}"
                key = hashlib.sha256(json.dumps(stamps[start:stop]).encode()).hexdigest()
                part = folder.part(stem)
                if part and part["key"] == key and not (part["faults"] and strict) and folder.has_files(part):
                    reports[split].resumed += 1
                    progress(done + stop - start, total, bad)
                else:
                    kept: dict[int, bytes] = {}
                    faults: dict[str, str] = {}
                    for index, (data, fault) in enumerate(pool.map(examining, range(start, stop)), start):
                        if fault:
                            faults[str(index)] = fault
                        else:
                            kept[index] = data
                        progress(done + index + 1 - start, total, bad + len(faults))
                    bad += len(faults)
                    part = {"key": key, "faults": faults, "places": [], "files": {}}
                    if kept and not (faults and strict):
                        written, part["places"] = write_shard(folder.path(f"{stem}.tar"), kept)
                        part = folder.finish_part(stem, part, {f"{stem}.tar": written})
                done += stop - start
                reports[split].add(part)
    finally:
        pool.shutdown(cancel_futures=True)
    return reports


def _starts(
    folder: ResumableFolder, splits: Mapping[str, ImageDataset], settings: RecordSettings
) -> dict[str, list[int]]:
    """Where the shards begin: as recorded by an earlier run, or divided now and recorded."""
    if folder.plan is not None:
        return fields(folder.plan, dict.fromkeys(splits, list), folder.path(PROGRESS), folder.remedy)
    planned = plan(splits, settings)
    if not settings.shrink and not files.is_remote(folder.folder):
        needed = sum(size for _, size, _ in planned.values())
        files.require_space(folder.folder, needed, "out", "the records", ", or shrink the images with `shrink`")
    starts = {split: shards for split, (_, _, shards) in planned.items()}
    folder.begin(starts)
    return starts


def _identity(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, Any]:
    """Return what decides the content of the records."""
    # What decides the records; a job is resumed only with the same.
    chosen = {name: value for name, value in dataclasses.asdict(settings).items() if name != "bad_images"}
    identity = {"dataset": next(iter(splits.values())).name, **chosen}
    for split, dataset in splits.items():
        if dataset.pairs is not None or dataset.label_rows is not None:
            raise UserError(f"{dataset.name}: records hold one class of each image, no pairs, label sets or levels")
        digest = hashlib.sha256(json.dumps(sorted(dataset.class_names.items())).encode())
        for column in (dataset.labels, dataset.super_labels, dataset.is_query, dataset.groups):
            digest.update(b"none" if column is None else column.tobytes())
        for index in range(len(dataset)):
            digest.update(os.fsencode(dataset.images.name(index)) + b"\0")
        identity[f"images of {split}"] = digest.hexdigest()
    return identity


def _write_table(found: SplitReport, split: str, out: str) -> dict[str, Any]:
    """Write a split's table; returns its entry in the manifest."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    kept, dataset = found.kept, found.dataset
    if not len(kept):
        raise UserError(f"{dataset.name}: no image of the {split} split is left")
    offsets, sizes = zip(*itertools.chain(*found.places), strict=True)
    optional = {column: getattr(dataset, field) for column, field in _OPTIONAL.items()}
    columns = {
        "shard": np.repeat(np.arange(len(found.places)), list(map(len, found.places))),
        "offset": offsets,
        "size": sizes,
        "label": dataset.labels[kept],
        "class": [os.fsencode(dataset.class_names[label]) for label in dataset.labels[kept].tolist()],
        "name": [os.fsencode(dataset.images.name(index)) for index in kept],
        **{column: values[kept] for column, values in optional.items() if values is not None},
    }
    arrays = {name: pa.array(column, COLUMNS[name]) for name, column in columns.items()}
    buffer = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(arrays), buffer, compression="zstd")
    table = buffer.getvalue().to_pybytes()
    files.write_whole(os.path.join(out, f"{split}.parquet"), table)
    return {"bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()}


def _report_bad_images(reports: Mapping[str, SplitReport], out: str, settings: RecordSettings) -> None:
    path = os.path.join(out, BAD_IMAGES)
    faults = [fault for found in reports.values() for fault in found.faults]
    if not faults:
        files.remove(path)
        return
    text = "".join(f"{one_line(fault.name)}\t{one_line(fault.reason)}\n" for fault in faults)
    files.write_whole(path, text.encode("utf-8", "surrogateescape"))
    if settings.bad_images == "error":
        advice = "fix or remove them and run the same command again, or leave them out with `bad_images='skip'`"
        raise UserError(f"{bad_images_in_words(reports)}; all of them are in {path}: {advice}")


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


def write_shard(path: str, images: Mapping[int, bytes]) -> tuple[dict[str, Any], list[list[int]]]:
    """Write a tar file, atomically.

    Args:
        path: Where.
        images: The bytes of each image by its place in the data set, in order.

    Returns:
        The size and the SHA-256 of the file, and the offset and the size of each image in it, in bytes.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> len(write_shard("train-00000-of-00001.tar", dict.fromkeys(range(3), jpeg))[1])
        3
    """
    places = []
    with files.atomic_write(path, sum(map(len, images.values()))) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for index, data in images.items():
                kind = format_of(data[:16])
                member = tarfile.TarInfo(f"{index:09d}{kind.extensions[0] if kind else ''}")
                member.size = len(data)
                places.append([archive.offset + tarfile.BLOCKSIZE, member.size])  # behind its header
                archive.addfile(member, io.BytesIO(data))
        return files.entry_of(temporary), places
