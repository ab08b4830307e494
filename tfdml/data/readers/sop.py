"""Stanford Online Products (Song et al., 2016), read from the official archive as unpacked."""

from __future__ import annotations

import os

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files as files
from tfdml.data.readers import tables

NUM_IMAGES = {"train": 59_551, "test": 60_502}
NUM_CLASSES = {"train": 11_318, "test": 11_316}
# In the order of their ids, which start at 1.
SUPER_CLASSES = (
    "bicycle",
    "cabinet",
    "chair",
    "coffee maker",
    "fan",
    "kettle",
    "lamp",
    "mug",
    "sofa",
    "stapler",
    "table",
    "toaster",
)

_COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def read(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Reads the official split, whose classes are disjoint.

    A label is the class id less one: 0 to 11,317 to train, 11,318 to 22,633 to test. `super_labels` holds the kind
    of product, 0 to 11 (see `SUPER_CLASSES`).

    Args:
        data_dir: The folder `Stanford_Online_Products`, with `Ebay_train.txt`, `Ebay_test.txt` and the image
            folders, or the folder that it lies in.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published numbers of images and classes; False for a part of
            the data set.

    Raises:
        UserError: The list or an image is missing, the list is not as it should be, or a number is wrong.

    Example:
        >>> read("data/Stanford_Online_Products", "test").num_classes
        11316
    """
    file = f"Ebay_{split}.txt"
    root = files.official_root("sop", data_dir, "Stanford_Online_Products", file)
    source = os.path.join(root, file)
    _, class_cells, super_cells, names = tables.read_table("sop", source, _COLUMNS, header=True)
    labels = tables.integers("sop", source, "class_id", class_cells, 1, first_line=2) - 1
    kinds = tables.integers("sop", source, "super_class_id", super_cells, 1, len(SUPER_CLASSES), first_line=2)
    super_labels = kinds - 1
    tables.check_distinct("sop", source, "path", names, first_line=2)
    tables.check_one_to_one("sop", source, ("class_id", "super_class_id"), labels + 1, kinds, first_line=2)
    classes, first = np.unique(labels, return_index=True)
    if check_counts:
        files.check_count("sop", f"{split} images", NUM_IMAGES[split], len(labels), source)
        files.check_count("sop", f"{split} classes", NUM_CLASSES[split], len(classes), source)
    paths = tuple(os.path.join(root, name) for name in names)
    files.require_files("sop", paths)
    return ImageDataset(
        name="sop",
        split=split,
        images=FileImages(paths),
        labels=labels,
        class_names={
            int(c): f"{SUPER_CLASSES[kind]} {c + 1}" for c, kind in zip(classes, super_labels[first], strict=True)
        },
        super_labels=super_labels,
    )
