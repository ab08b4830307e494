"""Miners by name, and the functions that choose negatives or pairs."""

import math
from fractions import Fraction

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.mining.base import Miner
from tfdml.registry import register


def semi_hard_negatives(pairs):
    """Find for every (anchor, positive) the column of its negative: integers (b, B).

    The nearest negative with d_an > d_ap; where there is none, the furthest negative. At columns
    that are not positives the index is that of the same rule; in rows without any negative it means
    nothing.

    Costs O(B^2) memory and O(B^2 log B) time: negatives and positives are ranked together, and the
    number of negatives that come before a positive is the rank, among negatives, of the one to
    choose.

    Args:
        pairs: `tfdml.pairs.Pairs`, of which `pairs.distances()` decide.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[0.0], [0.5], [0.4], [0.7], [0.9]], labels=[0, 0, 1,
        ...     1, 2])
        >>> int(semi_hard_negatives(pairs)[0, 1])  # 0.7 is the first beyond 0.5
        3

    Source: Schroff, Kalenichenko, Philbin, "FaceNet", CVPR 2015, sec. 3.2; with the rule of
    TensorFlow Addons for the case that there is none.
    """
    distances, negatives = ops.stop_gradient(pairs.distances()), pairs.negatives
    size = distances.shape[1] or ops.shape(distances)[1]
    others_last = ops.where(negatives, distances, float("inf"))
    by_distance = ops.argsort(others_last, axis=1)
    # Negatives stand first: argsort is stable, so one at the positive's own distance is not taken
    # to be further.
    order = ops.argsort(ops.concatenate([others_last, distances], axis=1), axis=1)
    is_negative = ops.concatenate([negatives, ops.zeros_like(negatives)], axis=1)
    seen = ops.cumsum(ops.cast(ops.take_along_axis(is_negative, order, axis=1), "int32"), axis=1)
    ranks = ops.argsort(order, axis=1)[:, size:]
    not_further = ops.take_along_axis(seen, ranks, axis=1)
    last = ops.maximum(ops.sum(ops.cast(negatives, "int32"), axis=1, keepdims=True) - 1, 0)
    return ops.take_along_axis(by_distance, ops.minimum(not_further, last), axis=1)


def multi_similarity_pairs(pairs, epsilon=0.1):
    """Keep the pairs that are worth learning from, by their cosines.

    A negative is kept if it is more similar than the anchor's least similar positive minus
    `epsilon`; a positive if it is less similar than the anchor's most similar negative plus
    `epsilon`. So an anchor without a positive, or without a negative, keeps nothing.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        epsilon: The slack.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[1.0, 0.0], [0.8, 0.6], [0.75, 0.66], [0.1, 1.0]],
        ...     labels=[0, 0, 1, 2])
        >>> kept = multi_similarity_pairs(pairs, epsilon=0.1)
        >>> np.array(kept.positives)[0].tolist(), np.array(kept.negatives)[0].tolist()
        ([False, True, False, False], [False, False, True, False])

    Source: Wang et al., "Multi-Similarity Loss with General Pair Weighting", CVPR 2019, sec. 4.
    """
    similarities = ops.stop_gradient(pairs.cosines())
    # The minimum of no positive is +inf and the maximum of no negative -inf: nothing passes then.
    infinity = float("inf")
    positives = ops.where(pairs.positives, similarities, infinity)
    negatives = ops.where(pairs.negatives, similarities, -infinity)
    least_similar = ops.min(positives, axis=1, keepdims=True, initial=infinity)
    most_similar = ops.max(negatives, axis=1, keepdims=True, initial=-infinity)
    return pairs.keep(similarities - epsilon < most_similar, similarities + epsilon > least_similar)


