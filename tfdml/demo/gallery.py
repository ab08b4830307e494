"""What a demo searches: a gallery of stored embeddings, of a database, or of a folder of images."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data import load
from tfdml.data.images import FileImages
from tfdml.data.limits import SERVING_LIMIT
from tfdml.embeddings.backends import EmbeddingBackend, embed_readable
from tfdml.embeddings.files import (
    check_same_model,
    class_of_each,
    holds_embeddings,
    read_embeddings,
)
from tfdml.errors import UserError
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

    Raises:
        UserError: The embeddings are not finite.

    Example:
        >>> Gallery("cars", ["a.jpg", "b.jpg"], np.eye(2)).search(np.array([0.9, 0.1]), k=1)
        [(0, 0.1414213627576828)]
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        embeddings: np.ndarray,
        classes: Any = None,
        folder: str = "",
        distance: str = "euclidean",
    ):
        self.title, self.names, self.folder, self.distance = title, names, folder, distance
        self.embeddings = check_embeddings(embeddings)
        self.classes = None if classes is None else list(map(str, classes))

    def __len__(self) -> int:
        return len(self.embeddings)

    def search(
        self, query: np.ndarray, k: int, without: int | None = None
    ) -> list[tuple[int, float]]:
        """Return the rows and distances of the k nearest images, nearest first; fewer where there
        are fewer.

        Args:
            query: (d,).
            k: How many.
            without: A row that is left out.
        """
        options: dict[str, Any] = {
            "distance": self.distance,
            "own_rows": None if without is None else np.array([without]),
        }
        k = min(k, len(self) - (without is not None))
        rows, distances = nearest_neighbors(query[None], self.embeddings, k=k, **options)
        return list(zip(rows[0].tolist(), distances[0].tolist(), strict=True))

    def picture(self, row: int, side: int) -> bytes:
        """Return an image as a JPEG whose longer side is at most `side` pixels.

        Raises:
            UserError: Its file is missing, no image, too large, or not below the folder.
        """
        from PIL import Image

        path = self._path(self.names[row])
        images = FileImages((path,))
        size = images.size(0)
        if size is None or size[0] * size[1] > SERVING_LIMIT:
            raise UserError(
                f"{path} is missing, no image, or of more than {SERVING_LIMIT:,} pixels"
            )
        picture = Image.fromarray(images.picture(0))
        picture.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        return tf.io.encode_jpeg(np.asarray(picture), quality=85).numpy()

    def _path(self, name: str) -> str:
        """Return the path of an image: a name, which may be any path or URL, counts within the
        folder alone."""
        if not self.folder:
            raise UserError("the folder of the images is not known")
        if is_remote(self.folder):
            return confined(
                self.folder, name.removeprefix(self.folder.rstrip("/") + "/"), self.title
            )
        path, folder = (
            os.path.abspath(place) for place in (os.path.join(self.folder, name), self.folder)
        )
        if not Path(path).is_relative_to(folder):
            raise UserError(f"{name!r:.200} is not in {self.folder}")
        return path


def open_gallery(
    address: str,
    model: EmbeddingBackend,
    folder: str = "",
    distance: str = "euclidean",
    batch_size: int = 100,
) -> Gallery:
    """Return the gallery at a path or address, read into memory.

    Args:
        address: Of a database; or as `read_embeddings`; or a folder of images, which are embedded
            now. What cannot be decoded of them is left out, and printed.
        model: What embeds images and queries.
        folder: Where the images of embeddings are. A database names them in its column `path`, or
            else by its ids.
        distance: As `nearest_neighbors`; a database has its own.
        batch_size: Images that are embedded at once.

    Raises:
        UserError: There is no image, or no row; a database has more than `MOST_ROWS`; it is of
            another model.
    """
    if is_gallery(address):
        with connect(address) as database:
            rows = database.rows(MOST_ROWS + 1)
            database.check(rows.vectors.shape[1], model.fingerprint(), "queries")
            if not 0 < len(rows.ids) <= MOST_ROWS:
                count = f"more than {MOST_ROWS:,} rows" if rows.ids else "no rows"
                raise UserError(
                    f"holds {count}; the demo shows 1 to {MOST_ROWS:,}", uri=str(database.address)
                )
            names = [
                path or name for name, path in zip(rows.ids, rows.columns["path"], strict=True)
            ]
            texts: Any = rows.columns["class"] if any(rows.columns["class"]) else None
            return Gallery(
                str(database.address), names, rows.vectors, texts, folder, database.distance
            )
    if holds_embeddings(address):
        stored = read_embeddings(address)
        check_same_model(stored.model, model.fingerprint(), f"gallery={address} and the queries")
        return Gallery(address, stored.names, stored.embeddings, stored.classes, folder, distance)
    dataset = load("folder", address, "all")
    print(
        f"embedding {len(dataset):,} images; a folder of tfdml embed as --gallery keeps embeddings",
        flush=True,
    )
    readable, vectors, faults = embed_readable(model, dataset, batch_size)
    if not len(readable):
        raise UserError(f"no image of {address} can be decoded; the first: {faults[0]}")
    if faults:
        print(
            f"demo: {len(faults):,} images are left out, the first is {faults[0]}", file=sys.stderr
        )
    names = [os.path.relpath(dataset.images.name(row), address) for row in readable]
    classes = class_of_each(dataset.labels[readable], dataset.class_names)
    return Gallery(address, names, vectors, classes, address, distance)
