"""Classes within classes, and a benchmark over many kinds of images.

- DyML-Animal, DyML-Vehicle and DyML-Product (Sun et al., 2021)
- GPR1200 (Schall et al., 2022)
- iNaturalist 2018 (van Horn et al., 2018), in the split of Smooth-AP (Brown et al., 2020)
"""

import dataclasses
import json
import os
import re
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset, Protocol
from tfdml.data.readers import label_files as files
from tfdml.errors import REASON, UserError, check_choice, user_errors
from tfdml.io.files import is_folder, listing

# GPR1200: the publisher's repository. iNaturalist, not checked against the publisher: images as in the tests of
# pytorch-metric-learning, training classes as in HAPPIER's configuration. Those of DyML are not checked.
NUM_IMAGES = {"inaturalist2018": {"train": 325_846, "test": 136_093}, "gpr1200": {"test": 12_000}}
NUM_CLASSES = {"inaturalist2018": {"train": 5_690}, "gpr1200": {"test": 1_200}}
RANKS = ("species", "genus", "family", "order", "class", "phylum", "kingdom")
LEVELS = ("fine", "middle", "coarse")

_INATURALIST_PATH = re.compile(r"(.*/)?[^/]*/\d+/[^/]*")
_DYML_PROTOCOL = Protocol(("recall", "map", "asi"), ks=(1, 10, 20))
_DYML_HEADER = re.compile(r"\Afname(, ?(coarse_id|middle_id|fine_id|labels))+")


def read_inaturalist2018(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True, taxonomy: bool = False
) -> ImageDataset:
    """Read iNaturalist 2018 in the split of Smooth-AP, whose species are disjoint. A label is the category id.

    `super_labels` holds the kingdom-like folder of each image, such as Plantae or Aves. With `taxonomy`, the ranks from
    species to kingdom are levels, and `evaluate_dataset` measures them all.

    Args:
        data_dir: The folder with `train_val2018/` and `Inat_dataset_splits/`; with `taxonomy`, also `train2018.json`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published number of images, and of training classes; False for
            a part.
        taxonomy: Whether the seven ranks are read.

    Raises:
        UserError: A list or an image is missing, a list is not as it should be, or a number is wrong.

    Example:
        >>> len(read_inaturalist2018("data/inaturalist", "test"))  # doctest: +SKIP
        136093
    """
    name, root = "inaturalist2018", os.fspath(data_dir)
    file = f"Inaturalist_{split}_set1.txt"
    table = files.read_table(name, files.one_of(root, os.path.join("Inat_dataset_splits", file), file), ("path",))
    table.check_distinct("path")
    table.check_cells("path", _INATURALIST_PATH.fullmatch, "train_val2018/KIND/CATEGORY/FILE")
    rows = [path.split("/") for path in table.columns["path"]]
    labels = np.array([int(parts[-2]) for parts in rows])
    kinds, super_labels = np.unique([parts[-3] for parts in rows], return_inverse=True)
    files.check_count(check_counts, name, f"{split} images", NUM_IMAGES[name][split], len(rows), table.path)
    classes = len(np.unique(labels))
    published = NUM_CLASSES[name].get(split, classes)
    files.check_count(check_counts, name, f"{split} classes", published, classes, table.path)
    levels = _ranks(os.path.join(root, "train2018.json"), labels) if taxonomy else None
    metrics = ("recall@1", "map", "h_ap", "asi", "ndcg") if taxonomy else ("recall",)
    protocol = Protocol(metrics, ks=(1, 4, 16, 32), levels=levels)
    paths = [os.path.join(root, *parts) for parts in rows]
    class_names = {int(c): f"{kinds[kind]} {c}" for c, kind in zip(labels, super_labels, strict=True)}
    return files.images_in_files(name, split, paths, labels, class_names, super_labels=super_labels, protocol=protocol)


def _ranks(path: str, labels: np.ndarray) -> np.ndarray:
    """(N, 7) the class of each image at each rank. Classes are numbered over all categories."""
    with user_errors((ValueError, KeyError, TypeError), f"inaturalist2018: {path} is not as it should be ({REASON})"):
        categories = json.loads(files.read_text("inaturalist2018", path))["categories"]
        of = {int(one["id"]): [int(one["id"]), *(str(one[rank]) for rank in RANKS[1:])] for one in categories}
        columns = list(zip(*(of[int(label)] for label in labels), strict=True))
    # A genus may share its name with one of another family: its class is the whole path to it.
    paths = [["/".join(path) for path in zip(*columns[rank:], strict=True)] for rank in range(1, len(RANKS))]
    return np.stack([labels, *(np.unique(names, return_inverse=True)[1] for names in paths)], axis=1)


def read_dyml_animal(data_dir: str | os.PathLike, split: str = "train", *, level: str = "fine") -> ImageDataset:
    """Read DyML-Animal. A label is the fine class in training, that of the level in the test split.

    The test split of each level has its own queries and gallery: measure all three, and take the mean. The training
    split has `super_labels`, the middle classes. No number is checked, because the paper states thousands only.

    Args:
        data_dir: The folder with `train/`, `bmk_fine/`, `bmk_middle/` and `bmk_coarse/`.
        split: `"train"` or `"test"`.
        level: `"fine"`, `"middle"` or `"coarse"`, of the test split.

    Raises:
        UserError: A table or an image is missing, or a table is not as it should be.

    Example:
        >>> read_dyml_animal("data/dyml_animal", "test", level="coarse").split  # doctest: +SKIP
        'test'
    """
    return _dyml("dyml_animal", data_dir, split, level)


