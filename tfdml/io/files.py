"""Files, local or where `fsspec` reaches: atomic writes, locks, checksums, full disks, where a file may go.

A local copy of what is in a store lies below one folder of this process, at the place that its URL names, so that
`as_named` can turn every path back into the URL.
"""

import atexit
import concurrent.futures
import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import filelock
import fsspec
import psutil
from absl import logging

from tfdml.errors import REASON, UserError, short_message, user_errors

# Of the temporary names, which end in the writing process's number: see `sweep`.
PARTIAL_PREFIX = ".partial-"
LOCK = ".lock"
_HOLDER = ".holder"
# What file systems say that have no locks, such as some network disks.
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

_Path = TypeVar("_Path", str, Path)
_Result = TypeVar("_Result")


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path names a file system of its own, such as `gs://`.

    Example:
        >>> is_remote("gs://bucket/file")
        True
    """
    return "://" in os.fspath(path)


def filesystem_of(path: str | os.PathLike) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and its path there.

    Raises:
        UserError: There is no such file system, or the package that reaches it is missing.

    Example:
        >>> filesystem_of("memory://embeddings/manifest.json")[1]
        '/embeddings/manifest.json'
    """
    if not is_remote(path):
        return fsspec.filesystem("file"), os.path.abspath(path)
    try:
        return fsspec.url_to_fs(os.fspath(path), use_listings_cache=False)
    except ValueError as error:
        raise UserError(f"{path} cannot be reached: {short_message(error, 'first')}") from error
    except ImportError:  # of s3fs, gcsfs or another; Arrow knows the usual stores
        scheme, _, rest = os.fspath(path).partition("://")
        authority, _, key = rest.partition("/")  # a key is taken as it is: a URL's escapes mean nothing in it
        filesystem, base = _arrow(f"{scheme}://{authority}")
        return filesystem, f"{base.rstrip('/')}/{key}" if key else base


