"""Softmax losses with a margin of the angle, beyond ArcFace: SphereFace, and ArcFace on several centres a class."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml.arguments import integer, number
from tfdml.losses.classification import ArcFaceLoss, ClassSimilarityLoss


@keras.saving.register_keras_serializable("tfdml")
class SphereFaceLoss(ClassSimilarityLoss):
    """Multiplicative angular margin softmax (A-Softmax), on normalised embeddings and proxies.

    L = -log( e^{s psi(theta_y)} / ( e^{s psi(theta_y)} + sum_{j != y} e^{s cos_j} ) ), averaged over the batch,
    psi(theta) = (-1)^k cos(m theta) - 2 k for theta in [k pi / m, (k + 1) pi / m], which falls from 1 to 1 - 2 m.

    The paper normalises the proxies alone, so that the length of an embedding is its scale, and mixes psi with the
    cosine in the first steps. Here all vectors have length 1 and s is the scale, as in later work (and as an `Embedder`
    gives them): start with a small margin, or from weights trained without one. pytorch-metric-learning multiplies by
    the lengths.

    Args:
        scale: s.
        margin: m, an integer of 1 to 10; 1 is `NormSoftmaxLoss(scale)`. The paper uses 4.
        reduction: As in Keras.
        name: The loss's name in logs.

    Raises:
        ValueError: `scale` is not positive or `margin` is out of range.

    Example:
        >>> float(SphereFaceLoss(scale=1.0, margin=2)([0], [[0.0, 0.0]]))  # psi(90 degrees) = -1: ln(1 + e)
        1.3132617

    Source: Liu et al., "SphereFace: Deep Hypersphere Embedding for Face Recognition", CVPR 2017, sec. 3.
    """

    def __init__(self, scale=30.0, margin=4, reduction="sum_over_batch_size", name="sphere_face_loss"):
        super().__init__(reduction=reduction, name=name)
        self.scale = number("scale", scale, above=0)
        self.margin = integer("margin", margin, at_least=1, at_most=10)

    def logits(self, similarities, target_mask):
        """The logits (B, C): the angle to the own class is multiplied."""
        cosines = ops.clip(similarities, -1.0, 1.0)
        # cos(m theta) as the Chebyshev polynomial of cos(theta), whose slope is finite at angles of 0 and pi too.
        before, multiplied = ops.ones_like(cosines), cosines
        for _ in range(self.margin - 1):
            before, multiplied = multiplied, 2.0 * cosines * multiplied - before
        # At its boundaries psi has the same value from both sides, and the slope 0: rounding of k does no harm.
        k = ops.floor(ops.stop_gradient(ops.arccos(cosines)) * (self.margin / math.pi))
        k = ops.minimum(k, self.margin - 1.0)
        psi = ops.where(ops.equal(k % 2.0, 0.0), multiplied, -multiplied) - 2.0 * k
        return self.scale * ops.where(target_mask, psi, similarities)


@keras.saving.register_keras_serializable("tfdml")
class SubCenterArcFaceLoss(ArcFaceLoss):
    """ArcFace on the similarities s (B, C, K) to K proxies per class, of which the nearest counts.

    S_c = max over k of s_ck;   L = ArcFaceLoss of S

    averaged over the batch. Mislabelled images and rare kinds gather at proxies of their own, so that a class need not
    stretch to them. Similarities (B, C) are taken as K = 1. The similarities to the classes that a `ProxyLoss` hands to
    other objectives are S, the largest.

    Args:
        scale: s.
        margin: m in radians, in [0, pi / 2]. pytorch-metric-learning takes degrees: its 28.6 is 0.5.
        label_smoothing: e, the share of the target that is spread evenly over all classes: below 1. Some labels of
            most data sets are wrong; 0.1 is usual.
        reduction: As in Keras.
        name: The loss's name in logs.

    Raises:
        ValueError: `scale` is not positive, or `margin` or `label_smoothing` out of range.

    Example:
        >>> loss = SubCenterArcFaceLoss(scale=1.0, margin=0.5)
        >>> float(loss([0], [[[1.0, -1.0], [0.0, -0.5]]]))  # ln(1 + e^{-cos 0.5})
        0.3476855

    Source: Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces", ECCV 2020.
    """

    proxies_per_class = 3

    def __init__(
        self,
        scale=64.0,
        margin=0.5,
        label_smoothing=0.0,
        reduction="sum_over_batch_size",
        name="sub_center_arc_face_loss",
    ):
        super().__init__(scale, margin, label_smoothing, reduction, name)

    def class_similarities(self, similarities):
        """The largest similarity to each class (B, C) of s (B, C, K); (B, C) as they are."""
        if len(similarities.shape) != 3:
            return super().class_similarities(similarities)
        # In turn and not by a maximum: of several that are equal, one learns.
        nearest, *others = ops.unstack(ops.cast(similarities, "float32"), axis=2)
        for other in others:
            nearest = ops.where(other > nearest, other, nearest)
        return nearest
