"""Losses of pytorch-metric-learning that have proxies, translated into objectives that own them.

Each function has the arguments and defaults of the class there; `embedding_size` is known from the embedder here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfdml import losses
from tfdml.arguments import number
from tfdml.interop.given import Given
from tfdml.objectives import ProxyLoss


def arc_face(given: Given, num_classes, embedding_size=None, margin=28.6, scale=64):
    """`ArcFaceLoss`; degrees become radians."""
    del embedding_size
    given.only_distance("CosineSimilarity")
    return _mean(given, losses.ArcFaceLoss, num_classes, scale=scale, margin=_radians(margin))


def cos_face(given: Given, num_classes, embedding_size=None, margin=0.35, scale=64):
    """`CosFaceLoss`."""
    del embedding_size
    given.only_distance("CosineSimilarity")
    return _mean(given, losses.AMSoftmaxLoss, num_classes, scale=scale, margin=margin)


def normalized_softmax(given: Given, num_classes, embedding_size=None, temperature=0.05):
    """`NormalizedSoftmaxLoss`; its dot product normalises unless told otherwise."""
    del embedding_size
    given.only_distance("DotProductSimilarity")
    return _mean(given, losses.NormSoftmaxLoss, num_classes, scale=1 / number("temperature", temperature, above=0))


def proxy_anchor(given: Given, num_classes, embedding_size=None, margin=0.1, alpha=32):
    """`ProxyAnchorLoss`."""
    del embedding_size
    given.no_miner()
    given.only_distance("CosineSimilarity")
    return ProxyLoss(losses.ProxyAnchorLoss(alpha, margin, given.keras_reduction("DivisorReducer")), num_classes)


def proxy_nca(given: Given, num_classes, embedding_size=None, softmax_scale=1):
    """`ProxyNCALoss`: a softmax of -scale |x - p|^2 = 2 scale cos - const over all classes, the own included."""
    del embedding_size
    given.only_distance("LpDistance", power=2)
    scale = 2 * number("softmax_scale", softmax_scale, above=0)
    return _mean(given, losses.NormSoftmaxLoss, num_classes, scale=scale)


def soft_triple(given: Given, num_classes, embedding_size=None, centers_per_class=10, la=20, gamma=0.1, margin=0.01):
    """`SoftTripleLoss`."""
    del embedding_size
    given.only_distance("CosineSimilarity")
    arguments = {"scale": la, "gamma": gamma, "margin": margin}
    return _mean(given, losses.SoftTripleLoss, num_classes, centers_per_class, **arguments)


def sub_center_arc_face(given: Given, num_classes, embedding_size=None, margin=28.6, scale=64, sub_centers=3):
    """`SubCenterArcFaceLoss`; degrees become radians."""
    del embedding_size
    given.only_distance("CosineSimilarity")
    return _mean(given, losses.SubCenterArcFaceLoss, num_classes, sub_centers, scale=scale, margin=_radians(margin))


def _mean(given: Given, make, num_classes, proxies_per_class=1, **arguments) -> ProxyLoss:
    given.no_miner()
    loss = make(**arguments, reduction=given.keras_reduction("MeanReducer"))
    return ProxyLoss(loss, num_classes, proxies_per_class)


def _radians(margin) -> float:
    return math.radians(number("margin", margin))


TRANSLATED: dict[str, Callable[..., Any]] = {
    "ArcFaceLoss": arc_face,
    "CosFaceLoss": cos_face,
    "NormalizedSoftmaxLoss": normalized_softmax,
    "ProxyAnchorLoss": proxy_anchor,
    "ProxyNCALoss": proxy_nca,
    "SoftTripleLoss": soft_triple,
    "SubCenterArcFaceLoss": sub_center_arc_face,
}
