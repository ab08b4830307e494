"""Large computations in blocks, one after another: their memory is that of one block, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

# Moments that are computed at a time: wide enough for efficient products of matrices, narrow enough to stay small.
_BLOCK = 256


def scan(body: Callable[[Any, Any], tuple[Any, tuple]], carry, length: int, shapes: Sequence[tuple]):
    """Run `carry, outputs = body(carry, i)` for i = 0 .. length - 1, one step after another.

    TensorFlow's graph executor works ahead of `keras.ops.while_loop` by up to ten steps, which costs ten times the
    memory of one; here each step waits for the one before. There is no gradient through the loop: give one by
    `keras.ops.custom_gradient`.

    Args:
        body: From (carry, i), i an integer tensor, to the next carry and a tuple of float32 outputs.
        carry: A tensor, or a tuple of them.
        length: The number of steps, at least 1.
        shapes: The static shape of each output of a step, None where a size is not known.

    Returns:
        The last carry, and a tuple of the outputs stacked: (length, ...).

    Example:
        >>> total, (doubled,) = scan(lambda total, i: (total + i, (2.0 * keras.ops.cast(i, "float32"),)), 0, 3, [()])
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
        return i + 1, carry, tuple(array.write(i, output) for array, output in zip(arrays, outputs, strict=True))

    arrays = tuple(tf.TensorArray("float32", length, element_shape=shape) for shape in shapes)
    state = (tf.constant(0), carry, arrays)
    _, carry, arrays = tf.while_loop(lambda i, *_: i < length, step, state, parallel_iterations=1)
    return carry, tuple(array.stack() for array in arrays)


def average_products(features, projections, lengths, trained=True, in_blocks=True):
    """Averages over positions of the products of the first l projections, for each l of `lengths`, block by block.

    m_l = (1/n) sum over positions p of (V_1 x_p) * ... * (V_l x_p)

    Memory is that of three blocks (B n, 256), and of about 2 K for the gradient, which computes the products again.

    Args:
        features: (B, n, c) float32.
        projections: K matrices V (d, c).
        lengths: Which products are averaged, each between 1 and K.
        trained: Whether a gradient to the projections is wanted.
        in_blocks: False computes all at once, for formats that hold no loop. Memory is then that of all products.

    Returns:
        (len(lengths), B, d) float32.
    """
    dim = projections[0].shape[0]
    count = math.ceil(dim / _BLOCK) if in_blocks else 1
    size = math.ceil(dim / count)
    blocks = [_in_blocks(matrix, count, size) for matrix in projections]
    stream = _Stream(lengths, count, size)
    if not in_blocks:
        return stream.forward(features, blocks)
    if trained:
        averages = ops.custom_gradient(stream.averages)(features, *blocks)
    else:
        averages = ops.custom_gradient(lambda x: stream.averages(x, *blocks, trained=False))(features)
    return averages if count * size == dim else averages[:, :, :dim]


def _in_blocks(matrix, count, size):
    dim, channels = matrix.shape
    if count * size != dim:
        matrix = ops.pad(matrix, ((0, count * size - dim), (0, 0)))
    return ops.reshape(matrix, (count, size, channels))


class _Stream:
    """The blocks of `average_products`, one after another, with the gradient that `keras.ops.custom_gradient` takes."""

    def __init__(self, lengths, count, size):
        self.lengths = tuple(lengths)
        self.count = count
        self.size = size

    def averages(self, features, *blocks, trained=True):
        # Cut off from any tape, which would keep every block's products although gradient() never asks for them.
        features, blocks = ops.stop_gradient(features), tuple(map(ops.stop_gradient, blocks))

        def gradient(*args, upstream=None):
            upstream = args[0] if upstream is None else upstream
            return self.backward(features, blocks, upstream, trained)

        return self.forward(features, blocks), gradient

    def forward(self, features, blocks):
        rows = ops.reshape(features, (-1, features.shape[-1]))
        batch, positions = ops.shape(features)[:2]

        def block(carry, i):
            averages, product = [], None
            for k, matrices in enumerate(blocks):
                projected = ops.matmul(rows, ops.transpose(self.take(matrices, i)))
                product = projected if product is None else product * projected
                if k + 1 in self.lengths:
                    averages.append(ops.mean(ops.reshape(product, (batch, positions, self.size)), axis=1))
            return carry, (ops.stack(averages),)

        shape = (len(self.lengths), features.shape[0], self.size)
        _, (averages,) = scan(block, ops.zeros((), "float32"), self.count, [shape])
        return ops.reshape(ops.transpose(averages, (1, 2, 0, 3)), (len(self.lengths), batch, self.count * self.size))

    def backward(self, features, blocks, upstream, trained):
        channels = features.shape[-1]
        rows = ops.reshape(features, (-1, channels))
        batch, positions = ops.shape(features)[:2]
        upstream = ops.reshape(
            upstream / ops.cast(positions, "float32"), (len(self.lengths), batch, self.count, self.size)
        )
        upstream = ops.transpose(upstream, (2, 0, 1, 3))

        def block(rows_gradient, i):
            matrices = [self.take(matrix, i) for matrix in blocks]
            projected = [ops.matmul(rows, ops.transpose(matrix)) for matrix in matrices]
            products = [projected[0]]
            for factor in projected[1:-1]:
                products.append(products[-1] * factor)
            by_length = dict(zip(self.lengths, ops.unstack(self.take(upstream, i), len(self.lengths)), strict=True))
            gradient, matrix_gradients = None, []
            for k in reversed(range(len(blocks))):
                if k + 1 in by_length:
                    read_off = ops.broadcast_to(by_length[k + 1][:, None, :], (batch, positions, self.size))
                    read_off = ops.reshape(read_off, (-1, self.size))
                    gradient = read_off if gradient is None else gradient + read_off
                of_factor = gradient if k == 0 else gradient * products[k - 1]
                rows_gradient = rows_gradient + ops.matmul(of_factor, matrices[k])
                if trained:
                    matrix_gradients.append(ops.matmul(ops.transpose(of_factor), rows))
                gradient = gradient * projected[k]
            return rows_gradient, tuple(reversed(matrix_gradients))

        shapes = [(self.size, channels)] * (len(blocks) if trained else 0)
        rows_gradient, matrix_gradients = scan(block, ops.zeros_like(rows), self.count, shapes)
        features_gradient = ops.reshape(rows_gradient, ops.shape(features))
        return (features_gradient, *matrix_gradients) if trained else features_gradient

    def take(self, stacked, i):
        start = (i, *(0 for _ in stacked.shape[1:]))
        taken = ops.slice(stacked, start, (1, *ops.shape(stacked)[1:]))
        return ops.cast(ops.reshape(taken, ops.shape(stacked)[1:]), "float32")
