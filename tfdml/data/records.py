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

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import DECODER_LIMIT, decode_image, format_of
from tfdml.data.faults import ImageError, access_fault, decoding_fault, find_duplicates
from tfdml.data.images import Images, Source, reading_threads, source_of_encoded
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError, short_message
from tfdml.io import files
from tfdml.io.files import require_space
from tfdml.io.folders import MANIFEST, PROGRESS, ResumableFolder
from tfdml.io.manifests import Kinds, confined, fields, read_json

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
    entries = [entry for about in manifest["splits"].values() for entry in (about["table"], *about["shards"])]
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


SHRINK_FORMATS = ("jpeg", "png")
BAD_IMAGE_CHOICES = ("error", "skip")
DROP_COPIES = ("none", "across")


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """How images are checked and stored.

    Args:
        shrink: Images whose shorter side is longer than this many pixels are resized to it and encoded again; 0 keeps
            every byte. Smaller images are never enlarged or touched.
        shrink_format: `"jpeg"` (quality 95) or `"png"` (lossless) for the images that are resized.
        shard_mb: MiB of source images in a shard.
        bad_images: `"error"` to end without records if an image is bad, `"skip"` to leave the bad ones out.
        drop_copies: `"across"` to leave out test images that are byte-identical to a training image, `"none"` to keep
            all.
        max_pixels: An image whose header states more is bad, and is not decoded.
        workers: Images read and decoded at once.

    Raises:
        UserError: A value is out of range.

    Example:
        >>> RecordSettings(shrink=256).job()["shrink"]
        256
    """

    shrink: int = 0
    shrink_format: str = "jpeg"
    shard_mb: float = 128.0
    bad_images: str = "error"
    drop_copies: str = "none"
    max_pixels: int = DECODER_LIMIT
    workers: int = 2

    def __post_init__(self):
        if self.shrink < 0:
            raise UserError(f"`shrink={self.shrink}`: give the pixels of the shorter side, or 0 for no change")
        for name in ("shard_mb", "max_pixels", "workers"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"`{name}={getattr(self, name)}` must be more than 0, and finite")
        for name, values in (
            ("shrink_format", SHRINK_FORMATS), ("bad_images", BAD_IMAGE_CHOICES), ("drop_copies", DROP_COPIES),
        ):  # fmt: skip
            if getattr(self, name) not in values:
                raise UserError(f"`{name}={getattr(self, name)}` must be one of {', '.join(values)}")

    def job(self) -> dict[str, Any]:
        """Return the settings that decide what the records hold; a job is resumed only with the same ones."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("bad_images", "workers")}


_JPEG_QUALITY = 95

Progress = Callable[[int, int, int], None]  # images done, of how many, bad ones among them


@dataclasses.dataclass(frozen=True)
class Examined:
    """The result of examining one image.

    Args:
        index: Its place in the data set.
        data: The bytes for its record; empty for a bad image.
        digest: The SHA-256 of its bytes as they were read, in hexadecimal; empty for a bad image.
        fault: What is wrong with it, or None.
    """

    index: int
    data: bytes
    digest: str
    fault: str | None = None


def examine(images: Images, index: int, settings: RecordSettings) -> Examined:
    """Read, decode and convert an image.

    Args:
        images: The images.
        index: Which one.
        settings: The preparation's settings.

    Example:
        >>> examine(EncodedImages((jpeg[:100],), ("1.jpg",)), 0, RecordSettings()).fault
        'truncated JPEG (no end-of-image marker)'
    """
    try:
        data = images.encoded(index)
    except Exception as error:  # clients of file systems have their own error types
        return Examined(index, b"", "", access_fault(error))
    convert, converted = _converter(settings.shrink, settings.shrink_format), []
    fault = decoding_fault(data, lambda encoded: converted.append(convert(encoded).numpy()), settings.max_pixels)
    if fault:
        return Examined(index, b"", "", fault)
    return Examined(index, converted[0] or data, hashlib.sha256(data).hexdigest())


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
        digests: The SHA-256 of every image, empty for one that could not be read.
        faults: The bad images.
        dropped: The images left out because they are copies.
        shards: The manifest's entries of the shards, where any were written.
        places: Of each image in them the offset and the size, in bytes.
        resumed: How many of these an earlier run had written.
    """

    dataset: ImageDataset
    digests: list[str] = dataclasses.field(default_factory=list)
    faults: list[ImageError] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    places: list[list[int]] = dataclasses.field(default_factory=list)
    resumed: int = 0

    def add(self, part: Mapping[str, Any]) -> None:
        """Add what is known of a shard."""
        self.digests += part["digests"]
        for index, reason in part["faults"].items():
            self.faults.append(ImageError(int(index), self.dataset.images.place(int(index)), reason))
        self.dropped += part["dropped"]
        self.places += part["places"]
        for file, entry in part["files"].items():
            self.shards.append({"file": file, "images": len(part["places"]), **entry})

    @property
    def kept(self) -> np.ndarray:
        """The indices of the images that have a record."""
        left_out = [fault.index for fault in self.faults] + self.dropped
        return np.setdiff1d(np.arange(len(self.dataset)), np.array(left_out, np.int64))

    @property
    def lost_classes(self) -> int:
        """How many classes have no image left."""
        return self.dataset.num_classes - len(np.unique(self.dataset.labels[self.kept]))


