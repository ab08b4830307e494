"""A retriever's version on disk: written whole, one writer at a time; old ones pruned."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends.model_card import CARD, describe_files
from tfdml.errors import UserError
from tfdml.evaluation.approximate_search import least_effort
from tfdml.export.retriever.endpoints import MAX_NEIGHBOURS, MAX_RESULTS
from tfdml.export.retriever.gallery import NO_LABEL, Gallery
from tfdml.export.retriever.graph import SEARCHES, copy_with_gallery
from tfdml.export.saved_model import SIGNATURES
from tfdml.export.versions import new_version, version_numbers
from tfdml.export.warm_up import FILE as WARM_UP
from tfdml.export.warm_up import prediction_log, write_warm_up
from tfdml.io.files import lock, partial_folder, write_json
from tfdml.io.manifests import Kinds, fields, read_json
from tfdml.retrieval.faiss_index import GalleryIndex, build_index

RETRIEVER_CARD = "retriever.json"
INDEX = "gallery.faiss"
# Above it a search through all of it would take tens of milliseconds for each query.
EXACT_LIMIT = 200_000
_CARD: Kinds = {
    "files": dict,
    "items": int,
    "classes": int,
    "embedding_dim": int,
    "exact_limit": int,
    "recall_wanted": float,
    "index": (dict, type(None)),
}
# What recall is measured at, and on how many items.
_NEIGHBOURS = 10
_QUERIES = 500
# k-means asks for 39 vectors a cell at least.
_SMALLEST_CELL = 39
_WARM_UP_SIDE = 256
_WARM_UP_SIZES = (1, 8)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a gallery is searched.

    Args:
        exact_limit: Galleries of more items are searched by an index.
        recall: Recall@10 that the index is to reach, as a fraction.
    """

    exact_limit: int = EXACT_LIMIT
    recall: float = 0.99


def write_version(
    source: Path, folder: Path, gallery: Gallery, settings: Settings, like: GalleryIndex | None = None
) -> Path:
    """Write a gallery as the next version.

    Args:
        source: A retriever's SavedModel, with or without a gallery, and its cards.
        folder: Where versions lie.
        gallery: The items.
        settings: How they are searched.
        like: An index of nearly the same items, whose cells are taken over, which saves their search.

    Returns:
        The path of the version.
    """
    exact = len(gallery) <= settings.exact_limit
    index = None if exact else _index(gallery.embeddings, like)
    measured = None if index is None else _index_card(index, gallery.embeddings, settings.recall)
    with new_version(folder) as version:
        copy_with_gallery(source, version.folder, gallery, in_graph=exact)
        if index is not None:
            index.save(version.folder / INDEX)
        _write_warm_up(version.folder, gallery, exact)
        files = describe_files(version.folder, _model_files(version.folder))["files"]
        write_json(version.folder / RETRIEVER_CARD, {**_card(gallery, settings, measured), "files": files})
        if (source / CARD).is_file():
            shutil.copyfile(source / CARD, version.folder / CARD)
    assert version.path is not None
    return version.path


def _model_files(folder: Path) -> list[Path]:
    """The files that answers come from, to find a damaged version."""
    index = [folder / INDEX] if (folder / INDEX).is_file() else []
    return [folder / "saved_model.pb", *sorted((folder / "variables").iterdir()), *index]


def read_card(path: Path) -> dict[str, Any]:
    """The card of a retriever's version.

    Raises:
        UserError: It has none, or not one of ours.
    """
    file = path / RETRIEVER_CARD
    if not file.exists():
        raise UserError(f"there is no retriever at {path}: it has no {RETRIEVER_CARD}")
    card = read_json(file)
    if card.get("kind") not in ("exact", "indexed"):
        raise UserError(f"{file} is not of a retriever")
    fields(card, _CARD, str(file))
    if card["kind"] == "indexed":
        cells = fields(card["index"], {"cells_searched": int}, f"{file}: index")["cells_searched"]
        if cells < 1:
            raise UserError(f"{file} is damaged: its index searches {cells} cells")
    return card


