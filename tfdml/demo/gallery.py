"""What a demo searches: galleries in memory and in databases, folders of images, and the map of a gallery."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import check
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.images import FileImages, images_checksum
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.embeddings.reader import ImageTable, read_attributes, read_embeddings
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError
from tfdml.export.gallery import images_of_folder
from tfdml.io.files import atomic_write, is_remote
from tfdml.io.folders import MANIFEST
from tfdml.report.embedding_map import lay_out
from tfdml.retrieval.database import GalleryDatabase
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors, row_blocks

# Rows of a database that are held here, to be looked at and drawn; all of it is searched.
MOST_ROWS = 100_000
# Candidates beyond k, which are then measured without rounding of large sums.
_SPARE = 64
# Images that t-SNE lays out; the others are placed between these.
_SAMPLE = 2000
_NEAREST_SAMPLED = 3
# Rows that are placed at once: few, as their distances to the whole sample are in memory.
_MAP_ROWS = 5_000
# The share of the mean of the negative examples that is subtracted, see `combined_query`.
NEGATIVE_SHARE = 0.25


# Values by attribute; rows and distances.
_Values = Mapping[str, str]
_Found = list[tuple[int, float]]


class Column:
    """The values of an attribute of all images, as codes of its different values.

    Args:
        values: (N,) anything that prints.
    """

    def __init__(self, values: Iterable[Any]):
        texts = np.array(["" if value is None else str(value) for value in values], dtype=np.str_)
        self.values, codes = np.unique(texts, return_inverse=True)
        self.codes = codes.astype(np.int32)

    def matches(self, value: str) -> np.ndarray:
        """Return (N,) booleans, which images have a value."""
        return np.isin(self.codes, np.flatnonzero(self.values == value))


class Gallery:
    """Images with embeddings in memory, searched exactly.

    Args:
        title: What it is called.
        names: N names: the paths of the images, relative to `folder`.
        embeddings: (N, d).
        attributes: (N,) values by name, such as `class`.
        folder: Where the images are. None of outside is shown; empty: names are paths as they are.
        distance: As `nearest_neighbors`.

    Raises:
        UserError: The embeddings are not finite.

    Example:
        >>> gallery = Gallery("cars", ["a.jpg", "b.jpg"], np.eye(2), {"class": ["bus", "coupe"]})
        >>> gallery.search(np.array([0.9, 0.1]), k=1)
        [(0, 0.1414213627576828)]
        >>> gallery.search(np.array([0.9, 0.1]), k=2, where={"class": "coupe"})[0][0]
        1
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        embeddings: np.ndarray,
        attributes: Mapping[str, Iterable[Any]],
        folder: str = "",
        distance: str = "euclidean",
    ):
        self.title, self.names, self.folder, self.distance = title, names, folder, distance
        self.embeddings = check_embeddings(embeddings)
        self.count, self.dimension = self.embeddings.shape
        self.columns = {name: Column(values) for name, values in attributes.items()}
        squares = np.einsum("nd,nd->n", self.embeddings, self.embeddings)
        # A product with a query, times the one and plus the other, is largest for the nearest.
        self._scale: Any = 1 / np.sqrt(np.maximum(squares, np.finfo(np.float32).tiny)) if distance == "cosine" else 1
        self._bias: Any = -0.5 * squares if distance in ("euclidean", "sqeuclidean") else 0

    def __len__(self) -> int:
        return len(self.embeddings)

    def describe(self, row: int) -> dict[str, Any]:
        """Return the row, name and attributes of an image, for JSON."""
        self._check(row)
        return {"row": row, "name": self.names[row], "attributes": self._attributes(row)}

    def _attributes(self, row: int) -> dict[str, str]:
        return {name: str(column.values[column.codes[row]]) for name, column in self.columns.items()}

    def vector(self, row: int) -> np.ndarray | None:
        """Return the embedding (d,) of an image; None for one that only a database has."""
        self._check(row)
        return self.embeddings[row] if row < len(self) else None

    def matching(self, where: Mapping[str, str]) -> np.ndarray:
        """Return (N,) booleans, which images have all of these values.

        Raises:
            UserError: There is no such attribute.
        """
        matching = np.ones(len(self), bool)
        for name, value in where.items():
            if name not in self.columns:
                known = ", ".join(self.columns) or "none"
                raise UserError(f"the gallery has no attribute {name!r:.60}; it has {known}")
            matching &= self.columns[name].matches(value)
        return matching

    def search(self, query: np.ndarray, k: int, where: _Values | None = None, without: Iterable[int] = ()) -> _Found:
        """Return the rows and distances of the k nearest images, nearest first; fewer where fewer match.

        Candidates come from one product with the gallery, and are measured by `nearest_neighbors`.

        Args:
            query: (d,).
            k: How many.
            where: Values that their attributes must have.
            without: Rows that are left out.
        """
        scores = self.embeddings @ np.asarray(query, np.float32) * self._scale + self._bias
        left = self.matching(where or {})
        left[list(without)] = False
        scores[~left] = -np.inf
        k = min(k, int(left.sum()))
        if not k:
            return []
        candidates = np.sort(np.argpartition(-scores, min(k + _SPARE, len(scores)) - 1)[: k + _SPARE])
        candidates = candidates[left[candidates]]
        found = nearest_neighbors(query[None], self.embeddings[candidates], k=k, distance=self.distance)
        return list(zip(candidates[found[0][0]].tolist(), found[1][0].tolist(), strict=True))

    def picture(self, row: int, side: int) -> bytes:
        """Return an image as a JPEG whose longer side is at most `side` pixels.

        Raises:
            UserError: There is no such row; its file is missing, no image, too large, or outside of the folder.
        """
        from PIL import Image

        picture = Image.fromarray(self._file(row).picture(0))
        picture.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        return tf.io.encode_jpeg(np.asarray(picture), quality=85).numpy()

    def encoded(self, row: int) -> bytes:
        """Return the bytes of the file of an image.

        Raises:
            UserError: As `picture`.
        """
        return self._file(row).encoded(0)

    def _file(self, row: int) -> FileImages:
        self._check(row)
        path, folder = os.path.join(self.folder, self.names[row]), self.folder
        if folder and not is_remote(folder) and not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
            raise UserError(f"{self.names[row]!r} is not in the folder of the gallery")
        images = FileImages((path,))
        size = images.size(0)
        if size is None or size[0] * size[1] > SERVING_LIMIT:
            raise UserError(f"{self.names[row]!r} is missing, no image, or of more than {SERVING_LIMIT:,} pixels")
        return images

    def _check(self, row: int) -> None:
        if type(row) is not int or not 0 <= row < len(self.names):
            raise UserError(f"there is no image {row!r:.60}; rows are numbered from 0 to {len(self.names) - 1}")


