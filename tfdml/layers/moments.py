"""High-order moments of feature maps, computed block by block."""

import functools
import itertools
import math
from collections.abc import Sequence

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, one_of
from tfdml.saving import SavedByArguments

# Moments that are computed at a time: wide enough for efficient products of matrices, narrow enough to stay small.
_BLOCK = 256


def average_products(features, projections, lengths, in_blocks=True):
    """Averages over positions of the products of the first l projections, for each l of `lengths`, block by block.

    m_l = (1/n) sum over positions p of (V_1 x_p) * ... * (V_l x_p)

    The gradient computes the products of each block again, so that those of all blocks are never held at a time.

    Args:
        features: (B, n, c) float32.
        projections: K matrices V (d, c).
        lengths: Which products are averaged, each between 1 and K.
        in_blocks: False computes all at once, for formats that hold no loop. Memory is then that of all products.

    Returns:
        (len(lengths), B, d) float32.
    """
    if not in_blocks:
        return _averages(lengths, features, *projections)
    dim, channels = projections[0].shape
    count = math.ceil(dim / _BLOCK)
    size = math.ceil(dim / count)
    padded = [ops.pad(matrix, ((0, count * size - dim), (0, 0))) for matrix in projections]
    blocks = [ops.reshape(matrix, (count, size, channels)) for matrix in padded]
    averages_of_block = keras.remat(functools.partial(_averages, lengths))
    averages = ops.map(lambda matrices: averages_of_block(features, *matrices), blocks)
    averages = ops.transpose(averages, (1, 2, 0, 3))
    return ops.reshape(averages, (*ops.shape(averages)[:2], count * size))[:, :, :dim]


def _averages(lengths, features, *projections):
    averages, product = [], None
    for length, matrix in enumerate(projections, 1):
        projected = ops.matmul(features, ops.transpose(matrix))
        product = projected if product is None else product * projected
        if length in lengths:
            averages.append(ops.mean(product, axis=1))
    return ops.stack(averages)


MODES = ("cascaded", "independent", "random")
_HIGHEST_ORDER = 100


