"""The Keras callback `RetrievalEvaluation`: measures retrieval on held-out classes after each epoch
of `fit`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdml.embeddings.compute import embed, slices
from tfdml.errors import UserError, check_positive
from tfdml.evaluation.metrics import PER_QUERY, metric_names
from tfdml.evaluation.relevance import retrieval_task
from tfdml.evaluation.retrieval import check_depth, evaluate_retrieval
from tfdml.labels import integer_labels
from tfdml.models import MetricLearner
from tfdml.models.inference import never_ends

__all__ = ["RetrievalEvaluation"]


class RetrievalEvaluation(keras.callbacks.Callback):
    """Writes retrieval metrics of held-out images into the logs of each epoch, as `val_recall@1`
    and `val_map@r`.

    Embeds the images with the weights that the epoch ended with and calls `evaluate_retrieval`.
    Works with any `keras.Model` that gives embeddings, and with a `MetricLearner`, on Keras's
    TensorFlow and JAX backends.

    The metrics are for other callbacks to monitor. Larger is better, and Keras cannot infer that
    from their names, so say `mode="max"`:

        model.fit(x, y, epochs=50, callbacks=[
            tfdml.callbacks.RetrievalEvaluation(x_held_out, y_held_out),
            keras.callbacks.EarlyStopping(
                "val_recall@1", mode="max", patience=5, restore_best_weights=True
            ),
        ])

    Keras calls callbacks in the order of their list, and hands each the logs of those before. List
    `keras.callbacks.SwapEMAWeights` first, this callback second, and those that read its metrics
    after it. Then the metrics are those of the weights that `ModelCheckpoint` saves.

    Args:
        x: The images: an array (N, ...), or batches of (images, labels) that end, such as
            `tfdml.data.evaluation_batches`; these are read again after each epoch, in the same
            order.
        y: (N,) class ids, where `x` is an array. Classes that are not trained on measure what a
            metric is for.
        gallery: (G, ...) the images that those of `x` are searched in; None: among each other.
        gallery_labels: (G,) class ids of `gallery`.
        ks: The K of `recall`.
        metrics: Any of `recall` (every K of `ks`), `recall@K`, `precision@K`, `map@K`, `map@r`,
            `r_precision`, `map`; see `tfdml.evaluation.evaluate_retrieval`.
        distance: `"euclidean"`, `"sqeuclidean"`, `"cosine"` or `"dot"`.
        batch_size: Images of an array that are embedded at once.
        embedder: From images to embeddings; by default the model that trains, of a `MetricLearner`
            its embedder.
        prefix: What the names in the logs begin with.

    Raises:
        UserError: Images and labels do not go together, a metric is unknown or needs more images
            than there are, or no image has another of its class to find. While training: the
            embeddings are not finite, or a callback that is listed later swaps other weights in.

    Example:
        >>> x, y = train.images.pixels(), train.labels
        >>> evaluation = RetrievalEvaluation(test.images.pixels(), test.labels, ks=(1, 4))
        >>> stopping = keras.callbacks.EarlyStopping("val_recall@1", mode="max", patience=3)
        >>> history = model.fit(x, y, epochs=20, callbacks=[evaluation, stopping])
        >>> sorted(name for name in history.history if name.startswith("val_"))
        ['val_map@r', 'val_recall@1', 'val_recall@4']
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        gallery: Any = None,
        gallery_labels: Any = None,
        ks: Sequence[int] = (1,),
        metrics: Sequence[str] = ("recall", "map@r"),
        distance: str = "euclidean",
        batch_size: int = 100,
        embedder: Callable[[Any], Any] | None = None,
        prefix: str = "val_",
    ):
        super().__init__()
        check_positive(batch_size=batch_size)
        if y is None and (
            hasattr(x, "shape") or not (hasattr(x, "__iter__") or hasattr(x, "__getitem__"))
        ):
            raise UserError(
                "RetrievalEvaluation needs labels: give y, or batches of (images, labels) as x"
            )
        if hasattr(x, "__next__"):
            raise UserError(
                "a generator is used up after one epoch: give arrays, a tf.data.Dataset or a "
                "PyDataset"
            )
        if y is None and never_ends(x):
            raise UserError(
                "the batches to evaluate on never end: give one pass over the held-out images"
            )
        self.x = x
        self.y = None if y is None else integer_labels(y, "y")
        self.gallery = gallery
        self.gallery_labels = (
            None if gallery_labels is None else integer_labels(gallery_labels, "gallery_labels")
        )
        self.names = metric_names(metrics, ks, needs=PER_QUERY)
        self.distance = distance
        self.batch_size = batch_size
        self.embedder = embedder
        self.prefix = prefix
        self._weights: list[Any] = []
        if self.y is not None:
            # What is wrong is found now, not at the end of a long epoch.
            nothing = [
                None if images is None else np.zeros((len(images), 1)) for images in (x, gallery)
            ]
            check_depth(
                retrieval_task(nothing[0], self.y, nothing[1], self.gallery_labels), self.names
            )

    def on_train_begin(self, logs=None):
        """Refuse averaged weights on JAX, of which Keras frees arrays that a checkpoint then
        misses."""
        if keras.backend.backend() == "jax" and getattr(self.model.optimizer, "use_ema", False):
            raise UserError(
                "RetrievalEvaluation does not go with an optimizer's use_ema on JAX: use TensorFlow"
            )
        self._weights = []  # those of another model, where it is used again

    def on_epoch_end(self, epoch, logs=None):
        """Measure, and add the metrics to the logs."""
        if logs is not None:
            logs.update(
                {f"{self.prefix}{name}": value for name, value in self.evaluate(self.model).items()}
            )
        self._weights = [self._weight()] if self.model.trainable_variables else []

    def on_epoch_begin(self, epoch, logs=None):
        """Note the weights after the other callbacks."""
        self._weights += [self._weight()] if self._weights else []

    def on_train_batch_begin(self, batch, logs=None):
        """Refuse callbacks that have swapped the weights after they were measured."""
        if len(self._weights) == 2:
            (before, after), self._weights = self._weights, []
            # A swap and the one back round.
            if np.linalg.norm(self._weight() - before) < 1e-3 * np.linalg.norm(after - before):
                raise UserError(
                    "a callback swaps other weights in after RetrievalEvaluation has measured: "
                    "list SwapEMAWeights "
                    "before it, and the callbacks that read its metrics after it"
                )

    def _weight(self) -> np.ndarray:
        """Return a weight that steps and swaps change."""
        return keras.ops.convert_to_numpy(self.model.trainable_variables[-1])

    def evaluate(self, model: keras.Model) -> dict[str, float]:
        """Return the metrics of a model as it is now, by name, without the prefix.

        Example:
            >>> sorted(RetrievalEvaluation(test.images.pixels(), test.labels).evaluate(model))
            ['map@r', 'recall@1']
        """
        embedder = self.embedder or (model.embedder if isinstance(model, MetricLearner) else model)
        if self.y is not None:
            embeddings, labels = embed(embedder, slices(self.x, self.batch_size)), self.y
        else:
            parts: list[np.ndarray] = []
            embeddings, labels = embed(embedder, _images(self.x, parts)), np.concatenate(parts)
        gallery = (
            None if self.gallery is None else embed(embedder, slices(self.gallery, self.batch_size))
        )
        metrics = evaluate_retrieval(
            embeddings,
            labels,
            gallery,
            self.gallery_labels,
            metrics=self.names,
            distance=self.distance,
        )
        return {name: metrics[name] for name in self.names}


def _images(batches: Any, labels: list[np.ndarray]) -> Iterator[Any]:
    """Yield the images of batches of (images, labels); the labels are added to a list."""
    # A PyDataset may have items beyond its length.
    finite = (
        map(batches.__getitem__, range(len(batches)))
        if isinstance(batches, keras.utils.PyDataset)
        else batches
    )
    for batch in finite:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise UserError("each batch to evaluate on must be (images, labels)")
        labels.append(integer_labels(batch[1]))
        yield batch[0]
