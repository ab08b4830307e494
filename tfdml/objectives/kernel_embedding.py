"""Kernel embedding: joint representation similarity between classes (JRD), and the baselines JMMD and JIntra."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean
from tfdml.objectives.class_statistics import averaging_matrix
from tfdml.objectives.joint_kernel import LEVELS, JointKernelObjective


@keras.saving.register_keras_serializable("tfdml")
class JointRepresentationSimilarity(JointKernelObjective):
    """The JRS regulariser: similarity between the joint representations of different classes.

    L_JRS / N_pairs = (1/N_pairs) sum over ordered (i, j), y_i != y_j, of
        k-(x-_i, x-_j) k(x_i, x_j) k+(x+_i, x+_j)

    with x- the pooled features, x the embedding and x+ the class similarities. Added to AMSoftmax with weight alpha it
    is the paper's objective (eq. 11):

        objectives = [ProxyLoss(AMSoftmaxLoss(20.0, 0.1), num_classes), JointRepresentationSimilarity(weight=1.0)]

    The gradient reaches every level, the class proxies too. A batch of one class gives 0.

    Kernels that grow with x . x' (`Polynomial`, `Exponential`) explode on pooled features, whose products are in the
    hundreds: where the largest product of the levels' kernels is beyond e^70, the term is divided by what is too much.
    Its gradient then has the right direction and a bounded length; but such a term drowns all others, so give those
    kernels `unit_length="pooled"`.

    Args:
        levels: Any subset of `"pooled"`, `"embedding"`, `"class"`, or other representations. The paper's variants: all
            three (JRD), `("embedding",)` (MRD), `("pooled", "embedding")` (JRD-C), `("embedding", "class")`
            (JRD-Pooling).
        kernels: None for the paper's, mixtures of Gaussians with multipliers (0.5, 1, 2) for pooled and embedding and
            (1,) for class; or one kernel for all levels; or one per level, as a sequence or a dict.
        reduction: `"mean"` over the pairs, or `"sum"` (L_JRS itself, eq. 9).
        weight: alpha. The paper uses 1 (CUB, CARS) and 0.4 (SOP), and 0.001 with `Polynomial` and `Exponential`.
        name: The term's name in logs.
        unit_length: The levels whose vectors are first scaled to length 1, such as `"pooled"`. By default none: the
            paper's pooled features have any length.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> jrs = JointRepresentationSimilarity(levels=("pooled", "embedding"))
        >>> representations = {"pooled": keras.random.normal((6, 32)), "embedding": keras.random.normal((6, 8))}
        >>> tuple(jrs(representations, keras.ops.array([0, 0, 1, 1, 2, 2])).shape)
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
        unit_length=(),
        **kwargs,
    ):
        super().__init__(levels, kernels, reduction, weight, name, unit_length, **kwargs)

    def counted(self, negatives):
        """The pairs of different class."""
        return negatives

    def between(self, gram, labels):
        """The joint kernel itself."""
        del labels
        return gram


class _NormObjective(JointKernelObjective):
    """Base of the alternatives, on norms of the classes' embeddings C_I = (1/n_I) sum over i in I of k(., x_i)."""

    whole_batch = True

    def __init__(self, levels, kernels, squared, reduction, weight, name, unit_length, **kwargs):
        super().__init__(levels, kernels, reduction, weight, name, unit_length, **kwargs)
        self.squared = boolean("squared", squared)

    def between(self, gram, labels):
        """The value of the two classes at each pair of their images."""
        averaging = averaging_matrix(labels)
        products = ops.matmul(ops.matmul(averaging, gram), ops.transpose(averaging))
        return self.of_classes(products, ops.diagonal(products))

    def of_classes(self, products, squared_norms):
        """The value from the inner products <C_I, C_J> (N, N) and |C_I|^2 (N,), at each image of the classes."""
        raise TypeError(f"{type(self).__name__} must define of_classes()")