class HighOrderMoments(SavedByArguments, keras.layers.Layer):
    """Approximate moments of order 2 to K of the features x at the positions of a map, averaged over positions.

    phi_2(x) = d^(-1/2) (W_1' x) * (W_2' x),    phi_k(x) = phi_{k-1}(x) * (W_k' x),    m_k = mean over x of phi_k(x)

    with elementwise products and d = `dim`. Random projections of +-1 make <phi_k(x), phi_k(y)> an unbiased estimate of
    <x, y>^k, up to the one factor 1/d that d^(-1/2) stands for.

    The products, (positions, d) for each order, are never held: blocks of 256 moments are computed one after another,
    and once more for the gradient. That costs a third more arithmetic, and 256 / d of the memory.
    Weights, products and averages are float32 under every dtype policy: half precision overflows at order 5.

    Args:
        orders: K for the orders 2 .. K, or the orders themselves, ascending.
        dim: d, the number of moments of each order.
        mode: `"cascaded"`: K trained projections, shared by the orders as above; `"independent"`: k trained projections
            of its own for each order k; `"random"`: the same, but fixed at +-1 (Random Maclaurin).

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> moments = HighOrderMoments(orders=3, dim=512)(keras.random.normal((4, 7, 7, 64)))
        >>> {order: tuple(value.shape) for order, value in moments.items()}
        {2: (4, 512), 3: (4, 512)}

    Source: Jacob et al., "Metric Learning With HORDE", ICCV 2019, eq. 4 to 6 and algorithm 1; the modes are those of
    tables 5, 4 and 3.
    """

    def __init__(self, orders=5, dim=8192, mode="cascaded", **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.orders = as_orders(orders)
        self.dim = integer("dim", dim, at_least=1)
        self.mode = one_of("mode", mode, MODES)
        #: False computes all products at once, for formats that hold no loop.
        self.in_blocks = True

    @property
    def chains(self) -> list[tuple[int, tuple[int, ...]]]:
        """The number of projections of each chain of products, and the orders that are read off it."""
        if self.mode == "cascaded":
            return [(self.orders[-1], self.orders)]
        return [(order, (order,)) for order in self.orders]

    def build(self, input_shape):
        """Create the projections W', (d, c) each."""
        self.projections: list[keras.Variable] = []
        for length, orders in self.chains:
            prefix = "" if self.mode == "cascaded" else f"order_{orders[0]}_"
            for k in range(length):
                name = f"{prefix}projection_{k + 1}"
                self.projections.append(
                    self.add_weight(
                        (self.dim, input_shape[-1]),
                        _random_signs if self.mode == "random" else "glorot_uniform",
                        trainable=self.mode != "random",
                        name=name,
                    )
                )

    def call(self, features):
        """(B, ..., c), such as (B, h, w, c) or (B, n, c) -> the moments (B, d) by order."""
        channels = features.shape[-1]
        features = ops.cast(features, "float32")
        batch, positions = ops.shape(features)[0], math.prod(ops.shape(features)[1:-1])
        features = ops.reshape(features, (batch, positions, channels))
        moments: dict = {}
        first = 0
        for length, orders in self.chains:
            chain = [ops.convert_to_tensor(weight) for weight in self.projections[first : first + length]]
            first += length
            averages = average_products(features, chain, orders, self.in_blocks)
            moments.update(zip(orders, ops.unstack(averages, len(orders)), strict=True))
        return {order: self.dim**-0.5 * moments[order] for order in self.orders}

    def compute_output_spec(self, features):
        """(B, d) float32 by order."""
        return {order: keras.KerasTensor((features.shape[0], self.dim), dtype="float32") for order in self.orders}


def _random_signs(shape, dtype=None):
    return ops.where(keras.random.uniform(shape) < 0.5, ops.cast(-1.0, dtype), ops.cast(1.0, dtype))


class MomentEmbeddings(SavedByArguments, keras.layers.Layer):
    """Embeddings of the moments of a feature map: a bias-free dense layer for each order, then L2.

    features (B, ..., c) -> reduction (optional) -> moments (B, dim) of each order -> dense (B, d) -> L2

    Args:
        orders: As in `HighOrderMoments`.
        dim: The number of moments of each order.
        embedding_dim: d; None for no dense layer: the moments themselves, of length 1.
        mode: As in `HighOrderMoments`.
        reduce_to: The channels to which a trained, bias-free 1 x 1 convolution takes the features first; None for none.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> layer = MomentEmbeddings(orders=[2, 3], dim=512, embedding_dim=64)
        >>> tuple(layer(keras.random.normal((4, 7, 7, 32)))[3].shape)
        (4, 64)

    Source: Jacob et al., ICCV 2019, figure 2.
    """

    def __init__(self, orders=5, dim=8192, embedding_dim=512, mode="cascaded", reduce_to=None, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        for name, size in (("embedding_dim", embedding_dim), ("reduce_to", reduce_to)):
            if size is not None:
                integer(name, size, at_least=1)
        self.moments = HighOrderMoments(orders, dim, mode, name="moments")
        self.orders, self.dim, self.mode = self.moments.orders, self.moments.dim, mode
        self.embedding_dim = embedding_dim
        #: The size of each embedding.
        self.output_dim = embedding_dim or self.dim
        self.reduce_to = reduce_to
        self.reduction = keras.layers.Dense(reduce_to, use_bias=False, name="reduction") if reduce_to else None
        names = [f"order_{order}" for order in self.orders] if embedding_dim else []
        self.dense = {name: keras.layers.Dense(embedding_dim, use_bias=False, name=name) for name in names}

    def build(self, input_shape):
        """Create the weights for features of the shape given."""
        if self.reduction is not None:
            self.reduction.build(input_shape)
            input_shape = (*input_shape[:-1], self.reduce_to)
        self.moments.build(input_shape)
        for dense in self.dense.values():
            dense.build((input_shape[0], self.moments.dim))

    def call(self, features):
        """(B, ..., c) -> unit vectors (B, d) by order; a zero map gives zero vectors."""
        features = ops.cast(features, "float32")
        moments = self.moments(features if self.reduction is None else self.reduction(features))
        return {order: self._embed(order, moments[order]) for order in self.orders}

    def _embed(self, order, moments):
        # The direction is all that matters: without its scale, x^5 of small features is not taken for a zero vector.
        largest = ops.stop_gradient(ops.max(ops.abs(moments), axis=-1, keepdims=True, initial=0.0))
        moments = moments / ops.where(largest > 0, largest, 1.0)
        return pairwise.l2_normalize(self.dense[f"order_{order}"](moments) if self.dense else moments)

    def compute_output_spec(self, features):
        """(B, d) float32 by order."""
        shape = (features.shape[0], self.output_dim)
        return {order: keras.KerasTensor(shape, dtype="float32") for order in self.orders}


def as_orders(orders: int | Sequence[int]) -> tuple[int, ...]:
    """Return the orders that K, or a sequence of orders, stands for.

    Raises:
        ValueError: One is below 2, or they do not ascend.

    Example:
        >>> as_orders(4), as_orders([3, 5])
        ((2, 3, 4), (3, 5))
    """
    if isinstance(orders, Sequence) and not isinstance(orders, str):
        listed = tuple(integer("each of orders", order) for order in orders)
    else:
        # Moments beyond the hundredth are no use to anyone, and a list of a billion would take the memory first.
        listed = tuple(range(2, integer("orders", orders, at_most=_HIGHEST_ORDER) + 1))
    if not listed or listed[0] < 2 or any(b <= a for a, b in itertools.pairwise(listed)):
        raise ValueError(f"orders must be K >= 2 or ascending orders from 2 on, such as [2, 3], not {orders}")
    return listed
