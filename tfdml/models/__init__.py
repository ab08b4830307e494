"""The models: an embedder, and the learner that trains it."""

from tfdml.models.alternation import AlternatingOptimizer
from tfdml.models.embedder import Embedder
from tfdml.models.ensemble import AttentionEnsemble
from tfdml.models.learner import MetricLearner
from tfdml.models.reduced_embedders import MomentEmbedder, TruncatedEmbedder, WhitenedEmbedder, with_whitening
from tfdml.workarounds import multi_worker_strategy

# What embeds images by itself, and is saved, evaluated and exported.
AnyEmbedder = Embedder | MomentEmbedder | WhitenedEmbedder | TruncatedEmbedder

__all__ = [
    "AlternatingOptimizer",
    "AnyEmbedder",
    "AttentionEnsemble",
    "Embedder",
    "MetricLearner",
    "MomentEmbedder",
    "TruncatedEmbedder",
    "WhitenedEmbedder",
    "multi_worker_strategy",
    "with_whitening",
]
