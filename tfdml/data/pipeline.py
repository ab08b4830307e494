"""From a data set to batches of images and labels: sampling, reading, decoding, augmentation,
caching.

A batch is a pure function of the seed and the step. Its images are chosen in Python, in a few
hundred microseconds; reading, decoding and augmentation run in TensorFlow, in parallel.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import decode_image
from tfdml.data.faults import explain_failure
from tfdml.data.images import Images, Source, as_written, look_up, source_of_decoded
from tfdml.data.sampling import ClassBalancedSampler, Sampler, Share, require_images
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError, check_not_negative, check_positive
from tfdml.io.files import free_memory

CACHE_LIMIT_MB = 4096


def training_batches(
    dataset: ImageDataset,
    sampler: Sampler,
    transform: TrainTransform,
    seed: int = 0,
    first_step: int = 0,
    num_steps: int | None = None,
    cache: bool | Source = False,
    cache_limit_mb: float = CACHE_LIMIT_MB,
    every: int = 1,
) -> tf.data.Dataset:
    """Return the batches of training steps `first_step`, `first_step + 1` and so on.

    A run resumed at step t with `first_step=t` gets bit by bit the batches of an uninterrupted run.
    Under a distribution strategy the batch is the global one, which `keras.Model.fit` splits over
    the replicas.

    Args:
        dataset: The training images.
        sampler: Which images a step takes, such as a `ClassBalancedSampler` of `dataset.labels`; or
            one worker's `Share` of it, whose rows are those of the global batch bit by bit.
        transform: The augmentation.
        seed: Decides the augmentation; a non-negative integer.
        first_step: The step of the first batch.
        num_steps: How many batches; None for no end.
        cache: Decode every image once, now, and keep it in memory as `transform.prepare` leaves it
            (resized; for `"random_resized_crop"` at its original size). The batches stay the same
            bit by bit. Or what `decoded_source` returned, for several streams.
        cache_limit_mb: Most memory that the cache may take, in MiB.
        every: Make the batch of every so-manieth step alone, `first_step`, `first_step + every` and
            so on.

    Returns:
        A dataset of images (B, S, S, 3) uint8, or of vectors (B, D) float32 where the data set has
        them, and its `targets` int64, (B,) or (B, L). With `tokens`, in the place of images a dict
        of `image` and `text`.

    Raises:
        UserError: A number is negative, or `every` less than 1; the sampler is made for more
            images; the cache would exceed its limit, or meets an image that cannot be decoded.

    Example:
        >>> sampler = ClassBalancedSampler(train.labels, classes_per_batch=32, images_per_class=4,
        ...     seed=0)
        >>> transform = TrainTransform("random_crop", resize=256, image_size=224)
        >>> batches = training_batches(train, sampler, transform, seed=0, first_step=1000)
    """
    check_not_negative(seed=seed, first_step=first_step, num_steps=num_steps or 0)
    check_positive(every=every)
    require_images(sampler, len(dataset))
    if isinstance(cache, Source):
        source = cache
    else:
        source = decoded_source(dataset, transform, cache_limit_mb) if cache else dataset.lookup()
    batch_size = sampler.batch_size
    part = sampler if isinstance(sampler, Share) else Share(sampler, 0, 1)
    targets = dataset.targets if dataset.tokens is None else (dataset.targets, dataset.tokens)

    def rows_of(step: tf.Tensor) -> tuple[Any, ...]:
        labels, *columns = look_up(targets, source, sampler.batch, step, batch_size)
        if source.dimension:
            return labels, *columns
        return labels, transform.draw(seed, step, part.whole.batch_size)[part.rows], *columns

    last = np.iinfo(np.int64).max if num_steps is None else first_step + num_steps * every
    steps = tf.data.Dataset.range(first_step, last, every)
    at_once = source.size is not None and transform.works_on_batches
    batches = _batches(steps, rows_of, source, transform, at_once, batch_size)
    if dataset.tokens is not None:
        batches = batches.map(
            lambda images, targets: ({"image": images, "text": targets[1]}, targets[0])
        )
    return _finished(batches, tf.data.INFINITE_CARDINALITY if num_steps is None else num_steps)


def evaluation_batches(
    dataset: ImageDataset, transform: EvaluationTransform, batch_size: int
) -> tf.data.Dataset:
    """All images, in order, once; the last batch may be smaller.

    Args:
        dataset: The images.
        transform: The evaluation view.
        batch_size: B.

    Returns:
        A dataset of images (B, S, S, 3) uint8, or of vectors (B, D) float32 where the data set has
        them, and labels (B,) int64.

    Raises:
        UserError: The batch size is less than 1.

    Example:
        >>> batches = evaluation_batches(train, EvaluationTransform(resize=32, image_size=28),
        ...     batch_size=64)
        >>> embeddings = model.predict(batches.map(lambda images, labels: images), verbose=0)
    """
    check_positive(batch_size=batch_size)
    batch_size = min(
        batch_size, max(len(dataset), 1)
    )  # TensorFlow makes room for a whole batch beforehand
    source = dataset.lookup()
    num_batches = -(-len(dataset) // batch_size)

    def rows_of(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return look_up(dataset.labels, source, _in_order(len(dataset), batch_size), step, None)

    steps = tf.data.Dataset.range(num_batches)
    batches = _batches(
        steps, rows_of, source, transform, source.size is not None, batch_size, drop_remainder=False
    )
    return _finished(batches, num_batches)


def _in_order(count: int, size: int) -> Callable[[int], np.ndarray]:
    return lambda step: np.arange(step * size, min((step + 1) * size, count))


def _batches(
    steps: tf.data.Dataset,
    rows_of: Callable[[tf.Tensor], tuple[tf.Tensor, ...]],
    source: Source,
    transform: Any,
    at_once: bool,
    batch_size: int,
    drop_remainder: bool = True,
) -> tf.data.Dataset:
    """Return the views and labels of each step.

    Args:
        steps: The steps.
        rows_of: Gives for a step labels, what `transform` needs besides, and the columns of
            `source`.
        source: The images.
        transform: Makes the view of one image, or the views of a batch of images of one size.
        at_once: Whether it does the second.
        batch_size: B.
        drop_remainder: Whether all batches have B images.
    """

    @as_written
    def whole_batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels, *draws, images = rows_of(step)
        # Vectors have one view.
        return images if source.dimension else transform.batch(images, *draws), labels

    @as_written
    def one_image(label: tf.Tensor, *row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        draws, columns = row[: -len(source.dtypes)], row[-len(source.dtypes) :]
        return transform(source.read(*columns), *draws), label

    if source.dimension or at_once:
        return steps.map(whole_batch, num_parallel_calls=tf.data.AUTOTUNE)
    images = (
        steps.map(as_written(rows_of)).unbatch().map(one_image, num_parallel_calls=tf.data.AUTOTUNE)
    )
    return images.batch(batch_size, drop_remainder=drop_remainder)


def _finished(batches: tf.data.Dataset, cardinality: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # Images are worked on side by side: splitting the work on each as well only adds to it.
    options.threading.max_intra_op_parallelism = 1
    # TensorFlow 2.21: its search for better numbers may sleep through the end of an iterator, which
    # then waits for it, up to a minute. Without it `AUTOTUNE` means all threads.
    options.autotune.enabled = False
    # There are no files for workers to share out; without this TensorFlow tries, and warns.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = batches.apply(tf.data.experimental.assert_cardinality(cardinality))
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def own_threads(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Yield the same batches, made by other threads, so that the input never waits for the model's
    thread."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = os.cpu_count() or 1
    return batches.with_options(options)


_DEFAULT_TRANSFORM = TrainTransform()


def class_balanced(
    dataset: ImageDataset,
    classes_per_batch: int,
    images_per_class: int,
    transform: TrainTransform = _DEFAULT_TRANSFORM,
    seed: int = 0,
    short_classes: str = "repeat",
    **stream: Any,
) -> tf.data.Dataset:
    """Training batches of P distinct classes with K images each, without end unless `num_steps` is
    given.

    `fit` needs `steps_per_epoch` with batches that do not end.

    Args:
        dataset: The training images.
        classes_per_batch: P.
        images_per_class: K.
        transform: The augmentation.
        seed: Decides which images are drawn and how they are augmented.
        short_classes: `"repeat"` or `"drop"`; see `ClassBalancedSampler`.
        **stream: `first_step`, `num_steps`, `cache`, cache_limit_mb: see `training_batches`.

    Returns:
        An infinite dataset of images (P * K, S, S, 3) uint8, pixels 0-255, grouped by class, and
        labels (P * K,) int64.

    Raises:
        UserError: The data set has too few classes, or see `training_batches`.

    Example:
        >>> batches = class_balanced(train, classes_per_batch=32, images_per_class=4)
        >>> history = model.fit(batches, steps_per_epoch=100, epochs=10)
    """
    sampler = ClassBalancedSampler(
        dataset.labels, classes_per_batch, images_per_class, seed, short_classes
    )
    return training_batches(dataset, sampler, transform, seed, **stream)


_Made = TypeVar("_Made")

MEGABYTE = 2**20
# How many headers an estimate reads; of photographs in a few formats, the mean of so many is right
# to a few percent.
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
    """Bytes that a cache may take: the limit, or half of what the machine or container has left if
    that is less."""
    return min(limit_mb * MEGABYTE, free_memory() / 2)


def decoded_source(dataset: ImageDataset, transform: TrainTransform, limit_mb: float) -> Source:
    """Return the images decoded and prepared, held in memory.

    Args:
        dataset: The images.
        transform: What prepares them.
        limit_mb: Most memory that they may take, in MiB.

    Raises:
        UserError: They take more, or an image cannot be decoded.
    """
    source = dataset.lookup()
    if source.dimension or (
        source.size is not None and transform.prepared_size(*source.size) == source.size
    ):
        return source
    total = 0
    decoded = []
    estimate = decoded_bytes(dataset, transform) / MEGABYTE
    logging.info(
        "caching %d decoded images of %s: about %.0f MB", len(dataset), dataset.name, estimate
    )

    indices_of = _in_order(len(dataset), _PER_TASK)
    columns_of = as_written(
        lambda step: look_up(dataset.labels, source, indices_of, step, None)[1:]
    )
    images = tf.data.Dataset.range(-(-len(dataset) // _PER_TASK)).map(columns_of).unbatch()
    prepare = as_written(lambda *row: transform.prepare(source.read(*row)))
    images = images.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    try:
        for image in images.as_numpy_iterator():
            total += image.nbytes
            decoded.append(image)
            if total > limit_mb * MEGABYTE:
                size = total / len(decoded) * len(dataset) / MEGABYTE
                needed = f"about {size:,.0f} MB of memory"
                advice = (
                    f"more than the limit of {limit_mb:,.0f} MB: train without cache, or raise "
                    "cache_limit_mb"
                )
                raise UserError(
                    f"the decoded images of {dataset.name} would take {needed}, {advice}"
                )
    except tf.errors.OpError as error:
        raise (explain_failure(error, dataset) or error) from None
    logging.info(
        "cached %d decoded images of %s: %.0f MB", len(decoded), dataset.name, total / MEGABYTE
    )
    return source_of_decoded(decoded)


# Threads that mostly wait for a disk or a network.
_READERS = 8


def readable_views(
    images: Images, transform: EvaluationTransform, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the views of the images that can be read, in their order; the next batch is decoded
    meanwhile.

    Without `tf.data`, which takes a second to start: a set may be cut into thousands of parts.

    Args:
        images: The images.
        transform: The evaluation view.
        batch_size: B; a batch has fewer where images cannot be read.

    Yields:
        (B,) int64, which images these are, and their (B, S, S, 3) uint8 views.

    Example:
        >>> from tfdml.data import EncodedImages, EvaluationTransform
        >>> list(readable_views(EncodedImages((b"no image",), ("a.jpg",)), EvaluationTransform(32,
        ...     28), 4))
        []
    """
    view = _viewer(transform)
    for rows, views in readable_batches(
        images, batch_size, lambda encoded: view(tf.constant(encoded)).numpy()
    ):
        yield rows, np.stack(views)