def negative_probabilities(pairs, cutoff=0.5, nonzero_loss_cutoff=1.4):
    """Compute the probability with which each anchor draws each image as its negative: (b, B).

    Proportional to 1/q(D), with D the distance of the L2-normalized embeddings and q its density
    between uniform points of the unit sphere in d dimensions:

        log w = (2 - d) ln D - ((d - 3) / 2) ln(1 - D^2 / 4),   D clamped to at least `cutoff`.

    Candidates are the negatives with D < `nonzero_loss_cutoff`; an anchor without any draws
    uniformly from all its negatives. Weights are scaled by each row's own maximum: with one maximum
    for the batch, rows far below it underflow to no candidate at all. Rows sum to 1, or to 0 where
    there is no negative. No gradient flows through.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        cutoff: Nearer negatives weigh as much as those at this distance, to bound the variance.
        nonzero_loss_cutoff: Negatives at this distance or beyond are not drawn; below 2.

    Raises:
        ValueError: Not 0 < cutoff < nonzero_loss_cutoff < 2.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], labels=[0, 1,
        ...     2])
        >>> np.array(negative_probabilities(pairs))[0]  # only the second is near
        array([0., 1., 0.], dtype=float32)

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """
    if not 0 < cutoff < nonzero_loss_cutoff < 2:
        raise ValueError(
            f"0 < cutoff < nonzero_loss_cutoff < 2 does not hold for {cutoff} and "
            f"{nonzero_loss_cutoff}"
        )
    # Not the static shape, which is unknown after a gather from replicas of unequal size.
    dim = ops.cast(ops.shape(pairs.anchors)[-1], "float32")
    negatives = pairs.negatives
    distances = pairs.without_gradient().map(pairwise.l2_normalize).distances("euclidean")
    near = ops.logical_and(negatives, distances < nonzero_loss_cutoff)
    # Clamped above as well, so that the logarithm is finite at the pairs that are masked out.
    clamped = ops.clip(distances, cutoff, nonzero_loss_cutoff)
    log_bend = ops.log(1.0 - 0.25 * ops.square(clamped))
    log_weights = (2.0 - dim) * ops.log(clamped) - 0.5 * (dim - 3.0) * log_bend
    has_near = ops.any(near, axis=1, keepdims=True)
    candidates = ops.where(has_near, near, negatives)
    log_weights = ops.where(ops.logical_and(has_near, near), log_weights, 0.0)
    row_maximum = ops.max(
        ops.where(candidates, log_weights, -1e30), axis=1, keepdims=True, initial=-1e30
    )
    weights = ops.where(candidates, ops.exp(ops.minimum(log_weights - row_maximum, 0.0)), 0.0)
    return weights / ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)


def sample_negatives(probabilities, count=1, seed=None):
    """Draws `count` different negatives for each anchor: (b, B) -> indices (b, count) and whether
    each is one.

    Gumbel-top-k: the largest of log p + Gumbel noise are a draw without replacement.

    Args:
        probabilities: (b, B), as `negative_probabilities` gives them; rows need not sum to 1.
        count: Draws per anchor, at most B.
        seed: An integer, or a `keras.random.SeedGenerator` for fresh draws at every call.

    Returns:
        Integers (b, count), and booleans (b, count) that are false where an anchor has fewer
        candidates than `count`.

    Example:
        >>> drawn, exists = sample_negatives([[0.0, 1.0], [1.0, 0.0]], seed=0)
        >>> np.array(drawn).tolist(), np.array(exists).tolist()
        ([[1], [0]], [[True], [True]])
    """
    probabilities = ops.convert_to_tensor(probabilities)
    possible = probabilities > 0
    uniform = keras.random.uniform(ops.shape(probabilities), minval=1e-20, maxval=1.0, seed=seed)
    noisy = ops.log(ops.where(possible, probabilities, 1.0)) - ops.log(-ops.log(uniform))
    indices = ops.top_k(ops.where(possible, noisy, -1e30), count)[1]
    return indices, ops.take_along_axis(possible, indices, axis=1)


CHOICES = ("easy", "semi_hard", "hard", "all")


