"""Unpacks zip and tar archives without ever writing outside the folder meant, and whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from tfdml.errors import UserError

_BLOCK = 2**20
_MEGABYTE = 2**20
# A drive letter or a name that Windows reads as another path.
_FOREIGN = re.compile(r"^[A-Za-z]:|\\|\0")

# name, size, None for a folder or else what opens the member
_Member = tuple[str, int, Callable[[], IO[bytes]] | None]


def unpack(
    archive: str | os.PathLike,
    folder: str | os.PathLike,
    last: str | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[str]:
    """Unpacks a zip or tar archive into a folder.

    Args:
        archive: The archive.
        folder: Where its content is to lie. Nothing that is there already is touched.
        last: The top-level entry to move into place after all others, so that its presence says that all is there.
        progress: Called with the bytes written and all there are.

    Returns:
        The top-level entries that were made.

    Raises:
        UserError: The archive is damaged, or holds links or names that lead outside the folder; an entry is there
            already; or the disk is too small. Nothing is left behind.

    Example:
        >>> unpack("CUB_200_2011.tgz", "data", last="CUB_200_2011")
        ['attributes.txt', 'CUB_200_2011']
    """
    archive, folder = os.fspath(archive), os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, f".unpacking-{os.path.basename(archive)}")
    shutil.rmtree(place, ignore_errors=True)  # of an attempt that was cut short
    try:
        with _members(archive) as members:
            names = sorted({name.split("/")[0] for name, _, _ in members}, key=lambda name: (name == last, name))
            for name in names:
                if os.path.lexists(os.path.join(folder, name)):
                    raise UserError(f"{os.path.join(folder, name)} is there already; move it away to unpack {archive}")
            total, free = sum(size for _, size, _ in members), shutil.disk_usage(folder).free
            if total > free:
                raise UserError(
                    f"{archive} unpacks to {total / _MEGABYTE:,.0f} MB, and {free / _MEGABYTE:,.0f} MB are free in "
                    f"{folder}; free some space or name another disk"
                )
            _write(members, place, total, progress)
        for name in names:
            os.rename(os.path.join(place, name), os.path.join(folder, name))
        return names
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{archive} is not a whole archive ({error}); delete it and download it again") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{folder}: the disk is full while unpacking {archive}; free some space") from error
        # gzip reports damage by an OSError without a number.
        what = error.strerror or f"{error}; if it is damaged, delete it and download it again"
        raise UserError(f"{archive} cannot be unpacked into {folder} ({what})") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _members(archive: str) -> Iterator[list[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            yield _checked(archive, _of_zip(file))
    else:
        with tarfile.open(archive) as file:
            yield _checked(archive, _of_tar(archive, file))


def _of_zip(file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in file.infolist():
        # The upper half of the attributes is the Unix mode; 0o12 is a symbolic link.
        if info.external_attr >> 28 == 0o12:
            raise UserError(f"{file.filename} holds the link {info.filename!r}, and is not unpacked for safety")
        yield info.filename, info.file_size, None if info.is_dir() else functools.partial(file.open, info)


def _of_tar(archive: str, file: tarfile.TarFile) -> Iterator[_Member]:
    for info in file:
        if not (info.isfile() or info.isdir()):
            raise UserError(f"{archive} holds the link or device {info.name!r}, and is not unpacked for safety")
        opener = functools.partial(_opened, file, info) if info.isfile() else None
        yield info.name, info.size if opener else 0, opener


def _opened(file: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    opened = file.extractfile(info)
    assert opened is not None  # the member is a regular file
    return opened


def _checked(archive: str, members: Iterator[_Member]) -> list[_Member]:
    """The members with their names made plain, if all of them stay within the folder."""
    checked = []
    for name, size, opener in members:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or _FOREIGN.search(name):
            raise UserError(f"{archive} holds {name!r}, which leads outside its folder, and is not unpacked for safety")
        if parts:
            checked.append(("/".join(parts), size, opener))
    return checked


def _write(members: list[_Member], place: str, total: int, progress: Callable[[int, int], None]) -> None:
    done = 0
    os.makedirs(place)
    for name, _, opener in members:
        path = os.path.join(place, *name.split("/"))
        if opener is None:
            os.makedirs(path, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with opener() as source, open(path, "xb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
                done += len(block)
        progress(done, total)
