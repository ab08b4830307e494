"""Small file operations alike on local disks and on any file system that `tf.io.gfile` knows."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import tensorflow as tf

from tfdml.errors import UserError


def is_remote(path: str) -> bool:
    """Whether a path names a file system of its own, such as `gs://`.

    Example:
        >>> is_remote("gs://bucket/file")
        True
    """
    return "://" in path


def read_bytes(path: str) -> bytes:
    """The content of a file.

    Raises:
        OSError: A local file cannot be read.
        tf.errors.OpError: A remote file cannot be read.

    Example:
        >>> read_bytes("records/manifest.json")[:1]  # doctest: +SKIP
        b'{'
    """
    if is_remote(path):
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    with open(path, "rb") as file:
        return file.read()


def size_of(path: str) -> int | None:
    """The length of a file in bytes; None if there is no such file.

    Example:
        >>> size_of("no/such/file") is None
        True
    """
    try:
        if is_remote(path):
            found = tf.io.gfile.stat(path)
            return None if found.is_directory else found.length
        return os.stat(path).st_size if os.path.isfile(path) else None
    except (OSError, tf.errors.OpError):
        return None


def stamp_of(path: str) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds; (0, 0) if the file cannot be looked at.

    Example:
        >>> stamp_of("no/such/file")
        (0, 0)
    """
    try:
        if is_remote(path):
            found = tf.io.gfile.stat(path)
            return found.length, found.mtime_nsec
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    except (OSError, tf.errors.OpError):
        return 0, 0


def listing(folder: str) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    Example:
        >>> listing("no/such/folder")
        []
    """
    try:
        return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    except tf.errors.NotFoundError:
        return []


def remove(path: str) -> None:
    """Removes a file if it is there.

    Example:
        >>> remove("no/such/file")
    """
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


@contextlib.contextmanager
def whole_file(path: str, size: int = 0) -> Iterator[str]:
    """A temporary path beside `path`: renamed onto it when the block ends well, removed when it does not.

    Args:
        path: The file to be written.
        size: About how many bytes it will have, for the message when the disk is full.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> with whole_file("records/train.npz") as temporary:  # doctest: +SKIP
        ...     np.savez(temporary, labels=labels)
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".partial-{name}")
    try:
        yield temporary
        if not is_remote(temporary):
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        tf.io.gfile.rename(temporary, path, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        raise _unwritable(path, error, size) from error
    finally:
        with contextlib.suppress(tf.errors.OpError):
            remove(temporary)


def write_whole(path: str, data: bytes) -> None:
    """Writes a file that is there whole or not at all.

    Args:
        path: The file.
        data: Its content.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> write_whole("records/manifest.json", b"{}")  # doctest: +SKIP
    """
    with whole_file(path, len(data)) as temporary:
        if is_remote(path):
            with tf.io.gfile.GFile(temporary, "wb") as file:
                file.write(data)
        else:
            with open(temporary, "wb") as file:
                file.write(data)


def _unwritable(path: str, error: Exception, size: int) -> UserError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if full:
        return UserError(
            f"{path} cannot be written: the disk is full, and this file needs about {size / 2**20:,.1f} MB; what was "
            "finished is kept: free some space and run the same command again"
        )
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or type(error).__name__
    return UserError(f"{path} cannot be written ({reason})")
