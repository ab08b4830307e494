"""Objectives over two embeddings of the same items, such as an image and its text.

An item's own two views are positives of each other. Other items of its label are positives too, or
left out.
"""

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.losses.base import PairLoss, check_rank
from tfdml.mining.base import Relation, component
from tfdml.objectives.base import (
    Objective,
    as_loss,
    check_length,
    checked_prefixes,
    over_prefixes,
    prefix_of,
)
from tfdml.registry import register
from tfdml.workarounds import add_undecayed_weight


class ViewsObjective(Objective):
    """Base of objectives over two views. A subclass defines `compute_views(forth, back)`.

    The pairs are those of the global batch: each item in one view with all items in the other.

    Args:
        views: The two representations; by default those of
            `MetricLearner({"image": ..., "text": ...}, ...)`.
        shared: What the other view of another item of the anchor's label is: `"positive"`, like its
            own, or `"left_out"`, which makes it neither a positive nor a negative.
        dims: The lengths of prefixes, ascending, such as `[32, 64, 128]`. The value is then the sum
            over the prefixes of both views, so that their first dimensions work alone (see
            `Matryoshka`).
        dim_weights: One factor per prefix; None for 1 each.

    Raises:
        ValueError: There are not two views, `shared` is another word, or `dims` and `dim_weights`
            do not fit. When it is built: the views have no vectors of one size, or a prefix is
            longer.
    """

    learns_from = ("negative",)

    def __init__(
        self,
        views=("embedding", "text_embedding"),
        shared="positive",
        dims=None,
        dim_weights=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.views = tuple(views)
        if len(self.views) != 2 or self.views[0] == self.views[1]:
            raise ValueError(f"{self.name}: views must name two representations, not {views!r}")
        self.shared = one_of(f"{self.name}: shared", shared, ("positive", "left_out"))
        self.dims: tuple[int, ...] | None = None
        self.dim_weights: tuple[float, ...] | None = None
        if dims is not None:
            self.dims, self.dim_weights = checked_prefixes(dims, dim_weights)

    @property
    def reads(self) -> tuple[str, ...]:
        """The two views."""
        return self.views

    def build_from(self, shapes):
        """Check that the views can be compared."""
        first, second = (tuple(shapes[name]) for name in self.views)
        if len(first) != 2 or first[-1] != second[-1]:
            raise ValueError(
                f"{self.name} compares vectors (B, d) of one size, not {first} and {second}"
            )
        if self.dims:
            check_length(self.name, self.dims, first[-1])

    def compute_pairs(self, pairs):
        """Compute the value, or the part of it that these anchors make up."""
        first, second = (pairs[name] for name in self.views)
        for name, view in zip(self.views, (first, second), strict=True):
            check_rank(self.name, view.references, 2, f"{name!r} to be vectors (B, d)")
        is_positive = self.shared == "positive"
        forth, back = first.across(second, is_positive), second.across(first, is_positive)
        if self.dims is None:
            return self.compute_views(forth, back)

        def of_prefix(dim):
            return self.compute_views(prefix_of(forth, dim), prefix_of(back, dim))

        return over_prefixes(self.dims, self.dim_weights, of_prefix)

    def compute_views(self, forth, back):
        """Compute the value, or the anchors' part of it.

        Args:
            forth: The `tfdml.pairs.Pairs` of the first view with the second.
            back: Those of the second view with the first.
        """
        raise TypeError(f"{type(self).__name__} must define compute_views(forth, back)")


@register("objective")
class AcrossViews(ViewsObjective):
    """The mean of a loss over pairs from each view to the other: L = (loss(x -> y) + loss(y -> x))
    / 2.

    Args:
        loss: A loss over pairs, such as `tfdml.losses.TripletLoss(0.2)`. With `positives`, labels
            may be rows.
        name: The term's name in logs; by default `across_` and the loss's.
        **kwargs: Those of `ViewsObjective`.

    Raises:
        ValueError: It is no loss over pairs, or one whose references must be its anchors.

    Example:
        >>> objective = AcrossViews(tfdml.losses.ContrastiveLoss(margin=1.0, distance="cosine"))
        >>> views = {"embedding": keras.ops.eye(2), "text_embedding": keras.ops.array([[1.0, 0.0],
        ...     [0.6, 0.8]])}
        >>> float(objective(views, [0, 1]))  # positives at 0 and 0.2, negatives at 1 and 0.4
        0.7
    """

    def __init__(self, loss, name=None, **kwargs):
        loss = as_loss(loss)
        if not isinstance(loss, PairLoss) or loss.within_batch:
            why = (
                "compares anchors with one another"
                if isinstance(loss, PairLoss)
                else "is no loss over pairs"
            )
            raise ValueError(
                f"AcrossViews compares the views of a batch by a loss over pairs, and {loss.name} "
                f"{why}"
            )
        super().__init__(name=name or f"across_{loss.name}", **kwargs)
        self.loss, self.whole_batch = loss, loss.needs_whole_batch

    def compute_views(self, forth, back):
        """Compute the mean of both directions."""
        return 0.5 * (self.loss.of_pairs(forth) + self.loss.of_pairs(back))


class ViewContrast(ViewsObjective):
    """Base of the objectives with a learned temperature.

    Args:
        positives: Which items belong together where labels are rows (B, L), as of
            `tfdml.losses.PairLoss`; None for equal labels.
        scale: What the cosines are multiplied by at the start; its logarithm is trained, without
            weight decay.
        **kwargs: Those of `ViewsObjective`.

    Attributes:
        scales: The least and the largest scale, at the start and in training; None for any.
    """

    # Not an argument of a loss, as no loss takes it.
    positives: Relation | None = None
    scales: tuple[float, float] | None = None

    def __init__(self, positives=None, scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.positives = (
            None if positives is None else component("relation", positives, "positives")
        )
        least, most = self.scales or (None, None)
        scale = number(f"{self.name}: scale", scale, above=0)
        self.scale = number(f"{self.name}: scale", scale, at_least=least, at_most=most)

    def build_from(self, shapes):
        """Create the logarithm of the scale."""
        super().build_from(shapes)
        self.log_scale = add_undecayed_weight(
            self,
            name="log_scale",
            shape=(),
            initializer=keras.initializers.Constant(math.log(self.scale)),
            constraint=self._within_scales if self.scales else None,
        )

    def _within_scales(self, log_scale):
        least, most = map(math.log, self.scales or ())
        return ops.clip(log_scale, least, most)


@register("objective", alias="clip")
class SoftmaxAcrossViews(ViewContrast):
    """The loss of CLIP: each item is to find its other view among those of the batch, in both
    directions.

    With logits s_ij = t x_i.y_j of unit vectors, and P(i) the items that are positives of i:

        L = (l(s) + l(s^T)) / 2,
        l(s) = (1/B) sum_i -(1/|P(i)|) sum over j of P(i) of log(exp(s_ij) / sum_k exp(s_ik))

    k runs over the positives and negatives. With distinct labels P(i) = {i}. Several positives
    share the softmax, and the loss is the mean over them, as L_out of supervised contrastive
    learning: it is least where all are equally near. The scale t starts at 1 / 0.07, is trained
    through its logarithm, and stays within 1 and 100.

    Args:
        scale: t at the start, 1 to 100.
        **kwargs: Those of `ViewContrast` and `ViewsObjective`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> views = {"embedding": keras.ops.eye(2), "text_embedding": keras.ops.array([[1.0, 0.0],
        ...     [0.6, 0.8]])}
        >>> float(SoftmaxAcrossViews(scale=1.0)(views, [0,
        ...     1]))  # the mean of ln(1 + e^-0.4), ln(1 + e^-0.8) ...
        0.4488791

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
    ICML 2021, figure 3; several positives: Khosla et al., "Supervised Contrastive Learning",
    NeurIPS 2020, eq. 2.
    """

    scales = (1.0, 100.0)

    def __init__(self, scale=1.0 / 0.07, **kwargs):
        super().__init__(scale=scale, **kwargs)

    def compute_views(self, forth, back):
        """Compute the mean of both directions."""
        return 0.5 * (self._one_direction(forth) + self._one_direction(back))

    def _one_direction(self, pairs):
        logits = ops.exp(self.log_scale) * pairs.cosines()
        costs = pairwise.softmax_costs(logits, pairs.positives, pairs.negatives)
        return pairs.mean(pairwise.masked_mean(costs, pairs.positives, axis=1))


@register("objective", alias="siglip")
class SigmoidAcrossViews(ViewContrast):
    """The loss of SigLIP: each pair of views is classified by itself, as that of one item or not.

    With logits s_ij = t x_i.y_j + b of unit vectors:

        L = (1/B) sum over pairs (i, j) of ln(1 + exp(-z_ij s_ij)),
        z_ij = 1 for positives, -1 for negatives

    Each positive counts as one. With distinct labels those are the B pairs (i, i) of the B^2, which
    b balances. The scale t starts at 10 and is trained through its logarithm; b starts at -10.

    Args:
        scale: t at the start.
        bias: b at the start; it takes no weight decay.
        **kwargs: Those of `ViewContrast` and `ViewsObjective`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> views = {"embedding": keras.ops.eye(2), "text_embedding": keras.ops.array([[1.0, 0.0],
        ...     [0.6, 0.8]])}
        >>> float(SigmoidAcrossViews(scale=1.0, bias=0.0)(views, [0, 1]))
        1.2074988

    Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training", ICCV 2023, algorithm 1.
    """

    def __init__(self, scale=10.0, bias=-10.0, **kwargs):
        super().__init__(scale=scale, **kwargs)
        self.bias = number(f"{self.name}: bias", bias)

    def build_from(self, shapes):
        """Create the logarithm of the scale, and the bias."""
        super().build_from(shapes)
        start = keras.initializers.Constant(self.bias)
        self.offset = add_undecayed_weight(self, name="bias", shape=(), initializer=start)

    def compute_views(self, forth, back):
        """Compute the sum over the pairs, divided by the number of items; one direction has them
        all."""
        del back
        logits = ops.exp(self.log_scale) * forth.cosines() + self.offset
        values = ops.softplus(ops.where(forth.positives, -logits, logits))
        compared = ops.logical_or(forth.positives, forth.negatives)
        return forth.mean(pairwise.masked_sum(values, compared, axis=1))