@dataclasses.dataclass
class Report:
    """What a preparation found and did.

    Args:
        splits: The findings by split.
        duplicates: The groups of byte-identical images: see `find_duplicates`.
        finished_before: Whether an earlier run had done it all.
    """

    splits: dict[str, SplitReport]
    duplicates: list[dict[str, Any]]
    finished_before: bool = False


def bad_images_in_words(report: Report) -> str:
    """How many images are bad, for which reasons, and the first of them.

    Args:
        report: What was found.

    Example:
        >>> bad_images_in_words(Report({}, []))
        'none of the 0 images is bad'
    """
    faults = [fault for found in report.splits.values() for fault in found.faults]
    total = sum(len(found.dataset) for found in report.splits.values())
    if not faults:
        return f"none of the {total:,} images is bad"
    reasons = collections.Counter(_kind(fault.reason) for fault in faults)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    named = "; ".join(one_line(str(fault)) for fault in faults[:_NAMED_IN_MESSAGES])
    more = "; ..." if len(faults) > _NAMED_IN_MESSAGES else ""
    return f"{len(faults):,} of {total:,} images are bad ({counts}): {named}{more}"


def _kind(reason: str) -> str:
    """Return a reason without what differs from image to image."""
    return one_line(reason).split(":")[0].split(" (")[0].split(";")[0]


def one_line(text: str) -> str:
    """Return a name or a reason without line ends and tabs.

    Example:
        >>> one_line("a" + chr(10) + "b")
        'a b'
    """
    return " ".join(text.split()) if any(c in text for c in "\n\r\t") else text


DUPLICATES = "copies.json"
BAD_IMAGES = "bad_images.txt"
_MEGABYTE = 2**20
# Images of a part where no shards are written; it bounds what is in memory.
_BLOCK = 256


