"""Writes embeddings batch by batch into a folder of Parquet files; killed at any moment, it resumes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings import parquet
from tfdml.embeddings.reader import FORMAT, MANIFEST, PROGRESS, VERSION, ImageTable, read_manifest
from tfdml.errors import UserError, differences
from tfdml.io.files import (
    PARTIAL_PREFIX,
    atomic_write,
    is_debris,
    locked,
    require_local,
    require_space,
    sha256_of,
    write_json,
)
from tfdml.io.manifests import compare_files, fields, read_json
from tfdml.version import __version__

ROWS_PER_FILE = 4096


class EmbeddingWriter:
    """Writes embeddings into a folder of its own; a context manager.

    Every file is written atomically before the progress file records it and its checksum. The manifest comes last: a
    folder without it is unfinished. While open, the folder is locked against other writers.

    Args:
        folder: A new or empty folder, or one that was begun with the same arguments.
        identity: What decides the embeddings, such as the checksums of model and data, as JSON holds it.
        images: The images that the embeddings are of, in their order.
        dtype: `"float32"`, or `"int8"` with a scale for each row.
        rows_per_file: A file ends with the batch by which it has so many rows. A kill loses the rows of one file at
            most.

    Attributes:
        rows: How many embeddings have been appended; on entering, how many an earlier process wrote.
        manifest: What `finish` wrote; empty before.

    Raises:
        UserError: A name is not UTF-8. On entering: the folder holds something else, was begun with another identity,
            is written by another process, or has damaged files. Later: the disk is full, or embeddings are not as
            announced.

    Example:
        >>> with EmbeddingWriter("embeddings", {"model": "sha256:..."}, ImageTable.of([test])) as writer:
        ...     for first in range(writer.rows, len(test), 100):
        ...         writer.append(embeddings[first : first + 100])
        ...     manifest = writer.finish()
        >>> manifest["count"]
        256
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        identity: Mapping[str, Any],
        images: ImageTable,
        dtype: str = "float32",
        rows_per_file: int = ROWS_PER_FILE,
    ):
        if dtype not in parquet.DTYPES:
            raise UserError(f"`dtype={dtype}`: one of {', '.join(parquet.DTYPES)}")
        if rows_per_file < 1:
            raise UserError(f"`rows_per_file={rows_per_file}`: must be at least 1")
        parquet.require_utf8(images.names)
        parquet.require_utf8(images.class_names.values())
        self.folder = Path(folder)
        self.identity = {**identity, "dtype": dtype, "rows_per_file": rows_per_file}
        self.images = images
        self.dtype = dtype
        self.rows_per_file = rows_per_file
        self.count = len(images)
        self.rows = 0
        self.manifest: dict[str, Any] = {}
        self._dimension = 0
        self._batches: list[np.ndarray] = []  # appended, and not yet in a file
        self._files: dict[str, dict[str, Any]] = {}
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> EmbeddingWriter:
        try:
            with self._as_user_error():
                read_state(self.folder, self.identity)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(locked(self.folder, "folder"))
                tidy(self.folder)
                # Once more, now that nobody else can write.
                self.manifest, progress = read_state(self.folder, self.identity)
                if self.manifest:
                    self.rows = self.count
                    (self.folder / PROGRESS).unlink(missing_ok=True)
                elif progress:
                    self._resume(progress)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def written(self) -> int:
        """How many embeddings are in the files of the folder; reads the folder without changing it.

        Raises:
            UserError: As on entering.
        """
        manifest, progress = read_state(self.folder, self.identity)
        return self.count if manifest else _rows_of(self.folder, progress.get("files", {}))

    def append(self, embeddings: np.ndarray) -> None:
        """Add the embeddings (B, d) of the next images.

        Raises:
            UserError: They are not finite (the first image is named), of another dimension, or too many; the disk is
                full.
        """
        embeddings = np.ascontiguousarray(embeddings, "<f4")
        if embeddings.ndim != 2 or 0 in embeddings.shape or (self.rows and embeddings.shape[1] != self._dimension):
            expected = f"(images, {self._dimension})" if self.rows else "(images, dimensions)"
            raise UserError(f"embeddings must be {expected}, not of shape {embeddings.shape}")
        if self.rows + len(embeddings) > self.count:
            raise UserError(f"there are more embeddings than the {self.count} images")
        bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
        if len(bad):
            raise UserError(
                f"the embedding of {self.images.names[self.rows + bad[0]]} holds NaN or infinite values, as do "
                f"{len(bad) - 1} more of its batch; look for a diverged model or a corrupt image"
            )
        with self._as_user_error():
            if not self.rows:
                self._dimension = embeddings.shape[1]
                size = parquet.row_bytes(self._dimension, self.dtype) * self.count
                require_space(self.folder, size, "folder", "the embeddings")
                self._record()
            self._batches.append(embeddings)
            self.rows += len(embeddings)
            if sum(map(len, self._batches)) >= self.rows_per_file:
                self._write_file()

    def finish(self, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the last file and then the manifest; a finished folder stays as it is.

        Args:
            about: Further entries of the manifest.

        Returns:
            The manifest.

        Raises:
            UserError: Embeddings are missing; the disk is full.
        """
        if self.manifest:
            return self.manifest
        if self.rows != self.count:
            raise UserError(f"there are {self.rows} embeddings of {self.count} images")
        with self._as_user_error():
            if self._batches:
                self._write_file()
            self.manifest = write_manifest(
                self.folder, self.identity, self.count, self._dimension, self.dtype, about or {}, self._files
            )
            (self.folder / PROGRESS).unlink(missing_ok=True)
        return self.manifest

    def _write_file(self) -> None:
        vectors = np.concatenate(self._batches)
        table = parquet.table_of(self.images.columns(slice(self.rows - len(vectors), self.rows)), vectors, self.dtype)
        path = self.folder / parquet.part_name(len(self._files))
        with atomic_write(path, parquet.row_bytes(self._dimension, self.dtype) * len(vectors)) as temporary:
            parquet.write_file(temporary, table)
        self._files[path.name] = {"sha256": sha256_of(path), "rows": len(vectors)}
        self._batches = []
        self._record()

    def _record(self) -> None:
        progress = {"format": FORMAT, "version": VERSION, "identity": self.identity, "count": self.count}
        write_json(self.folder / PROGRESS, {**progress, "dimension": self._dimension, "files": self._files})

    def _resume(self, progress: Mapping[str, Any]) -> None:
        """Go on after the files that an earlier process wrote and recorded."""
        remedy = f"delete {self.folder} to start again"
        self._dimension, self._files = progress["dimension"], progress["files"]
        self.rows = _rows_of(self.folder, self._files)
        names = [parquet.part_name(number) for number in range(len(self._files))]
        if not (0 <= self.rows <= self.count and self._dimension > 0 and sorted(self._files) == names):
            raise UserError(f"{self.folder / PROGRESS} is damaged; {remedy}")
        compare_files(self.folder, self._files, str(self.folder / PROGRESS), remedy)

    @contextlib.contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Raise errors of the operating system as one line."""
        try:
            yield
        except OSError as error:
            raise UserError(f"`folder={self.folder}` cannot be written: {error.strerror or error}") from error


def write_manifest(
    folder: Path,
    identity: Mapping[str, Any],
    count: int,
    dimension: int,
    dtype: str,
    about: Mapping[str, Any],
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the manifest of a folder whose files are all there.

    Args:
        folder: The folder.
        identity: What decides the embeddings.
        count: N.
        dimension: d.
        dtype: One of `parquet.DTYPES`.
        about: Further entries.
        files: By name, the `sha256` of each file, and the `rows` of those that hold embeddings.

    Returns:
        The manifest.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tfdml": __version__,
        "complete": True,
        "count": count,
        "dimension": dimension,
        "dtype": dtype,
        "identity": dict(identity),
        **about,
        "files": dict(files),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _rows_of(folder: Path, files: dict[str, Any]) -> int:
    """The rows of the files that a progress file records."""
    where, remedy = f"{folder / PROGRESS}: files", f"delete {folder} or name another folder"
    fields(files, dict.fromkeys(files, dict), where, remedy)
    return sum(fields(entry, {"rows": int, "sha256": str}, where, remedy)["rows"] for entry in files.values())


def read_state(folder: str | os.PathLike, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the manifest and the progress of a folder, either or both empty.

    Args:
        folder: The folder; it need not exist.
        identity: What decides the embeddings that are to be written there.

    Raises:
        UserError: It holds something else, or was begun with another identity: what differs is named.

    Example:
        >>> read_state("no/such/folder", {})
        ({}, {})
    """
    require_local(folder, "folder")
    folder = Path(folder)
    if not folder.exists():
        return {}, {}
    if not folder.is_dir():
        raise UserError(f"`folder={folder}` is a file; name a folder")
    manifest, progress = read_manifest(folder), _read_progress(folder)
    others = sorted(entry.name for entry in folder.iterdir() if not is_debris(entry.name))
    if not manifest and not progress and others:
        raise UserError(f"`folder={folder}` holds other files ({others[0]} ...); name a new or an empty folder")
    begun = (manifest or progress).get("identity", identity)
    different = differences(begun, identity, lambda value: value if isinstance(value, str) else json.dumps(value))
    if different:
        raise UserError(
            f"`folder={folder}` was begun with something else: {different}; name another folder, or delete it"
        )
    return manifest, progress


def _read_progress(folder: Path) -> dict[str, Any]:
    path, remedy = folder / PROGRESS, f"delete {folder} or name another folder"
    if not path.exists():
        return {}
    progress = read_json(path, remedy=remedy)
    if progress.get("format") != FORMAT:
        raise UserError(f"{path} is damaged or of something else; {remedy}")
    return fields(progress, {"identity": dict, "dimension": int, "files": dict}, str(path), remedy)


def tidy(folder: Path) -> None:
    """Remove the temporary files of a process that was killed while it wrote."""
    for entry in folder.iterdir():
        if entry.name.startswith(PARTIAL_PREFIX):
            entry.unlink(missing_ok=True)
