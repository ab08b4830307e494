"""Your own images as a data set: class folders, or a list in CSV, JSON lines or Parquet."""

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse

from tfdml.data.dataset import ImageDataset, PairList, Protocol
from tfdml.data.readers.image_files import LeftOut, images_below
from tfdml.data.readers.splits import dataset_of
from tfdml.errors import UserError, check_share
from tfdml.io.files import is_folder, is_remote, plain_path
from tfdml.io.tables import Column, Table, read_table
from tfdml.names import (
    CLASS,
    FLAG,
    ID,
    PATH,
    ROLE,
    TEXT,
    clean,
    composed,
    crop_name,
    quoted,
    warn,
)

_BOX = ("x1", "y1", "x2", "y2")
# Spreadsheets and pandas write whole numbers with a point, too.
_PIXELS = re.compile(r"([0-9]{1,9})(\.0*)?")
COLUMNS: dict[str, Column | None] = {
    "path": Column(PATH),
    "label": Column(CLASS),
    "split": Column(ROLE),
    "role": Column(ROLE),
    "super_label": Column(CLASS),
    "group": Column(CLASS),
    "labels": Column(CLASS, several=True),
    "id": Column(ID),
    "text": Column(TEXT),
    **dict.fromkeys(_BOX, Column(None)),
}
_TRIPLETS = ("anchor", "positive", "negative")
_PAIRS = ("a", "b", "similar")
_TRUE = ("1", "true")
_PAIR_COLUMNS: dict[str, Column | None] = {
    **dict.fromkeys(("a", "b", *_TRIPLETS), Column(PATH)),
    "similar": Column(FLAG),
}
_MEASURED = ("recall", "map@r", "r_precision")
_REQUIRED = ("path", "label")
_VALUES = {
    "split": ("train", "test", "validation", "query", "gallery"),
    "role": ("", "train", "query", "gallery", "junk"),
    "similar": ("0", "1", "false", "true", "junk"),
}
# What folders and cells are called that name a part of the data, in lower case.
_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(
        ("test", "testing", "holdout", "hold_out", "heldout", "held_out", "eval", "evaluation"),
        "test",
    ),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("query", "queries"), "query"),
    "gallery": "gallery",
}
# 007 and 7 are two names, not one number.
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_INT64 = np.iinfo(np.int64)


def _part_of(name: str) -> str:
    """Return which part of the data a folder or a cell of this name is; empty where it is no usual
    name of one."""
    return _PARTS.get(name.lower().replace("-", "_"), "")


def read_folder(
    data_dir: str | os.PathLike, split: str = "train", *, test_fraction: float = 0.5
) -> ImageDataset:
    """Read `data_dir/<class>/**/<image>`, or `data_dir/<split>/<class>/**/<image>`.

    Splits are folders of the usual names, in any case: `train` or `training`; `test`, `testing` or
    `holdout`; `val`, `valid`, `validation` or `dev`, which are the test images where there is no
    `test` and are left out otherwise; `query` and `gallery`, which are the test images in their
    roles. Without class folders each image is a class of its own.

    Images are JPEG, PNG and WebP files by their content, whatever their names, at any depth below
    their class folder. A warning counts all other files by kind. Hidden files and folders are no
    images and no classes. Labels follow the sorted names of the classes of all splits. Links are
    followed, to each folder once.

    Args:
        data_dir: The tree, on a local disk or on any file system that `fsspec` knows.
        split: `"train"`, `"test"`, or `"all"` for all images.
        test_fraction: Without splits: the share of the classes, the last in sorted order, that is
            held out as the test split; each split gets at least one class.

    Raises:
        UserError: There is no folder or no image, there is one class only (but for `"all"`),
            folders look like splits among classes, or the fraction is not between 0 and 1.

    Example:
        >>> read_folder("photos", "test", test_fraction=0.25).num_classes
        10
        >>> read_folder("photos", "all")
        ImageDataset('folder', 'all', images=240, classes=40)
    """
    check_share(test_fraction=test_fraction)
    root = plain_path(data_dir)
    if not is_folder(root):
        raise UserError(f"folder: there is no folder {root}, or it may not be read; check data_dir")
    left_out = LeftOut("folder", root)
    paths = images_below(root, left_out)
    left_out.report()
    if not paths:
        reason = f"; {left_out}" if left_out.kinds.total() else ""
        expected = os.path.join(root, "<class>", "<image>.jpg")
        raise UserError(f"folder: found no image in {root}; expected {expected}{reason}")
    table = _with_classes(_table_of_folders(root, paths))
    labels = table.columns["label"]
    table.columns["label"] = clean(labels, CLASS, f"folder: {root}", table.place)
    table = _with_parts(table, split)
    return dataset_of(
        table, split, *class_ids(table, "label", is_name=True), test_fraction=test_fraction
    )


