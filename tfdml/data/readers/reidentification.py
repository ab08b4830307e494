"""Re-identification: the same person or vehicle, found again in the pictures of other cameras.

- Market-1501 (Zheng et al., 2015)
- MSMT17 (Wei et al., 2018)
- VehicleID (Liu et al., 2016)
- VeRi-776 (Liu et al., 2016)

Test splits have query and gallery roles and, but for VehicleID, `groups`: the camera of each image. A gallery image of
the query's identity and camera is ignored when they are measured.
"""

import os
import re
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset, Protocol
from tfdml.data.readers import label_files as files
from tfdml.data.readers.label_files import quoted
from tfdml.errors import UserError
from tfdml.io.files import is_folder, listing

# Not checked against the publishers. Market-1501, whose gallery is without the junk, and MSMT17, whose first number is
# of training and validation images: the readers of torchreid and fast-reid. VeRi-776: the reader of fast-reid.
NUM_IMAGES = {
    "market1501": {"train": 12_936, "query": 3_368, "gallery": 15_913},
    "msmt17": {"train": 32_621, "query": 11_659, "gallery": 82_161},
    "veri776": {"train": 37_778, "query": 1_678, "gallery": 11_579},
}
# Identities of the lists of VehicleID, not checked against the publisher: the reader of fast-reid.
VEHICLEID_IDENTITIES = {"train": 13_164, "800": 800, "1600": 1_600, "2400": 2_400}
MSMT17_TRAIN_IDENTITIES = 1_041

_MARKET = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
_VERI = {"train": "image_train", "query": "image_query", "gallery": "image_test"}
_ROLES = {"train": ("train",), "test": ("query", "gallery")}
_MSMT17_PATH = re.compile(r"[^_]*_[^_]*_\d+(_.*)?")
# Identity, below 0 of junk, and camera.
_NAME = re.compile(r"(-?\d{1,5})_c(\d+)(?:s\d+)?_.*\.jpg")


