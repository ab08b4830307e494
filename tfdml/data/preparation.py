"""Download of published data sets, the check of every image, and a copy with small images: a folder
and a list."""

import collections
import csv
import dataclasses
import functools
import itertools
import os
import posixpath
import re
import shutil
import tarfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import decode_image, decode_whole, format_of, upright
from tfdml.data.faults import ImageError, converted_images, warn_of_turned
from tfdml.data.limits import DECODER_LIMIT
from tfdml.data.readers.own_images import COLUMNS
from tfdml.data.transforms import resize_to_side
from tfdml.errors import (
    ERROR_TEXT,
    UserError,
    check_choice,
    check_not_negative,
    check_positive,
    user_errors,
)
from tfdml.io import files
from tfdml.names import CLASS, clean, quoted

LIST = "images.csv"
_JPEG_QUALITY = 95
_NAMED_IN_MESSAGES = 5
# Bytes of a folder's name, on the usual file systems.
_LONGEST_NAME = 255
# Of a download: how often it is begun, seconds without a byte, and bytes that are read at once.
_ATTEMPTS = 3
_TIMEOUT = 60.0
_BLOCK = 2**16

Progress = Callable[[int, int, int], None]  # images done, of how many, bad ones among them
Faults = Mapping[str, list[ImageError]]  # by split


@dataclasses.dataclass(frozen=True)
class Download:
    """A file that a publisher offers, and what it unpacks to.

    Args:
        url: Where it is; http or https.
        size: Its length in bytes; more is not fetched.
        sha256: Its checksum, in hexadecimal.
        folder: The folder that unpacking it makes; None for an archive that is read as it is.
    """

    url: str
    size: int
    sha256: str
    folder: str | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return posixpath.basename(urllib.parse.urlsplit(self.url).path)


