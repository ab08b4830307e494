"""The terms of a training loss, as layers from (representations, labels) to a scalar."""

from tfdml.objectives.base import Objective
from tfdml.objectives.density import DensityAdaptivity
from tfdml.objectives.divergence import HeadDivergence, HeadwiseLoss
from tfdml.objectives.energy_confusion import EnergyConfusion
from tfdml.objectives.kernel_embedding import JointIntra, JointMMD, JointRepresentationSimilarity
from tfdml.objectives.learned_margin import LearnedMargin, RegularizedSoftTriple
from tfdml.objectives.metric import MetricLoss, ProxyLoss
from tfdml.objectives.moments import HighOrderMomentLoss
from tfdml.objectives.mutual_information import RankMI
from tfdml.objectives.spread import EntropySpread, GlobalOrthogonal

__all__ = [
    "DensityAdaptivity",
    "EnergyConfusion",
    "EntropySpread",
    "GlobalOrthogonal",
    "HeadDivergence",
    "HeadwiseLoss",
    "HighOrderMomentLoss",
    "JointIntra",
    "JointMMD",
    "JointRepresentationSimilarity",
    "LearnedMargin",
    "MetricLoss",
    "Objective",
    "ProxyLoss",
    "RankMI",
    "RegularizedSoftTriple",
]
