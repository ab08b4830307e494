"""From a data set to batches of images and labels: sampling, reading, decoding, augmentation.

A batch is a pure function of the seed and the step. Which images it has is worked out in Python, a few hundred
microseconds a batch; reading, decoding and augmentation run in TensorFlow, in parallel.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.caching import decoded_source
from tfdml.data.dataset import ImageDataset
from tfdml.data.sampling import ClassBalancedSampler, Sampler, Share, ShuffleSampler, share
from tfdml.data.sources import Source, look_up, source_of
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError

CACHE_LIMIT_MB = 4096
_NAMED_IN_MESSAGES = 5
_DEFAULT_TRANSFORM = TrainTransform()
# A message of ours that came through TensorFlow, such as that of a damaged record file.
_USER_ERROR = re.compile(r"UserError: (.+)")
# What TensorFlow's message holds when reading or decoding an image failed: the operation's name or our own words.
_IMAGE_FAILURE = re.compile(
    r"ReadFile|Decode(AndCrop)?(Jpeg|Png|Image|Bmp|Gif|WebP)|ExtractJpegShape|Unknown image file format|"
    r"not a JPEG, PNG, GIF|BMP of this kind|animated WebP|bounding box lies outside"
)


def class_balanced(
    dataset: ImageDataset,
    classes_per_batch: int,
    images_per_class: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    short_classes: str = "repeat",
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
) -> tf.data.Dataset:
    """Training batches of P distinct classes with K images each.

    Args:
        dataset: The training images.
        classes_per_batch: P.
        images_per_class: K.
        transform: The augmentation.
        seed: Decides which images are drawn and how they are augmented.
        short_classes: `"repeat"` or `"drop"`; see `ClassBalancedSampler`.
        first_step: See `training_batches`, as for the arguments that follow.
        num_steps: Likewise.
        cache: Likewise.
        cache_limit_mb: Likewise.

    Returns:
        A dataset of images (P * K, crop, crop, 3) uint8, grouped by class, and labels (P * K,) int64.

    Raises:
        UserError: The data set has too few classes, or see `training_batches`.

    Example:
        >>> batches = class_balanced(dataset, classes_per_batch=32, images_per_class=4)
        >>> model.fit(batches, steps_per_epoch=100, epochs=10)
    """
    sampler = ClassBalancedSampler(dataset.labels, classes_per_batch, images_per_class, seed, short_classes)
    return training_batches(dataset, sampler, transform, seed, first_step, num_steps, cache, cache_limit_mb)


def shuffled(
    dataset: ImageDataset,
    batch_size: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
) -> tf.data.Dataset:
    """Training batches in shuffled order, every image at most once an epoch.

    Args:
        dataset: The training images.
        batch_size: B.
        transform: The augmentation.
        seed: Decides the order of the images and how they are augmented.
        first_step: See `training_batches`, as for the arguments that follow.
        num_steps: Likewise.
        cache: Likewise.
        cache_limit_mb: Likewise.

    Returns:
        A dataset of images (B, crop, crop, 3) uint8 and labels (B,) int64.

    Raises:
        UserError: The data set has fewer than B images, or see `training_batches`.

    Example:
        >>> batches = shuffled(dataset, batch_size=128)
    """
    sampler = ShuffleSampler(len(dataset), batch_size, seed)
    return training_batches(dataset, sampler, transform, seed, first_step, num_steps, cache, cache_limit_mb)


def training_batches(
    dataset: ImageDataset,
    sampler: Sampler,
    transform: TrainTransform,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
) -> tf.data.Dataset:
    """The batches of training steps `first_step`, `first_step + 1` and so on.

    A run resumed at step t with `first_step=t` gets bit by bit the batches that an unbroken run would have got. Under
    a distribution strategy the batch is the global one, which `keras.Model.fit` splits over the replicas.

    Args:
        dataset: The training images.
        sampler: Which images a step takes, such as a `ClassBalancedSampler` of `dataset.labels`; or one worker's
            `share` of it, whose rows are those of the global batch bit by bit.
        transform: The augmentation.
        seed: Decides the augmentation; a non-negative integer.
        first_step: The step of the first batch.
        num_steps: How many batches; None for no end.
        cache: Decode every image once, now, and keep it in memory as `transform.prepare` leaves it (resized; for
            `"random_resized_crop"` at its original size). The batches stay the same bit by bit.
        cache_limit_mb: Most memory that the cache may take, in MiB.

    Returns:
        A dataset of images (B, crop, crop, 3) uint8 and labels (B,) int64.

    Raises:
        UserError: A number is negative; the cache would exceed its limit, or meets an image that cannot be decoded.

    Example:
        >>> sampler = ClassBalancedSampler(dataset.labels, classes_per_batch=32, images_per_class=4, seed=0)
        >>> transform = TrainTransform("random_crop", resize=256, crop=224)
        >>> batches = training_batches(dataset, sampler, transform, seed=0, first_step=1000)
    """
    for name, value in (("seed", seed), ("first_step", first_step), ("num_steps", num_steps or 0)):
        if value < 0:
            raise UserError(f"{name} must not be negative, but is {value}")
    source = _cached(dataset, transform, cache_limit_mb) if cache else source_of(dataset.images)
    batch_size = sampler.batch_size
    part = sampler if isinstance(sampler, Share) else share(sampler, 0, 1)

    def batch_of(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        labels, *columns = look_up(dataset.labels, source, sampler.batch, step, batch_size)
        return labels, transform.draw(seed, step, part.whole.batch_size)[part.rows], *columns

    def whole_batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels, draws, images = batch_of(step)
        return transform.vary_batch(transform.prepare(images), draws), labels

    def one_image(label: tf.Tensor, draws: tf.Tensor, *columns: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part, window, size = source.read_part(lambda size: transform.window(size, draws), *columns)
        return transform.finish(part, window, size, draws), label

    last = np.iinfo(np.int64).max if num_steps is None else first_step + num_steps
    steps = tf.data.Dataset.range(first_step, last)
    if source.size is not None and transform.works_on_batches:
        batches = steps.map(whole_batch, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        images = steps.map(batch_of).unbatch().map(one_image, num_parallel_calls=tf.data.AUTOTUNE)
        batches = images.batch(batch_size, drop_remainder=True)
    return _finished(batches, tf.data.INFINITE_CARDINALITY if num_steps is None else num_steps)


def evaluation_batches(dataset: ImageDataset, transform: EvaluationTransform, batch_size: int) -> tf.data.Dataset:
    """All images, in order, once; the last batch may be smaller.

    Args:
        dataset: The images.
        transform: The evaluation view.
        batch_size: B.

    Returns:
        A dataset of images (B, crop, crop, 3) uint8 and labels (B,) int64.

    Raises:
        UserError: The batch size is less than 1.

    Example:
        >>> batches = evaluation_batches(dataset, EvaluationTransform(resize=256, crop=224), batch_size=64)
        >>> embeddings = model.predict(batches.map(lambda images, labels: images))
    """
    if batch_size < 1:
        raise UserError(f"--batch_size must be at least 1, not {batch_size}")
    source = source_of(dataset.images)
    num_batches = -(-len(dataset) // batch_size)

    def indices_of(step: int) -> np.ndarray:
        return np.arange(step * batch_size, min((step + 1) * batch_size, len(dataset)))

    def batch_of(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return look_up(dataset.labels, source, indices_of, step, None)

    def whole_batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels, images = batch_of(step)
        return transform(images), labels

    def one_image(label: tf.Tensor, *columns: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part, window, size = source.read_part(transform.window, *columns)
        return transform.finish(part, window, size), label

    steps = tf.data.Dataset.range(num_batches)
    if source.size is not None:
        batches = steps.map(whole_batch, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        images = steps.map(batch_of).unbatch().map(one_image, num_parallel_calls=tf.data.AUTOTUNE)
        batches = images.batch(batch_size)
    return _finished(batches, num_batches)


def explain_failure(error: BaseException, dataset: ImageDataset) -> UserError | None:
    """Finds the images behind an exception that iteration over batches, or `fit`, raised.

    Reads and decodes every image of the data set, at about a millisecond each.

    Args:
        error: The exception.
        dataset: The data set that the batches came from.

    Returns:
        An error that names the images and what is wrong with them; None if the exception has another cause.

    Example:
        >>> try:
        ...     model.fit(batches, steps_per_epoch=100)
        ... except tf.errors.OpError as error:
        ...     raise (explain_failure(error, dataset) or error) from None
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    raised_below = _USER_ERROR.search(str(error))
    if raised_below:
        return UserError(raised_below[1])
    if not _IMAGE_FAILURE.search(str(error)):
        return None
    logging.warning("an image of %s cannot be read; looking for it among %d", dataset.name, len(dataset))
    source = source_of(dataset.images)
    read = tf.function(source.read)
    messages = {}
    for index in range(len(dataset)):
        try:
            read(*(tf.constant(column[0]) for column in source.columns(np.array([index]))))
        except tf.errors.OpError as failure:
            messages[index] = failure.message
    if not messages:
        return None
    from tfdml.data.inspection import diagnose  # Pillow is only needed once something has gone wrong

    reasons = {fault.index: fault.reason for fault in diagnose(dataset.images, list(messages))}
    named = [
        f"{dataset.images.name(index)}: {reasons.get(index) or _last_words(message)}"
        for index, message in messages.items()
    ]
    rest = f"; and {len(named) - _NAMED_IN_MESSAGES} more" if len(named) > _NAMED_IN_MESSAGES else ""
    return UserError(
        f"{len(named)} of {len(dataset)} images of {dataset.name} ({dataset.split}) cannot be decoded: "
        f"{'; '.join(named[:_NAMED_IN_MESSAGES])}{rest}; mend or remove them, or leave them out with "
        "--check_images=decode --bad_images=skip"
    )


def _cached(dataset: ImageDataset, transform: TrainTransform, limit_mb: float) -> Source:
    try:
        return decoded_source(dataset, transform, limit_mb)
    except tf.errors.OpError as error:
        raise (explain_failure(error, dataset) or error) from None


def _finished(batches: tf.data.Dataset, cardinality: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # Images are worked on side by side: splitting the work on each as well only adds to it.
    options.threading.max_intra_op_parallelism = 1
    # There are no files for workers to share out; without this TensorFlow tries, and warns.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = batches.apply(tf.data.experimental.assert_cardinality(cardinality))
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def _last_words(message: str) -> str:
    """What TensorFlow says about the failure itself, without the places in the graph."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "{{node" not in line]
    return lines[-1] if lines else "cannot be decoded"
