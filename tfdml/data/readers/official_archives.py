"""The published data sets, read from their official archives as unpacked.

- Cars-196 (Krause et al., 2013)
- CUB-200-2011 (Wah et al., 2011)
- In-Shop Clothes Retrieval (DeepFashion, Liu et al., 2016)
- Omniglot (Lake et al., 2015), whose two archives are read without unpacking them
- Stanford Online Products (Song et al., 2016)
"""

import os
import pathlib
import re
import zipfile
from collections.abc import Mapping

import numpy as np
import scipy.io

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import EncodedImages, FileImages, Images
from tfdml.data.readers.image_files import UNPACK, LeftOut, first_of, images_below, is_visible
from tfdml.data.readers.splits import dataset_of
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io.files import is_file
from tfdml.io.tables import Table, read_words
from tfdml.names import CLASS, ID, PATH, ROLE, Kind, clean, warn

# Published numbers of each part, by data set.
NUM_IMAGES = {
    "cars196": {"train": 8_054, "test": 8_131},
    "cub200": {"train": 5_864, "test": 5_924},
    "inshop": {"train": 25_882, "query": 14_218, "gallery": 12_612},
    "omniglot": {"train": 19_280, "test": 13_180},
    "sop": {"train": 59_551, "test": 60_502},
}
NUM_CLASSES = {
    "cars196": {"train": 98, "test": 98},
    "cub200": {"train": 100, "test": 100},
    "inshop": {"train": 3_997, "query": 3_985, "gallery": 3_985},
    "omniglot": {"train": 964, "test": 659},
    "sop": {"train": 11_318, "test": 11_316},
}
# In the order of their ids, which start at 1.
SOP_SUPER_CLASSES = (
    "bicycle", "cabinet", "chair", "coffee maker", "fan", "kettle",
    "lamp", "mug", "sofa", "stapler", "table", "toaster",
)  # fmt: skip

_CARS_LAYOUT = (
    "expected cars_train/ and cars_test/ with devkit/cars_train_annos.mat and "
    "devkit/cars_test_annos_withlabels.mat, or car_ims/ with cars_annos.mat"
)
_INSHOP_PARTITION = "list_eval_partition.txt"
_INSHOP_COLUMNS = {"image_name": PATH, "item_id": ID, "evaluation_status": ROLE}
_INSHOP_ITEM = re.compile(r"id_[0-9]{1,18}")
_OMNIGLOT_ARCHIVES = {"train": "images_background", "test": "images_evaluation"}
_SOP_COLUMNS = {"image_id": ID, "class_id": ID, "super_class_id": ID, "path": PATH}


def _checked(dataset: ImageDataset, source: object, check_counts: bool) -> ImageDataset:
    """Compare the numbers of images and classes with the published ones, and return the data
    set."""
    parts = [dataset] if dataset.is_query is None else [dataset.queries, dataset.gallery]
    for part in parts if check_counts else ():
        _check_count(part, len(part), "images", NUM_IMAGES, source)
        _check_count(part, part.num_classes, "classes", NUM_CLASSES, source)
    return dataset


def _check_count(
    part: ImageDataset,
    count: int,
    items: str,
    published: Mapping[str, Mapping[str, int]],
    source: object,
) -> None:
    expected = published[part.name][part.split]
    if count != expected:
        fault = f"expected {expected:,} {part.split} {items} in {source}, found {count:,}"
        raise UserError(
            f"{part.name}: {fault}; unpack or download the official archive again, or pass "
            "check_counts=False for a part of it"
        )


def _zero_shot(table: Table, name: str, numbers: np.ndarray) -> None:
    """Give the table its split: the first half of the classes, by their numbers from 1 on, is for
    training."""
    table.columns["split"] = np.where(
        numbers <= NUM_CLASSES[name]["train"], "train", "test"
    ).tolist()


