"""How a run measures its embedder: the splits and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.evaluation import embed, evaluate_dataset, evaluate_generalisation
from tfdml.models import Embedder, MetricLearner, MomentEmbedder
from tfdml.models.inference import compiled
from tfdml.training.build.components import has_orders
from tfdml.training.build.images import Splits
from tfdml.training.distributed.devices import own_threads
from tfdml.training.distributed.processes import Processes
from tfdml.training.settings import EvaluationSettings

RETRIEVAL = ("recall", "map@r", "r_precision")
CLUSTERING = ("nmi", "ami", "f1")


def is_due(epoch: int, every: int, epochs: int) -> bool:
    """Whether something is measured after an epoch: before the first, after the last, and every so many between."""
    return epoch in (0, epochs) or (every > 0 and epoch % every == 0)


class Evaluator:
    """Embeds splits and measures them.

    Args:
        settings: What is measured, and when.
        epochs: The number of epochs; what is measured at the end is measured in the last.
        splits: The images.
        transform: The view of evaluation.
        cache: Whether to keep the views in memory.
        processes: Who trains: each embeds its part of the images, and the chief measures.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        epochs: int,
        splits: Splits,
        transform: EvaluationTransform,
        cache: bool = False,
        processes: Processes | None = None,
    ):
        self.settings = settings
        self.epochs = epochs
        self.splits = splits
        self.transform = transform
        self.processes = processes or Processes()
        self.batches: dict[str, tf.data.Dataset] = {}
        self._parts: dict[str, tf.data.Dataset] = {}
        for name, split in splits.evaluated().items():
            self.batches[name] = self._batches(split, cache)
            if not self.processes.alone:
                self._parts[name] = self._batches(
                    split.take(np.arange(len(split))[self.processes.part(len(split))]), cache
                )

    def _batches(self, images: ImageDataset, cache: bool) -> tf.data.Dataset:
        batches = evaluation_batches(images, self.transform, self.settings.evaluation_batch_size)
        return own_threads(batches.cache() if cache else batches)

    def embed(self, embedder: Embedder, name: str) -> np.ndarray:
        """Return the embeddings of a split, (N, d) float32, by this process alone."""
        return embed(embedder, self.batches[name])

    def embed_together(self, embedder: Embedder, name: str) -> np.ndarray:
        """Return the same, by all processes, each of which has to call this; with the weights that they share."""
        if len(getattr(self.splits, name)) < self.processes.count or self.processes.alone:
            return self.embed(embedder, name)
        return self.processes.gather(embed(embedder, self._parts[name]))

    def measure(self, embeddings: np.ndarray, name: str, metrics=RETRIEVAL, **options: Any) -> dict[str, Any]:
        """Return the metrics of a split's embeddings; see `evaluate_retrieval` for the options."""
        ks, images = self.settings.recall_ks(), getattr(self.splits, name)
        return evaluate_dataset(embeddings, images, ks=ks, metrics=metrics, **options)

    def each_epoch(self, learner: MetricLearner, epoch: int) -> dict[str, dict]:
        """Return the metrics of every split, of HORDE's orders, and of generalisation, in the epochs that measure them.

        Of several processes all embed, and the chief measures; the others get no metrics.
        """
        settings, measured = self.settings, {}
        compared = settings.generalisation_every > 0 and is_due(epoch, settings.generalisation_every, self.epochs)
        evaluated = is_due(epoch, settings.evaluate_every, self.epochs)
        names = self.batches if evaluated else ("test", "seen") if compared else ()
        embeddings = {name: self.embed_together(learner.embedder, name) for name in names}
        if not self.processes.is_chief:
            return {}
        if evaluated:
            measured = {name: self.measure(embeddings[name], name) for name in embeddings}
            for name, metrics in measured.items():
                logging.info("epoch %d, %s: %s", epoch, name, format_metrics(metrics))
            if settings.evaluate_orders == "epochs" or (settings.evaluate_orders == "end" and epoch == self.epochs):
                measured.update(self.orders(learner))
        if compared:
            measured["generalisation"] = self._generalisation(embeddings)
        return measured

    def _generalisation(self, embeddings: dict[str, np.ndarray]) -> dict[str, float | int | bool]:
        """How the unseen classes lie beside the seen ones; see `evaluate_generalisation`."""
        assert self.splits.seen is not None
        return evaluate_generalisation(
            embeddings["test"],
            self.splits.test.labels,
            embeddings["seen"],
            self.splits.seen.labels,
            measures=("density", "divergence"),
        )

    def orders(self, learner: MetricLearner) -> dict[str, dict]:
        """Return Recall@K of each order of HORDE's moments on unseen classes, as `orders`; empty without one horde."""
        if not has_orders(learner):
            return {}
        batches = self.batches["test"]
        return {"orders": measure_orders(learner, batches, lambda part: self.measure(part, "test", ("recall",)))}


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics for people: percent, one decimal."""
    shown = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown)


def measure_orders(
    learner: MetricLearner, batches: tf.data.Dataset, measure: Callable[[np.ndarray], dict]
) -> dict[str, dict]:
    """Return the metrics of each order's own embedding, and of all of them side by side.

    Args:
        learner: A learner with one `HighOrderMomentLoss`.
        batches: Batches of the images to measure, in the view of evaluation.
        measure: embeddings (N, d) -> metrics.

    Returns:
        Metrics by `"1"` (the embedding itself), `"2"` ... and `"all"`.
    """
    model = MomentEmbedder.from_learner(learner)
    features = embed(compiled(model, model.features), batches)
    measured = {str(order): measure(part) for order, part in model.by_order(features).items()}
    return {**measured, "all": measure(features)}
