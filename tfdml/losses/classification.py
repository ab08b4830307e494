"""Losses on class similarities (B, C), the cosines between embeddings and the proxies of each
class."""

import math

from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import integer, number
from tfdml.losses.base import LabeledLoss, check_rank, nan_if_any
from tfdml.registry import register


def target_mask(labels, num_classes):
    """(B, C) boolean, true at each image's own class."""
    return labels[:, None] == ops.cast(ops.arange(num_classes), labels.dtype)[None, :]


def refuse_unknown_classes(labels, num_classes, name):
    """Refuse labels outside 0 .. C - 1, as `tfdml.pairwise.refuse_outside`.

    The value is NaN where that is not possible. `MetricLearner.fit` and `evaluate` refuse labels
    there too, of arrays and of a `tf.data.Dataset`.

    Args:
        labels: (B,) integers.
        num_classes: C.
        name: The name of the loss or objective, for the message.

    Raises:
        UserError: A label is out of range. (With the same message, `tf.errors.InvalidArgumentError`
            in a graph.)
    """
    message = (
        f"{name}: labels must be classes 0 .. {num_classes - 1}, as there are similarities to "
        f"{num_classes} classes. "
        "Number the training classes from 0 (ImageDataset.contiguous()) and give proxies for all "
        "of them: "
        "tfdml.objectives.ProxyLoss(loss, num_classes). For classes that are not trained this loss "
        "has no value: "
        "measure retrieval with tfdml.callbacks.RetrievalEvaluation(x, y) in place of "
        "validation_data"
    )
    pairwise.refuse_outside(labels, num_classes, message, "label")


class ClassSimilarityLoss(LabeledLoss):
    """A softmax cross-entropy over scaled class similarities; subclasses give `logits`.

    A subclass that is no cross-entropy gives `class_losses` instead. `proxies_per_class` says how
    many proxies the command line makes for each class by default. With a `label_smoothing` of e the
    target is 1 - e + e / C at the own class and e / C at the others: the value is L + e (z_y - mean
    of z), of logits z.

    A label outside 0 .. C - 1 has no proxy: it is refused (see `refuse_unknown_classes`), and its
    value is NaN.
    """

    proxies_per_class = 1
    label_smoothing = 0.0

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Return the reduced loss of labels (B,) and similarities to classes (B, C), or (B, C, K)
        to their proxies."""
        labels, y_pred = pairwise.as_labels(y_true), ops.convert_to_tensor(y_pred)
        if len(y_pred.shape) > 1 and y_pred.shape[1]:  # else `call` says what is wrong
            refuse_unknown_classes(labels, y_pred.shape[1], self.name)
        return super().__call__(labels, y_pred, sample_weight)

    def class_similarities(self, similarities):
        """Return the similarities to the classes (B, C) from those to their proxies; the same with
        one proxy per class.

        Raises:
            ValueError: There are several proxies per class, (B, C, K), and the loss takes one.
        """
        check_rank(self.name, similarities, 2, "class similarities (B, C), of one proxy per class")
        return similarities

    def image_losses(self, labels, y_pred):
        """Compute one value per image: (B,), (B, C) or (B, C, K) -> (B,)."""
        similarities = self.class_similarities(y_pred)
        mask = target_mask(labels, ops.shape(similarities)[1])
        values = self.class_losses(similarities, mask) + nan_if_any(similarities, axis=1)
        return ops.where(ops.any(mask, axis=1), values, float("nan"))

    def class_losses(self, similarities, target_mask):
        """One value per image: (B, C), (B, C) -> (B,); `target_mask` is true at each image's own
        class."""
        logits = self.logits(similarities, target_mask)
        # softplus(log sum of the others - target) keeps its digits where the softmax is all but
        # sure.
        log_sums = pairwise.masked_logsumexp(logits, ops.logical_not(target_mask), axis=1)
        target_logits = pairwise.masked_sum(logits, target_mask, axis=1)
        values = ops.softplus(log_sums - target_logits)
        if not self.label_smoothing:
            return values
        # The cross-entropy with (1 - e) of the target at the own class and e / C at each.
        return values + self.label_smoothing * (target_logits - ops.mean(logits, axis=1))

    def logits(self, similarities, target_mask):
        """Return the logits (B, C); `target_mask` is true at each image's own class."""
        raise TypeError(f"{type(self).__name__} must define logits()")


