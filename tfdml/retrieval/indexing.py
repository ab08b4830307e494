"""From a folder of embeddings into a gallery, batch by batch; begun again, it continues."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings.compute import truncate
from tfdml.embeddings.reader import StoredEmbeddings, read_embeddings, read_names
from tfdml.errors import UserError
from tfdml.io.files import sha256_of
from tfdml.retrieval.database import GalleryDatabase, checked_ids
from tfdml.retrieval.exact import row_blocks

# The attribute with the embeddings that a row belongs to.
SOURCE = "source"


@dataclasses.dataclass(frozen=True)
class EmbeddingsToIndex:
    """Stored embeddings with what their rows are called in a gallery.

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
            UserError: There are none or they have fewer dimensions, names occur twice, or one cannot be an id.

        Example:
            >>> EmbeddingsToIndex.read("embeddings/cars", "cars/").ids[0]
            'cars/U+0045/0'
        """
        stored = read_embeddings(path)
        if truncate_dim:
            truncate(stored.embeddings[:1], truncate_dim)
        names = stored.names
        if names is None:
            in_folder = bool(stored.manifest)
            names = read_names(stored.source) if in_folder else tuple(map(str, range(len(stored))))
        if len(names) != len(stored):
            raise UserError(f"{stored.source} names {len(names):,} images of {len(stored):,} embeddings")
        ids = checked_ids(prefix + str(name) for name in names)
        files = stored.manifest.get("files") or {"file": sha256_of(Path(stored.source))}
        mark = hashlib.sha256(
            json.dumps([files, prefix, *([truncate_dim] if truncate_dim else [])], sort_keys=True).encode()
        ).hexdigest()[:16]
        return cls(stored, list(map(str, names)), ids, mark, truncate_dim)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dimension(self) -> int:
        """Of what is written."""
        return self.truncate_dim or self.stored.embeddings.shape[1]

    def vectors(self, rows: slice) -> np.ndarray:
        """Return some of the embeddings, of which a memory-mapped file reads no others."""
        vectors = self.stored.embeddings[rows]
        return truncate(vectors, self.truncate_dim) if self.truncate_dim else vectors

    def attributes(self, rows: slice) -> dict[str, Any]:
        """`path` and `source`, and `label` and `role` where they are known."""
        found: dict[str, Any] = {"path": self.names[rows]}
        if self.stored.labels is not None:
            found["label"] = self.stored.labels[rows]
        if self.stored.roles is not None:
            found["role"] = self.stored.roles[rows].tolist()
        return {**found, SOURCE: [self.source] * len(found["path"])}

    def written_in(self, gallery: GalleryDatabase) -> int:
        """How many rows a gallery has of these embeddings.

        Raises:
            UserError: It holds something else, or embeddings of another dimension.
        """
        if gallery.about is None:
            return 0
        if gallery.about.dimension != self.dimension:
            sides = f"dimension {gallery.about.dimension}, {self.stored.source} of {self.dimension}"
            raise UserError(f"`uri={gallery.address}` is of {sides}: name another table, ?table=..., or another model")
        if SOURCE not in gallery.about.attributes:
            raise UserError(f"`uri={gallery.address}` was not written by tfdml index; name another table by ?table=...")
        return gallery.count({SOURCE: self.source})


def index_embeddings(
    gallery: GalleryDatabase,
    embeddings: EmbeddingsToIndex,
    progress: Callable[[int], None] = lambda rows: None,
) -> int:
    """Write embeddings into a gallery, and build the index that its address names.

    Rows are written in their order, `gallery.batch_rows` at a time, with the attributes `path`, `label`, `role` and
    `source`. So what an earlier call has left, killed at any moment, shows in how many rows of the source are there:
    this call continues at the last whole batch. Where rows were deleted since, all are written again.

    Args:
        gallery: Where to.
        embeddings: What.
        progress: Called with how many rows are done.

    Returns:
        How many rows were written; 0 where all were there.

    Raises:
        UserError: As `GalleryDatabase.upsert`; nothing is written where dimensions or attributes differ.

    Example:
        >>> with connect(f"lancedb://{os.path.abspath('galleries')}") as gallery:
        ...     index_embeddings(gallery, EmbeddingsToIndex.read("embeddings/cars"))
        256
    """
    done = embeddings.written_in(gallery)
    written = 0
    if done < len(embeddings):
        written = _write(gallery, embeddings, done - done % gallery.batch_rows, progress)
        if embeddings.written_in(gallery) < len(embeddings):
            written = _write(gallery, embeddings, 0, progress)
    gallery.optimize()
    return written


def _write(gallery: GalleryDatabase, embeddings: EmbeddingsToIndex, first: int, progress: Callable[[int], None]) -> int:
    for rows in row_blocks(len(embeddings), gallery.batch_rows)[first // gallery.batch_rows :]:
        gallery.upsert(embeddings.ids[rows], embeddings.vectors(rows), embeddings.attributes(rows))
        progress(rows.stop)
    return len(embeddings) - first
