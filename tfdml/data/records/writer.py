"""Writes a data set as record files: examines every image, writes the shards, and the manifest last.

Interrupted and called again, it resumes with the shards that are not yet there.
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
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import DECODER_LIMIT, decode_image, format_of
from tfdml.data.faults import ImageError, access_fault, decoding_fault, find_duplicates
from tfdml.data.images import Images
from tfdml.data.records.reader import COLUMNS, FORMAT, SHARD, VERSION, read
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.io import files
from tfdml.io.files import require_space
from tfdml.io.folders import PROGRESS, ResumableFolder
from tfdml.io.manifests import Kinds, fields

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


class ImageExaminer:
    """Threads that read, decode and convert images, and the count of what they have done.

    Args:
        total: How many images there are to do.
        settings: The preparation's settings.
        progress: Called with the images done, `total`, and the bad ones among those done.

    Example:
        >>> photos = EncodedImages((jpeg, jpeg[:100]), ("1.jpg", "2.jpg"))
        >>> with ImageExaminer(len(photos), RecordSettings(), print) as examiner:
        ...     examined = list(examiner.examine(photos, 0, len(photos)))
        1 2 0
        2 2 1
    """

    # Bounds what lies in memory.
    _BLOCK = 4096

    def __init__(self, total: int, settings: RecordSettings, progress: Progress):
        self._max_pixels = settings.max_pixels
        self._convert = _converter(settings.shrink, settings.shrink_format)
        self._pool = concurrent.futures.ThreadPoolExecutor(settings.workers, "prepare")
        self._total, self._done, self._bad = total, 0, 0
        self._progress = progress

    def __enter__(self) -> ImageExaminer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def skip(self, count: int) -> None:
        """Count images that need no work."""
        self._done += count
        self._progress(self._done, self._total, self._bad)

    def examine(self, images: Images, start: int, stop: int) -> Iterator[Examined]:
        """Examine images `start` to `stop - 1`, in order."""
        for first in range(start, stop, self._BLOCK):
            block = range(first, min(first + self._BLOCK, stop))
            for image in self._pool.map(lambda index: self._examine_one(images, index), block):
                self._done += 1
                self._bad += image.fault is not None
                self._progress(self._done, self._total, self._bad)
                yield image

    def _examine_one(self, images: Images, index: int) -> Examined:
        try:
            data = images.encoded(index)
        except Exception as error:  # clients of file systems have their own error types
            return Examined(index, b"", "", access_fault(error))
        converted = []
        fault = decoding_fault(data, lambda encoded: converted.append(self._convert(encoded).numpy()), self._max_pixels)
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
        if part["shard"]:
            self.shards.append(part["shard"])
            self.places += part["places"]

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
_PART: Kinds = {
    "key": str,
    "digests": list,
    "faults": dict,
    "dropped": list,
    "places": list,
    "shard": (dict, type(None)),
}


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
    settings = dataclasses.replace(settings or RecordSettings(), shrink=0)
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    with ImageExaminer(sum(map(len, splits.values())), settings, progress) as examiner:
        for split, dataset in splits.items():
            for image in examiner.examine(dataset.images, 0, len(dataset)):
                reports[split].digests.append(image.digest)
                if image.fault:
                    fault = ImageError(image.index, dataset.images.place(image.index), image.fault)
                    reports[split].faults.append(fault)
    return Report(reports, _duplicates(reports))


def plan(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, tuple[int, int, int]]:
    """Return what a preparation would write, without reading an image.

    Args:
        splits: The data set's splits by name.
        settings: The preparation's settings.

    Returns:
        Images, bytes of them as they are now, and shards, by split.

    Example:
        >>> images, image_bytes, shards = plan({"train": load("folder", "photos")}, RecordSettings())["train"]
        >>> images, shards
        (6, 1)
    """
    planned = {}
    for split, dataset in splits.items():
        sizes = [stamp[0] for stamp in dataset.images.stamps()]
        planned[split] = (len(dataset), sum(sizes), len(cut_into_shards(sizes, settings.shard_mb * _MEGABYTE)))
    return planned


def prepare(
    splits: Mapping[str, ImageDataset],
    out: str | os.PathLike,
    settings: RecordSettings | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Check a data set and writes it as record files that `load("records", out, split)` reads.

    Interrupted and called again with the same arguments, it keeps the shards that are there whole and goes on. The
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
        report = _write(splits, folder, settings, progress)
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


def _write(
    splits: Mapping[str, ImageDataset], folder: ResumableFolder, settings: RecordSettings, progress: Progress
) -> Report:
    stamps = {split: dataset.images.stamps() for split, dataset in splits.items()}
    starts = _starts(folder, stamps, settings)
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    with ImageExaminer(sum(map(len, splits.values())), settings, progress) as examiner:
        for split, dataset in splits.items():
            excluded = set()
            if settings.drop_copies == "across" and split != "train" and "train" in reports:
                excluded = set(reports["train"].digests) - {""}
            for number, (start, stop) in enumerate(itertools.pairwise([*starts[split], len(dataset)])):
                stem = f"{split}-{number:05d}-of-{len(starts[split]):05d}"
                content = json.dumps([stamps[split][start:stop], sorted(excluded)])
                key = hashlib.sha256(content.encode()).hexdigest()
                part = _part(folder, stem, key, settings)
                if part is None:
                    images = list(examiner.examine(dataset.images, start, stop))
                    part = _make_part(images, excluded, folder, stem, key, settings)
                else:
                    reports[split].resumed += 1
                    examiner.skip(stop - start)
                reports[split].add(part)
    return Report(reports, _duplicates(reports))


def _make_part(
    images: list[Examined], excluded: set[str], folder: ResumableFolder, stem: str, key: str, settings: RecordSettings
) -> dict[str, Any]:
    """Write the images of a shard, unless bad images are an error."""
    part: dict[str, Any] = {
        "key": key,
        "digests": [image.digest for image in images],
        "faults": {str(image.index): image.fault for image in images if image.fault},
        "dropped": [image.index for image in images if image.digest in excluded],
        "places": [],
        "shard": None,
    }
    if part["faults"] and settings.bad_images == "error":
        return part
    kept = [image for image in images if not image.fault and image.digest not in excluded]
    written = {}
    if kept:
        shard, part["places"] = write_shard(folder.folder, stem, kept)
        part["shard"], written = shard, {shard["file"]: {name: shard[name] for name in ("bytes", "sha256")}}
    return folder.finish_part(stem, part, written)


def _part(folder: ResumableFolder, stem: str, key: str, settings: RecordSettings) -> dict[str, Any] | None:
    """Return what an earlier run recorded of a shard, if it is still valid."""
    part = folder.part(stem)
    if part is None:
        return None
    fields(part, _PART, f"{folder.folder}: {stem}", folder.remedy)
    if part["key"] != key or (part["faults"] and settings.bad_images == "error") or not folder.has_files(part):
        return None
    if part["shard"]:
        fields(part["shard"], SHARD, f"{folder.folder}: {stem}", folder.remedy)
        if len(part["places"]) != part["shard"]["images"]:
            return None
    return part


def _starts(
    folder: ResumableFolder, stamps: Mapping[str, list[tuple[int, int]]], settings: RecordSettings
) -> dict[str, list[int]]:
    """Where the shards begin: as recorded by an earlier run, or divided now and recorded."""
    if folder.plan is not None:
        starts = fields(folder.plan, dict.fromkeys(stamps, list), folder.path(PROGRESS), folder.remedy)
        if any(type(start) is not int for each in starts.values() for start in each):
            raise UserError(f"{folder.path(PROGRESS)} does not say where the shards begin; {folder.remedy}")
        return starts
    sizes = {split: [size for size, _ in found] for split, found in stamps.items()}
    if not settings.shrink and not files.is_remote(folder.folder):
        needed = sum(map(sum, sizes.values()))
        require_space(folder.folder, needed, "out", "the records", "shrink the images with `shrink`")
    starts = {split: cut_into_shards(found, settings.shard_mb * _MEGABYTE) for split, found in sizes.items()}
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


def _duplicates(reports: Mapping[str, SplitReport]) -> list[dict[str, Any]]:
    return find_duplicates({split: (found.dataset, found.digests) for split, found in reports.items()})


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


def write_shard(folder: str, stem: str, images: Sequence[Examined]) -> tuple[dict[str, Any], list[list[int]]]:
    """Write `stem.tar`, atomically.

    Args:
        folder: Where.
        stem: The name of the shard, without suffix.
        images: The images, in order.

    Returns:
        The shard's entry in the manifest (file, number of images, bytes, SHA-256), and the offset and the size of each
        image in it, in bytes.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> examined = [Examined(row, jpeg, "") for row in range(3)]
        >>> write_shard(".", "train-00000-of-00001", examined)[0]["images"]
        3
    """
    path = os.path.join(folder, f"{stem}.tar")
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
    return {"file": f"{stem}.tar", "images": len(images), **entry}, places
