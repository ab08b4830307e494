"""TensorFlow Similarity's samplers as training data, and embeddings in its Indexer and out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf


def sampler_dataset(sampler: Any) -> tf.data.Dataset:
    """Return the batches of one of TensorFlow Similarity's samplers, as a data set that `fit` takes.

    One pass is an epoch of the sampler: `len(sampler)` batches, after which its `on_epoch_end` is called. Each
    pass draws other images. Unlike tfdml's own samplers, these have no seed by which a run could resume.

    Args:
        sampler: A `MultiShotMemorySampler`, a `TFDatasetMultiShotMemorySampler` or whatever else gives a batch
            (images, class ids) for an index and has a length. Its augmenter may change the images and their number.

    Returns:
        A `tf.data.Dataset` of (images, labels), labels of shape (B,).

    Raises:
        UserError: A batch is no pair of images and one class id an image, as with two views of each image.

    Example:
        >>> class Sampler:  # stands for MultiShotMemorySampler(x, y, classes_per_batch=2)
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return np.ones((4, 8, 8, 3), "float32"), np.array([5, 5, 9, 9])
        >>> images, labels = next(iter(sampler_dataset(Sampler())))
        >>> images.shape, labels.numpy().tolist()
        (TensorShape([4, 8, 8, 3]), [5, 5, 9, 9])
    """
    import tensorflow as tf  # the rest of the package runs without it, on JAX

    images, labels = _checked(sampler[0])

    def batches():
        for index in range(len(sampler)):
            yield _checked(sampler[index])
        if hasattr(sampler, "on_epoch_end"):
            sampler.on_epoch_end()

    specs = (
        tf.TensorSpec((None, *images.shape[1:]), images.dtype),
        tf.TensorSpec((None,), labels.dtype),
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(sampler))).prefetch(tf.data.AUTOTUNE)


def build_indexer(embeddings, labels, data=None, distance: str = "cosine") -> Any:
    """Return an `Indexer` of TensorFlow Similarity that holds given embeddings: its lookup, calibration and evaluation.

    Args:
        embeddings: (N, d), of unit length where `distance` is `"cosine"`: `embedder.predict(images)`.
        labels: (N,) class ids.
        data: What its lookups return next to each, such as the images, (N, ...).
        distance: As there: `"cosine"`, `"euclidean"`, `"inner_product"` and others.

    Raises:
        UserError: The package is not installed, or the numbers of rows differ.

    Example:
        >>> indexer = build_indexer(embedder.predict(images), labels)  # doctest: +SKIP
        >>> indexer.batch_lookup(embedder.predict(queries), k=5)  # doctest: +SKIP
    """
    try:
        from tensorflow_similarity.indexer import Indexer
    except ModuleNotFoundError as error:
        raise UserError(f"TensorFlow Similarity is not installed ({error}): pip install 'tfdml[legacy]'") from error
    embeddings, labels = _rows(embeddings, labels)
    if data is not None and len(data) != len(labels):
        raise UserError(f"`data` has {len(data)} rows, `labels` {len(labels)}")
    indexer = Indexer(embeddings.shape[1], distance=distance)
    indexer.batch_add(embeddings, labels=labels.tolist(), data=data, verbose=0)
    return indexer


def read_indexer(indexer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings (N, d) and class ids (N,) that an `Indexer` of TensorFlow Similarity holds, in its order.

    They go into `np.savez(file, embeddings=..., labels=...)`, which `tfdml evaluate`, `tfdml index` and
    `tfdml.evaluation.read_embeddings` read.

    Args:
        indexer: One that keeps its items in memory, as all do by default; `Indexer.load(folder)`
            reads one from disk.

    Raises:
        UserError: Its items are elsewhere, it holds none, or one has no label.

    Example:
        >>> import types
        >>> store = types.SimpleNamespace(embeddings=[np.zeros(2), np.ones(2)], labels=[3, 4])
        >>> read_indexer(types.SimpleNamespace(kv_store=store))[1].tolist()
        [3, 4]
    """
    store: Any = getattr(indexer, "kv_store", None)
    if not hasattr(store, "embeddings") or not hasattr(store, "labels"):
        raise UserError(f"{type(indexer).__name__} does not keep its items in memory, so they cannot be read")
    if not len(store.embeddings):
        raise UserError("the indexer holds no embeddings")
    missing = sum(label is None for label in store.labels)
    if missing:
        raise UserError(f"{missing} of the indexer's {len(store.labels)} embeddings have no label")
    return _rows(np.stack([np.asarray(row) for row in store.embeddings]), store.labels)


def _checked(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or isinstance(batch[0], (tuple, list, dict)):
        raise UserError("the sampler's batches are no pairs (images, class ids)")
    images, labels = np.asarray(batch[0]), np.asarray(batch[1])
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UserError(
            f"the sampler gives images of shape {images.shape} with labels of shape {labels.shape} and type "
            f"{labels.dtype}: a class id an image is needed"
        )
    return images, labels


def _rows(embeddings: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    embeddings, labels = np.asarray(embeddings, "float32"), np.asarray(labels)
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise UserError(
            f"`embeddings` of shape {embeddings.shape} and `labels` of shape {labels.shape}: one label a row"
        )
    return embeddings, labels
