"""Losses of face recognition that keep something beside their proxies: CurricularFace's stage, SphereFace2's bias."""

from __future__ import annotations

import math

import keras
from keras import ops
from typing_extensions import override

from tfdml import pairwise, replicas
from tfdml.arguments import boolean, number
from tfdml.losses import ArcFaceLoss, NormSoftmaxLoss
from tfdml.losses.base import nan_if_any
from tfdml.losses.classification import ClassSimilarityLoss, target_mask
from tfdml.objectives.base import Stateful
from tfdml.objectives.wrappers import ProxyLoss


@keras.saving.register_keras_serializable("tfdml")
class CurricularFace(Stateful, ProxyLoss):
    """ArcFace in which hard negatives weigh little at first, and more as training goes on.

    L = -log( e^{s cos(theta_y + m)} / ( e^{s cos(theta_y + m)} + sum_{j != y} e^{s N_j} ) ),
    N_j = cos_j where cos_j <= cos(theta_y + m) (an easy negative), (t + cos_j) cos_j elsewhere (a hard one),
    t <- (1 - momentum) t + momentum mean(cos_y), over the global batch, before the loss of a training step

    averaged over the batch. As in `ArcFaceLoss`, cos(theta_y) - m sin(m) takes the place of cos(theta_y + m) beyond pi.
    t starts at 0; it is a weight that is not trained: saved with the learner, float32 under every dtype policy, the
    same on every replica, and left as it is in evaluation.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        scale: s.
        margin: m in radians, in [0, pi / 2].
        momentum: The share of the newest batch in t. The authors' code takes 0.01.
        reduction: As in Keras.
        representation: What the proxies are compared with.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> objective = CurricularFace(num_classes=98, scale=32.0)
        >>> value = objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4), training=True)
        >>> bool(keras.ops.abs(objective.t) < 0.01)
        True

    Source: Huang et al., "CurricularFace: Adaptive Curriculum Learning Loss for Deep Face Recognition", CVPR 2020,
    sec. 3; t starts and moves as in the authors' code.
    """

    def __init__(
        self,
        num_classes,
        scale=64.0,
        margin=0.5,
        momentum=0.01,
        reduction="sum_over_batch_size",
        representation="embedding",
        weight=1.0,
        name="curricular_face",
        **kwargs,
    ):
        loss = ArcFaceLoss(scale, margin, reduction=reduction)
        super().__init__(loss, num_classes, 1, representation, weight, name, **kwargs)
        self.momentum = number("momentum", momentum, above=0, at_most=1)

    def build_from(self, shapes):
        """Create the proxies and t."""
        super().build_from(shapes)
        self.t = self.add_weight(name="t", shape=(), initializer="zeros", trainable=False, aggregation="mean")

    def update(self, representations, labels):
        """Move t towards the mean cosine of the images of all replicas to their own proxies."""
        similarities = ops.stop_gradient(ops.cast(representations["class"], "float32"))
        own = target_mask(labels, self.num_classes)
        # Of (sum, count), as replicas may hold unequal numbers of images.
        parts = ops.stack([pairwise.masked_sum(similarities, own), pairwise.masked_count(own)])
        total, count = ops.unstack(ops.sum(replicas.gather(parts[None, :]), axis=0), 2)
        moved = (1.0 - self.momentum) * self.t + self.momentum * total / ops.maximum(count, 1.0)
        self.t.assign(ops.where(count > 0, moved, self.t))

    def image_values(self, representations, labels):
        """One value per image, with t as it is."""
        similarities = ops.cast(representations["class"], "float32")
        mask = target_mask(labels, self.num_classes)
        logits = self.loss.logits(similarities, mask)
        own = ops.clip(pairwise.masked_sum(similarities, mask, axis=1), -1.0, 1.0)
        # What is hard is judged by cos(theta_y + m) even beyond pi, as in the authors' code.
        threshold = ops.stop_gradient(self.loss.shifted(own))
        hard = ops.logical_and(ops.logical_not(mask), similarities > threshold[:, None])
        reweighed = self.loss.scale * (ops.stop_gradient(ops.convert_to_tensor(self.t)) + similarities) * similarities
        return _Given().call(labels, ops.where(hard, reweighed, logits))

    @override
    def get_config(self):
        return _with_loss(super().get_config(), self.loss, ("scale", "margin", "reduction"))