def read_cars196(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True
) -> ImageDataset:
    """Read the zero-shot split: classes 1-98 to train, 99-196 to test; a label is the class number
    less one.

    Either official form will do: `cars_train/`, `cars_test/` and their two tables, or `car_ims/`
    and its one table. Tables may lie in `devkit/` or in `data_dir` itself.

    Args:
        data_dir: The folder with the image folders and `devkit/`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its 8,054 or 8,131 images; False for a part of the
            data set.

    Raises:
        UserError: A table or an image is missing, a table cannot be read, or the number of images
            is wrong.

    Example:
        >>> read_cars196("data/cars196", "test").num_classes
        98
    """
    root = pathlib.Path(data_dir)
    table = _cars_table(root)
    numbers = table.integers("class", 1, 196)
    _zero_shot(table, "cars196", numbers)
    class_names = {label: f"class {label + 1}" for label in range(196)} | _car_names(root)
    advice = "unpack the image archives again next to devkit/"
    return _checked(dataset_of(table, split, numbers - 1, class_names, advice), root, check_counts)


def _cars_table(root: pathlib.Path) -> Table:
    """Return the path and the class (1-196) of every image that the tables list."""
    merged = _find_table(root, "cars_annos.mat")
    train = _find_table(root, "cars_train_annos.mat")
    test = _find_table(root, "cars_test_annos_withlabels.mat")
    # The two forms number the images differently, so the image folder decides which table is the
    # right one.
    if merged and ((root / "car_ims").is_dir() or not (train or test)):
        forms = [(merged, "", "relative_im_path")]
    elif train and test:
        forms = [(train, "cars_train", "fname"), (test, "cars_test", "fname")]
    else:
        lacking = "cars_test_annos_withlabels.mat" if train else "cars_train_annos.mat"
        raise UserError(
            f"cars196: found no {lacking} in {root} or {root / 'devkit'}; {_CARS_LAYOUT}"
        )
    lines: list[str] = []
    columns: dict[str, list[str]] = {"path": [], "class": []}
    for file, folder, field in forms:
        records = _load_mat(file, "annotations")
        if not {field, "class"} <= {*(records.dtype.names or ())}:
            advice = "is it the official file, with labels?"
            raise UserError(f"cars196: {file} has no annotations.{field} and class; {advice}")
        lines += [f"{file.name}, row {row}" for row in range(1, len(records) + 1)]
        columns["path"] += [
            os.path.join(root, folder, *str(name).split("/")) for name in records[field]
        ]
        columns["class"] += map(str, records["class"])
    table = Table("cars196", str(root), columns, lines.__getitem__)
    table.clean("path", PATH)
    table.check_distinct("path")
    return table


def _find_table(root: pathlib.Path, name: str) -> pathlib.Path | None:
    return next((path for path in (root / "devkit" / name, root / name) if path.is_file()), None)


def _load_mat(path: pathlib.Path, field: str) -> np.ndarray:
    # scipy raises a dozen types on a damaged file.
    with user_errors(
        Exception, f"cars196: {path} is no MATLAB file ({ERROR_TEXT}); unpack it again"
    ):
        return np.ravel(scipy.io.loadmat(path, squeeze_me=True).get(field, np.zeros(0)))


def _car_names(root: pathlib.Path) -> dict[int, str]:
    """Names by label, from the meta file or, without it, from the merged table, which repeats
    them."""
    path = _find_table(root, "cars_meta.mat") or _find_table(root, "cars_annos.mat")
    if path is None:
        return {}
    names = map(str, _load_mat(path, "class_names"))
    return dict(enumerate(clean(names, CLASS, f"cars196: {path}")))


def read_cub200(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True
) -> ImageDataset:
    """Read the zero-shot split: classes 1-100 to train, 101-200 to test; a label is the class
    number less one.

    The archive's own `train_test_split.txt`, which has every class in both parts, plays no role.
    Images come in the order of their ids.

    Args:
        data_dir: The folder `CUB_200_2011`, with `images.txt`, `image_class_labels.txt`,
            `classes.txt` and `images/`, or the folder that it lies in.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its 5,864 or 5,924 images; False for a part of the
            data set.

    Raises:
        UserError: A file or an image is missing, a file is not as it should be, or the number of
            images is wrong.

    Example:
        >>> read_cub200("data/CUB_200_2011", "test").num_classes
        100
    """
    root = _official_root("cub200", data_dir, "CUB_200_2011", "images.txt")
    images = _cub_table(root, "images.txt", "path", PATH)
    labels = _cub_table(root, "image_class_labels.txt", "class", ID)
    names = _cub_table(root, "classes.txt", "name", CLASS)
    images.check_distinct("path")
    classes = labels.integers("class", 1, 200).tolist()
    class_of = dict(zip(labels.columns["id"], classes, strict=True))
    images.check_cells("id", class_of.__contains__, f"in {labels.path}")
    labels.check_cells("id", {*images.columns["id"]}.__contains__, f"in {images.path}")
    images = images.take(np.argsort(images.integers("id")).tolist())
    numbers = np.array([class_of[image] for image in images.columns["id"]])
    _zero_shot(images, "cub200", numbers)
    images.columns["path"] = [os.path.join(root, "images", path) for path in images.columns["path"]]
    class_names = {label: f"class {label + 1}" for label in range(200)}
    class_names |= {
        int(number) - 1: name for number, name in zip(*names.columns.values(), strict=True)
    }
    dataset = dataset_of(images, split, numbers - 1, class_names, UNPACK)
    return _checked(dataset, images.path, check_counts)


