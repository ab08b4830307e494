"""Embeddings of a whole data set, batch by batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfdml.errors import UserError
from tfdml.models.embedder import check_images
from tfdml.models.inference import compiled


def embed(embedder: Callable[[Any], Any] | keras.Model, batches: Iterable[Any]) -> np.ndarray:
    """Return the embeddings of all images, in the order in which they come.

    A batch smaller than the largest so far is filled up with copies of its last image, whose
    embeddings are dropped, so that a compiled model sees one shape and is not traced again for the
    last batch.

    Args:
        embedder: A Keras model, run in inference mode, or any callable; from (B, H, W, 3) images to
            (B, d) embeddings, or to a dict with the key `embedding`. Each row must depend on its
            image alone.
        batches: A `tf.data.Dataset` or any iterable, of images or of tuples that begin with images,
            such as (images, labels).

    Returns:
        (N, d) float32.

    Raises:
        UserError: No batch, or the embedder does not give one vector per image.

    Example:
        >>> import numpy as np
        >>> images = np.arange(10.0).reshape(5, 2)
        >>> embed(lambda x: 2 * x, [images[:3], images[3:]]).shape
        (5, 2)
    """
    parts = list(embed_batches(embedder, batches))
    if not parts:
        raise UserError("there is no image to embed")
    return np.concatenate(parts)


def embed_batches(
    embedder: Callable[[Any], Any] | keras.Model, batches: Iterable[Any], *, batch_size: int = 0
) -> Iterator[np.ndarray]:
    """Yield the embeddings of one batch after another, for sets whose embeddings are not held in
    memory.

    Args:
        embedder: As `embed`.
        batches: As `embed`.
        batch_size: Batches are filled up to this size from the first on, so that a pass that begins
            in the middle of a set computes as one that began at its start; 0: to the largest so
            far.

    Yields:
        (B, d) float32 of each batch that is not empty.

    Raises:
        UserError: The embedder does not give one vector per image.

    Example:
        >>> import numpy as np
        >>> [len(vectors) for vectors in embed_batches(lambda x: 2 * x, [np.ones((3, 2)),
        ...     np.ones((2, 2))])]
        [3, 2]
    """
    run = _runner(embedder)
    dimensions, largest = None, batch_size
    for batch in batches:
        images = batch[0] if isinstance(batch, tuple | list) else batch
        count = int(images.shape[0])
        if count == 0:
            continue
        if dimensions is None:
            check_images(embedder, images, stacklevel=6)
        largest = max(largest, count)
        if count < largest:
            images = np.asarray(images)
            images = np.concatenate([images, np.repeat(images[-1:], largest - count, axis=0)])
        vectors = _vectors(run(images), largest)
        if dimensions not in (None, vectors.shape[1]):
            raise UserError(f"the embedder gave {dimensions} dimensions, then {vectors.shape[1]}")
        dimensions = vectors.shape[1]
        yield vectors[:count]


def slices(images: Any, batch_size: int) -> Iterator[Any]:
    """Yield the batches of an array of images, the last one perhaps smaller.

    Example:
        >>> [len(batch) for batch in slices(np.zeros((5, 2)), 2)]
        [2, 2, 1]
    """
    return (images[first : first + batch_size] for first in range(0, len(images), batch_size))


def _runner(embedder: Any) -> Callable[[Any], Any]:
    """How to call the embedder on one batch after another without tracing it for each."""
    if not isinstance(embedder, keras.Model):
        return embedder
    if keras.distribution.distribution() is not None:
        return compiled(
            embedder, embedder
        )  # predict_on_batch would want the parts of all processes
    strategy = getattr(embedder, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        if keras.backend.backend() == "tensorflow":
            return embedder.predict_on_batch  # compiled once for the life of the model
        return lambda images: embedder.predict_on_batch(
            np.asarray(images)
        )  # batches may be tf.data's tensors
    # predict_on_batch would run the whole batch once on every replica, and return it as often.
    return compiled(embedder, lambda images: embedder(images, training=False))


def _vectors(output: Any, count: int) -> np.ndarray:
    if isinstance(output, Mapping):
        if "embedding" not in output:
            raise UserError(
                f"the embedder's output has no key 'embedding', only {', '.join(map(str, output))}"
            )
        output = output["embedding"]
    vectors = keras.ops.convert_to_numpy(output).astype(np.float32)
    if vectors.ndim != 2 or len(vectors) != count:
        raise UserError(
            f"the embedder must give (images, dimensions), here ({count}, d); it gave "
            f"{vectors.shape}"
        )
    return vectors