def check(
    splits: Mapping[str, ImageDataset], settings: RecordSettings | None = None, progress: Progress = lambda *_: None
) -> Report:
    """Decode every image and looks for copies; writes nothing.

    Args:
        splits: The data set's splits by name, `"train"` first.
        settings: The preparation's settings.
        progress: Called now and then.

    Returns:
        The bad images and the copies.

    Example:
        >>> check({"train": load("folder", "photos")}).splits["train"].faults
        []
    """
    starts = {split: list(range(0, len(dataset), _BLOCK)) for split, dataset in splits.items()}
    settings = dataclasses.replace(settings or RecordSettings(), shrink=0)
    return _examine_all(splits, starts, settings, progress, lambda stem, key: None, lambda stem, part, kept: part)


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
) -> Report:
    """Check a data set and writes it as record files that `load("records", out, split)` reads.

    Interrupted and called again with the same arguments, it keeps the shards that are complete and continues. The
    manifest is written last: a folder without it is not yet a data set.

    Args:
        splits: The data set's splits by name, `"train"` first.
        out: A new or empty folder, local or on any file system that `fsspec` knows.
        settings: How images are checked and stored.
        source: Where the data set came from (`data_dir`, `options`), for the manifest.
        progress: Called now and then.

    Returns:
        What was found and written.

    Raises:
        UserError: Images are bad and `bad_images` is `"error"`; the folder holds something else, is being written by
            another process, or is full.

    Example:
        >>> splits = {split: load("cars196", "data/cars196", split) for split in ("train", "test")}
        >>> report = prepare(splits, "records/cars196_256", RecordSettings(shrink=256))
        >>> load("records", "records/cars196_256", "train").num_classes
        98
    """
    out, settings = os.fspath(out), settings or RecordSettings()
    folder = ResumableFolder(out, "out", FORMAT, VERSION, _identity(splits, settings))
    with folder.opened():
        if folder.manifest:
            for split in splits:
                read(out, split)
            return Report({split: SplitReport(dataset) for split, dataset in splits.items()}, [], finished_before=True)
        starts = _starts(folder, splits, settings)

        def known_part(stem: str, key: str) -> dict[str, Any] | None:
            part = folder.part(stem)
            if part is None or part["key"] != key or (part["faults"] and settings.bad_images == "error"):
                return None
            return part if folder.has_files(part) else None

        def write_part(stem: str, part: dict[str, Any], kept: Sequence[Examined]) -> dict[str, Any]:
            if part["faults"] and settings.bad_images == "error":
                return part
            written = {}
            if kept:
                written[f"{stem}.tar"], part["places"] = write_shard(folder.path(f"{stem}.tar"), kept)
            return folder.finish_part(stem, part, written)

        report = _examine_all(splits, starts, settings, progress, known_part, write_part)
        files.write_json(folder.path(DUPLICATES), report.duplicates)
        _report_bad_images(report, out, settings)
        entries = {
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "dataset": next(iter(splits.values())).name,
            "source": dict(source or {}),
            "splits": {split: _finish(found, split, out) for split, found in report.splits.items()},
        }
        folder.finish(entries)
    return report


def _examine_all(
    splits: Mapping[str, ImageDataset],
    starts: Mapping[str, Sequence[int]],
    settings: RecordSettings,
    progress: Progress,
    known_part: Callable[[str, str], dict[str, Any] | None],
    write_part: Callable[[str, dict[str, Any], Sequence[Examined]], dict[str, Any]],
) -> Report:
    """Examine the images part by part.

    Args:
        splits: The data set's splits by name, `"train"` first.
        starts: The first image of each part.
        settings: The preparation's settings.
        progress: Called after each image.
        known_part: Returns what an earlier run recorded of a part, by its name and the key of its content.
        write_part: Writes the images of a part that are kept; returns what is known of the part.
    """
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    total, done, bad = sum(map(len, splits.values())), 0, 0
    pool = concurrent.futures.ThreadPoolExecutor(settings.workers, "prepare")
    try:
        for split, dataset in splits.items():
            excluded: set[str] = set()
            if settings.drop_copies == "across" and split != "train" and "train" in reports:
                excluded = set(reports["train"].digests) - {""}
            stamps = dataset.images.stamps()
            for number, (start, stop) in enumerate(itertools.pairwise([*starts[split], len(dataset)])):
                stem = f"{split}-{number:05d}-of-{len(starts[split]):05d}"
                content = json.dumps([stamps[start:stop], sorted(excluded)])
                key = hashlib.sha256(content.encode()).hexdigest()
                part = known_part(stem, key)
                if part is None:
                    images = []
                    examining = functools.partial(examine, dataset.images, settings=settings)
                    for image in pool.map(examining, range(start, stop)):
                        images.append(image)
                        bad += image.fault is not None
                        progress(done + len(images), total, bad)
                    part = {
                        "key": key,
                        "digests": [image.digest for image in images],
                        "faults": {str(image.index): image.fault for image in images if image.fault},
                        "dropped": [image.index for image in images if image.digest in excluded],
                        "places": [],
                        "files": {},
                    }
                    kept = [image for image in images if not image.fault and image.digest not in excluded]
                    part = write_part(stem, part, kept)
                else:
                    reports[split].resumed += 1
                    progress(done + stop - start, total, bad)
                done += stop - start
                reports[split].add(part)
    finally:
        pool.shutdown(cancel_futures=True)
    return Report(reports, find_duplicates({split: (found.dataset, found.digests) for split, found in reports.items()}))