def _table_of_folders(root: str, paths: list[str]) -> Table:
    """Return the paths of images, their splits, where folders are splits, and their class folders,
    empty for an image in none."""
    names = [path.removeprefix(root).lstrip("/") for path in paths]
    place = list(map(quoted, names)).__getitem__
    table = Table("folder", root, {"path": clean(paths, PATH, f"folder: {root}", place)}, place)
    parts_of_paths = [name.split("/") for name in names]
    splits = _folders_of_splits(root, parts_of_paths)
    if splits:
        table.columns["split"] = [_take_split(parts, splits) for parts in parts_of_paths]
    table.columns["label"] = [parts[0] if len(parts) > 1 else "" for parts in parts_of_paths]
    inner = sorted({"/".join(parts[:-1]) for parts in parts_of_paths if len(parts) > 2})
    if inner:
        warn(
            f"folder: {root}: images of {len(inner)} folders within class folders, as {inner[0]}/, "
            "are of these classes"
        )
    return table


def _folders_of_splits(root: str, paths: list[list[str]]) -> dict[str, str]:
    """Return the folders that are splits, and the split that each is; none where folders are
    classes.

    Args:
        root: The folder of all images.
        paths: The path of each image below it, in parts.

    Raises:
        UserError: Some folders look like splits and others do not, or two folders name one split.
    """
    folders = sorted({parts[0] for parts in paths if len(parts) > 1})
    splits = {folder: split for folder in folders if (split := _part_of(folder))}
    classes = [folder for folder in folders if folder not in splits]
    if not splits:
        _warn_of_inner_splits(root, paths)
    if classes:
        _refuse_splits_among_classes(root, paths, splits, classes)
        return {}
    if len({*splits.values()}) < len(splits):
        raise UserError(
            f"folder: {root} has folders that name one split, of {', '.join(splits)}; make them one"
        )
    return splits


def _warn_of_inner_splits(root: str, paths: list[list[str]]) -> None:
    """Warn of folders of classes that are called like splits."""
    inner = sorted({parts[1] for parts in paths if len(parts) > 2 and _part_of(parts[1])})
    if inner:
        names = ", ".join(f"{name}/" for name in inner)
        warn(f"folder: {root}: {names} in classes are no splits: all are read.")


def _refuse_splits_among_classes(
    root: str, paths: list[list[str]], splits: Mapping[str, str], classes: list[str]
) -> None:
    """Refuse folders that look like splits next to classes; one with images alone is a class, which
    a warning names."""
    has_classes = any(len(parts) > 2 and parts[0] in splits for parts in paths)
    if len(splits) > 1 or has_classes:
        names = ", ".join(f"{folder}/" for folder in splits)
        raise UserError(
            f"folder: {root} has {names} next to {classes[0]}/: they look like splits among "
            "classes; give splits a folder without others, or rename classes that are called like "
            "splits"
        )
    for folder in splits:
        warn(
            f"folder: {root}/{folder} is taken for a class, as it lies among classes and holds "
            "images."
        )


def _take_split(parts: list[str], splits: Mapping[str, str]) -> str:
    """Take the folders of its split and its role off the parts of an image's path, and return which
    of the two it is in; empty for an image in no folder."""
    if len(parts) < 2:
        return ""
    split = splits[parts.pop(0)]
    role = _part_of(parts[0]) if len(parts) > 1 else ""
    if split != "test" or role not in ("query", "gallery"):
        return split
    parts.pop(0)
    return role


def _with_classes(table: Table) -> Table:
    """Return the table without images next to class folders; in a split without class folders each
    is its own class."""
    labels = table.columns["label"]
    parts = table.columns.get("split", ["all"] * len(table))
    labeled = {"", *(part for part, label in zip(parts, labels, strict=True) if label)}
    table = table.take(
        [row for row, label in enumerate(labels) if label or parts[row] not in labeled]
    )
    if len(table) < len(labels):
        warn(
            f"folder: ignoring {len(labels) - len(table)} images outside the class folders of "
            f"{table.path}."
        )
    alone = [row for row, label in enumerate(table.columns["label"]) if not label]
    if alone:
        warn(
            f"folder: {table.path}: each of {len(alone)} images outside class folders is a class "
            "of its own."
        )
    for row in alone:
        table.columns["label"][row] = composed(
            os.path.relpath(table.columns["path"][row], table.path)
        )
    return table


