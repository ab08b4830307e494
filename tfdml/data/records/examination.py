"""Examines the images of a data set one by one: settings, threads that decode, duplicates, and the report."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import DECODER_LIMIT, decode_image
from tfdml.data.faults import ImageError, access_fault, decoding_fault
from tfdml.data.images import Images
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError

SHRINK_FORMATS = ("jpeg", "png")
BAD_IMAGES = ("error", "skip")
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
        for name, low in (("shard_mb", 0), ("max_pixels", 0), ("workers", 0)):
            if not low < getattr(self, name) < float("inf"):
                raise UserError(f"`{name}={getattr(self, name)}` must be more than {low}, and finite")
        for name, values in (
            ("shrink_format", SHRINK_FORMATS), ("bad_images", BAD_IMAGES), ("drop_copies", DROP_COPIES),
        ):  # fmt: skip
            if getattr(self, name) not in values:
                raise UserError(f"`{name}={getattr(self, name)}` must be one of {', '.join(values)}")

    def job(self) -> dict[str, Any]:
        """The settings that decide what the records hold; a job is resumed only with the same ones."""
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
        digest: The SHA-256 of its bytes as they were read, in hexadecimal; empty where they could not be.
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
        """Counts images that need no work."""
        self._done += count
        self._progress(self._done, self._total, self._bad)

    def examine(self, images: Images, start: int, stop: int) -> Iterator[Examined]:
        """Examines images `start` to `stop - 1`, in order."""
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
        except Exception as error:  # tf.io.gfile has its own error types
            return Examined(index, b"", "", access_fault(error))
        converted = []
        fault = decoding_fault(data, lambda encoded: converted.append(self._convert(encoded).numpy()), self._max_pixels)
        return Examined(index, b"" if fault else converted[0] or data, hashlib.sha256(data).hexdigest(), fault)


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
        record_sizes: The bytes of every record in them.
        resumed: How many of these an earlier run had written.
    """

    dataset: ImageDataset
    digests: list[str] = dataclasses.field(default_factory=list)
    faults: list[ImageError] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    record_sizes: list[int] = dataclasses.field(default_factory=list)
    resumed: int = 0

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
    """A reason without what differs from image to image."""
    return one_line(reason).split(":")[0].split(" (")[0].split(";")[0]


def one_line(text: str) -> str:
    """A name or a reason without line ends and tabs.

    Example:
        >>> one_line("a" + chr(10) + "b")
        'a b'
    """
    return " ".join(text.split()) if any(c in text for c in "\n\r\t") else text


def find_duplicates(splits: Mapping[str, tuple[ImageDataset, Sequence[str]]]) -> list[dict[str, Any]]:
    """Groups images whose bytes are the same.

    Args:
        splits: By name, the images and the SHA-256 of each; images with an empty one are passed over.

    Returns:
        One dict per group of two or more, in order of their first image: `sha256`, `images` (each with `split`,
        `name`, `label` and `class`), `labels_differ` and `across_splits`.

    Example:
        >>> groups = find_duplicates({"train": (train, ["a3f5", "07c9", "a3f5"])})
        >>> [image["name"] for image in groups[0]["images"]]
        ['U+10A5/0', 'U+10A5/2']
    """
    members: dict[str, list[tuple[str, int]]] = {}
    for split, (_, digests) in splits.items():
        for index, digest in enumerate(digests):
            if digest:
                members.setdefault(digest, []).append((split, index))
    groups = []
    for digest, places in members.items():
        if len(places) > 1:
            images = [_image(splits[split][0], split, index) for split, index in places]
            groups.append(
                {
                    "sha256": digest,
                    "images": images,
                    "labels_differ": len({image["label"] for image in images}) > 1,
                    "across_splits": len({split for split, _ in places}) > 1,
                }
            )
    return groups


def describe_duplicates(groups: Sequence[Mapping[str, Any]], named: int = 3) -> list[str]:
    """The groups in a few lines of text.

    Args:
        groups: What `find_duplicates` returned.
        named: How many groups of a kind to name.

    Example:
        >>> describe_duplicates([])
        ['byte-identical copies: none']
    """
    if not groups:
        return ["byte-identical copies: none"]
    extra = sum(len(group["images"]) - 1 for group in groups)
    lines = [f"byte-identical copies: {extra:,} images repeat another, in {len(groups):,} groups"]
    if not any(group["across_splits"] for group in groups):
        lines.append("  none lies across the train/test split")
    for key, what in (
        ("across_splits", "ACROSS THE TRAIN/TEST SPLIT: what is trained on is tested on (see `drop_copies='across'`)"),
        ("labels_differ", "with different labels: at least one of them must be wrong"),
    ):
        chosen = [group for group in groups if group[key]]
        if chosen:
            lines.append(f"  {len(chosen):,} groups {what}")
            lines += [f"    {' = '.join(_label(image) for image in group['images'])}" for group in chosen[:named]]
            if len(chosen) > named:
                lines.append(f"    and {len(chosen) - named:,} more")
    return lines


def _image(dataset: ImageDataset, split: str, index: int) -> dict[str, Any]:
    label = int(np.asarray(dataset.labels)[index])
    return {
        "split": split,
        "name": dataset.images.name(index),
        "label": label,
        "class": dataset.class_names[label],
    }


def _label(image: Mapping[str, Any]) -> str:
    return f"{image['name']} ({image['split']}, {image['class']})"
