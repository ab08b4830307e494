"""Writes embeddings batch by batch into a folder of Parquet files; killed at any moment, it resumes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfdml.embeddings import parquet
from tfdml.embeddings.reader import FORMAT, VERSION, ImageTable
from tfdml.errors import UserError, check_choice, check_positive
from tfdml.io.files import Kinds, atomic_write, fields, sha256_of
from tfdml.io.folders import PROGRESS, ResumableFolder

ROWS_PER_FILE = 4096
_KNOWN: Kinds = {"rows": int, "dimension": int, "files": dict}


class EmbeddingFolder(ResumableFolder):
    """A folder of embeddings that is written in parts, each of them a Parquet file.

    Args:
        folder: A new or empty folder, or one that was begun with the same identity.
        identity: What decides the embeddings, as JSON holds it.
    """

    def __init__(self, folder: str | os.PathLike, identity: Mapping[str, Any]):
        super().__init__(folder, "folder", FORMAT, VERSION, identity)

    def write_part(self, number: int, table: Any, **known: Any) -> dict[str, Any]:
        """Write the embeddings of a part, then the record that it is done.

        Args:
            number: Of the part.
            table: Of `parquet.table_of`; None for a part without any embedding.
            **known: What else to keep of the part.

        Returns:
            What `parts_done` returns of it.
        """
        name = parquet.part_name(number)
        stem = name.removesuffix(".parquet")
        if table is None:
            return self.finish_part(stem, {"rows": 0, "dimension": 0, **known})
        with atomic_write(self.path(name)) as temporary:
            parquet.write_file(temporary, table)
        dimension = table.schema.field("embedding").type.list_size
        return self.finish_part(stem, {"rows": table.num_rows, "dimension": dimension, **known}, [name])

    def parts_done(self, checked: bool = False) -> list[dict[str, Any]]:
        """Return what is known of the parts that are done, in their order: `rows`, `dimension`, `files` and more.

        Args:
            checked: Compare their files with their checksums.

        Raises:
            UserError: What is known is damaged; `checked`, a file is.
        """
        done = []
        for name in self.parts():
            known = fields(self.part(name, checked), _KNOWN, self.path(PROGRESS), self.remedy)
            files = [f"{name}.parquet"] if known["rows"] else []
            if known["rows"] < 0 or (known["dimension"] < 1 and files) or list(known["files"]) != files:
                raise UserError(f"{self.path(PROGRESS)} is damaged; {self.remedy}")
            done.append(known)
        return done

    def finish_embeddings(self, dtype: str, about: Mapping[str, Any], more: Iterable[str] = ()) -> dict[str, Any]:
        """Write the manifest.

        Args:
            dtype: One of `parquet.DTYPES`.
            about: Further entries.
            more: Names of further files of the folder.

        Returns:
            The manifest.

        Raises:
            UserError: The parts differ in dimension.
        """
        done = self.parts_done()
        dimensions = {known["dimension"] for known in done if known["rows"]}
        if len(dimensions) != 1:
            raise UserError(f"{self.folder} holds embeddings of {sorted(dimensions)} dimensions; delete it")
        count = sum(known["rows"] for known in done)
        entries = {"complete": True, "count": count, "dimension": dimensions.pop(), "dtype": dtype, **about}
        files = {
            name: {"sha256": file["sha256"], "rows": known["rows"]}
            for known in done
            for name, file in known["files"].items()
        }
        return self.finish(
            {**entries, "files": files | {name: {"sha256": sha256_of(self.path(name))} for name in more}}
        )


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
        check_choice("`dtype`", dtype, parquet.DTYPES)
        check_positive(rows_per_file=rows_per_file)
        parquet.require_utf8(images.names)
        parquet.require_utf8(images.class_names.values())
        self.identity = {**identity, "dtype": dtype, "rows_per_file": rows_per_file}
        self.folder = EmbeddingFolder(folder, self.identity)
        self.images = images
        self.dtype = dtype
        self.rows_per_file = rows_per_file
        self.count = len(images)
        self.rows = 0
        self._dimension = self._parts = 0
        self._batches: list[np.ndarray] = []  # appended, and not yet in a file
        self._lock = contextlib.ExitStack()

    @property
    def manifest(self) -> dict[str, Any]:
        """What `finish` wrote; empty before."""
        return self.folder.manifest

    def __enter__(self) -> EmbeddingWriter:
        with contextlib.ExitStack() as lock:
            lock.enter_context(self.folder.opened())
            self.rows = self.count if self.manifest else self._resumed()
            self._lock = lock.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

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
            first, more = self.images.names[self.rows + bad[0]], f"as do {len(bad) - 1} more of its batch"
            raise UserError(f"the embedding of {first} holds NaN or infinite values, {more}; has the model diverged?")
        if not self.rows:
            self._dimension = embeddings.shape[1]
            self.folder.begin({"count": self.count})
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
        return self.folder.finish_embeddings(self.dtype, about or {})

    def _write_file(self) -> None:
        vectors = np.concatenate(self._batches)
        table = parquet.table_of(self.images.columns(slice(self.rows - len(vectors), self.rows)), vectors, self.dtype)
        self.folder.write_part(self._parts, table)
        self._parts += 1
        self._batches = []

    def _resumed(self) -> int:
        """Return the rows of the files that an earlier process wrote and recorded."""
        if self.folder.plan is None:
            return 0
        done = self.folder.parts_done(checked=True)
        rows, self._parts = sum(known["rows"] for known in done), len(done)
        self._dimension = done[0]["dimension"] if done else 0
        in_turn = [name for known in done for name in known["files"]] == list(map(parquet.part_name, range(len(done))))
        if rows > self.count or not in_turn:
            raise UserError(f"{self.folder.path(PROGRESS)} is damaged; {self.folder.remedy}")
        return rows
