"""Losses that bound single distances: contrastive, binomial deviance, margin, threshold-consistent
margin, ranked list, VICReg, regression."""

from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.losses.base import CosinePairLoss, PairLoss
from tfdml.mining import negative_probabilities
from tfdml.registry import register


@register("loss")
class ContrastiveLoss(PairLoss):
    """Contrastive loss: positives are pulled together, negatives pushed beyond a margin.

    L = (1/|P|) sum over positives of d_ij + (1/|N|) sum over negatives of [margin - d_ij]_+

    over ordered pairs of different images. With `distance="sqeuclidean"` and `reduction="sum"` this
    is eq. 2 of the DML-DA paper (each unordered pair counted from both ends); with
    `distance="euclidean"` it is the form of pytorch-metric-learning with its defaults, save that
    positives at distance 0 count in |P|.

    Args:
        margin: Negatives further apart than this are left alone; in units of `distance`, and not
            negative save for `"dot"` and for an object.
        distance: As of `PairLoss`. With `"dot"` the positive term has no lower bound unless
            embeddings are normalized.
        average: |N| counts the `"active"` negatives only (those inside the margin, as HORDE does;
            the push keeps its strength when few are left) or `"all"` of them.
        reduction: `"sum"` gives the plain sums over ordered pairs.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(ContrastiveLoss(margin=1.0)([0, 0, 1], embeddings))  # 0.8 + (1 - 0.4)
        1.4

    Source: Hadsell, Chopra, LeCun, CVPR 2006; Li et al., "Deep Metric Learning with Density
    Adaptivity", eq. 2.
    """

    def __init__(self, margin=1.0, distance="sqeuclidean", average="active", **kwargs):
        super().__init__(distance=distance, **kwargs)
        # -x.y may be negative, and so may a distance that is given as an object. The other named
        # distances are never below 0.
        may_be_negative = self.distance == "dot" or not isinstance(self.distance, str)
        self.margin = number("margin", margin, at_least=None if may_be_negative else 0)
        self.average = one_of("average", average, ("active", "all"))

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        hinge = ops.relu(self.margin - distances)
        counted = ops.logical_and(negatives, hinge > 0) if self.average == "active" else negatives
        return self.over_pairs(pairs, distances, positives) + self.over_pairs(pairs, hinge, counted)


@register("loss")
class CosineContrastiveLoss(CosinePairLoss):
    """Contrastive loss on cosine similarities s_ij, squared in the positives and linear in the
    negatives.

    L = (1/|P|) sum over positives of (s_ij - 1)^2 / 2 + (1/|N|) sum over negatives of [s_ij -
    margin]_+ / 2

    over ordered pairs of different images, with N the active negatives, those above the margin.

    Args:
        margin: The cosine up to which negatives are left alone.
        reduction: `"sum"` gives the plain sums over ordered pairs.

    Raises:
        ValueError: `margin` is not a cosine.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(CosineContrastiveLoss(margin=0.5)([0, 0, 1],
        ...     embeddings))  # (0.6 - 1)^2 / 2 + (0.8 - 0.5) / 2
        0.23

    Source: the contrastive loss of the public code of Jacob et al., "Metric Learning With HORDE",
    ICCV 2019.
    """

    def __init__(self, margin=0.5, **kwargs):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, at_least=-1, at_most=1)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        hinge = ops.relu(cosines - self.margin)
        active = ops.logical_and(negatives, hinge > 0)
        pull = self.over_pairs(pairs, ops.square(cosines - 1.0), positives)
        return 0.5 * (pull + self.over_pairs(pairs, hinge, active))


@register("loss")
class CosineSimilarityLoss(CosinePairLoss):
    """Regression of the cosine s_ij on a given, graded similarity t_ij: L = mean of (s_ij -
    t_ij)^2.

    The mean is over ordered pairs whose similarity is known. It is given by a relation that returns
    similarities, such as `tfdml.mining.GivenPairs` or `tfdml.mining.Jaccard`. With class labels it
    is 1 and 0.

    Args:
        low: The similarity that becomes a cosine of 0.
        high: The similarity that becomes a cosine of 1, such as 5 for grades from 0 to 5.
        reduction: `"sum"` gives the plain sum over ordered pairs.

    Raises:
        ValueError: `high` is not above `low`.

    Example:
        >>> loss = CosineSimilarityLoss(positives=tfdml.mining.GivenPairs([(0, 1, 0.5), (1, 2,
        ...     0.2)]))
        >>> float(loss([0, 1, 2], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))  # (0.1^2 + 0.6^2) / 2
        0.185

    Source: Reimers, Gurevych, "Sentence-BERT", EMNLP 2019, the regression objective;
    `CosineSimilarityLoss` of
        sentence-transformers.
    """

    def __init__(self, low=0.0, high=1.0, **kwargs):
        super().__init__(**kwargs)
        self.low, self.high = number("low", low), number("high", high)
        if self.high <= self.low:
            raise ValueError(f"high must be above low, {self.low:g}, not {self.high:g}")

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        targets = (pairs.similarities - self.low) / (self.high - self.low)
        has_target = ops.logical_or(pairs.positives, pairs.negatives)
        return self.over_pairs(pairs, ops.square(pairs.cosines() - targets), has_target)


