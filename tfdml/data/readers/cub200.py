"""CUB-200-2011 (Wah et al., 2011), read from the official archive as unpacked."""

from __future__ import annotations

import os

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files as files
from tfdml.data.readers import tables
from tfdml.data.readers.boxes import boxed
from tfdml.errors import UserError

NUM_TRAIN_CLASSES = 100
NUM_CLASSES = 200
NUM_IMAGES = {"train": 5_864, "test": 5_924}
# Pixels; a row or column beyond it is no annotation, and may not be a finite number.
_FARTHEST = 1e6


def read(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True, crop_boxes: bool = False
) -> ImageDataset:
    """Reads the zero-shot split: classes 1-100 to train, 101-200 to test; a label is the class number less one.

    The archive's own `train_test_split.txt`, which has every class in both parts, plays no role. Images come in the
    order of their ids.

    Args:
        data_dir: The folder `CUB_200_2011`, with `images.txt`, `image_class_labels.txt`, `classes.txt` and
            `images/`, or the folder that it lies in.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its 5,864 or 5,924 images; False for a part of the data set.
        crop_boxes: Whether to cut each image to its box in `bounding_boxes.txt`.

    Raises:
        UserError: A file or an image is missing, a file is not as it should be, or the number of images is wrong.

    Example:
        >>> read("data/CUB_200_2011", "test").num_classes
        100
    """
    root = files.official_root("cub200", data_dir, "CUB_200_2011", "images.txt")
    images_file, labels_file = (os.path.join(root, file) for file in ("images.txt", "image_class_labels.txt"))
    paths_of = _by_id(images_file, ("image_id", "path"))
    tables.check_distinct("cub200", images_file, "path", list(paths_of.values()))
    cells = _by_id(labels_file, ("image_id", "class"))
    numbers = tables.integers("cub200", labels_file, "class", list(cells.values()), 1, NUM_CLASSES)
    class_of = dict(zip(cells, numbers.tolist(), strict=True))
    if paths_of.keys() != class_of.keys():
        image = min(paths_of.keys() ^ class_of.keys())
        there, lacking = (images_file, labels_file) if image in paths_of else (labels_file, images_file)
        raise UserError(f"cub200: image {image} is in {there} but not in {lacking}; unpack the archive again")
    image_ids = sorted(paths_of)
    classes = np.array([class_of[image] for image in image_ids])
    rows = np.flatnonzero((classes <= NUM_TRAIN_CLASSES) == (split == "train"))
    if check_counts:
        files.check_count("cub200", f"{split} images", NUM_IMAGES[split], len(rows), labels_file)
    paths = tuple(os.path.join(root, "images", paths_of[image_ids[row]]) for row in rows)
    files.require_files("cub200", paths)
    images = FileImages(paths)
    if crop_boxes:
        boxes_file = os.path.join(root, "bounding_boxes.txt")
        images = boxed("cub200", paths, _boxes(boxes_file, [image_ids[row] for row in rows]))
    labels = classes[rows] - 1
    class_names = _by_id(os.path.join(root, "classes.txt"), ("class", "name"))
    return ImageDataset(
        name="cub200",
        split=split,
        images=images,
        labels=labels,
        class_names={int(c): class_names.get(int(c) + 1, f"class {c + 1}") for c in np.unique(labels)},
    )


def _boxes(path: str, image_ids: list[int]) -> np.ndarray:
    """The boxes of images, (N, 4) int64: top, left, bottom, right."""
    columns = ("image_id", "x", "y", "width", "height")
    cells = tables.read_table("cub200", path, columns)
    ids = tables.integers("cub200", path, columns[0], cells[0])
    try:
        left, top, width, height = (np.array(column, np.float64) for column in cells[1:])
    except ValueError as error:
        raise UserError(f"cub200: {path} has a box that is no number ({error}); unpack the archive again") from None
    edges = np.stack([top, left, top + height, left + width], axis=1)
    if not (np.abs(edges) < _FARTHEST).all():
        raise UserError(f"cub200: {path} has a box with an impossible number; unpack the archive again")
    row_of = {image: row for row, image in enumerate(ids.tolist())}
    lacking = next((image for image in image_ids if image not in row_of), None)
    if lacking is not None:
        raise UserError(f"cub200: {path} has no box of image {lacking}; unpack the archive again")
    return np.rint(edges[[row_of[image] for image in image_ids]]).astype(np.int64)


def _by_id(path: str, columns: tuple[str, str]) -> dict[int, str]:
    """A table of ids and values as a dict."""
    cells, values = tables.read_table("cub200", path, columns)
    ids = tables.integers("cub200", path, columns[0], cells)
    tables.check_distinct("cub200", path, columns[0], list(map(str, ids.tolist())))
    return dict(zip(ids.tolist(), values, strict=True))
