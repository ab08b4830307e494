"""Files, local or where `fsspec` reaches: atomic writes, locks, checksums, patterns, JSON that
anyone may have made.

And how much memory is free.

A local copy of what is in a store lies below one folder of this process, at the place that its URL
names, so that `as_named` can turn every path back into the URL.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import errno
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from tfdml.errors import ERROR_TEXT, UserError, redact_text, short_message, user_errors

if TYPE_CHECKING:
    import fsspec

# Of the temporary names, which end in the writing process's number: see `sweep`.
PARTIAL_PREFIX = ".partial-"
LOCK = ".lock"
Kinds = Mapping[str, type | tuple[type, ...]]

_Path = TypeVar("_Path", str, Path)


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path names a file system of its own, such as `gs://`.

    Example:
        >>> is_remote("gs://bucket/file")
        True
    """
    return "://" in os.fspath(path)


def plain_path(path: str | os.PathLike) -> str:
    """Return a path without `~`, `.`, `..` and slashes that change nothing; empty for an empty one.

    Example:
        >>> plain_path("./photos//"), plain_path("photos/../photos"), plain_path("s3://bucket/a/")
        ('photos', 'photos', 's3://bucket/a')
    """
    text = os.fspath(path)
    if not text:
        return ""
    if is_remote(text):
        scheme, separator, rest = text.partition("://")
        return scheme + separator + rest.rstrip("/")
    written = os.path.expanduser(text)
    plain = os.path.normpath(written)
    # Behind a link, `..` is another folder.
    is_same = os.path.realpath(plain) == os.path.realpath(written)
    return plain if is_same else str(Path(written))


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path is a URL of a file or folder in a store, such as `s3://`; not the address of a
    server or database.

    Example:
        >>> in_store("s3://bucket/runs/cars"), in_store("http://localhost:8501/v1/models/cars")
        (True, False)
    """
    scheme, separator, _ = os.fspath(path).partition("://")
    if not separator or scheme in ("http", "https"):
        return False
    import fsspec

    return scheme in fsspec.available_protocols()


def filesystem_of(path: str | os.PathLike) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and its path there.

    Raises:
        UserError: There is no such file system, or the package that reaches it is missing.

    Example:
        >>> filesystem_of("memory://embeddings/manifest.json")[1]
        '/embeddings/manifest.json'
    """
    import fsspec  # a tenth of a second, which flags and their help do without

    if not is_remote(path):
        return fsspec.filesystem("file"), os.path.abspath(path)
    try:
        return fsspec.url_to_fs(os.fspath(path), use_listings_cache=False)
    except ValueError as error:
        raise UserError(f"{path} cannot be reached: {short_message(error, 'first')}") from error
    except ImportError:  # of s3fs, gcsfs or another; Arrow knows the usual stores
        scheme, _, rest = os.fspath(path).partition("://")
        authority, _, key = rest.partition(
            "/"
        )  # a key is taken as it is: a URL's escapes mean nothing in it
        filesystem, base = _arrow(f"{scheme}://{authority}")
        return filesystem, f"{base.rstrip('/')}/{key}" if key else base


