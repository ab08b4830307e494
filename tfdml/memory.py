"""How much memory is free, and a refusal in one line of what would take more.

Without the refusal the kernel ends the process, or another one, without a message.
"""

import pathlib

import psutil

from tfdml.errors import UserError

_GIGABYTE = 2**30


def free_memory() -> float:
    """Bytes of memory that the machine or container has left.

    Example:
        >>> free_memory() > 0
        True
    """
    left = [float(psutil.virtual_memory().available)]
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


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