# Sizes and checksums as TensorFlow Datasets and other projects independently record them.
DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cub200": (
        Download(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            1_150_585_339,
            "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            "CUB_200_2011",
        ),
    ),
    "omniglot": (
        Download(
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
            9_464_212,
            "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        ),
        Download(
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
            6_462_886,
            "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        ),
    ),
    "sop": (
        Download(
            "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
            3_083_860_082,
            "b04fa78210e69fab050ce73939550e1cd0f96890bdd98ec9fee732c3b756ef48",
            "Stanford_Online_Products",
        ),
    ),
}
# What to do where a publisher offers nothing that could be fetched.
BY_HAND = {
    "cars196": (
        "its publisher has taken the files down (they were at ai.stanford.edu/~jkrause/cars); "
        "copies of the images are "
        "on Kaggle (jessicali9530/stanford-cars-dataset), and "
        "https://github.com/pytorch/vision/issues/7545 says "
        "where to find the devkit with the labels of the test images; data_dir must hold "
        "cars_train/, cars_test/, "
        "devkit/cars_train_annos.mat and devkit/cars_test_annos_withlabels.mat, or car_ims/ and "
        "cars_annos.mat"
    ),
    "inshop": (
        "its publisher asks for an agreement: follow "
        "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, then put "
        "Eval/list_eval_partition.txt "
        "and the unpacked img/ into data_dir"
    ),
}


def download(
    name: str,
    data_dir: str | os.PathLike,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[str]:
    """Download and unpack the files of a data set that are not there yet.

    Their SHA-256 is checked. Files and unpacked folders appear when they are complete.

    Args:
        name: The catalog's name of the data set.
        data_dir: The folder to put it in, on a local disk.
        progress: Called now and then with a line such as `fetching CUB_200_2011.tgz`, the bytes
            that have arrived, and all of them.

    Returns:
        The paths of the new files and folders; empty if all were there.

    Raises:
        UserError: The publisher offers no file (the message says where to get it), or the download
            failed.

    Example:
        >>> download("cub200", "data")  # data/CUB_200_2011 is there
        []
    """
    if name in BY_HAND:
        raise UserError(f"{name} cannot be downloaded: {BY_HAND[name]}")
    if name not in DOWNLOADS:
        raise UserError(f"{name} cannot be downloaded, only {', '.join(sorted(DOWNLOADS))}")
    files.require_local(data_dir, "data_dir")
    folder = os.path.abspath(os.path.expanduser(os.fspath(data_dir)))
    # The readers take the unpacked folder itself as data_dir as well.
    if os.path.basename(folder) in [file.folder for file in DOWNLOADS[name]]:
        folder = os.path.dirname(folder)
    new = []
    for file in DOWNLOADS[name]:
        target = os.path.join(folder, file.folder or file.name)
        if not os.path.exists(target):
            archive = fetch(file, folder, functools.partial(progress, f"fetching {file.name}"))
            if file.folder:
                unpack(archive, folder, file.folder)
            new.append(target)
    return new


def fetch(
    file: Download,
    folder: str | os.PathLike,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> str:
    """Download a file into a folder, unless it is there already; return its path.

    Args:
        file: The file.
        folder: A local folder.
        progress: Called with the bytes that have arrived, and all of them.

    Raises:
        UserError: The server refuses, cannot be reached or sends another file, or the file cannot
            be written.
    """
    import pooch  # these take a while to import
    import requests

    urls, registry = {file.name: file.url}, {file.name: f"sha256:{file.sha256}"}
    fetcher = pooch.create(
        folder, base_url="", registry=registry, urls=urls, retry_if_failed=_ATTEMPTS - 1
    )

    def receive(url: str, path: str, _: object) -> None:
        with (
            requests.get(url, stream=True, timeout=_TIMEOUT) as response,
            open(path, "wb") as target,
        ):
            response.raise_for_status()
            for block in response.iter_content(_BLOCK):
                target.write(block)
                if target.tell() > file.size:  # a server need not state the length
                    raise OSError(f"it is longer than its {file.size:,} bytes")
                progress(target.tell(), file.size)

    advice = (
        "run the command again, or fetch it by hand and put it at "
        f"{os.path.join(folder, file.name)}"
    )
    # Errors of requests are OSErrors; Pooch raises ValueError where the checksum differs.
    with user_errors(
        (OSError, ValueError), f"{file.url} cannot be fetched ({ERROR_TEXT}); {advice}"
    ):
        return fetcher.fetch(file.name, downloader=receive)


def unpack(archive: str | os.PathLike, folder: str | os.PathLike, last: str) -> None:
    """Unpack a zip or tar archive into a local folder, never outside it.

    Args:
        archive: The archive.
        folder: Where its content goes.
        last: The top-level entry to move into place after all others, so that its presence shows
            that all is there.

    Raises:
        UserError: The archive is damaged, leads outside the folder, or cannot be written. Nothing
            is left behind.

    Example:
        >>> archive = shutil.make_archive("photos", "gztar", "photos")
        >>> unpack(archive, "unpacked", last="van")
        >>> sorted(os.listdir("unpacked"))[0]
        'bus'
    """
    kinds = (OSError, shutil.ReadError, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)
    with user_errors(kinds, f"{archive} cannot be unpacked into {folder} ({ERROR_TEXT})"):
        os.makedirs(folder, exist_ok=True)
        files.sweep(folder)
        with files.partial_folder(folder) as hidden:
            options = {} if os.fspath(archive).endswith(".zip") else {"filter": "data"}
            shutil.unpack_archive(archive, hidden, **options)  # type: ignore[arg-type]
            for name in sorted(os.listdir(hidden), key=lambda name: (name == last, name)):
                os.rename(hidden / name, os.path.join(folder, name))


def check_images(
    splits: Mapping[str, ImageDataset],
    max_pixels: int = DECODER_LIMIT,
    progress: Progress = lambda *_: None,
) -> dict[str, list[ImageError]]:
    """Decode every image; write nothing.

    Args:
        splits: The data set's splits by name.
        max_pixels: An image whose header states more is bad, and is not decoded.
        progress: Called now and then.

    Returns:
        The bad images, by split.

    Example:
        >>> check_images({"train": tfdml.data.load("folder", "photos")})
        {'train': []}
    """
    check_positive(max_pixels=max_pixels)
    faults, turned = _examine_all(
        splits, lambda data, _: decode_whole(data).shape, max_pixels, progress
    )
    warn_of_turned(turned, _count_images(splits))
    return faults


def prepare(
    splits: Mapping[str, ImageDataset],
    out: str | os.PathLike,
    shrink: int = 0,
    bad_images: str = "error",
    max_pixels: int = DECODER_LIMIT,
    progress: Progress = lambda *_: None,
) -> dict[str, list[ImageError]]:
    """Check a data set and write a copy with small images, which
    `load("list", "OUT/images.csv", split)` reads.

    An image whose shorter side is longer than `shrink` becomes a JPEG of quality 95. So does an
    image that XMP or a text of a PNG turns, upright. The others are copied byte for byte. They lie
    in `OUT/SPLIT/CLASS/`, each once. The list has the classes, splits, roles, super-labels, groups
    and texts.

    The folder is written atomically: nothing is left of a call that fails.

    Args:
        splits: The data set's splits by name.
        out: A new or empty local folder.
        shrink: Pixels of the shorter side; 0: all images are copied.
        bad_images: `"error"`, to write nothing if an image is bad, or `"skip"`, to leave the bad
            ones out.
        max_pixels: An image whose header states more is bad, and is not decoded.
        progress: Called now and then.

    Returns:
        The bad images, by split.

    Raises:
        UserError: Images are bad and `bad_images` is `"error"`, or none is left; the folder holds
            files or cannot be written; the data set has pairs, label sets or levels, two classes of
            one name, or one whose name is too long for a folder.

    Example:
        >>> parts = ("train", "test")
        >>> splits = {part: tfdml.data.load("cars196", "data/cars196", part) for part in parts}
        >>> faults = prepare(splits, "small/cars196", shrink=256)
        >>> tfdml.data.load("list", "small/cars196/images.csv").num_classes
        98
    """
    check_not_negative(shrink=shrink)
    check_positive(max_pixels=max_pixels)
    check_choice("bad_images", bad_images, ("error", "skip"))
    files.require_local(out, "out")
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError("holds files already; name a new or an empty folder", out=out)
    for dataset in splits.values():
        if dataset.pairs is not None or dataset.label_rows is not None:
            raise UserError(
                f"{dataset.name}: a copy holds one class of each image, no pairs, label sets or "
                "levels"
            )
        names = clean(dataset.class_names.values(), CLASS, f"{dataset.name}: classes")
        if len(set(names)) < len(names):
            raise UserError(
                f"{dataset.name}: classes of a copy go by name, and some have the same: rename them"
            )
        if dataset.protocol is not None:
            logging.warning(
                "%s: its benchmark's protocol is not copied; measure with the original",
                dataset.name,
            )
    folders = {split: _folder_names(dataset) for split, dataset in splits.items()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.sweep(out.parent)
        with files.partial_folder(out.parent) as hidden:
            faults = _write(splits, folders, hidden, shrink, max_pixels, progress)
            if any(faults.values()) and bad_images == "error":
                raise UserError(
                    f"{bad_images_in_words(splits, faults)}: mend or remove them, or pass "
                    "bad_images=skip"
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
    bad = list(itertools.chain.from_iterable(faults.values()))
    total = _count_images(splits)
    if not bad:
        return f"none of the {total:,} images is bad"
    # A reason without its details.
    reasons = collections.Counter(re.split(r":| \(|;", fault.reason)[0] for fault in bad)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    named = "; ".join(" ".join(str(fault).split()) for fault in bad[:_NAMED_IN_MESSAGES])
    more = "; ..." if len(bad) > _NAMED_IN_MESSAGES else ""
    verb = "is" if len(bad) == 1 else "are"
    return f"{len(bad):,} of {total:,} images {verb} bad ({counts}): {named}{more}"


def _examine_all(
    splits: Mapping[str, ImageDataset],
    convert: Callable[[tf.Tensor, int], Any],
    max_pixels: int,
    progress: Progress,
    keep: Callable[[str, list[int], Any], None] = lambda *_: None,
) -> tuple[dict[str, list[ImageError]], list[str]]:
    """Decode every image; return the bad ones, and the names of those whose orientation Pillow
    finds and the decoder does not.

    Args:
        splits: The data set's splits by name.
        convert: From an image's bytes, which it decodes, and that orientation to what `keep` gets.
        max_pixels: See `check_images`.
        progress: Called after each image.
        keep: Called with the split, the rows and the converted bytes of each good image, in their
            order.
    """

    faults: dict[str, list[ImageError]] = {split: [] for split in splits}
    turned: list[str] = []
    total = _count_images(splits)
    done = 0
    for split, dataset in splits.items():
        rows_of_images = _rows_of_images(dataset)
        images = dataset.images
        if len(rows_of_images) < len(dataset):
            images = dataset.take([rows[0] for rows in rows_of_images]).images
        outcomes = converted_images(images, convert, max_pixels)
        for rows, (converted, fault, turn) in zip(rows_of_images, outcomes, strict=True):
            name = dataset.images.name(rows[0])
            if fault:
                faults[split].append(ImageError(rows[0], name, fault))
            else:
                keep(split, rows, converted)
            if turn > 1:
                turned.append(name)
            done += 1
            progress(done, total, sum(map(len, faults.values())))
    return faults, turned


def _rows_of_images(dataset: ImageDataset) -> list[list[int]]:
    """Return the rows of each image, of which one with several texts has several."""
    if dataset.texts is None:
        return [[row] for row in range(len(dataset))]
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(dataset.names):
        rows.setdefault(name, []).append(row)
    return list(rows.values())


def _count_images(splits: Mapping[str, ImageDataset]) -> int:
    return sum(len(_rows_of_images(dataset)) for dataset in splits.values())


def _write(
    splits: Mapping[str, ImageDataset],
    folders: Mapping[str, Mapping[int, str]],
    folder: Path,
    shrink: int,
    max_pixels: int,
    progress: Progress,
) -> dict[str, list[ImageError]]:
    """Write the images and the list; return the bad images."""
    listed: dict[str, dict[int, dict[str, object]]] = {split: {} for split in splits}

    def write(split: str, rows: list[int], converted: tf.Tensor) -> None:
        dataset = splits[split]
        data = converted.numpy()
        kind = format_of(data)
        assert kind is not None
        class_folder = folders[split][int(dataset.labels[rows[0]])]
        path = f"{split}/{class_folder}/{rows[0]:07d}{kind.extensions[0]}"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        for row in rows:
            listed[split][row] = {"path": path, "split": split, **_columns_of(dataset, row)}

    convert = _converter(shrink or DECODER_LIMIT)
    faults, turned = _examine_all(splits, convert, max_pixels, progress, write)
    if turned:
        logging.info("%d images are written upright, as XMP or a text states them", len(turned))
    lines: list[dict[str, object]] = []
    for rows in listed.values():
        lines += [rows[row] for row in sorted(rows)]
    if not lines:
        raise UserError(f"{bad_images_in_words(splits, faults)}: none is left")
    _write_list(folder / LIST, lines)
    return faults


def _write_list(path: Path, lines: list[dict[str, object]]) -> None:
    """Write the list of the images; a column that no line has is left out."""
    columns: set[str] = set()
    for line in lines:
        columns.update(line)
    header = [name for name in COLUMNS if name in columns]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(lines)


def _columns_of(dataset: ImageDataset, row: int) -> dict[str, object]:
    """Return what a list says of a row, but for its path and split."""
    columns: dict[str, object] = {"label": dataset.class_names[int(dataset.labels[row])]}
    if dataset.is_query is not None:
        columns["role"] = "query" if dataset.is_query[row] else "gallery"
    if dataset.texts is not None:
        columns["text"] = dataset.texts[row]
    for name, ids in (("super_label", dataset.super_labels), ("group", dataset.groups)):
        if ids is not None:
            columns[name] = int(ids[row])
    return columns


def _folder_names(dataset: ImageDataset) -> dict[int, str]:
    """Return a name for the folder of each class, without what file systems refuse; no two are the
    same.

    Raises:
        UserError: One is too long for a file system.
    """
    plain = {}
    for label, name in dataset.class_names.items():
        plain[label] = re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", name).strip(". ") or "_"
    count = collections.Counter(map(str.lower, plain.values()))
    for label, name in plain.items():
        if count[name.lower()] > 1:
            plain[label] = f"{name} {label}"
        size = len(plain[label].encode())
        if size > _LONGEST_NAME:
            raise UserError(
                f"{dataset.name}: the folder of the class {quoted(name)} would have a name of "
                f"{size} bytes, and at most {_LONGEST_NAME} are possible: name the class shorter"
            )
    return plain


@functools.lru_cache(maxsize=2)
def _converter(side: int) -> Callable[[tf.Tensor, int], tf.Tensor]:
    """From an image's bytes and the orientation that they do not state in EXIF, to those of the
    image that is shrunk and upright, or to the same where it stays as it is."""
    spec = [tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32)]

    @tf.function(input_signature=spec, autograph=False)
    def convert(data: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
        image = upright(decode_image(data), turn)
        size = tf.shape(image)
        is_large = tf.reduce_min(size[:2]) > side

        def encoded() -> tf.Tensor:
            # Resized as in training, so that training at this size does not resize again.
            small = tf.cond(is_large, lambda: resize_to_side(image, side, "shorter"), lambda: image)
            return tf.io.encode_jpeg(small, "rgb", quality=_JPEG_QUALITY)

        # Even an image that stays as it is must be decoded.
        with tf.control_dependencies([tf.debugging.assert_positive(size)]):
            return tf.cond(is_large | (turn > 1), encoded, lambda: data)

    return convert