@register("loss")
class BinomialDevianceLoss(CosinePairLoss):
    """Binomial deviance on cosine similarities s_ij.

    L = (1/|P|) sum over positives of ln(1 + exp(-alpha (s_ij - beta)))
      + (1/|N|) sum over negatives of ln(1 + exp(alpha C (s_ij - beta)))

    over ordered pairs of different images, with C = `negative_cost` inside the exponent.
    `reduction="sum"` gives eq. 10 of the ECAML paper, the plain sum over i, j (without i = j).

    Args:
        alpha: Scale of the similarities.
        beta: The similarity at which a pair costs ln 2.
        negative_cost: C, how much steeper negatives are than positives.
        reduction: `"sum"` gives the plain sums over ordered pairs.

    Raises:
        ValueError: `alpha` or `negative_cost` is not positive.

    Example:
        >>> loss = BinomialDevianceLoss(alpha=2.0, beta=0.5, negative_cost=25.0)
        >>> float(loss([0, 0], [[1.0, 0.0], [1.0, 0.0]]))  # ln(1 + exp(-1))
        0.3132617

    Source: Yi, Lei, Li, "Deep Metric Learning for Practical Person Re-Identification", 2014; Chen
    and Deng, "Energy Confused Adversarial Metric Learning", AAAI 2019, eq. 10.
    """

    def __init__(self, alpha=2.0, beta=0.5, negative_cost=25.0, **kwargs):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, above=0)
        self.beta = number("beta", beta)
        self.negative_cost = number("negative_cost", negative_cost, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        logits = self.alpha * (cosines - self.beta)
        pull = self.over_pairs(pairs, ops.softplus(-logits), positives)
        return pull + self.over_pairs(pairs, ops.softplus(self.negative_cost * logits), negatives)


@register("loss")
class MarginLoss(PairLoss):
    """Margin loss with distance-weighted negatives and a fixed boundary.

    L = (1/#active) sum over positive pairs (a, p) of [d_ap - beta + alpha]_+ + [beta + alpha -
    d_an]_+

    with Euclidean distances, one negative n per ordered positive pair, and #active the number of
    terms above 0. n is distributed as `tfdml.mining.negative_probabilities` says; the sum and
    #active are their expectations over it and not one draw: the same gradient on average with none
    of the noise, and the same value in every process, on every replica and under jit.

    The authors' code and pytorch-metric-learning draw n, and may learn beta (per class); here it is
    fixed at their initial value.

    Args:
        alpha: The margin on either side of the boundary.
        beta: The boundary between positive and negative distances of unit vectors.
        reduction: `"sum"` gives the plain (expected) sum.

    Raises:
        ValueError: `alpha` is negative, or `beta` not in 0 .. 2.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(MarginLoss()([0, 0, 1],
        ...     embeddings))  # only [1.4 - sqrt(0.4)]_+, of the second anchor, is active
        0.7675445

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """

    fixed = ("distance",)

    def __init__(self, alpha=0.2, beta=1.2, **kwargs):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, at_least=0)
        self.beta = number("beta", beta, at_least=0, at_most=2)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        rows, active = margin_hinges(pairs, self.alpha, self.beta)
        return self.mean_over(pairs, rows, active)


def margin_hinges(pairs, alpha, beta):
    """Return the hinges around the boundary beta, in expectation over distance-weighted negatives.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        alpha: The margin.
        beta: The boundary: a number, or (b, 1), one for each anchor.

    Returns:
        (b,), the sum of each anchor's hinges, and the expected number of active ones of these
        anchors.
    """
    distances = pairs.distances("euclidean")
    positives = ops.cast(pairs.positives, "float32")
    # Each positive of an anchor brings a negative: expected, the probability times the number of
    # positives.
    drawn = ops.sum(positives, axis=1, keepdims=True) * negative_probabilities(pairs)
    pull, push = ops.relu(distances - beta + alpha), ops.relu(beta + alpha - distances)
    active = ops.sum(ops.where(pull > 0, positives, 0.0) + ops.where(push > 0, drawn, 0.0))
    return ops.sum(positives * pull + drawn * push, axis=1), active