def _starts(
    folder: ResumableFolder, splits: Mapping[str, ImageDataset], settings: RecordSettings
) -> dict[str, list[int]]:
    """Where the shards begin: as recorded by an earlier run, or divided now and recorded."""
    if folder.plan is not None:
        return fields(folder.plan, dict.fromkeys(splits, list), folder.path(PROGRESS), folder.remedy)
    planned = plan(splits, settings)
    if not settings.shrink and not files.is_remote(folder.folder):
        needed = sum(size for _, size, _ in planned.values())
        require_space(folder.folder, needed, "out", "the records", "shrink the images with `shrink`")
    starts = {split: shards for split, (_, _, shards) in planned.items()}
    folder.begin(starts)
    return starts


def _identity(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, Any]:
    """Return what decides the content of the records."""
    identity = {"dataset": next(iter(splits.values())).name, **settings.job()}
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


def _finish(found: SplitReport, split: str, out: str) -> dict[str, Any]:
    """Write a split's table; returns its part of the manifest."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    kept, dataset = found.kept, found.dataset
    if not len(kept):
        raise UserError(f"{dataset.name}: no image of the {split} split is left")
    offsets, sizes = zip(*found.places, strict=True)
    columns = {
        "shard": np.repeat(np.arange(len(found.shards)), [shard["images"] for shard in found.shards]),
        "offset": offsets,
        "size": sizes,
        "label": dataset.labels[kept],
        "name": [os.fsencode(dataset.images.name(index)) for index in kept],
        "super_label": None if dataset.super_labels is None else dataset.super_labels[kept],
        "is_query": None if dataset.is_query is None else dataset.is_query[kept],
        "group": None if dataset.groups is None else dataset.groups[kept],
    }
    arrays = {name: pa.array(column, COLUMNS[name]) for name, column in columns.items() if column is not None}
    buffer = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(arrays), buffer, compression="zstd")
    table = buffer.getvalue().to_pybytes()
    files.write_whole(os.path.join(out, f"{split}.parquet"), table)
    classes = np.unique(columns["label"])
    return {
        "images": len(kept),
        "classes": len(classes),
        "class_names": {str(label): dataset.class_names[int(label)] for label in classes},
        "super_classes": None if dataset.super_labels is None else len(np.unique(columns["super_label"])),
        "queries": None if dataset.is_query is None else int(columns["is_query"].sum()),
        "table": {"file": f"{split}.parquet", "bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()},
        "shards": found.shards,
        "bad_images": [{"name": fault.name, "reason": fault.reason} for fault in found.faults],
        "copies_left_out": [dataset.images.name(index) for index in found.dropped],
    }


def _report_bad_images(report: Report, out: str, settings: RecordSettings) -> None:
    path = os.path.join(out, BAD_IMAGES)
    faults = [fault for found in report.splits.values() for fault in found.faults]
    if not faults:
        files.remove(path)
        return
    text = "".join(f"{one_line(fault.name)}\t{one_line(fault.reason)}\n" for fault in faults)
    files.write_whole(path, text.encode("utf-8", "surrogateescape"))
    if settings.bad_images == "error":
        raise UserError(
            f"{bad_images_in_words(report)}; all of them are in {path}: fix or remove them and run the same command "
            "again, which keeps the shards that are finished, or leave them out with `bad_images='skip'`"
        )


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


def write_shard(path: str, images: Sequence[Examined]) -> tuple[dict[str, Any], list[list[int]]]:
    """Write a tar file, atomically.

    Args:
        path: Where.
        images: The images, in order.

    Returns:
        The size and the SHA-256 of the file, and the offset and the size of each image in it, in bytes.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> examined = [Examined(row, jpeg, "") for row in range(3)]
        >>> len(write_shard("train-00000-of-00001.tar", examined)[1])
        3
    """
    places = []
    with files.atomic_write(path, sum(len(image.data) for image in images)) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for image in images:
                kind = format_of(image.data[:16])
                member = tarfile.TarInfo(f"{image.index:09d}{kind.extensions[0] if kind else ''}")
                member.size = len(image.data)
                places.append([archive.offset + tarfile.BLOCKSIZE, member.size])  # behind its header
                archive.addfile(member, io.BytesIO(image.data))
        entry = {"bytes": os.path.getsize(temporary), "sha256": files.sha256_of(temporary)}
    return entry, places
