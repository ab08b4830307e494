"""Label files: text and tables read strictly, columns checked, and images looked for a folder at a time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset, access_fault
from tfdml.data.decoding import EXTENSIONS, FORMATS
from tfdml.data.images import FileImages, kinds_of
from tfdml.errors import UserError
from tfdml.io import files

# Characters that no valid path has, and that break a file system, a log or a report; the last are what Python
# makes of a name that is no UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

_LONGEST_QUOTE = 120
_UNPACK = "unpack the official image archive again"


# What folders and cells are called that name a part of the data, in lower case.
_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "holdout", "hold_out", "heldout", "held_out", "eval", "evaluation"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("query", "queries"), "query"),
    "gallery": "gallery",
}


def part_of(name: str) -> str | None:
    """Return which part of the data a folder or a cell of this name is; None where it is no usual name of one.

    Example:
        >>> part_of("Valid"), part_of("bus")
        ('validation', None)
    """
    return _PARTS.get(name.lower().replace("-", "_"))


def composed(text: str) -> str:
    """Return text in the composed Unicode form (NFC): file systems and lists spell an accent in one or two characters.

    Example:
        >>> composed("cafe\u0301") == "caf\u00e9"
        True
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


@functools.lru_cache(maxsize=1024)
def warn(text: str) -> None:
    """Log a warning, once: both splits of a data set are read from the same files."""
    logging.warning("%s", text)


# Of operating systems, network disks and archives, in lower case. They are in nobody's count.
_SYSTEM_FILES = {"@eadir", "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", ".ds_store"}


def is_visible(name: str) -> bool:
    """Whether a file or folder may be an image or a class: no dot or tilde leads its name, no system has made it.

    Example:
        >>> is_visible("bus"), is_visible("Thumbs.db"), is_visible("~bus.tmp")
        (True, False, False)
    """
    return not name.startswith((".", "~")) and name.lower() not in _SYSTEM_FILES


class LeftOut:
    """Counts, by kind, the files that a reader does not take.

    Args:
        name: The data set, for messages.
        source: Where the files are.
    """

    def __init__(self, name: str, source: str):
        self.name, self.source, self.kinds = name, source, collections.Counter[str]()

    def images(self, paths: Sequence[str]) -> list[str]:
        """Return the paths of images, by their content where the extension is none of an image's; count the others."""
        unknown = [path for path in paths if not path.lower().endswith(EXTENSIONS)]
        kinds = dict(zip(unknown, kinds_of(unknown), strict=True)) if unknown else {}
        read = {known.name for known in FORMATS}
        foreign = {path: kind for path, kind in kinds.items() if kind not in read}
        for path, kind in foreign.items():
            extension = os.path.splitext(path)[1].lower()
            self.kinds[kind or extension or "without an extension"] += 1
        return [path for path in paths if path not in foreign]

    def visible(self, names: Iterable[str]) -> list[str]:
        """Return the names that may be images or classes; count the hidden ones, but for those of a system."""
        names = list(names)
        self.kinds["hidden"] += sum(
            not is_visible(name) and name.lower() not in _SYSTEM_FILES and not name.startswith("._") for name in names
        )
        return [name for name in names if is_visible(name)]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common() if count)
        return f"{self.name}: {self.source}: left out {counts} (JPEG, PNG and WebP are read)"

    def report(self) -> None:
        """Warn of what is left out, if anything is."""
        if self.kinds.total():
            warn(str(self))


def images_below(folder: str, left_out: LeftOut) -> list[str]:
    """Return the images below a folder, sorted. Links to folders are followed, to each folder once.

    Args:
        folder: A folder on a local disk or on any file system that `fsspec` knows.
        left_out: Counts the other files.

    Raises:
        UserError: A folder may not be read.
    """

    def refuse(error: Exception) -> None:
        # Without this a folder that may not be read would pass for an empty one.
        raise UserError(f"{left_out.name}: a folder below {folder} cannot be read ({error}); allow it or remove it")

    paths: list[str] = []
    seen: set[str] = set()
    for parent, folders, names in files.walk(folder, refuse):
        place = parent if files.is_remote(parent) else os.path.realpath(parent)
        if place in seen:
            left_out.kinds["link to a folder that is read already"] += 1
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(left_out.visible(folders))
        paths += [os.path.join(parent, name) for name in left_out.visible(names)]
    return sorted(left_out.images(paths))


