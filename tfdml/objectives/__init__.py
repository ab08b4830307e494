"""The terms of a training loss, as layers from (representations, labels) to a scalar."""

from tfdml.objectives.auto_weight import AutoWeight
from tfdml.objectives.base import Calibrated as Calibrated
from tfdml.objectives.base import Objective
from tfdml.objectives.base import Observed as Observed
from tfdml.objectives.base import Stateful as Stateful
from tfdml.objectives.base import WithStatistics as WithStatistics
from tfdml.objectives.class_weights import (
    CurricularFace,
    InstanceLoss,
    LearnedMargin,
    RegularizedSoftTriple,
    SphereFace2,
)
from tfdml.objectives.heads import HeadDivergence, HeadwiseLoss
from tfdml.objectives.kernel_embedding import JointIntra, JointMMD, JointRepresentationSimilarity
from tfdml.objectives.memory import CrossBatchMemory, Prism
from tfdml.objectives.moments import HighOrderMomentLoss
from tfdml.objectives.mutual_information import RankMI
from tfdml.objectives.mutual_information import divergence_loss as divergence_loss
from tfdml.objectives.regularizers import (
    DensityAdaptivity,
    EnergyConfusion,
    EntropySpread,
    GlobalOrthogonal,
    IntraClassPenalty,
)
from tfdml.objectives.wrappers import Matryoshka, MatryoshkaProxyLoss, MetricLoss, ProxyLoss

__all__ = [
    "AutoWeight",
    "CrossBatchMemory",
    "CurricularFace",
    "DensityAdaptivity",
    "EnergyConfusion",
    "EntropySpread",
    "GlobalOrthogonal",
    "HeadDivergence",
    "HeadwiseLoss",
    "HighOrderMomentLoss",
    "InstanceLoss",
    "IntraClassPenalty",
    "JointIntra",
    "JointMMD",
    "JointRepresentationSimilarity",
    "LearnedMargin",
    "Matryoshka",
    "MatryoshkaProxyLoss",
    "MetricLoss",
    "Objective",
    "Prism",
    "ProxyLoss",
    "RankMI",
    "RegularizedSoftTriple",
    "SphereFace2",
]
