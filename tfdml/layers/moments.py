"""High-order moments of feature maps, and the loop in which they are computed block by block."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, integer, one_of
from tfdml.saving import SavedByArguments

# Moments that are computed at a time: wide enough for efficient products of matrices, narrow enough
# to stay small.
_BLOCK = 256


def scan(
    body: Callable[[Any, Any], tuple[Any, tuple]], carry, length: int, shapes: Sequence[tuple]
):
    """Run `carry, outputs = body(carry, i)` for i = 0 .. length - 1, one step after another.

    TensorFlow's graph executor works ahead of `keras.ops.while_loop` by up to ten steps, which
    costs ten times the memory of one; here each step waits for the one before. There is no gradient
    through the loop: give one by `tfdml.pairwise.custom_gradient`.

    Args:
        body: From (carry, i), i an integer tensor, to the next carry and a tuple of float32
            outputs.
        carry: A tensor, or a tuple of them.
        length: The number of steps, at least 1.
        shapes: The static shape of each output of a step, None where a size is not known.

    Returns:
        The last carry, and a tuple of the outputs stacked: (length, ...).

    Example:
        >>> total, (doubled,) = scan(lambda total, i: (total + i, (2.0 * keras.ops.cast(i,
        ...     "float32"),)), 0, 3, [()])
        >>> int(total), np.array(doubled)
        (3, array([0., 2., 4.], dtype=float32))
    """
    if length == 1:
        carry, outputs = body(carry, 0)
        return carry, tuple(output[None] for output in outputs)
    if keras.backend.backend() != "tensorflow":
        return ops.scan(body, carry, ops.arange(length))
    import tensorflow as tf

    def step(i, carry, arrays):
        carry, outputs = body(carry, i)
        return (
            i + 1,
            carry,
            tuple(array.write(i, output) for array, output in zip(arrays, outputs, strict=True)),
        )

    arrays = tuple(tf.TensorArray("float32", length, element_shape=shape) for shape in shapes)
    state = (tf.constant(0), carry, arrays)
    _, carry, arrays = tf.while_loop(lambda i, *_: i < length, step, state, parallel_iterations=1)
    return carry, tuple(array.stack() for array in arrays)


def average_products(features, projections, lengths, trained=True, in_blocks=True):
    """Averages over positions of the products of the first l projections, for each l of `lengths`,
    block by block.

    m_l = (1/n) sum over positions p of (V_1 x_p) * ... * (V_l x_p)

    Memory is that of three blocks (B n, 256), and of about 2 K for the gradient, which computes the
    products again.

    Args:
        features: (B, n, c) float32.
        projections: K matrices V (d, c).
        lengths: Which products are averaged, each between 1 and K.
        trained: Whether a gradient to the projections is wanted.
        in_blocks: False computes all at once, for formats that hold no loop. Memory is then that of
            all products.

    Returns:
        (len(lengths), B, d) float32.
    """
    dim = projections[0].shape[0]
    count = math.ceil(dim / _BLOCK) if in_blocks else 1
    size = math.ceil(dim / count)
    blocks = [_in_blocks(matrix, count, size) for matrix in projections]
    products = _Products(lengths, count, size)
    if not in_blocks:
        return products.forward(features, blocks)
    if trained:
        averages = pairwise.custom_gradient(products.averages)(features, *blocks)
    else:
        averages = pairwise.custom_gradient(lambda x: products.averages(x, *blocks, trained=False))(
            features
        )
    return averages if count * size == dim else averages[:, :, :dim]


def _in_blocks(matrix, count, size):
    dim, channels = matrix.shape
    if count * size != dim:
        matrix = ops.pad(matrix, ((0, count * size - dim), (0, 0)))
    return ops.reshape(matrix, (count, size, channels))


class _Products:
    """The blocks of `average_products`, one after another, with the gradient that
    `pairwise.custom_gradient` takes."""

    def __init__(self, lengths, count, size):
        self.lengths = tuple(lengths)
        self.count = count
        self.size = size

    def averages(self, features, *stacks, trained=True):
        # Cut off from any tape, which would keep every block's products although gradient() never
        # asks for them.
        features, stacks = ops.stop_gradient(features), tuple(map(ops.stop_gradient, stacks))

        def gradient(upstream):
            return self.backward(features, stacks, upstream, trained)

        return self.forward(features, stacks), gradient

    def forward(self, features, stacks):
        rows = ops.reshape(features, (-1, features.shape[-1]))
        batch, positions = ops.shape(features)[:2]

        def average_block(carry, i):
            averages, product = [], None
            for k, stack in enumerate(stacks):
                projected = ops.matmul(rows, ops.transpose(self.take(stack, i)))
                product = projected if product is None else product * projected
                if k + 1 in self.lengths:
                    averages.append(
                        ops.mean(ops.reshape(product, (batch, positions, self.size)), axis=1)
                    )
            return carry, (ops.stack(averages),)

        shape = (len(self.lengths), features.shape[0], self.size)
        _, (averages,) = scan(average_block, ops.zeros((), "float32"), self.count, [shape])
        return ops.reshape(
            ops.transpose(averages, (1, 2, 0, 3)),
            (len(self.lengths), batch, self.count * self.size),
        )

    def backward(self, features, stacks, upstream, trained):
        channels = features.shape[-1]
        rows = ops.reshape(features, (-1, channels))
        batch, positions = ops.shape(features)[:2]
        upstream = self._by_block(upstream, batch, positions)

        def add_block(rows_gradient, i):
            matrices = [self.take(stack, i) for stack in stacks]
            projected = [ops.matmul(rows, ops.transpose(matrix)) for matrix in matrices]
            # products[k] = projected[0] * ... * projected[k]
            products = list(itertools.accumulate(projected[:-1], operator.mul))
            sum_gradients = ops.unstack(self.take(upstream, i), len(self.lengths))
            by_length = dict(zip(self.lengths, sum_gradients, strict=True))
            matrix_gradients = []
            # The gradient of products[k], from the last one to the first.
            of_product = ops.zeros_like(projected[0])
            for k in reversed(range(len(stacks))):
                if k + 1 in by_length:
                    of_product += self._at_positions(by_length[k + 1], batch, positions)
                of_projected = of_product if k == 0 else of_product * products[k - 1]
                rows_gradient = rows_gradient + ops.matmul(of_projected, matrices[k])
                if trained:
                    matrix_gradients.append(ops.matmul(ops.transpose(of_projected), rows))
                of_product = of_product * projected[k]
            return rows_gradient, tuple(reversed(matrix_gradients))

        shapes = [(self.size, channels)] * (len(stacks) if trained else 0)
        rows_gradient, matrix_gradients = scan(add_block, ops.zeros_like(rows), self.count, shapes)
        features_gradient = ops.reshape(rows_gradient, ops.shape(features))
        return (features_gradient, *matrix_gradients) if trained else features_gradient

    def _by_block(self, upstream, batch, positions):
        """Return the gradient of the sums over positions, (blocks, lengths, B, size)."""
        of_sums = upstream / ops.cast(positions, "float32")
        of_sums = ops.reshape(of_sums, (len(self.lengths), batch, self.count, self.size))
        return ops.transpose(of_sums, (2, 0, 1, 3))

    def _at_positions(self, gradient, batch, positions):
        """Return the gradient of a sum (B, size) at each of its positions, (B n, size)."""
        repeated = ops.broadcast_to(gradient[:, None, :], (batch, positions, self.size))
        return ops.reshape(repeated, (-1, self.size))

    def take(self, stacked, i):
        start = (i, *(0 for _ in stacked.shape[1:]))
        block = ops.slice(stacked, start, (1, *ops.shape(stacked)[1:]))
        return ops.cast(ops.reshape(block, ops.shape(stacked)[1:]), "float32")


MODES = ("cascaded", "independent", "random")
_HIGHEST_ORDER = 100


class HighOrderMoments(SavedByArguments, keras.layers.Layer):
    """Approximate moments of order 2 to K of the features x at the positions of a map, averaged
    over positions.

    phi_2(x) = d^(-1/2) (W_1' x) * (W_2' x),    phi_k(x) = phi_{k-1}(x) * (W_k' x),    m_k = mean
    over x of phi_k(x)

    with elementwise products and d = `dim`. Random projections of +-1 make <phi_k(x), phi_k(y)> an
    unbiased estimate of <x, y>^k, up to the one factor 1/d that d^(-1/2) stands for.

    The products, (positions, d) for each order, are never held: blocks of 256 moments are computed
    one after another, and once more for the gradient. That costs a third more arithmetic, and 256 /
    d of the memory. Weights, products and averages are float32 under every dtype policy: half
    precision overflows at order 5.

    Args:
        orders: K for the orders 2 .. K, or the orders themselves, ascending.
        dim: d, the number of moments of each order.
        mode: `"cascaded"`: K trained projections, shared by the orders as above; `"independent"`: k
            trained projections of its own for each order k; `"random"`: the same, but fixed at +-1
            (Random Maclaurin).
        scaled: False leaves out the factor d^(-1/2), as the authors' code does.
        seed: Of the initial projections (Glorot uniform when they are trained); by default drawn
            from Keras's seed.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> moments = HighOrderMoments(orders=3, dim=512)(keras.random.normal((4, 7, 7, 64)))
        >>> {order: tuple(value.shape) for order, value in moments.items()}
        {2: (4, 512), 3: (4, 512)}

    Source: Jacob et al., "Metric Learning With HORDE", ICCV 2019, eq. 4 to 6 and algorithm 1; the
    modes are those of tables 5, 4 and 3.
    """

    def __init__(self, orders=5, dim=8192, mode="cascaded", scaled=True, seed=None, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.orders = as_orders(orders)
        self.dim = integer("dim", dim, at_least=1)
        self.mode = one_of("mode", mode, MODES)
        self.scaled = boolean("scaled", scaled)
        self.seed = None if seed is None else integer("seed", seed, at_least=0)
        #: False computes all products at once, for formats that hold no loop.
        self.in_blocks = True

    @property
    def chains(self) -> list[tuple[int, tuple[int, ...]]]:
        """The number of projections of each chain of products, and the orders that are read off
        it."""
        if self.mode == "cascaded":
            return [(self.orders[-1], self.orders)]
        return [(order, (order,)) for order in self.orders]

    def build(self, input_shape):
        """Create the projections W', (d, c) each."""
        self.projections: list[keras.Variable] = []
        for length, orders in self.chains:
            prefix = "" if self.mode == "cascaded" else f"order_{orders[0]}_"
            for k in range(length):
                seed = None if self.seed is None else self.seed + len(self.projections)
                self.projections.append(
                    self._projection(f"{prefix}projection_{k + 1}", input_shape[-1], seed)
                )

    def _projection(self, name, channels, seed):
        shape = (self.dim, channels)
        if self.mode != "random":
            return self.add_weight(shape, keras.initializers.GlorotUniform(seed), name=name)
        uniform = keras.initializers.RandomUniform(-1.0, 1.0, seed)

        def signs(shape, dtype=None):
            return ops.cast(ops.where(uniform(shape) < 0, -1, 1), dtype)

        # A byte is enough, and there are many: 14 matrices for K = 5.
        return self.add_weight(shape, signs, dtype="int8", trainable=False, name=name)

    def call(self, features):
        """(B, ..., c), such as (B, h, w, c) or (B, n, c) -> the moments (B, d) by order."""
        channels = features.shape[-1]
        features = ops.cast(features, "float32")
        batch, positions = ops.shape(features)[0], math.prod(ops.shape(features)[1:-1])
        features = ops.reshape(features, (batch, positions, channels))
        moments: dict = {}
        first = 0
        for length, orders in self.chains:
            chain = [
                ops.convert_to_tensor(weight) for weight in self.projections[first : first + length]
            ]
            first += length
            averages = average_products(
                features, chain, orders, trained=self.mode != "random", in_blocks=self.in_blocks
            )
            moments.update(zip(orders, ops.unstack(averages, len(orders)), strict=True))
        scale = self.dim**-0.5 if self.scaled else 1.0
        return {order: scale * moments[order] for order in self.orders}

    def compute_output_spec(self, features):
        """(B, d) float32 by order."""
        return {
            order: keras.KerasTensor((features.shape[0], self.dim), dtype="float32")
            for order in self.orders
        }


class MomentEmbeddings(SavedByArguments, keras.layers.Layer):
    """Embeddings of the moments of a feature map: a bias-free dense layer for each order, then L2.

    features (B, ..., c) -> reduction (optional) -> moments (B, dim) of each order -> dense (B, d)
    -> L2

    Args:
        orders: As in `HighOrderMoments`.
        dim: The number of moments of each order.
        embedding_dim: d; None for no dense layer: the moments themselves, of length 1.
        mode: As in `HighOrderMoments`.
        reduce_to: The channels to which a trained, bias-free 1 x 1 convolution takes the features
            first; None for none.
        scaled: As in `HighOrderMoments`. No matter for the embeddings, whose length is 1 in any
            case.
        seed: As in `HighOrderMoments`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> layer = MomentEmbeddings(orders=[2, 3], dim=512, embedding_dim=64)
        >>> tuple(layer(keras.random.normal((4, 7, 7, 32)))[3].shape)
        (4, 64)

    Source: Jacob et al., ICCV 2019, figure 2.
    """

    def __init__(
        self,
        orders=5,
        dim=8192,
        embedding_dim=512,
        mode="cascaded",
        reduce_to=None,
        scaled=True,
        seed=None,
        **kwargs,
    ):
        super().__init__(**{**kwargs, "dtype": "float32"})
        for name, size in (("embedding_dim", embedding_dim), ("reduce_to", reduce_to)):
            if size is not None:
                integer(name, size, at_least=1)
        self.moments = HighOrderMoments(orders, dim, mode, scaled, seed, name="moments")
        for name in ("orders", "dim", "mode", "scaled", "seed"):
            setattr(self, name, getattr(self.moments, name))
        self.embedding_dim = embedding_dim
        #: The size of each embedding.
        self.output_dim = embedding_dim or self.dim
        self.reduce_to = reduce_to
        self.reduction = None
        if reduce_to:
            self.reduction = keras.layers.Dense(reduce_to, use_bias=False, name="reduction")
        self.dense = {}
        for order in self.orders if embedding_dim else ():
            name = f"order_{order}"
            self.dense[name] = keras.layers.Dense(embedding_dim, use_bias=False, name=name)

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
        # The direction is all that matters: without its scale, x^5 of small features is not taken
        # for a zero vector.
        largest = ops.stop_gradient(ops.max(ops.abs(moments), axis=-1, keepdims=True, initial=0.0))
        moments = moments / ops.where(largest > 0, largest, 1.0)
        return pairwise.l2_normalize(
            self.dense[f"order_{order}"](moments) if self.dense else moments
        )

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
        # Moments beyond the hundredth are no use to anyone, and a list of a billion would take the
        # memory first.
        listed = tuple(range(2, integer("orders", orders, at_most=_HIGHEST_ORDER) + 1))
    if not listed or listed[0] < 2 or any(b <= a for a, b in itertools.pairwise(listed)):
        raise ValueError(
            f"orders must be K >= 2 or ascending orders from 2 on, such as [2, 3], not {orders}"
        )
    return listed
