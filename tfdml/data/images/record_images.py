"""Images in record files: TFRecord shards of `tf.train.Example`, read by index."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import struct
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfdml.data.images.base import Images
from tfdml.data.images.lookup import Source, source_of_encoded
from tfdml.errors import UserError

ENCODED = "image/encoded"
REMEDY = "copy the folder again from its source, or prepare it again with bin/prepare"
# A TFRecord's frame: the length and its checksum before the data, the data's checksum after it.
_BEFORE, _AFTER = 12, 4
_OPEN_FILES = 64
_THREADS = 32


class Shards:
    """Random access to the records of a data set's shards, for many threads at once.

    Local shards are kept open, a bounded number of them; each record of a remote one is a request of its own.

    Args:
        paths: The shards, local or on any file system that `tf.io.gfile` knows.
    """

    def __init__(self, paths: tuple[str, ...]):
        self.paths = paths
        # One that is dropped while another thread reads from it is closed after that read: see `_Open`.
        self._open = functools.lru_cache(_OPEN_FILES)(_Open)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """The data of the record that takes `size` bytes at `offset`.

        Raises:
            UserError: The shard is missing or unreadable, or no such record lies there.
        """
        path = self.paths[shard]
        try:
            if "://" in path:
                framed = _read_remote(path, offset, size)
            else:
                # A name of its own keeps it open: of two that threads open at once, the cache keeps only one.
                file = self._open(path)
                framed = os.pread(file.descriptor, size, offset)
        except Exception as error:  # tf.io.gfile has its own error types
            raise UserError(
                f"{path} cannot be read ({getattr(error, 'strerror', None) or type(error).__name__}); {REMEDY}"
            ) from error
        if len(framed) != size or struct.unpack_from("<Q", framed)[0] != size - _BEFORE - _AFTER:
            raise UserError(f"{path} holds no record of {size} bytes at byte {offset}: it is damaged; {REMEDY}")
        return framed[_BEFORE:-_AFTER]


class _Open:
    """An open file, closed when the last thread that reads from it releases it."""

    def __init__(self, path: str):
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


def _read_remote(path: str, offset: int, size: int) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "records")


@dataclasses.dataclass(frozen=True, eq=False)
class RecordTable:
    """Where each record of a split lies, and what its image is called.

    Args:
        shards: The shards.
        shard: (N,) which shard.
        offsets: (N,) where in it the record begins, in bytes.
        sizes: (N,) how many bytes it takes, frame included.
        names: The names of all images, as bytes one after the other.
        name_ends: (N,) where each name ends in `names`.
    """

    shards: Shards
    shard: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: bytes
    name_ends: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RecordImages(Images):
    """Images in record files, read when they are needed.

    Args:
        table: Where the records are.
        rows: (N,) the rows of the table that these images are.
    """

    # Record files are made of images that were decoded in full.
    verified: ClassVar[bool] = True

    table: RecordTable
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """The name of one image in the data set that the records were made from."""
        row = int(self.rows[index])
        ends = self.table.name_ends
        return os.fsdecode(self.table.names[ends[row - 1] if row else 0 : ends[row]])

    def place(self, index: int) -> str:
        """Where the record of one image lies, for messages: the file that it was made from may be long gone."""
        row = int(self.rows[index])
        shard = self.table.shards.paths[self.table.shard[row]]
        return f"{shard}, record at byte {self.table.offsets[row]} ({self.name(index)})"

    def take(self, indices: np.ndarray) -> RecordImages:
        """The images at `indices`, in that order."""
        return RecordImages(self.table, self.rows[indices])

    def encoded(self, index: int) -> bytes:
        """The bytes of one image."""
        return self.read(np.array([index]))[0]

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(int(size), 0) for size in self.table.sizes[self.rows]]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_encoded(self.read)

    def read(self, indices: np.ndarray) -> list[bytes]:
        """The encoded bytes of images.

        Args:
            indices: (n,) which images.

        Returns:
            n strings of bytes, in that order.

        Raises:
            UserError: A shard is missing or damaged.
        """
        table, rows = self.table, self.rows[indices]
        places = zip(table.shard[rows].tolist(), table.offsets[rows].tolist(), table.sizes[rows].tolist(), strict=True)
        if any("://" in path for path in table.shards.paths):
            return list(_threads().map(lambda place: self._image(*place), places))
        return [self._image(*place) for place in places]

    def _image(self, shard: int, offset: int, size: int) -> bytes:
        data = self.table.shards.read(shard, offset, size)
        try:
            return tf.train.Example.FromString(data).features.feature[ENCODED].bytes_list.value[0]
        except Exception as error:  # the parser's own type, or no such field
            path = self.table.shards.paths[shard]
            raise UserError(f"{path} has no image in its record at byte {offset}: it is damaged; {REMEDY}") from error