def read_dyml_vehicle(data_dir: str | os.PathLike, split: str = "train", *, level: str = "fine") -> ImageDataset:
    """Read DyML-Vehicle; see `read_dyml_animal`.

    Args:
        data_dir: As `read_dyml_animal`.
        split: `"train"` or `"test"`.
        level: As `read_dyml_animal`.

    Raises:
        UserError: As `read_dyml_animal`.

    Example:
        >>> read_dyml_vehicle("data/dyml_vehicle", "test").split  # doctest: +SKIP
        'test'
    """
    return _dyml("dyml_vehicle", data_dir, split, level)


def read_dyml_product(data_dir: str | os.PathLike, split: str = "train") -> ImageDataset:
    """Read DyML-Product. A label is the fine class; the test split has the three levels, measured together.

    Args:
        data_dir: The folder with `train/` and `mini-bmk_all_in_one/`.
        split: `"train"` or `"test"`.

    Raises:
        UserError: As `read_dyml_animal`.

    Example:
        >>> read_dyml_product("data/dyml_product", "test").split  # doctest: +SKIP
        'test'
    """
    folder = os.path.join(os.fspath(data_dir), "train" if split == "train" else "mini-bmk_all_in_one")
    return _dyml_levels("dyml_product", folder, split)


def _dyml_levels(name: str, folder: str, split: str) -> ImageDataset:
    """Return the images of a table with all levels, all-to-all."""
    images, columns = _dyml_table(name, os.path.join(folder, "label.csv"), ("fine_id", "middle_id", "coarse_id"))
    paths = [os.path.join(folder, "imgs", image) for image in images]
    protocol = dataclasses.replace(_DYML_PROTOCOL, levels=columns) if split == "test" else None
    return files.images_in_files(name, split, paths, columns[:, 0], super_labels=columns[:, 1], protocol=protocol)


def _dyml(name: str, data_dir: str | os.PathLike, split: str, level: str) -> ImageDataset:
    check_choice(f"level of {name}", level, LEVELS)
    if split == "train":
        return _dyml_levels(name, os.path.join(os.fspath(data_dir), "train"), split)
    paths: list[str] = []
    labels: Any = []
    for role in ("query", "gallery"):
        folder = os.path.join(os.fspath(data_dir), f"bmk_{level}")
        images, columns = _dyml_table(name, os.path.join(folder, f"{role}.csv"), ("labels",))
        paths += [os.path.join(folder, role, image) for image in images]
        labels.append(columns[:, 0])
    is_query, labels = np.arange(len(paths)) < len(labels[0]), np.concatenate(labels)
    return files.images_in_files(name, split, paths, labels, is_query=is_query, protocol=_DYML_PROTOCOL)


def _dyml_table(name: str, path: str, wanted: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Return the images of a table, and their (N, L) classes in the order wanted.

    The published tables lack the line end after the header, which reads `fname, coarse_id, middle_id, fine_id0.jpg, 3`
    and so on: `0.jpg` is the first image.
    """
    text = _DYML_HEADER.sub(r"\g<0>\n", files.read_text(name, path), count=1)
    table = files.comma_table(name, path, text, ("fname", *wanted))
    return table.columns["fname"], np.stack([table.integers(column) for column in wanted], axis=1)


def read_gpr1200(data_dir: str | os.PathLike, split: str = "test", *, check_counts: bool = True) -> ImageDataset:
    """Read GPR1200. A label is the number before `_` in a file's name; `super_labels` is the part, 0 to 5.

    The parts, of 200 classes each, are landmarks, nature, sketches, objects, products and faces. The published script
    counts the query itself as an image that is found, and so does `evaluate_dataset`, whose values are comparable.

    Args:
        data_dir: The folder with the images, or the folder that their folder `images` lies in.
        split: `"test"`; there is no other.
        check_counts: Whether there must be 12,000 images of 1,200 classes; False for a part of the data set.

    Raises:
        UserError: There is no image, a name is another, or a number is wrong.

    Example:
        >>> read_gpr1200("data/gpr1200").num_classes  # doctest: +SKIP
        1200
    """
    name, root = "gpr1200", os.fspath(data_dir)
    files.require_test(name, split)
    folder = os.path.join(root, "images") if is_folder(os.path.join(root, "images")) else root
    there = listing(folder) if is_folder(folder) else []
    found = [file for file in there if file.lower().endswith((".jpg", ".jpeg", ".png"))]
    numbers = [file.split("_")[0] for file in found]
    wrong = next((file for file, number in zip(found, numbers, strict=True) if not number.isdigit()), None)
    if wrong is not None or not found:
        raise UserError(f"gpr1200: {folder} holds {files.quoted(wrong) if wrong else 'no image'}; expected 0_....jpg")
    order = sorted(range(len(found)), key=lambda row: (int(numbers[row]), found[row]))
    labels = np.array([int(numbers[row]) for row in order])
    files.check_count(check_counts, name, "images", NUM_IMAGES[name]["test"], len(found), folder)
    files.check_count(check_counts, name, "classes", NUM_CLASSES[name]["test"], len(np.unique(labels)), folder)
    paths = [os.path.join(folder, found[row]) for row in order]
    protocol = Protocol(("map",), finds_itself=True)
    return files.images_in_files(name, split, paths, labels, super_labels=labels // 200, protocol=protocol)
