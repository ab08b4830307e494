"""Stateless losses, one family a file; each is `loss(labels, y_pred)`, and `loss.call` gives one value per image."""

from tfdml.losses.base import PairLoss as PairLoss
from tfdml.losses.classification import (
    AMSoftmaxLoss,
    ArcFaceLoss,
    NormSoftmaxLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
)
from tfdml.losses.classification import ClassSimilarityLoss as ClassSimilarityLoss
from tfdml.losses.contrastive import (
    BinomialDevianceLoss,
    ContrastiveLoss,
    CosineContrastiveLoss,
    CosineSimilarityLoss,
    MarginLoss,
    RankedListLoss,
    VICRegLoss,
)
from tfdml.losses.pair_softmax import (
    AngularLoss,
    CircleLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NPairLoss,
    NTXentLoss,
    SoftNearestNeighborLoss,
    SupConLoss,
    TupletMarginLoss,
)
from tfdml.losses.proxy import ProxyAnchorLoss, ProxyNCALoss, ProxyNCAPlusPlusLoss, SoftTripleLoss
from tfdml.losses.ranking import FastAPLoss, HistogramLoss, RecallAtKLoss, SmoothAPLoss
from tfdml.losses.triplet import QuadrupletLoss, TripletLoss

__all__ = [
    "AMSoftmaxLoss",
    "AngularLoss",
    "ArcFaceLoss",
    "BinomialDevianceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosineContrastiveLoss",
    "CosineSimilarityLoss",
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
