"""Image sets in files and in memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from typing import BinaryIO, ClassVar

import numpy as np
import tensorflow as tf

from tfdml import storage
from tfdml.data.images.base import Images
from tfdml.data.images.decoding import decode_image
from tfdml.data.images.lookup import Source, source_of_decoded, source_of_encoded, strings
from tfdml.data.images.partial_decoding import decode_part, whole
from tfdml.errors import UserError
from tfdml.special_files import require_regular

_STAT_THREADS = 16


@dataclasses.dataclass(frozen=True, repr=False)
class FileImages(Images):
    """Images that lie in files, read when they are needed.

    Args:
        paths: One path per image, local or on any file system that `tf.io.gfile` knows.
        boxes: (N, 4) int32, a bounding box in pixels per image, half-open: top, left, bottom, right. Each image is cut
            to its box after decoding, before anything else; a box that reaches beyond the image is clipped. None
            for whole images.

    Raises:
        UserError: There is not one box per image, or a box is empty.
    """

    paths: tuple[str, ...]
    boxes: np.ndarray | None = None

    def __post_init__(self):
        if self.boxes is None:
            return
        boxes = np.asarray(self.boxes, np.int32)
        object.__setattr__(self, "boxes", boxes)
        if boxes.shape != (len(self.paths), 4):
            raise UserError(f"{len(self.paths)} images but boxes of shape {boxes.shape}")
        empty = np.flatnonzero((boxes[:, :2] >= boxes[:, 2:]).any(axis=1))
        if len(empty):
            top, left, bottom, right = boxes[empty[0]].tolist()
            raise UserError(
                f"{len(empty)} of {len(boxes)} bounding boxes are empty, the first is that of {self.paths[empty[0]]}: "
                f"rows {top} to {bottom}, columns {left} to {right}; correct its table or load without crop_boxes"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path of one image."""
        return self.paths[index]

    def take(self, indices: np.ndarray) -> FileImages:
        """The images at `indices`, in that order."""
        boxes = None if self.boxes is None else self.boxes[np.asarray(indices, np.int64)]
        return FileImages(tuple(self.paths[i] for i in indices), boxes)

    def open(self, index: int) -> BinaryIO:
        """The file of one image, whole even where it has a box."""
        return storage.open_file(self.paths[index], buffering=0)

    def encoded(self, index: int) -> bytes:
        """The bytes of one file, or what its bounding box leaves of it as PNG, which loses nothing."""
        if self.boxes is None:
            return storage.read_bytes(self.paths[index])
        if not storage.is_remote(self.paths[index]):
            require_regular(self.paths[index])
        source = self.lookup()
        (row,) = zip(*source.columns(np.array([index])), strict=True)
        return tf.io.encode_png(source.read(*row)).numpy()

    def size(self, index: int) -> tuple[int, int] | None:
        """See `Images.size`; of what the bounding box leaves of the image."""
        size = super().size(index)
        if size is None or self.boxes is None:
            return size
        top, left, bottom, right = self.boxes[index].tolist()
        return max(1, min(bottom, size[0]) - max(top, 0)), max(1, min(right, size[1]) - max(left, 0))

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`; (0, 0) for a file that is not there."""
        with concurrent.futures.ThreadPoolExecutor(_STAT_THREADS) as pool:
            return list(pool.map(storage.stamp_of, self.paths, chunksize=256))

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        paths, boxes = self.paths, self.boxes

        def names(indices: np.ndarray) -> np.ndarray:
            return strings(os.fsencode(paths[i]) for i in indices)

        if boxes is None:
            return Source(
                lambda indices: [names(indices)],
                (tf.string,),
                lambda path: decode_image(tf.io.read_file(path)),
                decode_part=lambda choose, path: decode_part(tf.io.read_file(path), choose),
            )
        return Source(
            lambda indices: [names(indices), boxes[indices]],
            (tf.string, tf.int32),
            lambda path, box: decode_part(tf.io.read_file(path), whole, box)[0],
            decode_part=lambda choose, path, box: decode_part(tf.io.read_file(path), choose, box),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class EncodedImages(Images):
    """Encoded images (JPEG, PNG ...) held in memory, such as the members of a small archive.

    Args:
        data: The bytes of each image.
        names: The name of each image in messages and reports.
    """

    data: tuple[bytes, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.data)

    def name(self, index: int) -> str:
        """The name of one image."""
        return self.names[index]

    def take(self, indices: np.ndarray) -> EncodedImages:
        """The images at `indices`, in that order."""
        return EncodedImages(tuple(self.data[i] for i in indices), tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """The bytes of one image."""
        return self.data[index]

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(len(data), 0) for data in self.data]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        data = self.data
        return source_of_encoded(lambda indices: [data[i] for i in indices])


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayImages(Images):
    """Decoded images of one size held in memory.

    Args:
        data: (N, H, W, 3) uint8, pixels 0-255. Images in 0..1 are refused: multiply them by 255 first.
        names: The name of each image in messages and reports; by default its row, "0", "1" ...

    Raises:
        UserError: `data` has another shape, or is not uint8.

    Example:
        >>> ArrayImages(np.zeros((2, 32, 32, 3), np.uint8)).name(1)
        '1'
    """

    decoded: ClassVar[bool] = True
    verified: ClassVar[bool] = True

    data: np.ndarray
    names: tuple[str, ...] = ()

    def __post_init__(self):
        data = np.asarray(self.data)
        if data.ndim != 4 or data.shape[-1] != 3:
            raise UserError(f"images must be an array (N, H, W, 3), not of shape {data.shape}")
        if data.dtype != np.uint8:
            in_unit_range = data.dtype.kind == "f" and data.size and data.max() <= 1
            cure = "(255 * images).round().astype('uint8')" if in_unit_range else "images.round().astype('uint8')"
            raise UserError(f"images must be uint8 pixels of 0 to 255, not {data.dtype}; convert them: {cure}")
        object.__setattr__(self, "data", data)
        names = tuple(self.names) if len(self.names) else tuple(map(str, range(len(data))))
        if len(names) != len(data):
            raise UserError(f"{len(data)} images but {len(names)} names")
        object.__setattr__(self, "names", names)

    def __len__(self) -> int:
        return len(self.data)

    def name(self, index: int) -> str:
        """The name of one image."""
        return self.names[index]

    def take(self, indices: np.ndarray) -> ArrayImages:
        """The images at `indices`, in that order."""
        return ArrayImages(self.data[indices], tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """One image as PNG, which loses nothing."""
        return tf.io.encode_png(self.data[index]).numpy()

    def pixels(self) -> np.ndarray:
        """See `Images.pixels`."""
        return self.data

    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""
        del index
        return self.data.shape[1], self.data.shape[2]

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(self.data[0].nbytes, 0)] * len(self)

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_decoded(self.data)
