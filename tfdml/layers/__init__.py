"""Layers with weights of their own, and the small ones that every embedder needs."""

from tfdml.layers.feature_maps import (
    AttentionHeads,
    AttentionPooling2D,
    CeilMaxPooling2D,
    GeneralizedMeanPooling2D,
    InputScaling,
    LocalResponseNormalization,
)
from tfdml.layers.moments import HighOrderMoments, MomentEmbeddings
from tfdml.layers.statistics_network import StatisticsNetwork
from tfdml.layers.vectors import CosineProxies, L2Normalize, PrincipalComponents

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
    "StatisticsNetwork",
]
