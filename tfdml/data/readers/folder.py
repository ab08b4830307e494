"""Any tree of class folders as a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import EXTENSIONS
from tfdml.data.images import FileImages
from tfdml.data.readers.label_files import (
    CONTROL,
    check_fraction,
    quoted,
    split_classes,
    warn_shared_classes,
    warn_singleton_classes,
)
from tfdml.errors import UserError


def read(data_dir: str | os.PathLike, split: str = "train", *, test_fraction: float = 0.5) -> ImageDataset:
    """Reads `data_dir/<class>/**/<image>`, or `data_dir/{train,test}/<class>/**/<image>` where both are there.

    Images are files named *.jpg, *.jpeg, *.png or *.webp in any case, at any depth below their class
    folder; hidden files and folders and other files are ignored. Labels follow the sorted class names of both
    splits, so they depend on the names alone. Links are followed to class folders and to files, not to folders
    further down.

    Args:
        data_dir: The tree, on a local disk or on any file system that `tf.io.gfile` knows.
        split: `"train"`, `"test"`, or `"all"` for the images of both.
        test_fraction: Without `train/` and `test/`: the share of the classes, the last in sorted order, that is held
            out as the test split; each split gets at least one class.

    Raises:
        UserError: There is no folder or no class folder, a class folder has no image, there is one class only (but
            for `"all"`), or the fraction is not between 0 and 1.

    Example:
        >>> read("photos", "test", test_fraction=0.25).num_classes
        1
        >>> read("photos", "all")
        ImageDataset('folder', 'all', images=12, classes=4)
    """
    root = os.fspath(data_dir)
    check_fraction("folder", test_fraction)
    folders, files = _list(root)
    if {"train", "test"} <= set(folders):
        members = {part: _class_folders(os.path.join(root, part)) for part in ("train", "test")}
        roots = {part: os.path.join(root, part) for part in members}
        warn_shared_classes("folder", root, sorted({*members["train"]} & {*members["test"]}))
    elif split == "all":
        members, roots = {"all": _class_folders(root, folders, files)}, {"all": root}
    else:
        classes = _class_folders(root, folders, files)
        members = split_classes("folder", root, classes, test_fraction, "both train/ and test/")
        roots = dict.fromkeys(members, root)
    labels_of = {name: label for label, name in enumerate(sorted(set().union(*members.values())))}
    chosen = [part for part in members if split in (part, "all")]
    paths, labels = [], []
    for name, path in [(name, os.path.join(roots[part], name)) for part in chosen for name in members[part]]:
        found = _images_below(path)
        if not found:
            raise UserError(
                f"folder: the class folder {path} has no image "
                f"({', '.join(EXTENSIONS)}); add images or remove the folder"
            )
        paths += found
        labels += [labels_of[name]] * len(found)
    class_names = {labels_of[name]: name for part in chosen for name in members[part]}
    warn_singleton_classes("folder", split, np.array(labels, np.int64), class_names)
    return ImageDataset(
        name="folder",
        split=split,
        images=FileImages(tuple(paths)),
        labels=np.array(labels, np.int64),
        class_names=class_names,
    )


def _walk(folder: str, onerror: Callable[[Exception], None] | None = None) -> Iterator[tuple[str, list, list]]:
    if "://" in folder:
        import tensorflow as tf  # only needed for remote file systems, and slow to import

        return iter(tf.io.gfile.walk(folder, onerror=onerror))
    return os.walk(folder, onerror=onerror)


def _visible(names: Iterable[str]) -> list[str]:
    return sorted(name.rstrip("/") for name in names if not name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _list(folder: str) -> tuple[list[str], list[str]]:
    """The visible folders and files right inside `folder`, sorted."""
    first = next(_walk(folder), None)
    if first is None:
        raise UserError(f"folder: there is no folder {folder}, or it may not be read; check data_dir")
    _, folders, files = first
    return _visible(folders), _visible(files)


def _class_folders(folder: str, folders: list[str] | None = None, files: list[str] | None = None) -> list[str]:
    if folders is None or files is None:
        folders, files = _list(folder)
    loose = [name for name in files if _is_image(name)]
    if not folders:
        found = f"{len(loose)} images but no class folder" if loose else "no class folder"
        raise UserError(f"folder: found {found} in {folder}; expected {os.path.join(folder, '<class>', '<image>.jpg')}")
    if loose:
        logging.warning("folder: ignoring %d images outside the class folders of %s.", len(loose), folder)
    return folders


def _images_below(folder: str) -> list[str]:
    def refuse(error: Exception) -> None:
        # Without this a folder that may not be read would pass for an empty one.
        raise UserError(
            f"folder: a folder below {folder} cannot be read ({error}); change its permissions or remove it"
        )

    paths = []
    for parent, folders, files in _walk(folder, refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in files if _is_image(name) and not name.startswith(".")]
    unfit = [path for path in paths if CONTROL.search(path)]
    if unfit:
        raise UserError(
            f"folder: {len(unfit)} names have control characters or are not UTF-8, the first is {quoted(unfit[0])}; "
            "rename them"
        )
    return sorted(paths)
