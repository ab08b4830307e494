"""How much memory is free, a refusal in one line of what would take more, and the return of what was freed.

Without the refusal the kernel ends the process, or another one, without a message.
"""

import contextlib
import ctypes
import os
import pathlib

from tfdml.errors import UserError

_GIGABYTE = 2**30
# Of malloc.h of glibc.
_M_ARENA_MAX = -8


def free_memory() -> float:
    """Bytes of memory that the machine or container has left; infinite where that cannot be known.

    Example:
        >>> free_memory() > 0
        True
    """
    left = [float("inf")]
    meminfo = _text("/proc/meminfo")
    left += [1024.0 * int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    most, taken = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if most.isdigit() and taken.isdigit():
        # What the kernel keeps of files it gives up when memory is asked for.
        rows = (line.split() for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
        files = sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file"))
        left.append(float(int(most) - int(taken) + files))
    return min(left)


def require_memory(size: float, what: str, advice: str) -> None:
    """Refuse what would take more memory than is free.

    Args:
        size: The bytes that it takes, at least.
        what: What takes them, the subject of the message.
        advice: How to take less.

    Raises:
        UserError: It does not fit.

    Example:
        >>> require_memory(2**60, "a batch", "use smaller images")
        Traceback (most recent call last):
        tfdml.errors.UserError: a batch would take 1,073,741,824.0 GB of memory, and ... are free: use smaller images
    """
    free = free_memory()
    if size > free:
        lacking = f"{size / _GIGABYTE:,.1f} GB of memory, and {free / _GIGABYTE:,.1f} GB are free"
        raise UserError(f"{what} would take {lacking}: {advice}")


def return_freed_memory() -> None:
    """Return the memory that this process has freed to the system, where its allocator is glibc's.

    glibc keeps freed blocks that lie between used ones, and in a long run more and more of them.

    Example:
        >>> return_freed_memory()
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another allocator or system
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas(most: int = 2) -> None:
    """Let threads that have not allocated yet do so from few arenas, where the allocator is glibc's.

    What is freed in one arena is no use to another, so that with many of them memory grows along a long run. The
    variable of the environment MALLOC_ARENA_MAX, where it is set, counts instead.

    Args:
        most: How many arenas.

    Example:
        >>> share_arenas()
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # another allocator or system
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most)


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
