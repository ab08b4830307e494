"""At the end of a run with HORDE: the embedder that searches with all orders of moments."""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdml.evaluation import embed
from tfdml.models import MetricLearner, MomentEmbedder


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
