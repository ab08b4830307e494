"""Decoded images kept in memory, where they fit."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.dataset import ImageDataset
from tfdml.data.images.lookup import Source, as_written, look_up, source_of_decoded
from tfdml.errors import UserError
from tfdml.memory import free_memory

MEGABYTE = 2**20
# How many headers an estimate reads; of photographs in a few formats, the mean of so many is right to a few percent.
_SAMPLED = 64
_PER_TASK = 64


def decoded_bytes(dataset: ImageDataset, transform: TrainTransform) -> int:
    """About how much memory a data set takes when its images are decoded and prepared.

    Reads the headers of 64 images, evenly spaced; unreadable ones are left out of account.

    Args:
        dataset: The images.
        transform: What prepares them.

    Example:
        >>> decoded_bytes(train, TrainTransform("random_crop", 32, 28))  # 256 images of 32 x 32 px
        786432
    """
    images = dataset.images
    sampled = []
    for index in np.linspace(0, len(images) - 1, min(_SAMPLED, len(images))).astype(int).tolist():
        size = images.size(index)
        if size is not None:
            height, width = transform.prepared_size(*size)
            sampled.append(3 * height * width)
    return round(float(np.mean(sampled or [0])) * len(images))


def memory_to_spare(limit_mb: float) -> float:
    """Bytes that a cache may take: the limit, or half of what the machine or container has left if that is less."""
    return min(limit_mb * MEGABYTE, free_memory() / 2)


def decoded_source(dataset: ImageDataset, transform: TrainTransform, limit_mb: float) -> Source:
    """The images decoded and prepared, held in memory.

    Args:
        dataset: The images.
        transform: What prepares them.
        limit_mb: Most memory that they may take, in MiB.

    Raises:
        UserError: They take more.
        tf.errors.OpError: An image cannot be decoded.
    """
    source = dataset.images.lookup()
    if source.size is not None and transform.prepared_size(*source.size) == source.size:
        return source
    started, total, kept = time.perf_counter(), 0, []
    logging.info(
        "caching %d decoded images of %s: about %.0f MB",
        len(dataset),
        dataset.name,
        decoded_bytes(dataset, transform) / MEGABYTE,
    )

    @as_written
    def columns_of(start: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def indices_of(first: int) -> np.ndarray:
            return np.arange(first, min(first + _PER_TASK, len(dataset)))

        return look_up(dataset.labels, source, indices_of, start, None)[1:]

    images = tf.data.Dataset.range(0, len(dataset), _PER_TASK).map(columns_of).unbatch()
    prepare = as_written(lambda *row: transform.prepare(source.read(*row)))
    images = images.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    for image in images.as_numpy_iterator():
        total += image.nbytes
        kept.append(image)
        if total > limit_mb * MEGABYTE:
            raise UserError(
                f"the decoded images of {dataset.name} would take about "
                f"{total / len(kept) * len(dataset) / MEGABYTE:,.0f} MB of memory, more than the limit of "
                f"{limit_mb:,.0f} MB: train without `cache`, or raise `cache_limit_mb`"
            )
    logging.info(
        "cached %d decoded images of %s: %.0f MB, %.1f s",
        len(kept),
        dataset.name,
        total / MEGABYTE,
        time.perf_counter() - started,
    )
    return source_of_decoded(kept)
