"""Gallery items from folders and data sets, and their embeddings by a retriever's own embedder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import EXTENSIONS
from tfdml.data.faults import access_fault
from tfdml.errors import UserError
from tfdml.export.retriever.gallery import NO_LABEL, Gallery, GalleryItem, UnreadableItem
from tfdml.io.files import read_bytes

_BATCH_SIZE = 32

_Item = TypeVar("_Item")


def items_of_folder(folder: str | os.PathLike) -> Iterator[GalleryItem | UnreadableItem]:
    """Every image below a folder, read when its turn comes; in place of one that cannot be read, why.

    An item's id is its path below the folder, its class the first folder on that path, its label the place of the class
    among the sorted ones; images right in the folder have no class. Hidden files and folders are left out,
    and so are links to folders.

    Args:
        folder: A folder of class folders, or of images.

    Raises:
        UserError: There is no such folder, it or one below it may not be read, or it holds no image.

    Example:
        >>> [item.id for item in items_of_folder("photos")]
        ['bus/0.jpg', 'bus/1.jpg', 'bus/2.jpg', 'coupe/0.jpg', ...]
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    paths = []
    for parent, folders, files in os.walk(root, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found = (name for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
        paths += [Path(parent, name).relative_to(root) for name in found]
    if not paths:
        raise UserError(f"{folder} holds no image ({', '.join(EXTENSIONS)})")
    paths.sort()
    label_of = {
        name: label for label, name in enumerate(sorted({path.parts[0] for path in paths if len(path.parts) > 1}))
    }
    return (_item(root, path, label_of) for path in paths)


def _item(root: Path, path: Path, label_of: dict[str, int]) -> GalleryItem | UnreadableItem:
    name, label = path.as_posix(), label_of[path.parts[0]] if len(path.parts) > 1 else NO_LABEL
    try:
        image = read_bytes(root / path)
    except OSError as error:
        return UnreadableItem(name, access_fault(error))
    about = {"path": name, **({"class": path.parts[0]} if label != NO_LABEL else {})}
    return GalleryItem(name, image, label=label, metadata=about)


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def items_of_dataset(
    dataset: ImageDataset, directory: str | os.PathLike = ""
) -> Iterator[GalleryItem | UnreadableItem]:
    """The images of a data set with their labels and class names; see `items_of_folder`.

    Args:
        dataset: The images.
        directory: Where the data set lies: ids of files below it are relative to it.
    """
    prefix = os.path.join(os.fspath(directory), "") if directory else ""
    for row in range(len(dataset)):
        name, label = dataset.images.name(row).removeprefix(prefix), int(dataset.labels[row])
        about = {"path": name, "class": dataset.class_names.get(label, str(label))}
        try:
            image = dataset.images.encoded(row)
        except (OSError, UserError, tf.errors.OpError) as error:
            yield UnreadableItem(name, access_fault(error))
        else:
            yield GalleryItem(name, image, label=label, metadata=about)


def embedded(
    items: Iterable[GalleryItem | UnreadableItem],
    embed_each: Callable[..., dict[str, tf.Tensor]],
    skip_bad: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Gallery:
    """The items as a gallery, embedded batch by batch; images are released at once.

    Args:
        items: The items.
        embed_each: The embedder's signature `embed_each`.
        skip_bad: Leave out images that cannot be read or decoded, and report each.
        report: Called with a line on every bad image, up to ten.

    Raises:
        UserError: An image cannot be read or decoded, and is not to be skipped; or no item is left.
    """
    vectors: list[np.ndarray] = []
    kept: list[tuple[str, int, str]] = []
    bad: list[str] = []
    for batch in _batches(items):
        images = [item.image for item in batch if isinstance(item, GalleryItem) and item.image is not None]
        answer = embed_each(image_bytes=tf.constant(images, tf.string))
        answers = zip(answer["embedding"].numpy(), answer["error"].numpy(), strict=True)
        for item in batch:
            if isinstance(item, UnreadableItem):
                bad.append(f"{item.id}: {item.reason}")
                continue
            vector, error = (np.asarray(item.embedding), b"") if item.image is None else next(answers)
            if error:
                bad.append(f"{item.id}: {error.decode()}")
            else:
                vectors.append(vector)
                kept.append((item.id, item.label, item.metadata_text()))
    for line in bad[:10]:
        report(f"bad image {line}")
    if bad and not skip_bad:
        raise UserError(
            f"{len(bad)} of {len(bad) + len(kept)} gallery images cannot be embedded, the first is {bad[0]}"
        )
    if not kept:
        raise UserError("the gallery is empty: a retriever needs at least one item")
    shapes = {vector.shape for vector in vectors}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise UserError(f"gallery embeddings must be (d,) each, of one d; got {', '.join(map(str, sorted(shapes)))}")
    ids, labels, metadata = zip(*kept, strict=True)
    return Gallery(np.stack(vectors), ids, np.array(labels, np.int64), metadata)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH_SIZE:
            yield batch
            batch = []
    if batch:
        yield batch
