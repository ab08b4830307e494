"""Your own images as a data set: class folders, or a list in CSV, JSON lines or Parquet."""

import csv
import dataclasses
import io
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from absl import logging

from tfdml.data.dataset import ImageDataset, PairList, Protocol
from tfdml.data.decoding import EXTENSIONS
from tfdml.data.images import FileImages
from tfdml.data.readers import label_files
from tfdml.data.readers.label_files import CONTROL, Table, quoted
from tfdml.errors import REASON, UserError, check_share, user_errors
from tfdml.io.files import is_remote, open_file, walk


def read_folder(data_dir: str | os.PathLike, split: str = "train", *, test_fraction: float = 0.5) -> ImageDataset:
    """Read `data_dir/<class>/**/<image>`, or `data_dir/{train,test}/<class>/**/<image>` where both are there.

    Without class folders each image is a class of its own, for training without labels.

    Images are files named *.jpg, *.jpeg, *.png or *.webp in any case, at any depth below their class
    folder; hidden files and folders and other files are ignored. Labels follow the sorted class names of both
    splits, so they depend on the names alone. Links are followed to class folders and to files, not to folders
    further down.

    Args:
        data_dir: The tree, on a local disk or on any file system that `fsspec` knows.
        split: `"train"`, `"test"`, or `"all"` for the images of both.
        test_fraction: Without `train/` and `test/`: the share of the classes, the last in sorted order, that is held
            out as the test split; each split gets at least one class.

    Raises:
        UserError: There is no folder or no image, a class folder has no image, there is one class only (but
            for `"all"`), or the fraction is not between 0 and 1.

    Example:
        >>> read_folder("photos", "test", test_fraction=0.25).num_classes
        1
        >>> read_folder("photos", "all")
        ImageDataset('folder', 'all', images=12, classes=4)
    """
    root = os.fspath(data_dir)
    check_share(test_fraction=test_fraction)
    if {"train", "test"} <= set(_list(root)[0]):
        members = {part: _class_folders(os.path.join(root, part)) for part in ("train", "test")}
        roots = {part: os.path.join(root, part) for part in members}
        label_files.warn_shared_classes("folder", root, sorted({*members["train"]} & {*members["test"]}))
    elif split == "all":
        members, roots = {"all": _class_folders(root)}, {"all": root}
    else:
        classes = _class_folders(root)
        members = label_files.split_classes("folder", root, classes, test_fraction, "both train/ and test/")
        roots = dict.fromkeys(members, root)
    labels_of = {name: label for label, name in enumerate(sorted(set().union(*members.values())))}
    chosen = [part for part in members if split in (part, "all")]
    loose = {name for part in chosen if all(map(_is_image, members[part])) for name in members[part]}
    paths, labels = [], []
    for name, path in [(name, os.path.join(roots[part], name)) for part in chosen for name in members[part]]:
        found = [path] if name in loose else images_below(path)
        if not found:
            raise UserError(f"folder: the class folder {path} has no image; add some or remove it")
        if unfit := [path for path in found if CONTROL.search(path) and name not in loose]:
            raise UserError(f"folder: {len(unfit)} names have control characters or no UTF-8, first {quoted(unfit[0])}")
        paths += found
        labels += [labels_of[name]] * len(found)
    class_names = {labels_of[name]: name for part in chosen for name in members[part]}
    if not loose:
        label_files.warn_singleton_classes("folder", split, np.array(labels, np.int64), class_names)
    return ImageDataset("folder", split, FileImages(tuple(paths)), labels, class_names)


