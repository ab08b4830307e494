"""The models: an embedder, and the learner that trains it."""

from tfdml.models.alternation import AlternatingOptimizer
from tfdml.models.embedder import Embedder, Head
from tfdml.models.ensemble import AttentionEnsemble
from tfdml.models.learner import MetricLearner
from tfdml.models.reduced_embedders import (
    MomentEmbedder,
    StackedEmbedder,
    TruncatedEmbedder,
    WhitenedEmbedder,
    stack,
    with_whitening,
)
from tfdml.workarounds import multi_worker_strategy

# What embeds images by itself, and is saved, evaluated and exported.
AnyEmbedder = Embedder | MomentEmbedder | WhitenedEmbedder | TruncatedEmbedder | StackedEmbedder

__all__ = [
    "AlternatingOptimizer",
    "AnyEmbedder",
    "AttentionEnsemble",
    "Embedder",
    "Head",
    "MetricLearner",
    "MomentEmbedder",
    "StackedEmbedder",
    "TruncatedEmbedder",
    "WhitenedEmbedder",
    "multi_worker_strategy",
    "stack",
    "with_whitening",
]
