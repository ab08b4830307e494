"""Ranked list loss: positives within a sphere around the anchor, negatives outside a larger one."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.losses.base import PairLoss
from tfdml.mining.composing import as_miner


@keras.saving.register_keras_serializable("tfdml")
class RankedListLoss(PairLoss):
    """Ranked list loss on Euclidean distances d.

    L = (1/B) sum over anchors i of (1 - balance) sum over P_i of w_ij (d_ij - (boundary - margin))
                                  + balance sum over N_i of w_ij (boundary - d_ij)

    with P_i the positives further than boundary - margin, N_i the negatives nearer than the boundary, and weights that
    grow with the violation and sum to 1 in each of these sets:

    w_ij proportional to exp(T_p (d_ij - (boundary - margin))) in P_i, to exp(T_n (boundary - d_ij)) in N_i.

    Weights carry no gradient, as in the paper, so that they alone say how strongly a pair pulls
    (pytorch-metric-learning's carry one). Positives keep a sphere of radius boundary - margin to themselves. The mean
    is over all anchors, as in the paper and in pytorch-metric-learning, whose loss has no value for an anchor without
    a violating positive; here such a set costs 0. Takes O(B^2) memory: 4,096 images at once are well possible.

    Args:
        margin: m, the gap between the spheres of positives and negatives.
        boundary: The radius beyond which negatives cost nothing (the paper's alpha); at least `margin`.
        negative_temperature: T_n; 0 weighs negatives alike.
        positive_temperature: T_p; 0, the paper's simpler form, weighs positives alike.
        balance: The share of the negatives, 0 to 1 (pytorch-metric-learning's `imbalance`). The paper's sum of both is
            twice the value at 0.5.
        reduction: `"sum"` gives the sum over anchors.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: An argument is negative, or out of range.

    Example:
        >>> embeddings = [[0.0, 0.0], [1.0, 0.0], [0.2, 0.0]]
        >>> float(RankedListLoss(reduction="sum")([0, 0, 1], embeddings))  # ((0.2 + 1.0) + (0.2 + 0.4) + 0.9985) / 2
        1.3992582

    Source: Wang et al., "Ranked List Loss for Deep Metric Learning", CVPR 2019, sec. 3.
    """

    def __init__(
        self,
        margin=0.4,
        boundary=1.2,
        negative_temperature=10.0,
        positive_temperature=0.0,
        balance=0.5,
        reduction="sum_over_batch_size",
        name="ranked_list_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        self.margin = number("margin", margin, at_least=0)
        self.boundary = number("boundary", boundary, at_least=self.margin)
        self.negative_temperature = number("negative_temperature", negative_temperature, at_least=0)
        self.positive_temperature = number("positive_temperature", positive_temperature, at_least=0)
        self.balance = number("balance", balance, at_least=0, at_most=1)
        self.mining = as_miner(mining)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        pull = _weighted(distances - (self.boundary - self.margin), positives, self.positive_temperature)
        push = _weighted(self.boundary - distances, negatives, self.negative_temperature)
        return (1.0 - self.balance) * pull + self.balance * push


def _weighted(violations, mask, temperature):
    """The mean of each row's positive violations, weighted by exp(temperature * violation)."""
    active = ops.logical_and(mask, violations > 0)
    logits = temperature * ops.stop_gradient(violations)
    shares = logits - pairwise.masked_logsumexp(logits, active, axis=1)[:, None]
    weights = ops.where(active, ops.exp(ops.where(active, shares, 0.0)), 0.0)
    return ops.sum(ops.stop_gradient(weights) * ops.where(active, violations, 0.0), axis=1)
