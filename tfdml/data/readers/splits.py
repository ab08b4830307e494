"""From a table of images to the data set of one of its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.readers.image_files import require_files
from tfdml.errors import UserError, counted
from tfdml.io.tables import Table
from tfdml.names import crop_name, quoted, split_crop_name, warn


def split_classes(
    name: str, source: str, classes: list, test_fraction: float, alternative: str
) -> dict[str, list]:
    """Split classes: the last in order are the test split; each split gets at least one.

    Args:
        name: The data set, for messages.
        source: Where the classes are from.
        classes: All classes, in order.
        test_fraction: The share of the test split.
        alternative: What to do if there is one class only.

    Raises:
        UserError: There is one class only.

    Example:
        >>> split_classes("folder", "photos", ["bus", "coupe", "van"], 0.25, "")
        {'train': ['bus', 'coupe'], 'test': ['van']}
    """
    if len(classes) < 2:
        raise UserError(
            f"{name}: {source} has one class only ({quoted(classes)}); give it two, or "
            f"{alternative}"
        )
    held_out = min(max(int(len(classes) * test_fraction + 0.5), 1), len(classes) - 1)
    return {"train": classes[:-held_out], "test": classes[-held_out:]}


def warn_shared_classes(name: str, source: str, shared: Sequence) -> None:
    """Count, in a warning, the classes that are in both splits.

    Args:
        name: The data set, for messages.
        source: Where the splits are from.
        shared: The names of these classes.
    """
    if len(shared):
        first = f"(the first is {shared[0]}): metrics are not zero-shot."
        classes = counted(len(shared), "class", "are")
        warn(f"{name}: {classes} in both train and test of {source} {first}")


def dataset_of(
    table: Table,
    split: str,
    labels: np.ndarray,
    class_names: Mapping[int, str],
    advice: str = "",
    test_fraction: float = 0.5,
    **columns: Any,
) -> ImageDataset:
    """Return a split of a table.

    Warnings count classes that are in both splits, queries that the gallery cannot answer, and
    classes of one image.

    Args:
        table: With `path` and, where there are splits and roles, `split`: train, test, query or
            gallery.
        split: `"train"`, `"test"`, or `"all"` for all rows.
        labels: (N,) the class of each row.
        class_names: The names of all classes.
        advice: What to do if images are missing; empty where they are known to be there.
        test_fraction: Without splits: the share of the classes that is the test split.
        **columns: Of `ImageDataset`, for all rows.

    Raises:
        UserError: The split has no row, only some test images have a role, no query can be
            answered, there is one class only, or images are missing.
    """
    images = FileImages(tuple(table.columns["path"]))
    dataset = ImageDataset(table.name, split, images, labels, dict(class_names), **columns)
    if split != "all":
        parts = _parts(table, labels, class_names, test_fraction)
        is_test = parts != "train"
        if (
            dataset.pairs is not None
            and (across := np.ptp(is_test[dataset.pairs.rows].astype(int), axis=1)).any()
        ):
            warn(f"{table.name}: {across.sum()} of {len(across)} pairs join both splits: left out")
        if split == "test" and (parts == "query").any():
            dataset = dataclasses.replace(dataset, is_query=parts == "query")
        rows = np.flatnonzero(is_test == (split == "test"))
        if not len(rows):
            raise UserError(f"{table.name}: {table.path} has no row of the {split} split")
        dataset = dataset.take(rows)
        if dataset.is_query is None:
            _warn_singleton_classes(dataset)
    if not advice:
        return dataset
    paths, boxes = zip(*map(split_crop_name, dataset.names), strict=True)
    paths = require_files(table.name, paths, advice)
    return dataclasses.replace(dataset, images=FileImages(tuple(map(crop_name, paths, boxes))))


def _parts(
    table: Table, labels: np.ndarray, class_names: Mapping[int, str], test_fraction: float
) -> np.ndarray:
    """Return of each row whether it is train, test, query or gallery, (N,)."""
    if "split" not in table.columns:
        names = [class_names[label] for label in np.unique(labels).tolist()]
        held_out = {
            *split_classes(table.name, table.path, names, test_fraction, "name the splits")["test"]
        }
        return np.array(
            ["test" if class_names[label] in held_out else "train" for label in labels.tolist()]
        )
    parts = np.array(table.columns["split"])
    shared = np.intersect1d(labels[parts == "train"], labels[parts != "train"]).tolist()
    warn_shared_classes(table.name, table.path, [class_names[label] for label in shared])
    is_query, is_gallery = parts == "query", parts == "gallery"
    if is_query.any() or is_gallery.any():
        for row in np.flatnonzero(parts == "test")[:1]:
            raise UserError(f"{table.where(row)}: a test image has no role, where others have one")
        if not (is_query.any() and is_gallery.any()):
            raise UserError(
                f"{table.name}: {table.path} has one of query and gallery; add the other"
            )
        hopeless = np.flatnonzero(is_query & ~np.isin(labels, labels[is_gallery]))
        if len(hopeless) == is_query.sum():
            raise UserError(f"{table.where(hopeless[0])}: no query has its class in the gallery")
        if len(hopeless):
            where = table.where(hopeless[0])
            warn(
                f"{where}: the classes of {len(hopeless)} of {is_query.sum()} queries are not in "
                "the gallery."
            )
    return parts


def _warn_singleton_classes(dataset: ImageDataset) -> None:
    """Count, in a warning, the classes of a single image, which have no pair to learn from or to be
    found by."""
    classes, counts = np.unique(dataset.labels, return_counts=True)
    alone = classes[counts == 1]
    if len(alone):
        training = dataset.split == "train"
        effect = (
            "they give no positive pair"
            if training
            else "as queries they are left out of the metrics"
        )
        text = "%s: %d of %d %s classes have one image only (the first is %s): %s."
        first = dataset.class_names[int(alone[0])]
        logging.warning(text, dataset.name, len(alone), len(classes), dataset.split, first, effect)