@functools.cache
def _arrow(root: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a store, through Arrow, and the path of its root there."""
    import pyarrow.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    # Arrow's own errors, and those of the clients behind it.
    with user_errors(Exception, f"{root} cannot be reached: {ERROR_TEXT}", keep="first"):
        filesystem, base = pyarrow.fs.FileSystem.from_uri(root)
    return ArrowFSWrapper(filesystem), base


def local_copy(path: str | os.PathLike) -> str:
    """Return a path; for a file or folder in a store, that of a local copy, which the first call
    downloads.

    Args:
        path: A path or URL; there need not be anything.

    Raises:
        UserError: The store cannot be read.

    Example:
        >>> local_copy("runs/first")
        'runs/first'
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
    filesystem, there = filesystem_of(url)
    with _readable(url):
        for name, entry in filesystem.find(there, detail=True).items():
            target = confined(local, name[len(there) + 1 :], url) if name != there else local
            os.makedirs(os.path.dirname(target), exist_ok=True)
            filesystem.get_file(name, target)
            if os.path.getsize(target) != entry["size"]:
                raise OSError(
                    f"{os.path.getsize(target):,} of {entry['size']:,} bytes of {name} have come"
                )
    return local


def as_named(text: str | os.PathLike) -> str:
    """Return a text with the paths of local copies as the URLs that they are copies of.

    Example:
        >>> as_named("runs/first")
        'runs/first'
    """
    if not _copies.cache_info().currsize:
        return os.fspath(text)
    return re.sub(re.escape(_copies()) + r"/(\w+)/", r"\1://", os.fspath(text))


def printable(text: str | os.PathLike) -> str:
    """Return a text as it may be printed and stored: with URLs in place of local copies, and
    addresses without passwords.

    Example:
        >>> printable("http://me:secret@host:8501/v1/models/cars")
        'http://host:8501/v1/models/cars'
    """
    return redact_text(as_named(text))


def _readable(path: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
    return user_errors(OSError, f"{path} cannot be read: {ERROR_TEXT}", keep="first")


def is_file(path: str | os.PathLike) -> bool:
    """Whether a file is there.

    Example:
        >>> is_file("no/such/file")
        False
    """
    filesystem, there = filesystem_of(path)
    with _readable(path):
        return filesystem.isfile(there)


def is_folder(path: str | os.PathLike) -> bool:
    """Whether a folder is there.

    Example:
        >>> is_folder(".")
        True
    """
    filesystem, there = filesystem_of(path)
    with _readable(path):
        return filesystem.isdir(there)


def listing(folder: str | os.PathLike) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder.

    Example:
        >>> listing("no/such/folder")
        []
    """
    filesystem, there = filesystem_of(folder)
    with _readable(folder), contextlib.suppress(FileNotFoundError):
        return sorted(
            os.path.basename(name.rstrip("/")) for name in filesystem.ls(there, detail=False)
        )
    return []


def walk(
    folder: str,
    onerror: Callable[[OSError], None] | None = None,
    again: Callable[[str], None] = lambda path: None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, also on other file systems. Links to folders are followed, but no folder is
    read twice: `again` is called with the other names of one.

    Example:
        >>> [len(names) for _, _, names in walk("no/such/folder")]
        []
    """
    if not is_remote(folder):
        seen: set[str] = set()
        for path, folders, names in os.walk(folder, onerror=onerror, followlinks=True):
            place = os.path.realpath(path)
            if place in seen:
                folders.clear()
                again(path)
                continue
            seen.add(place)
            folders.sort()
            yield path, folders, names
        return
    filesystem, there = filesystem_of(folder)
    for path, folders, names in filesystem.walk(there, on_error=onerror or "omit"):
        below = path[len(there.rstrip("/")) :].lstrip("/")
        yield f"{folder.rstrip('/')}/{below}" if below else folder, folders, names


def find(pattern: str) -> list[str]:
    """Return the files that a pattern names, in the order of the names of folders and files.

    Args:
        pattern: An absolute path or URL with `*` and `?` (within a name) and `**` (any folders).
            Links are followed; a folder that they lead to again counts once.

    Raises:
        UserError: There is no such folder, or it cannot be listed.

    Example:
        >>> find("/no/such/folder/*.jpg")
        Traceback (most recent call last):
        tfdml.errors.UserError: there is no folder /no/such/folder
    """
    fixed, *wild = re.split(r"(?=[*?])", pattern, maxsplit=1)
    if not wild:
        raise UserError(f"there is no file or folder {pattern}")
    folder = fixed.rpartition("/")[0]
    filesystem, there = filesystem_of(folder or "/")
    with _readable(folder):
        if not filesystem.isdir(there):
            raise UserError(f"there is no folder {folder}")
        if not is_remote(pattern):
            return _local_files(folder, pattern[len(folder) :])
        # To fsspec a bracket begins a set of characters.
        names = filesystem.glob(
            (there.rstrip("/") + pattern[len(folder) :]).replace("[", "[[]"), detail=True
        )
    files = [name for name, entry in names.items() if entry["type"] == "file"]
    paths = sorted(files, key=lambda name: name.split("/"))
    return [folder.rstrip("/") + path[len(there.rstrip("/")) :] for path in paths]


# Regular expressions of what stands for others in a pattern.
_WILD = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _local_files(folder: str, pattern: str) -> list[str]:
    # Links are followed, as by `walk`; to fsspec they are no files.
    os.listdir(folder or "/")
    if "**" not in pattern:
        names = glob.glob(glob.escape(folder) + pattern.replace("[", "[[]"), include_hidden=True)
    else:
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
        text = "".join(_WILD.get(part) or re.escape(part) for part in parts)
        matches = re.compile(text, re.DOTALL)
        paths: list[str] = []
        for parent, _, below in walk(folder or "/"):
            paths += [os.path.join(parent, name) for name in below]
        names = [path for path in paths if matches.fullmatch(path, len(folder))]
    files = [name for name in names if not os.path.isdir(name)]
    return sorted(files, key=lambda name: name.split("/"))


def open_file(path: str | os.PathLike, buffering: int = -1) -> BinaryIO:
    r"""Open a file for reading.

    Args:
        path: The file.
        buffering: As `open`, for a local file.

    Raises:
        OSError: It cannot be read.

    Example:
        >>> with open_file("car.jpg") as file:
        ...     file.read(3)
        b'\xff\xd8\xff'
    """
    if not is_remote(path):
        return open(path, "rb", buffering=buffering)
    filesystem, there = filesystem_of(path)
    return filesystem.open(there, "rb")


def access_fault(error: Exception) -> str:
    """Why a file cannot be read, in words, from the exception that reading it raised.

    Example:
        >>> access_fault(FileNotFoundError())
        'missing'
    """
    if (
        isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"
    ):  # the second is TensorFlow's
        return "missing"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file"
    if isinstance(error, PermissionError) or type(error).__name__ == "PermissionDeniedError":
        return "unreadable (no permission)"
    return f"unreadable ({getattr(error, 'strerror', None) or short_message(error, 'last')})"


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


def sha256_of(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def make_folder(path: str | os.PathLike) -> None:
    """Make a folder and those above it, if they are not there.

    Raises:
        UserError: The file system refuses.

    Example:
        >>> make_folder(".")
    """
    filesystem, there = filesystem_of(path)
    with user_errors(OSError, f"{path} cannot be written ({ERROR_TEXT})", keep="first"):
        filesystem.makedirs(there, exist_ok=True)


def remove(path: str | os.PathLike) -> None:
    """Remove a file, or a folder with all that is in it, if it is there.

    Example:
        >>> remove("no/such/file")
    """
    filesystem, there = filesystem_of(path)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(there, recursive=True)


@contextlib.contextmanager
def atomic_write(path: _Path) -> Iterator[_Path]:
    """Yield a temporary local path, renamed onto `path` when the block ends well, and removed when
    it does not.

    It lies next to `path`, and keeps the suffix, which some writers go by. A link is followed. A
    remote file is written in a folder of its own first: object stores show nothing of it until it
    is whole.

    Args:
        path: The file to be written.

    Raises:
        UserError: The disk is full, the file system refuses, or `path` is a device or a folder.

    Example:
        >>> with atomic_write(Path("train.npz")) as temporary:
        ...     np.savez(temporary, labels=labels)
    """
    if is_remote(path):
        filesystem, there = filesystem_of(path)
        with tempfile.TemporaryDirectory() as folder:
            temporary = os.path.join(folder, os.path.basename(path))
            yield type(path)(temporary)
            # In a thread, where no signal raises: Arrow's stream, closed by an exception, would
            # leave what was sent.
            with user_errors(OSError, f"{path} cannot be written ({ERROR_TEXT})", keep="first"):
                concurrent.futures.ThreadPoolExecutor(1).submit(
                    filesystem.put_file, temporary, there
                ).result()
        return
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise UserError(f"{path} is no regular file: name another")
    temporary = os.path.join(
        os.path.dirname(target), f"{PARTIAL_PREFIX}{os.getpid()}-{os.path.basename(target)}"
    )
    try:
        yield type(path)(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.filename not in (None, temporary, target):
            raise
        raise unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def unwritable(path: str | os.PathLike, error: OSError) -> UserError:
    """Return the message on a file or folder that could not be written.

    Example:
        >>> str(unwritable("metrics.json", PermissionError(errno.EACCES, "Permission denied")))
        'metrics.json cannot be written (Permission denied)'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{path} cannot be written: the disk is full; free some space and run the same command "
            "again"
        )
    return UserError(
        f"{path} cannot be written ({error.strerror or short_message(error, 'first')})"
    )


def require_local(path: str | os.PathLike, argument: str) -> None:
    """Refuse a path of a file system of its own, which as a local one would be a folder called
    `gs:`.

    Args:
        path: The path.
        argument: The argument that names it.

    Raises:
        UserError: It is not local.

    Example:
        >>> require_local("runs/first", "run_dir")
    """
    # A `Path` has made one slash of two.
    if re.match(r"\w+:/", os.fspath(path)):
        raise UserError("only local folders can be used here; name one", **{argument: path})


def require_writable(path: str | os.PathLike, argument: str) -> None:
    """Refuse, before any work, what is no place for a file.

    Args:
        path: Where a file is to be written.
        argument: The argument that names it.

    Raises:
        UserError: It is something else than a file, its folder or bucket does not exist or may not
            be written.

    Example:
        >>> require_writable("metrics.json", "json")
    """
    if is_remote(path):
        fits = is_folder("/".join(os.fspath(path).split("/")[:3]))
    else:
        path_is_free = not os.path.exists(path) or os.path.isfile(path)
        fits = path_is_free and os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)
    if not fits:
        raise UserError(
            "cannot be written: name a file in a folder that is there", **{argument: path}
        )


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
    with atomic_write(os.fspath(path)) as temporary, open(temporary, "wb") as file:
        file.write(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    write_whole(
        path, (printable(json.dumps(_finite(value), indent=2, sort_keys=True)) + "\n").encode()
    )


def write_lines(path: Path, values: list[dict]) -> None:
    """Write a JSON-lines file atomically."""
    write_whole(path, "".join(json.dumps(_finite(value)) + "\n" for value in values).encode())


def _finite(value: Any) -> Any:
    """Return the same structure with None for floats that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cell_text(text: str) -> str:
    """Return text for a cell of a CSV file; what a spreadsheet would take for a formula starts with
    an apostrophe.

    So does text that starts with an apostrophe, so that a reader who removes one gets the text
    back.

    Example:
        >>> cell_text("=1+1"), cell_text("car.jpg")
        ("'=1+1", 'car.jpg')

    Source: OWASP, "CSV injection".
    """
    return f"'{text}" if re.match(r"\s*[=+\-@]|[\t\r\n']", text) else text


def sweep(folder: str | os.PathLike) -> None:
    """Remove what processes left in a local folder that were killed in the middle of writing a
    file.

    Temporary files and folders of processes that still run stay.

    Args:
        folder: The folder; it need not exist.
    """
    import psutil

    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        process = re.match(rf"{re.escape(PARTIAL_PREFIX)}([0-9]{{1,9}})-", name)
        if process and not psutil.pid_exists(int(process[1])):
            path = os.path.join(folder, name)
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # of a folder, which is gone; of another user's file
                os.unlink(path)


@contextlib.contextmanager
def partial_folder(parent: str | os.PathLike) -> Iterator[Path]:
    """Yield a hidden folder in a local one; what is left of it after the block is removed, or by
    `sweep`.

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


def is_debris(name: str) -> bool:
    """Whether a file of this name is a lock's, or what a killed process left half-written.

    Example:
        >>> is_debris(".lock"), is_debris("manifest.json")
        (True, False)
    """
    return name == LOCK or name.startswith(PARTIAL_PREFIX)


@contextlib.contextmanager
def locked(
    folder: str | os.PathLike, argument: str, name: str = LOCK, wait: bool = False
) -> Iterator[None]:
    """Hold the lock of a local folder. It ends with the block, at the latest with the process.

    Args:
        folder: The folder.
        argument: The argument that names it.
        name: The file of the lock, for a lock of less than the folder.
        wait: Wait until the lock is free.

    Raises:
        UserError: Another process holds the lock, or the folder is not there or cannot be written.

    Example:
        >>> with locked(".", "run_dir"):
        ...     write_whole("flags.txt", b"text")
    """
    if not os.path.isdir(folder):
        raise UserError("there is no such folder", **{argument: folder})
    import filelock

    path = os.path.join(folder, name)
    lock = filelock.FileLock(path, blocking=wait, mode=0o666, is_singleton=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError("another process is writing into it", **{argument: folder}) from None
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps a file that is open
            os.unlink(path)
        lock.release()


def read_json(
    path: str | os.PathLike, required: Kinds | None = None, remedy: str = ""
) -> dict[str, Any]:
    """Return the JSON object in a file, local or on any file system that `fsspec` knows.

    Args:
        path: The file.
        required: Keys that it must have, and of which type their values must be; see `fields`.
        remedy: What to do where the file is damaged, for the message.

    Raises:
        UserError: There is no such file, it cannot be read or is no JSON object, or a key is
            missing or of another type.

    Example:
        >>> read_json("embeddings/cars/manifest.json", {"count": int})["count"]
        256
    """
    where = os.fspath(path)
    with user_errors(
        Exception, f"{where} cannot be read ({ERROR_TEXT}){_and(remedy)}"
    ):  # clients have their own errors
        data = read_bytes(where)
    return fields(parse_json(data, where, remedy), required or {}, where, remedy)


def parse_json(data: bytes | str, where: str, remedy: str = "") -> Any:
    """Return a JSON text as Python's values.

    Args:
        data: The text, or its UTF-8 bytes.
        where: Where it was found, for the message.
        remedy: As `read_json`.

    Raises:
        UserError: It is not JSON, or nested too deep.

    Example:
        >>> parse_json(b'{"images": 3}', "manifest.json")
        {'images': 3}
    """
    # Of an integer of thousands of digits, too.
    with user_errors(
        (ValueError, RecursionError),
        f"{where} is damaged: it is not JSON ({ERROR_TEXT}){_and(remedy)}",
    ):
        return json.loads(data)


def fields(value: Any, required: Kinds, where: str, remedy: str = "") -> dict[str, Any]:
    """Return a JSON object, if it has keys with values of these types.

    Args:
        value: What should be the object.
        required: The type, or types, of the value of each key. A bool is no int, and an int is a
            float.
        where: Where it was found, for the message.
        remedy: As `read_json`.

    Raises:
        UserError: It is no object, or a key is missing or of another type.

    Example:
        >>> fields({"images": 3}, {"images": int}, "manifest.json: splits.train")
        {'images': 3}
    """
    damaged = f"{where} is damaged or of something else: "
    if not isinstance(value, dict):
        raise UserError(f"{damaged}it is no JSON object{_and(remedy)}")
    for key, kinds in required.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        kinds += (int,) if float in kinds else ()
        item = value.get(key)
        if (
            key not in value
            or not isinstance(item, kinds)
            or (isinstance(item, bool) and bool not in kinds)
        ):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{damaged}its key {key} must be {names}{_and(remedy)}")
    return value


def free_memory() -> float:
    """Bytes of memory that the machine or container has left.

    Example:
        >>> free_memory() > 0
        True
    """
    import psutil

    left = [float(psutil.virtual_memory().available)]
    most, taken = (_content(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if most.isdigit() and taken.isdigit():
        # What the kernel keeps of files it gives up when memory is asked for.
        rows = (line.split() for line in _content("/sys/fs/cgroup/memory.stat").splitlines())
        cached = sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file"))
        left.append(float(int(most) - int(taken) + cached))
    return min(left)


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _and(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def confined(folder: str | os.PathLike, name: Any, where: str) -> str:
    """Return the path of a file that a manifest names in its folder; a name that leads out of it is
    refused.

    Links within the folder are followed: what they lead to, the owner of the folder has decided.

    Args:
        folder: The folder.
        name: A relative path with forward slashes.
        where: The manifest, for the message.

    Raises:
        UserError: The name is no text, absolute, of another file system, or has a part that is
            empty, `.` or `..`.

    Example:
        >>> confined("embeddings", "embeddings-00000.npy", "embeddings/manifest.json")
        'embeddings/embeddings-00000.npy'
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if {"", ".", ".."}.intersection(parts) or "\0" in name or "\\" in name or "://" in name:
        raise UserError(
            f"{where} names a file outside its folder, {str(name)[:100]!r}, which is not opened"
        )
    return os.path.join(os.fspath(folder), name)


def compare_files(folder: str | os.PathLike, files: Any, where: str, remedy: str) -> None:
    """Compare files with the checksums that a manifest has of them.

    This detects damage, not forgery: whoever can change a file can change its manifest.

    Args:
        folder: The manifest's folder.
        files: By name, an object with `sha256`.
        where: The manifest, for the message.
        remedy: What to do about damage.

    Raises:
        UserError: A file is missing, unreadable or damaged, or the manifest cannot be understood.
    """
    for name, entry in fields(files, {}, where).items():
        path = confined(folder, name, where)
        expected = fields(entry, {"sha256": str}, f"{where}: {name}")["sha256"]
        with user_errors(
            OSError, f"{path}, which {where} lists, cannot be read ({ERROR_TEXT}){_and(remedy)}"
        ):
            digest = sha256_of(path)
        if digest != expected:
            raise UserError(f"{path} is damaged: its SHA-256 is not that in {where}{_and(remedy)}")


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of nested mappings, under joined names.

    Example:
        >>> flat({"step": 7, "test": {"recall@1": 0.5, "protocol": "zero-shot"}})
        {'step': 7.0, 'test/recall@1': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers.update(flat(value, f"{prefix}{name}/"))
        elif (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers
