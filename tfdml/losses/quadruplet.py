"""Quadruplet loss: every positive pair is nearer than every negative pair, whether or not they share an image."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.losses.base import PairLoss
from tfdml.mining.composing import as_distance, as_miner


@keras.saving.register_keras_serializable("tfdml")
class QuadrupletLoss(PairLoss):
    """Quadruplet loss over all triplets and quadruplets of a batch.

    L = (1/N) sum over images i of ( E_jk [d_ij - d_ik + margin]_+ + E_jkl [d_ij - d_kl + pair_margin]_+ )

    where E is the mean over the positives j of i, and over its negatives k, or over all pairs (k, l) of different
    classes in the batch. The second term compares distances of pairs that share no image, so that one threshold parts
    positives from negatives everywhere; with k = i it would be the first. An image without positives counts 0, as does
    a batch of one class.

    All quadruplets count, exactly, in O(B^2 log B) time and O(B^2) memory. Chen et al. also ask that (k, l) contains no
    image of the class of i, which eq. 12 does not.

    Args:
        margin: Of the triplets, in units of `distance`.
        pair_margin: Of the quadruplets: eq. 12's gamma.
        distance: `"euclidean"` (the paper's), `"sqeuclidean"`, `"cosine"` or `"dot"`; or an object, a
            `tfdml.mining.Distance`.
        average: `"all"`: the means above; `"active"`: each over those with a positive term alone, so that the few that
            are left late in training keep their strength.
        reduction: `"sum"` leaves 1/N out: eq. 12.
        name: The loss's name in logs.
        mining: `"all"`, or what chooses the pairs: a `tfdml.mining.Miner`, or the name of one.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> loss = QuadrupletLoss(margin=0.1, pair_margin=0.0, distance="sqeuclidean")
        >>> float(loss([0, 0, 1], embeddings))  # second image: 0.8 - 0.4 + 0.1; first two: half of 0.8 - 0.4 each
        0.3

    Source: Kemertas et al., "RankMI", CVPR 2020, eq. 12; Chen et al., "Beyond Triplet Loss: A Deep Quadruplet Network
    for Person Re-Identification", CVPR 2017.
    """

    whole_batch = within_batch = True

    def __init__(
        self,
        margin=0.2,
        pair_margin=0.1,
        distance="euclidean",
        average="all",
        reduction="sum_over_batch_size",
        name="quadruplet_loss",
        mining="all",
    ):
        super().__init__(reduction=reduction, name=name)
        one_of("average", average, ("active", "all"))
        self.margin = number("margin", margin)
        self.pair_margin = number("pair_margin", pair_margin)
        self.distance = as_distance(distance)
        self.mining = as_miner(mining)
        self.average = average

    def anchor_losses(self, pairs):
        """Computes one value per anchor: (b,)."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        hinges, active = _below(distances, positives, negatives, self.margin)
        triplets = self._mean(hinges, active, positives, pairwise.masked_count(negatives, axis=1))
        size = ops.shape(distances)[0]

        def flat(matrix):
            return ops.reshape(matrix, (1, size * size))

        hinges, active = _below(flat(distances), flat(positives), flat(negatives), self.pair_margin, (2 * size, size))
        hinges, active = ops.reshape(hinges, (size, size)), ops.reshape(active, (size, size))
        return triplets + self._mean(hinges, active, positives, pairwise.masked_count(negatives))

    def _mean(self, hinges, active, positives, num_negatives):
        """Per anchor, the mean over its tuples, of their sums and numbers for each pair (N, N)."""
        counted = ops.sum(active, axis=1)
        if self.average == "all":
            counted = pairwise.masked_count(positives, axis=1) * num_negatives
        return ops.sum(hinges, axis=1) / ops.where(counted > 0, counted, 1.0)


def _below(distances, positives, negatives, margin, blocks=None):
    """For each positive, the sum of [d + margin - d_n]_+ over the negatives n of its row, and how many are above 0.

    In the order of its row a positive stands, at d + margin, behind the negatives that count, so that running sums of
    their number and of their distances are all that it takes.

    Args:
        distances: (R, M).
        positives: (R, M) booleans.
        negatives: (R, M) booleans.
        margin: A number.
        blocks: How many blocks `_running_sum` makes of 2 M values, and their width.

    Returns:
        Two of (R, M), 0 where there is no positive.
    """
    length = ops.shape(distances)[1]
    blocks = blocks or (2, length)
    # Around their mean, so that the running sums stay small.
    centred = distances - ops.stop_gradient(ops.mean(distances, axis=1, keepdims=True))
    values = ops.concatenate([centred + margin, centred], axis=1)
    counts = ops.concatenate([ops.zeros_like(centred), ops.cast(negatives, "float32")], axis=1)
    # Positives stand first: at a tie the hinge is 0 and, argsort being stable, inactive.
    order = ops.argsort(ops.stop_gradient(values), axis=1)
    values, counts = ops.take_along_axis(values, order, axis=1), ops.take_along_axis(counts, order, axis=1)
    before = _running_sum(counts, blocks)
    hinges = before * values - _running_sum(counts * values, blocks)
    back = ops.argsort(order, axis=1)[:, :length]
    hinges, before = ops.take_along_axis(hinges, back, axis=1), ops.take_along_axis(before, back, axis=1)
    return ops.where(positives, hinges, 0.0), ops.where(positives, before, 0.0)


def _running_sum(values, blocks):
    """The cumulative sum along rows, by blocks: of millions of values, float32 then loses little."""
    rows, length = ops.shape(values)
    split = ops.reshape(values, (rows, *blocks))
    inside, totals = ops.cumsum(split, axis=2), ops.sum(split, axis=2)
    return ops.reshape(inside + (ops.cumsum(totals, axis=1) - totals)[:, :, None], (rows, length))
