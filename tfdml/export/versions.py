"""Numbered versions of an exported model, each written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfdml.errors import UserError
from tfdml.io.files import as_size, free_space, is_disk_full, partial_folder, require_local, require_space, sweep


@dataclasses.dataclass
class NewVersion:
    """A version that is being written.

    Attributes:
        folder: Where to write its files: hidden, beside the finished versions.
        path: Its place; there is none before it is finished.
    """

    folder: Path
    path: Path = dataclasses.field(init=False)


@contextlib.contextmanager
def new_version(versions: str | os.PathLike, size: int = 0) -> Iterator[NewVersion]:
    """Make the next version: `versions/<n>`, one more than the highest number there.

    What the block writes below `folder` appears under the number when the block ends well, in one step, and disappears
    when it does not. Earlier versions stay as they are. Two processes that export at once get two numbers. What exports
    left that were killed is removed.

    Args:
        versions: Where versions lie, as TF Serving's `base_path`; made if it is not there.
        size: About how many bytes the version will have, where that is known.

    Yields:
        The version; its `path` is known after the block.

    Raises:
        UserError: The folder cannot be written, or the disk is full.

    Example:
        >>> with new_version("models/cars") as version:
        ...     written = (version.folder / "model_card.json").write_text("{}")
        >>> version.path
        PosixPath('models/cars/1')
    """
    require_local(versions, "folder")
    versions = Path(versions)
    require_space(versions, size, "folder", "this version's files")
    made = _missing_parents(versions)
    try:
        versions.mkdir(parents=True, exist_ok=True)
        sweep(versions)
        hidden = Path(partial_folder(versions))
    except OSError as error:
        raise UserError(f"`folder={versions}` cannot be written: {error.strerror}") from error
    try:
        # mkdtemp makes it for its owner alone; servers run as somebody else.
        os.chmod(hidden, 0o777 & ~_umask())
        version = NewVersion(hidden)
        yield version
        _to_disk(hidden)
        version.path = _numbered(hidden, versions)
    except (OSError, tf.errors.OpError) as error:
        if is_disk_full(error):
            raise _full(versions, hidden, size) from error
        if isinstance(error, OSError):
            raise UserError(f"`folder={versions}` cannot be written: {error}") from error
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where it is empty: a refused export leaves nothing


def version_numbers(versions: str | os.PathLike) -> list[int]:
    """Return the numbers of the versions in a folder, ascending; none where there is no folder."""
    try:
        return sorted(int(entry.name) for entry in Path(versions).iterdir() if entry.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbered(hidden: Path, versions: Path) -> Path:
    while True:
        path = versions / str(1 + max(version_numbers(versions), default=0))
        try:
            os.rename(hidden, path)
            return path
        except OSError as error:
            # Somebody else has taken the number in between.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _full(versions: Path, hidden: Path, size: int) -> UserError:
    written = sum(file.stat().st_size for file in hidden.rglob("*") if file.is_file())
    needed = f"about {as_size(size)}" if size > written else f"more than {as_size(written)}"
    return UserError(
        f"`folder={versions}`: the disk is full: this version's files need {needed}, and "
        f"{as_size(written + (free_space(versions) or 0))} were free; no version is written: free some space or name "
        "another disk, and run the same command again"
    )


def _missing_parents(folder: Path) -> list[Path]:
    """Which folders will have to be made, the innermost first."""
    return [part for part in (folder, *folder.parents) if not part.exists()]


def _to_disk(folder: Path) -> None:
    """Everything below a folder, on the disk: a name must not appear before its contents do."""
    for root, _, files in os.walk(folder):
        folders = [root] if os.name == "posix" else []  # Windows opens no folder
        for path in (*(os.path.join(root, name) for name in files), *folders):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
