"""Your own images as a data set: class folders, or a list in CSV, JSON lines or Parquet."""

import collections
import csv
import dataclasses
import io
import json
import os
import re
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import scipy.sparse

from tfdml import arguments
from tfdml.data.dataset import ImageDataset, PairList, Protocol
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files
from tfdml.data.readers.label_files import CONTROL, LeftOut, Table, composed, images_below, quoted
from tfdml.errors import REASON, UserError, check_share, user_errors
from tfdml.io.files import is_remote, open_file, walk


def read_folder(data_dir: str | os.PathLike, split: str = "train", *, test_fraction: float = 0.5) -> ImageDataset:
    """Read `data_dir/<class>/**/<image>`, or `data_dir/<split>/<class>/**/<image>`.

    Splits are folders of the usual names, in any case: `train` or `training`; `test`, `testing` or `holdout`; `val`,
    `valid`, `validation` or `dev`, which are the test images where there is no `test` and are left out otherwise;
    `query` and `gallery`, which are the test images in their roles. Without class folders each image is a class of its
    own, for training without labels.

    Images are JPEG, PNG and WebP files by their content, whatever their names, at any depth below their class folder.
    A warning counts all other files by kind. Hidden files and folders and those of operating systems, such as
    `Thumbs.db` and `@eaDir`, are no images and no classes. Labels follow the sorted class names of all splits, so they
    depend on the names alone. Links are followed, to each folder of a class once.

    Args:
        data_dir: The tree, on a local disk or on any file system that `fsspec` knows.
        split: `"train"`, `"test"`, or `"all"` for all images.
        test_fraction: Without splits: the share of the classes, the last in sorted order, that is held out as the test
            split; each split gets at least one class.

    Raises:
        UserError: There is no folder or no image, a class folder has no image, there is one class only (but
            for `"all"`), folders look like splits among classes, or the fraction is not between 0 and 1.

    Example:
        >>> read_folder("photos", "test", test_fraction=0.25).num_classes
        1
        >>> read_folder("photos", "all")
        ImageDataset('folder', 'all', images=12, classes=4)
    """
    root = os.fspath(data_dir)
    check_share(test_fraction=test_fraction)
    members = _with_classes(root, folder_members(root))
    if any(member.part for member in members):
        members = _of_split(root, members, split)
        labels_of = _labels_of(members)
        classes = {part: {m.name for m in members if m.split == part} for part in ("train", "test")}
        label_files.warn_shared_classes("folder", root, sorted(classes["train"] & classes["test"]))
    else:
        labels_of = _labels_of(members)
        if split != "all":
            advice = "both train/ and test/"
            if len(labels_of) == 1 and members[0].is_folder and _list(members[0].path)[0]:
                advice = f"name the folder of the classes, `data_dir={members[0].path}`"
            sides = label_files.split_classes("folder", root, list(labels_of), test_fraction, advice)
            split_of = {name: part for part, names in sides.items() for name in names}
            members = [dataclasses.replace(member, split=split_of[member.name]) for member in members]
    chosen = [member for member in members if split in (member.split, "all")]
    if not chosen:
        parts = sorted({member.part for member in members})
        raise UserError(f"folder: {root} has no images of the {split} split, only of {', '.join(parts)}")
    left_out = LeftOut("folder", f"{root} ({split})")
    paths, labels, is_query = [], [], []
    for member in chosen:
        images = images_below(member.path, left_out) if member.is_folder else [member.path]
        if not images:
            reason = f"; {left_out}" if left_out.kinds.total() else ""
            raise UserError(f"folder: the class folder {member.path} has no image; add some or remove it{reason}")
        if unfit := [path for path in images if CONTROL.search(path) and member.is_folder]:
            raise UserError(f"folder: {len(unfit)} names have control characters or no UTF-8, first {quoted(unfit[0])}")
        paths += images
        labels += [labels_of[member.name]] * len(images)
        is_query += [member.part == "query"] * len(images)
    left_out.report()
    class_names = {labels_of[member.name]: member.name for member in chosen}
    roles = split == "test" and {member.part for member in chosen} == {"query", "gallery"}
    if roles:
        asked, searched = ({m.name for m in chosen if m.part == part} for part in ("query", "gallery"))
        if not asked & searched:
            raise UserError(f"folder: {root}: no query has its class in the gallery; name class folders alike in both")
        if lacking := sorted(asked - searched):
            text = (
                f"{len(lacking)} of {len(asked)} classes of queries are not in the gallery (the first is {lacking[0]})"
            )
            label_files.warn(f"folder: {root}: {text}.")
    elif all(member.is_folder for member in chosen):
        label_files.warn_singleton_classes("folder", split, np.array(labels, np.int64), class_names)
    columns = {"is_query": is_query} if roles else {}
    return ImageDataset("folder", split, FileImages(tuple(paths)), labels, class_names, **columns)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Member:
    """A class folder, or an image that is a class of its own.

    Args:
        name: The class, in the composed Unicode form.
        path: The folder or the image.
        is_folder: Whether it is a folder; an image may lie next to class folders.
        part: Which part of the data its parent folder names: `train`, `test`, `validation`, `query`, `gallery`; empty
            where folders are no splits.
        split: `train` or `test`, once that is known.
    """

    name: str
    path: str
    is_folder: bool
    part: str = ""
    split: str = ""


def folder_members(root: str, part: str = "") -> list[Member]:
    """Return the class folders of a folder or of its splits, and the images that lie next to these.

    Args:
        root: The folder.
        part: Which split it is, of a folder that has splits.

    Raises:
        UserError: It cannot be read, or some of its folders look like splits and others do not.
    """
    folders, images, left_out = _list(root)
    if not folders:
        left_out.report()
    loose = [Member(os.path.basename(path), path, False, part) for path in images]
    splits = {name: label_files.part_of(name) for name in folders if label_files.part_of(name)}
    others = [name for name in folders if name not in splits]
    nested = [name for name in splits if others and _list(os.path.join(root, name))[0]]
    if splits and others and (len(splits) > 1 or nested):
        empty = LeftOut("folder", root)
        others = [name for name in others if images_below(os.path.join(root, name), empty)]
        empty.report()
        if others:
            mixed = f"{', '.join(f'{name}/' for name in splits)} next to {others[0]}/"
            advice = "give splits a folder without others, or rename classes that are called like splits"
            raise UserError(f"folder: {root} has {mixed}: they look like splits among classes; {advice}")
    if splits and not others:
        alike = [name for name in splits if list(splits.values()).count(splits[name]) > 1]
        if alike:
            raise UserError(f"folder: {root} has folders that name one split: {', '.join(alike)}; make them one")
        if part and not (part == "test" and {*splits.values()} <= {"query", "gallery"}):
            raise UserError(f"folder: {root} is a split and has splits, {', '.join(splits)}; name one as `data_dir`")
        order = sorted(splits.items(), key=lambda item: (item[1] != "train", item[1] == "gallery", item[0]))
        parts = (folder_members(os.path.join(root, name), inner or "") for name, inner in order)
        return [member for members in parts for member in members] + loose
    for name in splits:
        label_files.warn(f"folder: {root}/{name} is taken for a class, as it lies among classes and holds images.")
    names = [label_files.composed(name) for name in folders]
    for name in (name for name, count in collections.Counter(names).items() if count > 1):
        label_files.warn(f"folder: {root} has two folders {name}, in two Unicode forms: they are one class.")
    paths = (os.path.join(root, name) for name in folders)
    return [Member(name, path, True, part) for name, path in zip(names, paths, strict=True)] + loose


def _with_classes(root: str, members: list[Member]) -> list[Member]:
    """Return the members without the images next to class folders; images alone are classes of their own."""
    split_tree, parents = any(m.part for m in members), {os.path.dirname(m.path) for m in members if m.is_folder}
    loose = [m for m in members if not m.is_folder]
    ignored = [m for m in loose if os.path.dirname(m.path) in parents or (split_tree and not m.part)]
    if ignored:
        label_files.warn(f"folder: ignoring {len(ignored)} images outside the class folders of {root}.")
    if len(ignored) < len(loose):
        text = f"each of its {len(loose) - len(ignored)} images is a class of its own"
        label_files.warn(f"folder: no class folder in {os.path.dirname(loose[0].path)}: {text}.")
    left_out = {member.path for member in ignored}
    members = [member for member in members if member.path not in left_out]
    if not members:
        expected = os.path.join(root, "<class>", "<image>.jpg")
        raise UserError(f"folder: found no class folder in {root}; expected {expected}")
    return members