@keras.saving.register_keras_serializable("tfdml")
class SphereFace2(ProxyLoss):
    """A binary classification for each class, "is it of this class", in the place of one among all classes.

    L = (lambda / r) ln(1 + exp(-(r (g(cos_y) - m) + b)))
        + ((1 - lambda) / r) sum over j != y of ln(1 + exp(r (g(cos_j) + m) + b)),   g(z) = 2 ((z + 1) / 2)^t - 1

    averaged over the batch (SphereFace2-C). b, one for all classes, is learned. It starts where images that are alike
    to no proxy pull as much as they push. The gradient of an image and a class needs no other class. The authors' code
    multiplies the value by 50 (`50 * sphere_face2` on the command line, `weight=50` here).

    As in the authors' code, g and m change the value but carry no gradient: d logit / d cos is r everywhere, and not
    r g'(cos), which vanishes at opposite directions and is t times as steep at equal ones. The paper's formula does not
    show this. `detached=False` differentiates the formula as printed.

    Args:
        num_classes: C; labels must lie in 0 .. C - 1.
        scale: r.
        margin: m, a difference of adjusted cosines, in [0, 2].
        balance: lambda, the weight of the own class, above 0 and below 1.
        adjustment: t, how strongly similarities are spread; 1 leaves cosines as they are.
        detached: Whether the gradient passes g by, as in the authors' code.
        reduction: As in Keras.
        representation: What the proxies are compared with.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> objective = SphereFace2(num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4)).shape)
        ()

    Source: Wen et al., "SphereFace2: Binary Classification is All You Need for Deep Face Recognition", ICLR 2022,
    sec. 3; the start of b, and what carries a gradient, from the authors' code (OpenSphere).
    """

    def __init__(
        self,
        num_classes,
        scale=40.0,
        margin=0.4,
        balance=0.7,
        adjustment=3.0,
        reduction="sum_over_batch_size",
        representation="embedding",
        weight=1.0,
        name="sphere_face2",
        detached=True,
        **kwargs,
    ):
        loss = NormSoftmaxLoss(scale, reduction=reduction)
        super().__init__(loss, num_classes, 1, representation, weight, name, **kwargs)
        self.scale = self.loss.scale
        self.margin = number("margin", margin, at_least=0, at_most=2)
        self.balance = number("balance", balance, above=0, at_most=1)
        if self.balance == 1:
            raise ValueError("balance must be below 1, for other classes to count")
        self.adjustment = number("adjustment", adjustment, at_least=1)
        self.detached = boolean("detached", detached)

    def build_from(self, shapes):
        """Create the proxies and the bias."""
        super().build_from(shapes)
        start = keras.initializers.Constant(self.balanced_bias())
        self.bias = self.add_weight(name="bias", shape=(), initializer=start)

    def balanced_bias(self) -> float:
        """The b at which, with all cosines 0, the pull of the own class and the push of the others are equal.

        lambda sigmoid(-(a_y + b)) = (1 - lambda) (C - 1) sigmoid(a_j + b), a quadratic equation in e^b, with a_y and
        a_j = r (g(0) -+ m).
        """
        at_zero = 2.0 * 0.5**self.adjustment - 1.0
        own, other = self.scale * (at_zero - self.margin), self.scale * (at_zero + self.margin)
        if self.num_classes == 1:
            return -own
        ratio = self.balance / ((1.0 - self.balance) * (self.num_classes - 1))
        root = math.hypot(1.0 - ratio, 2.0 * math.sqrt(ratio) * math.exp((own - other) / 2.0))
        # Each form without the difference of nearly equal numbers.
        if ratio > 1.0:
            return math.log((ratio - 1.0 + root) / 2.0) - own
        return math.log(2.0 * ratio / (1.0 - ratio + root)) - other

    def image_values(self, representations, labels):
        """One value per image."""
        similarities = ops.clip(ops.cast(representations["class"], "float32"), -1.0, 1.0)
        mask = target_mask(labels, self.num_classes)
        # Above 0, so that the power of a half has a finite slope.
        adjusted = 2.0 * ops.power(ops.maximum((similarities + 1.0) / 2.0, 1e-7), self.adjustment) - 1.0
        if self.detached:
            adjusted = similarities + ops.stop_gradient(adjusted - similarities)
        pull = ops.softplus(-(self.scale * (adjusted - self.margin) + self.bias))
        push = ops.softplus(self.scale * (adjusted + self.margin) + self.bias)
        costs = ops.where(mask, self.balance * pull, (1.0 - self.balance) * push)
        values = ops.sum(costs, axis=1) / self.scale
        return ops.where(ops.any(mask, axis=1), values + nan_if_any(similarities, axis=1), float("nan"))

    @override
    def get_config(self):
        return _with_loss(super().get_config(), self.loss, ("scale", "reduction"))


class _Given(ClassSimilarityLoss):
    """The cross-entropy of logits."""

    def logits(self, similarities, target_mask):
        del target_mask
        return similarities


def _with_loss(config, loss, names):
    of_loss = loss.get_config()
    return {**config, **{name: of_loss[name] for name in names}}
