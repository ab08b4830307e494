"""Embeddings of the images that can be read, and what is wrong with the others."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import ImageError, find_faults
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.errors import UserError


@dataclasses.dataclass(frozen=True)
class Readable:
    """What `embed_readable` finds.

    Args:
        rows: (M,) which images of the set could be read, ascending.
        vectors: (M, d) float32 their embeddings.
        faults: What is wrong with the others.
    """

    rows: np.ndarray
    vectors: np.ndarray
    faults: list[ImageError]


def embed_readable(backend: EmbeddingBackend, dataset: ImageDataset, batch_size: int) -> Readable:
    """Embed the images of a set that can be read, in one pass.

    Args:
        backend: The model.
        dataset: The images.
        batch_size: B.

    Raises:
        UserError: An embedding is not finite; as the backend.

    Example:
        >>> images = tfdml.data.EncodedImages((jpeg, jpeg[:300]), ("1.jpg", "2.jpg"))
        >>> dataset = tfdml.data.ImageDataset("cars", "test", images, [0, 0], {0: "coupe"})
        >>> found = embed_readable(tfdml.embeddings.backends.load_backend("models/cars_jrd"), dataset, batch_size=100)
        >>> [str(fault) for fault in found.faults]
        ['2.jpg: truncated JPEG (no end-of-image marker)']
    """
    found = list(backend.stream_readable(dataset, batch_size))
    rows = np.concatenate([rows for rows, _ in found]) if found else np.zeros(0, np.int64)
    vectors = np.concatenate([vectors for _, vectors in found]) if found else np.zeros((0, 0), np.float32)
    diverged = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(diverged):
        raise UserError(
            f"the embedding of {dataset.images.name(rows[diverged[0]])} holds NaN or infinite values; look for a "
            "diverged model"
        )
    left_out = np.setdiff1d(np.arange(len(dataset)), rows)
    known = {fault.index: fault for fault in find_faults(dataset.images, left_out)}
    # One may be readable again by now.
    faults = [known.get(i) or ImageError(i, dataset.images.place(i), "cannot be decoded") for i in left_out.tolist()]
    return Readable(rows, vectors, faults)
