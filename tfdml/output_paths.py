"""Where a file may go: to local places, tried before the work; into devices and pipes, which are never replaced."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile

from tfdml.disk_space import unwritable
from tfdml.errors import UserError


def require_local(path: str | os.PathLike, argument: str) -> None:
    """Refuse a path of a file system of its own, which as a local one would be a folder called `gs:`.

    Args:
        path: The path.
        argument: The argument that names it.

    Raises:
        UserError: It is not local.

    Example:
        >>> require_local("runs/cars", "run_dir")
    """
    # A `Path` has made one slash of two.
    if re.match(r"\w+:/", os.fspath(path)):
        raise UserError(
            f"`{argument}={path}`: only local folders can be used here; name one, and copy it there and back with the "
            "tools of that file system"
        )


def require_writable(path: str | os.PathLike, argument: str) -> None:
    """Refuse, before any work, what is no place for a file; the trial leaves nothing.

    Args:
        path: Where a file is to be written.
        argument: The argument that names it.

    Raises:
        UserError: It is a folder or not local, its folder does not exist, or nothing can be written there.

    Example:
        >>> require_writable("metrics.json", "json")
    """
    require_local(path, argument)
    if os.path.isdir(path):
        raise UserError(f"`{argument}={path}` is a folder: name a file to write")
    if is_stream(path):
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise UserError(f"`{argument}={path}`: its folder does not exist")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(path, error) from error


def is_stream(path: str | os.PathLike) -> bool:
    """Whether a path leads to a device, a pipe or a socket, or to what this process prints to.

    Example:
        >>> is_stream("/dev/null")
        True
    """
    try:
        status = os.stat(path)
    except OSError:
        return False
    return not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or _printed_to(status) is not None


def copy_into_stream(source: str | os.PathLike, path: str | os.PathLike) -> None:
    """Writes the content of a file to where a path leads, behind what has been printed there.

    Args:
        source: The file.
        path: What `is_stream` is true of.

    Raises:
        UserError: It cannot be written.
        BrokenPipeError: The reader of this process's own output has had enough.

    Example:
        >>> copy_into_stream("photos/list.csv", "/dev/stdout")
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # A file that the output was redirected to has a place to go on at, which only its descriptor knows.
    own = _printed_to(os.stat(path))
    try:
        with open(source, "rb") as file, open(path if own is None else os.dup(own), "wb") as target:
            shutil.copyfileobj(file, target)
    except BrokenPipeError as error:
        if own is not None:
            raise
        raise UserError(f"{path} cannot be written: its reader has gone") from error
    except OSError as error:
        raise unwritable(path, error) from error


def _printed_to(status: os.stat_result) -> int | None:
    """Which of the process's own output streams a file is, by its descriptor."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
    return None
