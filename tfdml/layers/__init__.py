"""Layers with weights of their own, and the small ones that every embedder needs."""

from tfdml.layers.feature_maps import AttentionHeads as AttentionHeads
from tfdml.layers.feature_maps import AttentionPooling2D as AttentionPooling2D
from tfdml.layers.feature_maps import CeilMaxPooling2D as CeilMaxPooling2D
from tfdml.layers.feature_maps import GeneralizedMeanPooling2D as GeneralizedMeanPooling2D
from tfdml.layers.feature_maps import InputScaling as InputScaling
from tfdml.layers.feature_maps import LocalResponseNormalization as LocalResponseNormalization
from tfdml.layers.moments import HighOrderMoments as HighOrderMoments
from tfdml.layers.moments import MomentEmbeddings as MomentEmbeddings
from tfdml.layers.statistics_network import StatisticsNetwork as StatisticsNetwork
from tfdml.layers.vectors import CosineProxies as CosineProxies
from tfdml.layers.vectors import L2Normalize as L2Normalize
from tfdml.layers.vectors import PrincipalComponents as PrincipalComponents
