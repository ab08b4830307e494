"""VICReg: positives together, while the variance and covariance of the coordinates keep the batch apart."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import number
from tfdml.losses.base import PairLoss

# Within the root of a variance, as in the paper: its gradient stays finite where a coordinate is constant.
_EPSILON = 1e-4


@keras.saving.register_keras_serializable("tfdml")
class VICRegLoss(PairLoss):
    """Variance-invariance-covariance regularisation, with labels: positive pairs take the place of two views.

    L = invariance (1/|P|) sum over ordered positive pairs of |x_i - x_j|^2 / d
      + variance (1/d) sum over coordinates c of [deviation - sqrt(Var(x_c) + 0.0001)]_+
      + covariance (1/d) sum over c != c' of Cov(x_c, x_c')^2

    with variances and covariances over the batch, divided by B - 1. It needs no negatives: coordinates that vary and
    are not correlated keep the embeddings from one point. Squared distances are divided by d, as in the authors' code
    and pytorch-metric-learning.

    The paper has two batches, of the two views of each image. The authors' code averages their variance terms and adds
    up their covariance terms, with weights 25, 25 and 1. Here there is one batch with each term once, so that the same
    weights are 25, 25 and 2, the defaults.

    Made for embeddings that are not normalised (`representation="projection"` of an `Embedder`). The coordinates of
    unit vectors deviate by at most about d^-0.5: give that as `deviation`. Takes O(B^2 + d^2) memory: 4,096 images at
    once are well possible.

    Args:
        invariance: The weight of the positive pairs.
        variance: The weight of the coordinates' variances.
        covariance: The weight of their covariances.
        deviation: The standard deviation that each coordinate shall have.
        reduction: `"sum"` gives the sum over ordered positive pairs, and the other terms for each image.
        name: The loss's name in logs.

    Raises:
        ValueError: An argument is negative.

    Example:
        >>> loss = VICRegLoss(invariance=1.0, variance=1.0, covariance=1.0)
        >>> float(loss([0, 0, 1], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))  # 0 + (1 - 0.5774) + 0.3333^2
        0.5336742

    Source: Bardes, Ponce, LeCun, "VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning",
    ICLR 2022, sec. 4.
    """

    within_batch = True

    def __init__(
        self,
        invariance=25.0,
        variance=25.0,
        covariance=2.0,
        deviation=1.0,
        reduction="sum_over_batch_size",
        name="vic_reg_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        self.invariance = number("invariance", invariance, at_least=0)
        self.variance = number("variance", variance, at_least=0)
        self.covariance = number("covariance", covariance, at_least=0)
        self.deviation = number("deviation", deviation, at_least=0)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        size, dim = (ops.cast(length, "float32") for length in ops.shape(pairs.references))
        pull = self.over_pairs(pairs, pairs.distances("sqeuclidean") / dim, pairs.positives)
        centred = pairs.references - ops.mean(pairs.references, axis=0, keepdims=True)
        covariances = ops.matmul(ops.transpose(centred), centred) / ops.maximum(size - 1.0, 1.0)
        variances = ops.diagonal(covariances)
        shortfall = ops.mean(ops.relu(self.deviation - ops.sqrt(variances + _EPSILON)))
        between = ops.sum(ops.square(covariances - ops.diag(variances))) / dim
        # The last two are of the batch: they stand in the value of every image.
        return self.invariance * pull + self.variance * shortfall + self.covariance * between
