"""Regularisers that spread embeddings out: the baselines of density adaptivity."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.objectives.base import Objective

FORMS = ("pairs", "nearest")
_SMALLEST = 1e-8


@keras.saving.register_keras_serializable("tfdml")
class EntropySpread(Objective):
    """The entropy regulariser: minus an entropy of the embeddings, to be minimised.

    `form="pairs"`, the one that DML-DA is compared with:

        L = -(1 / N_pairs) sum over i != j of H(p_ij),   p_ij = 1 / (1 + exp(|x_i - x_j|^2 - threshold))

    with H(p) = -p ln p - (1 - p) ln(1 - p), between -ln 2 and 0. p_ij is the probability that two images are alike; its
    entropy is largest where their squared distance is the threshold, so that classes spread and move nearer to each
    other. Neither DML-DA's paper nor its figure gives a formula or a threshold: this is the entropy of Niu et al., whom
    it cites, at 1, its authors' margin.

    `form="nearest"`, the differential entropy by the Kozachenko-Leonenko estimator (KoLeo), which pushes every image
    from its nearest neighbour:

        L = -(1 / B) sum over i of ln(min over j != i of |x_i - x_j|)

    with distances below 1e-4 counted as 1e-4, and without a gradient there. Neither looks at the labels.

    Args:
        form: `"pairs"` or `"nearest"`.
        threshold: The squared distance at which two images are as likely to be alike as not.
        representation: The representation that it reads.
        reduction: `"mean"` over the pairs (or the images), or `"sum"`.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8]])
        >>> float(EntropySpread("nearest")({"embedding": embeddings}, keras.ops.array([0, 1])))  # -ln sqrt(0.8)
        0.1115718

    Source: Niu et al., "Information-theoretic Semi-supervised Metric Learning via Entropy Regularization", ICML 2012
    (pairs); Sablayrolles et al., "Spreading Vectors for Similarity Search", ICLR 2019 (nearest); Li et al., "Deep
    Metric Learning with Density Adaptivity", sec. IV-E.
    """

    def __init__(
        self,
        form="pairs",
        threshold=1.0,
        representation="embedding",
        reduction="mean",
        weight=1.0,
        name="entropy_spread",
        **kwargs,
    ):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: form", form, FORMS)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.form = form
        self.threshold = number("threshold", threshold, at_least=0)
        self.representation = representation
        self.reduction = reduction

    def compute_pairs(self, pairs):
        """Computes the mean (or sum) over ordered pairs, or over images."""
        batch = pairs[self.representation]
        squared, others = batch.distances("sqeuclidean"), batch.others
        reduce = pairwise.masked_sum if self.reduction == "sum" else batch.mean
        if self.form == "pairs":
            # H is even in the logit; of its absolute value nothing large is taken from anything large.
            logits = ops.abs(squared - self.threshold)
            return -reduce(ops.softplus(-logits) + logits * ops.sigmoid(-logits), others)
        nearest = pairwise.index_of_largest(ops.where(others, -ops.stop_gradient(squared), -1e30))
        # The difference itself: the matrix has lost the digits of small distances.
        anchors, references = (ops.cast(x, "float32") for x in (batch.anchors, batch.references))
        gaps = ops.sum(ops.square(anchors - ops.take(references, nearest, axis=0)), axis=1)
        return reduce(-0.5 * ops.log(ops.maximum(gaps, _SMALLEST)), ops.any(others, axis=1))


@keras.saving.register_keras_serializable("tfdml")
class GlobalOrthogonal(Objective):
    """The global orthogonal regulariser (GOR): images of different classes as orthogonal as random vectors are.

    L = M_1^2 + [M_2 - 1/d]_+,   M_k = the mean over pairs of different classes of (cosine of x_i and x_j)^k

    in d dimensions: uniform points of the sphere have M_1 = 0 and M_2 = 1/d. A batch of one class gives 0.

    Args:
        representation: The representation that it reads, of any length.
        weight: The paper uses 1.
        name: The term's name in logs.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8]])
        >>> float(GlobalOrthogonal()({"embedding": embeddings}, keras.ops.array([0, 1])))  # 0.36 + [0.36 - 0.5]_+
        0.36

    Source: Zhang et al., "Learning Spread-out Local Feature Descriptors", ICCV 2017.
    """

    learns_from = ("negative",)
    whole_batch = True

    def __init__(self, representation="embedding", weight=1.0, name="global_orthogonal", **kwargs):
        super().__init__(weight=weight, name=name, **kwargs)
        self.representation = representation

    def compute_pairs(self, pairs):
        """Computes the value for the batch."""
        batch = pairs[self.representation]
        first = pairwise.masked_mean(batch.cosines(), batch.negatives)
        second = pairwise.masked_mean(ops.square(batch.cosines()), batch.negatives)
        # Not the static shape, which is unknown after a gather from replicas of unequal size.
        dim = ops.cast(ops.shape(batch.references)[-1], "float32")
        return ops.square(first) + ops.relu(second - 1.0 / dim)
