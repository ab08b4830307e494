"""What a demo searches and shows: the images of a gallery, or of a folder."""

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
from tfdml.embeddings.files import class_of_each
from tfdml.errors import UserError, counted
from tfdml.io.files import confined, is_remote
from tfdml.names import split_crop_name
from tfdml.retrieval.addresses import kind_of_gallery
from tfdml.retrieval.exact import check_embeddings
from tfdml.retrieval.galleries import About, Gallery, MemoryGallery, Rows, open_gallery

# Rows of a gallery that are read into memory.
MOST_ROWS = 1_000_000


class Pictures:
    """Images with embeddings in memory, searched exactly, and shown.

    Args:
        title: What they are called.
        names: N names: the paths of the images, below `folder`.
        embeddings: (N, d).
        classes: (N,) names or numbers; None: there are none.
        folder: Where the images are. No file of outside is opened; empty: no image is shown.
        distance: As `nearest_neighbors`.
        model: The fingerprint of the model that embedded them; empty: unknown.

    Raises:
        UserError: The embeddings are not finite.

    Example:
        >>> Pictures("cars", ["a.jpg", "b.jpg"], np.eye(2)).search(np.array([0.9, 0.1]), k=1)
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
        model: str = "",
    ):
        self.title = title
        self.model = model
        self.names = names
        self.folder = folder
        self.embeddings = check_embeddings(embeddings)
        self.classes = None if classes is None else list(map(str, classes))
        rows = list(map(str, range(len(self.embeddings))))
        about = About(distance, self.embeddings.shape[1])
        self._gallery = MemoryGallery(title, Rows(rows, self.embeddings, {}), about)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def distance(self) -> str:
        """What near means."""
        return self._gallery.distance

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
        # One more, for the row that is left out.
        most = min(k + (without is not None), len(self))
        neighbors = self._gallery.search(query[None], most)
        rows = map(int, neighbors.ids[0])
        pairs = zip(rows, neighbors.distances[0].tolist(), strict=True)
        return [(row, far) for row, far in pairs if row != without][:k]

    def picture(self, row: int, side: int) -> bytes:
        """Return an image as a JPEG whose longer side is at most `side` pixels.

        Raises:
            UserError: Its file is missing, no image, too large, or not below the folder.
        """
        from PIL import Image

        path = self._path(self.names[row])
        # The size of the whole image, of which it may be a part.
        size = FileImages((split_crop_name(path)[0],)).size(0)
        if size is None or size[0] * size[1] > SERVING_LIMIT:
            raise UserError(
                f"{path} is missing, no image, or of more than {SERVING_LIMIT:,} pixels"
            )
        picture = Image.fromarray(FileImages((path,)).picture(0))
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


def pictures_of(
    address: str,
    model: EmbeddingBackend,
    folder: str = "",
    distance: str = "euclidean",
    batch_size: int = 100,
) -> Pictures:
    """Return the images of a folder, which are embedded now, or those of a gallery.

    Args:
        address: A folder of images. What cannot be decoded of them is left out, and printed. Or the
            address of a gallery, as `tfdml.retrieval.open_gallery`.
        model: What embeds images and queries.
        folder: Where the images of a gallery are. It names them in its column `path`, or else by
            its ids.
        distance: What near means; databases and retrievers have their own.
        batch_size: Images that are embedded at once.

    Raises:
        UserError: There is no image, or no row; there are more than `MOST_ROWS`; or the gallery is
            of another model.
    """
    kind = kind_of_gallery(address)
    if kind == "images":
        return _pictures_of_folder(address, model, distance, batch_size)
    with open_gallery(address, distance=distance if kind == "embeddings" else "") as gallery:
        return pictures_of_gallery(gallery, folder, model.fingerprint())


def pictures_of_gallery(gallery: Gallery, folder: str, model: str) -> Pictures:
    """Return the images of a gallery, read into memory.

    Args:
        gallery: The gallery.
        folder: As `pictures_of`.
        model: The fingerprint of what embeds queries.

    Raises:
        UserError: As `pictures_of`, or the gallery holds classes.
    """
    gallery.check_holds_rows()
    rows = gallery.rows(MOST_ROWS + 1)
    about = gallery.check(rows.vectors.shape[1], model, "queries")
    if not 0 < len(rows.ids) <= MOST_ROWS:
        count = f"more than {MOST_ROWS:,} rows" if rows.ids else "no rows"
        raise UserError(
            f"holds {count}; the demo shows 1 to {MOST_ROWS:,}", gallery=gallery.address
        )
    paths = rows.columns.get("path", rows.ids)
    names = [path or name for name, path in zip(rows.ids, paths, strict=True)]
    classes = rows.columns["class"]
    named = classes if any(classes) else None
    return Pictures(
        gallery.address, names, rows.vectors, named, folder, about.distance, about.model
    )


def _pictures_of_folder(
    address: str, model: EmbeddingBackend, distance: str, batch_size: int
) -> Pictures:
    dataset = load("folder", address, "all")
    print(
        f"embedding {counted(len(dataset), 'image')}; a folder of tfdml embed as --gallery keeps "
        "embeddings",
        flush=True,
    )
    readable, vectors, faults = embed_readable(model, dataset, batch_size)
    if not len(readable):
        raise UserError(f"no image of {address} can be decoded; the first: {faults[0]}")
    if faults:
        print(
            f"demo: {counted(len(faults), 'image', 'are')} left out, the first is {faults[0]}",
            file=sys.stderr,
        )
    names = [os.path.relpath(dataset.images.name(row), address) for row in readable]
    classes = class_of_each(dataset.labels[readable], dataset.class_names)
    return Pictures(address, names, vectors, classes, address, distance, model.fingerprint())