def _of_split(root: str, members: list[Member], split: str) -> list[Member]:
    """Return the members of all parts with their splits; validation images are those to test, or are left out."""
    parts = {member.part for member in members}
    if "test" in parts and not parts.isdisjoint(("query", "gallery")):
        raise UserError(f"folder: {root} has a test split and query or gallery; leave out one of them")
    if len(parts & {"query", "gallery"}) == 1:
        raise UserError(f"folder: {root} has one of query and gallery; add the other")
    spare = not parts.isdisjoint(("test", "query"))
    if "validation" in parts and spare and split != "all":
        left_out = LeftOut("folder", root)
        count = sum(
            len(images_below(m.path, left_out)) if m.is_folder else 1 for m in members if m.part == "validation"
        )
        text = f"{count} images of the validation folder of {root} are left out, as there are others to test"
        label_files.warn(f"folder: {text}; training holds out classes of its own.")
    of_part = {"train": "train", "validation": "validation" if spare else "test"}
    return [dataclasses.replace(member, split=of_part.get(member.part, "test")) for member in members]


def _labels_of(members: list[Member]) -> dict[str, int]:
    return {name: label for label, name in enumerate(sorted({member.name for member in members}))}


def _list(folder: str) -> tuple[list[str], list[str], LeftOut]:
    """Return the visible folders right inside `folder`, the paths of the images there, sorted, and other files."""
    first = next(walk(folder), None)
    if first is None:
        raise UserError(f"folder: there is no folder {folder}, or it may not be read; check data_dir")
    _, folders, names = first
    left_out = LeftOut("folder", folder)
    paths = [os.path.join(folder, name.rstrip("/")) for name in sorted(left_out.visible(names))]
    return sorted(name.rstrip("/") for name in left_out.visible(folders)), left_out.images(paths), left_out


# CSV and JSON are not read by pyarrow, so that messages name lines. 120,000 rows take a second.
COLUMNS = ("path", "label", "split", "role", "super_label", "group", "labels", "id")
PAIR_COLUMNS = (("a", "b", "similar"), ("a", "b", "similarity"), ("anchor", "positive", "negative"))
_MEASURED = ("recall", "map@r", "r_precision")
_BETWEEN = "|"  # the labels of one image
_JSON_EXTENSIONS = (".jsonl", ".ndjson", ".json")
LIST_EXTENSIONS = (".csv", ".parquet", *_JSON_EXTENSIONS)

_REQUIRED = COLUMNS[:2]
_VALUES = {
    "split": ("train", "test", "validation", "query", "gallery"),
    "role": ("", "train", "query", "gallery", "junk"),
    "similar": ("0", "1", "false", "true", "junk"),
}
_DELIMITERS = ",;\t"
# By which a spreadsheet names the delimiter, in the first line.
_SEPARATOR = re.compile(r'"?sep=(.)"?\n')
# 007 and 7 are two names, not one number.
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_INT64 = np.iinfo(np.int64)


