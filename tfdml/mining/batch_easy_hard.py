"""One positive and one negative for each anchor: its easiest, its hardest, or one between."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import one_of
from tfdml.mining.composing import Miner, named_miner

CHOICES = ("easy", "semi_hard", "hard", "all")


@named_miner("batch_easy_hard")
@keras.saving.register_keras_serializable("tfdml")
class BatchEasyHardMiner(Miner):
    """For each anchor the easiest, a semi-hard or the hardest positive, and the same of the negatives.

    An easy positive is the nearest, a hard one the furthest; an easy negative is the furthest, a hard one the nearest.
    A semi-hard negative is the nearest that is further than the anchor's chosen positive, a semi-hard positive the
    furthest that is nearer than its chosen negative. An anchor that lacks one of the two keeps nothing, save where the
    other side is `"all"`. As pytorch-metric-learning's `BatchEasyHardMiner`, without its ranges of distances.

    Args:
        positives: `"easy"`, `"semi_hard"`, `"hard"` or `"all"`.
        negatives: One of the same; no semi-hard choice goes with another or with `"all"`, which give no bound.

    Raises:
        ValueError: An argument is none of these, or they do not go together.

    Example:
        >>> labels, x = [0, 0, 0, 1, 1], [[0.0], [1.0], [3.0], [2.0], [9.0]]
        >>> loss = tfdml.losses.TripletLoss(0.5, mining=BatchEasyHardMiner("easy", "hard"), distance="euclidean")
        >>> np.array(loss.call(labels, np.array(x))) > 0  # the first has its positive at 1 and a negative at 2
        array([False,  True,  True,  True,  True])

    Source: Xuan, Stylianou, Pless, "Improved Embeddings with Easy Positive Triplet Mining", WACV 2020.
    """

    def __init__(self, positives="easy", negatives="semi_hard"):
        self.positives = one_of("positives", positives, CHOICES)
        self.negatives = one_of("negatives", negatives, CHOICES)
        if "semi_hard" in (positives, negatives) and (positives == negatives or "all" in (positives, negatives)):
            raise ValueError(
                f"positives={positives!r} and negatives={negatives!r} do not go together: what is semi-hard is so in "
                "relation to one pair of the other kind, 'easy' or 'hard'"
            )

    def __call__(self, pairs):
        """Returns the pairs to keep: see `Miner`."""
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        if self.positives == "semi_hard":
            chosen_negatives = _one(distances, negatives, furthest=self.negatives == "easy")
            positives = ops.logical_and(positives, distances < _value(distances, chosen_negatives, float("-inf")))
            chosen_positives = _one(distances, positives, furthest=True)
        else:
            chosen_positives = _chosen(distances, positives, self.positives, furthest="hard")
            if self.negatives == "semi_hard":
                beyond = distances > _value(distances, chosen_positives, float("inf"))
                chosen_negatives = _one(distances, ops.logical_and(negatives, beyond), furthest=False)
            else:
                chosen_negatives = _chosen(distances, negatives, self.negatives, furthest="easy")
        if "all" in (self.positives, self.negatives):
            return pairs.keep(chosen_positives, chosen_negatives)
        both = ops.logical_and(ops.any(chosen_positives, 1), ops.any(chosen_negatives, 1))[:, None]
        return pairs.keep(ops.logical_and(chosen_positives, both), ops.logical_and(chosen_negatives, both))


@named_miner("easy_positive")
@keras.saving.register_keras_serializable("tfdml")
class EasyPositiveMiner(BatchEasyHardMiner):
    """For each anchor its nearest positive, so that a class need not be one cluster, with negatives of choice.

    Args:
        negatives: `"semi_hard"` (default: the nearest that is further than the positive), `"hard"` (the nearest),
            `"easy"` (the furthest) or `"all"`.

    Raises:
        ValueError: `negatives` is none of these.

    Example:
        >>> loss = tfdml.losses.NTXentLoss(temperature=0.1, mining=EasyPositiveMiner(negatives="all"))
        >>> float(loss([0, 0, 0, 1], [[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # ln(1 + e^2) / 3, of the third
        0.7090063

    Source: Xuan, Stylianou, Pless, "Improved Embeddings with Easy Positive Triplet Mining", WACV 2020.
    """

    def __init__(self, negatives="semi_hard"):
        super().__init__("easy", negatives)


@named_miner("batch_hard")
@keras.saving.register_keras_serializable("tfdml")
class BatchHardMiner(BatchEasyHardMiner):
    """For each anchor its furthest positive and its nearest negative: batch-hard, for every loss on pairs.

    `TripletLoss(mining="hard")` is the same with less work.

    Example:
        >>> labels, x = [0, 0, 0, 1], [[0.0], [1.0], [3.0], [4.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=2.0, distance="euclidean", mining=BatchHardMiner())
        >>> float(loss(labels, x))  # (3 + 2 + 3) / 3, and the one negative within the margin, [2 - 1]_+
        3.6666667

    Source: Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017.
    """

    def __init__(self):
        super().__init__("hard", "hard")


def _chosen(distances, mask, choice, furthest):
    """The pairs of a choice that needs no other; the furthest ones are those called `furthest`."""
    return mask if choice == "all" else _one(distances, mask, choice == furthest)


def _one(distances, mask, furthest):
    """Of each row's pairs the furthest or the nearest, the first among equals; none where there is none."""
    signed = distances if furthest else -distances
    index = pairwise.index_of_largest(ops.where(mask, signed, float("-inf")))
    return ops.logical_and(mask, ops.arange(ops.shape(distances)[1], dtype=index.dtype)[None, :] == index[:, None])


def _value(distances, chosen, missing):
    """The distance of each row's chosen pair, (N, 1); `missing` where there is none."""
    value = ops.sum(ops.where(chosen, distances, 0.0), axis=1, keepdims=True)
    return ops.where(ops.any(chosen, axis=1, keepdims=True), value, missing)
