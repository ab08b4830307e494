"""A retriever's gallery: its items, from folders and data sets, and their embeddings."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset, access_fault
from tfdml.data.images import FileImages
from tfdml.data.readers.label_files import LeftOut, images_below
from tfdml.data.readers.own_images import folder_members
from tfdml.errors import REASON, UserError, user_errors
from tfdml.retrieval.exact import check_embeddings, unit_rows

_BATCH_SIZE = 32
NO_LABEL = -1
UNKNOWN = "unknown"
_LABELS = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True)
class GalleryItem:
    """One item of a gallery: an encoded image, or its embedding.

    Args:
        id: Its name, which no other item of the gallery has.
        image: The bytes of a JPEG, PNG or WebP file.
        embedding: (d,), by the retriever's own embedder; in place of `image`.
        label: The number of its class; -1 for none.
        metadata: What a search returns with it: anything that JSON can hold. `class` is the name of its class.
        fault: Why its image cannot be read, in place of image and embedding.

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
    fault: str = ""

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id:
            raise UserError(f"the id of a gallery item must be a text that is not empty; got {self.id!r}")
        with user_errors(UnicodeEncodeError, f"the id {self.id!r} is not UTF-8: rename the item"):
            self.id.encode()  # valid in JSON and in every protocol
        if not isinstance(self.label, (int, np.integer)) or not _LABELS.min <= self.label <= _LABELS.max:
            raise UserError(f"gallery item {self.id}: its label must be an integer of 64 bits; got {self.label!r:.60}")
        if (self.image is not None) + (self.embedding is not None) + bool(self.fault) != 1:
            raise UserError(f"gallery item {self.id}: give its image or its embedding, one of the two")
        self.metadata_text()

    def metadata_text(self) -> str:
        """Return the metadata as JSON."""
        kinds = (TypeError, ValueError, RecursionError)
        with user_errors(kinds, f"gallery item {self.id}: its metadata cannot be written as JSON: {REASON}"):
            text = json.dumps(dict(self.metadata), ensure_ascii=False, sort_keys=True, allow_nan=False)
            text.encode()
            return text


@dataclasses.dataclass(frozen=True)
class Gallery:
    """The items of a gallery, embedded.

    Args:
        embeddings: (N, d), finite, no row zero; brought to length 1 here.
        ids: N names, each once.
        labels: (N,) numbers of classes, -1 for none. Classes go by name: all items of a class get the label of its
            first one, or the next free number if that is taken.
        metadata: N texts, JSON.

    Raises:
        UserError: There is no item, an id occurs twice, or an embedding has no direction.

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
        zero = np.flatnonzero(~embeddings.any(axis=1))
        if len(zero):
            raise UserError(f"gallery item {self.ids[zero[0]]}: its embedding has length 0")
        twice = [name for name, count in collections.Counter(self.ids).items() if count > 1]
        if twice:
            raise UserError(f"{len(twice)} ids occur more than once, the first is {twice[0]}: remove or replace it")
        object.__setattr__(self, "embeddings", unit_rows(embeddings))
        object.__setattr__(self, "labels", self._labels_by_name())

    def _labels_by_name(self) -> np.ndarray:
        names, numbers, used = self.classes, {"": NO_LABEL}, {NO_LABEL}
        free = itertools.count(int(max(self.labels)) + 1)
        for name, label in zip(names, self.labels.tolist(), strict=True):
            if name not in numbers:
                numbers[name] = next(free) if label in used else label
                used.add(numbers[name])
        return np.array([numbers[name] for name in names], np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> list[str]:
        """The name of each item's class, from its metadata, or else its label; empty where it has none."""
        return [
            str(json.loads(text).get("class", "" if label == NO_LABEL else label))
            for label, text in zip(self.labels.tolist(), self.metadata, strict=True)
        ]

    @property
    def embedding_dim(self) -> int:
        """Numbers per embedding, d."""
        return self.embeddings.shape[1]

    def joined(self, other: Gallery) -> Gallery:
        """Return these items, then the others.

        Raises:
            UserError: An id is in both.
        """
        return Gallery(
            np.concatenate([self.embeddings, other.embeddings]),
            (*self.ids, *other.ids),
            np.concatenate([self.labels, other.labels]),
            (*self.metadata, *other.metadata),
        )

    def without(self, ids: Iterable[str]) -> Gallery:
        """Return the other items, in their order.

        Raises:
            UserError: An id is unknown, or nothing would be left.
        """
        gone = set(ids)
        unknown = sorted(map(str, gone.difference(self.ids)))
        if unknown:
            raise UserError(f"{len(unknown)} ids are not in the gallery, the first is {unknown[0]}")
        rows = [row for row, name in enumerate(self.ids) if name not in gone]
        return Gallery(
            self.embeddings[rows],
            tuple(self.ids[row] for row in rows),
            self.labels[rows],
            tuple(self.metadata[row] for row in rows),
        )