def read_list(
    data_dir: str | os.PathLike,
    split: str = "train",
    *,
    test_fraction: float = 0.5,
    pairs: str = "",
    similar_from: float = 0.5,
    levels: bool = False,
) -> ImageDataset:
    """Read a list of images: a CSV file with a header, a file with a JSON object on each line, or a Parquet file.

    The columns (or keys) are `path` and `label`, and, if wanted, the others, in any order:

    - `path`: of the image; a relative one is relative to the folder of the list.
    - `label`: if every label of the file is an integer, these are the class ids; otherwise labels are names, whose
      ids follow their sorted order over both splits. `007` is a name, `7` an integer.
    - `split`: `train` or `test`, or another usual name of these (`training`, `val`, `valid`, `holdout`). Next to
      `test`, images of `val` are left out. Without this column, the last classes in order are the test split.
    - `role`: `query` or `gallery` for the test images, `train` or nothing for training images. Queries are then looked
      up in the gallery; without roles, each test image is looked up among all others. `junk` is left out.
    - `super_label`: of a coarser class; integers or names, as for `label`.
    - `group`: the camera or the sequence; integers or names, as for `label`. Evaluation ignores images of the
      query's class and group, which are too easy to find.
    - `labels`: a label set, a list in Parquet and JSON and `cat|dog` in CSV. Images belong together if they share a
      label. Without a column `label` the class is the first of them. With `levels` a class on each level, the finest
      first: `fiat_500|hatchback|car`.
    - `id`: a name of the image for `pairs`, next to its path.

    With `pairs`, the column `label` may be missing: classes are then what similar pairs link, which matters for splits
    alone, and right for a query are the images that are similar to it.

    The delimiter of a CSV file is a comma, a semicolon or a tab. White space around its cells is dropped. Names of
    columns and values of `split` and `role` count in capitals or not, and other columns are ignored. Rows that repeat
    another are dropped. A warning counts what is ignored, dropped or left out.

    Args:
        data_dir: The list itself: `*.parquet`, `*.jsonl`, `*.ndjson` or `*.json`; any other name for CSV or JSON lines.
        split: `"train"` or `"test"`.
        test_fraction: Without splits and roles: the share of the classes that is held out as the test split; each
            split gets at least one class.
        pairs: A file with pairs or triplets of the images, relative to the folder of the list; see `read_pairs`.
        similar_from: From which similarity on a pair is similar.
        levels: Learn and measure the classes of `labels` as levels; without this column `label` and `super_label`.

    Raises:
        UserError: The list or an image is missing, or a line is not as it should be; the message names the line.

    Example:
        >>> read_list("photos/list.csv", "test", test_fraction=0.25).num_classes
        1
    """
    file = os.fspath(data_dir)
    check_share(test_fraction=test_fraction)
    table = _without_duplicates(read_rows(file, ("path",) if pairs else _REQUIRED))
    label_rows = _levels(table) if levels else _label_sets(table) if "labels" in table.columns else None
    given, junk = None, np.zeros((0, 2), np.int64)
    if pairs:
        given, junk = read_pairs(os.path.join(os.path.dirname(file), pairs), table, similar_from)
    linked = given is not None and "label" not in table.columns
    if given is not None and linked:
        table.columns["label"] = list(map(str, linked_classes(given, len(table.lines))))
    elif len(junk):
        raise UserError(f"list: {pairs} has junk, which a list with the column label cannot use; leave out the column")
    labels, class_names = class_ids(table, "label")
    super_labels, groups = (
        class_ids(table, column)[0] if column in table.columns else None for column in ("super_label", "group")
    )
    is_test = _test_rows(table, labels, class_names, test_fraction)
    is_query = _query_rows(table, labels)
    rows = np.flatnonzero(is_test == (split == "test"))
    if not len(rows):
        raise UserError(f"list: {file} has no row of the {split} split")
    protocol = Protocol(_MEASURED, levels=label_rows) if levels else None
    if given is not None:
        across = np.ptp(is_test[given.rows].astype(int), axis=1)
        if across.any():
            label_files.warn(f"list: {across.sum()} of {len(across)} pairs of {pairs} join both splits: left out")
        protocol = similar_images(given, len(labels), junk) if linked else protocol
    paths = table.columns["path"]
    advice = f"correct the list or add the images; a relative path starts from {os.path.dirname(file) or '.'}"
    origins = [f"line {table.lines[row]}" for row in rows.tolist()]
    there = label_files.require_files("list", [paths[row] for row in rows], advice, origins)
    if split == "train" or is_query is None:
        label_files.warn_singleton_classes("list", split, labels[rows], class_names)
    columns: dict[str, Any] = {"super_labels": super_labels, "groups": groups, "label_rows": label_rows}
    columns |= {"is_query": None if split == "train" else is_query, "protocol": protocol, "pairs": given}
    dataset = ImageDataset("list", split, FileImages(tuple(paths)), labels, class_names, **columns).take(rows)
    return dataclasses.replace(dataset, images=FileImages(there))


def _split_labels(table: Table) -> list[list[str]]:
    return [[name.strip() for name in cell.split(_BETWEEN) if name.strip()] for cell in table.columns["labels"]]


def _levels(table: Table) -> np.ndarray:
    """Return the class ids on each level, (N, L), of the column labels, which gives the others, or of these."""
    if "labels" in table.columns:
        found = _split_labels(table)
        for row, names in enumerate(found):
            if len(names) < 2 or len(names) != len(found[0]):
                counts = f"{len(names)} levels and {len(found[0])} in the first line"
                raise UserError(f"{table.where(row)}: labels has {counts}; name as many, at least 2, of every image")
        levels = [list(names) for names in zip(*found, strict=True)]
        table.columns.update(label=levels[0], super_label=levels[1])
    elif "super_label" in table.columns:
        levels = [table.columns["label"], table.columns["super_label"]]
    else:
        raise UserError(f"list: levels=true needs a column labels or super_label, and {table.path} has neither")
    alone = (dataclasses.replace(table, columns={"labels": names}) for names in levels)
    return np.stack([class_ids(level, "labels")[0] for level in alone], axis=1)


