"""Losses on the cosines to class proxies, beyond the softmax family: Proxy-NCA, Proxy Anchor, SoftTriple."""

from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import number
from tfdml.losses.base import nan_if_any
from tfdml.losses.classification import ClassSimilarityLoss, target_mask
from tfdml.registry import register


@register("loss")
class ProxyNCALoss(ClassSimilarityLoss):
    """Proxy-NCA on class similarities (B, C).

    L = -ln( exp(s cos_y) / sum over z != y of exp(s cos_z) ), averaged over the batch.

    The paper's exp(-|x - p|^2), on vectors of length r, is exp(2 r^2 cos) up to a factor that cancels: s = 2 r^2. The
    own class is not in the denominator, as in the paper, so that the value may be negative; pytorch-metric-learning and
    ProxyNCA++ include it, which makes theirs `NormSoftmaxLoss(scale)`.

    Args:
        scale: s. 2 is the paper's unit vectors; 18 is r = 3, the usual choice in practice.

    Raises:
        ValueError: `scale` is not positive.

    Example:
        >>> float(ProxyNCALoss(scale=2.0)([0], [[1.0, 0.0, 0.0]]))  # ln 2 - 2
        -1.3068528

    Source: Movshovitz-Attias et al., "No Fuss Distance Metric Learning using Proxies", ICCV 2017, sec. 3.
    """

    def __init__(self, scale=18.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)

    def class_losses(self, similarities, target_mask):
        """One value per image; 0 where there is no other class."""
        logits = self.scale * similarities
        others = ops.logical_not(target_mask)
        values = pairwise.masked_logsumexp(logits, others, axis=1) - pairwise.masked_sum(logits, target_mask, axis=1)
        return ops.where(ops.any(others, axis=1), values, 0.0)


@register("loss")
class ProxyNCAPlusPlusLoss(ClassSimilarityLoss):
    """ProxyNCA++ on class similarities (B, C): the probability of the own proxy among all, at a low temperature.

    L = -ln( exp(-d_y / T) / sum over all z of exp(-d_z / T) ),   d = |x - p|^2 = 2 - 2 cos of unit vectors

    averaged over the batch; this is `NormSoftmaxLoss(2 / T)`. The other changes of the paper belong to the network and
    to training: global maximum pooling (`pooling="max"` of the embedder) and layer normalization, batches balanced over
    classes, and proxies that learn faster than the network.

    Args:
        temperature: T.

    Raises:
        ValueError: `temperature` is not positive.

    Example:
        >>> float(ProxyNCAPlusPlusLoss(temperature=2.0)([0], [[1.0, 0.0, 0.0]]))  # ln(1 + 2 / e)
        0.5514447

    Source: Teh, DeVries, Taylor, "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis",
    ECCV 2020, sec. 3.
    """

    def __init__(self, temperature=1 / 9, **kwargs):
        super().__init__(**kwargs)
        self.temperature = number("temperature", temperature, above=0)

    def logits(self, similarities, target_mask):
        """Return the logits (B, C), up to a constant."""
        return (2.0 / self.temperature) * similarities


@register("loss")
class ProxyAnchorLoss(ClassSimilarityLoss):
    """Proxy Anchor on class similarities s (B, C): each proxy is an anchor, the images of the batch its tuples.

    L = (1/|P+|) sum over classes c in the batch of ln(1 + sum over images x of c of exp(-alpha (s_xc - margin)))
      + (1/C) sum over all classes c of ln(1 + sum over images x not of c of exp(alpha (s_xc + margin)))

    The sums run over the images of the global batch: under a distribution strategy each replica gathers the
    similarities of all. They belong to proxies and not to images, so that every image has the batch's value.

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
        pull = ops.softplus(pairwise.masked_logsumexp(-self.alpha * (similarities - self.margin), mask, axis=0))
        push = ops.softplus(
            pairwise.masked_logsumexp(self.alpha * (similarities + self.margin), ops.logical_not(mask), axis=0)
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
    L = -ln( exp(scale (S_y - margin)) / (exp(scale (S_y - margin)) + sum over c != y of exp(scale S_c)) )

    averaged over the batch. Similarities (B, C) are taken as K = 1. The paper's regularizer, which merges the proxies
    of a class, is a function of the proxies and not of similarities; it is not part of this loss.

    Args:
        scale: lambda.
        gamma: The temperature of the softmax over a class's proxies.
        margin: delta.

    Raises:
        ValueError: `scale` or `gamma` is not positive, or `margin` is negative.

    Example:
        >>> float(SoftTripleLoss(scale=1.0, margin=0.0)([0], [[[0.0, 0.0], [0.0, 0.0]]]))  # ln 2
        0.6931472

    Source: Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV 2019, sec. 3.
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
