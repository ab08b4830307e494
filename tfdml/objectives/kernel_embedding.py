"""Kernel embedding: joint representation similarity between classes (JRD), and the baselines JMMD
and JIntra."""

from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, one_of
from tfdml.kernels import GaussianMixture, Kernel
from tfdml.objectives.base import Objective
from tfdml.registry import register
from tfdml.saving import restore

LEVELS = ("pooled", "embedding", "class")

# The largest logarithm of a joint kernel's value. float32 ends at e^88.7; the rest is room for sums
# over pairs and over the steps of an epoch, and for the gradient on its way through the network.
_MAX_EXPONENT = 70.0


def _default_kernel(level: str) -> Kernel:
    return GaussianMixture((1.0,)) if level == "class" else GaussianMixture((0.5, 1.0, 2.0))


class JointKernelObjective(Objective):
    """Base of the objectives on the product of one kernel per level, the kernel of joint
    representations.

    A subclass defines `between(gram, labels)`, whose values are reduced over ordered pairs of
    different class. A value of two classes that stands at each pair of their images is so weighted
    by n_I n_J, as in eq. 9 of the paper.

    Args:
        levels: The representations whose joint distribution is compared, each with its kernel.
        kernels: None for the paper's; one `tfdml.kernels.Kernel` for all levels; a sequence with
            one per level, or a dict by level.
        reduction: `"mean"` over the pairs, or `"sum"`.
        unit_length: The levels whose vectors are first scaled to length 1, a name or several.

    Raises:
        ValueError: There is no level, one is given twice, the kernels or `unit_length` do not fit
            the levels, or the reduction is unknown; or a level has no vectors (B, D).
    """

    learns_from = ("negative",)
    reads: tuple[str, ...] = ()

    def __init__(self, levels=LEVELS, kernels=None, reduction="mean", unit_length=(), **kwargs):
        super().__init__(**kwargs)
        self.reduction = one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.levels = (levels,) if isinstance(levels, str) else tuple(levels)
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise ValueError(
                f"{self.name}: levels must be one or more different names, not {levels}"
            )
        self.reads = self.levels
        self.kernels = self._kernels_by_level(kernels)
        # The largest value of the batch decides the scale of such a kernel.
        self.whole_batch = self.whole_batch or any(
            kernel.whole_batch for kernel in self.kernels.values()
        )
        self.unit_length = (unit_length,) if isinstance(unit_length, str) else tuple(unit_length)
        if not set(self.unit_length) <= set(self.levels):
            raise ValueError(
                f"{self.name}: unit_length={list(self.unit_length)}, but the levels are "
                f"{self.levels}"
            )

    def _kernels_by_level(self, kernels) -> dict[str, Kernel]:
        kernels = restore(kernels)
        if kernels is None:
            return {level: _default_kernel(level) for level in self.levels}
        if not isinstance(kernels, dict):
            listed = kernels if isinstance(kernels, (list, tuple)) else [kernels] * len(self.levels)
            if len(listed) != len(self.levels):
                raise ValueError(
                    f"{self.name}: {len(listed)} kernels for {len(self.levels)} levels"
                )
            kernels = dict(zip(self.levels, listed, strict=True))
        if set(kernels) != set(self.levels):
            raise ValueError(
                f"{self.name}: kernels for {sorted(kernels)}, but the levels are {self.levels}"
            )
        by_level = {level: restore(kernels[level]) for level in self.levels}
        for kernel in by_level.values():
            if not isinstance(kernel, Kernel):
                raise ValueError(
                    f"{self.name}: kernels must be of tfdml.kernels, such as laplace(), not "
                    f"{kernel!r}"
                )
        return by_level

    def joint_kernel(self, pairs, mask=None):
        """Compute the product over levels of their Gram matrices, (b, B).

        Where its largest value is beyond e^70, all values are divided by what is too much, a
        constant.

        Args:
            pairs: `tfdml.pairs.Pairs` by level.
            mask: (b, B) boolean, the pairs that count; the others have no meaning. None for all.
        """
        product, exponent = None, None
        for level, kernel in self.kernels.items():
            vectors = pairs[level]
            if len(vectors.references.shape) != 2:
                shape = tuple(vectors.references.shape)
                raise ValueError(
                    f"{self.name}: the level {level!r} takes vectors (B, D), not shape {shape}"
                )
            factor, power = kernel.scaled(
                vectors.map(pairwise.l2_normalize) if level in self.unit_length else vectors
            )
            product = factor if product is None else product * factor
            if power is not None:
                exponent = power if exponent is None else exponent + power
        if exponent is None:
            return product
        exponent = exponent + ops.zeros_like(product)
        if mask is not None:
            exponent = ops.where(mask, exponent, 0.0)
        # A factor that is all but 0 bounds nothing; exp() of its pair must not overflow all the
        # same.
        logarithm = exponent + ops.log(ops.maximum(ops.abs(product), 1e-30))
        if mask is not None:
            logarithm = ops.where(mask, logarithm, -float("inf"))
        excess = ops.stop_gradient(ops.max(logarithm, initial=_MAX_EXPONENT) - _MAX_EXPONENT)
        return product * ops.exp(ops.minimum(exponent - excess, _MAX_EXPONENT + 15.0))

    def between(self, gram, labels):
        """Compute the value at each pair of images of different class: (b, B), labels (B,) -> (b,
        B)."""
        raise TypeError(f"{type(self).__name__} must define between()")

    def compute_pairs(self, pairs):
        """Compute the mean (or sum) over ordered pairs of different class; 0 for a batch of one
        class."""
        batch = pairs[self.levels[0]]
        values = self.between(self.joint_kernel(pairs, self.counted(batch.negatives)), batch.labels)
        reduce = pairwise.masked_sum if self.reduction == "sum" else batch.mean
        return reduce(values, batch.negatives)

    def counted(self, negatives):
        """Return the pairs whose joint kernel `between` reads, (b, B) boolean; None for all."""