def _label_sets(table: Table) -> np.ndarray:
    """Return the label sets as rows of 0 and 1, (N, L); the first label becomes the class where there is none."""
    from sklearn.preprocessing import MultiLabelBinarizer  # takes a while to import

    found = _split_labels(table)
    table.columns.setdefault("label", [names[0] if names else "" for names in found])
    return MultiLabelBinarizer().fit_transform(found).astype(np.int64)


def read_pairs(file: str, images: Table, similar_from: float = 0.5) -> tuple[PairList, np.ndarray]:
    """Read pairs or triplets of the images of a list, a file of the same kinds.

    Its columns are `a`, `b` and `similar` (0 or 1, or false or true), or `a`, `b` and `similarity` (any number), or
    `anchor`, `positive` and `negative`. Images go by their path, relative to this file or as in the list, or by their
    `id` in the list. Where `similar` is `junk`, either image is ignored when the other is a query.

    Args:
        file: The file.
        images: The rows of the list.
        similar_from: From which similarity on a pair is similar.

    Returns:
        The pairs, and the rows (J, 2) of those that are junk.

    Raises:
        UserError: A line is not as it should be, or two lines contradict each other; the message names them.
    """
    table = read_rows(file, (), sum(PAIR_COLUMNS, ()))
    columns = next((columns for columns in PAIR_COLUMNS if {*columns} == {*table.columns}), None)
    if columns is None:
        known = " or ".join(map(",".join, PAIR_COLUMNS))
        raise UserError(f"list: {file} must have the columns {known}; it has {','.join(table.columns)}")
    row_of = {composed(os.path.normpath(path)): row for row, path in enumerate(images.columns["path"])}
    if "id" in images.columns:
        images.check_distinct("id")
        row_of |= {name: row for row, name in enumerate(images.columns["id"])}
    folder, ends = composed(os.path.dirname(file)), columns[: 2 if "a" in columns else 3]
    rows = np.empty((len(table.lines), len(ends)), np.int64)
    for column, name in enumerate(ends):
        for line, cell in enumerate(table.columns[name]):
            beside = cell if is_remote(cell) else os.path.normpath(os.path.join(folder, cell))
            row = row_of.get(cell, row_of.get(beside, row_of.get(os.path.normpath(cell))))
            if row is None:
                hint = label_files.near_miss(beside, row_of)
                raise UserError(f"{table.where(line)}: {name} {quoted(cell)} is no image of {images.path}{hint}")
            rows[line, column] = row
    similarities, junk = None, np.zeros((0, 2), np.int64)
    if len(ends) == 2:
        values = []
        for line, cell in enumerate(table.columns[columns[2]]):
            where = table.where(line)
            with user_errors(ValueError, f"{where}: similarity must be a number, it is {quoted(cell)}"):
                value = {"true": "1", "false": "0"}.get(cell, cell)
                values.append(np.nan if cell == "junk" else arguments.number("similarity", float(value)))
        ignored = np.isnan(values)
        rows, junk, similarities = rows[~ignored], rows[ignored], np.array(values)[~ignored]
    pair_list = PairList(rows, similarities, similar_from)
    scored = pair_list.scored()
    same = np.flatnonzero((scored[1:, :2] == scored[:-1, :2]).all(axis=1))
    if len(same):
        names = " and ".join(label_files.quoted(images.columns["path"][row]) for row in scored[same[0], :2].astype(int))
        raise UserError(f"list: {file}: {names} have two similarities; leave out one of the lines")
    return pair_list, junk


def linked_classes(pairs: PairList, size: int) -> np.ndarray:
    """Return a class of each image, (N,): those that similar pairs link, directly or through others, share one."""
    similar = pairs.similar()
    graph = scipy.sparse.coo_array((np.ones(len(similar)), similar.T), shape=(size, size))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def similar_images(pairs: PairList, size: int, junk: np.ndarray) -> Protocol:
    """Return the protocol of images without classes: right for a query are the images that are similar to it.

    Args:
        pairs: The pairs.
        size: How many images there are.
        junk: (J, 2) rows; either of a pair is ignored for the other.
    """
    right: dict[int, list[int]] = {}
    ignored: dict[int, list[int]] = {}
    for lists, rows in ((right, pairs.similar()), (ignored, junk)):
        for a, b in rows.tolist():
            lists.setdefault(a, []).append(b)
            lists.setdefault(b, []).append(a)
    return Protocol(_MEASURED, ids=np.arange(size), lists={"": (right, ignored)})