class DatabaseGallery(Gallery):
    """A gallery that a database searches; some of its rows are held here, to be looked at and drawn.

    Args:
        database: The open database, with its table.
        folder: Where the images are that its attribute `path` names, or else its ids.

    Raises:
        UserError: There is no table, or it is empty.
    """

    def __init__(self, database: GalleryDatabase, folder: str = ""):
        rows = database.rows(MOST_ROWS)
        if not rows.ids:
            raise UserError(f"`uri={database.address}` holds no rows: write it with tfdml index first")
        self.database, self._row_of = database, {name: row for row, name in enumerate(rows.ids)}
        columns = {name: values for name, values in rows.columns.items() if name != "source" and any(values)}
        names = list(columns.pop("path", rows.ids))
        super().__init__(str(database.address), names, rows.vectors, columns, folder, database.distance)
        self.count = len(database)
        # Rows that a search has found beyond those held.
        self._further: dict[int, dict[str, str]] = {}

    def _attributes(self, row: int) -> dict[str, str]:
        return super()._attributes(row) if row < len(self) else self._further[row]

    def search(self, query: np.ndarray, k: int, where: _Values | None = None, without: Iterable[int] = ()) -> _Found:
        """See `Gallery.search`."""
        left_out = set(without)
        found = self.database.search(query[None], k + len(left_out), where)
        neighbors = []
        for rank, name in enumerate(filter(None, found.ids[0])):  # the last are None where fewer match
            row = self._row_of.setdefault(name, len(self.names))
            if row == len(self.names):
                self.names.append(found.columns["path"][0, rank] or name)  # type: ignore[attr-defined]
                self._further[row] = {key: str(found.columns[key][0, rank]) for key in self.columns}
            if row not in left_out:
                neighbors.append((row, float(found.distances[0, rank])))
        return neighbors[:k]


def stored_gallery(path: str, folder: str = "", distance: str = "euclidean", title: str = "") -> Gallery:
    """Return the gallery of stored embeddings.

    Args:
        path: As `read_embeddings`.
        folder: Where the images are.
        distance: As `nearest_neighbors`.
        title: What to call it; by default the path.
    """
    stored = read_embeddings(path)
    attributes = read_attributes(path)
    names = attributes.pop("path", None) or list(map(str, range(len(stored))))
    return Gallery(title or path, names, stored.embeddings, attributes, folder, distance)


