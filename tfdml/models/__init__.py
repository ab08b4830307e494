"""The models: an embedder, and the learner that trains it."""

from tfdml.models.embedder import Embedder
from tfdml.models.ensemble import AttentionEnsemble
from tfdml.models.learner import MetricLearner
from tfdml.models.moment_embedder import MomentEmbedder

__all__ = ["AttentionEnsemble", "Embedder", "MetricLearner", "MomentEmbedder"]