@register("miner")
class BatchEasyHardMiner(Miner):
    """For each anchor the easiest, a semi-hard or the hardest positive, and the same of the
    negatives.

    An easy positive is the nearest, a hard one the furthest; an easy negative is the furthest, a
    hard one the nearest. A semi-hard negative is the nearest that is further than the anchor's
    chosen positive, a semi-hard positive the furthest that is nearer than its chosen negative. An
    anchor that lacks one of the two keeps nothing, save where the other side is `"all"`. As
    pytorch-metric-learning's `BatchEasyHardMiner`, without its ranges of distances.

    Args:
        positives: `"easy"`, `"semi_hard"`, `"hard"` or `"all"`.
        negatives: One of the same; no semi-hard choice goes with another or with `"all"`, which
            give no bound.

    Raises:
        ValueError: An argument is none of these, or they do not go together.

    Example:
        >>> labels, x = [0, 0, 0, 1, 1], [[0.0], [1.0], [3.0], [2.0], [9.0]]
        >>> loss = tfdml.losses.TripletLoss(0.5, mining=BatchEasyHardMiner("easy", "hard"),
        ...     distance="euclidean")
        >>> np.array(loss.call(labels,
        ...     np.array(x))) > 0  # the first has its positive at 1 and a negative at 2
        array([False,  True,  True,  True,  True])

    Source: Xuan, Stylianou, Pless, "Improved Embeddings with Easy Positive Triplet Mining", WACV
    2020.
    """

    def __init__(self, positives="easy", negatives="semi_hard"):
        self.positives = one_of("positives", positives, CHOICES)
        self.negatives = one_of("negatives", negatives, CHOICES)
        if "semi_hard" in (positives, negatives) and (
            positives == negatives or "all" in (positives, negatives)
        ):
            raise ValueError(
                f"positives={positives!r} and negatives={negatives!r} cannot be combined: "
                "semi-hard is relative "
                "to one pair of the other kind, 'easy' or 'hard'"
            )

    def __call__(self, pairs):
        """Return the pairs to keep: see `Miner`."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        if self.positives == "semi_hard":
            chosen_negatives = _one(distances, negatives, furthest=self.negatives == "easy")
            positives = ops.logical_and(
                positives, distances < _value(distances, chosen_negatives, float("-inf"))
            )
            chosen_positives = _one(distances, positives, furthest=True)
        else:
            chosen_positives = _chosen(distances, positives, self.positives, furthest="hard")
            if self.negatives == "semi_hard":
                beyond = distances > _value(distances, chosen_positives, float("inf"))
                chosen_negatives = _one(
                    distances, ops.logical_and(negatives, beyond), furthest=False
                )
            else:
                chosen_negatives = _chosen(distances, negatives, self.negatives, furthest="easy")
        if "all" in (self.positives, self.negatives):
            return pairs.keep(chosen_positives, chosen_negatives)
        has_both = ops.logical_and(ops.any(chosen_positives, 1), ops.any(chosen_negatives, 1))
        positives = ops.logical_and(chosen_positives, has_both[:, None])
        negatives = ops.logical_and(chosen_negatives, has_both[:, None])
        return pairs.keep(positives, negatives)


@register("miner")
class EasyPositiveMiner(BatchEasyHardMiner):
    """For each anchor its nearest positive, so that a class need not be one cluster, with negatives
    of choice.

    Args:
        negatives: `"semi_hard"` (default: the nearest that is further than the positive), `"hard"`
            (the nearest), `"easy"` (the furthest) or `"all"`.

    Raises:
        ValueError: `negatives` is none of these.

    Example:
        >>> loss = tfdml.losses.NTXentLoss(temperature=0.1,
        ...     mining=EasyPositiveMiner(negatives="all"))
        >>> float(loss([0, 0, 0, 1], [[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0,
        ...     1.0]]))  # ln(1 + e^2) / 3, of the third
        0.7090063

    Source: Xuan, Stylianou, Pless, "Improved Embeddings with Easy Positive Triplet Mining", WACV
    2020.
    """

    def __init__(self, negatives="semi_hard"):
        super().__init__("easy", negatives)


@register("miner")
class BatchHardMiner(BatchEasyHardMiner):
    """For each anchor its furthest positive and its nearest negative: batch-hard, for every loss on
    pairs.

    `TripletLoss(mining="hard")` is the same with less work.

    Example:
        >>> labels, x = [0, 0, 0, 1], [[0.0], [1.0], [3.0], [4.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=2.0, distance="euclidean",
        ...     mining=BatchHardMiner())
        >>> float(loss(labels,
        ...     x))  # (3 + 2 + 3) / 3, and the one negative within the margin, [2 - 1]_+
        3.6666667

    Source: Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification",
    2017.
    """

    def __init__(self):
        super().__init__("hard", "hard")


def _chosen(distances, mask, choice, furthest):
    """Return the pairs of a choice that needs no other; the furthest ones are those called
    `furthest`."""
    return mask if choice == "all" else _one(distances, mask, choice == furthest)


def _one(distances, mask, furthest):
    """Of each row's pairs the furthest or the nearest, the first among equals; none where there is
    none."""
    signed = distances if furthest else -distances
    index = pairwise.index_of_largest(ops.where(mask, signed, float("-inf")))
    columns = ops.arange(ops.shape(distances)[1], dtype=index.dtype)
    return ops.logical_and(mask, columns[None, :] == index[:, None])


def _value(distances, chosen, missing):
    """Return the distance of each row's chosen pair, (N, 1); `missing` where there is none."""
    value = ops.sum(ops.where(chosen, distances, 0.0), axis=1, keepdims=True)
    return ops.where(ops.any(chosen, axis=1, keepdims=True), value, missing)


@register("miner")
class AngularMiner(Miner):
    """The pairs of triplets (a, p, n) in which n sees the middle c of a and p under an angle above
    a bound.

    atan(|a - p| / (2 |n - c|)) > angle,   c = (a + p) / 2

    which is the angle that `AngularLoss` bounds. With `distance="cosine"`, and for losses on
    cosines, it is that of the embeddings scaled to length 1, and of the embeddings themselves with
    any other distance.

    A positive is kept if it makes such a triplet with a negative of the anchor, and a negative if
    it does so with a positive. The distances suffice: 4 |n - c|^2 = 2 |a - n|^2 + 2 |p - n|^2 - |a
    - p|^2. Takes O(B^2) memory and O(B^2 P) time for at most P positives of an anchor. A list of
      all triplets, as pytorch-metric-learning's miner gives
    it, takes O(B^3) of both. A loss on triplets makes one of each kept positive with each kept
    negative of an anchor, among them some with a smaller angle.

    Args:
        angle_degrees: The bound, 0 to 90; pytorch-metric-learning's default is 20 too.

    Raises:
        ValueError: `angle_degrees` is out of range.

    Example:
        >>> labels, x = [0, 0, 1, 1], [[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 9.0]]
        >>> loss = tfdml.losses.TripletLoss(1.0,
        ...     mining=AngularMiner(angle_degrees=40))  # the third sees 45 degrees
        >>> np.array(loss.call(labels, np.array(x))) > 0  # the first two see 38
        array([ True,  True, False, False])

    Source: Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017, sec. 3; `AngularMiner`
    of pytorch-metric-learning.
    """

    def __init__(self, angle_degrees=20.0):
        self.angle_degrees = number("angle_degrees", angle_degrees, at_least=0, at_most=90)

    def __call__(self, pairs):
        """Return the pairs to keep: see `Miner`."""
        # The angle at which a loss on cosines sees them is that of unit vectors.
        pairs = pairs.map(pairwise.l2_normalize) if pairs.distance == "cosine" else pairs
        squared = pairs.distances("sqeuclidean")
        sine = math.sin(math.radians(self.angle_degrees)) ** 2

        def from_positive(chosen):
            index = ops.argmax(chosen, axis=1)
            if pairs.square:
                return ops.take(squared, index, axis=0)
            columns = ops.arange(ops.shape(squared)[1], dtype=index.dtype)
            is_positive = index[:, None] == columns[None, :]
            return pairwise.squared_distances(
                ops.take(pairs.references, index, axis=0), pairs.references, is_positive
            )

        def with_positive(masks, chosen):
            positives, negatives = masks
            exists = ops.any(chosen, axis=1, keepdims=True)
            to_positive = ops.sum(ops.where(chosen, squared, 0.0), axis=1, keepdims=True)
            # tan(angle)^2 < |a - p|^2 / (4 |n - c|^2), freed of its denominators.
            wide = to_positive > 2.0 * sine * (squared + from_positive(chosen))
            wide = ops.logical_and(ops.logical_and(pairs.negatives, exists), wide)
            is_seen = ops.logical_and(chosen, ops.any(wide, axis=1, keepdims=True))
            return ops.logical_or(positives, is_seen), ops.logical_or(negatives, wide)

        none = ops.zeros_like(pairs.positives)
        return pairs.keep(
            *pairwise.fold_over_positives(with_positive, (none, none), pairs.positives)
        )


# Of a fraction such as 0.3: its product with a remainder stays below 2^31.
_LARGEST_DENOMINATOR = 2**15


@register("miner")
class HardAwareMiner(Miner):
    """The hardest share of a batch's pairs: its furthest positives and its nearest negatives.

    The level of a hard-aware cascade: a loss on each of several representations or heads, each of
    which takes a smaller share (the paper has 1, 0.5 and 0.2). In the paper a level chooses among
    the pairs that the one before has kept, and by the loss; here it chooses among all, by distance,
    as pytorch-metric-learning's `HDCMiner` does. Of pairs at the distance of the last one kept, all
    are kept.

    Args:
        fraction: The share, above 0 and at most 1; of the positives and of the negatives each.

    Raises:
        ValueError: `fraction` is out of range.

    Example:
        >>> labels, x = [0, 0, 0, 1], [[0.0], [1.0], [3.0], [4.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=2.0, distance="euclidean",
        ...     mining=HardAwareMiner(1 / 3))
        >>> float(loss(labels, x))  # the one pair at 3, from both ends, and that at 1
        4.0

    Source: Yuan, Yang, Zhang, "Hard-Aware Deeply Cascaded Embedding", ICCV 2017.
    """

    whole_batch = True

    def __init__(self, fraction=0.5):
        self.fraction = number("fraction", fraction, above=0, at_most=1)

    def __call__(self, pairs):
        """Return the pairs to keep: see `Miner`."""
        distances = pairs.distances()
        return pairs.keep(
            self._smallest(-distances, pairs.positives), self._smallest(distances, pairs.negatives)
        )

    def _smallest(self, values, mask):
        # In integers: 0.6 of 50 is 30, and not what float32 rounds up to 31. No product leaves 32
        # bits.
        share = Fraction(self.fraction).limit_denominator(_LARGEST_DENOMINATOR)
        count = ops.sum(ops.cast(mask, "int32"))
        whole, remainder = count // share.denominator, count % share.denominator
        size = whole * share.numerator - (-remainder * share.numerator) // share.denominator
        flat = ops.reshape(ops.where(mask, values, float("inf")), (-1,))
        # One more, so that a batch without images has a last value too.
        ascending = ops.sort(ops.pad(flat, ((0, 1),), constant_values=float("inf")))
        return ops.logical_and(mask, values <= ops.take(ascending, ops.maximum(size - 1, 0)))
