"""Images behind URLs, read through Arrow."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdml.cluster import files
from tfdml.data.images import FileImages, Images, Source, source_of_encoded
from tfdml.io.files import is_remote

# Most of the time goes to waiting for the store.
_THREADS = 16


@dataclasses.dataclass(frozen=True)
class StoredImages(Images):
    """Images that lie in files behind URLs such as `s3://`, read when they are needed.

    Args:
        paths: One URL per image.
    """

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The URL of one image."""
        return self.paths[index]

    def take(self, indices: np.ndarray) -> StoredImages:
        """The images at `indices`, in that order."""
        return StoredImages(tuple(self.paths[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """The bytes of one file."""
        return files.read_bytes(self.paths[index])

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(0, 0)] * len(self)

    def lookup(self) -> Source:
        """See `Images.lookup`; what cannot be read has no bytes, and so cannot be decoded."""
        pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        return source_of_encoded(lambda indices: pool.map(self._bytes_or_none, indices))

    def _bytes_or_none(self, index: int) -> bytes:
        try:
            return self.encoded(index)
        except OSError:
            return b""


def images_at(paths: Sequence[str]) -> Images:
    """The images of paths or URLs.

    Example:
        >>> type(images_at(["/data/a.jpg"])).__name__
        'FileImages'
    """
    stored = any(is_remote(path) for path in paths)
    return StoredImages(tuple(paths)) if stored else FileImages(tuple(paths))
