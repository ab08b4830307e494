"""Reproducing kernels: k(x) is the (B, B) Gram matrix of a batch, k(x, y) the (B, B') one between
two sets.

The bandwidth of the translation-invariant kernels adapts to the batch as in Chu et al., "Distance
Metric Learning with Joint Representation Diversification", ICML 2020, sec. 5.1: it is the mean
distance between different images of the batch, with the gradient stopped.
"""

from collections.abc import Iterable, Sequence

from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number
from tfdml.pairs import Pairs
from tfdml.registry import register
from tfdml.saving import Composed


class Kernel(Composed):
    """A reproducing kernel on vectors; subclasses give `matrix`, and keep their arguments under
    their names.

    A subclass whose values may be too large for float32 also gives `scaled_matrix`.

    Attributes:
        whole_batch: Whether the values of an anchor depend on those of others, so that all anchors
            are needed.
    """

    whole_batch = False

    def __call__(self, x, y=None):
        """Compute the Gram matrix: (B, D) -> (B, B), or (B, D), (B', D) -> (B, B')."""
        pairs = Pairs.of_batch(x) if y is None else Pairs.between(x, y)
        return self.matrix(_checked(pairs))

    def scaled(self, pairs: Pairs):
        """Compute the Gram matrix as factor * exp(exponent), neither of which overflows where the
        matrix would.

        Args:
            pairs: Those of a batch.

        Returns:
            The factor (b, B), and the exponent: (b, B), or a scalar, or None for 0.
        """
        return self.scaled_matrix(_checked(pairs))

    def scaled_matrix(self, pairs):
        """Compute the factor and the exponent of validated pairs; by default the matrix itself, and
        None."""
        return self.matrix(pairs), None

    def matrix(self, pairs):
        """Compute the Gram matrix (b, B) of validated pairs."""
        raise TypeError(f"{type(self).__name__} must define matrix()")


def _mean_distance(distances, pairs):
    """Return the mean over pairs of different images, gradient stopped; 1 where every distance is
    0."""
    anchors, references = (
        ops.cast(n, "float32") for n in (pairs.num_anchors, ops.shape(distances)[1])
    )
    # An anchor's distance to itself is 0, so the sum over all pairs is that over pairs of different
    # images.
    others = references - 1.0 if pairs.within else references
    total = pairs.total(ops.stop_gradient(ops.sum(distances)))
    mean = total / ops.maximum(anchors * others, 1.0)
    return ops.where(mean > 0, mean, 1.0)


@register("kernel")
class GaussianMixture(Kernel):
    """A mixture of Gaussians: (1/K) sum_k exp(-|x - x'|^2 / (m_k tau)).

    There is no factor 1/2 in the exponent. tau is the mean squared distance between different
    images of the batch (of all pairs, in the form with two arguments), gradient stopped, unless
    `bandwidth` fixes it.

    Args:
        multipliers: The m_k. The paper's are (0.5, 1, 2) for pooled features and embeddings, (1,)
            for class similarities.
        bandwidth: A fixed tau, in squared units of x; None adapts it to each batch.

    Raises:
        ValueError: There is no multiplier, or one is not positive.

    Example:
        >>> kernel = GaussianMixture(multipliers=(0.5, 1.0, 2.0))
        >>> tuple(kernel(keras.random.normal((4, 8))).shape)
        (4, 4)

    Source: Chu et al., ICML 2020, sec. 5.1, "Kernel design".
    """

    def __init__(
        self, multipliers: Sequence[float] = (0.5, 1.0, 2.0), bandwidth: float | None = None
    ):
        listed = tuple(multipliers) if isinstance(multipliers, Iterable) else ()
        if not listed:
            raise ValueError(
                f"multipliers must be one or more positive numbers, not {multipliers!r}"
            )
        self.multipliers = tuple(number("each of multipliers", m, above=0) for m in listed)
        self.bandwidth = _check_bandwidth(bandwidth)

    def matrix(self, pairs):
        """Compute the Gram matrix (b, B) of validated pairs."""
        squared = pairs.distances("sqeuclidean")
        tau = _mean_distance(squared, pairs) if self.bandwidth is None else self.bandwidth
        total = sum(ops.exp(-squared / (m * tau)) for m in self.multipliers)
        return total / len(self.multipliers)


