"""Files on this machine and behind URLs (`s3://`, `gs://`, `hdfs://`), listed and read through Arrow."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

from pyarrow import fs

from tfdml.errors import UserError, short_message
from tfdml.io.files import is_remote

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_URL = re.compile(r"(\w+)://([^/]+)/?(.*)")
_WILD = re.compile(r"[*?]")


@functools.cache
def _filesystem(scheme: str, authority: str) -> tuple[Any, str]:
    """The file system of a URL and the path of its root there."""
    try:
        return fs.FileSystem.from_uri(f"{scheme}://{authority}")
    except Exception as error:  # Arrow's own, and those of the clients behind it
        raise UserError(f"{scheme}://{authority} cannot be reached: {short_message(error, 'first')}") from error


def located(path: str) -> tuple[Any, str]:
    """The `pyarrow.fs.FileSystem` of a path or URL, and its path there.

    Raises:
        UserError: There is no such file system.

    Example:
        >>> located("/data/a.jpg")[1]
        '/data/a.jpg'
    """
    match = _URL.fullmatch(path)
    if match is None:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    filesystem, root = _filesystem(match[1], match[2])
    # Keys are taken as they are: a URL's escapes mean nothing in them.
    return filesystem, f"{root.rstrip('/')}/{match[3]}" if match[3] else root


def read_bytes(path: str) -> bytes:
    """The content of a file.

    Raises:
        OSError: It cannot be read.
    """
    filesystem, there = located(path)
    with filesystem.open_input_stream(there) as file:
        return file.read()


def find(pattern: str) -> Iterator[str]:
    """The files that a pattern names, folder by folder in the order of their names.

    Args:
        pattern: A path or URL with `*` and `?` (within a name) and `**` (any folders); without them a file, or a
            folder, for the images below it.

    Yields:
        Absolute paths, or URLs.

    Raises:
        UserError: There is no such folder, or it cannot be listed.

    Example:
        >>> list(find("no/such/folder/*.jpg"))
        Traceback (most recent call last):
        tfdml.errors.UserError: there is no folder no/such/folder
    """
    wild = _WILD.search(pattern)
    folder = (
        pattern if wild is None else pattern[: wild.start()].rpartition("/")[0] or ("/" if pattern[0] == "/" else ".")
    )
    rest = "**/*" if wild is None else pattern[len(folder.rstrip("/")) + 1 :] if folder != "." else pattern
    filesystem, there = located(folder)
    kind = _kind(filesystem, there, folder)
    if wild is None and kind == "File":
        yield folder if is_remote(folder) else there
        return
    if kind != "Directory":
        raise UserError(f"there is no folder {folder}" if wild else f"there is no file or folder {folder}")
    prefix = f"{folder.rstrip('/')}/" if is_remote(folder) else ""
    matches = re.compile(_as_regex(rest)).fullmatch
    depth = None if "**" in rest else rest.count("/")
    for path in _walk(filesystem, there, depth):
        below = path[len(there.rstrip("/")) + 1 :]
        if matches(below) and (wild or below.lower().endswith(IMAGE_SUFFIXES)):
            yield prefix + below if prefix else path


def _kind(filesystem: Any, path: str, shown: str) -> str:
    try:
        return filesystem.get_file_info(path).type.name
    except OSError as error:
        raise UserError(f"{shown} cannot be read: {short_message(error, 'first')}") from error


def _walk(filesystem: Any, folder: str, depth: int | None) -> Iterator[str]:
    """The files below a folder; holds the listing of one folder a level."""
    try:
        found = filesystem.get_file_info(fs.FileSelector(folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {short_message(error, 'first')}") from error
    for entry in sorted(found, key=lambda entry: entry.path):
        if entry.type == fs.FileType.File:
            yield entry.path
        elif entry.type == fs.FileType.Directory and depth != 0:
            yield from _walk(filesystem, entry.path, None if depth is None else depth - 1)


def _as_regex(pattern: str) -> str:
    """A pattern of files as a regular expression."""
    pieces = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda piece: pieces.get(piece[0]) or re.escape(piece[0]), pattern)
