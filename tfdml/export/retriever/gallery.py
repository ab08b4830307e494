"""A retriever's gallery: embeddings of length 1, ids, labels and metadata, row by row."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.retrieval.exact import check_embeddings, unit_rows

NO_LABEL = -1
_LABELS = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True)
class GalleryItem:
    """One item of a gallery: an encoded image, or its embedding.

    Args:
        id: Its name, which no other item of the gallery has.
        image: The bytes of a JPEG, PNG or WebP file.
        embedding: (d,), by the retriever's own embedder; in place of `image`.
        label: Its class id; -1 for none.
        metadata: What a search returns with it, such as class name and path: anything that JSON can hold.

    Raises:
        UserError: The id is empty or no text; the label is no integer of 64 bits; there is neither image nor
            embedding, or both; JSON cannot hold the metadata.

    Example:
        >>> GalleryItem("car-17", image=jpeg, label=3, metadata={"class": "coupe"}).metadata
        {'class': 'coupe'}
    """

    id: str
    image: bytes | None = None
    embedding: np.ndarray | None = None
    label: int = NO_LABEL
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_id(self.id)
        if not isinstance(self.label, (int, np.integer)) or not _LABELS.min <= self.label <= _LABELS.max:
            raise UserError(f"gallery item {self.id}: its label must be an integer of 64 bits; got {self.label!r:.60}")
        if (self.image is None) == (self.embedding is None):
            raise UserError(f"gallery item {self.id}: give its image or its embedding, one of the two")
        self.metadata_text()

    def metadata_text(self) -> str:
        """The metadata as JSON."""
        try:
            text = json.dumps(dict(self.metadata), ensure_ascii=False, sort_keys=True, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"gallery item {self.id}: its metadata cannot be written as JSON: {error}") from error
        return text


@dataclasses.dataclass(frozen=True)
class UnreadableItem:
    """An item whose image cannot be read.

    Args:
        id: As `GalleryItem`.
        reason: Why it cannot, in words.
    """

    id: str
    reason: str


def check_id(name: Any) -> None:
    """Refuse what cannot be an id: it must be valid in JSON and in every protocol.

    Raises:
        UserError: It is no text, is empty, or is not UTF-8.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"the id of a gallery item must be a text that is not empty; got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the id {name!r} is not UTF-8: rename the item") from error


@dataclasses.dataclass(frozen=True)
class Gallery:
    """The items of a gallery, embedded.

    Args:
        embeddings: (N, d), finite, no row zero; brought to length 1 here.
        ids: N names, each once.
        labels: (N,) class ids, -1 for none.
        metadata: N texts, JSON.

    Raises:
        UserError: There is no item, the parts differ in number, an id occurs twice, or an embedding has no direction.

    Example:
        >>> Gallery(np.eye(2), ("a", "b"), np.array([0, 1]), ("{}", "{}")).without(["a"]).ids
        ('b',)
    """

    embeddings: np.ndarray
    ids: tuple[str, ...]
    labels: np.ndarray
    metadata: tuple[str, ...]

    def __post_init__(self):
        if not len(self.ids):
            raise UserError("the gallery is empty: a retriever needs at least one item")
        embeddings = check_embeddings(self.embeddings, "gallery embeddings")
        labels = np.asarray(self.labels, np.int64)
        if not len(embeddings) == len(self.ids) == len(self.metadata) or labels.shape != (len(self.ids),):
            raise UserError(
                f"the gallery has {len(embeddings)} embeddings, {len(self.ids)} ids, labels of shape {labels.shape} "
                f"and {len(self.metadata)} texts of metadata; one of each for every item"
            )
        zero = np.flatnonzero(~embeddings.any(axis=1))
        if len(zero):
            raise UserError(f"gallery item {self.ids[zero[0]]}: its embedding has length 0")
        twice = [name for name, count in collections.Counter(self.ids).items() if count > 1]
        if twice:
            raise UserError(f"{len(twice)} ids occur more than once in the gallery, the first is {twice[0]}")
        object.__setattr__(self, "embeddings", unit_rows(embeddings))
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def embedding_dim(self) -> int:
        """Numbers per embedding, d."""
        return self.embeddings.shape[1]

    def joined(self, other: Gallery) -> Gallery:
        """These items, then the others.

        Raises:
            UserError: An id is in both, or the embeddings have other dimensions.
        """
        if other.embedding_dim != self.embedding_dim:
            raise UserError(f"the gallery has {self.embedding_dim} dimensions, the new items {other.embedding_dim}")
        known = set(self.ids)
        both = [name for name in other.ids if name in known]
        if both:
            raise UserError(
                f"{len(both)} ids are in the gallery already, the first is {both[0]}; remove or replace them"
            )
        return Gallery(
            np.concatenate([self.embeddings, other.embeddings]),
            (*self.ids, *other.ids),
            np.concatenate([self.labels, other.labels]),
            (*self.metadata, *other.metadata),
        )

    def without(self, ids: Iterable[str]) -> Gallery:
        """The other items, in their order.

        Raises:
            UserError: An id is unknown, or nothing would be left.
        """
        gone = set(ids)
        unknown = sorted(map(str, gone.difference(self.ids)))
        if unknown:
            raise UserError(f"{len(unknown)} ids are not in the gallery, the first is {unknown[0]}")
        rows = [row for row, name in enumerate(self.ids) if name not in gone]
        if not rows:
            raise UserError("nothing would be left in the gallery")
        return Gallery(
            self.embeddings[rows],
            tuple(self.ids[row] for row in rows),
            self.labels[rows],
            tuple(self.metadata[row] for row in rows),
        )