def images_named(name: str, source: str) -> list[str]:
    """Return the images that a source names, and warn of other files.

    Args:
        name: What takes them, for messages.
        source: A file, which is taken whatever it holds, a folder for the images below it, or a pattern, see
            `tfdml.io.files.find`.

    Raises:
        UserError: There is no such file or folder, or no image.

    Example:
        >>> len(images_named("queries", "photos/*/0.jpg"))
        4
    """
    source = source if files.is_remote(source) else os.path.abspath(os.path.expanduser(source))
    if files.is_file(source):
        return [source]
    left_out = LeftOut(name, source)
    if files.is_folder(source):
        paths = images_below(source, left_out)
    else:
        files_there = files.find(source) if files.is_remote(source) or "[" not in source else _matches(source)
        paths = left_out.images([path for path in files_there if left_out.visible([os.path.basename(path)])])
    if not paths:
        raise UserError(str(left_out) if left_out.kinds.total() else f"{name}: {source} names no image")
    left_out.report()
    return paths


def _matches(pattern: str) -> list[str]:
    """Return the files of a pattern with brackets, which are signs of a name, or else a set of signs."""
    literal = glob.glob(pattern.replace("[", "[[]"), recursive=True)
    return sorted(filter(os.path.isfile, literal or glob.glob(pattern, recursive=True)))


def quoted(value: object) -> str:
    """Return a value from a file for an error message: on one line, printable, not too long.

    Example:
        >>> quoted("a.jpg")
        "'a.jpg'"
    """
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."