def read_list(
    data_dir: str | os.PathLike,
    split: str = "train",
    *,
    test_fraction: float = 0.5,
    pairs: str = "",
    levels: bool = False,
) -> ImageDataset:
    """Read a list of images: a CSV file with a header, a file with a JSON object on each line, a
    Parquet or an .npz file.

    The columns (or keys) are `path` and `label`, and any of the others, in any order:

    - `path`: of the image; a relative one is relative to the folder of the list.
    - `label`: if every label of the file is an integer, these are the class ids; otherwise labels
      are names, whose ids follow their sorted order over both splits. `007` is a name, `7` an
      integer.
    - `split`: `train` or `test`, or another usual name of these (`training`, `val`, `valid`,
      `holdout`). Next to `test`, images of `val` are left out. Without this column, the last
      classes in order are the test split.
    - `role`: `query` or `gallery` for the test images, `train` or nothing for training images.
      Queries are then looked up in the gallery; without roles, each test image is looked up among
      all others. `junk` is left out.
    - `super_label`: of a coarser class; integers or names, as for `label`.
    - `group`: the camera or the sequence; integers or names, as for `label`. Evaluation ignores
      images of the query's class and group, which are too easy to find.
    - `labels`: a label set, a list in Parquet and JSON and `cat|dog` in CSV. Images belong together
      if they share a label. Without a column `label` the class is the first of them. With `levels`
      a class on each level, the finest first: `fiat_500|hatchback|car`.
    - `id`: a name of the image for `pairs`, next to its path.
    - `text`: what the image shows, for a learner of images and texts. An image may have several
      rows, each with a text. Without a column `label` each image is a class of its own.
    - `x1`, `y1`, `x2`, `y2`: a box, whole pixels of the upright image from its left and upper edge;
      `x2` and `y2` are outside. Its part is the image, called `bus.jpg#xywh=X,Y,WIDTH,HEIGHT`.
      All four empty for the whole image.

    With `pairs`, the column `label` may be missing: classes are then what similar pairs link, which
    matters for splits alone, and right for a query are the images that are similar to it.

    The delimiter of a CSV file is a comma, a semicolon or a tab, with spaces behind it or not.
    White space around names is dropped, but not around paths. Names of columns and values of
    `split` and `role` count in capitals or not. Other columns are ignored, but for those that are
    nearly called like one of these. Rows that repeat another are dropped. A warning counts what is
    ignored, dropped or left out.

    Args:
        data_dir: The list itself: `*.parquet`, `*.npz`, `*.jsonl`, `*.ndjson` or `*.json`; any
            other name for CSV or JSON lines.
        split: `"train"` or `"test"`.
        test_fraction: Without splits and roles: the share of the classes that is held out as the
            test split; each split gets at least one class.
        pairs: A file with pairs or triplets of the images, relative to the folder of the list; see
            `read_pairs`.
        levels: Learn and measure the classes of `labels` as levels; without this column `label` and
            `super_label`.

    Raises:
        UserError: The list or an image is missing, or a line is not as it should be; the message
            names the line.

    Example:
        >>> read_list("photos/list.csv", "test", test_fraction=0.25).num_classes
        10
    """
    file = os.fspath(data_dir)
    check_share(test_fraction=test_fraction)
    table = _without_duplicates(read_rows(file, ("path",) if pairs else _REQUIRED))
    label_rows = None
    if levels:
        label_rows = _levels(table)
    elif "labels" in table.columns:
        label_rows = _label_sets(table)
    columns: dict[str, Any] = {"label_rows": label_rows, "texts": table.columns.get("text")}
    columns["protocol"] = Protocol(_MEASURED, levels=label_rows) if levels else None
    if pairs:
        columns["pairs"], junk = read_pairs(os.path.join(os.path.dirname(file), pairs), table)
        if "label" not in table.columns:
            table.columns["label"] = list(map(str, linked_classes(columns["pairs"], len(table))))
            columns["protocol"] = similar_images(columns["pairs"], len(table), junk)
        elif len(junk):
            advice = "leave out the column"
            raise UserError(
                f"list: {pairs} has junk, which a list with the column label cannot use; {advice}"
            )
    table.columns.setdefault(
        "label", [composed(os.path.normpath(path)) for path in table.columns["path"]]
    )
    for column, field in (("super_label", "super_labels"), ("group", "groups")):
        columns[field] = class_ids(table, column)[0] if column in table.columns else None
    advice = (
        "correct the list or add the images; a relative path starts from "
        f"{os.path.dirname(file) or '.'}"
    )
    return dataset_of(table, split, *class_ids(table, "label"), advice, test_fraction, **columns)


