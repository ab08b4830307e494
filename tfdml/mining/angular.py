"""Angular mining: triplets whose negative sees its two positives at a wide angle."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.mining.composing import Miner, named_miner


@named_miner("angular")
@keras.saving.register_keras_serializable("tfdml")
class AngularMiner(Miner):
    """The pairs of triplets (a, p, n) in which n sees the middle c of a and p under an angle above a bound.

    atan(|a - p| / (2 |n - c|)) > angle,   c = (a + p) / 2

    which is the angle that `AngularLoss` bounds. With `distance="cosine"`, and for losses on cosines, it is that of the
    embeddings scaled to length 1, and of the embeddings themselves with any other distance.

    A positive is kept if it makes such a triplet with a negative of the anchor, and a negative if it does so with a
    positive. The distances suffice: 4 |n - c|^2 = 2 |a - n|^2 + 2 |p - n|^2 - |a - p|^2. Takes O(B^2) memory and
    O(B^2 P) time for at most P positives of an anchor. A list of all triplets, as pytorch-metric-learning's miner gives
    it, takes O(B^3) of both. A loss on triplets makes one of each kept positive with each kept negative of an anchor,
    among them some with a smaller angle.

    Args:
        angle_degrees: The bound, 0 to 90; pytorch-metric-learning's default is 20 too.

    Raises:
        ValueError: `angle_degrees` is out of range.

    Example:
        >>> labels, x = [0, 0, 1, 1], [[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 9.0]]
        >>> loss = tfdml.losses.TripletLoss(1.0, mining=AngularMiner(angle_degrees=40))  # the third sees 45 degrees
        >>> np.array(loss.call(labels, np.array(x))) > 0  # the first two see 38
        array([ True,  True, False, False])

    Source: Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017, sec. 3; `AngularMiner` of
    pytorch-metric-learning.
    """

    def __init__(self, angle_degrees=20.0):
        self.angle_degrees = number("angle_degrees", angle_degrees, at_least=0, at_most=90)

    def __call__(self, pairs):
        """Returns the pairs to keep: see `Miner`."""
        # The angle at which a loss on cosines sees them is that of unit vectors.
        pairs = pairs.map(pairwise.l2_normalize) if pairs.distance == "cosine" else pairs
        squared = pairs.distances("sqeuclidean")
        sine = math.sin(math.radians(self.angle_degrees)) ** 2

        def from_positive(chosen):
            index = ops.argmax(chosen, axis=1)
            if pairs.square:
                return ops.take(squared, index, axis=0)
            return pairwise.squared_distances(ops.take(pairs.references, index, axis=0), pairs.references)

        def with_positive(kept, chosen):
            kept_positives, kept_negatives = kept
            exists = ops.any(chosen, axis=1, keepdims=True)
            to_positive = ops.sum(ops.where(chosen, squared, 0.0), axis=1, keepdims=True)
            # tan(angle)^2 < |a - p|^2 / (4 |n - c|^2), freed of its denominators.
            wide = to_positive > 2.0 * sine * (squared + from_positive(chosen))
            wide = ops.logical_and(ops.logical_and(pairs.negatives, exists), wide)
            found = ops.logical_and(chosen, ops.any(wide, axis=1, keepdims=True))
            return ops.logical_or(kept_positives, found), ops.logical_or(kept_negatives, wide)

        none = ops.zeros_like(pairs.positives)
        return pairs.keep(*pairwise.fold_over_positives(with_positive, (none, none), pairs.positives))
