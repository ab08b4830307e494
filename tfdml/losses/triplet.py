"""Losses that compare distances of positive and negative pairs: triplet and quadruplet loss."""

import functools

from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.losses.base import PairLoss
from tfdml.mining import negative_probabilities, semi_hard_negatives
from tfdml.registry import register


def compare_with_positives(values, positives, weights, function, slope):
    """For each positive pair (i, j) sum_k w_ik f(v_ik - v_ij), and 0 elsewhere: three times (B, B)
    -> (B, B).

    Differentiable in the values, once: both ways run over one positive of every anchor after
    another, so that they take O(B^2) memory, and O(B^2 P) time for at most P positives of an
    anchor.

    Args:
        values: v.
        positives: Booleans.
        weights: w, without a gradient.
        function: f, of each element.
        slope: Its derivative.

    Example:
        >>> values, pairs = keras.ops.array([[0.0, 1.0, 3.0]]), keras.ops.array([[False, True,
        ...     False]])
        >>> np.array(compare_with_positives(values, pairs, keras.ops.ones((1, 3)), keras.ops.square,
        ...     lambda z: 2 * z))
        array([[0., 5., 0.]], dtype=float32)
    """

    @pairwise.custom_gradient
    def compared(values, marks, weights):
        # Cut off from any tape: an eager one would keep every turn's matrices although grad() never
        # asks for them.
        values, marks, weights = (ops.stop_gradient(x) for x in (values, marks, weights))
        fold = functools.partial(pairwise.fold_over_positives, positives=marks > 0)

        def at(chosen, x):
            return ops.sum(ops.where(chosen, x, 0.0), axis=1, keepdims=True)

        def add(total, chosen):
            terms = weights * function(values - at(chosen, values))
            return total + ops.where(chosen, ops.sum(terms, axis=1, keepdims=True), 0.0)

        def grad(upstream):
            def add_slopes(total, chosen):
                slopes = at(chosen, upstream) * weights * slope(values - at(chosen, values))
                return (
                    total + slopes - ops.where(chosen, ops.sum(slopes, axis=1, keepdims=True), 0.0)
                )

            return (
                fold(add_slopes, ops.zeros_like(values)),
                ops.zeros_like(marks),
                ops.zeros_like(weights),
            )

        return fold(add, ops.zeros_like(values)), grad

    return compared(values, ops.cast(positives, "float32"), ops.cast(weights, "float32"))


@register("loss")
class TripletLoss(PairLoss):
    """Triplet loss over the triplets of a batch.

    L = (1/|T|) sum over (a, p, n) in T of [d_ap - d_an + margin]_+

    where `mining` says which triplets there are:

    - `"all"`: every positive with every negative, exactly, in O(B^2 log B) time and O(B^2) memory.
    - `"hard"`: per anchor, its furthest positive with its nearest negative.
    - `"semi_hard"`: per positive pair, the nearest negative that is further than the positive, or
      else the furthest negative.
    - `"distance_weighted"`: per positive pair, a negative drawn with the probabilities of
      `tfdml.mining.negative_probabilities`. The loss is the expectation over the draw, not a draw:
      the same gradient on average with none of the noise, and the same value in every process, on
      every replica and under jit.

    `margin="soft"` puts ln(1 + exp(d_ap - d_an)) in the place of the hinge, of Euclidean distances
    by default: every triplet keeps pulling, the less the better it is ordered. With `mining="all"`
    and `"hard"` these are Hermans et al.'s "batch all" and "batch hard" with the soft margin. Each
    mined triplet is then active. `"all"` and `"distance_weighted"` then take O(B^2 P) time for at
    most P positives of an anchor, and O(B^2) memory.

    The default counts in |T| the active triplets only (those with a positive term; expected ones
    for `"distance_weighted"`), as HORDE's code and pytorch-metric-learning do. `average="all"`
    counts every mined triplet: that is the mean of TensorFlow Addons' semi-hard loss and of Hermans
    et al.'s batch-hard. TensorFlow Addons' batch-hard loss also counts anchors that have no
    positive or no negative.

    Args:
        margin: In units of `distance`, not negative; or `"soft"`.
        mining: One of the above; or an object that chooses pairs, a `tfdml.mining.Miner`: each
            positive that it keeps makes a triplet with each negative that it keeps of the same
            anchor.
        distance: As of `PairLoss`. None: `"sqeuclidean"`, as FaceNet and the ECAML paper on unit
            vectors; with the soft margin `"euclidean"`, as Hermans et al.
        average: `"active"` or `"all"`.
        reduction: `"sum"` gives the plain sum over triplets, eq. 3 of the DML-DA paper.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(TripletLoss(margin=0.1)([0, 0, 1],
        ...     embeddings))  # [0.8 - 2 + 0.1]_+ inactive, [0.8 - 0.4 + 0.1]_+
        0.5

    Source: Schroff, Kalenichenko, Philbin, "FaceNet", CVPR 2015; Hermans, Beyer, Leibe, "In Defense
    of the Triplet Loss for Person Re-Identification", 2017; Wu et al., "Sampling Matters in Deep
    Embedding Learning", ICCV 2017.
    """

    own_mining = ("all", "hard", "semi_hard", "distance_weighted")

    def __init__(self, margin=0.1, mining="all", distance=None, average="active", **kwargs):
        if distance is None:
            distance = "euclidean" if margin == "soft" else "sqeuclidean"
        super().__init__(distance=distance, mining=mining, **kwargs)
        if isinstance(margin, str) and margin != "soft":
            raise ValueError(f"margin must be a number or 'soft', not {margin!r}")
        self.margin = margin if margin == "soft" else number("margin", margin, at_least=0)
        self.average = one_of("average", average, ("active", "all"))

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        soft = self.margin == "soft"
        if self.mining == "hard":
            rows, active, mined = _hardest(distances, positives, negatives, self._cost)
        elif self.mining == "semi_hard":
            rows, active, mined = _semi_hard(pairs, self._cost)
        else:
            weights = ops.cast(negatives, "float32")
            if self.mining == "distance_weighted":
                weights = negative_probabilities(pairs)
            weighted = (
                _softly_weighted if soft else functools.partial(_weighted, margin=self.margin)
            )
            rows, active, mined = weighted(distances, positives, weights)
        # Every triplet of a soft margin is active.
        only_active = self.average == "active" and not soft
        return self.mean_over(pairs, rows, ops.sum(active if only_active else mined))

    def _cost(self, differences):
        """Return what a triplet costs, from d_ap - d_an."""
        return (
            ops.softplus(differences)
            if self.margin == "soft"
            else ops.relu(differences + self.margin)
        )


