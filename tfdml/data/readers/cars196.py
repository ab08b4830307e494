"""Cars-196 (Krause et al., 2013), read from the official archives as unpacked."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import scipy.io

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files as files
from tfdml.data.readers.boxes import boxed
from tfdml.data.readers.label_files import CONTROL, quoted
from tfdml.errors import UserError

NUM_TRAIN_CLASSES = 98
NUM_CLASSES = 196
NUM_IMAGES = {"train": 8_054, "test": 8_131}
# Pixels; a row or column beyond it is no annotation, and may not be a finite number.
_FARTHEST = 1e6

_LAYOUT = (
    "expected cars_train/ and cars_test/ with devkit/cars_train_annos.mat and "
    "devkit/cars_test_annos_withlabels.mat, or car_ims/ with cars_annos.mat"
)


def read(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True, crop_boxes: bool = False
) -> ImageDataset:
    """Reads the zero-shot split: classes 1-98 to train, 99-196 to test; a label is the class number less one.

    Either official form will do: `cars_train/`, `cars_test/` and their two tables, or `car_ims/` and its one
    table. Tables may lie in `devkit/` or in `data_dir` itself.

    Args:
        data_dir: The folder with the image folders and `devkit/`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its 8,054 or 8,131 images; False for a part of the data set.
        crop_boxes: Whether to cut each image to the bounding box of its table.

    Raises:
        UserError: A table or an image is missing, a table cannot be read, or the number of images is wrong.

    Example:
        >>> read("data/cars196", "test").num_classes
        98
    """
    root = pathlib.Path(data_dir)
    if not root.is_dir():
        raise UserError(f"cars196: there is no folder {root}; {_LAYOUT}")
    paths, classes, tables = _rows(root)
    rows = np.flatnonzero((classes <= NUM_TRAIN_CLASSES) == (split == "train"))
    if check_counts and len(rows) != NUM_IMAGES[split]:
        raise UserError(
            f"cars196: the {split} split should have {NUM_IMAGES[split]} images, the tables in {root} list "
            f"{len(rows)}; unpack the official devkit again, or pass check_counts=False for a part of the data set"
        )
    chosen = tuple(paths[row] for row in rows)
    files.require_files("cars196", chosen, "unpack the image archives again beside devkit/")
    images = boxed("cars196", chosen, _boxes(tables)[rows]) if crop_boxes else FileImages(chosen)
    labels = classes[rows] - 1
    class_names = _class_names(root)
    return ImageDataset(
        name="cars196",
        split=split,
        images=images,
        labels=labels,
        class_names={int(c): class_names.get(int(c), f"class {c + 1}") for c in np.unique(labels)},
    )


def _rows(root: pathlib.Path) -> tuple[list[str], np.ndarray, list[np.ndarray]]:
    """The path and the class (1-196) of every image that the tables list, and the tables."""
    merged = _find(root, "cars_annos.mat")
    train = _find(root, "cars_train_annos.mat")
    test = _find(root, "cars_test_annos_withlabels.mat")
    # The two forms number the images differently, so the image folder decides which table is the right one.
    if merged and ((root / "car_ims").is_dir() or not (train or test)):
        table = _annotations(merged, "relative_im_path")
        paths = [os.path.join(root, *name.split("/")) for name in _names(merged, table, "relative_im_path")]
        return paths, _classes(merged, table), [table]
    if not train or not test:
        lacking = "cars_test_annos_withlabels.mat" if train else "cars_train_annos.mat"
        raise UserError(
            f"cars196: found no {lacking} in {root} or {root / 'devkit'} "
            f"(cars_test_annos.mat, without the labels, cannot replace it); {_LAYOUT}"
        )
    paths, classes, tables = [], [], []
    for file, folder in ((train, "cars_train"), (test, "cars_test")):
        table = _annotations(file, "fname")
        paths += [os.path.join(root, folder, name) for name in _names(file, table, "fname")]
        classes.append(_classes(file, table))
        tables.append(table)
    return paths, np.concatenate(classes), tables


def _boxes(tables: list[np.ndarray]) -> np.ndarray:
    """The bounding box of every row, (N, 4) int64: top, left, bottom, right; the tables count from 1, end included."""
    corners = []
    for field in ("bbox_y1", "bbox_x1", "bbox_y2", "bbox_x2"):
        if any(field not in (table.dtype.names or ()) for table in tables):
            raise UserError(f"cars196: a table has no annotations.{field}; load without crop_boxes")
        values = [value for table in tables for value in table[field]]
        for value in values:
            if not (isinstance(value, int | float | np.number) and -_FARTHEST < float(value) < _FARTHEST):
                raise UserError(f"cars196: {field} is {quoted(value)} in a table; expected pixels; unpack it again")
        corners.append([int(value) for value in values])
    return np.array(corners, np.int64).T - [1, 1, 0, 0]


def _find(root: pathlib.Path, name: str) -> pathlib.Path | None:
    return next((path for path in (root / "devkit" / name, root / name) if path.is_file()), None)


def _load_mat(path: pathlib.Path) -> dict:
    try:
        return scipy.io.loadmat(path, squeeze_me=True)
    except PermissionError as error:
        raise UserError(f"cars196: no permission to read {path}") from error
    except Exception as error:  # scipy raises a dozen types on a damaged file
        raise UserError(
            f"cars196: {path} is not a readable MATLAB file ({quoted(str(error))}); unpack it again"
        ) from error


def _annotations(path: pathlib.Path, name_field: str) -> np.ndarray:
    table = np.ravel(_load_mat(path).get("annotations", np.zeros(0)))
    fields = table.dtype.names or ()
    for field in (name_field, "class"):
        if field not in fields:
            raise UserError(f"cars196: {path} has no annotations.{field}; is it the official file, with labels?")
    return table


def _names(path: pathlib.Path, table: np.ndarray, field: str) -> list[str]:
    """The file name of every row."""
    first: dict[str, int] = {}
    for row, name in enumerate(table[field], 1):
        if not isinstance(name, str) or not name.strip() or CONTROL.search(name):
            raise UserError(f"cars196: {path}, row {row}: {field} is {quoted(name)}; expected a file name")
        if first.setdefault(name, row) != row:
            raise UserError(
                f"cars196: {path}, rows {first[name]} and {row}: {field} {quoted(name)} comes twice; unpack it again"
            )
    return [str(name) for name in table[field]]


def _classes(path: pathlib.Path, table: np.ndarray) -> np.ndarray:
    """The class (1-196) of every row."""
    for row, value in enumerate(table["class"], 1):
        if not (isinstance(value, int | float | np.number) and value in range(1, NUM_CLASSES + 1)):
            raise UserError(
                f"cars196: {path}, row {row}: class is {quoted(value)}; expected a whole number from 1 to {NUM_CLASSES}"
            )
    return np.array([int(value) for value in table["class"]], np.int64)


def _class_names(root: pathlib.Path) -> dict[int, str]:
    """Names by label, from the meta file or, without it, from the merged table, which repeats them."""
    for file in ("cars_meta.mat", "cars_annos.mat"):
        path = _find(root, file)
        if path:
            found = np.ravel(_load_mat(path).get("class_names", np.zeros(0)))
            if len(found):
                return {label: str(name) for label, name in enumerate(found)}
    return {}
