"""Files that are there whole or not at all, and files that one process has for itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of the temporary names, for those who tidy up after a killed process.
PARTIAL_PREFIX = ".partial-"
# What file systems say that have no locks, such as some network disks.
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed onto it when the block ends well and removed when it does not.

    The temporary name keeps the suffix, which some writers go by.
    """
    temporary = path.with_name(f"{PARTIAL_PREFIX}{os.getpid()}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def hold(descriptor: int, wait: bool = True) -> None:
    """Keep an open file or folder from others who ask for it, until it is closed, at the latest by the process's end.

    Where the file system has no locks, nothing is held.

    Args:
        descriptor: Of the file or folder.
        wait: Wait for whoever has it.

    Raises:
        BlockingIOError: Another has it, and it is not to be waited for.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; numbers that are not finite become null."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(finite(value), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_lines(path: Path, values: list[dict]) -> None:
    """Write a JSON-lines file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(finite(value)) + "\n" for value in values), encoding="utf-8")


def finite(value: Any) -> Any:
    """The same structure with None for floats that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
