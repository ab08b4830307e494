"""The penalty on distances within classes that shows what JRD avoids."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import one_of
from tfdml.objectives.base import Objective


@keras.saving.register_keras_serializable("tfdml")
class IntraClassPenalty(Objective):
    """Minus how alike the images of each class are: it draws every class together.

    L = -sum over classes I of (1/N_I) sum over pairs i != j of I of exp(-|x_i - x_j|^2 / 2)

    with N_I the number of such pairs. A class with one image in the batch has none, and counts for nothing. The JRD
    paper adds it to AMSoftmax, with weight alpha, to show that lambda, the error of the best classifier of seen and
    unseen classes together, grows with alpha:

        objectives = [ProxyLoss(AMSoftmaxLoss(20.0, 0.1), num_classes), IntraClassPenalty(reduction="sum", weight=1.0)]

    Args:
        representation: The name of the vectors x (B, D).
        reduction: `"sum"` over the classes of the batch, as printed, or their `"mean"`.
        weight: alpha.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is none of these.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])}
        >>> float(IntraClassPenalty()(representations, keras.ops.array([0, 0, 1])))
        -1.0

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML 2020, eq. 4 and
    figure 2.
    """

    def __init__(self, representation="embedding", reduction="mean", weight=1.0, name="intra_class_penalty", **kwargs):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.representation = representation
        self.reduction = reduction

    def compute_pairs(self, pairs):
        """Computes the sum (or mean) over the classes with several images in the batch; 0 where there is none."""
        batch = pairs[self.representation]
        positives = batch.positives
        partners = pairwise.masked_count(positives, axis=1)
        kernel = ops.exp(-0.5 * batch.distances("sqeuclidean"))
        # Each image's mean over its partners; their sum over a class of n is n times the class's own mean.
        rows = pairwise.masked_sum(kernel, positives, axis=1) / ops.maximum(partners, 1.0)
        total = ops.sum(rows / (partners + 1.0))
        if self.reduction == "sum":
            return -total
        # Each of a class's n images counts 1/n.
        classes = ops.sum(ops.where(partners > 0, 1.0 / (partners + 1.0), 0.0))
        return -total / ops.maximum(batch.total(classes), 1.0)
