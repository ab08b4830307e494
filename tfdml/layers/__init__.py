"""Layers with weights of their own, and the small ones that every embedder needs."""

from tfdml.layers.attention_heads import AttentionHeads
from tfdml.layers.caffe import CeilMaxPooling2D, LocalResponseNormalization
from tfdml.layers.moments import HighOrderMoments, MomentEmbeddings
from tfdml.layers.normalization import InputScaling, L2Normalize
from tfdml.layers.pooling import AttentionPooling2D, GeneralizedMeanPooling2D
from tfdml.layers.principal_components import PrincipalComponents
from tfdml.layers.proxies import CosineProxies
from tfdml.layers.statistics_network import QuadrupletStatistic, StatisticsNetwork

__all__ = [
    "AttentionHeads",
    "AttentionPooling2D",
    "CeilMaxPooling2D",
    "CosineProxies",
    "GeneralizedMeanPooling2D",
    "HighOrderMoments",
    "InputScaling",
    "L2Normalize",
    "LocalResponseNormalization",
    "MomentEmbeddings",
    "PrincipalComponents",
    "QuadrupletStatistic",
    "StatisticsNetwork",
]
