"""The instance loss: a linear classifier of the embedding, with a class for each instance."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, integer, one_of
from tfdml.losses.classification import refuse_unknown_classes, target_mask
from tfdml.objectives.base import Objective


@keras.saving.register_keras_serializable("tfdml")
class InstanceLoss(Objective):
    """Classification by a learned linear head: cross-entropy of W x + b.

    L = -log( e^{w_y.x + b_y} / sum_j e^{w_j.x + b_j} ), averaged over the batch.

    In the paper every instance (an image with its descriptions) is a class of its own, so that images of one class are
    told apart by what is their own: give it labels of instances (`labels = arange(N)`) and as many classes. With labels
    of classes it is the plain softmax loss. `NormSoftmaxLoss` is the same with vectors x and w_j of length 1, no bias,
    and a fixed scale in the place of the lengths. On unit embeddings, as an `Embedder` gives them, the lengths of the
    w_j are the scale, and are learned; `representation="projection"` reads embeddings before normalisation.

    Args:
        num_classes: C, the number of instances or classes; labels must lie in 0 .. C - 1.
        use_bias: Whether there is a b. The paper's head has none.
        representation: What is classified.
        reduction: `"mean"` over the images, or `"sum"`.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> objective = InstanceLoss(num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4)).shape)
        ()

    Source: Zheng et al., "Dual-Path Convolutional Image-Text Embeddings with Instance Loss", ACM TOMM 2020.
    """

    per_image = True

    def __init__(
        self,
        num_classes,
        use_bias=False,
        representation="embedding",
        reduction="mean",
        weight=1.0,
        name="instance",
        **kwargs,
    ):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.use_bias = boolean("use_bias", use_bias)
        self.representation = representation
        self.reduction = reduction

    def build_from(self, shapes):
        """Create the head."""
        size = shapes[self.representation][-1]
        bound = 1.0 / math.sqrt(size)
        uniform = keras.initializers.RandomUniform(-bound, bound)
        self.head = self.add_weight(name="head", shape=(self.num_classes, size), initializer=uniform)
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(name="bias", shape=(self.num_classes,), initializer="zeros")

    def compute(self, representations, labels):
        """One value per image."""
        refuse_unknown_classes(labels, self.num_classes, self.name)
        logits = pairwise.dot_products(representations[self.representation], self.head)
        if self.bias is not None:
            logits = logits + self.bias
        mask = target_mask(labels, self.num_classes)
        others = pairwise.masked_logsumexp(logits, ops.logical_not(mask), axis=1)
        values = ops.softplus(others - pairwise.masked_sum(logits, mask, axis=1))
        return ops.where(ops.any(mask, axis=1), values, float("nan"))
