"""Omniglot (Lake et al., 2015), read from its two official archives without unpacking them."""

from __future__ import annotations

import itertools
import os
import pathlib
import zipfile

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import EncodedImages, FileImages, Images
from tfdml.data.readers.label_files import quoted
from tfdml.errors import UserError

IMAGES_PER_CLASS = 20
_ARCHIVES = {"train": "images_background", "test": "images_evaluation"}
_NUM_CLASSES = {"train": 964, "test": 659}
_FIRST_LABEL = {"train": 0, "test": 964}


def read(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Reads the background set (964 classes) to train, the evaluation set (659 classes) to test.

    A class is one character of one alphabet, drawn by 20 people. Labels follow the sorted names: 0 to 963 for the
    background set, from 964 on for the evaluation set. The images come from `images_background.zip` and
    `images_evaluation.zip`, or from the folders of the same names if only those are there.

    Args:
        data_dir: The folder with the two archives.
        split: `"train"` or `"test"`.
        check_counts: Whether to require the official number of classes and of images per class.

    Raises:
        UserError: The archive is missing or damaged, or the counts are wrong.

    Example:
        >>> read("data/omniglot", "test").num_classes
        659
    """
    root, stem = pathlib.Path(data_dir), _ARCHIVES[split]
    archive, folder = root / f"{stem}.zip", root / stem
    if archive.is_file():
        images = _from_zip(archive, stem)
    elif folder.is_dir():
        images = _from_folder(folder)
    else:
        raise UserError(f"omniglot: found neither {archive} nor {folder}/; data_dir must hold the official {stem}.zip")
    # Names read .../<alphabet>/<character>/<image>.png
    classes = ["/".join(images.name(i).replace(os.sep, "/").split("/")[-3:-1]) for i in range(len(images))]
    class_names, labels = np.unique(classes, return_inverse=True)
    if check_counts:
        _check_counts(archive if archive.is_file() else folder, split, class_names, labels)
    first = _FIRST_LABEL[split]
    return ImageDataset(
        name="omniglot",
        split=split,
        images=images,
        labels=labels + first,
        class_names={first + i: str(name) for i, name in enumerate(class_names)},
    )


def _is_image(parts: list[str], stem: str) -> bool:
    return len(parts) == 4 and parts[0] == stem and parts[3].endswith(".png") and parts[3][0] != "."


def _from_zip(archive: pathlib.Path, stem: str) -> Images:
    try:
        with zipfile.ZipFile(archive) as file:
            members = sorted(name for name in file.namelist() if _is_image(name.split("/"), stem))
            twice = next((name for name, following in itertools.pairwise(members) if name == following), None)
            if twice is not None:
                raise UserError(f"omniglot: {archive} holds {quoted(twice)} twice; download it again")
            data = tuple(file.read(name) for name in members)
    except UserError:
        raise
    except PermissionError as error:
        raise UserError(f"omniglot: no permission to read {archive}") from error
    except Exception as error:  # zipfile raises a dozen types on a damaged file
        raise UserError(
            f"omniglot: {archive} is not a whole zip archive ({quoted(str(error))}); download it again"
        ) from error
    if not members:
        raise UserError(f"omniglot: {archive} holds no {stem}/<alphabet>/<character>/<image>.png")
    return EncodedImages(data, tuple(members))


def _from_folder(folder: pathlib.Path) -> Images:
    paths = sorted(str(path) for path in folder.glob("*/*/*.png") if not path.name.startswith("."))
    if not paths:
        raise UserError(f"omniglot: {folder} holds no <alphabet>/<character>/<image>.png")
    return FileImages(tuple(paths))


def _check_counts(source: pathlib.Path, split: str, class_names: np.ndarray, labels: np.ndarray) -> None:
    advice = "unpack or download it again, or pass check_counts=False for a part of the data set"
    if len(class_names) != _NUM_CLASSES[split]:
        raise UserError(
            f"omniglot: expected {_NUM_CLASSES[split]} classes in {source}, found {len(class_names)}; {advice}"
        )
    counts = np.bincount(labels)
    wrong = np.flatnonzero(counts != IMAGES_PER_CLASS)
    if len(wrong):
        raise UserError(
            f"omniglot: expected {IMAGES_PER_CLASS} images per class in {source}, found {counts[wrong[0]]} of "
            f"{class_names[wrong[0]]} ({len(wrong)} such classes); {advice}"
        )
