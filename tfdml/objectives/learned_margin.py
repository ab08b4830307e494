"""Losses with weights of their own: the margin loss with learned boundaries, SoftTriple with its regulariser."""

from __future__ import annotations

import keras
from keras import ops
from typing_extensions import override

from tfdml import pairwise
from tfdml.arguments import integer, number, one_of
from tfdml.losses import SoftTripleLoss
from tfdml.losses.margin import margin_hinges
from tfdml.objectives.base import Objective
from tfdml.objectives.class_statistics import of_own_class
from tfdml.objectives.wrappers import ProxyLoss


@keras.saving.register_keras_serializable("tfdml")
class LearnedMargin(Objective):
    """Margin loss whose boundary between positives and negatives is learned for each class.

    L = (1/#active) sum over positive pairs (a, p) of
        [d_ap - beta_c + alpha]_+ + [beta_c + alpha - d_an]_+ + nu beta_c,   c the class of a

    with Euclidean distances and one distance-weighted negative n per ordered positive pair, in expectation over the
    draw, as in `tfdml.losses.MarginLoss`, whose beta is fixed. #active is the number of hinges above 0.

    nu > 0 draws the boundaries inwards. The authors train beta at a rate of its own, 0.1. A label outside
    0 .. num_classes - 1 makes the value NaN, so that the mistake cannot pass unseen.

    Args:
        num_classes: The number of training classes.
        alpha: The margin on either side of the boundary.
        beta: Where every boundary starts.
        nu: The weight of the boundaries themselves.
        representation: The representation that it reads.
        reduction: `"mean"` over the active hinges, or `"sum"`.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: `alpha` is negative, or an argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> objective = LearnedMargin(num_classes=2)  # [1.4 - sqrt(0.4)]_+ of the second image is active
        >>> float(objective({"embedding": embeddings}, keras.ops.array([0, 0, 1])))
        0.7675445

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """

    learns_from = ("positive", "negative")

    def __init__(
        self,
        num_classes,
        alpha=0.2,
        beta=1.2,
        nu=0.0,
        representation="embedding",
        reduction="mean",
        weight=1.0,
        name="learned_margin",
        **kwargs,
    ):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.alpha = number("alpha", alpha, at_least=0)
        self.initial_beta = number("beta", beta, at_least=0, at_most=2)
        self.nu = number("nu", nu, at_least=0)
        self.representation = representation
        self.reduction = reduction

    def build_from(self, shapes):
        """Create the boundaries."""
        del shapes
        start = keras.initializers.Constant(self.initial_beta)
        self.beta = self.add_weight(name="beta", shape=(self.num_classes,), initializer=start)

    def compute_pairs(self, pairs):
        """Computes the mean (or sum) over the expected hinges."""
        batch = pairs[self.representation]
        beta = of_own_class(self.beta, batch.anchor_labels)[:, None]
        rows, active = margin_hinges(batch, self.alpha, beta)
        num_positives = pairwise.masked_count(batch.positives, axis=1)[:, None]
        total = ops.sum(rows) + self.nu * ops.sum(num_positives * beta)
        if self.reduction == "sum":
            return total
        active = batch.total(active)
        return total / ops.where(active > 0, active, 1.0)

    @override
    def get_config(self):
        return {**super().get_config(), "beta": self.initial_beta}


@keras.saving.register_keras_serializable("tfdml")
class RegularizedSoftTriple(ProxyLoss):
    """SoftTriple with its regulariser, which merges the centres of a class that needs fewer than it has.

    L = SoftTripleLoss + tau / (C K (K - 1)) sum over classes c, centres s < t of c, of sqrt(2 - 2 w_cs.w_ct)

    with K unit centres w_c per class. Where two centres coincide, the root has the gradient 0 here (the authors add
    1e-5 under it). `reduction="sum"` makes the whole value a sum over images, B times the mean, as in `ProxyLoss`.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        proxies_per_class: K. The paper starts from 10 (CUB, CARS) and 2 (SOP).
        scale: The loss's lambda.
        gamma: The loss's softness of the choice among centres.
        margin: The loss's delta.
        tau: The regulariser's weight.
        reduction: As in Keras.
        representation: What the centres are compared with.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> objective = RegularizedSoftTriple(num_classes=98, proxies_per_class=10)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4)).shape)
        ()

    Source: Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV 2019, sec. 3.3.
    """

    def __init__(
        self,
        num_classes,
        proxies_per_class=10,
        scale=20.0,
        gamma=0.1,
        margin=0.01,
        tau=0.2,
        reduction="sum_over_batch_size",
        representation="embedding",
        weight=1.0,
        name="regularized_soft_triple",
        **kwargs,
    ):
        loss = SoftTripleLoss(scale, gamma, margin, reduction)
        super().__init__(loss, num_classes, proxies_per_class, representation, weight, name, **kwargs)
        self.tau = number("tau", tau, at_least=0)

    def regularizer(self):
        """The mean over classes of the distances between their centres, without tau."""
        classes, centres = self.num_classes, self.proxies_per_class
        if centres == 1:
            return ops.zeros((), "float32")
        unit = pairwise.l2_normalize(self.class_proxies.proxies)
        products = ops.matmul(unit, ops.transpose(unit, (0, 2, 1)))
        # Lengths from the same product, so that centres that coincide are at a distance of exactly 0.
        lengths = ops.diagonal(products, axis1=1, axis2=2)
        squared = ops.maximum(lengths[:, :, None] + lengths[:, None, :] - 2.0 * products, 0.0)
        below = ops.arange(centres)[:, None] < ops.arange(centres)[None, :]
        return pairwise.masked_sum(pairwise.safe_sqrt(squared), below[None]) / (classes * centres * (centres - 1))

    def compute(self, representations, labels):
        """One value per image, the regulariser in each."""
        return super().compute(representations, labels) + self.tau * self.regularizer()

    @override
    def get_config(self):
        loss = self.loss.get_config()
        return {**super().get_config(), **{key: loss[key] for key in ("scale", "gamma", "margin", "reduction")}}