def readable_batches(
    images: Images, batch_size: int, make: Callable[[bytes], _Made]
) -> Iterator[tuple[np.ndarray, list[_Made]]]:
    """Yield what is made of one batch after another, the next one ahead, without images that cannot
    be read.

    Args:
        images: The images.
        batch_size: B.
        make: Called in a thread with the bytes of an image.

    Yields:
        (B,) int64, which images these are, and what was made of each.

    Example:
        >>> from tfdml.data import EncodedImages
        >>> list(readable_batches(EncodedImages((b"a", b"", b"bc"), ("a.jpg", "b.jpg", "c.jpg")), 2,
        ...     len))
        [(array([0]), [1]), (array([2]), [2])]
    """

    def made(index: int) -> _Made | None:
        try:
            encoded = images.encoded(index)
            return make(encoded) if encoded else None
        except (OSError, tf.errors.OpError, UserError):
            return None

    with concurrent.futures.ThreadPoolExecutor(max(_READERS, os.cpu_count() or 1)) as pool:

        def begin(start: int) -> list[concurrent.futures.Future]:
            return [
                pool.submit(made, index)
                for index in range(start, min(start + batch_size, len(images)))
            ]

        coming = begin(0)
        for start in range(0, len(images), batch_size):
            batch, coming = coming, begin(start + batch_size)
            values = {start + place: future.result() for place, future in enumerate(batch)}
            readable = {row: value for row, value in values.items() if value is not None}
            if readable:
                yield np.array(list(readable)), list(readable.values())


@functools.lru_cache(maxsize=8)
def _viewer(transform: EvaluationTransform) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the function from the bytes of an image to its view."""

    @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
    def view(encoded: tf.Tensor) -> tf.Tensor:
        return transform(decode_image(encoded))

    return view
