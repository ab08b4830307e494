"""What an ensemble is trained on: a loss for each head, and a term that drives the heads apart."""

import itertools

from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.losses.base import PairLoss
from tfdml.objectives.base import Objective
from tfdml.saving import restore


class HeadsObjective(Objective):
    """Base of the objectives on the heads of an ensemble, `representations["heads"]` (B, M, d/M).

    Raises:
        ValueError: The embedder has no heads.
    """

    reads = ("heads",)

    def build_from(self, shapes):
        """Note how many heads there are."""
        self.heads_shape = tuple(self.select(shapes)["heads"][1:])

    def heads(self, pairs) -> list:
        """Return the pairs of each head's vectors, M times (b, d/M) and (B, d/M)."""

        def head(m):
            # Gathering the heads of all replicas loses the static shape.
            return pairs["heads"].map(lambda x: ops.reshape(x, (-1, *self.heads_shape))[:, m])

        return [head(m) for m in range(self.heads_shape[0])]


class HeadwiseLoss(HeadsObjective):
    """A metric loss on each head of an ensemble: (1/M) sum_m loss(labels, head m).

    Each head is to be good by itself, as in the paper; a loss on the whole embedding (`MetricLoss`) asks the heads to
    be good together. The paper's sum is M times this mean.

    Args:
        loss: A loss of tfdml over pairs, such as `tfdml.losses.ContrastiveLoss()`.
        weight: The factor of this term.
        name: The term's name in logs; by default `headwise_` and the loss's.

    Raises:
        ValueError: `loss` is no loss over pairs, or the embedder has no heads.

    Example:
        >>> objective = HeadwiseLoss(tfdml.losses.ContrastiveLoss(margin=0.5, distance="cosine"))
        >>> representations = {"heads": tfdml.pairwise.l2_normalize(keras.random.normal((6, 4, 8)))}
        >>> tuple(objective(representations, keras.ops.array([0, 0, 1, 1, 2, 2])).shape)
        ()

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.3.
    """

    learns_from = ("positive", "negative")

    def __init__(self, loss, name=None, **kwargs):
        loss = restore(loss)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"HeadwiseLoss takes a loss of tfdml over pairs, not {loss!r}")
        super().__init__(name=name or f"headwise_{loss.name}", **kwargs)
        self.loss, self.whole_batch = loss, loss.needs_whole_batch

    def compute_pairs(self, pairs):
        """Compute the mean of the heads' losses."""
        heads = self.heads(pairs)
        return sum(self.loss.of_pairs(head) for head in heads) / len(heads)


class HeadDivergence(HeadsObjective):
    """The divergence loss: heads must not give the same vector.

    mean of [cos(h_p(x_i), h_q(x_j)) - margin]_+ over heads p != q and image pairs (i, j)

    With `pairs="all"`, i and j are any two images of the batch, the same one or not, as in the code of HORDE's authors;
    with `"image"`, i = j: an image's own heads. On unit vectors |h - h'|^2 = 2 - 2 cos, so this is half the hinge on
    squared distances [2 (1 - margin) - |h_p - h_q|^2]_+, whose margin is 1 by default.

    O(N^2 M^2 / 2) time and memory for N images with `"all"`, O(N M^2) with `"image"`. One head gives 0.

    Args:
        margin: The cosine up to which nothing is asked, in [-1, 1].
        pairs: `"all"` or `"image"`.
        average: `"active"`: the mean over the pairs above the margin; `"all"`: over every pair.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is none of these, or the embedder has no heads.

    Example:
        >>> float(HeadDivergence(margin=0.5)({"heads": keras.ops.ones((2, 4, 8))}, keras.ops.array([0, 1])))
        0.50000

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.3; the default margin,
    pairs, average and weight are those of HORDE's public code (Jacob et al., ICCV 2019).
    """

    def __init__(self, margin=0.5, pairs="all", average="active", weight=0.5, **kwargs):
        super().__init__(weight=weight, **kwargs)
        self.margin = number("margin", margin, at_least=-1, at_most=1)
        self.pairs = one_of(f"{self.name}: pairs", pairs, ("all", "image"))
        self.average = one_of(f"{self.name}: average", average, ("active", "all"))

    def compute_pairs(self, pairs):
        """Compute the mean hinge over pairs of heads."""
        heads = [head.map(pairwise.l2_normalize) for head in self.heads(pairs)]
        # (p, q) and (q, p) have the same pairs.
        couples = list(itertools.combinations(heads, 2))
        if not couples:
            return ops.zeros((), "float32")
        if self.pairs == "all":
            cosines = [pairwise.dot_products(a.anchors, b.references) for a, b in couples]
        else:
            cosines = [ops.sum(a.anchors * b.anchors, axis=-1) for a, b in couples]
        hinges = [ops.relu(cosine - self.margin) for cosine in cosines]
        batch = heads[0]
        if self.average == "all":
            return sum(batch.mean(hinge) for hinge in hinges) / len(hinges)
        active = batch.total(sum(pairwise.masked_count(hinge > 0) for hinge in hinges))
        return sum(ops.sum(hinge) for hinge in hinges) / ops.maximum(active, 1.0)
