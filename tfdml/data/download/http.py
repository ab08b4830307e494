"""Fetches a file over HTTP: resumed where it was broken off, checked, and there whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import email.message
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from absl import logging

from tfdml.errors import UserError
from tfdml.manifests import read_json
from tfdml.storage import lock
from tfdml.version import __version__

_BLOCK = 2**20
_MEGABYTE = 2**20
# Answers after which trying again can help.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60.0  # seconds

Progress = Callable[[int, int], None]  # bytes there, of how many (0: unknown)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file that a publisher offers.

    Args:
        url: Where it is; http or https.
        size: Its length in bytes; None if unknown.
        sha256: Its checksum, in hexadecimal; None if unknown.
    """

    url: str
    size: int | None = None
    sha256: str | None = None


class _Broken(Exception):
    """The connection failed; trying again may help."""

    def __init__(self, reason: object, wait: float | None = None):
        super().__init__(str(reason) or type(reason).__name__)
        self.wait = wait


def fetch(
    remote: RemoteFile,
    path: str | os.PathLike,
    *,
    timeout: float = 60.0,
    attempts: int = 6,
    backoff: float = 2.0,
    progress: Progress = lambda *_: None,
) -> bool:
    """Downloads a file, unless it is there already.

    What has arrived lies in `path` + `.part` until the file is complete and its checksum right. Called again after an
    interruption, only the rest is asked for, provided that the server still has the same file.

    Args:
        remote: The file.
        path: Where to put it, on a local disk.
        timeout: Seconds without a byte after which a connection counts as broken.
        attempts: How often in a row to try in vain; what arrives in between restarts the count.
        backoff: Seconds to wait after the first failure; doubled after each further one.
        progress: Called now and then.

    Returns:
        Whether anything had to be fetched.

    Raises:
        UserError: The server refuses, cannot be reached or sends another file; the disk is too small; another process
            is fetching the same file; or another file lies at `path`.

    Example:
        >>> remote = RemoteFile("https://example.org/car.jpg", size=os.path.getsize("car.jpg"))
        >>> fetch(remote, "car.jpg")  # it is there
        False
    """
    path = os.fspath(path)
    if urllib.parse.urlsplit(remote.url).scheme not in ("http", "https"):
        raise UserError(f"{remote.url} cannot be fetched: only http and https can")
    if os.path.exists(path):
        fault = _fault(remote, path)
        if fault:
            raise UserError(f"{path} is there already but {fault}; move it away and run the same command again")
        return False
    with _part_file(path) as part:
        _Transfer(remote, path, part, timeout, progress).run(attempts, backoff)
        os.fsync(part.fileno())
        os.replace(f"{path}.part", path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.part.json")
    return True


@contextlib.contextmanager
def _part_file(path: str) -> Iterator[BinaryIO]:
    """What has arrived so far, for this process alone."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.part", "a+b", buffering=0) as part:
            try:
                lock(part.fileno(), wait=False)
            except BlockingIOError:
                raise UserError(f"another process is fetching {path}; wait for it") from None
            if not os.path.exists(f"{path}.part") or not os.path.samestat(
                os.fstat(part.fileno()), os.stat(f"{path}.part")
            ):  # it was finished, and moved away, between being opened and being locked
                raise UserError(f"another process has just fetched {path}; run the same command again")
            yield part
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path} cannot be written: the disk is full; what has arrived is kept: free some space and run the "
                "same command again"
            ) from error
        raise UserError(f"{path} cannot be written ({error.strerror or error})") from error


class _Transfer:
    """One file on its way."""

    def __init__(self, remote: RemoteFile, path: str, part: BinaryIO, timeout: float, progress: Progress):
        self._remote, self._path, self._part = remote, path, part
        self._timeout, self._progress = timeout, progress
        self._resumed = self._have > 0  # whether the file is put together from pieces

    def run(self, attempts: int, backoff: float) -> None:
        failures = 0
        while True:
            before = self._have
            try:
                self._ask()
            except _Broken as error:
                failures = 1 if self._have > before else failures + 1
                if failures >= attempts:
                    raise UserError(
                        f"{self._remote.url} cannot be fetched ({error}, {failures} times in a row); what has arrived "
                        f"({self._have / _MEGABYTE:,.1f} MB) is kept: run the same command again to go on"
                    ) from None
                wait = min(error.wait or backoff * 2 ** (failures - 1), _LONGEST_WAIT)
                logging.warning("%s: %s; trying again in %.0f s", self._remote.url, error, wait)
                time.sleep(wait)
                continue
            fault = _fault(self._remote, f"{self._path}.part")
            if not fault:
                return
            self._part.truncate(0)
            if not self._resumed:
                raise UserError(
                    f"{self._remote.url} sent a file that {fault}; it was not kept: try again later, or fetch "
                    f"{os.path.basename(self._path)} in another way and put it at {self._path}"
                )
            logging.warning("%s: the assembled file %s; fetching it again", self._remote.url, fault)
            self._resumed = False

    @property
    def _have(self) -> int:
        return os.fstat(self._part.fileno()).st_size

    def _ask(self) -> None:
        """One request: all of the file, or the rest of it.

        Raises:
            _Broken: The connection failed.
        """
        headers = {"User-Agent": f"tfdml/{__version__}", "Accept-Encoding": "identity", **self._resume_headers()}
        if self._have and self._have == self._remote.size:
            return
        request = urllib.request.Request(self._remote.url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                self._receive(answer)
        except urllib.error.HTTPError as error:
            self._refused(error)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            raise _Broken(getattr(error, "reason", None) or error) from error

    def _resume_headers(self) -> dict[str, str]:
        validator = self._validator()
        if self._have and not validator and not self._remote.sha256:
            self._part.truncate(0)  # nothing says whether the two pieces belong together
        if not self._have:
            return {}
        condition = {"If-Range": validator} if validator else {}
        return {"Range": f"bytes={self._have}-", **condition}

    def _validator(self) -> str | None:
        """What marks the version of the file that the first piece is from."""
        try:
            state = read_json(f"{self._path}.part.json")
        except UserError:
            return None
        if state.get("url") != self._remote.url:
            return None
        return state.get("validator")

    def _receive(self, answer: Any) -> None:
        if answer.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
            if not match or int(match[1]) != self._have:
                self._part.truncate(0)
                raise _Broken("the server sent another part than asked for", wait=0.01)
            self._resumed = True
            total = int(match[2]) if match[2] != "*" else 0
        else:
            self._part.truncate(0)
            self._resumed = False
            total = int(answer.headers.get("Content-Length") or 0)
            self._remember(answer.headers)
        if total and self._remote.size and total != self._remote.size:
            raise UserError(
                f"{self._remote.url} is a file of {total:,} bytes instead of {self._remote.size:,}: the publisher "
                "offers another file, or the server an error page"
            )
        total = total or self._remote.size or 0
        free = shutil.disk_usage(os.path.dirname(self._path) or ".").free
        if total - self._have > free:
            raise UserError(
                f"{self._path} needs {(total - self._have) / _MEGABYTE:,.0f} MB more, and {free / _MEGABYTE:,.0f} MB "
                "are free; free some space or name another disk"
            )
        self._progress(self._have, total)
        while block := answer.read1(_BLOCK):
            self._part.write(block)
            self._progress(self._have, total)
        if self._have < total:
            raise _Broken("the connection was closed before the end")

    def _remember(self, headers: email.message.Message) -> None:
        tag = headers.get("ETag")
        # A weak tag does not guarantee that the bytes are the same.
        validator = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        with open(f"{self._path}.part.json", "w", encoding="utf-8") as file:
            json.dump({"url": self._remote.url, "validator": validator}, file)

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code == 416:  # there is nothing beyond what we have
            if error.headers.get("Content-Range", "") == f"bytes */{self._have}":
                return
            self._part.truncate(0)
            raise _Broken("the server has less of the file than has arrived", wait=0.01)
        if error.code in _PASSING:
            wait = error.headers.get("Retry-After", "")
            raise _Broken(f"HTTP {error.code} {error.reason}", float(wait) if wait.isdigit() else None)
        raise UserError(
            f"{self._remote.url} cannot be fetched (HTTP {error.code} {error.reason}); if the publisher has moved the "
            f"file, fetch it by hand and put it at {self._path}"
        )


def _fault(remote: RemoteFile, path: str) -> str | None:
    """In what a file differs from what it should be."""
    size = os.path.getsize(path)
    if remote.size is not None and size != remote.size:
        return f"has {size:,} bytes instead of {remote.size:,}"
    if remote.sha256 is not None:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != remote.sha256:
            return f"has the SHA-256 {found[:16]}... instead of {remote.sha256[:16]}..."
    return None