@register("loss")
class NormSoftmaxLoss(ClassSimilarityLoss):
    """Normalized softmax: cross-entropy over scaled cosines, without a margin.

    L = -log( e^{s cos_y} / sum_j e^{s cos_j} ), averaged over the batch.

    Args:
        scale: s, the inverse temperature.
        label_smoothing: e, the share of the target that is spread evenly over all classes: below 1.
            Some labels of most data sets are wrong; 0.1 is usual.

    Raises:
        ValueError: `scale` is not positive, or `label_smoothing` out of range.

    Example:
        >>> float(NormSoftmaxLoss(scale=1.0)([0], [[0.0, 0.0]]))  # ln 2
        0.6931472

    Source: Zhai and Wu, "Classification is a Strong Baseline for Deep Metric Learning", BMVC 2019.
    """

    def __init__(self, scale=20.0, label_smoothing=0.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)
        self.label_smoothing = number("label_smoothing", label_smoothing, at_least=0, below=1)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C)."""
        return self.scale * similarities


@register("loss")
class AMSoftmaxLoss(NormSoftmaxLoss):
    """Additive-margin softmax.

    L = -log( e^{s (cos_y - m)} / ( e^{s (cos_y - m)} + sum_{j != y} e^{s cos_j} ) ), averaged over
    the batch.

    Args:
        scale: s. The JRD paper fixes 20.
        margin: m, a difference of cosines, in [0, 2]. The JRD paper uses 0.1 (CUB, SOP) and 0.05
            (CARS).
        label_smoothing: As of `NormSoftmaxLoss`.

    Raises:
        ValueError: `scale` is not positive, or `margin` or `label_smoothing` out of range.

    Example:
        >>> cosines = [[0.9, 0.1, -0.3]]
        >>> float(AMSoftmaxLoss(scale=20.0, margin=0.1)([0], cosines))
        8.318e-07

    Source: Wang et al., "CosFace", CVPR 2018; Chu et al., ICML 2020, eq. 12.
    """

    def __init__(self, scale=20.0, margin=0.1, label_smoothing=0.0, **kwargs):
        super().__init__(scale, label_smoothing, **kwargs)
        self.margin = number("margin", margin, at_least=0, at_most=2)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C): the margin is taken from the own class before scaling."""
        return self.scale * (similarities - self.margin * ops.cast(target_mask, "float32"))