@register("objective", alias="jrs")
class JointRepresentationSimilarity(JointKernelObjective):
    """The JRS regularizer: similarity between the joint representations of different classes.

    L_JRS / N_pairs = (1/N_pairs) sum over ordered (i, j), y_i != y_j, of
        k-(x-_i, x-_j) k(x_i, x_j) k+(x+_i, x+_j)

    with x- the pooled features, x the embedding and x+ the class similarities. Added to AMSoftmax
    with weight alpha it is the paper's objective (eq. 11):

        objectives = [ProxyLoss(AMSoftmaxLoss(20.0, 0.1), num_classes),
                      JointRepresentationSimilarity(weight=1.0)]

    The gradient reaches every level, the class proxies too. A batch of one class gives 0.

    Kernels that grow with x . x' (`Polynomial`, `Exponential`) explode on pooled features, whose
    products are in the hundreds: where the largest product of the levels' kernels is beyond e^70,
    the term is divided by what is too much. Its gradient then has the right direction and a bounded
    length; but such a term drowns all others, so give those kernels `unit_length="pooled"`.

    Args:
        levels: Any subset of `"pooled"`, `"embedding"`, `"class"`, or other representations. The
            paper's variants: all three (JRD), `("embedding",)` (MRD), `("pooled", "embedding")`
            (JRD-C), `("embedding", "class")` (JRD-Pooling).
        kernels: None for the paper's, mixtures of Gaussians with multipliers (0.5, 1, 2) for pooled
            and embedding and (1,) for class; or one kernel for all levels; or one per level, as a
            sequence or a dict.
        reduction: `"mean"` over the pairs, or `"sum"` (L_JRS itself, eq. 9).
        weight: alpha. The paper uses 1 (CUB, CARS) and 0.4 (SOP), and 0.001 with `Polynomial` and
            `Exponential`.
        name: The term's name in logs; by default that of the class,
            `joint_representation_similarity`.
        unit_length: The levels whose vectors are first scaled to length 1, such as `"pooled"`. By
            default none: the paper's pooled features have any length.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> jrs = JointRepresentationSimilarity(levels=("pooled", "embedding"))
        >>> representations = {"pooled": keras.random.normal((6, 32)),
        ...     "embedding": keras.random.normal((6, 8))}
        >>> tuple(jrs(representations, keras.ops.array([0, 0, 1, 1, 2, 2])).shape)
        ()

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML
    2020, eq. 9 and 11.
    """

    def counted(self, negatives):
        """Return the pairs of different class."""
        return negatives

    def between(self, gram, labels):
        """Return the joint kernel itself."""
        return gram


class _NormObjective(JointKernelObjective):
    """Base of the alternatives, on norms of the classes' embeddings C_I = (1/n_I) sum over i in I
    of k(., x_i)."""

    whole_batch = True

    def __init__(self, levels=LEVELS, kernels=None, squared=False, **kwargs):
        super().__init__(levels, kernels, **kwargs)
        self.squared = boolean("squared", squared)

    def between(self, gram, labels):
        """Return the value of the two classes at each pair of their images."""
        averaging = averaging_matrix(labels)
        products = pairwise.matmul(pairwise.matmul(averaging, gram), ops.transpose(averaging))
        return self.of_classes(products, ops.diagonal(products))

    def of_classes(self, products, squared_norms):
        """Return the value from the inner products <C_I, C_J> (N, N) and |C_I|^2 (N,), at each
        image of the classes."""
        raise TypeError(f"{type(self).__name__} must define of_classes()")