def _cub_table(root: str, file: str, column: str, kind: Kind) -> Table:
    """Return a table whose first column has distinct ids."""
    table = read_words("cub200", os.path.join(root, file), {"id": ID, column: kind})
    table.columns["id"] = list(map(str, table.integers("id").tolist()))
    table.check_distinct("id")
    return table


def _official_root(name: str, data_dir: str | os.PathLike, folder: str, marker: str) -> str:
    """Return the folder of an official archive: `data_dir` itself, or `folder` in it, by a file
    that lies in it."""
    path = first_of(data_dir, marker, os.path.join(folder, marker))
    if not is_file(path):
        inner = os.path.join(data_dir, folder)
        raise UserError(
            f"{name}: found no {marker} in {data_dir} or {inner}; unpack the official {folder} "
            "there"
        )
    return os.path.dirname(path)


def read_inshop(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True
) -> ImageDataset:
    """Read the official split, whose items are disjoint; the test split is queries and gallery in
    one.

    A label is the number of the item: 2 for `id_00000002`. In the test split, `is_query`
    distinguishes the queries from the gallery; `load("inshop", data_dir, "query")` and `"gallery"`
    give either alone.

    Args:
        data_dir: The folder with `list_eval_partition.txt`, in `Eval/`, in `Anno/` or right inside,
            and with the images, in `img/` or `Img/img/`.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published numbers of images and items; False
            for a part of the data set.

    Raises:
        UserError: The list or an image is missing, the list is not as it should be, or a number is
            wrong.

    Example:
        >>> read_inshop("data/inshop", "test").num_classes
        3985
    """
    root = os.fspath(data_dir)
    source = first_of(
        root, *(os.path.join(folder, _INSHOP_PARTITION) for folder in ("Eval", "Anno", ""))
    )
    if not is_file(source):
        raise UserError(
            f"inshop: found no {_INSHOP_PARTITION} in {root} or its Eval/ or Anno/; unpack it there"
        )
    # The first line is the number of rows.
    table = read_words("inshop", source, _INSHOP_COLUMNS, first_line=2, header=True)
    table.check_cells(
        "evaluation_status", NUM_IMAGES["inshop"].__contains__, "train, query or gallery"
    )
    table.check_cells("item_id", _INSHOP_ITEM.fullmatch, "the like of id_00000002")
    table.check_distinct("image_name")
    names, items, parts = table.columns.values()
    labels = np.array([int(item[3:]) for item in items], np.int64)
    images = os.path.dirname(first_of(root, os.path.join("Img", "img"), "img"))
    table.columns.update(path=[os.path.join(images, name) for name in names], split=parts)
    class_names = dict(zip(labels.tolist(), items, strict=True))
    advice = "unpack img.zip so that its folder img/ lies in data_dir or in its Img/"
    return _checked(dataset_of(table, split, labels, class_names, advice), source, check_counts)