@register("loss")
class ArcFaceLoss(NormSoftmaxLoss):
    """Additive angular margin softmax.

    L = -log( e^{s cos(theta_y + m)} / ( e^{s cos(theta_y + m)} + sum_{j != y} e^{s cos_j} ) ),
    averaged over the batch.

    Where theta_y + m passes pi, cos(theta_y) - m sin(m) takes the place of cos(theta_y + m), so
    that the logit keeps falling with the angle; this is what the authors' code and
    pytorch-metric-learning do.

    Args:
        scale: s.
        margin: m in radians, in [0, pi / 2]. pytorch-metric-learning takes degrees: its 28.6 is
            0.5.
        label_smoothing: As of `NormSoftmaxLoss`.

    Raises:
        ValueError: `scale` is not positive, or `margin` or `label_smoothing` out of range.

    Example:
        >>> float(ArcFaceLoss(scale=1.0, margin=0.5)([0], [[1.0, 0.0]]))  # ln(1 + e^{-cos 0.5})
        0.3476855

    Source: Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR
    2019, eq. 3.
    """

    def __init__(self, scale=64.0, margin=0.5, label_smoothing=0.0, **kwargs):
        super().__init__(scale, label_smoothing, **kwargs)
        self.margin = number("margin", margin, at_least=0, at_most=math.pi / 2)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C): the margin is added to the angle of the own class."""
        cosines = ops.clip(pairwise.masked_sum(similarities, target_mask, axis=1), -1.0, 1.0)
        beyond = cosines - self.margin * math.sin(self.margin)
        with_margin = ops.where(cosines > -math.cos(self.margin), self.shifted(cosines), beyond)
        return self.scale * ops.where(target_mask, with_margin[:, None], similarities)

    def shifted(self, cosines):
        """cos(theta + m) of cosines in [-1, 1], beyond pi too."""
        # The sine has no finite slope at an angle of 0 or pi: there, nothing is learned through it.
        sines = pairwise.safe_sqrt((1.0 - cosines) * (1.0 + cosines))
        return cosines * math.cos(self.margin) - sines * math.sin(self.margin)


@register("loss")
class SphereFaceLoss(ClassSimilarityLoss):
    """Multiplicative angular margin softmax (A-Softmax), on normalized embeddings and proxies.

    L = -log( e^{s psi(theta_y)} / ( e^{s psi(theta_y)} + sum_{j != y} e^{s cos_j} ) ), averaged
    over the batch, psi(theta) = (-1)^k cos(m theta) - 2 k for theta in [k pi / m, (k + 1) pi / m],
    which falls from 1 to 1 - 2 m.

    The paper normalizes the proxies alone, so that the length of an embedding is its scale, and
    mixes psi with the cosine in the first steps. Here all vectors have length 1 and s is the scale,
    as in later work (and as an `Embedder` gives them): start with a small margin, or from weights
    trained without one. pytorch-metric-learning multiplies by the lengths.

    Args:
        scale: s.
        margin: m, an integer of 1 to 10; 1 is `NormSoftmaxLoss(scale)`. The paper uses 4.

    Raises:
        ValueError: `scale` is not positive or `margin` is out of range.

    Example:
        >>> float(SphereFaceLoss(scale=1.0, margin=2)([0], [[0.0,
        ...     0.0]]))  # psi(90 degrees) = -1: ln(1 + e)
        1.3132617

    Source: Liu et al., "SphereFace: Deep Hypersphere Embedding for Face Recognition", CVPR 2017,
    sec. 3.
    """

    def __init__(self, scale=30.0, margin=4, **kwargs):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)
        self.margin = integer("margin", margin, at_least=1, at_most=10)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C): the angle to the own class is multiplied."""
        cosines = ops.clip(similarities, -1.0, 1.0)
        # cos(m theta) as the Chebyshev polynomial of cos(theta), whose slope is finite at angles of
        # 0 and pi too.
        before, multiplied = ops.ones_like(cosines), cosines
        for _ in range(self.margin - 1):
            before, multiplied = multiplied, 2.0 * cosines * multiplied - before
        # At its boundaries psi has the same value from both sides, and the slope 0: rounding of k
        # does no harm.
        k = ops.floor(ops.stop_gradient(ops.arccos(cosines)) * (self.margin / math.pi))
        k = ops.minimum(k, self.margin - 1.0)
        psi = ops.where(ops.equal(k % 2.0, 0.0), multiplied, -multiplied) - 2.0 * k
        return self.scale * ops.where(target_mask, psi, similarities)


