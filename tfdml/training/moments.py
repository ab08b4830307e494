"""What a run with HORDE has besides its embedder: the embeddings of each order of moments, and of all together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.evaluation import embed
from tfdml.models import MetricLearner, MomentEmbedder


def measure_orders(
    learner: MetricLearner, batches: tf.data.Dataset, measure: Callable[[np.ndarray], dict]
) -> dict[str, dict]:
    """The metrics of each order's own embedding, and of all of them side by side.

    Args:
        learner: A learner with one `HighOrderMomentLoss`.
        batches: Batches of the images to measure, in the view of evaluation.
        measure: embeddings (N, d) -> metrics.

    Returns:
        Metrics by `"1"` (the embedding itself), `"2"` ... and `"all"`.
    """
    model = MomentEmbedder.from_learner(learner)
    features = embed(tf.function(model.features, reduce_retracing=True), batches)
    measured = {str(order): measure(part) for order, part in model.by_order(features).items()}
    return {**measured, "all": measure(features)}


def moment_embedder(learner: MetricLearner, train: tf.data.Dataset) -> MomentEmbedder:
    """The learner's `MomentEmbedder`, with the principal components of its training images.

    Args:
        learner: A trained learner with one `HighOrderMomentLoss`.
        train: Batches of the training images in the view of evaluation.
    """
    model = MomentEmbedder.from_learner(learner)
    features = embed(tf.function(model.features, reduce_retracing=True), train)
    logging.info(
        "principal components of %d moments: %d of %d dimensions", len(features), model.embedding_dim, features.shape[1]
    )
    model.adapt(features)
    return model
