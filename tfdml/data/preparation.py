"""The check of every image of a data set, and a copy of it with small images: a folder of JPEGs and a list of them."""

import collections
import csv
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset, ImageError, access_fault, decoding_fault, find_faults
from tfdml.data.decoding import DECODER_LIMIT, FOREIGN, decode_image, format_of
from tfdml.data.images import Images, in_threads
from tfdml.data.readers.own_images import COLUMNS
from tfdml.data.transforms import resize_to_side
from tfdml.errors import UserError, check_choice, check_not_negative, check_positive
from tfdml.io import files

LIST = "images.csv"
_JPEG_QUALITY = 95
_NAMED_IN_MESSAGES = 5
_BLOCK = 1024  # images that are checked between two reports of progress

Progress = Callable[[int, int, int], None]  # images done, of how many, bad ones among them
Faults = Mapping[str, list[ImageError]]  # by split


def check_images(
    splits: Mapping[str, ImageDataset], max_pixels: int = DECODER_LIMIT, progress: Progress = lambda *_: None
) -> dict[str, list[ImageError]]:
    """Decode every image; write nothing.

    Args:
        splits: The data set's splits by name.
        max_pixels: An image whose header states more is bad, and is not decoded.
        progress: Called now and then.

    Returns:
        The bad images, by split.

    Example:
        >>> check_images({"train": load("folder", "photos")})
        {'train': []}
    """
    check_positive(max_pixels=max_pixels)
    faults: dict[str, list[ImageError]] = {split: [] for split in splits}
    total, done = sum(map(len, splits.values())), 0
    for split, dataset in splits.items():
        for start in range(0, len(dataset), _BLOCK):
            rows = range(len(dataset))[start : start + _BLOCK]
            faults[split] += find_faults(dataset.images, rows, max_pixels=max_pixels)
            done += len(rows)
            progress(done, total, sum(map(len, faults.values())))
    return faults