def read_rows(file: str, required: Sequence[str] = _REQUIRED, known: Sequence[str] = COLUMNS) -> Table:
    """Read the rows of a list, as text, and check its cells.

    Args:
        file: The list, see `read_list`.
        required: The columns that it must have; `labels` may stand for `label`.
        known: The columns that it may have.

    Returns:
        The columns that it has; `path` is relative to the working folder, or absolute. `split` has the roles, too:
        `train`, `test`, `query` or `gallery`.

    Raises:
        UserError: A line is not as it should be; the message names it.

    Example:
        >>> read_rows("photos/list.csv").columns["label"][0]
        'bus'
    """
    table = read_cells("list", file, required, known)
    for column, values in table.columns.items():
        # Only training images may lack a value, and only that one.
        if column not in ("role", "labels") and "" in values:
            raise UserError(f"{table.where(values.index(''))}: no {column}")
        if column in _VALUES:
            values[:] = [label_files.part_of(value) or value.lower() for value in values]
            allowed = _VALUES[column]
            table.check_cells(column, allowed.__contains__, " or ".join(filter(None, allowed)))
        together = "".join(values)
        if CONTROL.search(together):
            row = next(row for row, value in enumerate(values) if CONTROL.search(value))
            raise UserError(f"{table.where(row)}: the {column} has control characters: {quoted(values[row])}")
        # One word in two Unicode forms looks like one, and is.
        if column != "path" and not together.isascii():
            forms = len({*values})
            values[:] = map(composed, values)
            if merged := forms - len({*values}):
                text = f"{merged} values of {column} differ from others in their Unicode form alone: merged"
                label_files.warn(f"list: {file}: {text}")
    folder = os.path.dirname(file)
    if "path" in table.columns:
        table.columns["path"] = [
            path if is_remote(path) else os.path.join(folder, path) for path in table.columns["path"]
        ]
    return _with_parts(table)


def read_cells(name: str, file: str, required: Sequence[str], known: Sequence[str]) -> Table:
    """Read the columns of a table that are known, as text: CSV, JSON lines or Parquet.

    Args:
        name: What the table is, for messages.
        file: The file: `*.parquet`, `*.jsonl`, `*.ndjson` or `*.json`; any other name for CSV or JSON lines.
        required: The columns that it must have; `labels` may stand for `label`.
        known: The columns that are read. A warning names the others.

    Raises:
        UserError: It cannot be read, or a column is missing.

    Example:
        >>> read_cells("list", "photos/list.csv", ("path",), ("path",)).columns["path"][0]
        'bus/0.jpg'
    """
    if file.lower().endswith(".parquet"):
        lines, columns, others = _parquet_columns(name, file, known)
    else:
        text = label_files.read_text(name, file)
        if not text.strip():
            raise UserError(f"{name}: {file} is empty; expected a CSV header with {', '.join(required)}, or JSON lines")
        is_json = file.lower().endswith(_JSON_EXTENSIONS) or text.lstrip().startswith("{")
        lines, columns, others = (_json_columns if is_json else _csv_columns)(name, file, text, known)
    lacking = [column for column in _needed(required, columns) if column not in columns]
    if lacking:
        has = ", ".join(map(quoted, [*columns, *others]))
        raise UserError(f"{name}: {file} has no column {lacking[0]}; it has {has}")
    if not lines:
        raise UserError(f"{name}: {file} has no row")
    if others:
        named = ", ".join(quoted(other) if other else "one without a name" for other in others)
        label_files.warn(f"{name}: {file}: other columns than {', '.join(known)} are ignored: {named}")
    return Table(name, file, lines, columns)


