"""The terms of a training loss, as layers from (representations, labels) to a scalar.

Each also takes the `weight` and the `name` of an `Objective`; those over one representation take
its `representation` and `reduction` too.
"""

from tfdml.objectives.across_views import AcrossViews as AcrossViews
from tfdml.objectives.across_views import SigmoidAcrossViews as SigmoidAcrossViews
from tfdml.objectives.across_views import SoftmaxAcrossViews as SoftmaxAcrossViews
from tfdml.objectives.base import Matryoshka as Matryoshka
from tfdml.objectives.base import MatryoshkaProxyLoss as MatryoshkaProxyLoss
from tfdml.objectives.base import MetricLoss as MetricLoss
from tfdml.objectives.base import Objective as Objective
from tfdml.objectives.base import ProxyLoss as ProxyLoss
from tfdml.objectives.class_weights import CurricularFace as CurricularFace
from tfdml.objectives.class_weights import InstanceLoss as InstanceLoss
from tfdml.objectives.class_weights import LearnedMargin as LearnedMargin
from tfdml.objectives.class_weights import RegularizedSoftTriple as RegularizedSoftTriple
from tfdml.objectives.class_weights import SphereFace2 as SphereFace2
from tfdml.objectives.kernel_embedding import JointIntra as JointIntra
from tfdml.objectives.kernel_embedding import JointMMD as JointMMD
from tfdml.objectives.kernel_embedding import (
    JointRepresentationSimilarity as JointRepresentationSimilarity,
)
from tfdml.objectives.memory import CrossBatchMemory as CrossBatchMemory
from tfdml.objectives.memory import Prism as Prism
from tfdml.objectives.moments import HeadDivergence as HeadDivergence
from tfdml.objectives.moments import HeadwiseLoss as HeadwiseLoss
from tfdml.objectives.moments import HighOrderMomentLoss as HighOrderMomentLoss
from tfdml.objectives.mutual_information import RankMI as RankMI
from tfdml.objectives.mutual_information import divergence_loss as divergence_loss
from tfdml.objectives.regularizers import DensityAdaptivity as DensityAdaptivity
from tfdml.objectives.regularizers import EnergyConfusion as EnergyConfusion
from tfdml.objectives.regularizers import EntropySpread as EntropySpread
from tfdml.objectives.regularizers import GlobalOrthogonal as GlobalOrthogonal
from tfdml.objectives.regularizers import IntraClassPenalty as IntraClassPenalty