def read_text(name: str, path: str) -> str:
    """Read a text file in UTF-8, with or without a byte order mark; every line end becomes a line feed.

    Args:
        name: The data set, for messages.
        path: A file on a local disk or on any file system that `fsspec` knows.

    Raises:
        UserError: The file is missing, may not be read, is not UTF-8 or has a NUL byte.

    Example:
        >>> len(read_text("cub200", "data/CUB_200_2011/classes.txt").splitlines())
        200
    """
    try:
        data = files.read_bytes(path)
    except Exception as error:  # remote file systems have their own error types
        raise UserError(f"{name}: {path} is {access_fault(error)}; check data_dir") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}: {path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{name}: {path}, line {line}: a NUL byte, which no text has; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def official_root(name: str, data_dir: str | os.PathLike, folder: str, marker: str) -> str:
    """Return the folder of an official archive: `data_dir` itself, or `folder` in it.

    Args:
        name: The data set, for messages.
        data_dir: What the user gave.
        folder: What the archive unpacks to.
        marker: A file that lies in it.

    Raises:
        UserError: The file is in neither.

    Example:
        >>> official_root("cub200", "data", "CUB_200_2011", "images.txt")
        'data/CUB_200_2011'
    """
    found = one_of(data_dir, marker, os.path.join(folder, marker))
    if not files.is_file(found):
        inner = os.path.join(data_dir, folder)
        raise UserError(f"{name}: found no {marker} in {data_dir} or {inner}; unpack the official {folder} there")
    return os.path.dirname(found)


def check_count(wanted: bool, name: str, what: str, expected: int, found: int, source: str) -> None:
    """Compare a number with the published one.

    Args:
        wanted: Whether it is compared: `check_counts` of the readers.
        name: The data set.
        what: What is counted, e.g. `"train images"`.
        expected: The published number.
        found: The number found.
        source: Where it was found.

    Raises:
        UserError: They differ.

    Example:
        >>> check_count(True, "sop", "train images", 59_551, 59_551, "Ebay_train.txt")
    """
    if wanted and found != expected:
        advice = "unpack or download the official archive again, or pass check_counts=False for a part of the data set"
        raise UserError(f"{name}: expected {expected:,} {what} in {source}, found {found:,}; {advice}")


def require_files(
    name: str, paths: Sequence[str], advice: str = _UNPACK, origins: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return where files are, by one listing per folder: a stat per file takes minutes on a network disk.

    Args:
        name: The data set, for messages.
        paths: The files; those on the disk may have another Unicode form.
        advice: What to do if some are missing.
        origins: Where each path was read, for the message.

    Raises:
        UserError: Files are missing; the message has their number, the first of them, and a file of a similar name.

    Example:
        >>> require_files("cub200", ["photos/bus/0.jpg"])
        ('photos/bus/0.jpg',)
    """

    @functools.cache
    def names_in(folder: str, form: Callable[[str], str]) -> dict[str, str]:
        with contextlib.suppress(Exception):  # no permission, or a name that no file system takes
            return {form(file): file for file in files.listing(folder or ".")}
        return {}

    def path_of(path: str, form: Callable[[str], str]) -> str | None:
        """Return the path that is there and has the same form."""
        folder, file = os.path.split(path)
        if file in names_in(folder, str):
            return path
        parent = folder if names_in(folder, str) or folder == path else path_of(folder, form)
        match = None if parent is None else names_in(parent, form).get(form(file))
        return None if match is None or parent is None else os.path.join(parent, match)

    matches = [path_of(path, composed) for path in paths]
    missing = [row for row, path in enumerate(matches) if path is None]
    if missing:
        path = paths[missing[0]]
        first = repr(path)[1:-1]  # whole, but on one line whatever is in it
        origin = f" ({origins[missing[0]]})" if origins is not None else ""
        plain = path.replace("\\", "/")
        similar = path_of(os.path.expanduser(plain[max(plain.rfind("~/"), 0) :]), _outline) or path_of(plain, _outline)
        hint = f"; did you mean {quoted(similar)}?" if similar else ""
        count = f"{len(missing)} of {len(paths)} images are missing"
        raise UserError(f"{name}: {count}, first {first}{origin}{hint}; {advice}")
    return tuple(path for path in matches if path is not None)


def _outline(path: str) -> str:
    """Return a path without what is easily mistaken: capitals, backslashes, the extension, the Unicode form."""
    return os.path.splitext(composed(path).replace("\\", "/").lower())[0]


def near_miss(path: str, paths: Iterable[str]) -> str:
    """Return a hint at one of several paths that a path may mean, for the end of a message; empty where none may be.

    Example:
        >>> near_miss("bus/0.JPG", ["bus/0.jpg", "van/0.jpg"])
        "; did you mean 'bus/0.jpg'?"
    """
    similar = next((other for other in paths if _outline(other) == _outline(path)), None)
    return f"; did you mean {quoted(similar)}?" if similar else ""


def split_classes(name: str, source: str, classes: list, test_fraction: float, alternative: str) -> dict[str, list]:
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
        raise UserError(f"{name}: {source} has one class only ({quoted(classes)}); give it two, or {alternative}")
    held_out = min(max(int(len(classes) * test_fraction + 0.5), 1), len(classes) - 1)
    return {"train": classes[:-held_out], "test": classes[-held_out:]}


def warn_shared_classes(name: str, source: str, shared: list) -> None:
    """Count, in a warning, the classes that are in both splits.

    Args:
        name: The data set, for messages.
        source: Where the splits are from.
        shared: The names of these classes.
    """
    if len(shared):
        first = f"(the first is {shared[0]}): metrics are not zero-shot."
        warn(f"{name}: {len(shared)} classes are in both train and test of {source} {first}")


# 18 digits always fit in 64 bits.
_MOST_DIGITS = 18


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a label file, as text, with checks whose messages name the lines.

    Args:
        name: The data set, for messages.
        path: The file.
        lines: The line of every row, from 1.
        columns: The cells of each column, in the order of the file.
    """

    name: str
    path: str
    lines: Sequence[int]
    columns: dict[str, list[str]]

    def where(self, *rows: int) -> str:
        """Return the data set, the file, and the line of a row or the lines of two, for messages."""
        lines = " and ".join(str(self.lines[row]) for row in rows)
        return f"{self.name}: {self.path}, line{'s' if len(rows) > 1 else ''} {lines}"

    def take(self, rows: Sequence[int]) -> Table:
        """Return the table of these rows, in that order."""
        columns = {column: [values[row] for row in rows] for column, values in self.columns.items()}
        return Table(self.name, self.path, [self.lines[row] for row in rows], columns)

    def integers(self, column: str, low: int = 0, high: int = 10**18) -> np.ndarray:
        """Return a column of whole numbers as (N,) int64.

        Args:
            column: The name of the column.
            low: The smallest permitted number, not negative.
            high: The largest.

        Raises:
            UserError: A cell is no whole number from `low` to `high`; the message names its line.

        Example:
            >>> read_table("cub200", "data/CUB_200_2011/classes.txt", ("id", "name")).integers("id", 1, 200)[-2:]
            array([199, 200])
        """
        values = self.columns[column]
        # int() alone would take 1_0, or the digits of other scripts. All cells at once: a loop costs as much as the
        # rest.
        together = "".join(values)
        if together.isdigit() and together.isascii() and max(map(len, values)) <= _MOST_DIGITS:
            numbers = np.fromiter(map(int, values), np.int64, len(values))
            outside = np.flatnonzero((numbers < low) | (numbers > high))
            if not len(outside):
                return numbers
            row = int(outside[0])
        else:
            row = next(i for i, v in enumerate(values) if not (v.isdigit() and v.isascii() and len(v) <= _MOST_DIGITS))
        raise UserError(f"{self.where(row)}: {column} is {quoted(values[row])}, no whole number of {low:,} to {high:,}")

    def check_cells(self, column: str, is_right: Callable[[str], Any], expected: str) -> None:
        """Refuses a column with a cell that is not as it should be.

        Args:
            column: The name of the column.
            is_right: Whether a cell is.
            expected: What it must be, for the message.

        Raises:
            UserError: One is not; the message names its line.
        """
        cells = self.columns[column]
        wrong = next((row for row, cell in enumerate(cells) if not is_right(cell)), None)
        if wrong is not None:
            raise UserError(f"{self.where(wrong)}: {column} must be {expected}, it is {quoted(cells[wrong])}")

    def check_distinct(self, column: str, values: Sequence[str] | None = None) -> None:
        """Refuses a column in which a value comes twice, whatever the rest of the rows says.

        Args:
            column: The name of the column.
            values: What its cells mean, in their place.

        Raises:
            UserError: A value comes twice; the message names both lines, and how many rows repeat another.
        """
        values = self.columns[column] if values is None else values
        if len(set(values)) == len(values):
            return
        first: dict[str, int] = {}
        row = next(row for row, value in enumerate(values) if first.setdefault(value, row) != row)
        raise UserError(f"{self.where(first[values[row]], row)}: {column} {quoted(values[row])} comes twice")

    def check_one_to_one(self, columns: tuple[str, str], keys: np.ndarray, values: np.ndarray) -> None:
        """Refuses a table in which rows of one key have different values, such as a class in two super-classes.

        Args:
            columns: What keys and values are called.
            keys: (N,) the key of every row.
            values: (N,) its value.

        Raises:
            UserError: A key has two values; the message names both lines.
        """
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        wrong = np.flatnonzero(values != values[first][of])
        if len(wrong):
            row = int(wrong[0])
            other = int(first[of[row]])
            where = self.where(other, row)
            raise UserError(f"{where}: {columns[0]} {keys[row]} has {columns[1]} {values[other]} and {values[row]}")

    def check_queries(
        self, labels: np.ndarray, is_query: np.ndarray, is_gallery: np.ndarray, label_of: Callable[[int], str]
    ) -> None:
        """Refuses queries none of which the gallery can answer; counts, in a warning, those that it cannot.

        Args:
            labels: (N,) class ids.
            is_query: (N,) bool.
            is_gallery: (N,) bool.
            label_of: What to call the label of a row, e.g. `"label 'cat'"`.

        Raises:
            UserError: Queries and gallery have no class in common.
        """
        hopeless = is_query & ~np.isin(labels, labels[is_gallery])
        count, total = int(hopeless.sum()), int(is_query.sum())
        if not count:
            return
        row = int(np.flatnonzero(hopeless)[0])
        first = f"line {self.lines[row]}, {label_of(row)}"
        if count == total:
            raise UserError(f"{self.name}: {self.path}: no query has its class in the gallery (the first: {first})")
        lacking = f"the classes of {count} of {total} queries of {self.path} are not in the gallery"
        warn(f"{self.name}: {lacking} (the first: {first}).")


def read_table(name: str, path: str, columns: Sequence[str], *, first_line: int = 1, header: bool = False) -> Table:
    """Read a table whose columns are separated by white space, as the official label files are.

    Args:
        name: The data set, for messages.
        path: The file.
        columns: What its columns are called.
        first_line: The line at which the table begins, from 1.
        header: Whether its first line repeats the names of the columns.

    Returns:
        The table; blank lines are left out.

    Raises:
        UserError: The file cannot be read, the header is another, a line has another number of columns, or there
            is no row.

    Example:
        >>> classes = read_table("cub200", "data/CUB_200_2011/classes.txt", ("id", "name"))
        >>> classes.columns["id"][-1], classes.lines[-1]
        ('200', 200)
    """
    lines = read_text(name, path).split("\n")[first_line - 1 :]
    if header:
        found = lines[0] if lines else ""
        if found.split() != list(columns):
            raise UserError(f"{name}: {path}, line {first_line}: no header {' '.join(columns)!r} but {quoted(found)}")
        lines, first_line = lines[1:], first_line + 1
    numbers = []
    for line, text in enumerate(lines, first_line):
        row = text.split()
        if row:
            numbers.append(line)
        if len(row) not in (0, len(columns)):
            raise UserError(f"{name}: {path}, line {line}: expected {len(columns)} columns, found {len(row)}")
    # Split again as a whole: 100,000 small lists kept would cost more, in garbage collection.
    cells = "\n".join(lines).split()
    if not cells:
        raise UserError(f"{name}: {path} has no row; download it again")
    return Table(name, path, numbers, {column: cells[i :: len(columns)] for i, column in enumerate(columns)})


def warn_singleton_classes(name: str, split: str, labels: np.ndarray, class_names: dict[int, str]) -> None:
    """Count, in a warning, the classes of a single image, which have no pair to learn from or to be found by.

    Args:
        name: The data set, for messages.
        split: `"train"`, or `"test"` for images that are looked up among each other.
        labels: (N,) class ids.
        class_names: The name of each id.
    """
    classes, counts = np.unique(labels, return_counts=True)
    lone = classes[counts == 1]
    if len(lone):
        effect = "they give no positive pair" if split == "train" else "as queries they are left out of the metrics"
        text = "%s: %d of %d %s classes have one image only (the first is %s): %s."
        logging.warning(text, name, len(lone), len(classes), split, class_names[int(lone[0])], effect)


def images_in_files(
    name: str,
    split: str,
    paths: Sequence[str],
    labels: Any,
    class_names: dict[int, str] | None = None,
    advice: str = _UNPACK,
    **columns: Any,
) -> ImageDataset:
    """Return the data set of images in files, which must all be there.

    Args:
        name: The data set.
        split: Its split.
        paths: The files.
        labels: (N,) their classes.
        class_names: See `ImageDataset`.
        advice: What to do if some are missing.
        **columns: See `ImageDataset`.

    Raises:
        UserError: Files are missing.

    Example:
        >>> images_in_files("cub200", "test", ["photos/bus/0.jpg", "photos/bus/1.jpg"], [3, 3]).num_classes
        1
    """
    images = FileImages(require_files(name, paths, advice))
    return ImageDataset(name, split, images, labels, class_names, **columns)  # type: ignore[arg-type]


def one_of(folder: str | os.PathLike, *names: str) -> str:
    """Return the path of the first of some files or folders that is there; of the first where none is.

    Args:
        folder: The folder.
        *names: Paths in it.

    Example:
        >>> one_of("photos", "train/bus", "bus")
        'photos/bus'
    """
    paths = [os.path.join(folder, name) for name in names]
    return next((path for path in paths if files.is_file(path) or files.is_folder(path)), paths[0])