def prepare(
    splits: Mapping[str, ImageDataset],
    out: str | os.PathLike,
    shrink: int = 0,
    bad_images: str = "error",
    max_pixels: int = DECODER_LIMIT,
    progress: Progress = lambda *_: None,
) -> dict[str, list[ImageError]]:
    """Check a data set and write a copy with small images, which `load("list", "OUT/images.csv", split)` reads.

    An image whose shorter side is longer than `shrink` becomes a JPEG of quality 95. The others are copied byte for
    byte. They lie in `OUT/SPLIT/CLASS/`. The list has the classes, splits, roles, super-labels and groups.

    The folder is written atomically: nothing is left of a call that fails.

    Args:
        splits: The data set's splits by name.
        out: A new or empty local folder.
        shrink: Pixels of the shorter side; 0: all images are copied.
        bad_images: `"error"`, to write nothing if an image is bad, or `"skip"`, to leave the bad ones out.
        max_pixels: An image whose header states more is bad, and is not decoded.
        progress: Called now and then.

    Returns:
        The bad images, by split.

    Raises:
        UserError: Images are bad and `bad_images` is `"error"`, or none is left; the folder holds files or cannot be
            written; the data set has pairs, label sets or levels.

    Example:
        >>> splits = {split: load("cars196", "data/cars196", split) for split in ("train", "test")}
        >>> faults = prepare(splits, "small/cars196", shrink=256)
        >>> load("list", "small/cars196/images.csv").num_classes
        98
    """
    check_not_negative(shrink=shrink)
    check_positive(max_pixels=max_pixels)
    check_choice("`bad_images`", bad_images, ("error", "skip"))
    files.require_local(out, "out")
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"`out={out}` holds files already; name a new or an empty folder")
    for dataset in splits.values():
        if dataset.pairs is not None or dataset.label_rows is not None:
            raise UserError(f"{dataset.name}: a copy holds one class of each image, no pairs, label sets or levels")
        if dataset.protocol is not None:
            logging.warning("%s: its benchmark's protocol is not copied; measure with the original", dataset.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.sweep(out.parent)
        with files.partial_folder(out.parent) as hidden:
            faults = _write(splits, hidden, shrink, max_pixels, progress)
            if any(faults.values()) and bad_images == "error":
                raise UserError(
                    f"{bad_images_in_words(splits, faults)}: mend or remove them, or pass `bad_images='skip'`"
                )
            hidden.rename(out)
    except OSError as error:
        raise files.unwritable(out, error) from error
    return faults


def bad_images_in_words(splits: Mapping[str, ImageDataset], faults: Faults) -> str:
    """How many images are bad, for which reasons, and the first of them.

    Example:
        >>> bad_images_in_words({}, {})
        'none of the 0 images is bad'
    """
    bad, total = [fault for found in faults.values() for fault in found], sum(map(len, splits.values()))
    if not bad:
        return f"none of the {total:,} images is bad"
    # A reason without its details.
    reasons = collections.Counter(re.split(r":| \(|;", fault.reason)[0] for fault in bad)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    named = "; ".join(" ".join(str(fault).split()) for fault in bad[:_NAMED_IN_MESSAGES])
    more = "; ..." if len(bad) > _NAMED_IN_MESSAGES else ""
    return f"{len(bad):,} of {total:,} images are bad ({counts}): {named}{more}"


def _write(
    splits: Mapping[str, ImageDataset], folder: Path, shrink: int, max_pixels: int, progress: Progress
) -> dict[str, list[ImageError]]:
    """Write the images and the list; return the bad images."""
    convert, total, done = _converter(shrink or DECODER_LIMIT), sum(map(len, splits.values())), 0
    faults: dict[str, list[ImageError]] = {split: [] for split in splits}
    rows: list[dict[str, object]] = []
    for split, dataset in splits.items():
        folders = _folder_names(dataset.class_names)
        for name in folders.values():
            (folder / split / name).mkdir(parents=True)
        examine = functools.partial(_examine, dataset.images, convert, max_pixels)
        for index, (data, fault) in enumerate(in_threads(examine, range(len(dataset)), os.cpu_count() or 1)):
            label, kind, done = int(dataset.labels[index]), format_of(data), done + 1
            if fault or kind is None:
                faults[split].append(ImageError(index, dataset.images.place(index), fault or FOREIGN))
            else:
                path = f"{split}/{folders[label]}/{index:07d}{kind.extensions[0]}"
                (folder / path).write_bytes(data)
                columns = {"super_label": dataset.super_labels, "group": dataset.groups}
                row = {"path": path, "label": dataset.class_names[label], "split": split}
                if dataset.is_query is not None:
                    row["role"] = "query" if dataset.is_query[index] else "gallery"
                rows.append(row | {name: int(column[index]) for name, column in columns.items() if column is not None})
            progress(done, total, sum(map(len, faults.values())))
    if not rows:
        raise UserError(f"{bad_images_in_words(splits, faults)}: none is left")
    header = [name for name in COLUMNS if any(name in row for row in rows)]
    with open(folder / LIST, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
    return faults


def _examine(
    images: Images, convert: Callable[[tf.Tensor], tf.Tensor], max_pixels: int, index: int
) -> tuple[bytes, str | None]:
    """Return the bytes of one image for the copy, and what is wrong with it."""
    try:
        data = images.encoded(index)
    except Exception as error:  # clients of file systems have their own error types
        return b"", access_fault(error)
    converted = [b""]
    fault = decoding_fault(data, lambda encoded: converted.append(convert(encoded).numpy()), max_pixels)
    return converted[-1] or data, fault


def _folder_names(class_names: Mapping[int, str]) -> dict[int, str]:
    """Return a name for the folder of each class, without what file systems refuse; no two are the same."""
    plain = {
        label: re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", name).strip(". ") or "_" for label, name in class_names.items()
    }
    count = collections.Counter(map(str.lower, plain.values()))
    return {label: name if count[name.lower()] == 1 else f"{name} {label}" for label, name in plain.items()}


@functools.lru_cache(maxsize=2)
def _converter(side: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """From an image's bytes to those of the shrunk one, or to an empty string where it stays as it is."""

    def encoded(image: tf.Tensor) -> tf.Tensor:
        # Resized as in training, so that training at this size does not resize again.
        return tf.io.encode_jpeg(resize_to_side(image, side, "shorter"), "rgb", quality=_JPEG_QUALITY)

    @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
    def convert(data: tf.Tensor) -> tf.Tensor:
        image = decode_image(data)
        size = tf.shape(image)
        # Even an image that stays as it is must be decoded.
        with tf.control_dependencies([tf.debugging.assert_positive(size)]):
            return tf.cond(tf.reduce_min(size[:2]) > side, lambda: encoded(image), lambda: tf.constant(b""))

    return convert
