"""Numbered versions of an exported model, each written atomically."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfdml.io.copies import in_store, local_path, upload
from tfdml.io.files import is_disk_full, listing, partial_folder, require_local, require_space, sweep, unwritable
from tfdml.io.folders import token_lock

# Without these there is no version, for this library and for TensorFlow Serving; a store gets them last.
_LAST = ("model_card.json", "retriever.json", "saved_model.pb")


@dataclasses.dataclass
class NewVersion:
    """A version that is being written.

    Attributes:
        folder: Where to write its files: hidden, next to the finished versions.
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
        versions: Where versions lie, as TF Serving's `base_path`; made if it is not there. In a store, `path` is that
            of a local copy of what was uploaded.
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
    if in_store(versions):
        url = os.fspath(versions).rstrip("/")
        with token_lock(url, "folder"):
            number = 1 + max((int(name) for name in listing(url) if name.isdecimal()), default=0)
            with new_version(local_path(url), size) as version:
                yield version
            path = Path(local_path(url), str(number))
            os.rename(version.path, path)
            version.path = path
            upload(f"{url}/{number}", last=_LAST)
        return
    require_local(versions, "folder")
    versions = Path(versions)
    require_space(versions, size, "folder", "this version's files")
    made = [part for part in (versions, *versions.parents) if not part.exists()]  # the innermost first
    try:
        versions.mkdir(parents=True, exist_ok=True)
        sweep(versions)
        # Gone before an error is worded: what there is of it takes no part in what is free.
        with partial_folder(versions) as hidden:
            version = NewVersion(hidden)
            yield version
            # On the disk: a name must not appear before its contents do.
            for path in hidden.rglob("*"):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
            version.path = _numbered(hidden, versions)
    except (OSError, tf.errors.OpError) as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        raise unwritable(versions, error, size) from error
    finally:
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
