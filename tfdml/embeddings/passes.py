"""Passes over many images: in parts, of which each goes into a file, by one process or by many."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.readers.image_files import images_named
from tfdml.data.readers.own_images import class_ids, read_rows
from tfdml.embeddings.backends import EmbeddingBackend, embed_readable
from tfdml.embeddings.files import EmbeddingFolder, ImageTable, PartRecord, require_utf8
from tfdml.errors import UserError
from tfdml.io.files import is_remote
from tfdml.io.tables import LIST_EXTENSIONS

# Called with the images done, the bad ones among them, and all.
Progress = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """Images of one split that go into one file.

    Args:
        number: Of the part.
        dataset: The images.
        columns: As `ImageTable.columns`.
        batch_size: Images per batch.
        padded: Images that batches are filled up to, as in a pass over the whole split.
        skip_bad: Leave out images that cannot be decoded.
    """

    number: int
    dataset: ImageDataset
    columns: dict[str, Any]
    batch_size: int
    padded: int
    skip_bad: bool

    def embed(self, backend: EmbeddingBackend, folder: EmbeddingFolder) -> PartRecord:
        """Embed the images, and write them.

        Raises:
            UserError: An image cannot be decoded, and is not to be left out; as
                `EmbeddingFolder.write_part`.
        """
        if not self.skip_bad:
            vectors = np.concatenate([*backend.stream(self.dataset, self.batch_size, self.padded)])
            return folder.write_part(self.number, self.columns, vectors)
        rows, vectors, faults = embed_readable(backend, self.dataset, self.batch_size)
        ids, paths = self.columns["id"], self.columns["path"]
        bad = [[ids[fault.index], paths[fault.index], fault.reason] for fault in faults]
        columns = {name: _values_of(values, rows) for name, values in self.columns.items()}
        return folder.write_part(self.number, columns, vectors, bad)


def _values_of(values: list | None, rows: np.ndarray) -> list | None:
    """Return the values of some rows of a column; None where it is None."""
    if values is None:
        return None
    return [values[row] for row in rows]


@dataclasses.dataclass(frozen=True)
class EmbeddingPass:
    """Images that are embedded into a folder.

    Args:
        splits: The images. No part, and no batch, holds images of two of them.
        images: What is stored next to their embeddings, in the same order.
        batch_size: Images per batch.
        rows_per_file: Images of a part, rounded up to whole batches.
        skip_bad: Leave out images that cannot be decoded, and list them.

    Raises:
        UserError: A name is not UTF-8.
    """

    splits: Sequence[ImageDataset]
    images: ImageTable
    batch_size: int = 100
    rows_per_file: int = 4096
    skip_bad: bool = False

    def __post_init__(self):
        require_utf8((*self.images.names, *self.images.class_names.values()))

    def identity(self, backend: EmbeddingBackend) -> dict[str, Any]:
        """Return what decides the embeddings: a folder that was begun with something else is
        refused."""
        return {
            "model": backend.checksum(),
            "kind of model": backend.kind,
            "view": backend.view,
            "images": self.images.checksum(),
            "batch_size": self.batch_size,
            "rows_per_file": self.rows_per_file,
        }

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order of the images."""
        # Whole batches, at least as many rows as a file is to have.
        size = math.ceil(self.rows_per_file / self.batch_size) * self.batch_size
        number = before = 0
        for dataset in self.splits:
            padded = min(self.batch_size, len(dataset))
            for first in range(0, len(dataset), size):
                last = min(first + size, len(dataset))
                columns = self.images.columns(slice(before + first, before + last))
                part = dataset.take(np.arange(first, last))
                yield Part(number, part, columns, self.batch_size, padded, self.skip_bad)
                number += 1
            before += len(dataset)

    def run(
        self,
        folder: EmbeddingFolder,
        embed: Callable[[Sequence[Part]], Iterable[PartRecord]],
        about: dict[str, Any],
        progress: Progress = lambda *_: None,
    ) -> bool:
        """Embed the parts that are not done, and finish the folder.

        Args:
            folder: Where to.
            embed: Embeds parts, and yields the record of each, in any order.
            about: Further entries of the manifest.
            progress: Called before the first part and after each.

        Returns:
            Whether anything was done.

        Raises:
            UserError: As `EmbeddingFolder`, or as `embed`.
        """
        with folder.opened():
            if folder.manifest:
                return False
            records = folder.parts()
            bad = sum(len(record.bad) for record in records.values())
            done = bad + sum(record.rows for record in records.values())
            progress(done, bad, len(self.images))
            for record in embed([part for part in self.parts() if part.number not in records]):
                bad += len(record.bad)
                done += len(record.bad) + record.rows
                progress(done, bad, len(self.images))
            folder.finish(len(self.images), about)
        return True


def images_of(source: str | Sequence[str]) -> ImageTable:
    """Return the images that a source names.

    Args:
        source: Files, folders and patterns of paths or of URLs, see
            `tfdml.data.readers.image_files.images_named`; or one list, see
            `tfdml.data.readers.own_images.read_list`, of which only `path` is required.

    Raises:
        UserError: It names no image, or the list is not as it should be.

    Example:
        >>> len(images_of("photos/**/*.jpg"))
        240
    """
    sources = [source] if isinstance(source, str) else source
    if len(sources) == 1 and sources[0].lower().endswith(LIST_EXTENSIONS):
        images = _images_of_list(sources[0])
    else:
        paths: list[str] = []
        for pattern in sources:
            paths += images_named("input", pattern)
        images = ImageTable(tuple(paths))
    if not len(images):
        raise UserError("names no image", input=",".join(sources))
    return images


def _images_of_list(source: str) -> ImageTable:
    """Return the images of a list, with what it says of them."""
    table = read_rows(source if is_remote(source) else os.path.abspath(source), required=("path",))
    labels = groups = None
    class_names: dict[int, str] = {}
    if "label" in table.columns:
        labels, class_names = class_ids(table, "label")
    if "group" in table.columns:
        groups = class_ids(table, "group")[0]
    paths = tuple(table.columns["path"])
    return ImageTable(paths, labels, table.columns.get("split"), class_names, groups)