def folder_gallery(
    folder: str,
    model: EmbeddingBackend,
    cache: str | os.PathLike,
    batch_size: int = 100,
    distance: str = "euclidean",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Gallery:
    """Return the gallery of a folder of images, embedded at the first time; print which it is.

    The embeddings are kept in a folder of the cache that is named by checksums of the model, of the names of the images
    and of their bytes (length, beginning and end of each), so that no others are taken for them. An interrupted call
    resumes. Images that cannot be decoded are left out.

    Args:
        folder: A folder of class folders, or of images.
        model: What embeds.
        cache: The folder of the caches.
        batch_size: Images that are embedded at once.
        distance: As `nearest_neighbors`.
        progress: Called with how many images are embedded, and how many there are.

    Raises:
        UserError: There is no image, or none that can be decoded.
    """
    dataset = images_of_folder(folder)
    table = ImageTable.of([dataset], folder)
    identity = {"model": model.checksum(), "names": table.checksum(), "images": images_checksum(dataset.images)}
    path = os.path.join(cache, hashlib.sha256("\n".join(identity.values()).encode()).hexdigest()[:32])
    if os.path.isfile(os.path.join(path, MANIFEST)):
        print(f"reusing the embeddings in {path}, of the same model and images")
        return stored_gallery(path, folder, distance, folder)
    dataset = check(dataset, "skip", "decode")
    with EmbeddingWriter(path, identity, ImageTable.of([dataset], folder)) as writer:
        print(f"embedding {len(dataset):,} images into {path}")
        for vectors in model.stream(dataset, batch_size, writer.rows):
            writer.append(vectors)
            progress(writer.rows, len(dataset))
        writer.finish()
    return stored_gallery(path, folder, distance, folder)


def combined_query(positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """Return a query for images like the positive and unlike the negative examples (Rocchio, 1971).

    q = mean(positives) - 0.25 mean(negatives), scaled to the mean length of the positives. A single positive example
    without negative ones is the query as it is.

    Args:
        positives: (P, d) embeddings, P at least 1.
        negatives: (M, d) embeddings, M may be 0.

    Returns:
        (d,) float32.

    Example:
        >>> combined_query(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])).round(2)
        array([ 0.97, -0.24], dtype=float32)

    Source: J. J. Rocchio, Relevance feedback in information retrieval, in The SMART Retrieval System, 1971; the share
    is the usual one of beta = 0.75 and gamma = 0.15 to 0.25 (Manning, Raghavan and Schuetze, 2008, section 9.1.1).
    """
    query = positives.mean(axis=0)
    if len(negatives):
        query = query - NEGATIVE_SHARE * negatives.mean(axis=0)
    length = np.linalg.norm(query)
    wanted = np.linalg.norm(positives, axis=1).mean()
    return (query * (wanted / length if length > 0 else 1.0)).astype(np.float32)


def map_of(gallery: Gallery, cache: str | os.PathLike, seed: int = 0) -> np.ndarray | None:
    """Return the places of all images of a gallery in the plane, computed once and kept in the cache.

    t-SNE lays out a sample of 2,000 images. Each other image is placed at the mean of its 3 nearest images of the
    sample, weighted by the inverse of their distances (Shepard, 1968).

    Args:
        gallery: The gallery.
        cache: The folder of the caches.
        seed: Of the sample and of t-SNE.

    Returns:
        (N, 2) float32 in [0, 1]; None for fewer than five different images.
    """
    vectors = gallery.embeddings
    digest = hashlib.sha256(f"{gallery.distance} {seed} {_SAMPLE}".encode())
    digest.update(vectors.data)
    path = Path(cache) / f"map-{digest.hexdigest()[:32]}.npy"
    if path.is_file():
        return np.load(path)
    sample = np.sort(np.random.default_rng(seed).choice(len(vectors), min(_SAMPLE, len(vectors)), replace=False))
    laid_out = lay_out(vectors[sample], distance=gallery.distance, seed=seed)
    if laid_out is None:
        return None
    places = np.zeros((len(vectors), 2), np.float32)
    # The order by inner products is none of distances.
    distance = "cosine" if gallery.distance == "dot" else gallery.distance
    for rows in row_blocks(len(vectors), _MAP_ROWS):
        near, far = nearest_neighbors(vectors[rows], vectors[sample], k=_NEAREST_SAMPLED, distance=distance)
        weights = 1 / (far + 1e-6 * (1 + far.mean()))
        places[rows] = np.einsum("nm,nmc->nc", weights / weights.sum(axis=1, keepdims=True), laid_out[near])
    places[sample] = laid_out
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.save(file, places)
    return places