def _levels(table: Table) -> np.ndarray:
    """Return the class ids on each level, (N, L), of the column labels, which gives the others, or
    of these."""
    if "labels" in table.columns:
        names = table.columns["labels"]
        for row, levels in enumerate(names):
            if len(levels) < 2 or len(levels) != len(names[0]):
                counts = f"{len(levels)} levels and {len(names[0])} in the first line"
                raise UserError(
                    f"{table.where(row)}: labels has {counts}; name as many, at least 2, of every "
                    "image"
                )
        columns = [list(column) for column in zip(*names, strict=True)]
        table.columns.update(label=columns[0], super_label=columns[1])
    elif "super_label" in table.columns:
        columns = [table.columns["label"], table.columns["super_label"]]
    else:
        raise UserError(
            f"list: levels=true needs a column labels or super_label, and {table.path} has neither"
        )
    alone = (dataclasses.replace(table, columns={"labels": column}) for column in columns)
    return np.stack([class_ids(level, "labels")[0] for level in alone], axis=1)


def _label_sets(table: Table) -> np.ndarray:
    """Return the label sets as rows of 0 and 1, (N, L); the first label becomes the class where
    there is none."""
    from sklearn.preprocessing import MultiLabelBinarizer  # takes a while to import

    sets = table.columns["labels"]
    table.columns.setdefault("label", [names[0] if names else "" for names in sets])
    return MultiLabelBinarizer().fit_transform(sets).astype(np.int64)


def read_pairs(file: str, images: Table) -> tuple[PairList, np.ndarray]:
    """Read pairs or triplets of the images of a list, a file of the same kinds.

    Its columns are `a`, `b` and `similar` (0 or 1, or false or true), or `anchor`, `positive` and
    `negative`. Images go by their path, relative to this file or as in the list, or by their `id`
    in the list. Where `similar` is `junk`, either image is ignored when the other is a query.

    Args:
        file: The file.
        images: The rows of the list.

    Returns:
        The pairs, and the rows (J, 2) of those that are junk.

    Raises:
        UserError: A line is not as it should be, or two lines contradict each other; the message
            names them.
    """
    table = read_rows(file, (), _PAIR_COLUMNS)
    names = {*table.columns}
    if names not in ({*_PAIRS}, {*_TRIPLETS}):
        choices = f"{','.join(_PAIRS)} or {','.join(_TRIPLETS)}"
        raise UserError(
            f"list: {file} must have the columns {choices}; it has {','.join(table.columns)}"
        )
    row_of = _row_finder(images, composed(os.path.dirname(file)))
    if "similar" not in names:
        rows = _rows_of_cells(table, _TRIPLETS, row_of, images)
        return PairList(rows), np.zeros((0, 2), np.int64)
    rows = _rows_of_cells(table, _PAIRS[:2], row_of, images)
    cells = np.array(table.columns["similar"])
    is_junk = cells == "junk"
    is_similar = np.isin(cells, _TRUE)
    pairs = PairList(rows[~is_junk], is_similar[~is_junk])
    scored = pairs.scored()
    is_repeated = (scored[1:, :2] == scored[:-1, :2]).all(axis=1)
    if is_repeated.any():
        ends = scored[is_repeated.argmax(), :2].astype(int)
        paths = " and ".join(quoted(images.columns["path"][row]) for row in ends)
        raise UserError(f"list: {file}: {paths} are similar and not; leave out one of the lines")
    return pairs, rows[is_junk]


def read_set_pairs(file: str) -> tuple[np.ndarray, np.ndarray]:
    """Read pairs of sets of images, by the names of the sets.

    Args:
        file: A file of the kinds of a list, with the columns `a`, `b` and `similar` (0 or 1, or
            false or true).

    Returns:
        (P, 2) names, and (P,) bool, whether the sets of a pair are of one class.

    Raises:
        UserError: A line is not as it should be; the message names it.

    Example:
        >>> pairs, is_similar = read_set_pairs("templates.csv")  # doctest: +SKIP
    """
    columns = {"a": Column(CLASS), "b": Column(CLASS), "similar": Column(FLAG)}
    table = read_rows(file, _PAIRS, columns)
    table.check_cells("similar", lambda cell: cell != "junk", "0 or 1, of a pair of sets")
    pairs = np.array([table.columns["a"], table.columns["b"]], str).T
    return pairs, np.isin(table.columns["similar"], _TRUE)


