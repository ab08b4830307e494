"""Layers with weights of their own, and the small ones that every embedder needs."""

from tfdml.layers.normalization import InputScaling, L2Normalize
from tfdml.layers.proxies import CosineProxies

__all__ = ["CosineProxies", "InputScaling", "L2Normalize"]
