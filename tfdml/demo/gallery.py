"""What a demo and `tfdml search` search: a gallery of stored embeddings, a retriever, a database, or images."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data import load
from tfdml.data.dataset import find_faults
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.images import FileImages
from tfdml.embeddings.backends import EmbeddingBackend, embed_readable
from tfdml.embeddings.files import check_same_model, class_of_each, holds_embeddings, read_embeddings
from tfdml.embeddings.model_card import served_version
from tfdml.errors import UserError
from tfdml.evaluation import Calibration
from tfdml.export.retriever import RETRIEVER_CARD, Retriever
from tfdml.io.files import confined, is_remote
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors
from tfdml.retrieval.galleries import connect, is_gallery

# Rows of a database that are read into memory.
MOST_ROWS = 1_000_000


class Gallery:
    """Images with embeddings in memory, searched exactly.

    Args:
        title: What it is called.
        names: N names: the paths of the images, below `folder`.
        embeddings: (N, d).
        classes: (N,) names or numbers; None: there are none.
        folder: Where the images are. No file of outside is opened; empty: no image is shown.
        distance: As `nearest_neighbors`.
        model: The fingerprint of the model that embedded them; empty: not known.
        calibration: Within which distance an image is of the gallery; None: not known.

    Raises:
        UserError: The embeddings are not finite.

    Example:
        >>> Gallery("cars", ["a.jpg", "b.jpg"], np.eye(2)).search(np.array([[0.9, 0.1]]), k=1)[0]
        array([[0]])
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        embeddings: np.ndarray,
        classes: Any = None,
        folder: str = "",
        distance: str = "euclidean",
        model: str = "",
        calibration: Calibration | None = None,
    ):
        self.title, self.names, self.folder, self.distance = title, names, folder, distance
        self.embeddings, self.model, self.calibration = check_embeddings(embeddings), model, calibration
        self.classes = None if classes is None else list(map(str, classes))

    def __len__(self) -> int:
        return len(self.embeddings)

    def search(self, queries: np.ndarray, k: int, own_rows: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and distances of the k nearest images, nearest first; fewer where there are fewer.

        Args:
            queries: (Q, d).
            k: How many.
            own_rows: (Q,) a row for each query that is left out.

        Returns:
            (Q, k) rows and distances.
        """
        k = min(k, len(self) - (own_rows is not None))
        options: dict[str, Any] = {"distance": self.distance, "own_rows": own_rows}
        return nearest_neighbors(queries, self.embeddings, k=k, **options)

    def picture(self, row: int, side: int) -> bytes:
        """Return an image as a JPEG whose longer side is at most `side` pixels.

        Raises:
            UserError: Its file is missing, no image, too large, or not below the folder.
        """
        from PIL import Image

        path = self._path(self.names[row])
        images = FileImages((path,))
        if faults := find_faults(images, decode=False, max_pixels=SERVING_LIMIT):
            raise UserError(str(faults[0]))
        picture = Image.fromarray(images.picture(0))
        picture.thumbnail((side, side))
        return tf.io.encode_jpeg(np.asarray(picture), quality=85).numpy()

    def _path(self, name: str) -> str:
        """Return the path of an image: a name, which may be any path or URL, counts within the folder alone."""
        if not self.folder:
            raise UserError("the folder of the images is not known")
        if is_remote(self.folder):
            return confined(self.folder, name.removeprefix(self.folder.rstrip("/") + "/"), self.title)
        path, folder = (os.path.abspath(place) for place in (os.path.join(self.folder, name), self.folder))
        if not Path(path).is_relative_to(folder):
            raise UserError(f"{name!r:.200} is not in {self.folder}")
        return path


def is_retriever(address: str) -> bool:
    """Whether a path is that of a retriever, or of a folder of its versions."""
    version = served_version(Path(address))
    return version is not None and (version / RETRIEVER_CARD).is_file()


def open_gallery(
    address: str, source: EmbeddingBackend | None = None, folder: str = "", distance: str = "euclidean"
) -> Gallery:
    """Return the gallery at a path or address, read into memory.

    Args:
        address: Of a database or a retriever; or as `read_embeddings`; or a folder of images, which are embedded now.
            What cannot be decoded of them is left out, and printed.
        source: What embeds the images of a folder.
        folder: Where the images of embeddings are. A database names them in its column `path`, or else by its ids.
        distance: As `nearest_neighbors`; a database and a retriever have their own.

    Raises:
        UserError: There is no image, or no row; a database has more than `MOST_ROWS`.
    """
    if is_gallery(address):
        with connect(address) as database:
            rows, about = database.rows(MOST_ROWS + 1), database.about
        if not 0 < len(rows.ids) <= MOST_ROWS:
            raise UserError(f"`uri={database.address}` must have from 1 to {MOST_ROWS:,} rows to be read into memory")
        names = [path or name for name, path in zip(rows.ids, rows.columns["path"], strict=True)]
        texts: Any = rows.columns["class"] if any(rows.columns["class"]) else None
        model = about.model if about else ""
        return Gallery(str(database.address), names, rows.vectors, texts, folder, database.distance, model)
    if is_retriever(address):
        retriever = Retriever.load(address)
        items = retriever.gallery()
        options: dict[str, Any] = {"model": items.model, "calibration": retriever.calibration}
        return Gallery(address, items.ids, items.embeddings, items.classes, folder, **options)
    if holds_embeddings(address):
        stored = read_embeddings(address)
        return Gallery(address, stored.names, stored.embeddings, stored.classes, folder, distance, stored.model)
    dataset = load("folder", address, "all")
    if source is None:
        raise UserError(f"{address} is a folder of images: name the --model that embeds them")
    print(f"embedding {len(dataset):,} images; a folder of tfdml embed as --gallery keeps embeddings", flush=True)
    readable, vectors, faults = embed_readable(source, dataset, batch_size=100)
    if not len(readable):
        raise UserError(f"no image of {address} can be decoded; the first: {faults[0]}")
    if faults:
        print(f"{len(faults):,} images are left out, the first is {faults[0]}", file=sys.stderr)
    names = [os.path.relpath(dataset.images.name(row), address) for row in readable]
    classes = class_of_each(dataset.labels[readable], dataset.class_names)
    return Gallery(address, names, vectors, classes, address, distance, source.fingerprint())


def check_queries(gallery: Gallery, model: str) -> None:
    """Raise a `UserError` where queries are of another model than the gallery."""
    check_same_model(gallery.model, model, f"`gallery={gallery.title}` and the queries")