@register("kernel")
class Laplace(Kernel):
    """The Laplace kernel exp(-|x - x'|_1 / (m sigma)).

    sigma is the mean L1 distance between different images of the batch, gradient stopped, unless
    `bandwidth` fixes it. Memory is O(B^2 + B D): the B^2 D differences are never all alive.

    Args:
        multiplier: The m above.
        bandwidth: A fixed sigma, in units of x; None adapts it to each batch.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> tuple(Laplace()(keras.random.normal((4, 8))).shape)
        (4, 4)

    Source: Chu et al., ICML 2020, table 4.
    """

    def __init__(self, multiplier: float = 1.0, bandwidth: float | None = None):
        self.multiplier = number("multiplier", multiplier, above=0)
        self.bandwidth = _check_bandwidth(bandwidth)

    def matrix(self, pairs):
        """Compute the Gram matrix (b, B) of validated pairs."""
        absolute = pairwise.absolute_distances(pairs.anchors, pairs.references)
        sigma = _mean_distance(absolute, pairs) if self.bandwidth is None else self.bandwidth
        return ops.exp(-absolute / (self.multiplier * sigma))


@register("kernel")
class Polynomial(Kernel):
    """The inhomogeneous polynomial kernel (x . x' + 1)^p.

    Args:
        degree: p, an integer in 1 .. 100. The paper tries 2 and 5.

    Raises:
        ValueError: `degree` is no such integer.

    Example:
        >>> float(Polynomial(degree=2)(keras.ops.ones((2, 3)))[0, 1])
        16.0

    Source: Chu et al., ICML 2020, table 4.
    """

    whole_batch = True

    def __init__(self, degree: int = 2):
        self.degree = integer("degree", degree, at_least=1, at_most=100)

    def matrix(self, pairs):
        """Compute the Gram matrix (b, B) of validated pairs."""
        return self._power(pairs.products() + 1.0)

    def scaled_matrix(self, pairs):
        """Compute ((x . x' + 1) / c)^p and p ln(c), with c the largest |x . x' + 1|, gradient
        stopped."""
        base = pairs.products() + 1.0
        largest = ops.max(ops.abs(ops.stop_gradient(base)), initial=1.0)
        return self._power(base / largest), self.degree * ops.log(largest)

    def _power(self, base):
        # Repeated products rather than power(): their gradient is right at negative bases too.
        result = base
        for _ in range(self.degree - 1):
            result = result * base
        return result


@register("kernel")
class Exponential(Kernel):
    """The kernel exp(x . x'), whose mean embedding is the moment-generating function.

    Args:
        max_exponent: x . x' is clipped from above at this value, since float32 overflows at 88. It
            matters for features that are not normalized only; unit vectors never reach it. The
            product of several levels' kernels is bounded as a whole instead: see
            `tfdml.objectives.JointRepresentationSimilarity`.

    Raises:
        ValueError: `max_exponent` is not positive, or above 88.

    Example:
        >>> float(Exponential()(keras.ops.zeros((2, 3)))[0, 1])
        1.0

    Source: Chu et al., ICML 2020, table 4.
    """

    whole_batch = True

    def __init__(self, max_exponent: float = 80.0):
        self.max_exponent = number("max_exponent", max_exponent, above=0, at_most=88)

    def matrix(self, pairs):
        """Compute the Gram matrix (b, B) of validated pairs."""
        return ops.exp(ops.minimum(pairs.products(), self.max_exponent))

    def scaled_matrix(self, pairs):
        """Compute 1 and x . x'."""
        exponent = pairs.products()
        return ops.ones_like(exponent), exponent


def _checked(pairs):
    shapes = [tuple(x.shape) for x in (pairs.anchors, pairs.references)]
    if any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            "a kernel takes vectors (B, D), not shape "
            f"{' and '.join(map(str, dict.fromkeys(shapes)))}"
        )
    return pairs


def _check_bandwidth(bandwidth):
    return None if bandwidth is None else number("bandwidth", bandwidth, above=0)
