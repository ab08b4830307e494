"""The output folder of a preparation: checked, and locked against other preparations."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tfdml import manifests, storage
from tfdml.data.records.reader import FORMAT, MANIFEST, VERSION
from tfdml.disk_space import is_disk_full, unwritable
from tfdml.errors import UserError, differences
from tfdml.storage import lock

JOB = "job.json"
PROGRESS = "progress"
LOCK = ".prepare.lock"


def claim(out: str) -> None:
    """Checks, without writing anything, that a folder is new, empty or of an earlier preparation.

    Args:
        out: The folder.

    Raises:
        UserError: It holds something else.

    Example:
        >>> claim("no/such/folder")
    """
    if tf.io.gfile.exists(out) and not tf.io.gfile.isdir(out):
        raise UserError(f"`out={out}` is a file; name a folder")
    found = [name for name in storage.listing(out) if name != LOCK and not name.startswith(storage.PARTIAL_PREFIX)]
    if found and not {MANIFEST, JOB} & set(found):
        raise UserError(f"`out={out}` holds other files ({found[0]} ...); name a new or an empty folder")
    for name in (MANIFEST, JOB):
        if name in found and read_json(os.path.join(out, name)).get("format") != FORMAT:
            raise UserError(f"`out={out}` holds a {name} of something else; name a new or an empty folder")


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file or it is none.

    Example:
        >>> read_json("no/such/file")
        {}
    """
    try:
        return manifests.read_json(path)
    except UserError:
        return {}


def write_json(path: str, value: Any) -> None:
    """Writes JSON, whole or not at all.

    Raises:
        UserError: The file cannot be written.

    Example:
        >>> write_json("copies.json", [])
    """
    # Names that are not UTF-8 hold lone surrogates, which only ASCII escapes can carry.
    storage.write_whole(path, (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode("ascii"))


def require_same_job(out: str, stored: dict[str, Any], job: dict[str, Any]) -> None:
    """Refuses to mix what was prepared in another way with what is wanted now.

    Args:
        out: The folder.
        stored: The job that the folder was begun with.
        job: The job wanted.

    Raises:
        UserError: They differ; the message names how.

    Example:
        >>> require_same_job("records", {"dataset": "sop"}, {"dataset": "sop"})
    """
    different = differences(stored, job)
    if different:
        raise UserError(
            f"`out={out}` holds records prepared in another way: {different}; name another folder, or "
            "delete this one to prepare it again"
        )


@contextlib.contextmanager
def locked(out: str) -> Iterator[None]:
    """Makes the folder and keeps other preparations out of it.

    Args:
        out: The folder.

    Raises:
        UserError: Another preparation is at work in it, or it cannot be made.

    Example:
        >>> with locked("records"):
        ...     write_json("records/copies.json", [])
    """
    path = os.path.join(out, LOCK)
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }
    try:
        tf.io.gfile.makedirs(out)
        if storage.is_remote(out):
            _lock_remote(path, owner)
        else:
            _lock_local(out, path, owner)
    except (OSError, tf.errors.OpError) as error:
        if is_disk_full(error):
            raise unwritable(out, error) from error
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or type(error).__name__
        raise UserError(f"`out={out}` cannot be written ({reason})") from error
    try:
        # Of processes that were killed: while the lock is held, nobody writes.
        for name in storage.listing(out):
            if name.startswith(storage.PARTIAL_PREFIX):
                storage.remove(os.path.join(out, name))
        yield
    finally:
        if read_json(path).get("token") == owner["token"]:
            storage.remove(path)


def _lock_local(out: str, path: str, owner: dict[str, Any]) -> None:
    # The folder itself is held while the lock file is looked at, so that two cannot take over the same stale one.
    descriptor = os.open(out, os.O_RDONLY)
    try:
        lock(descriptor)
        with contextlib.suppress(FileNotFoundError):
            _take_over(path, owner)
        text = json.dumps(owner).encode()
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.write(file, text)
        finally:
            os.close(file)
    except FileExistsError:
        raise _busy(path, read_json(path)) from None
    finally:
        os.close(descriptor)


def _take_over(path: str, owner: dict[str, Any]) -> None:
    """Removes the lock of a process of this host that has ended."""
    if not os.path.exists(path):
        return
    holder = read_json(path)
    if holder.get("host") != owner["host"] or not isinstance(holder.get("pid"), int) or _alive(holder["pid"]):
        raise _busy(path, holder)
    logging.warning("taking over from process %s, which ended without finishing", holder["pid"])
    os.unlink(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _lock_remote(path: str, owner: dict[str, Any]) -> None:
    if tf.io.gfile.exists(path):
        raise _busy(path, read_json(path))
    write_json(path, owner)
    # Object stores have no exclusive creation: of two that wrote at once the later one has it.
    if read_json(path).get("token") != owner["token"]:
        raise _busy(path, read_json(path))


def _busy(path: str, holder: dict[str, Any]) -> UserError:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('since', '?')}"
    return UserError(
        f"another bin/prepare is at work in {os.path.dirname(path)} ({who}); wait for it, or delete {path} if it "
        "has ended"
    )


def header() -> dict[str, Any]:
    """The header of every JSON file of a preparation: its format and version.

    Example:
        >>> header()["format"]
        'tfdml-records'
    """
    return {"format": FORMAT, "version": VERSION}
