"""From a data set to batches of images and labels: sampling, reading, decoding, augmentation.

A batch is a pure function of the seed and the step. Which images it has is worked out in Python, a few hundred
microseconds a batch; reading, decoding and augmentation run in TensorFlow, in parallel.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdml.data.augmentation.evaluation import EvaluationTransform
from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.caching import decoded_source
from tfdml.data.dataset import ImageDataset
from tfdml.data.failures import explain_failure
from tfdml.data.images.lookup import Source, as_written, look_up
from tfdml.data.sampling import Sampler, Share
from tfdml.errors import UserError

CACHE_LIMIT_MB = 4096


def training_batches(
    dataset: ImageDataset,
    sampler: Sampler,
    transform: TrainTransform,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
    every: int = 1,
) -> tf.data.Dataset:
    """The batches of training steps `first_step`, `first_step + 1` and so on.

    A run resumed at step t with `first_step=t` gets bit by bit the batches that an unbroken run would have got. Under
    a distribution strategy the batch is the global one, which `keras.Model.fit` splits over the replicas.

    Args:
        dataset: The training images.
        sampler: Which images a step takes, such as a `ClassBalancedSampler` of `dataset.labels`; or one worker's
            `Share` of it, whose rows are those of the global batch bit by bit.
        transform: The augmentation.
        seed: Decides the augmentation; a non-negative integer.
        first_step: The step of the first batch.
        num_steps: How many batches; None for no end.
        cache: Decode every image once, now, and keep it in memory as `transform.prepare` leaves it (resized; for
            `"random_resized_crop"` at its original size). The batches stay the same bit by bit.
        cache_limit_mb: Most memory that the cache may take, in MiB.
        every: Make the batch of every so-manieth step alone, `first_step`, `first_step + every` and so on.

    Returns:
        A dataset of images (B, S, S, 3) uint8 and labels (B,) int64.

    Raises:
        UserError: A number is negative, or `every` less than 1; the cache would exceed its limit, or meets an image
            that cannot be decoded.

    Example:
        >>> sampler = ClassBalancedSampler(dataset.labels, classes_per_batch=32, images_per_class=4, seed=0)
        >>> transform = TrainTransform("random_crop", resize=256, image_size=224)
        >>> batches = training_batches(dataset, sampler, transform, seed=0, first_step=1000)
    """
    for name, value in (("seed", seed), ("first_step", first_step), ("num_steps", num_steps or 0)):
        if value < 0:
            raise UserError(f"`{name}` must not be negative, but is {value}")
    if every < 1:
        raise UserError(f"`every` must be at least 1, not {every}")
    source = _cached(dataset, transform, cache_limit_mb) if cache else dataset.images.lookup()
    batch_size = sampler.batch_size
    part = sampler if isinstance(sampler, Share) else Share(sampler, 0, 1)

    @as_written
    def batch_of(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        labels, *columns = look_up(dataset.labels, source, sampler.batch, step, batch_size)
        return labels, transform.draw(seed, step, part.whole.batch_size)[part.rows], *columns

    @as_written
    def whole_batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels, draws, images = batch_of(step)
        return transform.vary_batch(transform.prepare(images), draws), labels

    @as_written
    def one_image(label: tf.Tensor, draws: tf.Tensor, *columns: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part, window, size = source.read_part(lambda size: transform.window(size, draws), *columns)
        return transform.finish(part, window, size, draws), label

    last = np.iinfo(np.int64).max if num_steps is None else first_step + num_steps * every
    steps = tf.data.Dataset.range(first_step, last, every)
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
        A dataset of images (B, S, S, 3) uint8 and labels (B,) int64.

    Raises:
        UserError: The batch size is less than 1.

    Example:
        >>> batches = evaluation_batches(dataset, EvaluationTransform(resize=32, image_size=28), batch_size=64)
        >>> embeddings = model.predict(batches.map(lambda images, labels: images), verbose=0)
    """
    if batch_size < 1:
        raise UserError(f"`batch_size` must be at least 1, not {batch_size}")
    batch_size = min(batch_size, max(len(dataset), 1))  # TensorFlow makes room for a whole batch beforehand
    source = dataset.images.lookup()
    num_batches = -(-len(dataset) // batch_size)

    def indices_of(step: int) -> np.ndarray:
        return np.arange(step * batch_size, min((step + 1) * batch_size, len(dataset)))

    @as_written
    def batch_of(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return look_up(dataset.labels, source, indices_of, step, None)

    @as_written
    def whole_batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels, images = batch_of(step)
        return transform(images), labels

    @as_written
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
