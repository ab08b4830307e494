"""From a folder of embeddings into a gallery, batch by batch; a second call writes what is missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfdml.embeddings.compute import truncate
from tfdml.embeddings.files import StoredEmbeddings, read_embeddings, read_names
from tfdml.errors import UserError
from tfdml.io.files import sha256_of
from tfdml.retrieval.database import GalleryDatabase
from tfdml.retrieval.exact import row_blocks


@dataclasses.dataclass(frozen=True)
class EmbeddingsToIndex:
    """Stored embeddings with the ids of their rows in a gallery.

    Args:
        stored: The embeddings.
        names: What the images are called.
        ids: N ids, each once.
        source: What identifies these embeddings: of their checksums.
        truncate_dim: How many first dimensions are written, scaled to length 1; 0: all, as they are.
    """

    stored: StoredEmbeddings
    names: list[str]
    ids: list[str]
    source: str
    truncate_dim: int = 0

    @classmethod
    def read(cls, path: str | os.PathLike, prefix: str = "", truncate_dim: int = 0) -> EmbeddingsToIndex:
        """Return the embeddings of a folder that `tfdml embed` wrote, or of an .npz file.

        Args:
            path: The folder or file. Rows without a name are called by their number.
            prefix: Put before every name, for an id.
            truncate_dim: How many first dimensions are written, scaled to length 1; 0: all, as they are.

        Raises:
            UserError: There are none, they have fewer dimensions, or names occur twice.

        Example:
            >>> EmbeddingsToIndex.read("embeddings/cars", "cars/").ids[0]
            'cars/U+0045/0'
        """
        stored = read_embeddings(path)
        if truncate_dim:
            truncate(stored.embeddings[:1], truncate_dim)
        names = stored.names or read_names(path)
        if len(names) != len(stored):
            raise UserError(f"{stored.source} names {len(names):,} images of {len(stored):,} embeddings")
        ids = [f"{prefix}{name}" for name in names]
        if len(set(ids)) < len(ids):
            raise UserError(f"{stored.source}: {len(ids) - len(set(ids)):,} names occur more than once")
        files = stored.manifest.get("files") or {"file": sha256_of(Path(stored.source))}
        mark = hashlib.sha256(json.dumps([files, prefix, truncate_dim], sort_keys=True).encode()).hexdigest()[:16]
        return cls(stored, list(map(str, names)), ids, mark, truncate_dim)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dimension(self) -> int:
        """Of what is written."""
        return self.truncate_dim or self.stored.embeddings.shape[1]

    @property
    def model(self) -> str:
        """The fingerprint of their model; empty where it is not known."""
        model = self.stored.model
        return f"{self.truncate_dim} dimensions of {model}" if model and self.truncate_dim else model

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Return some of the embeddings, of which a memory-mapped file reads no others."""
        vectors = self.stored.embeddings[rows]
        return truncate(vectors, self.truncate_dim) if self.truncate_dim else vectors

    def columns(self, rows: np.ndarray) -> dict[str, list[str]]:
        """Return the texts of some rows: path and source, and class and role where they are known."""
        columns = {"path": [self.names[row] for row in rows], "source": [self.source] * len(rows)}
        for name, values in (("class", self.stored.classes), ("role", self.stored.roles)):
            if values is not None:
                columns[name] = values[rows].tolist()
        return columns

    def compare(self, gallery: GalleryDatabase) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows a gallery lacks, and at which others it has rows of other embeddings.

        Raises:
            UserError: The gallery is of another dimension or model.
        """
        missing, replaced = np.ones(len(self), bool), np.zeros(len(self), bool)
        if gallery.about is not None:
            gallery.check(self.dimension, self.model, self.stored.source)
            for block in row_blocks(len(self), gallery.batch_rows):
                there = gallery.rows(len(self), self.ids[block])
                sources = dict(zip(there.ids, there.columns["source"], strict=True))
                for row in range(block.start, block.stop):
                    source = sources.get(self.ids[row])
                    missing[row], replaced[row] = source is None, source not in (None, self.source)
        return np.flatnonzero(missing), np.flatnonzero(replaced)


def index_embeddings(
    gallery: GalleryDatabase,
    embeddings: EmbeddingsToIndex,
    replace: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> int:
    """Write the embeddings that a gallery lacks, and build the index that its address names.

    Rows are written `gallery.batch_rows` at a time. After a kill, the same call writes the rest.

    Args:
        gallery: Where to.
        embeddings: What.
        replace: Replace rows of other embeddings that have the same ids.
        progress: Called with how many rows are written.

    Returns:
        How many rows were written; 0 where all were there.

    Raises:
        UserError: An id is that of other embeddings, and `replace` is not set; or as `GalleryDatabase.upsert`. Nothing
            is written then.

    Example:
        >>> with connect(f"lancedb://{os.path.abspath('galleries')}") as gallery:
        ...     index_embeddings(gallery, EmbeddingsToIndex.read("embeddings/cars"))
        256
    """
    missing, others = embeddings.compare(gallery)
    if len(others) and not replace:
        count = f"{len(others):,} ids of {embeddings.stored.source}, of other embeddings, such as"
        advice = "set `replace=True` to replace these rows, or another `prefix` to keep both"
        raise UserError(f"`uri={gallery.address}` holds {count} {embeddings.ids[others[0]]}: {advice}")
    rows = np.union1d(missing, others)
    for block in row_blocks(len(rows), gallery.batch_rows):
        part = rows[block]
        ids = [embeddings.ids[row] for row in part]
        gallery.upsert(ids, embeddings.vectors(part), embeddings.columns(part), model=embeddings.model)
        progress(block.stop)
    gallery.optimize()
    return len(rows)
