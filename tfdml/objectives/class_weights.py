"""Objectives that learn weights for each class: linear heads, boundaries, centers, and those of
face recognition."""

import math

import keras
from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import boolean, integer, number
from tfdml.losses import ArcFaceLoss, NormSoftmaxLoss, SoftTripleLoss
from tfdml.losses.base import nan_if_any
from tfdml.losses.classification import refuse_unknown_classes, target_mask
from tfdml.losses.contrastive import margin_hinges
from tfdml.objectives.base import ProxyLoss, ReducedObjective
from tfdml.objectives.regularizers import of_own_class
from tfdml.registry import register
from tfdml.workarounds import add_undecayed_weight


@register("objective")
class InstanceLoss(ReducedObjective):
    """Classification by a learned linear head: cross-entropy of W x.

    L = -log( e^{w_y.x} / sum_j e^{w_j.x} ), averaged over the batch.

    In the paper every instance (an image with its descriptions) is a class of its own, so that
    images of one class are distinguished by what is their own: give it labels of instances
    (`labels = arange(N)`) and as many classes. With labels of classes it is the plain softmax loss.
    `NormSoftmaxLoss` is the same with vectors x and w_j of length 1 and a fixed scale in the place
    of the lengths. On unit embeddings, as an `Embedder` gives them, the lengths of the w_j are the
    scale, and are learned; `representation="projection"` reads embeddings before normalization.

    Args:
        num_classes: C, the number of instances or classes; labels must lie in 0 .. C - 1.
        representation: What is classified.
        reduction: `"mean"` over the images, or `"sum"`.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> objective = InstanceLoss(num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))},
        ...     keras.ops.arange(4)).shape)
        ()

    Source: Zheng et al., "Dual-Path Convolutional Image-Text Embeddings with Instance Loss", ACM
    TOMM 2020.
    """

    per_image = True

    def __init__(self, num_classes, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = integer("num_classes", num_classes, at_least=1)

    def build_from(self, shapes):
        """Create the head."""
        size = shapes[self.representation][-1]
        bound = 1.0 / math.sqrt(size)
        uniform = keras.initializers.RandomUniform(-bound, bound)
        self.head = self.add_weight(
            name="head", shape=(self.num_classes, size), initializer=uniform
        )

    def compute(self, representations, labels):
        """One value per image."""
        refuse_unknown_classes(labels, self.num_classes, self.name)
        logits = pairwise.dot_products(representations[self.representation], self.head)
        return NormSoftmaxLoss(scale=1.0).call(labels, logits)


@register("objective")
class LearnedMargin(ReducedObjective):
    """Margin loss whose boundary between positives and negatives is learned for each class.

    L = (1/#active) sum over positive pairs (a, p) of
        [d_ap - beta_c + alpha]_+ + [beta_c + alpha - d_an]_+ + nu beta_c,   c the class of a

    with Euclidean distances and one distance-weighted negative n per ordered positive pair, in
    expectation over the draw, as in `tfdml.losses.MarginLoss`, whose beta is fixed. #active is the
    number of hinges above 0.

    nu > 0 draws the boundaries inwards. The authors train beta at a rate of its own, 0.1. A label
    outside 0 .. num_classes - 1 makes the value NaN, so that the mistake cannot pass unseen.

    Args:
        num_classes: The number of training classes.
        alpha: The margin on either side of the boundary.
        beta: Where every boundary starts.
        nu: The weight of the boundaries themselves.
        representation: The representation that it reads.
        reduction: `"mean"` over the active hinges, or `"sum"`.

    Raises:
        ValueError: `alpha` is negative, or an argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> # [1.4 - sqrt(0.4)]_+ of the second image is active
        >>> objective = LearnedMargin(num_classes=2)
        >>> float(objective({"embedding": embeddings}, keras.ops.array([0, 0, 1])))
        0.7675445

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """

    learns_from = ("positive", "negative")

    def __init__(self, num_classes, alpha=0.2, beta=1.2, nu=0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.alpha = number("alpha", alpha, at_least=0)
        self.initial_beta = number("beta", beta, at_least=0, at_most=2)
        self.nu = number("nu", nu, at_least=0)

    def build_from(self, shapes):
        """Create the boundaries."""
        start = keras.initializers.Constant(self.initial_beta)
        shape = (self.num_classes,)
        self.beta = add_undecayed_weight(self, name="beta", shape=shape, initializer=start)

    def compute_pairs(self, pairs):
        """Compute the mean (or sum) over the expected hinges."""
        batch = pairs[self.representation]
        beta = of_own_class(self.beta, batch.anchor_labels)[:, None]
        rows, active = margin_hinges(batch, self.alpha, beta)
        num_positives = pairwise.masked_count(batch.positives, axis=1)[:, None]
        total = ops.sum(rows) + self.nu * ops.sum(num_positives * beta)
        if self.reduction == "sum":
            return total
        active = batch.total(active)
        return total / ops.where(active > 0, active, 1.0)

    def get_config(self):
        """Return the arguments."""
        return {**super().get_config(), "beta": self.initial_beta}


@register("objective")
class RegularizedSoftTriple(ProxyLoss):
    """SoftTriple with its regularizer, which merges the centers of a class that needs fewer than it
    has.

    L = SoftTripleLoss + tau / (C K (K - 1)) sum over classes c, centers s < t of c, of sqrt(2 - 2
    w_cs.w_ct)

    with K unit centers w_c per class. Where two centers coincide, the root has the gradient 0 here
    (the authors add 1e-5 under it). `reduction="sum"` makes the whole value a sum over images, B
    times the mean, as in `ProxyLoss`.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        proxies_per_class: K. The paper starts from 10 (CUB, CARS) and 2 (SOP).
        scale: The loss's lambda.
        gamma: The loss's softness of the choice among centers.
        margin: The loss's delta.
        tau: The regularizer's weight.
        reduction: `"mean"` over the images, or `"sum"`.
        representation: What the centers are compared with.

    Raises:
        ValueError: An argument is out of range, or `sample` is below 1.

    Example:
        >>> objective = RegularizedSoftTriple(num_classes=98, proxies_per_class=10)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))},
        ...     keras.ops.arange(4)).shape)
        ()

    Source: Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV
    2019, sec. 3.3.
    """

    fixed = ("loss", "sample")

    def __init__(
        self,
        num_classes,
        proxies_per_class=10,
        scale=20.0,
        gamma=0.1,
        margin=0.01,
        tau=0.2,
        reduction="mean",
        **kwargs,
    ):
        loss = SoftTripleLoss(scale, gamma, margin, reduction=reduction)
        super().__init__(loss, num_classes, proxies_per_class, **kwargs)
        self.scale = loss.scale
        self.gamma = loss.gamma
        self.margin = loss.margin
        self.tau = number("tau", tau, at_least=0)
        if self.sample < 1:
            raise ValueError(
                f"{self.name}: its regularizer reads the centers of all classes; take "
                "SoftTripleLoss"
            )

    def regularizer(self):
        """Return the mean over classes of the distances between their centers, without tau."""
        classes, centers = self.num_classes, self.proxies_per_class
        if centers == 1:
            return ops.zeros((), "float32")
        unit = pairwise.l2_normalize(self.class_proxies.proxies)
        products = pairwise.matmul(unit, ops.transpose(unit, (0, 2, 1)))
        # Lengths from the same product, so that centers that coincide are at a distance of exactly
        # 0.
        lengths = ops.diagonal(products, axis1=1, axis2=2)
        squared = ops.maximum(lengths[:, :, None] + lengths[:, None, :] - 2.0 * products, 0.0)
        below = ops.arange(centers)[:, None] < ops.arange(centers)[None, :]
        return pairwise.masked_sum(pairwise.safe_sqrt(squared), below[None]) / (
            classes * centers * (centers - 1)
        )

    def compute(self, representations, labels):
        """One value per image, the regularizer in each."""
        return super().compute(representations, labels) + self.tau * self.regularizer()


@register("objective")
class CurricularFace(ProxyLoss):
    """ArcFace in which hard negatives weigh little at first, and more later in training.

    L = -log( e^{s cos(theta_y + m)} / ( e^{s cos(theta_y + m)} + sum_{j != y} e^{s N_j} ) ),
    N_j = cos_j where cos_j <= cos(theta_y + m) (an easy negative), (t + cos_j) cos_j elsewhere (a
    hard one), t <- (1 - momentum) t + momentum mean(cos_y), over the global batch, before the loss
    of a training step

    averaged over the batch. As in `ArcFaceLoss`, cos(theta_y) - m sin(m) takes the place of
    cos(theta_y + m) beyond pi. t starts at 0; it is a weight that is not trained: saved with the
    learner, float32 under every dtype policy, the same on every replica, and left as it is in
    evaluation.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        scale: s.
        margin: m in radians, in [0, pi / 2].
        momentum: The share of the newest batch in t. The authors' code takes 0.01.
        reduction: `"mean"` over the images, or `"sum"`.
        representation: What the proxies are compared with.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> objective = CurricularFace(num_classes=98, scale=32.0)
        >>> value = objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4),
        ...     training=True)
        >>> bool(keras.ops.abs(objective.t) < 0.01)
        True

    Source: Huang et al., "CurricularFace: Adaptive Curriculum Learning Loss for Deep Face
    Recognition", CVPR 2020, sec. 3; t starts and moves as in the authors' code.
    """

    fixed = ("loss", "proxies_per_class")

    def __init__(
        self, num_classes, scale=64.0, margin=0.5, momentum=0.01, reduction="mean", **kwargs
    ):
        loss = ArcFaceLoss(scale, margin, reduction=reduction)
        super().__init__(loss, num_classes, 1, **kwargs)
        self.scale, self.margin = loss.scale, loss.margin
        self.momentum = number("momentum", momentum, above=0, at_most=1)

    def build_from(self, shapes):
        """Create the proxies and t."""
        super().build_from(shapes)
        self.t = self.add_weight(
            name="t", shape=(), initializer="zeros", trainable=False, aggregation="mean"
        )

    def update(self, representations, labels):
        """Move t toward the mean cosine of the images of all replicas to their own proxies."""
        similarities = ops.stop_gradient(representations["class"])
        mask = target_mask(labels, ops.shape(similarities)[1])
        # Of (sum, count), as replicas may hold unequal numbers of images.
        parts = ops.stack([pairwise.masked_sum(similarities, mask), pairwise.masked_count(mask)])
        total, count = ops.unstack(ops.sum(replicas.gather(parts[None, :]), axis=0), 2)
        average = (1.0 - self.momentum) * self.t + self.momentum * total / ops.maximum(count, 1.0)
        self.t.assign(ops.where(count > 0, average, self.t))

    def image_values(self, representations, labels):
        """One value per image, with t as it is."""
        similarities = representations["class"]
        mask = target_mask(labels, ops.shape(similarities)[1])
        logits = self.loss.logits(similarities, mask)
        cosines = ops.clip(pairwise.masked_sum(similarities, mask, axis=1), -1.0, 1.0)
        # What is hard is judged by cos(theta_y + m) even beyond pi, as in the authors' code.
        threshold = ops.stop_gradient(self.loss.shifted(cosines))
        hard = ops.logical_and(ops.logical_not(mask), similarities > threshold[:, None])
        reweighed = (
            self.loss.scale
            * (ops.stop_gradient(ops.convert_to_tensor(self.t)) + similarities)
            * similarities
        )
        return NormSoftmaxLoss(scale=1.0).call(labels, ops.where(hard, reweighed, logits))


@register("objective")
class SphereFace2(ProxyLoss):
    """A binary classification for each class, "is it of this class", in the place of one among all
    classes.

    L = (lambda / r) ln(1 + exp(-(r (g(cos_y) - m) + b)))
        + ((1 - lambda) / r) sum over j != y of ln(1 + exp(r (g(cos_j) + m) + b)),
        g(z) = 2 ((z + 1) / 2)^t - 1

    averaged over the batch (SphereFace2-C). b, one for all classes, is learned. It starts where
    images that are alike to no proxy pull as much as they push. The gradient of an image and a
    class needs no other class. The authors' code multiplies the value by 50 (`50 * sphere_face2` on
    the command line, `weight=50` here).

    As in the authors' code, g and m change the value but carry no gradient: d logit / d cos is r
    everywhere, and not r g'(cos), which vanishes at opposite directions and is t times as steep at
    equal ones. The paper's formula does not show this. `detached=False` differentiates the formula
    as printed.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        scale: r.
        margin: m, a difference of adjusted cosines, in [0, 2].
        balance: lambda, the weight of the own class, above 0 and below 1.
        adjustment: t, how strongly similarities are spread; 1 leaves cosines as they are.
        detached: Whether the gradient passes g by, as in the authors' code.
        reduction: `"mean"` over the images, or `"sum"`.
        representation: What the proxies are compared with.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> objective = SphereFace2(num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))},
        ...     keras.ops.arange(4)).shape)
        ()

    Source: Wen et al., "SphereFace2: Binary Classification is All You Need for Deep Face
    Recognition", ICLR 2022, sec. 3; the start of b, and what carries a gradient, from the authors'
    code (OpenSphere).
    """

    fixed = ("loss", "proxies_per_class")

    def __init__(
        self,
        num_classes,
        scale=40.0,
        margin=0.4,
        balance=0.7,
        adjustment=3.0,
        reduction="mean",
        detached=True,
        **kwargs,
    ):
        loss = NormSoftmaxLoss(scale, reduction=reduction)
        super().__init__(loss, num_classes, 1, **kwargs)
        self.scale = self.loss.scale
        self.margin = number("margin", margin, at_least=0, at_most=2)
        self.balance = number("balance", balance, above=0, below=1)
        self.adjustment = number("adjustment", adjustment, at_least=1)
        self.detached = boolean("detached", detached)

    def build_from(self, shapes):
        """Create the proxies and the bias."""
        super().build_from(shapes)
        start = keras.initializers.Constant(self.balanced_bias())
        self.bias = add_undecayed_weight(self, name="bias", shape=(), initializer=start)

    def balanced_bias(self) -> float:
        """Return the b at which, with all cosines 0, the pull of the own class and the push of the
        others are equal.

        lambda sigmoid(-(a_y + b)) = (1 - lambda) (C - 1) sigmoid(a_j + b), a quadratic equation in
        e^b, with a_y and a_j = r (g(0) -+ m).
        """
        at_zero = 2.0 * 0.5**self.adjustment - 1.0
        positive = self.scale * (at_zero - self.margin)
        negative = self.scale * (at_zero + self.margin)
        if self.num_classes == 1:
            return -positive
        num_negatives = max(self.sample * self.num_classes - 1, 1)
        ratio = self.balance / ((1.0 - self.balance) * num_negatives)
        gap = math.exp((positive - negative) / 2.0)
        root = math.hypot(1.0 - ratio, 2.0 * math.sqrt(ratio) * gap)
        # Each form without the difference of nearly equal numbers.
        if ratio > 1.0:
            return math.log((ratio - 1.0 + root) / 2.0) - positive
        return math.log(2.0 * ratio / (1.0 - ratio + root)) - negative

    def image_values(self, representations, labels):
        """One value per image."""
        similarities = ops.clip(representations["class"], -1.0, 1.0)
        mask = target_mask(labels, ops.shape(similarities)[1])
        # Above 0, so that the power of a half has a finite slope.
        adjusted = (
            2.0 * ops.power(ops.maximum((similarities + 1.0) / 2.0, 1e-7), self.adjustment) - 1.0
        )
        if self.detached:
            adjusted = similarities + ops.stop_gradient(adjusted - similarities)
        pull = ops.softplus(-(self.scale * (adjusted - self.margin) + self.bias))
        push = ops.softplus(self.scale * (adjusted + self.margin) + self.bias)
        costs = ops.where(mask, self.balance * pull, (1.0 - self.balance) * push)
        values = ops.sum(costs, axis=1) / self.scale
        return ops.where(
            ops.any(mask, axis=1), values + nan_if_any(similarities, axis=1), float("nan")
        )