def _with_parts(table: Table) -> Table:
    """Return the table with its roles in `split`, without the rows that are in neither split."""
    splits, roles = table.columns.pop("split", None), table.columns.pop("role", None)
    if splits is None and not any(roles or ()):
        return table
    parts = []
    for row in range(len(table.lines)):
        split, role = splits[row] if splits else "", roles[row] if roles else ""
        if split == "train" and role in ("query", "gallery"):
            raise UserError(f"{table.where(row)}: a training image has the role {role}; only test images have one")
        if role == "train" and split not in ("", "train"):
            raise UserError(f"{table.where(row)}: an image of the split {split} has the role train")
        parts.append(role or split or "train")
    left_out = {"junk"}
    if not {"test", "query", "gallery"}.isdisjoint(parts):
        left_out.add("validation")
    rows = [row for row, part in enumerate(parts) if part not in left_out]
    if len(rows) < len(parts):
        counts = collections.Counter(part for part in parts if part in left_out)
        text = ", ".join(f"{count} of {part}" for part, count in counts.items())
        label_files.warn(f"list: {table.path}: rows are left out: {text}")
    table.columns["split"] = ["test" if part == "validation" else part for part in parts]
    return table.take(rows)


def _needed(required: Sequence[str], there: Container[str]) -> list[str]:
    """Return the columns that are required where some are there."""
    return [column for column in required if column != "label" or "labels" not in there]


_Columns = tuple[Sequence[int], dict[str, list[str]], list[str]]


def _known_columns(name: str, file: str, header: Sequence[str], known: Sequence[str]) -> tuple[dict[str, int], list]:
    """Return the place of each column that is known, and the names of the others."""
    places: dict[str, int] = {}
    others = []
    for place, column in enumerate(header):
        plain = column.strip().lower().replace(" ", "_")
        if plain not in known:
            others.append(column)
        elif places.setdefault(plain, place) != place:
            raise UserError(f"{name}: {file}: column {quoted(plain)} is twice in {quoted(', '.join(header))}")
    return {column: places[column] for column in known if column in places}, others


