"""The terms of a training loss, as layers from (representations, labels) to a scalar."""

from tfdml.objectives.base import Objective
from tfdml.objectives.kernel_embedding import JointRepresentationSimilarity
from tfdml.objectives.metric import MetricLoss, ProxyLoss

__all__ = ["JointRepresentationSimilarity", "MetricLoss", "Objective", "ProxyLoss"]