def write_embedder_card(embedder: Path, folder: Path) -> None:
    """The model card of the embedder inside, for those who use a retriever as an embedder."""
    if (embedder / CARD).is_file():
        card = read_json(embedder / CARD)
        # The files that it lists are not here.
        write_json(folder / CARD, {**card, "artefacts": {}, "signatures": [*SIGNATURES, *SEARCHES]})


def _card(gallery: Gallery, settings: Settings, index: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "kind": "exact" if index is None else "indexed",
        "items": len(gallery),
        "classes": len(np.unique(gallery.labels[gallery.labels != NO_LABEL])),
        "embedding_dim": gallery.embedding_dim,
        "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
        "signatures": [*SIGNATURES, *(SEARCHES if index is None else ())],
        "max_neighbours": MAX_NEIGHBOURS,
        "max_results": MAX_RESULTS,
        "exact_limit": settings.exact_limit,
        "recall_wanted": settings.recall,
        "index": index,
    }


def _index(embeddings: np.ndarray, like: GalleryIndex | None) -> GalleryIndex:
    count = len(embeddings)
    if like is not None and count / 2 <= len(like) <= 2 * count:
        return build_index(embeddings, distance="sqeuclidean", centres=like.centres())
    cells = max(1, min(int(4 * count**0.5), count // _SMALLEST_CELL))
    return build_index(embeddings, distance="sqeuclidean", lists=cells)


def _index_card(index: GalleryIndex, embeddings: np.ndarray, recall: float) -> dict[str, Any]:
    """How many cells are to be searched for the wanted recall, and what it is then."""
    found = least_effort(index, embeddings, recall, k=_NEIGHBOURS, sample=_QUERIES)
    return {
        "type": "IVFFlat, L2",
        "cells": index.lists,
        "cells_searched": found.effort,
        f"recall@{_NEIGHBOURS}": found.recall,
        "measured_on": f"{found.queries} items of the gallery, each left out of its own neighbours",
    }


def _write_warm_up(folder: Path, gallery: Gallery, searchable: bool) -> None:
    write_warm_up(folder, _WARM_UP_SIDE)
    if not searchable:
        return
    path = str(folder / WARM_UP)
    records = [record.numpy() for record in tf.data.TFRecordDataset(path)]
    grey = tf.io.encode_jpeg(tf.fill((_WARM_UP_SIDE, _WARM_UP_SIDE, 3), tf.constant(127, tf.uint8))).numpy()
    for size in _WARM_UP_SIZES:
        k = np.full(size, 10, np.int32)
        records += [
            prediction_log("search_bytes", image_bytes=[grey] * size, k=k),
            prediction_log("search_embedding", embedding=gallery.embeddings[:1].repeat(size, axis=0), k=k),
            prediction_log("search_each", image_bytes=[grey] * size, k=k),
        ]
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of the export folder.

    Raises:
        UserError: There is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder} cannot be opened: {error.strerror}") from error
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def prune(folder: str | os.PathLike, keep: int = 2) -> list[int]:
    """Delete all but the newest versions; a process that has loaded one keeps it.

    Args:
        folder: Where versions lie.
        keep: How many stay; servers may be loading the newest, and serve the one before meanwhile.

    Returns:
        The numbers of those that are gone.

    Raises:
        UserError: None would stay.

    Example:
        >>> prune("models/cars_retriever", keep=3)
        [1, 2]
    """
    if keep < 1:
        raise UserError(f"keep={keep}: at least the newest version stays")
    folder = Path(folder)
    with one_writer(folder):
        gone = version_numbers(folder)[:-keep]
        for number in gone:
            # Away from its number in one step: nobody may read half a version.
            hidden = partial_folder(folder)
            os.rename(folder / str(number), Path(hidden) / str(number))
            shutil.rmtree(hidden, ignore_errors=True)
    return gone
