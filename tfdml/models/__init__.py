"""The models: an embedder, and the learner that trains it."""

from tfdml.models.embedder import Embedder
from tfdml.models.learner import MetricLearner

__all__ = ["Embedder", "MetricLearner"]
