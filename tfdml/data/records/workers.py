"""Reads and decodes images in threads, and encodes what their records hold."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.images import EncodedImages, Images
from tfdml.data.images.decoding import decode_image
from tfdml.data.images.faults import ImageError, access_fault, content_fault, diagnose
from tfdml.data.records.settings import RecordSettings
from tfdml.errors import short_message

_JPEG_QUALITY = 95

Progress = Callable[[int, int, int], None]  # images done, of how many, bad ones among them


@dataclasses.dataclass(frozen=True)
class Examined:
    """The result of examining one image.

    Args:
        index: Its place in the data set.
        data: The bytes for its record; empty for a bad image.
        digest: The SHA-256 of its bytes as they were read, in hexadecimal; empty where they could not be.
        fault: What is wrong with it, or None.
    """

    index: int
    data: bytes
    digest: str
    fault: str | None = None


class ImageChecker:
    """Examines images; many threads may call it at once.

    Args:
        settings: The preparation's settings.

    Example:
        >>> photos = EncodedImages((jpeg, jpeg[:100]), ("1.jpg", "2.jpg"))
        >>> ImageChecker(RecordSettings(shrink=256))(photos, 1).fault
        'truncated JPEG (no end-of-image marker)'
    """

    def __init__(self, settings: RecordSettings):
        self._settings = settings
        self._convert = _converter(settings.shrink, settings.shrink_format)

    def __call__(self, images: Images, index: int) -> Examined:
        """Examines the image at `index`."""
        try:
            data = images.encoded(index)
        except Exception as error:  # tf.io.gfile has its own error types
            return Examined(index, b"", "", access_fault(error))
        digest = hashlib.sha256(data).hexdigest()
        fault = content_fault(data, self._settings.max_pixels)
        if fault:
            return Examined(index, b"", digest, fault)
        try:
            converted = self._convert(tf.constant(data)).numpy()
        except (tf.errors.OpError, UnicodeDecodeError) as error:  # the second where a message quotes bytes
            return Examined(index, b"", digest, _reason(data, error))
        return Examined(index, converted or data, digest)


class WorkerPool:
    """Threads that examine images, and the count of what they have done.

    Args:
        total: How many images there are to do.
        settings: The preparation's settings.
        progress: Called with the images done, `total`, and the bad ones among those done.

    Example:
        >>> photos = EncodedImages((jpeg, jpeg[:100]), ("1.jpg", "2.jpg"))
        >>> with WorkerPool(len(photos), RecordSettings(), print) as pool:
        ...     examined = list(pool.examine(photos, 0, len(photos)))
        1 2 0
        2 2 1
    """

    # Bounds what lies in memory.
    _BLOCK = 4096

    def __init__(self, total: int, settings: RecordSettings, progress: Progress):
        self._checker = ImageChecker(settings)
        self._pool = concurrent.futures.ThreadPoolExecutor(settings.workers, "prepare")
        self._total, self._done, self._bad = total, 0, 0
        self._progress = progress

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def skip(self, count: int) -> None:
        """Counts images that need no work."""
        self._done += count
        self._progress(self._done, self._total, self._bad)

    def examine(self, images: Images, start: int, stop: int) -> Iterator[Examined]:
        """Examines images `start` to `stop - 1`, in order."""
        for first in range(start, stop, self._BLOCK):
            block = range(first, min(first + self._BLOCK, stop))
            for image in self._pool.map(lambda index: self._checker(images, index), block):
                self._done += 1
                self._bad += image.fault is not None
                self._progress(self._done, self._total, self._bad)
                yield image


def find_faults(images: Images) -> list[ImageError]:
    """Decodes every image in full, on all cores, and names those that cannot be.

    Args:
        images: The images; arrays have nothing to check.

    Returns:
        The bad images, ascending by index.

    Example:
        >>> find_faults(EncodedImages((b"",), ("a.jpg",)))[0].reason
        'empty file'
    """
    if images.decoded:
        return []
    with WorkerPool(len(images), RecordSettings(), lambda *_: None) as pool:
        examined = pool.examine(images, 0, len(images))
        return [ImageError(image.index, images.place(image.index), image.fault) for image in examined if image.fault]


@functools.cache
def _converter(side: int, kind: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """From an image's bytes to those of the shrunk one, or to an empty string where it stays as it is."""

    def encoded(image: tf.Tensor) -> tf.Tensor:
        # Resized as in training, so that training at this size does not resize again.
        shrunk = TrainTransform("random_crop", resize=side, image_size=side).prepare(image)
        return tf.io.encode_png(shrunk) if kind == "png" else tf.io.encode_jpeg(shrunk, "rgb", quality=_JPEG_QUALITY)

    @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
    def convert(data: tf.Tensor) -> tf.Tensor:
        image = decode_image(data)
        size = tf.shape(image)
        # Even an image that stays as it is must be decoded.
        with tf.control_dependencies([tf.debugging.assert_positive(size)]):
            same = tf.constant(b"")
            return tf.cond(tf.reduce_min(size[:2]) > side, lambda: encoded(image), lambda: same) if side else same

    return convert


def _reason(data: bytes, error: Exception) -> str:
    faults = diagnose(EncodedImages((data,), ("",)))
    if faults:
        return faults[0].reason
    return f"damaged: {short_message(error, 'last')}"
