"""Choices among all pairs of the batch: the hardest share of them, or as many at every distance."""

from __future__ import annotations

from fractions import Fraction

import keras
from keras import ops

from tfdml.arguments import integer, number
from tfdml.mining.composing import Miner, named_miner

# Of a fraction such as 0.3: its product with a remainder stays below 2^31.
_LARGEST_DENOMINATOR = 2**15


@named_miner("hard_aware")
@keras.saving.register_keras_serializable("tfdml")
class HardAwareMiner(Miner):
    """The hardest share of a batch's pairs: its furthest positives and its nearest negatives.

    The level of a hard-aware cascade: a loss on each of several representations or heads, each of which takes a smaller
    share (the paper has 1, 0.5 and 0.2). In the paper a level chooses among the pairs that the one before has kept, and
    by the loss; here it chooses among all, by distance, as pytorch-metric-learning's `HDCMiner` does. Of pairs at the
    distance of the last one kept, all are kept.

    Args:
        fraction: The share, above 0 and at most 1; of the positives and of the negatives each.

    Raises:
        ValueError: `fraction` is out of range.

    Example:
        >>> labels, x = [0, 0, 0, 1], [[0.0], [1.0], [3.0], [4.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=2.0, distance="euclidean", mining=HardAwareMiner(1 / 3))
        >>> float(loss(labels, x))  # the one pair at 3, from both ends, and that at 1
        4.0

    Source: Yuan, Yang, Zhang, "Hard-Aware Deeply Cascaded Embedding", ICCV 2017.
    """

    whole_batch = True

    def __init__(self, fraction=0.5):
        self.fraction = number("fraction", fraction, above=0, at_most=1)

    def __call__(self, pairs):
        """Returns the pairs to keep: see `Miner`."""
        distances = pairs.distances()
        return pairs.keep(self._smallest(-distances, pairs.positives), self._smallest(distances, pairs.negatives))

    def _smallest(self, values, mask):
        # In integers: 0.6 of 50 is 30, and not what float32 rounds up to 31. No product leaves 32 bits.
        share = Fraction(self.fraction).limit_denominator(_LARGEST_DENOMINATOR)
        count = ops.sum(ops.cast(mask, "int32"))
        whole, rest = count // share.denominator, count % share.denominator
        kept = whole * share.numerator - (-rest * share.numerator) // share.denominator
        flat = ops.reshape(ops.where(mask, values, float("inf")), (-1,))
        # One more, so that a batch without images has a last value too.
        ascending = ops.sort(ops.pad(flat, ((0, 1),), constant_values=float("inf")))
        return ops.logical_and(mask, values <= ops.take(ascending, ops.maximum(kept - 1, 0)))


@named_miner("uniform_histogram")
@keras.saving.register_keras_serializable("tfdml")
class UniformHistogramMiner(Miner):
    """At most so many pairs of every distance: the range of distances is cut into bins, and some of each are drawn.

    So that rare distances count as much as frequent ones. The positives' bins span their smallest to largest distance
    in the batch, and the negatives' theirs. The draw is without replacement, so that a bin that has fewer pairs gives
    fewer; pytorch-metric-learning's miner of this name repeats them. It is the same for batches of one size: replicas
    agree, and the images differ from step to step.

    Args:
        bins: How many.
        positives_per_bin: The most positives to keep of each; an image pair counts twice, once for each anchor.
        negatives_per_bin: The most negatives.
        seed: Of the draw.

    Raises:
        ValueError: An argument is no positive integer (`seed`: no integer from 0).

    Example:
        >>> generator = np.random.default_rng(0)
        >>> labels, x = generator.integers(0, 2, 50), generator.normal(size=(50, 4)).astype("float32")
        >>> miner = UniformHistogramMiner(bins=5, positives_per_bin=3, negatives_per_bin=7)
        >>> kept = miner(tfdml.pairs.Pairs.of_batch(x, labels))
        >>> [int(keras.ops.sum(mask)) for mask in (kept.positives, kept.negatives)]
        [15, 35]

    Source: `UniformHistogramMiner` of pytorch-metric-learning.
    """

    whole_batch = True

    def __init__(self, bins=100, positives_per_bin=10, negatives_per_bin=10, seed=0):
        self.bins = integer("bins", bins, at_least=1)
        self.positives_per_bin = integer("positives_per_bin", positives_per_bin, at_least=1)
        self.negatives_per_bin = integer("negatives_per_bin", negatives_per_bin, at_least=1)
        self.seed = integer("seed", seed, at_least=0)

    def __call__(self, pairs):
        """Returns the pairs to keep: see `Miner`."""
        distances = pairs.distances()
        draws = keras.random.uniform(ops.shape(distances), seed=self.seed)
        return pairs.keep(
            self._drawn(distances, pairs.positives, draws, self.positives_per_bin),
            self._drawn(distances, pairs.negatives, draws, self.negatives_per_bin),
        )

    def _drawn(self, distances, mask, draws, most):
        infinity = float("inf")
        low = ops.min(ops.where(mask, distances, infinity), initial=infinity)
        width = (ops.max(ops.where(mask, distances, -infinity), initial=-infinity) - low) / self.bins
        spread = ops.logical_and(mask, width > 0)
        place = ops.where(spread, (distances - low) / ops.where(width > 0, width, 1.0), 0.0)
        # What is no pair stands in a bin of its own, behind all others.
        bins = ops.where(mask, ops.clip(ops.floor(place), 0.0, self.bins - 1.0), float(self.bins))
        bins, draws = ops.reshape(bins, (-1,)), ops.reshape(draws, (-1,))
        by_draw = ops.argsort(draws)
        # Stable: within a bin in the order of the draw.
        order = ops.take(by_draw, ops.argsort(ops.take(bins, by_draw)))
        places = ops.argsort(order)
        counts = ops.segment_sum(ops.ones_like(places), ops.cast(bins, "int32"), num_segments=self.bins + 1)
        first = ops.take(ops.cumsum(counts) - counts, ops.cast(bins, "int32"))
        return ops.logical_and(mask, ops.reshape(places - first < most, ops.shape(mask)))
