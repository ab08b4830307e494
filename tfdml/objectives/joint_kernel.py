"""The product of one kernel per level, the kernel of joint representations, and what its objectives share."""

from __future__ import annotations

from keras import ops

from tfdml import pairwise
from tfdml.arguments import one_of
from tfdml.kernels import GaussianMixture, Kernel
from tfdml.objectives.base import Objective
from tfdml.saving import restore

LEVELS = ("pooled", "embedding", "class")

# The largest logarithm of a joint kernel's value. float32 ends at e^88.7; the rest is room for sums over pairs and over
# the steps of an epoch, and for the gradient on its way through the network.
_MAX_EXPONENT = 70.0


def _default_kernel(level: str) -> Kernel:
    return GaussianMixture((1.0,)) if level == "class" else GaussianMixture((0.5, 1.0, 2.0))


class JointKernelObjective(Objective):
    """Base of the objectives on the product of one kernel per level, the kernel of joint representations.

    A subclass defines `between(gram, labels)`, whose values are reduced over ordered pairs of different class. A value
    of two classes that stands at each pair of their images is so weighted by n_I n_J, as in eq. 9 of the paper.

    Args:
        levels: The representations whose joint distribution is compared, each with its kernel.
        kernels: None for the paper's; one `tfdml.kernels.Kernel` for all levels; a sequence with one per level, or a
            dict by level.
        reduction: `"mean"` over the pairs, or `"sum"`.
        weight: The factor of this term.
        name: The term's name in logs.
        unit_length: The levels whose vectors are first scaled to length 1, a name or several.

    Raises:
        ValueError: There is no level, one is given twice, the kernels or `unit_length` do not fit the levels, or the
            reduction is unknown; or a level has no vectors (B, D).
    """

    learns_from = ("negative",)

    def __init__(self, levels=LEVELS, kernels=None, reduction="mean", weight=1.0, name=None, unit_length=(), **kwargs):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.reduction = reduction
        self.levels = (levels,) if isinstance(levels, str) else tuple(levels)
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise ValueError(f"{self.name}: levels must be one or more different names, not {levels}")
        self.kernels = self._kernels_by_level(kernels)
        self.unit_length = (unit_length,) if isinstance(unit_length, str) else tuple(unit_length)
        if not set(self.unit_length) <= set(self.levels):
            raise ValueError(f"{self.name}: unit_length={list(self.unit_length)}, but the levels are {self.levels}")

    def _kernels_by_level(self, kernels) -> dict[str, Kernel]:
        by_level = self._assigned(kernels)
        for kernel in by_level.values():
            if not isinstance(kernel, Kernel):
                raise ValueError(f"{self.name}: kernels must be of tfdml.kernels, such as laplace(), not {kernel!r}")
        return by_level

    def _assigned(self, kernels) -> dict[str, Kernel]:
        if kernels is None:
            return {level: _default_kernel(level) for level in self.levels}
        kernels = restore(kernels)
        if isinstance(kernels, Kernel):
            return dict.fromkeys(self.levels, kernels)
        if isinstance(kernels, dict):
            if set(kernels) != set(self.levels):
                raise ValueError(f"{self.name}: kernels for {sorted(kernels)}, but the levels are {self.levels}")
            return {level: restore(kernels[level]) for level in self.levels}
        kernels = tuple(kernels) if isinstance(kernels, (list, tuple)) else (kernels,)
        if len(kernels) != len(self.levels):
            raise ValueError(f"{self.name}: {len(kernels)} kernels for {len(self.levels)} levels")
        return dict(zip(self.levels, kernels, strict=True))

    @property
    def reads(self):
        """The levels."""
        return self.levels

    def build_from(self, shapes):
        """Check that the levels are vectors, as far as their shapes are known yet."""
        for level in self.levels:
            if level in shapes:
                self._check_vectors(level, shapes[level])

    def _check_vectors(self, level, shape):
        if len(shape) != 2:
            raise ValueError(f"{self.name}: the level {level!r} takes vectors (B, D), not shape {tuple(shape)}")

    @property
    def whole_batch(self):
        """Whether the largest value of the batch decides the scale of a kernel."""
        return any(kernel.whole_batch for kernel in self.kernels.values())

    def joint_kernel(self, pairs, mask=None):
        """Computes the product over levels of their Gram matrices, (b, B).

        Where its largest value is beyond e^70, all values are divided by what is too much, a constant.

        Args:
            pairs: `tfdml.pairs.Pairs` by level.
            mask: (b, B) boolean, the pairs that count; the others have no meaning. None for all.
        """
        product, exponent = None, None
        for level, kernel in self.kernels.items():
            vectors = pairs[level]
            self._check_vectors(level, vectors.references.shape)
            factor, power = kernel.scaled(vectors.map(pairwise.l2_normalize) if level in self.unit_length else vectors)
            product = factor if product is None else product * factor
            if power is not None:
                exponent = power if exponent is None else exponent + power
        if exponent is None:
            return product
        exponent = exponent + ops.zeros_like(product)
        if mask is not None:
            exponent = ops.where(mask, exponent, 0.0)
        # A factor that is all but 0 bounds nothing; exp() of its pair must not overflow all the same.
        logarithm = exponent + ops.log(ops.maximum(ops.abs(product), 1e-30))
        counted = logarithm if mask is None else ops.where(mask, logarithm, -float("inf"))
        excess = ops.stop_gradient(ops.max(counted, initial=_MAX_EXPONENT) - _MAX_EXPONENT)
        return product * ops.exp(ops.minimum(exponent - excess, _MAX_EXPONENT + 15.0))

    def between(self, gram, labels):
        """Computes the value at each pair of images of different class: (b, B), labels (B,) -> (b, B)."""
        raise TypeError(f"{type(self).__name__} must define between()")

    def compute_pairs(self, pairs):
        """Computes the mean (or sum) over ordered pairs of different class; 0 for a batch of one class."""
        batch = pairs[self.levels[0]]
        values = self.between(self.joint_kernel(pairs, self.counted(batch.negatives)), batch.labels)
        reduce = pairwise.masked_sum if self.reduction == "sum" else batch.mean
        return reduce(values, batch.negatives)

    def counted(self, negatives):
        """The pairs whose joint kernel `between` reads, (b, B) boolean; None for all."""
        del negatives
