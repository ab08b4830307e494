"""Training batches of further compositions, and batches that several workers make together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import CACHE_LIMIT_MB, training_batches
from tfdml.data.sampling import HierarchicalSampler, Sampler, WholeClassSampler, check_divides, share
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError

_DEFAULT_TRANSFORM = TrainTransform()


def whole_classes(
    dataset: ImageDataset,
    batch_size: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
) -> tf.data.Dataset:
    """Training batches of all images of random classes, up to B; see `WholeClassSampler`.

    Args:
        dataset: The training images.
        batch_size: B.
        transform: The augmentation.
        seed: Decides which images are drawn and how they are augmented.
        first_step: See `training_batches`, as for the arguments that follow.
        num_steps: Likewise.
        cache: Likewise.
        cache_limit_mb: Likewise.

    Returns:
        A dataset of images (B, crop, crop, 3) uint8, grouped by class, and labels (B,) int64.

    Raises:
        UserError: The data set has fewer than B images, or see `training_batches`.

    Example:
        >>> batches = whole_classes(tfdml.data.load("sop", "data", "train"), batch_size=100)
    """
    sampler = WholeClassSampler(dataset.labels, batch_size, seed)
    return training_batches(dataset, sampler, transform, seed, first_step, num_steps, cache, cache_limit_mb)


def hierarchical(
    dataset: ImageDataset,
    classes_per_batch: int,
    images_per_class: int,
    super_classes_per_batch: int = 1,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    weights: str = "proportional",
    short_classes: str = "repeat",
    short_super_classes: str = "merge",
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
) -> tf.data.Dataset:
    """Training batches of P classes with K images each, from S super-classes; see `HierarchicalSampler`.

    Args:
        dataset: The training images.
        classes_per_batch: P.
        images_per_class: K.
        super_classes_per_batch: S.
        transform: The augmentation.
        seed: Decides which images are drawn and how they are augmented.
        weights: `"proportional"` or `"uniform"`.
        short_classes: `"repeat"` or `"drop"`.
        short_super_classes: `"merge"` or `"drop"`.
        first_step: See `training_batches`, as for the arguments that follow.
        num_steps: Likewise.
        cache: Likewise.
        cache_limit_mb: Likewise.

    Returns:
        A dataset of images (P * K, crop, crop, 3) uint8, grouped by super-class and class, and labels (P * K,) int64.

    Raises:
        UserError: The data set has no super-classes or too few, or see `HierarchicalSampler`, `training_batches`.

    Example:
        >>> sop = tfdml.data.load("sop", "data", "train")
        >>> batches = hierarchical(sop, classes_per_batch=40, images_per_class=2, super_classes_per_batch=2)
    """
    sampler = hierarchical_sampler(
        dataset,
        classes_per_batch,
        images_per_class,
        super_classes_per_batch,
        seed,
        weights,
        short_classes,
        short_super_classes,
    )
    return training_batches(dataset, sampler, transform, seed, first_step, num_steps, cache, cache_limit_mb)


def hierarchical_sampler(dataset: ImageDataset, *arguments: Any) -> HierarchicalSampler:
    """The `HierarchicalSampler` of a data set's own super-classes.

    Args:
        dataset: The training images.
        *arguments: What the sampler takes after the labels and the super-labels.

    Raises:
        UserError: The data set has no super-classes, or see `HierarchicalSampler`.

    Example:
        >>> sampler = hierarchical_sampler(tfdml.data.load("sop", "data", "train"), 40, 2)
    """
    if dataset.super_labels is None:
        raise UserError(
            f"--sampling=hierarchical needs super-classes, and {dataset.name} has none: sop has them, and a list "
            "(--dataset=list) with a column super_label; or use --sampling=class_balanced"
        )
    return HierarchicalSampler(dataset.labels, dataset.super_labels, *arguments)


def distributed(
    strategy: tf.distribute.Strategy,
    dataset: ImageDataset,
    sampler: Sampler,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
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
        first_step: See `training_batches`, as for the arguments that follow.
        num_steps: Likewise.
        cache: Likewise; every worker keeps all images.
        cache_limit_mb: Likewise.

    Returns:
        What every replica gets, step by step: images (B / R, crop, crop, 3) uint8 and labels (B / R,) int64.

    Raises:
        UserError: The replicas do not divide the batch, or see `training_batches`.

    Example:
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
        >>> sampler = ClassBalancedSampler(dataset.labels, classes_per_batch=32, images_per_class=4)
        >>> for images, labels in distributed(strategy, dataset, sampler, num_steps=1000):
        ...     strategy.run(train_step, args=(images, labels))
    """
    replicas = strategy.num_replicas_in_sync
    check_divides(sampler.batch_size, replicas, "replicas")

    def worker_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = share(sampler, context.input_pipeline_id, context.num_input_pipelines)
        batches = training_batches(dataset, part, transform, seed, first_step, num_steps, cache, cache_limit_mb)
        # One element per replica of this worker, in turn.
        return batches.rebatch(sampler.batch_size // replicas).prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(worker_batches)
