"""Full disks: refused before the work where the need is known, and told in one line where it was not."""

from __future__ import annotations

import errno
import os
import shutil

from tfdml.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
GO_ON = "what was finished is kept: free some space and run the same command again"


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no space left, whoever raised it.

    Example:
        >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
        True
    """
    return getattr(error, "errno", None) in _FULL or "No space left" in str(error)


def unwritable(path: str | os.PathLike, error: BaseException, size: int = 0) -> UserError:
    """What to tell of a file that could not be written.

    Args:
        path: The file.
        error: Why.
        size: About how many bytes it would have had; 0 where that is not known.

    Example:
        >>> str(unwritable("metrics.json", PermissionError(errno.EACCES, "Permission denied")))
        'metrics.json cannot be written (Permission denied)'
    """
    if is_disk_full(error):
        needs = f", and this file needs about {as_size(size)}" if size else ""
        return UserError(f"{path} cannot be written: the disk is full{needs}{_free_words(path)}; {GO_ON}")
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or type(error).__name__
    return UserError(f"{path} cannot be written ({reason})")


def require_space(folder: str | os.PathLike, needed: int, argument: str, what: str, advice: str = "") -> None:
    """Refuse work whose result the disk cannot hold.

    Args:
        folder: Where it goes; it need not exist yet.
        needed: About how many bytes.
        argument: The argument that names the folder.
        what: What needs them, in the plural.
        advice: What else could be done besides freeing space or naming another disk.

    Raises:
        UserError: Fewer bytes are free.

    Example:
        >>> require_space("records", 10, "out", "the records")
    """
    free = free_space(folder)
    if free is not None and needed > free:
        raise UserError(
            f"`{argument}={folder}`: {what} need about {as_size(needed)}, and {as_size(free)} are free; free some space"
            f"{',' if advice else ' or'} name another disk{f', or {advice}' if advice else ''}"
        )


def free_space(path: str | os.PathLike) -> int | None:
    """Free bytes on the disk of a file or folder, which need not exist yet; None where that cannot be known.

    Example:
        >>> free_space(".") > 0
        True
    """
    place = os.path.abspath(os.fspath(path))
    while not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def as_size(size: int) -> str:
    """A number of bytes in words.

    Example:
        >>> as_size(3 * 2**20), as_size(700)
        ('3.0 MB', '700 bytes')
    """
    return f"{size / 2**20:,.1f} MB" if size >= 2**20 / 10 else f"{size:,} bytes"


def _free_words(path: str | os.PathLike) -> str:
    device = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    free = None if device or "://" in os.fspath(path) else free_space(path)
    return "" if free is None else f" ({as_size(free)} are free)"
