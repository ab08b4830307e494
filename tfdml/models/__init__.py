"""The models: an embedder, and the learner that trains it."""

from tfdml.models.alternating_optimizer import AlternatingOptimizer
from tfdml.models.alternation import AlternatingLearner
from tfdml.models.embedder import Embedder
from tfdml.models.ensemble import AttentionEnsemble
from tfdml.models.learner import MetricLearner
from tfdml.models.moment_embedder import MomentEmbedder
from tfdml.models.several_workers import multi_worker_strategy
from tfdml.models.whitened_embedder import WhitenedEmbedder, with_whitening

# What embeds images by itself, and is saved, evaluated and exported.
AnyEmbedder = Embedder | MomentEmbedder | WhitenedEmbedder

__all__ = [
    "AlternatingLearner",
    "AlternatingOptimizer",
    "AnyEmbedder",
    "AttentionEnsemble",
    "Embedder",
    "MetricLearner",
    "MomentEmbedder",
    "WhitenedEmbedder",
    "multi_worker_strategy",
    "with_whitening",
]