def _row_finder(images: Table, folder: str) -> Callable[[str], int | None]:
    """Return what gives the row of the image that a cell names, by its id or its path; None for
    none.

    Args:
        images: The rows of the list.
        folder: What a path may be relative to.

    Raises:
        UserError: Two images have one id.
    """
    paths = [composed(os.path.normpath(path)) for path in images.columns["path"]]
    row_of = {path: row for row, path in enumerate(paths)}
    if "id" in images.columns:
        images.columns["id"] = list(map(composed, images.columns["id"]))
        images.check_distinct("id")
        row_of.update({name: row for row, name in enumerate(images.columns["id"])})

    def row(cell: str) -> int | None:
        cell = composed(cell)
        path = cell if is_remote(cell) else os.path.normpath(os.path.join(folder, cell))
        return row_of.get(cell, row_of.get(path, row_of.get(os.path.normpath(cell))))

    return row


def _rows_of_cells(
    table: Table, columns: Sequence[str], row_of: Callable[[str], int | None], images: Table
) -> np.ndarray:
    """Return the rows of the images that columns name, (G, number of columns)."""
    rows = []
    for name in columns:
        table.check_cells(name, lambda cell: row_of(cell) is not None, f"an image of {images.path}")
        rows.append([row_of(cell) for cell in table.columns[name]])
    return np.array(rows, np.int64).T


def linked_classes(pairs: PairList, size: int) -> np.ndarray:
    """Return a class of each image, (N,): those that similar pairs link, directly or through
    others, share one."""
    similar = pairs.similar()
    graph = scipy.sparse.coo_array((np.ones(len(similar)), similar.T), shape=(size, size))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def similar_images(pairs: PairList, size: int, junk: np.ndarray) -> Protocol:
    """Return the protocol of images without classes: right for a query are the images that are
    similar to it.

    Args:
        pairs: The pairs.
        size: How many images there are.
        junk: (J, 2) rows; either of a pair is ignored for the other.
    """
    right: dict[int, list[int]] = collections.defaultdict(list)
    ignored: dict[int, list[int]] = collections.defaultdict(list)
    for lists, rows in ((right, pairs.similar()), (ignored, junk)):
        for a, b in rows.tolist():
            lists[a].append(b)
            lists[b].append(a)
    return Protocol(_MEASURED, ids=np.arange(size), lists=(dict(right), dict(ignored)))


def read_rows(
    file: str,
    required: Sequence[str] = _REQUIRED,
    columns: Mapping[str, Column | None] = COLUMNS,
) -> Table:
    """Read the rows of a list and check its cells.

    Args:
        file: The list, see `read_list`.
        required: The columns that it must have; `labels` may stand for `label`.
        columns: The columns that it may have.

    Returns:
        The columns that it has; `path` is relative to the working folder, or absolute. `split` has
        the roles, too: `train`, `test`, `query` or `gallery`.

    Raises:
        UserError: A line is not as it should be; the message names it.

    Example:
        >>> read_rows("photos/list.csv").columns["label"][0]
        'bus'
    """
    table = read_table("list", file, columns, required)
    for column, values in table.columns.items():
        if column in _VALUES:
            values[:] = [_part_of(value) or value.lower() for value in values]
            table.check_cells(
                column, _VALUES[column].__contains__, " or ".join(filter(None, _VALUES[column]))
            )
    if "path" in table.columns:
        paths, folder = table.columns["path"], os.path.dirname(file)
        paths[:] = [path if is_remote(path) else os.path.join(folder, path) for path in paths]
        _name_crops(table)
    return _with_parts(table)


