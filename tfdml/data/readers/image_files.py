"""The image files that folders, patterns and tables name, and those that are left out."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence

from PIL import Image

from tfdml.data.decoding import EXTENSIONS, format_of
from tfdml.data.images import in_threads
from tfdml.errors import UserError
from tfdml.io import files
from tfdml.names import composed, quoted, warn

UNPACK = "unpack the official image archive again"


def is_visible(name: str) -> bool:
    """Whether a file or folder may be an image or a class: no dot or tilde leads its name, no
    system has made it.

    Example:
        >>> is_visible("bus"), is_visible("Thumbs.db"), is_visible("~bus.tmp")
        (True, False, False)
    """
    return not name.startswith((".", "~")) and name.lower() not in _SYSTEM_FILES | _SYSTEM_FOLDERS


# Of operating systems, network disks and archives, in lower case. The files are in nobody's count.
_SYSTEM_FILES = {
    "thumbs.db",
    "ehthumbs.db",
    "ehthumbs_vista.db",
    "desktop.ini",
    ".ds_store",
    "icon\r",
}
_SYSTEM_FOLDERS = {
    "#recycle",
    "#snapshot",
    "$recycle.bin",
    "@eadir",
    "@recently-snapshot",
    "@recycle",
    "@tmp",
    "__macosx",
    "__pycache__",
    "found.000",
    "lost+found",
    "network trash folder",
    "system volume information",
    "temporary items",
}
# Of images that are not read, by Pillow's names.
_FOREIGN_FORMATS = ("GIF", "BMP", "TIFF", "ICO", "PSD", "JPEG2000", "AVIF")


class LeftOut:
    """Counts, by kind, the files that a reader does not take.

    Args:
        name: The data set, for messages.
        source: Where the files are.
    """

    def __init__(self, name: str, source: str):
        self.name = name
        self.source = source
        self.kinds = collections.Counter[str]()

    def images(self, paths: Sequence[str]) -> list[str]:
        """Return the paths of images, by their content where the extension is none of an image's;
        count the others."""
        unusual = [path for path in paths if not path.lower().endswith(EXTENSIONS)]
        kinds = in_threads(lambda index: _kind_of(unusual[index]), range(len(unusual)))
        others = {path: kind for path, kind in zip(unusual, kinds, strict=True) if kind}
        self.kinds.update(others.values())
        return [path for path in paths if path not in others]

    def visible(self, names: Sequence[str]) -> list[str]:
        """Return the names that may be images or classes; count the hidden ones and the folders of
        systems."""
        shown = list(filter(is_visible, names))
        for name in {*names} - {*shown}:
            if name.lower() in _SYSTEM_FOLDERS:
                self.kinds["system folder"] += 1
            elif name.lower() not in _SYSTEM_FILES and not name.startswith("._"):
                self.kinds["hidden"] += 1
        return shown

    def visible_paths(self, paths: Sequence[str], folder: str) -> list[str]:
        """Return the paths of which no part below a folder is hidden or a system's; count the
        others."""
        shown = []
        for path in paths:
            *folders, name = path[len(folder) :].strip("/").split("/")
            if not all(map(is_visible, folders)):
                self.kinds["in a hidden or system folder"] += 1
            elif self.visible([name]):
                shown.append(path)
        return shown

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common() if count)
        return f"{self.name}: {self.source}: left out {counts} (JPEG, PNG and WebP are read)"

    def report(self) -> None:
        """Warn of what is left out, if anything is."""
        if self.kinds.total():
            warn(str(self))


def _kind_of(path: str) -> str | None:
    """Return the kind of a file that is no image that is read; None for one that is."""
    with (
        contextlib.suppress(Exception),
        files.open_file(path, buffering=0) as file,
    ):  # a file system's own errors
        if format_of(file.read(16)):
            return None
        return Image.open(file, formats=_FOREIGN_FORMATS).format
    return os.path.splitext(path)[1].lower() or "without an extension"


def images_below(folder: str, left_out: LeftOut) -> list[str]:
    """Return the images below a folder, sorted. Links to folders are followed, to each folder once.

    Images are JPEG, PNG and WebP files by their content, whatever their names. Hidden files and
    folders and those that systems make are left out.

    Args:
        folder: A folder on a local disk or on any file system that `fsspec` knows.
        left_out: Counts the other files.

    Raises:
        UserError: A folder may not be read.
    """

    def refuse(error: Exception) -> None:
        # Without this a folder that may not be read would pass for an empty one.
        raise UserError(
            f"{left_out.name}: a folder below {folder} cannot be read ({error}); allow it or "
            "remove it"
        )

    def again(path: str) -> None:
        left_out.kinds["link to a folder that is read already"] += 1

    paths: list[str] = []
    for parent, folders, names in files.walk(folder, refuse, again):
        folders[:] = sorted(left_out.visible(folders))
        paths += [os.path.join(parent, name) for name in left_out.visible(names)]
    return sorted(left_out.images(paths))


def images_named(name: str, source: str) -> list[str]:
    """Return the images that a source names, and warn of other files.

    Args:
        name: What takes them, for messages.
        source: A file, which is taken whatever it holds, a folder for the images below it, or a
            pattern, see `tfdml.io.files.find`.

    Raises:
        UserError: There is no such file or folder, or no image.

    Example:
        >>> len(images_named("queries", "photos/*/0.jpg"))
        40
    """
    source = source if files.is_remote(source) else os.path.abspath(os.path.expanduser(source))
    if files.is_file(source):
        return [source]
    left_out = LeftOut(name, source)
    if files.is_folder(source):
        paths = images_below(source, left_out)
    else:
        # Where the pattern itself names a folder, it is wanted.
        folder = re.split(r"[*?]", source)[0].rpartition("/")[0]
        paths = left_out.images(left_out.visible_paths(files.find(source), folder))
    if not paths:
        raise UserError(
            str(left_out) if left_out.kinds.total() else f"{name}: {source} names no image"
        )
    left_out.report()
    return paths


def require_files(name: str, paths: Sequence[str], advice: str = UNPACK) -> tuple[str, ...]:
    """Return where files are, by one listing per folder: a stat per file takes minutes on a network
    disk.

    Args:
        name: The data set, for messages.
        paths: The files; those on the disk may have another Unicode form.
        advice: What to do if some are missing.

    Raises:
        UserError: Files are missing; the message has their number, the first of them, and a file of
            a similar name.

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
        names = names_in(folder, str)
        if file in names:
            return path
        parent: str | None = folder
        if not names and folder != path:
            parent = path_of(folder, form)
        if parent is None:
            return None
        match = names_in(parent, form).get(form(file))
        return None if match is None else os.path.join(parent, match)

    matches = [path_of(path, composed) for path in paths]
    if count := matches.count(None):
        path = paths[matches.index(None)]
        first = repr(path)  # whole, but on one line whatever is in it, and with spaces at its end
        plain = path.replace("\\", "/")
        in_home = os.path.expanduser(plain[max(plain.rfind("~/"), 0) :])
        similar = path_of(in_home, _outline) or path_of(plain, _outline)
        hint = f"; did you mean {quoted(similar)}?" if similar else ""
        raise UserError(
            f"{name}: {count} of {len(paths)} images are missing, first {first}{hint}; {advice}"
        )
    return tuple(path for path in matches if path is not None)


def _outline(path: str) -> str:
    """Return a path without what is easily mistaken: capitals, backslashes, the extension, the
    Unicode form."""
    return os.path.splitext(composed(path).replace("\\", "/").lower())[0]


def first_of(folder: str | os.PathLike, *names: str) -> str:
    """Return the path of the first of some files or folders that is there; of the first where none
    is.

    Args:
        folder: The folder.
        *names: Paths in it.

    Example:
        >>> first_of("photos", "train/bus", "bus")
        'photos/bus'
    """
    paths = [os.path.join(folder, name) for name in names]
    return next((path for path in paths if files.is_file(path) or files.is_folder(path)), paths[0])
