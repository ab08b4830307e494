"""Kernel embedding: joint representation similarity between classes (JRD)."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.kernels import GaussianMixture, Kernel
from tfdml.objectives.base import Objective, restore

LEVELS = ("pooled", "embedding", "class")


def _default_kernel(level: str) -> Kernel:
    return GaussianMixture((1.0,)) if level == "class" else GaussianMixture((0.5, 1.0, 2.0))


class JointKernelObjective(Objective):
    """Base of the objectives on the product of one kernel per level, the kernel of joint representations.

    Args:
        levels: The representations whose joint distribution is compared, each with its kernel.
        kernels: None for the paper's; one `tfdml.kernels.Kernel` for all levels; a sequence with one per level, or a
            dict by level.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: There is no level, one is given twice, or the kernels do not fit the levels.
    """

    def __init__(self, levels=LEVELS, kernels=None, weight=1.0, name=None, **kwargs):
        super().__init__(weight=weight, name=name, **kwargs)
        self.levels = (levels,) if isinstance(levels, str) else tuple(levels)
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise ValueError(f"{self.name}: levels must be one or more different names, not {levels}")
        self.kernels = self._kernels_by_level(kernels)

    def _kernels_by_level(self, kernels) -> dict[str, Kernel]:
        if kernels is None:
            return {level: _default_kernel(level) for level in self.levels}
        kernels = restore(kernels)
        if isinstance(kernels, Kernel):
            return dict.fromkeys(self.levels, kernels)
        if isinstance(kernels, dict):
            if set(kernels) != set(self.levels):
                raise ValueError(f"{self.name}: kernels for {sorted(kernels)}, but the levels are {self.levels}")
            return {level: restore(kernels[level]) for level in self.levels}
        kernels = tuple(kernels)
        if len(kernels) != len(self.levels):
            raise ValueError(f"{self.name}: {len(kernels)} kernels for {len(self.levels)} levels")
        return dict(zip(self.levels, kernels, strict=True))

    @property
    def reads(self):
        """The levels."""
        return self.levels

    def joint_kernel(self, representations):
        """The product over levels of their Gram matrices, (N, N)."""
        product = None
        for level, kernel in self.kernels.items():
            matrix = kernel(representations[level])
            product = matrix if product is None else product * matrix
        return product

    def get_config(self):
        """The arguments that make this objective anew."""
        kernels = {level: keras.saving.serialize_keras_object(kernel) for level, kernel in self.kernels.items()}
        return {**super().get_config(), "levels": list(self.levels), "kernels": kernels}


@keras.saving.register_keras_serializable("tfdml")
class JointRepresentationSimilarity(JointKernelObjective):
    """The JRS regulariser: similarity between the joint representations of different classes.

    L_JRS / N_pairs = (1/N_pairs) sum over ordered (i, j), y_i != y_j, of
        k-(x-_i, x-_j) k(x_i, x_j) k+(x+_i, x+_j)

    with x- the pooled features, x the embedding and x+ the class similarities. Added to AMSoftmax with weight alpha it
    is the paper's objective (eq. 11):

        objectives = [ProxyLoss(AMSoftmaxLoss(20.0, 0.1), num_classes), JointRepresentationSimilarity(weight=1.0)]

    The gradient reaches every level, the class proxies too. A batch of one class gives 0.

    Args:
        levels: Any subset of `"pooled"`, `"embedding"`, `"class"`, or other representations. The paper's variants: all
            three (JRD), `("embedding",)` (MRD), `("pooled", "embedding")` (JRD-C), `("embedding", "class")`
            (JRD-Pooling).
        kernels: None for the paper's, mixtures of Gaussians with multipliers (0.5, 1, 2) for pooled and embedding and
            (1,) for class; or one kernel for all levels; or one per level, as a sequence or a dict.
        reduction: `"mean"` over the pairs, or `"sum"` (L_JRS itself, eq. 9).
        weight: alpha. The paper uses 1 (CUB, CARS) and 0.4 (SOP).
        name: The term's name in logs.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> jrs = JointRepresentationSimilarity(levels=("pooled", "embedding"))
        >>> representations = {"pooled": keras.random.normal((6, 32)), "embedding": keras.random.normal((6, 8))}
        >>> jrs(representations, keras.ops.array([0, 0, 1, 1, 2, 2])).shape
        ()

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML 2020, eq. 9 and 11.
    """

    def __init__(
        self,
        levels=LEVELS,
        kernels=None,
        reduction="mean",
        weight=1.0,
        name="joint_representation_similarity",
        **kwargs,
    ):
        super().__init__(levels=levels, kernels=kernels, weight=weight, name=name, **kwargs)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"{self.name}: reduction must be 'mean' or 'sum', not {reduction!r}")
        self.reduction = reduction

    def compute(self, representations, labels):
        """The mean (or sum) of the joint kernel over ordered pairs of different class."""
        negatives = pairwise.negative_mask(labels)
        reduce = pairwise.masked_sum if self.reduction == "sum" else pairwise.masked_mean
        return reduce(self.joint_kernel(representations), ops.stop_gradient(negatives))

    def get_config(self):
        """The arguments that make this objective anew."""
        return {**super().get_config(), "reduction": self.reduction}
