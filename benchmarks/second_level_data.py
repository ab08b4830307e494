"""Data sets that differ in one property each, made from the characters of Omniglot.

All but one are measured on the same 300 characters of alphabets that are kept for evaluation, so that a difference
comes from what was trained on.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
from PIL import Image

import tfdml
from tfdml.data import ImageDataset

TEST_CLASSES, TRAIN_CLASSES, FEW = 300, 350, 100
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Variant:
    """A data set.

    Args:
        name: As in tables.
        train: Makes its training images of the two splits of Omniglot and the characters that are measured on.
        resolution: The images are reduced to so many pixels a side first.
    """

    name: str
    train: Callable[[ImageDataset, ImageDataset, np.ndarray], ImageDataset]
    resolution: int = SIZE


def _some(dataset: ImageDataset, count: int, without: np.ndarray | None = None) -> ImageDataset:
    classes = np.setdiff1d(np.unique(dataset.labels), [] if without is None else without)
    return dataset.select_classes(np.random.default_rng(1).permutation(classes)[:count])


def _first_images(dataset: ImageDataset, count: int) -> ImageDataset:
    rows = np.concatenate([np.flatnonzero(dataset.labels == label)[:count] for label in np.unique(dataset.labels)])
    return dataset.take(rows)


# Each differs from the first one in what its name says.
VARIANTS = (
    Variant("other alphabets", lambda a, b, test: _some(a, TRAIN_CLASSES)),
    Variant("same alphabets", lambda a, b, test: _some(b, TRAIN_CLASSES, test)),
    Variant("few classes", lambda a, b, test: _some(a, FEW)),
    Variant("small classes", lambda a, b, test: _first_images(_some(a, TRAIN_CLASSES), 5)),
    # Printed characters: the built-in glyphs.
    Variant("fonts", lambda a, b, test: tfdml.data.load("glyphs", split="train", size=SIZE)),
    # Of the characters measured on, too.
    Variant("coarse", lambda a, b, test: _some(a, TRAIN_CLASSES), resolution=10),
)


def write(variant: Variant, omniglot: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a data set as image files and a list of them, where that has not been done; returns the list."""
    path = folder / variant.name.replace(" ", "_") / "list.csv"
    if path.exists():
        return path
    background, evaluation = (tfdml.data.load("omniglot", omniglot, split=split) for split in ("train", "test"))
    test = _some(evaluation, TEST_CLASSES)
    splits = {"train": variant.train(background, evaluation, np.unique(test.labels)), "test": test}
    path.parent.mkdir(parents=True)
    rows = []
    for split, dataset in splits.items():
        for index, label in enumerate(dataset.labels.tolist()):
            name = f"{split}_{index:05d}.png"
            image = tfdml.data.decode_image(dataset.images.encoded(index)).numpy()
            small = Image.fromarray(image).convert("L").resize((variant.resolution,) * 2, Image.Resampling.BOX)
            small.resize((SIZE, SIZE), Image.Resampling.BILINEAR).save(path.parent / name)
            rows.append((name, f"{split} {dataset.class_names[label]}", split))
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    partial.replace(path)
    return path
