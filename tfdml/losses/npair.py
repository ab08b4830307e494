"""Losses that set a positive pair against all negatives of its anchor at once."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.losses.base import PairLoss


@keras.saving.register_keras_serializable("tfdml")
class NPairLoss(PairLoss):
    """N-pair loss on dot products.

    L = (1/|P|) sum over positive pairs (a, p) of ln(1 + sum over negatives n of a of exp(x_a.x_n - x_a.x_p))
        + l2 (1/B) sum over a of |x_a|^2

    over ordered pairs. Made for embeddings that are not normalised (`representation="projection"` of an `Embedder`): on
    unit vectors the exponents stay within +-2. `scale` instead normalises them and then stretches them to one length,
    so that the exponents reach +-2 scale^2 and no length can run away: the ECAML authors' code does so with 10, and
    takes the mean.

    With two images per class, each is an anchor once and the other its positive. All images of other classes are
    negatives, as in eq. 9 of the ECAML paper; Sohn's formula, TensorFlow Addons and pytorch-metric-learning take one
    image of each other class. Classes with more images give all their pairs.

    Args:
        l2: The weight of the squared length of the embeddings, which keeps them from growing; Sohn uses 0.002 to 0.003.
        scale: The length that every embedding is given; None leaves them as they are.
        reduction: `"sum"` gives the plain sums over positive pairs and over images.
        name: The loss's name in logs.

    Raises:
        ValueError: `l2` is negative or `scale` not positive; or both are given, though the length is then fixed.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
        >>> float(NPairLoss()([0, 0, 1, 1], embeddings))  # ln(1 + 2 / e)
        0.5514447
        >>> float(NPairLoss(scale=2.0)([0, 0, 1, 1], embeddings))  # ln(1 + 2 / e^4)
        0.0359763

    Source: Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016, sec. 3.2; Chen and
    Deng, AAAI 2019, eq. 9; Li et al., "Deep Metric Learning with Density Adaptivity", eq. 4.
    """

    def __init__(self, l2=0.0, reduction="sum_over_batch_size", name="n_pair_loss", scale=None):
        super().__init__(reduction=reduction, name=name)
        if scale is not None and l2:
            raise ValueError("l2 has no effect on embeddings whose length scale= fixes: give one of the two")
        self.l2 = number("l2", l2, at_least=0)
        self.scale = None if scale is None else number("scale", scale, above=0)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        if self.scale is not None:
            pairs = pairs.map(lambda x: self.scale * pairwise.l2_normalize(x))
        products = pairs.products()
        negatives = pairwise.masked_logsumexp(products, pairs.negatives, axis=1)
        rows = self.over_pairs(pairs, ops.softplus(negatives[:, None] - products), pairs.positives)
        return rows + self.l2 * ops.sum(ops.square(pairs.anchors), axis=1) if self.l2 else rows


@keras.saving.register_keras_serializable("tfdml")
class AngularLoss(PairLoss):
    """Angular loss: the angle at the negative of the triangle anchor, positive, negative is bounded by alpha.

    L = (1/|P|) sum over positive pairs (a, p) of ln(1 + sum over negatives n of exp(f_apn)),
    f_apn = 4 tan^2(alpha) (x_a + x_p).x_n - 2 (1 + tan^2(alpha)) x_a.x_p

    over ordered pairs and L2-normalised embeddings (the loss normalises them). A positive pair has the same negatives
    from both ends, so that the sum over n is an entry of a product of two (B, B) matrices: no B^3 tensor.

    All images of other classes are negatives, and each image of a pair is the anchor once; the paper's batches hold one
    pair of each class. The paper's combination with N-pair is `NPairLoss()` plus 2 times this loss.

    Args:
        alpha_degrees: The upper bound of the angle, above 0 and at most 65 (beyond, exponents leave float32). The paper
            uses 36 to 55, mostly 45.
        reduction: `"sum"` gives the plain sum over positive pairs.
        name: The loss's name in logs.

    Raises:
        ValueError: `alpha_degrees` is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(AngularLoss(alpha_degrees=45)([0, 0, 1], embeddings))  # ln(1 + exp(-4))
        0.0181499

    Source: Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017, sec. 3.
    """

    whole_batch = within_batch = True

    def __init__(self, alpha_degrees=45.0, reduction="sum_over_batch_size", name="angular_loss"):
        super().__init__(reduction=reduction, name=name)
        self.alpha_degrees = number("alpha_degrees", alpha_degrees, above=0, at_most=65)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        squared_tangent = math.tan(math.radians(self.alpha_degrees)) ** 2
        cosines = pairs.cosines()
        negatives = pairs.negatives
        positives = ops.logical_and(pairs.positives, ops.any(negatives, axis=1, keepdims=True))
        scaled = 4.0 * squared_tangent * cosines
        # exp(c s_an) exp(c s_pn), each relative to its row's largest: at 65 degrees the product is above e^-74.
        largest = ops.stop_gradient(ops.max(ops.where(negatives, scaled, -1e30), axis=1, keepdims=True, initial=-1e30))
        # Masked and not clipped at 0: fused arithmetic may put the largest a hair above itself, and lose its gradient.
        relative = ops.where(negatives, ops.exp(ops.where(negatives, scaled - largest, 0.0)), 0.0)
        summed = ops.matmul(relative, ops.transpose(relative))
        # Where labels are sets, the two may have no negative in common.
        positives = ops.logical_and(positives, summed > 0)
        summed = ops.where(positives, summed, 1.0)
        over_negatives = ops.log(summed) + largest + ops.transpose(largest)
        exponents = over_negatives - 2.0 * (1.0 + squared_tangent) * cosines
        return self.over_pairs(pairs, ops.softplus(ops.where(positives, exponents, 0.0)), positives)