# Each returns, per anchor: the sum of what its triplets cost, how many are active, and how many
# there are. With weights these are sums of weights.


def _hardest(distances, positives, negatives, cost):
    # By index: the gradient of a maximum compares values, which fused arithmetic may compute twice
    # and differently.
    furthest = pairwise.index_of_largest(ops.where(positives, distances, -1e30))
    nearest = pairwise.index_of_largest(ops.where(negatives, -distances, -1e30))
    # With a column more, as a batch without images has none.
    padded = ops.pad(distances, ((0, 0), (0, 1)))
    chosen = ops.take_along_axis(padded, ops.stack([furthest, nearest], axis=1), axis=1)
    mined = ops.logical_and(ops.any(positives, axis=1), ops.any(negatives, axis=1))
    value = ops.where(mined, cost(chosen[:, 0] - chosen[:, 1]), 0.0)
    return value, ops.cast(value > 0, "float32"), ops.cast(mined, "float32")


def _semi_hard(pairs, cost):
    distances = pairs.distances()
    to_negative = ops.take_along_axis(distances, semi_hard_negatives(pairs), axis=1)
    mined = ops.logical_and(pairs.positives, ops.any(pairs.negatives, axis=1, keepdims=True))
    values = ops.where(mined, cost(distances - to_negative), 0.0)
    return (
        ops.sum(values, axis=1),
        pairwise.masked_count(values > 0, axis=1),
        pairwise.masked_count(mined, axis=1),
    )


def _weighted(distances, positives, weights, margin):
    """Return the hinges of every (a, p, n), weighted by `weights` (B, B) of the negatives, without
    a tensor of B^3.

    sum over active (a, p, n) of w_an (d_ap + margin - d_an) is linear in the distances: d_ap +
    margin counts with the weight of the negatives before it in the anchor's order, -d_an with its
    own weight times the positives after it.
    """
    thresholds = ops.concatenate([distances + margin, distances], axis=1)
    # Positives count +1, negatives minus their weight: they never coincide, so that one tensor
    # holds both.
    signed = ops.concatenate([ops.cast(positives, "float32"), -weights], axis=1)
    # Positives stand first: at a tie the hinge is 0 and, argsort being stable, the triplet
    # inactive.
    order = ops.argsort(ops.stop_gradient(thresholds), axis=1)
    signed = ops.take_along_axis(signed, order, axis=1)
    is_positive, weight = ops.relu(signed), ops.relu(-signed)
    weight_before = is_positive * ops.cumsum(weight, axis=1)
    num_positives = ops.sum(is_positive, axis=1, keepdims=True)
    positives_after = num_positives - ops.cumsum(is_positive, axis=1)
    coefficients = ops.stop_gradient(weight_before - weight * positives_after)
    # The coefficients of a row sum to 0: taking its mean from the distances changes nothing but the
    # rounding.
    centered = thresholds - ops.stop_gradient(ops.mean(thresholds, axis=1, keepdims=True))
    rows = ops.sum(coefficients * ops.take_along_axis(centered, order, axis=1), axis=1)
    active = ops.sum(weight_before, axis=1)
    return rows, active, num_positives[:, 0] * ops.sum(weight, axis=1)