def _parquet_columns(name: str, file: str, known: Sequence[str]) -> _Columns:
    """Return the numbers of the rows, the columns as text, and the names of other columns."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    with user_errors((OSError, pa.ArrowException), f"{name}: {file} cannot be read as Parquet: {REASON}", keep="first"):
        with open_file(file) as opened:
            parquet = pa.parquet.ParquetFile(opened)
            header = parquet.schema_arrow.names
            places, others = _known_columns(name, file, header, known)
            table = parquet.read(columns=[header[place] for place in places.values()])
        columns = {column: _as_text(table[header[place]], column == "labels") for column, place in places.items()}
    return range(1, table.num_rows + 1), columns, others


def _as_text(column: Any, of_sets: bool) -> list[str]:
    """Return a column of Parquet as text; a column of sets may hold lists."""
    import pyarrow as pa

    if of_sets and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return [_BETWEEN.join(map(str, value or ())) for value in column.to_pylist()]
    return column.cast("string").fill_null("").to_pylist()


def _csv_columns(name: str, file: str, text: str, known: Sequence[str]) -> _Columns:
    """Return the line of every row, the columns, and the names of other columns."""
    separator = _SEPARATOR.match(text)
    text = "\n" + text[separator.end() :] if separator else text
    head = next((line for line in text.split("\n") if line.strip(_DELIMITERS + ' "')), "")

    def count_known(delimiter: str) -> int:
        header = next(csv.reader([head], delimiter=delimiter, skipinitialspace=True), [])
        return len(_known_columns(name, file, list(dict.fromkeys(header)), known)[0])

    delimiter = separator[1] if separator else max(_DELIMITERS, key=count_known)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows, line = [], 1
    try:
        for cells in reader:
            rows.append((line, [cell.strip() for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{name}: {file}, line {line}: not CSV ({error})") from None
    (line, header), *rows = [(line, row) for line, row in rows if any(row)] or [(1, [])]
    places, others = _known_columns(name, f"{file}, line {line}", header, known)
    for line, row in rows:
        if len(row) < len(header) or any(row[len(header) :]):
            expected = f"expected {len(header)} cells as in the header, found {len(row)}"
            raise UserError(f"{name}: {file}, line {line}: {expected}")
    columns = {column: [row[place] for _, row in rows] for column, place in places.items()}
    return [line for line, _ in rows], columns, others


def _json_columns(name: str, file: str, text: str, known: Sequence[str]) -> _Columns:
    """Return the line of every object, their values as text, and other keys."""
    lines, rows = [], []
    others: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}: {file}, line {number}"
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
            raise UserError(f"{where}: not JSON ({reason}); expected one JSON object a line") from None
        if not isinstance(cells, dict):
            raise UserError(f'{where}: expected an object such as {{"path": "a.jpg"}}, found {quoted(cells)}')
        keys, values = list(cells), list(cells.values())
        places, unknown = _known_columns(name, f"{file}, line {number}", keys, known)
        others |= dict.fromkeys(unknown)
        rows.append({key: _json_text(where, key, values[place]) for key, place in places.items()})
        lines.append(number)
    used = set().union(*rows)
    return lines, {key: [row.get(key, "") for row in rows] for key in known if key in used}, list(others)


def _json_text(where: str, key: str, value: Any) -> str:
    is_label = key.endswith("label")
    if key == "labels" and isinstance(value, list):
        value = _BETWEEN.join(map(str, value))
    elif key.startswith("similar") and isinstance(value, (bool, int, float)):
        value = str(value).lower()
    if not (value is None or isinstance(value, str) or (is_label and type(value) is int)):
        kind = "a string or an integer" if is_label else "a string"
        raise UserError(f"{where}: the {key} must be {kind}, it is {quoted(value)}")
    return "" if value is None else str(value)


def _without_duplicates(table: Table) -> Table:
    """Return the table with each image once.

    Raises:
        UserError: Two rows of an image differ.
    """
    paths = table.columns["path"]
    first_row: dict[str, int] = {}
    for row, path in enumerate(paths):
        first = first_row.setdefault(composed(os.path.normpath(path)), row)
        if first == row:
            continue
        for column, values in table.columns.items():
            if column != "path" and values[row] != values[first]:
                raise UserError(f"{table.where(row)}: {quoted(path)} has another {column} on line {table.lines[first]}")
    kept = list(first_row.values())
    if len(kept) < len(paths):
        label_files.warn(f"list: dropped {len(paths) - len(kept)} rows of {table.path} that repeat another")
    return table.take(kept)


def class_ids(table: Table, column: str) -> tuple[np.ndarray, dict[int, str]]:
    """Return the id of every row, and the name of every id: integers are ids, names get theirs in sorted order.

    Raises:
        UserError: An integer does not fit in 64 bits.
    """
    values = table.columns[column]
    unique = sorted({*values})
    if not all(map(_INTEGER.fullmatch, unique)):
        id_of = {name: i for i, name in enumerate(unique)}
    else:
        # Lengths first: Python refuses to read thousands of digits.
        wrong = {v for v in unique if len(v) > 20 or not _INT64.min <= int(v) <= _INT64.max}
        if wrong:
            row = next(row for row, value in enumerate(values) if value in wrong)
            raise UserError(f"{table.where(row)}: the {column} {quoted(values[row])} does not fit in 64 bits")
        id_of = {v: int(v) for v in unique}
    return np.array([id_of[value] for value in values], np.int64), {i: name for name, i in id_of.items()}


def _test_rows(table: Table, labels: np.ndarray, class_names: dict[int, str], test_fraction: float) -> np.ndarray:
    """Which rows are the test split, (N,) bool."""
    if "split" not in table.columns:
        classes = [class_names[label] for label in np.unique(labels).tolist()]
        unseen = {*label_files.split_classes("list", table.path, classes, test_fraction, "a column split")["test"]}
        return np.isin(labels, [label for label, name in class_names.items() if name in unseen])
    is_test = np.array([part != "train" for part in table.columns["split"]])
    shared = np.intersect1d(labels[is_test], labels[~is_test]).tolist()
    label_files.warn_shared_classes("list", table.path, [class_names[label] for label in shared])
    return is_test


def _query_rows(table: Table, labels: np.ndarray) -> np.ndarray | None:
    """Which rows are queries, (N,) bool; None without roles."""
    parts = np.array(table.columns.get("split", []))
    is_query, is_gallery = parts == "query", parts == "gallery"
    if not (is_query.any() or is_gallery.any()):
        return None
    if (parts == "test").any():
        row = int(np.flatnonzero(parts == "test")[0])
        raise UserError(f"{table.where(row)}: a test image has no role, where others have one")
    for role, rows in (("query", is_query), ("gallery", is_gallery)):
        if not rows.any():
            raise UserError(f"list: {table.path} has roles, but no test image with the role {role}")
    table.check_queries(labels, is_query, is_gallery, lambda row: f"label {quoted(table.columns['label'][row])}")
    return is_query