@register("loss")
class SubCenterArcFaceLoss(ArcFaceLoss):
    """ArcFace on the similarities s (B, C, K) to K proxies per class, of which the nearest counts.

    S_c = max over k of s_ck;   L = ArcFaceLoss of S

    averaged over the batch. Mislabeled images and rare kinds gather at proxies of their own, so
    that a class need not stretch to them. Similarities (B, C) are taken as K = 1. The similarities
    to the classes that a `ProxyLoss` hands to other objectives are S, the largest.

    Args:
        scale: s.
        margin: m in radians, in [0, pi / 2]. pytorch-metric-learning takes degrees: its 28.6 is
            0.5.
        label_smoothing: As of `NormSoftmaxLoss`.

    Raises:
        ValueError: `scale` is not positive, or `margin` or `label_smoothing` out of range.

    Example:
        >>> loss = SubCenterArcFaceLoss(scale=1.0, margin=0.5)
        >>> float(loss([0], [[[1.0, -1.0], [0.0, -0.5]]]))  # ln(1 + e^{-cos 0.5})
        0.3476855

    Source: Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web
    Faces", ECCV 2020.
    """

    proxies_per_class = 3

    def class_similarities(self, similarities):
        """Return the largest similarity to each class (B, C) of s (B, C, K); (B, C) as they are."""
        if len(similarities.shape) != 3:
            return super().class_similarities(similarities)
        # In turn and not by a maximum: of several that are equal, one learns.
        nearest, *others = ops.unstack(similarities, axis=2)
        for other in others:
            nearest = ops.where(other > nearest, other, nearest)
        return nearest


@register("loss")
class ProxyNCALoss(ClassSimilarityLoss):
    """Proxy-NCA on class similarities (B, C).

    L = -ln( exp(s cos_y) / sum over z != y of exp(s cos_z) ), averaged over the batch.

    The paper's exp(-|x - p|^2), on vectors of length r, is exp(2 r^2 cos) up to a factor that
    cancels: s = 2 r^2. The own class is not in the denominator, as in the paper, so that the value
    may be negative; pytorch-metric-learning and ProxyNCA++ include it, which makes theirs
    `NormSoftmaxLoss(scale)`.

    Args:
        scale: s. 2 is the paper's unit vectors; 18 is r = 3, the usual choice in practice.

    Raises:
        ValueError: `scale` is not positive.

    Example:
        >>> float(ProxyNCALoss(scale=2.0)([0], [[1.0, 0.0, 0.0]]))  # ln 2 - 2
        -1.3068528

    Source: Movshovitz-Attias et al., "No Fuss Distance Metric Learning using Proxies", ICCV 2017,
    sec. 3.
    """

    def __init__(self, scale=18.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)

    def class_losses(self, similarities, target_mask):
        """One value per image; 0 where there is no other class."""
        logits = self.scale * similarities
        is_other_class = ops.logical_not(target_mask)
        log_sums = pairwise.masked_logsumexp(logits, is_other_class, axis=1)
        values = log_sums - pairwise.masked_sum(logits, target_mask, axis=1)
        return ops.where(ops.any(is_other_class, axis=1), values, 0.0)