def _softly_weighted(distances, positives, weights):
    """Return the sum over (p, n) of w_an ln(1 + exp(d_ap - d_an)) of every anchor, and twice the
    weight of its triplets: with a soft margin all are active."""

    def cost(gap):
        # gap = d_an - d_ap
        return ops.softplus(-gap)

    def slope(gap):
        return -ops.sigmoid(-gap)

    by_positive = compare_with_positives(distances, positives, weights, cost, slope)
    mined = pairwise.masked_count(positives, axis=1) * ops.sum(weights, axis=1)
    return ops.sum(by_positive, axis=1), mined, mined


@register("loss")
class QuadrupletLoss(PairLoss):
    """Quadruplet loss over all triplets and quadruplets of a batch.

    L = (1/N) sum over images i of ( E_jk [d_ij - d_ik + margin]_+ + E_jkl [d_ij - d_kl +
    pair_margin]_+ )

    where E is the mean over the positives j of i, and over its negatives k, or over all pairs (k,
    l) of different classes in the batch. The second term compares distances of pairs that share no
    image, so that one threshold parts positives from negatives everywhere; with k = i it would be
    the first. An image without positives counts 0, as does a batch of one class.

    All quadruplets count, exactly, in O(B^2 log B) time and O(B^2) memory. Chen et al. also ask
    that (k, l) contains no image of the class of i, which eq. 12 does not.

    Args:
        margin: Of the triplets, in units of `distance`.
        pair_margin: Of the quadruplets: eq. 12's gamma.
        reduction: `"sum"` leaves 1/N out: eq. 12.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> loss = QuadrupletLoss(margin=0.1, pair_margin=0.0, distance="sqeuclidean")
        >>> float(loss([0, 0, 1],
        ...     embeddings))  # second image: 0.8 - 0.4 + 0.1; first two: half of 0.8 - 0.4 each
        0.3

    Source: Kemertas et al., "RankMI", CVPR 2020, eq. 12; Chen et al., "Beyond Triplet Loss: A Deep
    Quadruplet Network for Person Re-Identification", CVPR 2017.
    """

    whole_batch = within_batch = True

    def __init__(self, margin=0.2, pair_margin=0.1, distance="euclidean", **kwargs):
        super().__init__(distance=distance, **kwargs)
        self.margin = number("margin", margin)
        self.pair_margin = number("pair_margin", pair_margin)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        hinges = _below(distances, positives, negatives, self.margin)
        triplets = _per_tuple(hinges, positives, pairwise.masked_count(negatives, axis=1))
        size = ops.shape(distances)[0]

        def flat(matrix):
            return ops.reshape(matrix, (1, size * size))

        hinges = _below(
            flat(distances), flat(positives), flat(negatives), self.pair_margin, (2 * size, size)
        )
        hinges = ops.reshape(hinges, (size, size))
        return triplets + _per_tuple(hinges, positives, pairwise.masked_count(negatives))


def _per_tuple(hinges, positives, num_negatives):
    """Divide the sum of each anchor's hinges (N, N) by the number of its tuples."""
    counted = pairwise.masked_count(positives, axis=1) * num_negatives
    return ops.sum(hinges, axis=1) / ops.where(counted > 0, counted, 1.0)


def _below(distances, positives, negatives, margin, blocks=None):
    """For each positive, the sum of [d + margin - d_n]_+ over the negatives n of its row.

    In the order of its row a positive stands, at d + margin, behind the negatives that count, so
    that running sums of their number and of their distances are all that it takes.

    Args:
        distances: (R, M).
        positives: (R, M) booleans.
        negatives: (R, M) booleans.
        margin: A number.
        blocks: How many blocks `_running_sum` makes of 2 M values, and their width.

    Returns:
        (R, M), 0 where there is no positive.
    """
    length = ops.shape(distances)[1]
    blocks = blocks or (2, length)
    # Around their mean, so that the running sums stay small.
    centered = distances - ops.stop_gradient(ops.mean(distances, axis=1, keepdims=True))
    values = ops.concatenate([centered + margin, centered], axis=1)
    counts = ops.concatenate([ops.zeros_like(centered), ops.cast(negatives, "float32")], axis=1)
    order = ops.argsort(ops.stop_gradient(values), axis=1)
    values, counts = (
        ops.take_along_axis(values, order, axis=1),
        ops.take_along_axis(counts, order, axis=1),
    )
    hinges = _running_sum(counts, blocks) * values - _running_sum(counts * values, blocks)
    back = ops.argsort(order, axis=1)[:, :length]
    return ops.where(positives, ops.take_along_axis(hinges, back, axis=1), 0.0)


def _running_sum(values, blocks):
    """Return the cumulative sum along rows, by blocks: of millions of values, float32 then loses
    little."""
    rows, length = ops.shape(values)
    split = ops.reshape(values, (rows, *blocks))
    inside, totals = ops.cumsum(split, axis=2), ops.sum(split, axis=2)
    return ops.reshape(inside + (ops.cumsum(totals, axis=1) - totals)[:, :, None], (rows, length))