@register("loss")
class ThresholdConsistentMarginLoss(CosinePairLoss):
    """Threshold-consistent margin loss: a regularizer, next to another loss, of the pairs that one
    threshold for all classes would judge wrongly.

    L = positive_weight (1/#hard) sum over positives of [positive_margin - s_ij]_+
      + negative_weight (1/#hard) sum over negatives of [s_ij - negative_margin]_+

    with cosines s_ij, over ordered pairs of different images. #hard counts the positives up to, or
    the negatives from, their margin. A mean without a hard pair is 0. Once few pairs are hard, each
    of them weighs more.

    pytorch-metric-learning computes the same of a batch alone. With references, as of its memory,
    it looks their indices up in the batch; here the second image of a pair is a reference.

    Args:
        positive_margin: The cosine from which positives are left alone.
        negative_margin: The cosine up to which negatives are left alone.
        positive_weight: The weight of the positives.
        negative_weight: The weight of the negatives.
        reduction: `"sum"` gives the plain sums over ordered pairs.

    Raises:
        ValueError: A margin is not a cosine, or a weight is negative.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(ThresholdConsistentMarginLoss()([0, 0, 1],
        ...     embeddings))  # (0.9 - 0.6) + (0.8 - 0.5)
        0.6

    Source: Zhang et al., "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning",
    ICLR 2024.
    """

    def __init__(
        self,
        positive_margin=0.9,
        negative_margin=0.5,
        positive_weight=1.0,
        negative_weight=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.positive_margin = number("positive_margin", positive_margin, at_least=-1, at_most=1)
        self.negative_margin = number("negative_margin", negative_margin, at_least=-1, at_most=1)
        self.positive_weight = number("positive_weight", positive_weight, at_least=0)
        self.negative_weight = number("negative_weight", negative_weight, at_least=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        distant = ops.logical_and(pairs.positives, cosines <= self.positive_margin)
        close = ops.logical_and(pairs.negatives, cosines >= self.negative_margin)
        pull = self.over_pairs(pairs, self.positive_margin - cosines, distant)
        push = self.over_pairs(pairs, cosines - self.negative_margin, close)
        return self.positive_weight * pull + self.negative_weight * push


@register("loss")
class RankedListLoss(PairLoss):
    """Ranked list loss on Euclidean distances d.

    L = (1/B) sum over anchors i of (1 - balance) sum over P_i of w_ij (d_ij - (boundary - margin))
                                  + balance sum over N_i of w_ij (boundary - d_ij)

    with P_i the positives further than boundary - margin, N_i the negatives nearer than the
    boundary, and weights that grow with the violation and sum to 1 in each of these sets:

    w_ij proportional to exp(T_p (d_ij - (boundary - margin))) in P_i, to exp(T_n (boundary - d_ij))
    in N_i.

    Weights carry no gradient, as in the paper, so that they alone say how strongly a pair pulls
    (pytorch-metric-learning's carry one). Positives keep a sphere of radius boundary - margin to
    themselves. The mean is over all anchors, as in the paper and in pytorch-metric-learning, whose
    loss has no value for an anchor without a violating positive; here such a set costs 0. Takes
    O(B^2) memory: 4,096 images at once are well possible.

    Args:
        margin: m, the gap between the spheres of positives and negatives.
        boundary: The radius beyond which negatives cost nothing (the paper's alpha); at least
            `margin`.
        negative_temperature: T_n; 0 weighs negatives alike.
        positive_temperature: T_p; 0, the paper's simpler form, weighs positives alike.
        balance: The share of the negatives, 0 to 1 (pytorch-metric-learning's `imbalance`). The
            paper's sum of both is twice the value at 0.5.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: An argument is negative, or out of range.

    Example:
        >>> embeddings = [[0.0, 0.0], [1.0, 0.0], [0.2, 0.0]]
        >>> float(RankedListLoss(reduction="sum")([0, 0, 1],
        ...     embeddings))  # ((0.2 + 1.0) + (0.2 + 0.4) + 0.9985) / 2
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
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, at_least=0)
        self.boundary = number("boundary", boundary, at_least=self.margin)
        self.negative_temperature = number("negative_temperature", negative_temperature, at_least=0)
        self.positive_temperature = number("positive_temperature", positive_temperature, at_least=0)
        self.balance = number("balance", balance, at_least=0, at_most=1)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        pull = _weighted(
            distances - (self.boundary - self.margin), positives, self.positive_temperature
        )
        push = _weighted(self.boundary - distances, negatives, self.negative_temperature)
        return (1.0 - self.balance) * pull + self.balance * push


def _weighted(violations, mask, temperature):
    """Return the mean of each row's positive violations, weighted by exp(temperature *
    violation)."""
    active = ops.logical_and(mask, violations > 0)
    logits = temperature * ops.stop_gradient(violations)
    shares = logits - pairwise.masked_logsumexp(logits, active, axis=1)[:, None]
    weights = ops.where(active, ops.exp(ops.where(active, shares, 0.0)), 0.0)
    return ops.sum(ops.stop_gradient(weights) * ops.where(active, violations, 0.0), axis=1)


# Within the root of a variance, as in the paper: its gradient stays finite where a coordinate is
# constant.
_EPSILON = 1e-4


@register("loss", alias="vicreg")
class VICRegLoss(PairLoss):
    """Variance-invariance-covariance regularization, with labels: positive pairs take the place of
    two views.

    L = invariance (1/|P|) sum over ordered positive pairs of |x_i - x_j|^2 / d
      + variance (1/d) sum over coordinates c of [deviation - sqrt(Var(x_c) + 0.0001)]_+
      + covariance (1/d) sum over c != c' of Cov(x_c, x_c')^2

    with variances and covariances over the batch, divided by B - 1. It needs no negatives:
    coordinates that vary and are not correlated keep the embeddings from one point. Squared
    distances are divided by d, as in the authors' code and pytorch-metric-learning.

    The paper has two batches, of the two views of each image. The authors' code averages their
    variance terms and adds up their covariance terms, with weights 25, 25 and 1. Here there is one
    batch with each term once, so that the same weights are 25, 25 and 2, the defaults.

    Made for embeddings that are not normalized (`representation="projection"` of an `Embedder`).
    The coordinates of unit vectors deviate by at most about d^-0.5: give that as `deviation`. Takes
    O(B^2 + d^2) memory: 4,096 images at once are well possible.

    Args:
        invariance: The weight of the positive pairs.
        variance: The weight of the coordinates' variances.
        covariance: The weight of their covariances.
        deviation: The standard deviation that each coordinate is to have.
        reduction: `"sum"` gives the sum over ordered positive pairs, and the other terms for each
            image.

    Raises:
        ValueError: An argument is negative.

    Example:
        >>> loss = VICRegLoss(invariance=1.0, variance=1.0, covariance=1.0)
        >>> float(loss([0, 0, 1], [[1.0, 0.0], [1.0, 0.0], [0.0,
        ...     1.0]]))  # 0 + (1 - 0.5774) + 0.3333^2
        0.5336742

    Source: Bardes, Ponce, LeCun, "VICReg: Variance-Invariance-Covariance Regularization for
    Self-Supervised Learning", ICLR 2022, sec. 4.
    """

    distance = "sqeuclidean"
    fixed = ("distance",)
    within_batch = True

    def __init__(self, invariance=25.0, variance=25.0, covariance=2.0, deviation=1.0, **kwargs):
        super().__init__(**kwargs)
        self.invariance = number("invariance", invariance, at_least=0)
        self.variance = number("variance", variance, at_least=0)
        self.covariance = number("covariance", covariance, at_least=0)
        self.deviation = number("deviation", deviation, at_least=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        size, dim = (ops.cast(length, "float32") for length in ops.shape(pairs.references))
        pull = self.over_pairs(pairs, pairs.distances("sqeuclidean") / dim, pairs.positives)
        centered = pairs.references - ops.mean(pairs.references, axis=0, keepdims=True)
        covariances = pairwise.matmul(ops.transpose(centered), centered) / ops.maximum(
            size - 1.0, 1.0
        )
        variances = ops.diagonal(covariances)
        shortfall = ops.mean(ops.relu(self.deviation - ops.sqrt(variances + _EPSILON)))
        between = ops.sum(ops.square(covariances - ops.diag(variances))) / dim
        # The last two are of the batch: they stand in the value of every image.
        return self.invariance * pull + self.variance * shortfall + self.covariance * between
