"""Which images a bulk pass embeds: the files of a pattern, or the rows of a list in Parquet or CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tfdml.data.decoding import EXTENSIONS
from tfdml.embeddings.parquet import require_utf8
from tfdml.embeddings.reader import ROLE_NAMES
from tfdml.errors import UserError, short_message
from tfdml.io import files
from tfdml.io.files import is_remote

_LISTS = (".parquet", ".csv")
_ROWS = 65_536

Columns = dict[str, list]


def listed(source: str) -> Iterator[Columns]:
    """Yield the images that a source names, some at a time.

    Args:
        source: A pattern of paths or of URLs, see `tfdml.io.files.find`, of which there may be several with commas
            between; or a list, `*.parquet` or `*.csv`, with the column `path` and, where known, `label` (integers or
            names of classes) and `role`; a relative path is relative to the folder of the list.

    Yields:
        `path`, `label`, `class` and `role` of the images, as lists, with None where nothing is known.

    Raises:
        UserError: It names nothing, or the list is not as it should be.

    Example:
        >>> sum(len(images["path"]) for images in listed("photos/**/*.jpg"))
        12
    """
    if source.endswith(_LISTS):
        yield from _of_list(source)
        return
    held: list[str] = []
    for pattern in source.split(","):
        for path in files.find(pattern, EXTENSIONS):
            held.append(path)
            if len(held) == _ROWS:
                yield _without_labels(held)
                held = []
    if held:
        yield _without_labels(held)


def _without_labels(paths: list[str]) -> Columns:
    require_utf8(paths)
    nothing = [None] * len(paths)
    return {"path": paths, "label": nothing, "class": nothing, "role": nothing}


def _of_list(source: str) -> Iterator[Columns]:
    read = _parquet_rows if source.endswith(".parquet") else _csv_rows
    folder = source.rpartition("/")[0] if is_remote(source) else os.path.dirname(os.path.abspath(source))
    labels = {label for rows in read(source) for label in rows.get("label", ())}
    if None in labels and len(labels) > 1:
        raise UserError(f"{source}: some rows have no label; all must have one, or none")
    ids = _ids_of(labels)
    for rows in read(source):
        paths = [_absolute(path, folder, source) for path in rows["path"]]
        roles = rows.get("role") or [None] * len(paths)
        unknown = set(roles) - {*ROLE_NAMES, None}
        if unknown:
            raise UserError(f"{source}: unknown role {min(map(str, unknown))!r}; one of {', '.join(ROLE_NAMES)}")
        names = rows.get("label") or [None] * len(paths)
        shown = [None if name is None else str(name) for name in names]
        yield {"path": paths, "label": [ids[name] for name in names], "class": shown, "role": roles}


def _ids_of(labels: set) -> dict[Any, int | None]:
    """Return the class id of each label: integers are ids, names get theirs in sorted order."""
    if labels <= {None}:
        return {None: None}
    try:
        if all(isinstance(label, int) or str(int(label)) == label for label in labels):
            return {label: int(label) for label in labels}
    except ValueError:
        pass
    return {label: number for number, label in enumerate(sorted(labels, key=str))}


def _absolute(path: Any, folder: str, source: str) -> str:
    if not isinstance(path, str) or not path:
        raise UserError(f"{source}: a row has no path")
    return path if is_remote(path) or os.path.isabs(path) else f"{folder}/{path}"


def _parquet_rows(source: str) -> Iterator[dict[str, list]]:
    try:
        with files.open_file(source) as opened:
            file = pq.ParquetFile(opened)
            names = file.schema_arrow.names
            if "path" not in names:
                raise UserError(f"{source} has no column path; it has {', '.join(names)}")
            wanted = [name for name in ("path", "label", "role") if name in names]
            for batch in file.iter_batches(_ROWS, columns=wanted):
                yield batch.to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{source} cannot be read as Parquet: {short_message(error, 'first')}") from error


def _csv_rows(source: str) -> Iterator[dict[str, list]]:
    try:
        with files.open_file(source) as opened:
            rows = csv.DictReader(io.TextIOWrapper(opened, "utf-8", newline=""))
            names = rows.fieldnames or []
            if "path" not in names:
                raise UserError(f"{source} has no column path; it has {', '.join(names)}")
            wanted = [name for name in ("path", "label", "role") if name in names]
            held: dict[str, list] = {name: [] for name in wanted}
            for row in rows:
                for name in wanted:
                    held[name].append(row[name] or None)
                if len(held["path"]) == _ROWS:
                    yield held
                    held = {name: [] for name in wanted}
            if held["path"]:
                yield held
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{source} cannot be read: {short_message(error, 'first')}") from error


def in_parts(images: Iterator[Columns], rows: int) -> Iterator[Columns]:
    """Yield the same images, so many at a time; the last may be fewer.

    Example:
        >>> [part["path"] for part in in_parts(iter([{"path": ["a", "b", "c"]}, {"path": ["d"]}]), 2)]
        [['a', 'b'], ['c', 'd']]
    """
    held: Columns = {}
    for some in images:
        held = {name: held.get(name, []) + values for name, values in some.items()}
        count = len(held["path"])
        for first in range(0, count - count % rows, rows):
            yield {name: values[first : first + rows] for name, values in held.items()}
        held = {name: values[count - count % rows :] for name, values in held.items()}
    if held.get("path"):
        yield held