@functools.cache
def _arrow(root: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a store, through Arrow, and the path of its root there."""
    import pyarrow.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    # Arrow's own errors, and those of the clients behind it.
    with user_errors(Exception, f"{root} cannot be reached: {REASON}", keep="first"):
        filesystem, base = pyarrow.fs.FileSystem.from_uri(root)
    return ArrowFSWrapper(filesystem), base


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path is a URL of a file or folder in a store, such as `s3://`; not the address of a server or database.

    Example:
        >>> in_store("s3://bucket/runs/cars"), in_store("http://localhost:8501/v1/models/cars"), in_store("runs/cars")
        (True, False, False)
    """
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme not in ("http", "https") and scheme in fsspec.available_protocols()


def local_copy(path: str | os.PathLike) -> str:
    """Return a path; for a file or folder in a store, that of a local copy, which the first call downloads.

    Args:
        path: A path or URL; there need not be anything.

    Raises:
        UserError: The store cannot be read.

    Example:
        >>> local_copy("runs/cars")
        'runs/cars'
    """
    return _download(os.fspath(path).rstrip("/")) if in_store(path) else os.fspath(path)


@functools.cache
def _copies() -> str:
    folder = tempfile.mkdtemp(prefix="tfdml-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _download(url: str) -> str:
    local = os.path.join(_copies(), *url.split("://", 1))
    with user_errors(OSError, f"{url} cannot be read: {REASON}", keep="first"):
        filesystem, there = filesystem_of(url)
        for name, entry in filesystem.find(there, detail=True).items():
            # A key may hold "..", which would lead out of the folder.
            target = os.path.normpath(local + name[len(there) :])
            if not (target + "/").startswith(local + "/"):
                raise OSError(f"its key {name} leads out of it")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            filesystem.get_file(name, target)
            if os.path.getsize(target) != entry["size"]:
                raise OSError(f"{os.path.getsize(target):,} of {entry['size']:,} bytes of {name} have come")
    return local


def as_named(text: str | os.PathLike) -> str:
    """Return a text with the paths of local copies as the URLs that they are copies of.

    Example:
        >>> as_named("runs/cars")
        'runs/cars'
    """
    if not _copies.cache_info().currsize:
        return os.fspath(text)
    return re.sub(re.escape(_copies()) + r"/(\w+)/", r"\1://", os.fspath(text))


def _naming_path(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have errors of stores, which are texts alone, name the path that the function was called with."""

    @functools.wraps(function)
    def named(path: str | os.PathLike, *args: Any, **options: Any) -> _Result:
        try:
            return function(path, *args, **options)
        except OSError as error:
            if not is_remote(path) or error.filename:
                raise
            kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, OSError: errno.EIO}
            number = error.errno or next(number for kind, number in kinds.items() if isinstance(error, kind))
            # Of these numbers Python makes the same kind of error.
            raise OSError(number, short_message(error, "first"), os.fspath(path)) from error

    return named


@_naming_path
def is_file(path: str | os.PathLike) -> bool:
    """Whether a file is there.

    Example:
        >>> is_file("no/such/file")
        False
    """
    filesystem, there = filesystem_of(path)
    return filesystem.isfile(there)


@_naming_path
def is_folder(path: str | os.PathLike) -> bool:
    """Whether a folder is there.

    Example:
        >>> is_folder(".")
        True
    """
    filesystem, there = filesystem_of(path)
    return filesystem.isdir(there)


@_naming_path
def make_folder(path: str | os.PathLike) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
        OSError: It cannot be made.

    Example:
        >>> make_folder("embeddings/cars")
    """
    filesystem, there = filesystem_of(path)
    filesystem.makedirs(there, exist_ok=True)


def walk(folder: str, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, also on other file systems. Links to folders are followed: the caller has to stop at a circle.

    Example:
        >>> [len(names) for _, _, names in walk("no/such/folder")]
        []
    """
    if not is_remote(folder):
        yield from os.walk(folder, onerror=onerror, followlinks=True)
        return
    filesystem, there = filesystem_of(folder)
    for path, folders, names in filesystem.walk(there, on_error=onerror or "omit"):
        below = path[len(there.rstrip("/")) :].lstrip("/")
        yield f"{folder.rstrip('/')}/{below}" if below else folder, folders, names


def exists(path: str) -> bool:
    """Whether a path of this machine is there; a home folder may be written `~`."""
    return os.path.exists(os.path.expanduser(path))


def find(pattern: str) -> list[str]:
    """Return the files that a pattern names, in the order of the names of folders and files.

    Args:
        pattern: An existing file; a path or URL with `*` and `?` (within a name) and `**` (any folders); or a folder,
            for the files below it.

    Returns:
        Absolute paths, or URLs.

    Raises:
        UserError: There is no such folder, or it cannot be listed.

    Example:
        >>> find("/no/such/folder/*.jpg")
        Traceback (most recent call last):
        tfdml.errors.UserError: there is no folder /no/such/folder
    """
    pattern = pattern if is_remote(pattern) else os.path.abspath(os.path.expanduser(pattern))
    wild = re.search(r"[*?]", pattern)
    folder = pattern[: wild.start()].rpartition("/")[0] if wild else pattern
    filesystem, there = filesystem_of(folder or "/")
    with user_errors(OSError, f"{folder} cannot be listed: {REASON}", keep="first"):
        if filesystem.isfile(filesystem_of(pattern)[1]):
            return [pattern]
        if not filesystem.isdir(there):
            raise UserError(f"there is no {'folder' if wild else 'file or folder'} {folder}")
        if wild:
            # To fsspec a bracket begins a set of characters.
            rest = pattern[len(folder) :].replace("[", "[[]")
            entries = filesystem.glob(there.rstrip("/").replace("[", "[[]") + rest, detail=True)
        else:
            entries = filesystem.find(there, detail=True)
    paths = sorted(
        (name for name, entry in entries.items() if entry["type"] == "file"), key=lambda name: name.split("/")
    )
    return [folder.rstrip("/") + path[len(there.rstrip("/")) :] for path in paths]


@_naming_path
def read_bytes(path: str | os.PathLike) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read.

    Example:
        >>> read_bytes("embeddings/cars/manifest.json")[:1]
        b'{'
    """
    with open_file(path) as file:
        return file.read()


@_naming_path
def open_file(path: str | os.PathLike, buffering: int = -1) -> BinaryIO:
    r"""Open a file for reading, if it is a regular one; see `require_regular`.

    Args:
        path: The file.
        buffering: As `open`, for a local file.

    Raises:
        OSError: It cannot be read, or a local file is no regular one.

    Example:
        >>> with open_file("car.jpg") as file:
        ...     file.read(3)
        b'\xff\xd8\xff'
    """
    if is_remote(path):
        filesystem, there = filesystem_of(path)
        return filesystem.open(there, "rb")
    require_regular(path)
    return open(path, "rb", buffering=buffering)


def size_of(path: str | os.PathLike) -> int | None:
    """Return the length of a file in bytes; None if there is no such file.

    Example:
        >>> size_of("no/such/file") is None
        True
    """
    try:
        if not is_remote(path):
            return os.stat(path).st_size if os.path.isfile(path) else None
        filesystem, there = filesystem_of(path)
        found = filesystem.info(there)
    except OSError:
        return None
    return found["size"] if found["type"] == "file" else None


def stamp_of(path: str | os.PathLike) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds; (0, 0) if the file cannot be looked at.

    Example:
        >>> stamp_of("no/such/file")
        (0, 0)
    """
    try:
        if is_remote(path):
            filesystem, there = filesystem_of(path)
            return filesystem.size(there), int(filesystem.modified(there).timestamp() * 1e9)
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    except (OSError, NotImplementedError):
        return 0, 0


@_naming_path
def listing(folder: str | os.PathLike) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder.

    Example:
        >>> listing("no/such/folder")
        []
    """
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        filesystem, there = filesystem_of(folder)
        return sorted(os.path.basename(name.rstrip("/")) for name in filesystem.ls(there, detail=False))
    except FileNotFoundError:
        return []


@_naming_path
def remove(path: str | os.PathLike) -> None:
    """Remove a file if it is there.

    Example:
        >>> remove("no/such/file")
    """
    filesystem, there = filesystem_of(path)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(there)


@_naming_path
def remove_folder(path: str | os.PathLike) -> None:
    """Remove a folder with all that is in it, if it is there.

    Example:
        >>> remove_folder("no/such/folder")
    """
    filesystem, there = filesystem_of(path)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(there, recursive=True)


@_naming_path
def sha256_of(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def entry_of(path: str | os.PathLike) -> dict[str, Any]:
    """Return what manifests state of a file: its `bytes` and its `sha256`."""
    return {"bytes": size_of(path), "sha256": sha256_of(path)}


@contextlib.contextmanager
def atomic_write(path: _Path, size: int = 0) -> Iterator[_Path]:
    """Yield a temporary local path, renamed onto `path` when the block ends well, and removed when it does not.

    It lies next to `path`, and keeps the suffix, which some writers go by. A link is followed. A remote file is written
    in a folder of its own first: object stores show nothing of it until it is whole.

    Args:
        path: The file to be written.
        size: About how many bytes it will have, where that is known, for the message when the disk is full.

    Raises:
        UserError: The disk is full, the file system refuses, or `path` is a device, a pipe or a folder.

    Example:
        >>> with atomic_write(Path("train.npz")) as temporary:
        ...     np.savez(temporary, labels=labels)
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = type(path)(os.path.join(folder, os.path.basename(path)))
            yield temporary
            try:
                put_file(temporary, *filesystem_of(path))
            except OSError as error:
                raise unwritable(path, error, size) from error
        return
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise UserError(f"{path} is {'a folder' if os.path.isdir(target) else 'no regular file'}: name another")
    name = f"{PARTIAL_PREFIX}{os.getpid()}-{os.path.basename(target)}"
    temporary = type(path)(os.path.join(os.path.dirname(target), name))
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except Exception as error:
        if not _is_refusal(error, target, temporary):
            raise
        with contextlib.suppress(OSError):
            remove(temporary)  # what there is of it takes no part in what is free
        raise unwritable(path, error, size) from error
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)


def put_file(local: str | os.PathLike, filesystem: fsspec.AbstractFileSystem, there: str) -> None:
    """Copy a local file into a store, where it appears whole or not at all.

    Raises:
        OSError: The store refuses, or cannot be reached.
    """
    # In a thread, where no signal raises: Arrow's stream, closed by an exception, would leave the part that was sent.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(filesystem.put_file, os.fspath(local), there).result()


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Write a file atomically.

    Args:
        path: The file.
        data: Its content.

    Raises:
        UserError: The disk is full, or the file system refuses.

    Example:
        >>> write_whole("manifest.json", b"{}")
    """
    with atomic_write(os.fspath(path), len(data)) as temporary, open(temporary, "wb") as file:
        file.write(data)


def cell_text(text: str) -> str:
    """Return text for a cell of a CSV file; what a spreadsheet would take for a formula starts with an apostrophe.

    So does text that starts with an apostrophe, so that a reader who removes one gets the text back.

    Example:
        >>> cell_text("=1+1"), cell_text("car.jpg")
        ("'=1+1", 'car.jpg')

    Source: OWASP, "CSV injection".
    """
    return f"'{text}" if re.match(r"\s*[=+\-@]|[\t\r\n']", text) else text


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    write_whole(path, (as_named(json.dumps(finite(value), indent=2, sort_keys=True)) + "\n").encode())


def write_lines(path: Path, values: list[dict]) -> None:
    """Write a JSON-lines file atomically."""
    write_whole(path, "".join(json.dumps(finite(value)) + "\n" for value in values).encode())


def finite(value: Any) -> Any:
    """Return the same structure with None for floats that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value


def sweep(folder: str | os.PathLike) -> None:
    """Remove what processes left in a local folder that were killed in the middle of writing a file.

    Temporary files and folders of processes that still run stay.

    Args:
        folder: The folder; it need not exist.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(os.scandir(os.fspath(folder))):
            number = re.match(rf"{re.escape(PARTIAL_PREFIX)}([0-9]{{1,9}})-", entry.name)
            if number is None or psutil.pid_exists(int(number[1])):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # in a folder of everybody's it is another's
                    remove(entry.path)


@contextlib.contextmanager
def partial_folder(parent: str | os.PathLike) -> Iterator[Path]:
    """Yield a hidden folder in a local one; what is left of it after the block is removed, or by `sweep`.

    Example:
        >>> with partial_folder("photos") as hidden:
        ...     hidden
        PosixPath('photos/.partial-...')
    """
    path = Path(parent, f"{PARTIAL_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
    path.mkdir()  # for all whom the umask allows: servers run as somebody else
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: str | os.PathLike, argument: str, name: str = LOCK, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a local folder. It ends with the block, at the latest with the process.

    A lock whose process was killed is taken over, with a warning. Where the file system has no locks, or the folder
    cannot be written, nothing is locked.

    Args:
        folder: The folder.
        argument: The argument that names it.
        name: The file of the lock, for a lock of less than the folder.
        wait: Wait until the lock is free.

    Raises:
        UserError: Another process holds the lock, and the message names it; there is no such folder.

    Example:
        >>> with locked(".", "run_dir"):
        ...     write_whole("flags.txt", b"text")
    """
    if not os.path.isdir(folder):
        raise UserError(f"`{argument}={folder}`: there is no such folder")
    path = os.path.join(folder, name)
    holder = path + _HOLDER
    with contextlib.ExitStack() as stack:
        try:
            lock = filelock.FileLock(path, blocking=wait, mode=0o666, fallback_to_soft=False, is_singleton=False)
            stack.enter_context(lock)
        except filelock.Timeout:
            writer = _holder_of(holder)
            raise UserError(f"`{argument}={folder}`: another process is writing into it ({writer})") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS and (error.errno not in _NOT_WRITABLE or os.path.exists(path)):
                raise
        else:
            stack.callback(_remove_if_possible, path)
            if os.path.exists(holder):
                logging.warning("%s: taking over from %s, which ended without finishing", folder, _holder_of(holder))
            since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            with contextlib.suppress(OSError, UserError):  # it is only for messages
                write_json(holder, {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
            stack.callback(_remove_if_possible, holder)
        yield


def is_debris(name: str) -> bool:
    """Whether a file of this name is a lock's, or what a killed process left half-written.

    Example:
        >>> is_debris(".lock"), is_debris("manifest.json")
        (True, False)
    """
    return name in (LOCK, LOCK + _HOLDER) or name.startswith(PARTIAL_PREFIX)


def _holder_of(path: str) -> str:
    """Return the process that holds a lock, or held it."""
    try:
        with open(path, encoding="utf-8") as file:
            holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "which has just begun"


def _remove_if_possible(path: str) -> None:
    with contextlib.suppress(OSError):  # Windows keeps a file that is open
        os.unlink(path)


def _is_refusal(error: Exception, path: str | Path, temporary: str | Path) -> bool:
    """Whether an error in the midst of writing is the file system's about this file, not the writer's own."""
    if isinstance(error, UserError):
        return False
    if is_disk_full(error):
        return True
    named = {os.fspath(name) for name in (getattr(error, "filename", None), getattr(error, "filename2", None)) if name}
    return isinstance(error, OSError) and bool(named & {os.fspath(path), os.fspath(temporary)})


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
        raise UserError(f"`{argument}={path}`: only local folders can be used here; name one")


def require_writable(path: str | os.PathLike, argument: str) -> None:
    """Refuse, before any work, what is no place for a file; the trial leaves nothing.

    Args:
        path: Where a file is to be written.
        argument: The argument that names it.

    Raises:
        UserError: It is a folder, its folder or bucket does not exist, or nothing can be written there.

    Example:
        >>> require_writable("metrics.json", "json")
    """
    if is_remote(path):
        if not is_folder(folder := "/".join(os.fspath(path).split("/")[:3])):
            raise UserError(f"`{argument}={path}`: there is no {folder}")
        return
    if os.path.isdir(path):
        raise UserError(f"`{argument}={path}` is a folder: name a file to write")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"`{argument}={path}` is no regular file: name another")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise UserError(f"`{argument}={path}`: its folder does not exist")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(path, error) from error


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
    """Return the message on a file that could not be written.

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
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or short_message(error, "first")
    return UserError(f"{path} cannot be written ({reason})")


def require_space(folder: str | os.PathLike, needed: int, argument: str, what: str, advice: str = "") -> None:
    """Refuse work whose result the disk cannot hold.

    Args:
        folder: Where it goes; it need not exist yet.
        needed: About how many bytes.
        argument: The argument that names the folder.
        what: What needs them, in the plural.
        advice: Ends the message, such as `, or shrink the images`.

    Raises:
        UserError: Fewer bytes are free.

    Example:
        >>> require_space("embeddings", 10, "out", "the embeddings")
    """
    free = free_space(folder)
    if free is not None and needed > free:
        lacking = f"{what} need about {as_size(needed)}, and {as_size(free)} are free"
        raise UserError(f"`{argument}={folder}`: {lacking}; free some space or name another disk{advice}")


def free_space(path: str | os.PathLike) -> int | None:
    """Free bytes on the disk of a file or folder, which need not exist yet; None where that cannot be known.

    Example:
        >>> free_space(".") > 0
        True
    """
    if is_remote(path):
        return None
    place = os.path.abspath(os.fspath(path))
    while not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def as_size(size: int) -> str:
    """Return a number of bytes in words.

    Example:
        >>> as_size(3 * 2**20), as_size(700)
        ('3.0 MB', '700 bytes')
    """
    return f"{size / 2**20:,.1f} MB" if size >= 2**20 / 10 else f"{size:,} bytes"


def _free_words(path: str | os.PathLike) -> str:
    device = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    free = None if device else free_space(path)
    return "" if free is None else f" ({as_size(free)} are free)"


_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


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
        kind = _KINDS.get(stat.S_IFMT(mode), "something special")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))