def read_omniglot(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True
) -> ImageDataset:
    """Read the background set (964 classes) to train, the evaluation set (659 classes) to test.

    A class is one character of one alphabet, drawn by 20 people. Labels follow the sorted names: 0
    to 963 for the background set, from 964 on for the evaluation set. The images come from
    `images_background.zip` and `images_evaluation.zip`, or from the folders of the same names if
    only those are there.

    Args:
        data_dir: The folder with the two archives.
        split: `"train"` or `"test"`.
        check_counts: Whether to require the official number of images and classes.

    Raises:
        UserError: The archive is missing or damaged, or the counts are wrong.

    Example:
        >>> read_omniglot("data/omniglot", "test").num_classes
        659
    """
    root, stem = pathlib.Path(data_dir), _OMNIGLOT_ARCHIVES[split]
    archive, folder = root / f"{stem}.zip", root / stem
    if not (archive.is_file() or folder.is_dir()):
        raise UserError(
            f"omniglot: found neither {archive} nor {folder}/; data_dir must hold the official "
            f"{stem}.zip"
        )
    images = _omniglot_zip(archive, stem) if archive.is_file() else _omniglot_folder(folder)
    # Names read .../<alphabet>/<character>/<image>.png
    folders = ["/".join(name.replace(os.sep, "/").split("/")[-3:-1]) for name in images.names]
    classes = clean(folders, CLASS, f"omniglot: {stem}", images.names.__getitem__)
    names, labels = np.unique(np.array(classes, object), return_inverse=True)
    first = 0 if split == "train" else NUM_CLASSES["omniglot"]["train"]
    dataset = ImageDataset(
        "omniglot", split, images, labels + first, dict(enumerate(map(str, names), first))
    )
    return _checked(dataset, archive if archive.is_file() else folder, check_counts)


def _omniglot_zip(archive: pathlib.Path, stem: str) -> Images:
    # zipfile raises a dozen types on a damaged file.
    damaged = user_errors(
        Exception, f"omniglot: {archive} is no whole zip archive ({ERROR_TEXT}); get it again"
    )
    with damaged, zipfile.ZipFile(archive) as file:
        inside = re.compile(rf"{stem}/[^/]+/[^/]+/[^./][^/]*\.png")
        names = [
            name
            for name in file.namelist()
            if name[-1] != "/" and is_visible(os.path.basename(name))
        ]
        members = sorted({*filter(inside.fullmatch, names)})
        if len(members) < len(names):
            warn(
                f"omniglot: {archive}: left out {len(names) - len(members)} files that are no "
                "image of a character"
            )
        return EncodedImages(tuple(file.read(name) for name in members), tuple(members))


def _omniglot_folder(folder: pathlib.Path) -> Images:
    left_out = LeftOut("omniglot", str(folder))
    paths = images_below(str(folder), left_out)
    inside = [path for path in paths if len(pathlib.Path(path).relative_to(folder).parts) == 3]
    left_out.kinds["image in no folder of a character"] += len(paths) - len(inside)
    left_out.report()
    return FileImages(tuple(inside))


def read_sop(
    data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True
) -> ImageDataset:
    """Read the official split, whose classes are disjoint.

    A label is the class id less one: 0 to 11,317 to train, 11,318 to 22,633 to test. `super_labels`
    holds the kind of product, 0 to 11 (see `SOP_SUPER_CLASSES`).

    Args:
        data_dir: The folder `Stanford_Online_Products`, with `Ebay_train.txt`, `Ebay_test.txt` and
            the image folders, or the folder that it lies in.
        split: `"train"` or `"test"`.
        check_counts: Whether the split must have its published numbers of images and classes; False
            for a part of the data set.

    Raises:
        UserError: The list or an image is missing, the list is not as it should be, or a number is
            wrong.

    Example:
        >>> read_sop("data/Stanford_Online_Products", "test").num_classes
        11316
    """
    file = f"Ebay_{split}.txt"
    root = _official_root("sop", data_dir, "Stanford_Online_Products", file)
    source = os.path.join(root, file)
    table = read_words("sop", source, _SOP_COLUMNS, header=True)
    labels = table.integers("class_id", 1) - 1
    kinds = table.integers("super_class_id", 1, len(SOP_SUPER_CLASSES)) - 1
    table.check_distinct("path")
    paths = [os.path.join(root, name) for name in table.columns["path"]]
    table.columns.update(path=paths, split=[split] * len(table))
    kind_of = {*zip(labels.tolist(), kinds.tolist(), strict=True)}
    class_names = {label: f"{SOP_SUPER_CLASSES[kind]} {label + 1}" for label, kind in kind_of}
    if len(class_names) < len(kind_of):
        raise UserError(f"sop: {source}: some classes have two super-classes; download it again")
    dataset = dataset_of(table, split, labels, class_names, UNPACK, super_labels=kinds)
    return _checked(dataset, source, check_counts)