@register("loss")
class ProxyNCAPlusPlusLoss(ClassSimilarityLoss):
    """ProxyNCA++ on class similarities (B, C): the probability of the own proxy among all, at a low
    temperature.

    L = -ln( exp(-d_y / T) / sum over all z of exp(-d_z / T) ),   d = |x - p|^2 = 2 - 2 cos of unit
    vectors

    averaged over the batch; this is `NormSoftmaxLoss(2 / T)`. The other changes of the paper belong
    to the network and to training: global maximum pooling (`pooling="max"` of the embedder) and
    layer normalization, batches balanced over classes, and proxies that learn faster than the
    network.

    Args:
        temperature: T.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> float(ProxyNCAPlusPlusLoss(temperature=2.0)([0], [[1.0, 0.0, 0.0]]))  # ln(1 + 2 / e)
        0.5514447

    Source: Teh, DeVries, Taylor, "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood
    Component Analysis", ECCV 2020, sec. 3.
    """

    def __init__(self, temperature=1 / 9, **kwargs):
        super().__init__(**kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C), up to a constant."""
        return (2.0 / self.temperature) * similarities


@register("loss")
class ProxyAnchorLoss(ClassSimilarityLoss):
    """Proxy Anchor on class similarities s (B, C): each proxy is an anchor, the images of the batch
    its tuples.

    L = (1/|P+|) sum over classes c in the batch of ln(1 + sum over images x of c of exp(-alpha
    (s_xc - margin)))
      + (1/C) sum over all classes c of
            ln(1 + sum over images x not of c of exp(alpha (s_xc + margin)))

    The sums run over the images of the global batch: under a distribution strategy each replica
    gathers the similarities of all. They belong to proxies and not to images, so that every image
    has the batch's value.

    Args:
        alpha: The scale.
        margin: delta.
        reduction: `"sum"` gives the sum over the proxies instead of the two means.

    Raises:
        ValueError: `alpha` is not positive.

    Example:
        >>> float(ProxyAnchorLoss(alpha=1.0, margin=0.0)([0], [[1.0, -1.0]]))  # 1.5 ln(1 + 1/e)
        0.4698925

    Source: Kim et al., "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020, eq. 4.
    """

    def __init__(self, alpha=32.0, margin=0.1, **kwargs):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, above=0)
        self.margin = number("margin", margin, at_least=0, at_most=2)

    def image_losses(self, labels, y_pred):
        """Return the batch's value at every image: (B,), (B, C) -> (B,)."""
        num_local, num_classes = ops.shape(labels)[0], ops.shape(self.class_similarities(y_pred))[1]
        labels, similarities = replicas.gather(labels), replicas.gather(y_pred)
        mask = target_mask(labels, num_classes)
        pull = ops.softplus(
            pairwise.masked_logsumexp(-self.alpha * (similarities - self.margin), mask, axis=0)
        )
        push = ops.softplus(
            pairwise.masked_logsumexp(
                self.alpha * (similarities + self.margin), ops.logical_not(mask), axis=0
            )
        )
        present = pairwise.masked_count(ops.any(mask, axis=0))
        if self.reduction == "sum":
            value = (ops.sum(pull) + ops.sum(push)) / ops.cast(ops.shape(labels)[0], "float32")
        else:
            value = ops.sum(pull) / ops.maximum(present, 1.0) + ops.mean(push)
        value = value + nan_if_any(similarities)
        return replicas.local_rows(ops.where(ops.any(mask, axis=1), value, float("nan")), num_local)


@register("loss")
class SoftTripleLoss(ClassSimilarityLoss):
    """SoftTriple on the similarities s (B, C, K) to K proxies per class.

    S_c = sum over k of softmax_k(s_ck / gamma) s_ck
    L = -ln( exp(scale (S_y - margin)) / (exp(scale (S_y - margin)) + sum over c != y of exp(scale
    S_c)) )

    averaged over the batch. Similarities (B, C) are taken as K = 1. The paper's regularizer, which
    merges the proxies of a class, is a function of the proxies and not of similarities; it is not
    part of this loss.

    Args:
        scale: lambda.
        gamma: The temperature of the softmax over a class's proxies.
        margin: delta.

    Raises:
        ValueError: `scale` or `gamma` is not positive, or `margin` is negative.

    Example:
        >>> float(SoftTripleLoss(scale=1.0, margin=0.0)([0], [[[0.0, 0.0], [0.0, 0.0]]]))  # ln 2
        0.6931472

    Source: Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV
    2019, sec. 3.
    """

    proxies_per_class = 10

    def __init__(self, scale=20.0, gamma=0.1, margin=0.01, **kwargs):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)
        self.gamma = number("gamma", gamma, above=0)
        self.margin = number("margin", margin, at_least=0, at_most=2)

    def class_similarities(self, similarities):
        """Return the relaxed similarities S (B, C) of s (B, C, K); (B, C) as they are."""
        if len(similarities.shape) != 3:
            return super().class_similarities(similarities)
        nearness = ops.softmax(similarities / self.gamma, axis=2)
        return ops.sum(nearness * similarities, axis=2)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C) from the relaxed similarity to each class."""
        return self.scale * (similarities - self.margin * ops.cast(target_mask, "float32"))
