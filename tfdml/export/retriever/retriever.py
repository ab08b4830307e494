"""A retriever in Python: build, load, search, change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.errors import UserError
from tfdml.export.network import in_float32
from tfdml.export.retriever.gallery import Gallery, GalleryItem, UnreadableItem
from tfdml.export.retriever.graph import write_graph
from tfdml.export.retriever.items import embedded, items_of_dataset
from tfdml.export.retriever.loaded import LoadedVersion, Neighbours, Queries, newest_version
from tfdml.export.retriever.version import EXACT_LIMIT, Settings, one_writer, write_embedder_card, write_version
from tfdml.export.saved_model import write_saved_model
from tfdml.export.versions import version_numbers
from tfdml.io.files import scratch_folder
from tfdml.models import AnyEmbedder


class Retriever:
    """Finds the items of a gallery that are nearest to images or embeddings.

    It answers from memory: versions may be written, replaced and pruned beneath it. `search` may be called from any
    number of threads, also while another thread calls `add`, `remove` or `refresh`.

    Make one with `Retriever.build` or `Retriever.load`.

    Example:
        >>> retriever = Retriever.load("models/cars_retriever")
        >>> retriever.search(["photos/coupe/2.jpg"], k=3).ids
        array([['coupe/2.jpg', ...]], dtype=object)
        >>> retriever.add([GalleryItem("new", image=jpeg)])
        PosixPath('models/cars_retriever/6')
    """

    def __init__(self, version: LoadedVersion):
        self._version = version

    @classmethod
    def build(
        cls,
        embedder: AnyEmbedder | str | os.PathLike,
        items: Iterable[GalleryItem | UnreadableItem] | ImageDataset,
        folder: str | os.PathLike,
        *,
        exact_limit: int = EXACT_LIMIT,
        recall: float = 0.99,
        skip_bad: bool = False,
        report: Callable[[str], None] = logging.info,
    ) -> Retriever:
        """Embed a gallery, write it as the next version of a retriever, and load that.

        Args:
            embedder: What embeds: an exported version, a folder of them, or a Keras embedder, which is exported first.
            items: The gallery: items, or the images of a data set.
            folder: Where versions lie; earlier versions stay.
            exact_limit: Galleries of more items are searched by a faiss index beside the SavedModel.
            recall: Recall@10 that such an index is to reach on the gallery's own items, as a fraction.
            skip_bad: Leave out images that cannot be read or decoded, instead of refusing the gallery.
            report: Called with a line on every bad image, up to ten.

        Raises:
            UserError: An item is bad or occurs twice, there is none, or the folder cannot be written.
        """
        settings = Settings(exact_limit, recall)
        if isinstance(items, ImageDataset):
            items = items_of_dataset(items)
        with scratch_folder() as name:
            exported, around = Path(name) / "embedder", Path(name) / "retriever"
            if isinstance(embedder, AnyEmbedder):
                write_saved_model(in_float32(embedder), exported)
            else:
                exported = newest_version(Path(embedder))
            loaded = write_graph(exported, around)
            write_embedder_card(exported, around)
            gallery = embedded(items, loaded.signatures["embed_each"], skip_bad, report)
            _check_dimensions(gallery, loaded)
            path = write_version(around, Path(folder), gallery, settings)
        return cls(LoadedVersion.read(path))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Retriever:
        """A retriever into memory.

        Args:
            path: One version, or a folder of them, of which the newest is taken.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        return cls(LoadedVersion.newest(Path(path)))

    @property
    def path(self) -> Path:
        """The version in memory."""
        return self._version.path

    @property
    def card(self) -> dict[str, Any]:
        """The version's card: kind, items, index and its measured recall."""
        return dict(self._version.card)

    def __len__(self) -> int:
        return self._version.card["items"]

    def __repr__(self) -> str:
        card = self._version.card
        return f"Retriever({str(self.path)!r}: {card['items']:,} items, {card['embedding_dim']}-d, {card['kind']})"

    def gallery(self) -> Gallery:
        """The items."""
        return self._version.gallery()

    def embed(self, images: Queries) -> np.ndarray:
        """(B, d) embeddings of images: encoded bytes, paths of files, or (B, H, W, 3) uint8.

        Raises:
            UserError: One of them cannot be decoded; it is named.
        """
        return self._version.embed(images)

    def search(self, queries: Queries, k: int, *, expand: int = 0, alpha: float = 3.0) -> Neighbours:
        """The k nearest items of every query; the whole gallery where k is more than it holds.

        With `expand`, queries are first moved by their nearest items (`tfdml.retrieval.expand_queries`),
        and searched a second time.

        Args:
            queries: (B, d) or (d,) floats, embeddings of any length but 0; or images: encoded bytes, paths of files, or
                (B, H, W, 3) or (H, W, 3) uint8.
            k: From 1 to `MAX_NEIGHBOURS`.
            expand: How many items a query is moved by; 0: it is searched as it is. Not where there is an index.
            alpha: The exponent of their similarities, at least 0; 0: all weigh as much as the query.

        Returns:
            (B, min(k, N)) neighbours; B is 1 for a single query.

        Raises:
            UserError: A query is bad; it is named. Or the retriever cannot expand queries.
        """
        return self._version.search(queries, k, expand, alpha)

    def add(self, items: Iterable[GalleryItem | UnreadableItem] | ImageDataset, *, replace: bool = False) -> Path:
        """Write a version with more items, and go on with it.

        It is added to the newest version there is, whoever wrote it. Two that add at once wait for one another.

        Args:
            items: The new items; they come last.
            replace: Let items take the place of those with their ids.

        Returns:
            The path of the new version.

        Raises:
            UserError: An item is bad, or its id is in the gallery already; no version is written.
        """
        added = items_of_dataset(items) if isinstance(items, ImageDataset) else items

        def joined(version: LoadedVersion, gallery: Gallery) -> Gallery:
            new = embedded(added, version.loaded.signatures["embed_each"])
            _check_dimensions(new, version.loaded)
            old = set(gallery.ids).intersection(new.ids) if replace else set()
            if len(old) == len(gallery):
                return new
            return (gallery.without(old) if old else gallery).joined(new)

        return self._change(joined)

    def remove(self, ids: Iterable[str]) -> Path:
        """Write a version without some items, and go on with it; as `add`.

        Raises:
            UserError: An id is not in the gallery, or none would be left; no version is written.
        """
        gone = [ids] if isinstance(ids, str) else list(ids)
        return self._change(lambda _, gallery: gallery.without(gone))

    def refresh(self) -> bool:
        """Go on with the newest version, if there is a newer one than that in memory.

        Returns:
            Whether there was.
        """
        folder = self._version.path.parent
        if max(version_numbers(folder), default=0) <= self._version.number:
            return False
        self._version = LoadedVersion.newest(folder)
        return True

    def _change(self, change: Callable[[LoadedVersion, Gallery], Gallery]) -> Path:
        if not self._version.path.name.isdecimal():
            raise UserError(f"{self._version.path} is no numbered version: it cannot be followed by another")
        folder = self._version.path.parent
        with one_writer(folder):
            self.refresh()
            version = self._version
            card = version.card
            gallery = change(version, version.gallery())
            settings = Settings(card["exact_limit"], card["recall_wanted"])
            path = write_version(version.path, folder, gallery, settings, version.index)
            self._version = LoadedVersion.read(path)
        return path


def _check_dimensions(gallery: Gallery, loaded: Any) -> None:
    wanted = loaded.signatures["serving_default"].structured_outputs["embedding"].shape[1]
    if gallery.embedding_dim != wanted:
        raise UserError(f"gallery embeddings have {gallery.embedding_dim} dimensions, the embedder gives {wanted}")
