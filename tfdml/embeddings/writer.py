"""Writes embeddings batch by batch into a folder of Parquet files; killed at any moment, it resumes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdml.embeddings import parquet
from tfdml.embeddings.reader import FORMAT, VERSION, ImageTable
from tfdml.errors import UserError
from tfdml.io.files import atomic_write, require_local, require_space
from tfdml.io.folders import PROGRESS, ResumableFolder
from tfdml.io.manifests import fields

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
        self.identity = {**identity, "dtype": dtype, "rows_per_file": rows_per_file}
        self.folder = ResumableFolder(folder, "folder", FORMAT, VERSION, self.identity)
        self.images = images
        self.dtype = dtype
        self.rows_per_file = rows_per_file
        self.count = len(images)
        self.rows = 0
        self._dimension = 0
        self._batches: list[np.ndarray] = []  # appended, and not yet in a file
        self._files: dict[str, dict[str, Any]] = {}
        self._lock = contextlib.ExitStack()

    @property
    def manifest(self) -> dict[str, Any]:
        """What `finish` wrote; empty before."""
        return self.folder.manifest

    def __enter__(self) -> EmbeddingWriter:
        require_local(self.folder.folder, "folder")
        self._lock.enter_context(self.folder.opened())
        try:
            self.rows = self.count if self.manifest else self._resumed(checked=True)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def written(self) -> int:
        """How many embeddings are in the files of the folder; reads the folder without changing it.

        Raises:
            UserError: As on entering.
        """
        self.folder.read()
        return self.count if self.manifest else self._resumed(checked=False)

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
        if not self.rows:
            self._dimension = embeddings.shape[1]
            size = parquet.row_bytes(self._dimension, self.dtype) * self.count
            require_space(self.folder.folder, size, "folder", "the embeddings")
            self.folder.begin({"count": self.count, "dimension": self._dimension})
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
        if self._batches:
            self._write_file()
        return self.folder.finish(manifest_entries(self.count, self._dimension, self.dtype, about or {}, self._files))

    def _write_file(self) -> None:
        vectors = np.concatenate(self._batches)
        table = parquet.table_of(self.images.columns(slice(self.rows - len(vectors), self.rows)), vectors, self.dtype)
        name = parquet.part_name(len(self._files))
        path = self.folder.path(name)
        with atomic_write(path, parquet.row_bytes(self._dimension, self.dtype) * len(vectors)) as temporary:
            parquet.write_file(temporary, table)
        known = self.folder.finish_part(name.removesuffix(".parquet"), {"rows": len(vectors)}, [name])
        self._files[name] = {"sha256": known["files"][name]["sha256"], "rows": len(vectors)}
        self._batches = []

    def _resumed(self, checked: bool) -> int:
        """Return the rows of the files that an earlier process wrote and recorded."""
        if self.folder.plan is None:
            return 0
        where, remedy = self.folder.path(PROGRESS), self.folder.remedy
        self._dimension = fields(self.folder.plan, {"dimension": int}, where, remedy)["dimension"]
        self._files, rows = {}, 0
        for number, name in enumerate(self.folder.parts()):
            known = fields(self.folder.part(name, checked) or {}, {"rows": int, "files": dict}, where, remedy)
            file = f"{name}.parquet"
            fields(known["files"].get(file), {"sha256": str}, where, remedy)
            if file != parquet.part_name(number) or known["rows"] < 0:
                raise UserError(f"{where} is damaged; {remedy}")
            self._files[file] = {"sha256": known["files"][file]["sha256"], "rows": known["rows"]}
            rows += known["rows"]
        if rows > self.count or self._dimension < 1:
            raise UserError(f"{where} is damaged; {remedy}")
        return rows


def manifest_entries(
    count: int, dimension: int, dtype: str, about: Mapping[str, Any], files: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the manifest of a folder of embeddings holds besides its identity.

    Args:
        count: N.
        dimension: d.
        dtype: One of `parquet.DTYPES`.
        about: Further entries.
        files: By name, the `sha256` of each file, and the `rows` of those that hold embeddings.
    """
    entries = {"complete": True, "count": count, "dimension": dimension, "dtype": dtype}
    return {**entries, **about, "files": dict(files)}
