"""Stateless losses, one family a file; each is `loss(labels, y_pred)`, and `loss.call` gives one
value per image."""

from tfdml.losses.base import PairLoss as PairLoss
from tfdml.losses.classification import AMSoftmaxLoss as AMSoftmaxLoss
from tfdml.losses.classification import ArcFaceLoss as ArcFaceLoss
from tfdml.losses.classification import ClassSimilarityLoss as ClassSimilarityLoss
from tfdml.losses.classification import NormSoftmaxLoss as NormSoftmaxLoss
from tfdml.losses.classification import ProxyAnchorLoss as ProxyAnchorLoss
from tfdml.losses.classification import ProxyNCALoss as ProxyNCALoss
from tfdml.losses.classification import ProxyNCAPlusPlusLoss as ProxyNCAPlusPlusLoss
from tfdml.losses.classification import SoftTripleLoss as SoftTripleLoss
from tfdml.losses.classification import SphereFaceLoss as SphereFaceLoss
from tfdml.losses.classification import SubCenterArcFaceLoss as SubCenterArcFaceLoss
from tfdml.losses.contrastive import BinomialDevianceLoss as BinomialDevianceLoss
from tfdml.losses.contrastive import ContrastiveLoss as ContrastiveLoss
from tfdml.losses.contrastive import CosineContrastiveLoss as CosineContrastiveLoss
from tfdml.losses.contrastive import CosineSimilarityLoss as CosineSimilarityLoss
from tfdml.losses.contrastive import MarginLoss as MarginLoss
from tfdml.losses.contrastive import RankedListLoss as RankedListLoss
from tfdml.losses.contrastive import (
    ThresholdConsistentMarginLoss as ThresholdConsistentMarginLoss,
)
from tfdml.losses.contrastive import VICRegLoss as VICRegLoss
from tfdml.losses.pair_softmax import AngularLoss as AngularLoss
from tfdml.losses.pair_softmax import CircleLoss as CircleLoss
from tfdml.losses.pair_softmax import (
    GeneralizedLiftedStructureLoss as GeneralizedLiftedStructureLoss,
)
from tfdml.losses.pair_softmax import LiftedStructureLoss as LiftedStructureLoss
from tfdml.losses.pair_softmax import MultiSimilarityLoss as MultiSimilarityLoss
from tfdml.losses.pair_softmax import NPairLoss as NPairLoss
from tfdml.losses.pair_softmax import NTXentLoss as NTXentLoss
from tfdml.losses.pair_softmax import SoftNearestNeighborLoss as SoftNearestNeighborLoss
from tfdml.losses.pair_softmax import SupConLoss as SupConLoss
from tfdml.losses.pair_softmax import TupletMarginLoss as TupletMarginLoss
from tfdml.losses.ranking import FastAPLoss as FastAPLoss
from tfdml.losses.ranking import HistogramLoss as HistogramLoss
from tfdml.losses.ranking import RecallAtKLoss as RecallAtKLoss
from tfdml.losses.ranking import SmoothAPLoss as SmoothAPLoss
from tfdml.losses.triplet import QuadrupletLoss as QuadrupletLoss
from tfdml.losses.triplet import TripletLoss as TripletLoss
