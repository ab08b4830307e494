"""Embeddings written batch by batch into a folder: killed at any moment, they go on after the last whole batch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdml.disk_space import as_size, free_space, require_space
from tfdml.embeddings import parquet
from tfdml.embeddings import reader as disk
from tfdml.embeddings.image_table import ImageTable
from tfdml.embeddings.output_folder import (
    PARTIAL,
    lock_folder,
    read_state,
    tidy,
    write_archive,
)
from tfdml.errors import UserError
from tfdml.storage import atomic_write, sha256_of, write_json
from tfdml.version import __version__

FORMATS = ("npy", "npz", "parquet")
FILE_BYTES = 2**28
_MEGABYTE = 2**20


class EmbeddingWriter:
    """Writes embeddings into a folder of its own; a context manager.

    Every batch is on the disk before the progress file records it, and the progress file is replaced whole. The
    manifest comes last: a folder without it is unfinished. While open, the folder is locked against other writers.

    Args:
        folder: A new or empty folder, or one that was begun with the same `identity`.
        identity: What decides the embeddings, such as the checksums of model and data, as JSON holds it.
        images: What the embeddings are of, in their order.

    Attributes:
        rows: How many embeddings are written; on entering, by an earlier process.
        manifest: What `finish` wrote; empty before.

    Raises:
        UserError: On entering: the folder holds something else, was begun with another identity, is written by another
            process, or what lies in it is damaged. Later: the disk is full, or embeddings are not as announced.

    Example:
        >>> with EmbeddingWriter("embeddings", {"model": "sha256:..."}, ImageTable.of([test])) as writer:
        ...     for first in range(writer.rows, len(test), 100):
        ...         writer.append(embeddings[first : first + 100])
        ...     manifest = writer.finish()
        >>> manifest["count"]
        256
    """

    def __init__(self, folder: str | os.PathLike, identity: Mapping[str, Any], images: ImageTable):
        self.folder = Path(folder)
        self.identity = dict(identity)
        self.images = images
        self.count = len(images)
        self.rows = 0
        self.manifest: dict[str, Any] = {}
        self._digest = hashlib.sha256()
        self._dimension = 0
        self._file: BinaryIO | None = None
        self._held = contextlib.ExitStack()

    def __enter__(self) -> EmbeddingWriter:
        try:
            with self._as_user_error():
                read_state(self.folder, self.identity)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._held.callback(os.close, lock_folder(self.folder))
                tidy(self.folder)
                # Once more, now that nobody else can write.
                self.manifest, progress = read_state(self.folder, self.identity)
                if self.manifest:
                    self.rows = self.count
                    self._clear()
                elif progress:
                    self._resume(progress)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported
            self._held.close()
        self._file = None

    def append(self, embeddings: np.ndarray) -> None:
        """Write the embeddings (B, d) of the next images.

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
                self._begin(embeddings.shape[1])
            assert self._file is not None
            data = embeddings.tobytes()
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._digest.update(data)
            self._note(self.rows + len(embeddings))
            self.rows += len(embeddings)

    def finish(
        self,
        about: Mapping[str, Any] | None = None,
        form: str = "npy",
        dtype: str = "float32",
        file_bytes: int = FILE_BYTES,
    ) -> dict[str, Any]:
        """Write what goes with the embeddings and, last of all, the manifest.

        Args:
            about: Further entries of the manifest.
            form: `"npy"`: each array in a file of its own, which can be memory-mapped; `"npz"`: all in one file;
                `"parquet"`: one row per image in files of bounded size.
            dtype: Of Parquet: `"float32"`, or `"int8"` with a scale for each row.
            file_bytes: About the bytes of a Parquet file.

        Returns:
            The manifest.

        Raises:
            UserError: Embeddings are missing; the disk is full.
        """
        if form not in FORMATS:
            raise UserError(f"unknown format {form!r}; one of {', '.join(FORMATS)}")
        if dtype not in (parquet.DTYPES if form == "parquet" else parquet.DTYPES[:1]):
            raise UserError(f"`dtype={dtype}`: float32, or int8 with the format parquet")
        if self.rows != self.count:
            raise UserError(f"there are {self.rows} embeddings of {self.count} images")
        with self._as_user_error():
            if form == "parquet":
                files = self._pack_parquet(dtype, file_bytes)
            else:
                with atomic_write(self.folder / disk.IMAGES) as path:
                    self.images.write(path)
                files = self._pack() if form == "npz" else self._settle()
                files[disk.IMAGES] = {"sha256": sha256_of(self.folder / disk.IMAGES)}
            self.manifest = {
                "format": disk.FORMAT,
                "version": disk.VERSION,
                "tfdml": __version__,
                "complete": True,
                "count": self.count,
                "dimension": self._dimension,
                "dtype": dtype,
                "identity": self.identity,
                **(about or {}),
                "files": files,
            }
            write_json(self.folder / disk.MANIFEST, self.manifest)
            self._clear()
        return self.manifest

    def _clear(self) -> None:
        """Remove what only an unfinished folder needs."""
        for leftover in (disk.PROGRESS, PARTIAL):
            (self.folder / leftover).unlink(missing_ok=True)

    def _resume(self, progress: Mapping[str, Any]) -> None:
        """Open what an earlier process wrote, up to its last recorded batch."""
        path = self._data()
        rows, self._dimension = progress["rows"], progress["dimension"]
        if not (0 <= rows <= self.count and self._dimension > 0):
            raise UserError(f"{self.folder / disk.PROGRESS} is damaged; delete {self.folder} to start again")
        noted = len(self._header()) + 4 * rows * self._dimension
        try:
            self._file = self._held.enter_context(open(path, "r+b"))  # noqa: SIM115
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing; delete {self.folder} to start again") from error
        left = noted
        while left and (piece := self._file.read(min(left, _MEGABYTE))):
            self._digest.update(piece)
            left -= len(piece)
        if self._digest.hexdigest() != progress["sha256"]:
            raise UserError(f"{path} is not as {disk.PROGRESS} says: damaged; delete {self.folder} to start again")
        self._file.truncate(noted)
        self._file.seek(noted)
        self.rows = rows

    def _begin(self, dimension: int) -> None:
        require_space(self.folder, 4 * self.count * dimension, "folder", "the embeddings")
        self._dimension = dimension
        self._digest = hashlib.sha256(self._header())
        self._file = self._held.enter_context(open(self.folder / PARTIAL, "wb"))  # noqa: SIM115
        self._file.write(self._header())

    def _header(self) -> bytes:
        header = io.BytesIO()
        shape = (self.count, self._dimension)
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()

    def _note(self, rows: int) -> None:
        progress = {
            "format": disk.FORMAT,
            "version": disk.VERSION,
            "identity": self.identity,
            "rows": rows,
            "count": self.count,
            "dimension": self._dimension,
            "sha256": self._digest.hexdigest(),
        }
        write_json(self.folder / disk.PROGRESS, progress)

    def _data(self) -> Path:
        """Where the embeddings are: under their final name only if a process was killed while it finished."""
        partial = self.folder / PARTIAL
        return partial if partial.is_file() else self.folder / disk.EMBEDDINGS

    def _settle(self) -> dict[str, Any]:
        if self._data().name == PARTIAL:
            os.replace(self.folder / PARTIAL, self.folder / disk.EMBEDDINGS)
        files = {disk.EMBEDDINGS: {"sha256": self._digest.hexdigest(), "shape": [self.count, self._dimension]}}
        for name, array in ((disk.LABELS, self.images.labels), (disk.ROLES, self.images.roles)):
            with atomic_write(self.folder / name) as path:
                np.save(path, array)
            files[name] = {"sha256": sha256_of(self.folder / name), "shape": [self.count]}
        return files

    def _pack(self) -> dict[str, Any]:
        arrays = {
            "embeddings": np.load(self._data(), mmap_mode="r"),
            "labels": self.images.labels,
            "roles": self.images.roles,
            "names": np.array(self.images.names, np.str_),
        }
        write_archive(self.folder / disk.ARCHIVE, arrays)
        path = self.folder / disk.ARCHIVE
        return {disk.ARCHIVE: {"sha256": sha256_of(path), "shape": [self.count, self._dimension]}}

    def _pack_parquet(self, dtype: str, file_bytes: int) -> dict[str, Any]:
        per_row = parquet.row_bytes(self._dimension, dtype)
        require_space(self.folder, per_row * self.count, "folder", "the Parquet files, beside what they are made of,")
        for left in self.folder.glob("part-*.parquet"):  # by a process that was killed while it finished
            left.unlink()
        embeddings, files = np.load(self._data(), mmap_mode="r"), {}
        rows = max(1, file_bytes // per_row)
        for number, first in enumerate(range(0, self.count, rows)):
            part = slice(first, min(first + rows, self.count))
            table = parquet.table_of(self.images.columns(part), embeddings[part], dtype)
            path = self.folder / parquet.part_name(number)
            with atomic_write(path) as temporary:
                parquet.write_file(temporary, table)
            files[path.name] = {"sha256": sha256_of(path), "rows": table.num_rows}
        return files

    @contextlib.contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Errors of the operating system as one line that says how to go on."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                needed = 4 * (self.count - self.rows) * max(self._dimension, 1)
                raise UserError(
                    f"`folder={self.folder}`: the disk is full ({error.strerror}) after {self.rows:,} of "
                    f"{self.count:,} embeddings; the rest needs about {as_size(needed)}, and "
                    f"{as_size(free_space(self.folder) or 0)} are free; free some "
                    "space and run the same command again: it goes on from there"
                ) from error
            raise UserError(f"`folder={self.folder}` cannot be written: {error.strerror or error}") from error
