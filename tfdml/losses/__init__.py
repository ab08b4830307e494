"""Stateless losses, one family a file; each is `loss(labels, y_pred)`, and `loss.call` gives one value per image."""

from tfdml.losses.base import EmbeddingLoss as EmbeddingLoss
from tfdml.losses.classification import AMSoftmaxLoss, ArcFaceLoss, NormSoftmaxLoss
from tfdml.losses.contrastive import BinomialDevianceLoss, ContrastiveLoss, CosineContrastiveLoss
from tfdml.losses.margin import MarginLoss
from tfdml.losses.npair import AngularLoss, NPairLoss
from tfdml.losses.proxy import ProxyAnchorLoss, ProxyNCALoss, ProxyNCAPlusPlusLoss, SoftTripleLoss
from tfdml.losses.quadruplet import QuadrupletLoss
from tfdml.losses.ranking import FastAPLoss, HistogramLoss
from tfdml.losses.spherical import SphereFaceLoss, SubCenterArcFaceLoss
from tfdml.losses.structured import CircleLoss, LiftedStructureLoss, MultiSimilarityLoss, SupConLoss
from tfdml.losses.triplet import TripletLoss

__all__ = [
    "AMSoftmaxLoss",
    "AngularLoss",
    "ArcFaceLoss",
    "BinomialDevianceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosineContrastiveLoss",
    "FastAPLoss",
    "HistogramLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "NPairLoss",
    "NormSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "ProxyNCAPlusPlusLoss",
    "QuadrupletLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "TripletLoss",
]
