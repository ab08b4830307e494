"""Folders that are written part by part: killed at any moment, they resume and lose at most the part in work."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfdml.errors import UserError, differences
from tfdml.io import files
from tfdml.io.files import compare_files, confined, fields, read_json
from tfdml.version import __version__

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_PARTS = "progress"


class ResumableFolder:
    """A folder of files that are written part by part; no part is seen before it is whole.

    `progress.json` holds the identity and the plan, `progress/NAME.json` what is known of a part that is done, and
    `manifest.json` all of it at the end; the others are then removed.

    Args:
        folder: A new or empty folder, or one that was begun with the same identity.
        argument: The argument that names it, for messages.
        kind: What the folder holds, as `format` in its files.
        version: Of that format.
        identity: What decides the content. A folder that was begun with another is refused.

    Attributes:
        manifest: What `finish` wrote; empty before.
        plan: What `begin` was given; None before.

    Example:
        >>> folder = ResumableFolder("squares", "out", "squares", 1, {"largest": 3})
        >>> with folder.opened():
        ...     if folder.plan is None and not folder.manifest:
        ...         folder.begin({"parts": 1})
    """

    def __init__(self, folder: str | os.PathLike, argument: str, kind: str, version: int, identity: Mapping[str, Any]):
        self.folder = os.fspath(folder)
        self.argument, self.identity = argument, dict(identity)
        self.header = {"format": kind, "version": version}
        self.remedy = f"delete {self.folder} to start again, or name another folder"
        self.manifest: dict[str, Any] = {}
        self.plan: dict[str, Any] | None = None

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.folder}/{name}"

    def read(self) -> None:
        """Read the manifest or the plan, and change nothing.

        Raises:
            UserError: It holds something else, or was begun with another identity; the message names what differs.
        """
        self.manifest, self.plan = {}, None
        if files.is_file(self.folder):
            raise UserError(f"`{self.argument}={self.folder}` is a file; name a folder")
        names = [name for name in files.listing(self.folder) if not files.is_debris(name)]
        found = next((name for name in (MANIFEST, PROGRESS) if name in names), None)
        if found is None:
            if names:
                raise UserError(f"`{self.argument}={self.folder}` holds other files ({names[0]} ...); name another")
            return
        path = self.path(found)
        value = read_json(path, remedy=self.remedy)
        if any(value.get(key) != expected for key, expected in self.header.items()):
            raise UserError(f"`{self.argument}={self.folder}` holds a {found} of something else; name a new folder")
        fields(value, {"identity": dict}, path, self.remedy)
        different = differences(value["identity"], self.identity, lambda x: x if isinstance(x, str) else json.dumps(x))
        if different:
            raise UserError(f"`{self.argument}={self.folder}` was begun with something else: {different}; name another")
        if found == MANIFEST:
            self.manifest = value
        else:
            self.plan = fields(value, {"plan": dict}, path, self.remedy)["plan"]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the lock of the folder, and removes what a killed process left half-written; makes the folder.

        Raises:
            UserError: As `read`; another process holds the lock; the folder cannot be written.
        """
        self.read()
        with contextlib.ExitStack() as stack:
            try:
                _make_folder(self.folder)
                if not files.is_remote(self.folder):  # stores have no locks
                    stack.enter_context(files.locked(self.folder, self.argument))
                for folder in (self.folder, self.path(_PARTS)):
                    for name in files.listing(folder):
                        if name.startswith(files.PARTIAL_PREFIX):
                            files.remove(f"{folder}/{name}")
                self.read()  # again, now that nobody else can write
                if self.manifest:
                    self.discard()
            except OSError as error:
                raise files.unwritable(self.folder, error) from error
            yield

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write the identity and the plan; the parts of an earlier plan are forgotten."""
        files.remove(self.path(_PARTS))
        files.write_json(self.path(PROGRESS), {**self.header, "identity": self.identity, "plan": dict(plan)})
        self.plan = dict(plan)

    def parts(self) -> list[str]:
        """Return the names of the parts that are done, sorted."""
        names = files.listing(self.path(_PARTS))
        return [name.removesuffix(".json") for name in names if name.endswith(".json") and not files.is_debris(name)]

    def part(self, name: str, checked: bool = False) -> dict[str, Any] | None:
        """Return what is known of a part; None where it is not done.

        Args:
            name: The part.
            checked: Compare its files with their checksums.

        Raises:
            UserError: What is known of it is damaged; `checked`, a file is.
        """
        path = self.path(f"{_PARTS}/{name}.json")
        if not files.is_file(path):
            return None
        known = fields(read_json(path, remedy=self.remedy), {"files": dict}, path, self.remedy)
        if checked:
            compare_files(self.folder, known["files"], path, self.remedy)
        return known

    def has_files(self, known: Mapping[str, Any]) -> bool:
        """Whether the files of a part are there with the sizes that `part` states."""
        sizes = {confined(self.folder, name, PROGRESS): file.get("bytes") for name, file in known["files"].items()}
        return all(_size_of(path) == size for path, size in sizes.items())

    def finish_part(
        self, name: str, known: Mapping[str, Any], written: Iterable[str] | Mapping[str, Any] = ()
    ) -> dict[str, Any]:
        """Record that a part is done, once its files are written.

        Args:
            name: The part.
            known: What to keep of it.
            written: The names of its files, of which size and checksum are added as `files`; or those, by name.

        Returns:
            What `part` returns from now on.
        """
        if not isinstance(written, Mapping):
            paths = {file: self.path(file) for file in written}
            written = {file: {"bytes": _size_of(path), "sha256": files.sha256_of(path)} for file, path in paths.items()}
        known = {**known, "files": dict(written)}
        _make_folder(self.path(_PARTS))
        files.write_json(self.path(f"{_PARTS}/{name}.json"), known)
        return known

    def finish(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest, and remove what only an unfinished folder needs.

        Args:
            entries: What it holds besides format, version and identity.

        Returns:
            The manifest.
        """
        self.manifest = {**self.header, "tfdml": __version__, "identity": self.identity, **entries}
        files.write_json(self.path(MANIFEST), self.manifest)
        self.discard()
        return self.manifest

    def discard(self) -> None:
        """Remove the plan and what is known of the parts."""
        files.remove(self.path(_PARTS))
        files.remove(self.path(PROGRESS))


def _make_folder(path: str) -> None:
    filesystem, there = files.filesystem_of(path)
    filesystem.makedirs(there, exist_ok=True)


def _size_of(path: str) -> int | None:
    filesystem, there = files.filesystem_of(path)
    return filesystem.size(there) if filesystem.isfile(there) else None
