"""FIFOs, sockets and devices, which must not be taken for files that are there to be read."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def require_regular(path: str | os.PathLike) -> None:
    """Refuse a local path that is there but no regular file: opening a FIFO would wait for a writer for ever.

    Raises:
        OSError: There is no such file, it cannot be looked at, or it is a folder, FIFO, socket or device.

    Example:
        >>> require_regular(".")
        Traceback (most recent call last):
        IsADirectoryError: [Errno 21] Is a directory: '.'
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in _KINDS if test(mode)), "something special")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))