@register("objective")
class JointMMD(_NormObjective):
    """The JMMD regularizer: minus the distance between the joint kernel embeddings of different
    classes.

    L / N_pairs = (1/N_pairs) sum over ordered pairs of classes I != J of n_I n_J D_IJ,
    D_IJ = -|C_I - C_J|,   |C_I - C_J|^2 = <C_I, C_I> + <C_J, C_J> - 2 <C_I, C_J>

    with <C_I, C_J> the mean over i in I, j in J of the product of the levels' kernels (i = j
    included). Minimizing it parts the classes as `JointRepresentationSimilarity` does, and also
    draws each class together, which the paper holds to cost generalization. N_pairs and the weights
    n_I n_J are those of the JRS regularizer, in whose place it stands.

    The gradient of the distance is 0 between classes that coincide up to rounding.

    Args:
        levels: As in `JointRepresentationSimilarity`.
        kernels: As in `JointRepresentationSimilarity`.
        squared: D_IJ = -|C_I - C_J|^2, the MMD^2 of eq. 14, instead of the norm that eq. 15 prints.
        reduction: `"mean"`, over the pairs of images, or `"sum"`.
        weight: alpha; the paper's best is 0.1.
        name: The term's name in logs; by default that of the class, `joint_mmd`.
        unit_length: As in `JointRepresentationSimilarity`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [0.0, 1.0]])}
        >>> jmmd = JointMMD("embedding", kernels=tfdml.kernels.Polynomial(1), squared=True)
        >>> float(jmmd(representations, keras.ops.array([0, 1])))  # -(2 + 2 - 2)
        -2.0

    Source: Chu et al., ICML 2020, eq. 15; Long et al., "Deep Transfer Learning with Joint
    Adaptation Networks", 2017.
    """

    def of_classes(self, products, squared_norms):
        """Minus the distance."""
        norms = squared_norms[:, None] + squared_norms[None, :]
        gaps = norms - 2.0 * products
        # Where nothing but rounding is left of the difference, a root would make much of it.
        gaps = ops.where(gaps <= 1e-6 * norms, 0.0, gaps)
        return -gaps if self.squared else -pairwise.safe_sqrt(gaps)


@register("objective")
class JointIntra(_NormObjective):
    """The JIntra regularizer: minus the lengths of the joint kernel embeddings of classes.

    L / N_pairs = (1/N_pairs) sum over ordered pairs of classes I != J of n_I n_J (-|C_I| - |C_J|)

    with |C_I|^2 the mean over i, i' in I of the product of the levels' kernels (i = i' included):
    it draws each class together and does nothing else. N_pairs and the weights n_I n_J are those of
    the JRS regularizer, in whose place it stands. A batch of one class has no pair of classes, and
    gives 0.

    Args:
        levels: As in `JointRepresentationSimilarity`.
        kernels: As in `JointRepresentationSimilarity`.
        squared: -|C_I|^2 - |C_J|^2, the terms of MMD^2 (eq. 14), instead of the norms that eq. 16
            prints.
        reduction: `"mean"`, over the pairs of images, or `"sum"`.
        weight: alpha.
        name: The term's name in logs; by default that of the class, `joint_intra`.
        unit_length: As in `JointRepresentationSimilarity`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [0.0, 1.0]])}
        >>> float(JointIntra("embedding")(representations, keras.ops.array([0, 1])))  # k(x, x) = 1
        -2.0

    Source: Chu et al., ICML 2020, eq. 16.
    """

    def of_classes(self, products, squared_norms):
        """Minus the sum of the two lengths."""
        lengths = squared_norms if self.squared else pairwise.safe_sqrt(squared_norms)
        return -(lengths[:, None] + lengths[None, :])


def averaging_matrix(labels):
    """(B, B) float32: row i is 1/n at the n images of the class of i, and 0 elsewhere.

    Example:
        >>> np.array(averaging_matrix(keras.ops.array([0, 0, 1]))).tolist()
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    same = ops.cast(labels[:, None] == labels[None, :], "float32")
    return same / ops.sum(same, axis=1, keepdims=True)