def _visible(names: Iterable[str]) -> list[str]:
    return sorted(name.rstrip("/") for name in names if not name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _list(folder: str) -> tuple[list[str], list[str]]:
    """Return the visible folders and files right inside `folder`, sorted."""
    first = next(walk(folder), None)
    if first is None:
        raise UserError(f"folder: there is no folder {folder}, or it may not be read; check data_dir")
    _, folders, files = first
    return _visible(folders), _visible(files)


def _class_folders(folder: str) -> list[str]:
    folders, files = _list(folder)
    loose = [name for name in files if _is_image(name)]
    if not folders:
        if not loose:
            expected = os.path.join(folder, "<class>", "<image>.jpg")
            raise UserError(f"folder: found no class folder in {folder}; expected {expected}")
        text = "folder: no class folder in %s: each of its %d images is a class of its own."
        logging.warning(text, folder, len(loose))
        return loose
    if loose:
        logging.warning("folder: ignoring %d images outside the class folders of %s.", len(loose), folder)
    return folders


def images_below(folder: str) -> list[str]:
    """Return the images below a folder, sorted, without hidden ones.

    Raises:
        UserError: A folder may not be read.
    """

    def refuse(error: Exception) -> None:
        # Without this a folder that may not be read would pass for an empty one.
        raise UserError(f"folder: a folder below {folder} cannot be read ({error}); allow it or remove it")

    paths = []
    for parent, folders, files in walk(folder, refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in files if _is_image(name) and not name.startswith(".")]
    return sorted(paths)


# CSV and JSON are not read by pyarrow, so that messages name lines. 120,000 rows take a second.
COLUMNS = ("path", "label", "split", "role", "super_label", "group", "labels", "id")
PAIR_COLUMNS = (("a", "b", "similar"), ("a", "b", "similarity"), ("anchor", "positive", "negative"))
_MEASURED = ("recall", "map@r", "r_precision")
_BETWEEN = "|"  # the labels of one image
_JSON_EXTENSIONS = (".jsonl", ".ndjson", ".json")
LIST_EXTENSIONS = (".csv", ".parquet", *_JSON_EXTENSIONS)

_REQUIRED = COLUMNS[:2]
_VALUES = {"split": ("train", "test"), "role": ("query", "gallery"), "similar": ("0", "1", "false", "true")}
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
    - `split`: `train` or `test`. Without this column, the last classes in order are the test split.
    - `role`: `query` or `gallery` for the test images, nothing for training images. Queries are then looked up in the
      gallery; without roles, each test image is looked up among all others.
    - `super_label`: of a coarser class; integers or names, as for `label`.
    - `group`: such as the camera or the sequence; integers or names, as for `label`. Evaluation ignores images of the
      query's class and group, which are too easy to find.
    - `labels`: a label set, a list in Parquet and JSON and `cat|dog` in CSV. Images belong together if they share a
      label. Without a column `label` the class is the first of them. With `levels` a class on each level, the finest
      first: `fiat_500|hatchback|car`.
    - `id`: a name of the image for `pairs`, next to its path.

    With `pairs`, the column `label` may be missing: classes are then what similar pairs link, which matters for splits
    alone, and right for a query are the images that are similar to it.

    White space around the cells of a CSV file is dropped, and other columns of a Parquet file are ignored. Rows that
    repeat another are dropped and counted.

    Args:
        data_dir: The list itself: `*.parquet`, `*.jsonl`, `*.ndjson` or `*.json`; any other name for CSV or JSON lines.
        split: `"train"` or `"test"`.
        test_fraction: Without a `split` column: the share of the classes that is held out as the test split; each
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
    given = read_pairs(os.path.join(os.path.dirname(file), pairs), table, similar_from) if pairs else None
    linked = given is not None and "label" not in table.columns
    if given is not None and linked:
        table.columns["label"] = list(map(str, linked_classes(given, len(table.lines))))
    labels, class_names = class_ids(table, "label")
    super_labels, groups = (
        class_ids(table, column)[0] if column in table.columns else None for column in ("super_label", "group")
    )
    is_test = _test_rows(table, labels, class_names, test_fraction)
    is_query = _query_rows(table, labels, is_test)
    rows = np.flatnonzero(is_test == (split == "test"))
    protocol = Protocol(_MEASURED, levels=label_rows) if levels else None
    if given is not None:
        across = np.ptp(is_test[given.rows].astype(int), axis=1)
        if across.any():
            text = "list: %d of %d pairs of %s join both splits, and are left out."
            logging.warning(text, across.sum(), len(across), pairs)
        protocol = similar_images(given, len(labels)) if linked else protocol
    paths = table.columns["path"]
    advice = f"correct the list or add the images; a relative path starts from {os.path.dirname(file) or '.'}"
    origins = [f"line {table.lines[row]}" for row in rows.tolist()]
    label_files.require_files("list", [paths[row] for row in rows], advice, origins)
    if split == "train" or is_query is None:
        label_files.warn_singleton_classes("list", split, labels[rows], class_names)
    columns: dict[str, Any] = {"super_labels": super_labels, "groups": groups, "label_rows": label_rows}
    columns |= {"is_query": None if split == "train" else is_query, "protocol": protocol, "pairs": given}
    return ImageDataset("list", split, FileImages(tuple(paths)), labels, class_names, **columns).take(rows)


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


def read_pairs(file: str, images: Table, similar_from: float = 0.5) -> PairList:
    """Read pairs or triplets of the images of a list, a file of the same kinds.

    Its columns are `a`, `b` and `similar` (0 or 1, or false or true), or `a`, `b` and `similarity` (any number), or
    `anchor`, `positive` and `negative`. Images go by their path, relative to this file or as in the list, or by their
    `id` in the list.

    Args:
        file: The file.
        images: The rows of the list.
        similar_from: From which similarity on a pair is similar.

    Raises:
        UserError: A line is not as it should be, or two lines contradict each other; the message names them.
    """
    table = read_rows(file, (), sum(PAIR_COLUMNS, ()))
    columns = next((columns for columns in PAIR_COLUMNS if {*columns} == {*table.columns}), None)
    if columns is None:
        known = " or ".join(map(",".join, PAIR_COLUMNS))
        raise UserError(f"list: {file} must have the columns {known}; it has {','.join(table.columns)}")
    row_of = {os.path.normpath(path): row for row, path in enumerate(images.columns["path"])}
    if "id" in images.columns:
        images.check_distinct("id")
        row_of |= {name: row for row, name in enumerate(images.columns["id"])}
    folder, ends = os.path.dirname(file), columns[: 2 if "a" in columns else 3]
    rows = np.empty((len(table.lines), len(ends)), np.int64)
    for column, name in enumerate(ends):
        for line, cell in enumerate(table.columns[name]):
            beside = cell if is_remote(cell) else os.path.normpath(os.path.join(folder, cell))
            row = row_of.get(cell, row_of.get(beside, row_of.get(os.path.normpath(cell))))
            if row is None:
                raise UserError(f"{table.where(line)}: {name} {quoted(cell)} is no image of {images.path}")
            rows[line, column] = row
    found = PairList(rows, None, similar_from)
    if len(ends) == 2:
        values = []
        for line, cell in enumerate(table.columns[columns[2]]):
            where = table.where(line)
            with user_errors(ValueError, f"{where}: similarity must be a number, it is {quoted(cell)}"):
                values.append(float({"true": "1", "false": "0"}.get(cell, cell)))
        found = PairList(rows, np.array(values), similar_from)
    scored = found.scored()
    same = np.flatnonzero((scored[1:, :2] == scored[:-1, :2]).all(axis=1))
    if len(same):
        names = " and ".join(label_files.quoted(images.columns["path"][row]) for row in scored[same[0], :2].astype(int))
        raise UserError(f"list: {file}: {names} have two similarities; leave out one of the lines")
    return found


def linked_classes(pairs: PairList, size: int) -> np.ndarray:
    """Return a class of each image, (N,): those that similar pairs link, directly or through others, share one."""
    similar = pairs.similar()
    graph = scipy.sparse.coo_array((np.ones(len(similar)), similar.T), shape=(size, size))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def similar_images(pairs: PairList, size: int) -> Protocol:
    """Return the protocol of images without classes: right for a query are the images that are similar to it."""
    right: dict[int, list[int]] = {}
    for a, b in pairs.similar().tolist():
        right.setdefault(a, []).append(b)
        right.setdefault(b, []).append(a)
    return Protocol(_MEASURED, ids=np.arange(size), lists={"": (right, {})})


def read_rows(file: str, required: Sequence[str] = _REQUIRED, known: Sequence[str] = COLUMNS) -> Table:
    """Read the rows of a list, as text.

    Args:
        file: The list, see `read_list`.
        required: The columns that it must have; `labels` may stand for `label`.
        known: The columns that it may have.

    Returns:
        The columns that it has; `path` is relative to the working folder, or absolute.

    Raises:
        UserError: A line is not as it should be; the message names it.

    Example:
        >>> read_rows("photos/list.csv").columns["label"][0]
        'bus'
    """
    if file.lower().endswith(".parquet"):
        lines, columns = _parquet_columns(file, required, known)
    else:
        text = label_files.read_text("list", file)
        if not text.strip():
            raise UserError(f"list: {file} is empty; expected a CSV header with {', '.join(required)}, or JSON lines")
        is_json = file.lower().endswith(_JSON_EXTENSIONS) or text.lstrip().startswith("{")
        found = _json_rows(file, text, known) if is_json else _csv_rows(file, text, required, known)
        lines, rows = zip(*found, strict=True)
        used = set().union(*rows)
        used |= {*_needed(required, used)}
        columns = {column: [row.get(column, "") for row in rows] for column in known if column in used}
    table = Table("list", file, lines, columns)
    for column, values in columns.items():
        allowed = _VALUES.get(column)
        # Only training images may lack a value, and only that one.
        if column not in ("role", "labels") and "" in values:
            raise UserError(f"{table.where(values.index(''))}: no {column}")
        if allowed:
            table.check_cells(column, ("", *allowed).__contains__, " or ".join(allowed))
        if CONTROL.search("".join(values)):
            row = next(row for row, value in enumerate(values) if CONTROL.search(value))
            raise UserError(f"{table.where(row)}: the {column} has control characters: {quoted(values[row])}")
    folder = os.path.dirname(file)
    if "path" in columns:
        columns["path"] = [path if is_remote(path) else os.path.join(folder, path) for path in columns["path"]]
    return table


def _needed(required: Sequence[str], there: Container[str]) -> list[str]:
    """Return the columns that are required where some are there."""
    return [column for column in required if column != "label" or "labels" not in there]


def _parquet_columns(
    file: str, required: Sequence[str], known: Sequence[str]
) -> tuple[Sequence[int], dict[str, list[str]]]:
    """Return the numbers of the rows, and the columns as text."""
    import pyarrow as pa  # takes a while to import
    import pyarrow.parquet

    with user_errors((OSError, pa.ArrowException), f"list: {file} cannot be read as Parquet: {REASON}", keep="first"):
        with open_file(file) as opened:
            parquet = pa.parquet.ParquetFile(opened)
            names = parquet.schema_arrow.names
            found = parquet.read(columns=[name for name in known if name in names])
        columns = {name: _as_text(found[name], name == "labels") for name in found.column_names}
    lacking = [name for name in _needed(required, columns) if name not in columns]
    if lacking or not found.num_rows:
        fault = f"no column {lacking[0]}; it has {', '.join(map(quoted, names))}" if lacking else "no row"
        raise UserError(f"list: {file} has {fault}")
    return range(1, found.num_rows + 1), columns


def _as_text(column: Any, of_sets: bool) -> list[str]:
    """Return a column of Parquet as text; a column of sets may hold lists."""
    import pyarrow as pa

    if of_sets and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return [_BETWEEN.join(map(str, value or ())) for value in column.to_pylist()]
    return column.cast("string").fill_null("").to_pylist()


def _csv_rows(file: str, text: str, required: Sequence[str], known: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the line of every row, and its cells by column."""
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    found, line = [], 1
    try:
        for cells in reader:
            found.append((line, [cell.strip() for cell in cells]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"list: {file}, line {line}: not CSV ({error})") from None
    (line, header), *rows = [(line, row) for line, row in found if any(row)] or [(1, [])]
    where = f"list: {file}, line {line}"
    lacking = next((column for column in _needed(required, header) if column not in header), None)
    if lacking:
        raise UserError(f"{where}: the header has no column {lacking}; found {quoted(','.join(header))}")
    for i, column in enumerate(header):
        if column not in known or column in header[:i]:
            kind = "twice" if column in header[:i] else f"unknown; the columns are {', '.join(known)}"
            raise UserError(f"{where}: column {quoted(column)} is {kind}")
    if not rows:
        raise UserError(f"list: {file} has a header but no row")
    for line, row in rows:
        if len(row) != len(header):
            expected = f"expected {len(header)} cells as in the header, found {len(row)}"
            raise UserError(f"list: {file}, line {line}: {expected}")
    return [(line, dict(zip(header, row, strict=True))) for line, row in rows]


def _json_rows(file: str, text: str, known: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line of every object, and its values as text."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"list: {file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
            raise UserError(f"{where}: not JSON ({reason}); expected one JSON object a line") from None
        if not isinstance(row, dict):
            raise UserError(f'{where}: expected an object such as {{"path": "a.jpg"}}, found {quoted(row)}')
        for key, value in row.items():
            is_label = key.endswith("label")
            if key not in known:
                raise UserError(f"{where}: key {quoted(key)} is unknown; the keys are {', '.join(known)}")
            if key == "labels" and isinstance(value, list):
                value = _BETWEEN.join(map(str, value))
            elif key.startswith("similar") and isinstance(value, (bool, int, float)):
                value = str(value).lower()
            if not (value is None or isinstance(value, str) or (is_label and type(value) is int)):
                kind = "a string or an integer" if is_label else "a string"
                raise UserError(f"{where}: the {key} must be {kind}, it is {quoted(value)}")
            row[key] = "" if value is None else str(value)
        yield number, row


def _without_duplicates(table: Table) -> Table:
    """Return the table with each image once.

    Raises:
        UserError: Two rows of an image differ.
    """
    paths = table.columns["path"]
    first_row: dict[str, int] = {}
    for row, path in enumerate(paths):
        first = first_row.setdefault(os.path.normpath(path), row)
        if first == row:
            continue
        for column, values in table.columns.items():
            if column != "path" and values[row] != values[first]:
                raise UserError(f"{table.where(row)}: {quoted(path)} has another {column} on line {table.lines[first]}")
    kept = list(first_row.values())
    if len(kept) < len(paths):
        logging.warning("list: dropped %d rows of %s that repeat another.", len(paths) - len(kept), table.path)
    columns = {column: [values[row] for row in kept] for column, values in table.columns.items()}
    return Table("list", table.path, [table.lines[row] for row in kept], columns)


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
    is_test = np.array([value == "test" for value in table.columns["split"]])
    for name, rows in (("train", ~is_test), ("test", is_test)):
        if not rows.any():
            raise UserError(f"list: {table.path} has no row whose split is {name}")
    shared = np.intersect1d(labels[is_test], labels[~is_test]).tolist()
    label_files.warn_shared_classes("list", table.path, [class_names[label] for label in shared])
    return is_test


def _query_rows(table: Table, labels: np.ndarray, is_test: np.ndarray) -> np.ndarray | None:
    """Which rows are queries, (N,) bool; None without roles."""
    roles = np.array(table.columns.get("role", [""] * len(labels)))
    if "split" in table.columns and roles[~is_test].any():
        row = int(np.flatnonzero(~is_test & (roles != ""))[0])
        raise UserError(f"{table.where(row)}: a training image has the role {roles[row]}; only test images have one")
    lacking = is_test & (roles == "")
    if lacking.all(where=is_test):
        return None
    if lacking.any():
        row = int(np.flatnonzero(lacking)[0])
        raise UserError(f"{table.where(row)}: a test image has no role, where others have one")
    is_query, is_gallery = is_test & (roles == "query"), is_test & (roles == "gallery")
    for role, rows in (("query", is_query), ("gallery", is_gallery)):
        if not rows.any():
            raise UserError(f"list: {table.path} has roles, but no test image with the role {role}")
    table.check_queries(labels, is_query, is_gallery, lambda row: f"label {quoted(table.columns['label'][row])}")
    return is_query
