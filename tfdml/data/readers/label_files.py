"""What the readers of file lists share: text read strictly, and images looked for a folder at a time."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Sequence

from tfdml import storage
from tfdml.errors import UserError

# Characters that no valid path has, and that break a file system, a log or a report; the last are what Python
# makes of a name that is no UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

_LONGEST_QUOTE = 120


def quoted(value: object) -> str:
    """A value from a file for an error message: on one line, printable, not too long.

    Example:
        >>> quoted("a.jpg")
        "'a.jpg'"
    """
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."


def read_text(name: str, path: str) -> str:
    """Reads a text file in UTF-8, with or without a byte order mark; every line end becomes a line feed.

    Args:
        name: The data set, for messages.
        path: A file on a local disk or on any file system that `tf.io.gfile` knows.

    Raises:
        UserError: The file is missing, may not be read, is not UTF-8 or has a NUL byte.

    Example:
        >>> len(read_text("cub200", "data/CUB_200_2011/classes.txt").splitlines())
        200
    """
    data = _read_bytes(name, path)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name}: {path}, line 1: not UTF-8 text but UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}: {path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(
            f"{name}: {path}, line {line}: a NUL byte, which no text has; save the file as UTF-8, or if it is damaged "
            "get it again"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def official_root(name: str, data_dir: str | os.PathLike, folder: str, marker: str) -> str:
    """The folder of an official archive: `data_dir` itself, or `folder` in it.

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
    root = os.fspath(data_dir)
    inner = os.path.join(root, folder)
    for candidate in (root, inner):
        if storage.is_file(os.path.join(candidate, marker)):
            return candidate
    raise UserError(
        f"{name}: found no {marker} in {root} or {inner}; data_dir must be the official {folder} as unpacked, or "
        "the folder that it lies in"
    )


def check_count(name: str, what: str, expected: int, found: int, source: str) -> None:
    """Compares a number with the published one.

    Args:
        name: The data set.
        what: What is counted, e.g. `"train images"`.
        expected: The published number.
        found: The number found.
        source: Where it was found.

    Raises:
        UserError: They differ.

    Example:
        >>> check_count("sop", "train images", 59_551, 59_551, "Ebay_train.txt")
    """
    if found != expected:
        raise UserError(
            f"{name}: expected {expected:,} {what} in {source}, found {found:,}; unpack or download the official "
            "archive again, or pass check_counts=False for a part of the data set"
        )


def require_files(
    name: str,
    paths: Sequence[str],
    advice: str = "unpack the official image archive again",
    origins: Sequence[str] | None = None,
) -> None:
    """Checks that files are there, by one listing per folder: a stat per file takes minutes on a network disk.

    Args:
        name: The data set, for messages.
        paths: The files.
        advice: What to do if some are not.
        origins: Where each path was read, for the message.

    Raises:
        UserError: Files are missing; the message has their number and the first of them.

    Example:
        >>> require_files("cub200", ["photos/bus/0.jpg", "photos/bus/1.jpg"])
    """
    present: dict[str, set[str]] = {}
    missing = []
    for index, path in enumerate(paths):
        folder, file = os.path.split(path)
        if folder not in present:
            present[folder] = _listing(folder)
        if file not in present[folder]:
            missing.append(index)
    if missing:
        first = repr(paths[missing[0]])[1:-1]  # whole, but on one line whatever is in it
        origin = f" ({origins[missing[0]]})" if origins is not None else ""
        raise UserError(
            f"{name}: {len(missing)} of {len(paths)} images are missing, the first is {first}{origin}; {advice}"
        )


def held_out_classes(num_classes: int, test_fraction: float) -> int:
    """How many classes, the last in order, are the test split; each split gets at least one.

    Args:
        num_classes: All classes, two or more.
        test_fraction: The share asked for.

    Example:
        >>> held_out_classes(10, 0.25)
        3
    """
    return min(max(int(num_classes * test_fraction + 0.5), 1), num_classes - 1)


def _read_bytes(name: str, path: str) -> bytes:
    if not storage.is_file(path):
        kind = "is a folder, not a file" if storage.is_folder(path) else "is missing"
        raise UserError(f"{name}: {path} {kind}; check data_dir")
    try:
        return storage.read_bytes(path)
    except Exception as error:  # remote file systems have their own error types
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(f"{name}: {path} cannot be read ({reason})") from error


def _listing(folder: str) -> set[str]:
    try:
        return set(storage.listing(folder or "."))
    except Exception:  # no permission, or a name that no file system takes
        return set()
