"""In-Shop Clothes Retrieval (DeepFashion, Liu et al., 2016), read from the official archives as unpacked."""

from __future__ import annotations

import os
import re

import numpy as np

from tfdml import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files as files
from tfdml.data.readers import tables
from tfdml.data.readers.label_checks import check_queries
from tfdml.errors import UserError

NUM_IMAGES = {"train": 25_882, "query": 14_218, "gallery": 12_612}
NUM_CLASSES = {"train": 3_997, "test": 3_985}

_PARTITION = "list_eval_partition.txt"
_COLUMNS = ("image_name", "item_id", "evaluation_status")
# After the number of rows and the header.
_FIRST_ROW = 3
_ITEM = re.compile(r"id_[0-9]{1,18}")


def read(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Reads the official split, whose items are disjoint; the test split is queries and gallery in one.

    A label is the number of the item: 2 for `id_00000002`. In the test split, `is_query` distinguishes the queries from
    the gallery; `load("inshop", data_dir, "query")` and `"gallery"` give either alone.

    Args:
        data_dir: The folder with `list_eval_partition.txt`, in `Eval/`, in `Anno/` or right inside, and with the
            images, in `img/` or `Img/img/`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published numbers of images and items; False for a part of the
            data set.

    Raises:
        UserError: The list or an image is missing, the list is not as it should be, or a number is wrong.

    Example:
        >>> read("data/inshop", "test").num_classes
        3985
    """
    root = os.fspath(data_dir)
    candidates = [os.path.join(root, *folder, _PARTITION) for folder in (("Eval",), ("Anno",), ())]
    source = next((path for path in candidates if storage.is_file(path)), None)
    if source is None:
        raise UserError(
            f"inshop: found no {_PARTITION} in {root} or its Eval/ or Anno/; data_dir must be the official archive "
            "as unpacked"
        )
    # The first line is the number of rows.
    names, items, statuses = tables.read_table("inshop", source, _COLUMNS, first_line=2, header=True)
    for column, cells, is_right, expected in (
        ("evaluation_status", statuses, NUM_IMAGES.__contains__, "train, query or gallery"),
        ("item_id", items, _ITEM.fullmatch, "the like of id_00000002"),
    ):
        wrong = next((row for row, cell in enumerate(cells) if not is_right(cell)), None)
        if wrong is not None:
            line = tables.line_of("inshop", source, wrong, _FIRST_ROW)
            raise UserError(
                f"inshop: {source}, line {line}: {column} is {files.quoted(cells[wrong])}; expected {expected}"
            )
    tables.check_distinct("inshop", source, "image_name", names, first_line=_FIRST_ROW)
    status = np.array(statuses)
    all_labels = np.array([int(item[3:]) for item in items], np.int64)
    in_training = status == "train"
    splits = np.where(in_training, "train", "test")
    tables.check_one_to_one("inshop", source, ("item", "split"), all_labels, splits, first_line=_FIRST_ROW)
    check_queries(
        "inshop",
        source,
        all_labels,
        status == "query",
        status == "gallery",
        lambda row: f"line {tables.line_of('inshop', source, row, _FIRST_ROW)}, {items[row]}",
    )
    rows = np.flatnonzero(in_training == (split == "train"))
    labels = all_labels[rows]
    if check_counts:
        promised = files.read_text("inshop", source).split("\n", 1)[0].strip()
        if promised != str(len(names)):
            raise UserError(
                f"inshop: {source}, line 1: the list should have {files.quoted(promised)} rows, found {len(names)}; "
                "is it cut off? Download it again"
            )
        for part in ("train",) if split == "train" else ("query", "gallery"):
            files.check_count("inshop", f"{part} images", NUM_IMAGES[part], int((status == part).sum()), source)
        files.check_count("inshop", f"{split} items", NUM_CLASSES[split], len(np.unique(labels)), source)
    images = os.path.join(root, "Img") if storage.is_folder(os.path.join(root, "Img", "img")) else root
    paths = tuple(os.path.join(images, names[row]) for row in rows)
    files.require_files("inshop", paths, "unpack img.zip so that its folder img/ lies in data_dir or in its Img/")
    return ImageDataset(
        name="inshop",
        split=split,
        images=FileImages(paths),
        labels=labels,
        class_names={int(label): items[row] for row, label in zip(rows, labels, strict=True)},
        is_query=None if split == "train" else status[rows] == "query",
    )
