"""Stateless losses, one family a file; each is `loss(labels, y_pred)`, and `loss.call` gives one value per image."""

from tfdml.losses.base import PairLoss as PairLoss
from tfdml.losses.classification import AMSoftmaxLoss, ArcFaceLoss, NormSoftmaxLoss
from tfdml.losses.classification import ClassSimilarityLoss as ClassSimilarityLoss
from tfdml.losses.contrastive import BinomialDevianceLoss, ContrastiveLoss, CosineContrastiveLoss
from tfdml.losses.margin import MarginLoss
from tfdml.losses.npair import AngularLoss, NPairLoss
from tfdml.losses.pair_softmax import NTXentLoss, SoftNearestNeighborLoss, TupletMarginLoss
from tfdml.losses.proxy import ProxyAnchorLoss, ProxyNCALoss, ProxyNCAPlusPlusLoss, SoftTripleLoss
from tfdml.losses.quadruplet import QuadrupletLoss
from tfdml.losses.ranked_list import RankedListLoss
from tfdml.losses.ranking import FastAPLoss, HistogramLoss
from tfdml.losses.smooth_ranks import RecallAtKLoss, SmoothAPLoss
from tfdml.losses.spherical import SphereFaceLoss, SubCenterArcFaceLoss
from tfdml.losses.structured import (
    CircleLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    SupConLoss,
)
from tfdml.losses.triplet import TripletLoss
from tfdml.losses.variance import VICRegLoss

__all__ = [
    "AMSoftmaxLoss",
    "AngularLoss",
    "ArcFaceLoss",
    "BinomialDevianceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosineContrastiveLoss",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "HistogramLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "NPairLoss",
    "NTXentLoss",
    "NormSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "ProxyNCAPlusPlusLoss",
    "QuadrupletLoss",
    "RankedListLoss",
    "RecallAtKLoss",
    "SmoothAPLoss",
    "SoftNearestNeighborLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "TripletLoss",
    "TupletMarginLoss",
    "VICRegLoss",
]