def items_of_folder(folder: str | os.PathLike) -> Iterator[GalleryItem]:
    """Every image below a folder, read when its turn comes; in place of one that cannot be read, why.

    Args:
        folder: As `images_of_folder`, whose names below the folder are the ids.

    Raises:
        UserError: As `images_of_folder`.

    Example:
        >>> [item.id for item in items_of_folder("photos")]
        ['bus/0.jpg', 'bus/1.jpg', 'bus/2.jpg', 'coupe/0.jpg', ...]
    """
    return items_of_dataset(images_of_folder(folder), folder)


def images_of_folder(folder: str | os.PathLike) -> ImageDataset:
    """Return every image below a folder.

    Folders and files are read as those of `load("folder", folder, "all")`, splits included. Images that lie in no class
    folder have no class.

    Args:
        folder: A folder of class folders, or of images.

    Raises:
        UserError: There is no such folder, it or one below it may not be read, or it holds no image.

    Example:
        >>> images_of_folder("photos")
        ImageDataset('gallery', 'all', images=12, classes=4)
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    left_out = LeftOut("gallery", str(root))
    classes: dict[str, str] = {}
    for member in folder_members(str(root)):
        inside = images_below(member.path, left_out) if member.is_folder else [member.path]
        classes |= dict.fromkeys(inside, member.name if member.is_folder else "")
    if not classes:
        raise UserError(f"{folder} holds no image" + (f"; {left_out}" if left_out.kinds.total() else ""))
    left_out.report()
    class_names = sorted({*classes.values()} - {""})
    label_of = {name: label for label, name in enumerate(class_names)} | {"": NO_LABEL}
    paths = sorted(classes, key=lambda path: path.split(os.sep))
    labels = [label_of[classes[path]] for path in paths]
    images = FileImages(tuple(paths))
    return ImageDataset("gallery", "all", images, labels, dict(enumerate(class_names)))


def items_of_dataset(dataset: ImageDataset, directory: str | os.PathLike = "") -> Iterator[GalleryItem]:
    """Yield the images of a data set with their labels and class names; see `items_of_folder`.

    Args:
        dataset: The images.
        directory: Where the data set lies: ids of files below it are relative to it.
    """
    prefix = os.path.join(os.fspath(directory), "") if directory else ""
    for row in range(len(dataset)):
        name, label = dataset.images.name(row).removeprefix(prefix), int(dataset.labels[row])
        about = {"path": name}
        if label != NO_LABEL:
            about["class"] = dataset.class_names.get(label, str(label))
        try:
            image = dataset.images.encoded(row)
        except (OSError, UserError, tf.errors.OpError) as error:
            yield GalleryItem(name, fault=access_fault(error))
        else:
            yield GalleryItem(name, image, label=label, metadata=about)


def embedded(
    items: Iterable[GalleryItem] | ImageDataset,
    embed_each: Any,
    skip_bad: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Gallery:
    """Return the items as a gallery, embedded batch by batch; images are released at once.

    Args:
        items: The items, or the images of a data set.
        embed_each: The embedder's signature `embed_each`.
        skip_bad: Leave out images that cannot be read or decoded, and report each.
        report: Called with a line on every bad image, up to ten.

    Raises:
        UserError: An image cannot be read or decoded, and is not to be skipped; or no item is left.
    """
    vectors: list[np.ndarray] = []
    kept: list[tuple[str, int, str]] = []
    bad: list[str] = []
    items = items_of_dataset(items) if isinstance(items, ImageDataset) else iter(items)
    while batch := list(itertools.islice(items, _BATCH_SIZE)):
        images = [item.image for item in batch if item.image is not None]
        answer = embed_each(image_bytes=tf.constant(images, tf.string))
        answers = zip(answer["embedding"].numpy(), map(bytes.decode, answer["error"].numpy()), strict=True)
        for item in batch:
            vector, error = (item.embedding, item.fault) if item.image is None else next(answers)
            if error:
                bad.append(f"{item.id}: {error}")
            else:
                vectors.append(np.asarray(vector))
                kept.append((item.id, item.label, item.metadata_text()))
    for line in bad[:10]:
        report(f"bad image {line}")
    if bad and not skip_bad:
        raise UserError(
            f"{len(bad)} of {len(bad) + len(kept)} gallery images cannot be embedded, the first is {bad[0]}"
        )
    wanted = (embed_each.structured_outputs["embedding"].shape[1],)
    if wrong := [vector.shape for vector in vectors if vector.shape != wanted]:
        raise UserError(f"gallery embeddings must have the shape {wanted}, as the embedder's; got {wrong[0]}")
    ids, labels, metadata = zip(*kept, strict=True) if kept else ((), (), ())
    return Gallery(np.reshape(vectors, (-1, *wanted)), ids, np.array(labels, np.int64), metadata)
