"""Margin loss: positives nearer and distance-weighted negatives further than a boundary, each by a margin."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import number
from tfdml.losses.base import PairLoss
from tfdml.mining import negative_probabilities


@keras.saving.register_keras_serializable("tfdml")
class MarginLoss(PairLoss):
    """Margin loss with distance-weighted negatives and a fixed boundary.

    L = (1/#active) sum over positive pairs (a, p) of [d_ap - beta + alpha]_+ + [beta + alpha - d_an]_+

    with Euclidean distances, one negative n per ordered positive pair, and #active the number of terms above 0. n is
    distributed as `tfdml.mining.negative_probabilities` says; the sum and #active are their expectations over it and
    not one draw: the same gradient on average with none of the noise, and the same value in every process, on every
    replica and under jit.

    The authors' code and pytorch-metric-learning draw n, and may learn beta (per class); here it is fixed at their
    initial value.

    Args:
        alpha: The margin on either side of the boundary.
        beta: The boundary between positive and negative distances of unit vectors.
        reduction: `"sum"` gives the plain (expected) sum.
        name: The loss's name in logs.

    Raises:
        ValueError: `alpha` is negative, or `beta` not in 0 .. 2.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(MarginLoss()([0, 0, 1], embeddings))  # only [1.4 - sqrt(0.4)]_+, of the second anchor, is active
        0.7675445

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """

    def __init__(self, alpha=0.2, beta=1.2, reduction="sum_over_batch_size", name="margin_loss"):
        super().__init__(reduction=reduction, name=name)
        self.alpha = number("alpha", alpha, at_least=0)
        self.beta = number("beta", beta, at_least=0, at_most=2)

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        rows, active = margin_hinges(pairs, self.alpha, self.beta)
        return pairs.scale_to_mean(rows, active) if self.averages_pairs else rows


def margin_hinges(pairs, alpha, beta):
    """The hinges around the boundary beta, in expectation over distance-weighted negatives.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        alpha: The margin.
        beta: The boundary: a number, or (b, 1), one for each anchor.

    Returns:
        (b,), the sum of each anchor's hinges, and the expected number of active ones of these anchors.
    """
    distances = pairs.distances("euclidean")
    positives = ops.cast(pairs.positives, "float32")
    # Each positive of an anchor brings a negative: expected, the probability times the number of positives.
    drawn = ops.sum(positives, axis=1, keepdims=True) * negative_probabilities(pairs)
    pull, push = ops.relu(distances - beta + alpha), ops.relu(beta + alpha - distances)
    active = ops.sum(ops.where(pull > 0, positives, 0.0) + ops.where(push > 0, drawn, 0.0))
    return ops.sum(positives * pull + drawn * push, axis=1), active