@keras.saving.register_keras_serializable("tfdml")
class JointMMD(_NormObjective):
    """The JMMD regulariser: minus the distance between the joint kernel embeddings of different classes.

    L / N_pairs = (1/N_pairs) sum over ordered pairs of classes I != J of n_I n_J D_IJ,
    D_IJ = -|C_I - C_J|,   |C_I - C_J|^2 = <C_I, C_I> + <C_J, C_J> - 2 <C_I, C_J>

    with <C_I, C_J> the mean over i in I, j in J of the product of the levels' kernels (i = j included). Minimising it
    parts the classes as `JointRepresentationSimilarity` does, and also draws each class together, which the paper holds
    to cost generalisation. N_pairs and the weights n_I n_J are those of the JRS regulariser, in whose place it stands.

    The gradient of the distance is 0 between classes that coincide up to rounding.

    Args:
        levels: As in `JointRepresentationSimilarity`.
        kernels: As in `JointRepresentationSimilarity`.
        squared: D_IJ = -|C_I - C_J|^2, the MMD^2 of eq. 14, instead of the norm that eq. 15 prints.
        reduction: `"mean"`, over the pairs of images, or `"sum"`.
        weight: alpha; the paper's best is 0.1.
        name: The term's name in logs.
        unit_length: As in `JointRepresentationSimilarity`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [0.0, 1.0]])}
        >>> jmmd = JointMMD("embedding", kernels=tfdml.kernels.Polynomial(1), squared=True)
        >>> float(jmmd(representations, keras.ops.array([0, 1])))  # -(2 + 2 - 2)
        -2.0

    Source: Chu et al., ICML 2020, eq. 15; Long et al., "Deep Transfer Learning with Joint Adaptation Networks", 2017.
    """

    def __init__(
        self,
        levels=LEVELS,
        kernels=None,
        squared=False,
        reduction="mean",
        weight=1.0,
        name="joint_mmd",
        unit_length=(),
        **kwargs,
    ):
        super().__init__(levels, kernels, squared, reduction, weight, name, unit_length, **kwargs)

    def of_classes(self, products, squared_norms):
        """Minus the distance."""
        norms = squared_norms[:, None] + squared_norms[None, :]
        gaps = norms - 2.0 * products
        # Where nothing but rounding is left of the difference, a root would make much of it.
        gaps = ops.where(gaps <= 1e-6 * norms, 0.0, gaps)
        return -gaps if self.squared else -pairwise.safe_sqrt(gaps)


@keras.saving.register_keras_serializable("tfdml")
class JointIntra(_NormObjective):
    """The JIntra regulariser: minus the lengths of the joint kernel embeddings of classes.

    L / N_pairs = (1/N_pairs) sum over ordered pairs of classes I != J of n_I n_J (-|C_I| - |C_J|)

    with |C_I|^2 the mean over i, i' in I of the product of the levels' kernels (i = i' included): it draws each class
    together and does nothing else. N_pairs and the weights n_I n_J are those of the JRS regulariser, in whose place it
    stands. A batch of one class has no pair of classes, and gives 0.

    Args:
        levels: As in `JointRepresentationSimilarity`.
        kernels: As in `JointRepresentationSimilarity`.
        squared: -|C_I|^2 - |C_J|^2, the terms of MMD^2 (eq. 14), instead of the norms that eq. 16 prints.
        reduction: `"mean"`, over the pairs of images, or `"sum"`.
        weight: alpha.
        name: The term's name in logs.
        unit_length: As in `JointRepresentationSimilarity`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [0.0, 1.0]])}
        >>> float(JointIntra("embedding")(representations, keras.ops.array([0, 1])))  # k(x, x) = 1
        -2.0

    Source: Chu et al., ICML 2020, eq. 16.
    """

    def __init__(
        self,
        levels=LEVELS,
        kernels=None,
        squared=False,
        reduction="mean",
        weight=1.0,
        name="joint_intra",
        unit_length=(),
        **kwargs,
    ):
        super().__init__(levels, kernels, squared, reduction, weight, name, unit_length, **kwargs)

    def of_classes(self, products, squared_norms):
        """Minus the sum of the two lengths."""
        del products
        lengths = squared_norms if self.squared else pairwise.safe_sqrt(squared_norms)
        return -(lengths[:, None] + lengths[None, :])