def _name_crops(table: Table) -> None:
    """Make the boxes of a table parts of its paths, see `tfdml.names.crop_name`.

    Raises:
        UserError: A column or a number is missing, is no whole number from 0 on, or a box is empty.
    """
    if not table.columns.keys() & {*_BOX}:
        return
    paths = table.columns["path"]
    columns = [table.columns.pop(name, [None] * len(paths)) for name in _BOX]
    boxes = list(zip(*columns, strict=True))
    wrong = []
    for row, box in enumerate(boxes):
        texts = ["" if cell is None else str(cell).strip() for cell in box]
        pixels = [int(match[1]) for match in map(_PIXELS.fullmatch, texts) if match]
        if len(pixels) == len(_BOX) and pixels[0] < pixels[2] and pixels[1] < pixels[3]:
            paths[row] = crop_name(paths[row], tuple(pixels))
        elif any(texts):
            wrong.append(row)
    if wrong:
        numbers = ",".join("" if cell is None else str(cell) for cell in boxes[wrong[0]])
        counts = f"{len(wrong):,} of {len(boxes):,} boxes are none, the first is {quoted(numbers)}"
        raise UserError(
            f"{table.where(wrong[0])}: {counts}: give whole pixels x1 < x2 and y1 < y2 from 0 on, "
            "or leave all four empty for the whole image"
        )


def _with_parts(table: Table, split: str = "") -> Table:
    """Return the table with its roles in `split`, without the rows that are in neither split,
    unless all are wanted."""
    splits, roles = table.columns.pop("split", None), table.columns.pop("role", None)
    if split == "all" or (splits is None and not any(roles or ())):
        return table
    parts = splits or [""] * len(table)
    if roles:
        parts = _parts_of_roles(table, parts, roles)
    parts = [part or "train" for part in parts]
    left_out = {"junk"}
    if not {"test", "query", "gallery"}.isdisjoint(parts):
        left_out.add("validation")
    counts = collections.Counter(part for part in parts if part in left_out)
    if counts:
        text = ", ".join(f"{count} of {part}" for part, count in counts.items())
        warn(f"{table.name}: {table.path}: images are left out: {text}")
    rows = [row for row, part in enumerate(parts) if part not in left_out]
    table.columns["split"] = ["test" if part == "validation" else part for part in parts]
    return table.take(rows)


def _parts_of_roles(table: Table, splits: list[str], roles: list[str]) -> list[str]:
    """Return the role of each row, or its split where it has none.

    Raises:
        UserError: The role of an image is none of its split.
    """
    if not any(splits) and {"", "train"} <= {*roles}:
        warn(
            f"{table.name}: {table.path}: {roles.count('')} images without a role are for training"
        )
    for row, (split, role) in enumerate(zip(splits, roles, strict=True)):
        is_other = role in ("query", "gallery") if split == "train" else role == "train"
        if split and is_other:
            raise UserError(
                f"{table.where(row)}: an image of the split {split} has the role {role}"
            )
    return [role or split for split, role in zip(splits, roles, strict=True)]


def _without_duplicates(table: Table) -> Table:
    """Return the table with each image once, or with each of its texts once.

    Raises:
        UserError: Two rows of an image differ.
    """
    first_row: dict[str, int] = {}
    distinct: dict[tuple[str, str], int] = {}
    texts, folder = table.columns.get("text", [""] * len(table)), os.getcwd()
    for row, path in enumerate(table.columns["path"]):
        image = composed(os.path.normpath(path if is_remote(path) else os.path.join(folder, path)))
        first = first_row.setdefault(image, row)
        distinct.setdefault((image, texts[row]), row)
        for column, values in table.columns.items():
            if column not in ("path", "text") and values[row] != values[first]:
                raise UserError(
                    f"{table.where(first, row)}: {quoted(path)} has two values of {column}"
                )
    rows = list(distinct.values())
    if len(rows) < len(table):
        warn(f"list: dropped {len(table) - len(rows)} rows of {table.path} that repeat another")
    return table.take(rows)


def class_ids(
    table: Table, column: str, is_name: bool = False
) -> tuple[np.ndarray, dict[int, str]]:
    """Return the id of every row, and the name of every id: integers are ids, names get theirs in
    sorted order.

    Args:
        table: The table.
        column: The name of its column.
        is_name: Whether cells are names even if all are integers.

    Raises:
        UserError: An integer does not fit in 64 bits.
    """
    values = table.columns[column]
    unique = sorted({*values})
    if is_name or not all(map(_INTEGER.fullmatch, unique)):
        id_of = {name: number for number, name in enumerate(unique)}
    else:
        table.check_cells(column, _fits_in_64_bits, "an integer of 64 bits")
        id_of = {cell: int(cell) for cell in unique}
    ids = np.array([id_of[value] for value in values], np.int64)
    return ids, {number: name for name, number in id_of.items()}


def _fits_in_64_bits(cell: str) -> bool:
    # Lengths first: Python refuses to read thousands of digits.
    return len(cell) <= 20 and _INT64.min <= int(cell) <= _INT64.max
