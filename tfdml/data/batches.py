"""Training batches of the usual compositions, and batches that several workers make together."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import tensorflow as tf

from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import (
    ClassBalancedSampler,
    HierarchicalSampler,
    Sampler,
    Share,
    ShuffleSampler,
    check_divides,
)
from tfdml.errors import UserError

_DEFAULT_TRANSFORM = TrainTransform()


class Stream(TypedDict, total=False):
    """The arguments of `training_batches` that every composition passes on."""

    first_step: int
    num_steps: int | None
    cache: bool
    cache_limit_mb: float


def class_balanced(
    dataset: ImageDataset,
    classes_per_batch: int,
    images_per_class: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    short_classes: str = "repeat",
    **stream: Unpack[Stream],
) -> tf.data.Dataset:
    """Training batches of P distinct classes with K images each, without end unless `num_steps` is given.

    `fit` needs `steps_per_epoch` with batches that do not end.

    Args:
        dataset: The training images.
        classes_per_batch: P.
        images_per_class: K.
        transform: The augmentation.
        seed: Decides which images are drawn and how they are augmented.
        short_classes: `"repeat"` or `"drop"`; see `ClassBalancedSampler`.
        **stream: `first_step`, `num_steps`, `cache`, `cache_limit_mb`: see `training_batches`.

    Returns:
        An infinite dataset of images (P * K, S, S, 3) uint8, pixels 0-255, grouped by class, and labels (P * K,) int64.

    Raises:
        UserError: The data set has too few classes, or see `training_batches`.

    Example:
        >>> batches = class_balanced(dataset, classes_per_batch=32, images_per_class=4)
        >>> history = model.fit(batches, steps_per_epoch=100, epochs=10)
    """
    sampler = ClassBalancedSampler(dataset.labels, classes_per_batch, images_per_class, seed, short_classes)
    return training_batches(dataset, sampler, transform, seed, **stream)


def shuffled(
    dataset: ImageDataset,
    batch_size: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    **stream: Unpack[Stream],
) -> tf.data.Dataset:
    """Training batches in shuffled order, every image at most once an epoch, without end unless `num_steps` is given.

    Args:
        dataset: The training images.
        batch_size: B.
        transform: The augmentation.
        seed: Decides the order of the images and how they are augmented.
        **stream: `first_step`, `num_steps`, `cache`, `cache_limit_mb`: see `training_batches`.

    Returns:
        An infinite dataset of images (B, S, S, 3) uint8, pixels 0-255, and labels (B,) int64.

    Raises:
        UserError: The data set has fewer than B images, or see `training_batches`.

    Example:
        >>> batches = shuffled(dataset, batch_size=128)
    """
    return training_batches(dataset, ShuffleSampler(len(dataset), batch_size, seed), transform, seed, **stream)


def hierarchical_sampler(dataset: ImageDataset, *arguments: Any) -> HierarchicalSampler:
    """The `HierarchicalSampler` of a data set's own super-classes.

    Args:
        dataset: The training images.
        *arguments: What the sampler takes after the labels and the super-labels.

    Raises:
        UserError: The data set has no super-classes, or see `HierarchicalSampler`.

    Example:
        >>> sampler = hierarchical_sampler(dataset, 40, 2)  # of the super-classes of `dataset`
    """
    if dataset.super_labels is None:
        raise UserError(
            f"hierarchical sampling needs super-classes, and {dataset.name} has none: sop has them, and a list with a "
            "column super_label; or use class_balanced sampling"
        )
    return HierarchicalSampler(dataset.labels, dataset.super_labels, *arguments)


def distributed(
    strategy: tf.distribute.Strategy,
    dataset: ImageDataset,
    sampler: Sampler,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    **stream: Unpack[Stream],
) -> tf.distribute.DistributedDataset:
    """Training batches that several workers make together, each reading and decoding only its own rows.

    For `tf.distribute.MultiWorkerMirroredStrategy`, whose own way of sharding lets every worker make the whole global
    batch and throw away the rows of the others. Replica r of R gets rows r B / R .. (r + 1) B / R - 1 of the global
    batch. `keras.Model.fit` takes the result as it takes a `tf.data.Dataset`.

    Args:
        strategy: The strategy that trains.
        dataset: The training images.
        sampler: The sampler of the global batch.
        transform: The augmentation.
        seed: Decides the augmentation; a non-negative integer.
        **stream: `first_step`, `num_steps`, `cache`, `cache_limit_mb`: see `training_batches`; every worker
            keeps all cached images.

    Returns:
        What every replica gets, step by step: images (B / R, S, S, 3) uint8 and labels (B / R,) int64.

    Raises:
        UserError: The replicas do not divide the batch, or see `training_batches`.

    Example:
        >>> strategy = tf.distribute.get_strategy()  # or MultiWorkerMirroredStrategy(), under TF_CONFIG
        >>> sampler = ClassBalancedSampler(dataset.labels, classes_per_batch=32, images_per_class=4)
        >>> for images, labels in distributed(strategy, dataset, sampler, num_steps=2):
        ...     embeddings = strategy.run(model, args=(images,))
    """
    replicas = strategy.num_replicas_in_sync
    check_divides(sampler.batch_size, replicas, "replicas")

    def worker_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = Share(sampler, context.input_pipeline_id, context.num_input_pipelines)
        batches = training_batches(dataset, part, transform, seed, **stream)
        # One element per replica of this worker, in turn.
        return batches.rebatch(sampler.batch_size // replicas).prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(worker_batches)