def read_market1501(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Read Market-1501. A label is the number of the person; 0 is a distractor, which stays in the gallery.

    Gallery images of the id -1 are junk. They are left out, which gives the metrics that ignoring them would give.

    Args:
        data_dir: The folder `Market-1501-v15.09.15`, with `bounding_box_train/`, `bounding_box_test/` and `query/`, or
            the folder that it lies in.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published numbers of images; False for a part of the data set.

    Raises:
        UserError: A folder is missing, a file has another name, or a number is wrong.

    Example:
        >>> read_market1501("data/market1501", "test").is_query.sum()  # doctest: +SKIP
        3368
    """
    return _by_names("market1501", files.one_of(data_dir, "Market-1501-v15.09.15", ""), _MARKET, split, check_counts)


def read_veri776(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Read VeRi-776. A label is the number of the vehicle.

    Args:
        data_dir: The folder `VeRi`, with `image_train/`, `image_test/` and `image_query/`, or the folder that it lies
            in.
        split: `"train"` or `"test"`.
        check_counts: As `read_market1501`.

    Raises:
        UserError: As `read_market1501`.

    Example:
        >>> read_veri776("data/VeRi", "test").is_query.sum()  # doctest: +SKIP
        1678
    """
    return _by_names("veri776", files.one_of(data_dir, "VeRi", "VeRi-776", ""), _VERI, split, check_counts)


def read_msmt17(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True, add_validation: bool = False
) -> ImageDataset:
    """Read MSMT17, version 1 or 2. A label is the number of the person; those of the test split follow, from 1,041 on.

    Args:
        data_dir: The folder `MSMT17_V1` or `MSMT17_V2`, with the four lists and the images, or the folder that it lies
            in.
        split: `"train"` or `"test"`.
        check_counts: As `read_market1501`.
        add_validation: Whether the training split includes the images of `list_val.txt`, which show the same persons.
            Most published results are without them.

    Raises:
        UserError: As `read_market1501`, or a list is not as it should be.

    Example:
        >>> read_msmt17("data/MSMT17_V1", "test").is_query.sum()  # doctest: +SKIP
        11659
    """
    root = files.one_of(data_dir, "MSMT17_V1", "MSMT17_V2", "")
    folder = files.one_of(root, split, f"mask_{split}_v2")
    parts = {}
    for part in ("train", "val") if split == "train" else _ROLES["test"]:
        table = files.read_table("msmt17", os.path.join(root, f"list_{part}.txt"), ("path", "id"))
        labels = table.integers("id") + (0 if split == "train" else MSMT17_TRAIN_IDENTITIES)
        # The third number is the camera.
        table.check_cells("path", _MSMT17_PATH.fullmatch, "the like of 0000/0000_000_01_0303morning_0015_0.jpg")
        cameras = [int(path.split("_")[2]) for path in table.columns["path"]]
        paths = [os.path.join(folder, path) for path in table.columns["path"]]
        parts[part] = list(zip(paths, labels.tolist(), cameras, strict=True))
    if split == "train":
        both = parts["train"] + parts.pop("val")
        what = "training and validation images"
        files.check_count(check_counts, "msmt17", what, NUM_IMAGES["msmt17"]["train"], len(both), root)
        parts = {"train": both if add_validation else parts["train"]}
    return _dataset("msmt17", split, parts, root, check_counts and split == "test")


def read_vehicleid(
    data_dir: str | os.PathLike,
    split: str = "train",
    *,
    check_counts: bool = True,
    test_list: int = 800,
    repeat: int = 0,
) -> ImageDataset:
    """Read VehicleID. A label is the number of the vehicle.

    One random image of each vehicle is the gallery, the others are queries. The protocol repeats this ten times:
    `evaluate_dataset` reports means over ten draws, and the roles are those of one of them.

    Only identities are checked. fast-reid counts 113,346 images in the list of 13,164 vehicles, and 6,493, 13,377 and
    19,777 in the test lists, which were not checked against the publisher.

    Args:
        data_dir: The folder with `image/` and `train_test_split/`, or the folder that it lies in, as `VehicleID_V1.0`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published number of vehicles; False for a part of the data set.
        test_list: 800, 1600 or 2400, the number of vehicles of the test split.
        repeat: Which of the draws the roles are of.

    Raises:
        UserError: As `read_market1501`, or there is no such test list.

    Example:
        >>> (~read_vehicleid("data/VehicleID_V1.0", "test", test_list=2400).is_query).sum()  # doctest: +SKIP
        2400
    """
    part = "train" if split == "train" else str(test_list)
    if part not in VEHICLEID_IDENTITIES:
        raise UserError(f"vehicleid: test_list is 800, 1600 or 2400; got {test_list}")
    root = files.one_of(data_dir, "VehicleID_V1.0", "")
    path = os.path.join(root, "train_test_split", "train_list.txt" if split == "train" else f"test_list_{part}.txt")
    table = files.read_table("vehicleid", path, ("image", "vehicle"))
    table.check_distinct("image")
    labels = table.integers("vehicle")
    count = len(np.unique(labels))
    files.check_count(check_counts, "vehicleid", f"{split} vehicles", VEHICLEID_IDENTITIES[part], count, path)
    paths = [os.path.join(root, "image", f"{image}.jpg") for image in table.columns["image"]]
    columns: dict[str, Any] = {}
    if split == "test":
        columns = {"protocol": Protocol(("recall",), ks=(1, 5), draws=10), "is_query": Protocol.draw(labels, repeat)}
    return files.images_in_files("vehicleid", split, paths, labels, **columns)


def _by_names(name: str, root: str, folders: dict[str, str], split: str, check_counts: bool) -> ImageDataset:
    """Read identity and camera of each image from its name."""
    parts = {}
    for part in _ROLES[split]:
        folder = os.path.join(root, folders[part])
        if not is_folder(folder):
            raise UserError(f"{name}: there is no folder {folder}; data_dir must be the official archive as unpacked")
        images = sorted(file for file in listing(folder) if file.endswith(".jpg"))
        parsed = [(image, _NAME.fullmatch(image)) for image in images]
        wrong = next((image for image, found in parsed if found is None), None)
        if wrong is not None:
            raise UserError(f"{name}: {os.path.join(folder, quoted(wrong))} has no name as of the official archive")
        rows = [(os.path.join(folder, image), int(found[1]), int(found[2])) for image, found in parsed if found]
        parts[part] = [row for row in rows if row[1] >= 0]
    return _dataset(name, split, parts, root, check_counts)


def _dataset(
    name: str, split: str, parts: dict[str, list[tuple[str, int, int]]], root: str, check_counts: bool
) -> ImageDataset:
    """Return the data set of (path, identity, camera) by role."""
    for part, rows in parts.items():
        files.check_count(check_counts, name, f"{part} images", NUM_IMAGES[name][part], len(rows), root)
    paths, labels, cameras = list(zip(*(row for rows in parts.values() for row in rows), strict=True)) or ((), (), ())
    columns: dict[str, Any] = {}
    if split == "test":
        columns = {"is_query": np.arange(len(paths)) < len(parts["query"]), "groups": np.array(cameras)}
        columns["protocol"] = Protocol(("recall", "map", "minp"), ks=(1, 5, 10))
    return files.images_in_files(name, split, paths, labels, **columns)
