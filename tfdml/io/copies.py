"""Local copies of folders and files in object stores, for what works on local paths alone.

A copy lies below one folder of this process, at the place that its URL names, so that `files.as_named` can turn every
path back into the URL. Changed files return as whole objects, in the order in which they were written.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

import fsspec
from absl import logging

from tfdml.errors import REASON, UserError, user_errors
from tfdml.io import files
from tfdml.io.folders import token_lock

# By local path: what the store stated of the object, where it was read, and the stamp of the local file that is alike.
_alike: dict[str, tuple[str, tuple[int, int]]] = {}
_UNKNOWN = "", (-1, -1)
# The folders that this process writes; their copies are ahead of the store.
_owned: list[str] = []


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path is a URL of a file or folder in a store, such as `s3://`; not the address of a server or database.

    Example:
        >>> in_store("s3://bucket/runs/cars"), in_store("http://localhost:8501/v1/models/cars"), in_store("runs/cars")
        (True, False, False)
    """
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme not in ("http", "https") and scheme in fsspec.available_protocols()


def local_path(url: str) -> str:
    """Return where the copy of a URL lies, or would."""
    return os.path.normpath(os.path.join(files.copies_folder(), *url.split("://", 1)))


def local_copy(path: str | os.PathLike) -> str:
    """Return a path; for a file or folder in a store, that of a local copy, which this call brings up to date.

    Args:
        path: A path or URL; there need not be anything.

    Raises:
        UserError: The store cannot be read.

    Example:
        >>> local_copy("runs/cars")
        'runs/cars'
    """
    if not in_store(path):
        return os.fspath(path)
    url = os.fspath(path).rstrip("/")
    local = local_path(url)
    if any(url == owned or url.startswith(f"{owned}/") for owned in _owned):
        return local
    with user_errors(OSError, f"{url} cannot be read: {REASON}", keep="first"):
        filesystem, there = files.filesystem_of(url)
        found = filesystem.find(there, detail=True)
        entries = {os.path.normpath(local + name[len(there) :]): (name, entry) for name, entry in found.items()}
        for target, (name, entry) in entries.items():
            if not files.is_debris(os.path.basename(target)) and _alike.get(target, _UNKNOWN)[0] != str(entry):
                _get(filesystem, name, entry["size"], target)
                _alike[target] = str(entry), files.stamp_of(target)
    for target in [known for known in _alike if (known + "/").startswith(local + "/") and known not in entries]:
        del _alike[target]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
    return local


def _get(filesystem: fsspec.AbstractFileSystem, name: str, size: int, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = os.path.join(os.path.dirname(target), f"{files.PARTIAL_PREFIX}{os.getpid()}-{os.path.basename(target)}")
    filesystem.get_file(name, temporary)
    if os.path.getsize(temporary) != size:
        raise OSError(f"{os.path.getsize(temporary):,} of {size:,} bytes of {os.path.basename(name)} have come")
    os.replace(temporary, target)


def upload(url: str, last: Sequence[str] = ()) -> None:
    """Bring a folder in a store up to date with its copy: changed files in the order of their change, then removals.

    Args:
        url: The folder.
        last: Names of files that make it complete, written after all others in this order.

    Raises:
        UserError: The store cannot be written; the next call continues.
    """
    local = local_path(url)
    paths = [
        os.path.join(folder, name) for folder, _, names in os.walk(local) for name in names if not files.is_debris(name)
    ]
    stamps = {path: files.stamp_of(path) for path in paths}
    try:
        filesystem, there = files.filesystem_of(url)
        changed = [path for path in paths if _alike.get(path, _UNKNOWN)[1] != stamps[path]]
        ranks = {name: rank for rank, name in enumerate(last, 1)}
        for path in sorted(changed, key=lambda path: (ranks.get(os.path.basename(path), 0), stamps[path][1])):
            files.put_file(path, filesystem, there + path[len(local) :])
            _alike[path] = "", stamps[path]
        for path in [known for known in _alike if known.startswith(local + "/") and known not in stamps]:
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(there + path[len(local) :])
            del _alike[path]
    except OSError as error:
        raise files.unwritable(url, error) from error


@contextlib.contextmanager
def uploading(url: str, argument: str) -> Iterator[None]:
    """Hold the lock of a folder in a store, and upload what the block changes in its copy, also where the block fails.

    Args:
        url: The folder.
        argument: The argument that names it.

    Raises:
        UserError: Another process writes there. Or the store cannot be written: the message then names a local folder
            with all files.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(token_lock(url, argument))
        except OSError as error:
            raise files.unwritable(url, error) from error
        local = local_copy(url)
        _owned.append(url)
        try:
            yield
        finally:
            _owned.remove(url)
            try:
                upload(url)
            except UserError as error:
                if not os.path.isdir(local):
                    raise
                kept = os.path.join(tempfile.mkdtemp(prefix="unsent-"), os.path.basename(local))
                os.rename(local, kept)
                raise UserError(f"{error}; all its files are in {kept}") from error


def save(url: str) -> None:
    """Upload what is finished so far; a store that cannot be written now is tried again by the next call."""
    try:
        upload(url)
    except UserError as error:
        logging.warning("%s; trying again later", error)


def require_no_store(path: str | os.PathLike, argument: str, why: str) -> None:
    """Refuse a URL.

    Raises:
        UserError: The path is remote.
    """
    if files.is_remote(path):
        raise UserError(f"`{argument}={path}`: {why}; name a local folder")
