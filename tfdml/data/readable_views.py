"""Batches of the images of a set that can be read and decoded; the others are left out."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfdml.data.augmentation.evaluation import EvaluationTransform
from tfdml.data.images import Images
from tfdml.data.images.partial_decoding import decode_part
from tfdml.errors import UserError

# Threads that read the files of a batch, which mostly wait for a disk or a network.
_READERS = 8
# Images that are decoded side by side, as far as there are CPUs.
_SIDE_BY_SIDE = 32

_Made = TypeVar("_Made")


def readable_views(
    images: Images, transform: EvaluationTransform, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The views of the images that can be read, in their order; the next batch is decoded meanwhile.

    Without `tf.data`, which takes seconds to start: a set may be cut into thousands of parts.

    Args:
        images: The images.
        transform: The evaluation view.
        batch_size: B; a batch has fewer where images cannot be read.

    Yields:
        (B, S, S, 3) uint8 views and (B,) int64, which of the images they are of.

    Example:
        >>> from tfdml.data import EncodedImages, EvaluationTransform
        >>> list(readable_views(EncodedImages((b"no image",), ("a.jpg",)), EvaluationTransform(32, 28), 4))
        []
    """
    for rows, (views, decoded) in readable_batches(images, batch_size, functools.partial(_views, transform)):
        if decoded.any():
            yield views, rows[decoded]


def readable_batches(
    images: Images, batch_size: int, make: Callable[[list[bytes]], _Made]
) -> Iterator[tuple[np.ndarray, _Made]]:
    """What is made of the bytes of one batch after another, the next one ahead, without images that cannot be read.

    Args:
        images: The images.
        batch_size: B.
        make: Called in a thread, one batch at a time.

    Yields:
        (B,) int64, which images these are, and what was made of their bytes.

    Example:
        >>> from tfdml.data import EncodedImages
        >>> list(readable_batches(EncodedImages((b"a", b"bc"), ("a.jpg", "b.jpg")), 2, len))
        [(array([0, 1]), 2)]
    """
    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers, concurrent.futures.ThreadPoolExecutor(1) as ahead:

        def batch(start: int) -> tuple[np.ndarray, _Made | None]:
            rows = np.arange(start, min(start + batch_size, len(images)))
            found = list(readers.map(functools.partial(_bytes_of, images), rows.tolist()))
            kept = [place for place, encoded in enumerate(found) if encoded]
            return rows[kept], make([found[place] for place in kept]) if kept else None

        coming = ahead.submit(batch, 0)
        for start in range(0, len(images), batch_size):
            rows, made = coming.result()
            if start + batch_size < len(images):
                coming = ahead.submit(batch, start + batch_size)
            if made is not None:
                yield rows, made


def _bytes_of(images: Images, index: int) -> bytes:
    """The encoded bytes of one image; none where it cannot be read."""
    try:
        return images.encoded(index)
    except (OSError, tf.errors.OpError, UserError):
        return b""


def _views(transform: EvaluationTransform, encoded: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The views of the images that can be decoded, and (B,) bool which."""
    one, many = _viewers(transform)
    try:
        return many(tf.constant(encoded)).numpy(), np.ones(len(encoded), bool)
    except tf.errors.OpError:
        views = [_view_or_none(one, image) for image in encoded]
    decoded = np.array([view is not None for view in views])
    empty = np.zeros((0, transform.image_size, transform.image_size, 3), np.uint8)
    return np.stack([view for view in views if view is not None]) if decoded.any() else empty, decoded


def _view_or_none(one: Any, encoded: bytes) -> np.ndarray | None:
    try:
        return one(tf.constant(encoded)).numpy()
    except tf.errors.OpError:
        return None


@functools.lru_cache(maxsize=8)
def _viewers(transform: EvaluationTransform) -> tuple[Any, Any]:
    """The functions from the bytes of one image, and of several, to their views."""

    def view(encoded: tf.Tensor) -> tf.Tensor:
        part, window, size = decode_part(encoded, transform.window)
        return transform.finish(part, window, size)

    spec = tf.TensorSpec((transform.image_size, transform.image_size, 3), tf.uint8)
    one = tf.function(view, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)
    def many(encoded: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(view, encoded, fn_output_signature=spec, parallel_iterations=_SIDE_BY_SIDE)

    return one, many
