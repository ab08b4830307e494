"""Losses that weigh a positive against all negatives of its anchor: N-pair, NT-Xent, lifted
structure, circle."""

import math

from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.losses.base import CosinePairLoss, PairLoss
from tfdml.mining import multi_similarity_pairs
from tfdml.registry import register


@register("loss", alias="npair")
class NPairLoss(PairLoss):
    """N-pair loss on dot products.

    L = (1/|P|) sum over positive pairs (a, p) of ln(1 + sum over negatives n of a of exp(x_a.x_n -
    x_a.x_p))
        + l2 (1/B) sum over a of |x_a|^2

    over ordered pairs. Made for embeddings that are not normalized (`representation="projection"`
    of an `Embedder`): on unit vectors the exponents stay within +-2. `scale` instead normalizes
    them and then stretches them to one length, so that the exponents reach +-2 scale^2 and no
    length can run away: the ECAML authors' code does so with 10, and takes the mean.

    With two images per class, each is an anchor once and the other its positive. All images of
    other classes are negatives, as in eq. 9 of the ECAML paper; Sohn's formula, TensorFlow Addons
    and pytorch-metric-learning take one image of each other class. Classes with more images give
    all their pairs.

    Args:
        l2: The weight of the squared length of the embeddings, which keeps them from growing; Sohn
            uses 0.002 to 0.003.
        scale: The length that every embedding is given; None leaves them as they are.
        reduction: `"sum"` gives the plain sums over positive pairs and over images.

    Raises:
        ValueError: `l2` is negative or `scale` not positive; or both are given, though the length
            is then fixed.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
        >>> float(NPairLoss()([0, 0, 1, 1], embeddings))  # ln(1 + 2 / e)
        0.5514447
        >>> float(NPairLoss(scale=2.0)([0, 0, 1, 1], embeddings))  # ln(1 + 2 / e^4)
        0.0359763

    Source: Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016,
    sec. 3.2; Chen and Deng, AAAI 2019, eq. 9; Li et al., "Deep Metric Learning with Density
    Adaptivity", eq. 4.
    """

    distance = "dot"
    fixed = ("distance",)

    def __init__(self, l2=0.0, scale=None, **kwargs):
        super().__init__(**kwargs)
        if scale is not None and l2:
            raise ValueError(
                "l2 has no effect on embeddings whose length scale= fixes: give one of the two"
            )
        self.l2 = number("l2", l2, at_least=0)
        self.scale = None if scale is None else number("scale", scale, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        if self.scale is not None:
            pairs = pairs.map(lambda x: self.scale * pairwise.l2_normalize(x))
        products = pairs.products()
        negatives = pairwise.masked_logsumexp(products, pairs.negatives, axis=1)
        rows = self.over_pairs(pairs, ops.softplus(negatives[:, None] - products), pairs.positives)
        return rows + self.l2 * ops.sum(ops.square(pairs.anchors), axis=1) if self.l2 else rows


@register("loss")
class AngularLoss(CosinePairLoss):
    """Angular loss: the angle at the negative of the triangle anchor, positive, negative is bounded
    by alpha.

    L = (1/|P|) sum over positive pairs (a, p) of ln(1 + sum over negatives n of exp(f_apn)),
    f_apn = 4 tan^2(alpha) (x_a + x_p).x_n - 2 (1 + tan^2(alpha)) x_a.x_p

    over ordered pairs and L2-normalized embeddings (the loss normalizes them). A positive pair has
    the same negatives from both ends, so that the sum over n is an entry of a product of two (B, B)
    matrices: no B^3 tensor.

    All images of other classes are negatives, of which a miner keeps those that it keeps from both
    ends of a pair. Each image of a pair is the anchor once; the paper's batches hold one
    pair of each class. The paper's combination with N-pair is `NPairLoss()` plus 2 times this loss.

    Args:
        alpha_degrees: The upper bound of the angle, above 0 and at most 65 (beyond, exponents leave
            float32). The paper uses 36 to 55, mostly 45.
        reduction: `"sum"` gives the plain sum over positive pairs.

    Raises:
        ValueError: `alpha_degrees` is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(AngularLoss(alpha_degrees=45)([0, 0, 1], embeddings))  # ln(1 + exp(-4))
        0.0181499

    Source: Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017, sec. 3.
    """

    whole_batch = within_batch = True

    def __init__(self, alpha_degrees=45.0, **kwargs):
        super().__init__(**kwargs)
        self.alpha_degrees = number("alpha_degrees", alpha_degrees, above=0, at_most=65)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        squared_tangent = math.tan(math.radians(self.alpha_degrees)) ** 2
        cosines = pairs.cosines()
        negatives = pairs.negatives
        positives = ops.logical_and(pairs.positives, ops.any(negatives, axis=1, keepdims=True))
        scaled = 4.0 * squared_tangent * cosines
        # exp(c s_an) exp(c s_pn), each relative to its row's largest: at 65 degrees the product is
        # above e^-74.
        largest = ops.stop_gradient(
            ops.max(ops.where(negatives, scaled, -1e30), axis=1, keepdims=True, initial=-1e30)
        )
        # Masked and not clipped at 0: fused arithmetic may put the largest a hair above itself, and
        # lose its gradient.
        relative = ops.where(negatives, ops.exp(ops.where(negatives, scaled - largest, 0.0)), 0.0)
        summed = pairwise.matmul(relative, ops.transpose(relative))
        # Where labels are sets, the two may have no negative in common.
        positives = ops.logical_and(positives, summed > 0)
        summed = ops.where(positives, summed, 1.0)
        over_negatives = ops.log(summed) + largest + ops.transpose(largest)
        exponents = over_negatives - 2.0 * (1.0 + squared_tangent) * cosines
        return self.over_pairs(pairs, ops.softplus(ops.where(positives, exponents, 0.0)), positives)


@register("loss", alias="infonce")
class NTXentLoss(CosinePairLoss):
    """Normalized temperature-scaled cross-entropy (InfoNCE) on cosines s, with one term for each
    positive pair.

    L = -(1/|P|) sum over positive pairs (a, p) of
        ln( exp(s_ap / t) / ( exp(s_ap / t) + sum over negatives n of a of exp(s_an / t) ) )

    over ordered pairs. Equals pytorch-metric-learning's `NTXentLoss`; with two views of each image
    as a class, it is SimCLR's loss. `SupConLoss` has the anchor's other positives in the
    denominator too, so that they push each other away, and weighs anchors alike where this loss
    weighs pairs alike. `NPairLoss(scale=t ** -0.5)` is the same function of all pairs. A pair whose
    anchor has no negative costs nothing. Takes O(B^2) memory: 4,096 images at once are well
    possible.

    Args:
        temperature: t. SimCLR takes 0.1 on ImageNet.
        reduction: `"sum"` gives the plain sum over ordered positive pairs.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(NTXentLoss(temperature=1.0)([0, 0, 1], embeddings))  # ln(1 + 1 / e)
        0.3132617

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations",
    ICML 2020, eq. 1; van den Oord, Li, Vinyals, "Representation Learning with Contrastive
    Predictive Coding", 2018, eq. 4.
    """

    def __init__(self, temperature=0.07, **kwargs):
        super().__init__(**kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        logits = cosines / self.temperature
        # Relative to each positive, so that a sure pair keeps its digits.
        relative = pairwise.masked_logsumexp(logits, negatives, axis=1)[:, None] - logits
        return self.over_pairs(pairs, ops.softplus(relative), positives)


@register("loss")
class SoftNearestNeighborLoss(PairLoss):
    """Soft nearest neighbor loss: how likely an anchor's neighbor, drawn by distance, is of another
    class.

    L_a = -ln( sum over positives p of exp(-d_ap / T) / sum over all j != a of exp(-d_aj / T) )

    averaged over the anchors that have a positive; others are 0. One near positive is enough for an
    anchor, so that a class may be made of several groups. (`NTXentLoss` asks it of every positive.)
    Takes O(B^2) memory: 4,096 images at once are well possible.

    Args:
        temperature: T, in units of `distance`: for squared distances of unit vectors twice what it
            is for cosines. The authors' code starts at 100 and learns T by gradient descent, on
            features of any length. Squared distances of unit vectors are at most 4, which T = 100
            makes all alike. So T is fixed here, at 0.2, which on cosines is SimCLR's 0.1.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: `temperature` is not positive, or `distance` none of these.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(SoftNearestNeighborLoss(temperature=2.0)([0, 0, 1],
        ...     embeddings))  # ln(1 + e^(-2 / 2))
        0.3132617

    Source: Frosst, Papernot, Hinton, "Analyzing and Improving Representations with the Soft Nearest
    Neighbor Loss", ICML 2019, sec. 2.
    """

    def __init__(self, temperature=0.2, distance="sqeuclidean", **kwargs):
        super().__init__(distance=distance, **kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        logits = -distances / self.temperature
        # ln(1 + others / positives), which keeps its digits where the anchor is sure.
        values = ops.softplus(
            pairwise.masked_logsumexp(logits, negatives, 1)
            - pairwise.masked_logsumexp(logits, positives, 1)
        )
        return self.over_pairs(pairs, values[:, None], ops.any(positives, axis=1)[:, None])


@register("loss")
class TupletMarginLoss(CosinePairLoss):
    """Tuplet margin loss: a positive, brought nearer by an angle, among all negatives of its
    anchor; on cosines.

    L = (1/|P|) sum over positive pairs (a, p) of
          ln(1 + sum over negatives n of a of exp(s (cos(theta_an) - cos(theta_ap - margin))))
        + variance_weight ( (1/|P|) sum over P of [(1 - e) mean_P - cos]_+^2
                          + (1/|N|) sum over N of [cos - (1 + e) mean_N]_+^2 )

    over ordered pairs, with mean_P and mean_N the mean cosines of the batch's positive and negative
    pairs, which carry a gradient. The margin is slack and no demand: a positive within it is pushed
    outwards, so that hard positives do not make classes collapse. The first line is
    pytorch-metric-learning's `TupletMarginLoss`, the second the sum of the two parts of its
    `IntraPairVarianceLoss`. The paper's tuplets hold one image of each other class; here, as there,
    all images of other classes are negatives. Takes O(B^2) memory: 4,096 images at once are well
    possible.

    Args:
        margin_degrees: The slack angle, 0 to 90; 5.73 is the paper's 0.1.
        scale: s. The paper uses 32 on CUB-200 and Cars-196 (default), and 64 on the larger data
            sets, which is pytorch-metric-learning's default.
        variance_weight: The weight of the intra-pair variance, 0.5 as in the paper; 0 leaves it
            out.
        variance_slack: e, how far from the mean a pair may be at no cost, as a share of the mean.
        reduction: `"sum"` gives the plain sums over ordered pairs.

    Raises:
        ValueError: `scale` is not positive, a weight is negative, or an argument is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> loss = TupletMarginLoss(margin_degrees=60, scale=1.0, variance_weight=0.0)
        >>> float(loss([0, 0, 1], embeddings))  # ln(1 + e^(0 - 1 / 2))
        0.4740770

    Source: Yu and Tao, "Deep Metric Learning with Tuplet Margin Loss", ICCV 2019, sec. 3.
    """

    def __init__(
        self, margin_degrees=5.73, scale=32.0, variance_weight=0.5, variance_slack=0.01, **kwargs
    ):
        super().__init__(**kwargs)
        self.margin_degrees = number("margin_degrees", margin_degrees, at_least=0, at_most=90)
        self.scale = number("scale", scale, above=0)
        self.variance_weight = number("variance_weight", variance_weight, at_least=0)
        self.variance_slack = number("variance_slack", variance_slack, at_least=0, at_most=1)
        # The mean cosines of the batch carry a gradient.
        self.whole_batch = self.variance_weight > 0

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        push = pairwise.masked_logsumexp(self.scale * cosines, negatives, axis=1)
        rows = self.over_pairs(
            pairs, ops.softplus(push[:, None] - self.scale * self._with_slack(pairs)), positives
        )
        return rows + self.variance_weight * self._variance(pairs)

    def _with_slack(self, pairs):
        """cos(theta - margin)."""
        margin = math.radians(self.margin_degrees)
        unit = pairs.map(pairwise.l2_normalize)
        anchors, references = (
            ops.any(vectors != 0, axis=1) for vectors in (unit.anchors, unit.references)
        )
        # 1 - cos as half a squared distance, which is exactly 0 for duplicates: the sine is steep
        # there.
        nonzero = ops.logical_and(anchors[:, None], references[None, :])
        apart = ops.where(nonzero, 0.5 * unit.distances("sqeuclidean"), pairs.distances("cosine"))
        sines = pairwise.safe_sqrt(apart * (2.0 - apart))
        return (1.0 - apart) * math.cos(margin) + sines * math.sin(margin)

    def _variance(self, pairs):
        if not self.variance_weight:
            return 0.0
        cosines = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        least = (1.0 - self.variance_slack) * pairwise.masked_mean(cosines, positives)
        most = (1.0 + self.variance_slack) * pairwise.masked_mean(cosines, negatives)
        pull = self.over_pairs(pairs, ops.square(ops.relu(least - cosines)), positives)
        return pull + self.over_pairs(pairs, ops.square(ops.relu(cosines - most)), negatives)


@register("loss")
class MultiSimilarityLoss(CosinePairLoss):
    """Multi-similarity loss on cosines s, with its mining of pairs.

    L = (1/B) sum over anchors i of (1/alpha) ln(1 + sum over mined positives of exp(-alpha (s_ik -
    base)))
                          + (1/beta) ln(1 + sum over mined negatives of exp(beta (s_ik - base)))

    The mean is over all anchors, mined or not, as in the paper's equation and the authors' code.
    The pairs are those of `tfdml.mining.multi_similarity_pairs`. pytorch-metric-learning has the
    same loss with its miner given apart.

    Args:
        alpha: Steepness for positives.
        beta: Steepness for negatives.
        base: lambda, the similarity that separates positives from negatives.
        mining_epsilon: The miner's slack; None takes all pairs.
        reduction: `"sum"` gives the sum over anchors.
        mining: As of `PairLoss`; `"multi_similarity"`, the paper's, by default.

    Raises:
        ValueError: `alpha` or `beta` is not positive.

    Example:
        >>> loss = MultiSimilarityLoss(mining_epsilon=None)
        >>> float(loss([0, 0], [[1.0, 0.0], [1.0, 0.0]]))  # ln(1 + exp(-1)) / 2
        0.1566308

    Source: Wang et al., "Multi-Similarity Loss with General Pair Weighting", CVPR 2019, sec. 4.
    """

    own_mining = ("multi_similarity", "all")

    def __init__(self, alpha=2.0, beta=50.0, base=0.5, mining_epsilon=0.1, **kwargs):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, above=0)
        self.beta = number("beta", beta, above=0)
        self.base = number("base", base)
        self.mining_epsilon = (
            None if mining_epsilon is None else number("mining_epsilon", mining_epsilon, at_least=0)
        )

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        similarities = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        if self.mining == "multi_similarity" and self.mining_epsilon is not None:
            kept = multi_similarity_pairs(pairs, self.mining_epsilon)
            positives, negatives = kept.positives, kept.negatives
        offsets = similarities - self.base
        pull = (
            ops.softplus(pairwise.masked_logsumexp(-self.alpha * offsets, positives, axis=1))
            / self.alpha
        )
        push = (
            ops.softplus(pairwise.masked_logsumexp(self.beta * offsets, negatives, axis=1))
            / self.beta
        )
        return pull + push


@register("loss")
class LiftedStructureLoss(PairLoss):
    """Lifted structured loss on Euclidean distances.

    L = (1 / 2|P|) sum over positive pairs (i, j) of [J_ij]_+^2,
    J_ij = d_ij + ln( sum over negatives k of i, exp(margin - d_ik) + sum over negatives l of j,
    exp(margin - d_jl) )

    Equals TensorFlow Addons' `lifted_struct_loss` wherever that is defined. A pair without any
    negative costs nothing.

    Args:
        margin: Negatives count from about this distance on.
        reduction: `"sum"` gives half the sum over ordered pairs, that is the sum over unordered
            ones.

    Raises:
        ValueError: `margin` is negative.

    Example:
        >>> embeddings = [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        >>> float(LiftedStructureLoss(margin=1.0)([0, 0, 1], embeddings))  # (ln 2)^2 / 2
        0.2402265

    Source: Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR
    2016, eq. 4.
    """

    whole_batch = within_batch = True

    def __init__(self, margin=1.0, **kwargs):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, at_least=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        push = pairwise.masked_logsumexp(self.margin - distances, negatives, axis=1)
        violation = ops.relu(distances + ops.logaddexp(push[:, None], push[None, :]))
        return self.over_pairs(pairs, 0.5 * ops.square(violation), positives)


@register("loss")
class GeneralizedLiftedStructureLoss(PairLoss):
    """Lifted structured loss with all positives of an anchor at once, "batch all lifted" with a
    smooth maximum.

    L = mean over anchors a of [ ln(sum over positives p of exp(d_ap - positive_margin))
                               + ln(sum over negatives n of exp(margin - d_an)) ]_+

    over the anchors that have a positive and a negative; others are 0. (pytorch-metric-learning
    counts an anchor that lacks one of them too, with its logarithm as 0.) Takes O(B^2) memory:
    4,096 images at once are well possible.

    Args:
        margin: How much further than positives negatives are to be; in units of `distance`.
        positive_margin: The distance up to which positives hardly count.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: A margin is negative, or `distance` none of these.

    Example:
        >>> embeddings = [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        >>> float(GeneralizedLiftedStructureLoss(margin=1.5)([0, 0, 1],
        ...     embeddings))  # 0 + (1.5 - 1)
        0.5

    Source: Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification",
    2017, sec. 2.
    """

    def __init__(self, margin=1.0, positive_margin=0.0, distance="euclidean", **kwargs):
        super().__init__(distance=distance, **kwargs)
        self.margin = number("margin", margin, at_least=0)
        self.positive_margin = number("positive_margin", positive_margin, at_least=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        pull = pairwise.masked_logsumexp(distances - self.positive_margin, positives, axis=1)
        push = pairwise.masked_logsumexp(self.margin - distances, negatives, axis=1)
        has_both = ops.logical_and(ops.any(positives, axis=1), ops.any(negatives, axis=1))
        return self.over_pairs(pairs, ops.relu(pull + push)[:, None], has_both[:, None])


@register("loss")
class CircleLoss(CosinePairLoss):
    """Circle loss on cosines s: each pair is weighted by how far it is from its optimum.

    L_i = ln(1 + sum over positives of exp(-gamma [1 + m - s_p]_+ (s_p - 1 + m))
               * sum over negatives of exp(gamma [s_n + m]_+ (s_n - m)))

    averaged over the anchors that have a positive and a negative (others are 0), as
    pytorch-metric-learning does by leaving zeros out. The weights [.]_+ carry no gradient, as in
    the paper.

    Args:
        margin: m, in [-1, 1]. The paper's fine-grained retrieval uses 0.4, its face recognition
            0.25.
        gamma: The scale: 80 and 256.
        reduction: `"sum"` gives the sum over anchors.

    Raises:
        ValueError: `gamma` is not positive or `margin` is out of range.

    Example:
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> float(CircleLoss(margin=0.4, gamma=1.0)([0, 0, 1],
        ...     embeddings))  # (ln(1 + e^-0.16) + ln(1 + e^0.48)) / 2
        0.7890093

    Source: Sun et al., "Circle Loss", CVPR 2020, sec. 3.
    """

    def __init__(self, margin=0.4, gamma=80.0, **kwargs):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, at_least=-1, at_most=1)
        self.gamma = number("gamma", gamma, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        similarities = pairs.cosines()
        positives, negatives = pairs.positives, pairs.negatives
        positive_weight = ops.stop_gradient(ops.relu(1.0 + self.margin - similarities))
        negative_weight = ops.stop_gradient(ops.relu(similarities + self.margin))
        pull = -self.gamma * positive_weight * (similarities - 1.0 + self.margin)
        push = self.gamma * negative_weight * (similarities - self.margin)
        values = ops.softplus(
            pairwise.masked_logsumexp(pull, positives, axis=1)
            + pairwise.masked_logsumexp(push, negatives, axis=1)
        )
        has_both = ops.logical_and(ops.any(positives, axis=1), ops.any(negatives, axis=1))
        return self.over_pairs(pairs, values[:, None], has_both[:, None])


@register("loss", alias="supcon")
class SupConLoss(CosinePairLoss):
    """Supervised contrastive loss on cosines s.

    L_i = -(1/|P_i|) sum over positives p of ln( exp(s_ip / t) / sum over all a != i of exp(s_ia /
    t) )

    averaged over the anchors that have a positive, as in pytorch-metric-learning; others are 0.
    This is the paper's L_out. The authors' code multiplies by t / 0.07 as well.

    Args:
        temperature: t.
        reduction: `"sum"` gives the sum over anchors, as the paper writes it.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> embeddings = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        >>> float(SupConLoss(temperature=1.0)([0, 0, 1], embeddings))  # ln(1 + 1 / e)
        0.3132617

    Source: Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, eq. 2.
    """

    def __init__(self, temperature=0.1, **kwargs):
        super().__init__(**kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def anchor_losses(self, pairs):
        """Compute one value per anchor: (b,)."""
        logits = pairs.cosines() / self.temperature
        positives = pairs.positives
        costs = pairwise.softmax_costs(logits, positives, pairs.negatives)
        values = pairwise.masked_mean(costs, positives, axis=1)
        has_positive = ops.any(positives, axis=1)
        return self.over_pairs(pairs, values[:, None], has_positive[:, None])
