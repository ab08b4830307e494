"""What networks trained in Caffe and PyTorch need and Keras lacks: pooling that rounds up, and LRN."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import boolean, integer, number
from tfdml.saving import SavedByArguments


@keras.saving.register_keras_serializable("tfdml")
class CeilMaxPooling2D(SavedByArguments, keras.layers.Layer):
    """Max pooling whose windows start at the first row and column, and whose last ones may hang over the edge.

    For n rows, windows of k rows and a stride of s, there are ceil((n - k) / s) + 1 rows of windows (never fewer than
    one), and a window takes the maximum over the part of it that lies inside. This is Caffe's pooling without padding,
    and PyTorch's `MaxPool2d(k, s, ceil_mode=True)`. Keras's `"valid"` drops the windows that hang over; its `"same"`
    starts before the first row where n is odd.

    Args:
        pool_size: k.
        strides: s, at most k.
        cover: Put a window at every s-th row: ceil(n / s) of them, as many as a convolution of odd size, padded by half
            of it, has. For k = 3 and s = 2 that is one more where n is odd, and no difference where it is even.

    Raises:
        ValueError: A size is not positive, or windows would leave rows out.

    Example:
        >>> tuple(CeilMaxPooling2D(3, 2)(keras.ops.zeros((1, 112, 113, 8))).shape)
        (1, 56, 56, 8)
    """

    def __init__(self, pool_size=3, strides=2, cover=False, **kwargs):
        super().__init__(**kwargs)
        self.pool_size = integer("pool_size", pool_size, at_least=1)
        self.strides = integer("strides", strides, at_least=1)
        self.cover = boolean("cover", cover)
        if strides > pool_size:
            raise ValueError(f"{self.name}: need pool_size >= strides >= 1, not {pool_size} and {strides}")

    def call(self, x):
        """(B, h, w, c) -> (B, h', w', c)."""
        for axis in (1, 2):
            rows = ops.shape(x)[axis]
            needed = (self._windows(rows) - 1) * self.strides + self.pool_size
            # The last row again changes no maximum of a window that holds it, and unlike -inf it can be quantised.
            last = x[:, -1:] if axis == 1 else x[:, :, -1:]
            x = ops.concatenate([x] + [last] * (self.pool_size - 1), axis=axis)
            x = x[:, :needed] if axis == 1 else x[:, :, :needed]
        return ops.max_pool(x, self.pool_size, self.strides, padding="valid", data_format="channels_last")

    def _windows(self, rows):
        if self.cover:
            return (rows + self.strides - 1) // self.strides
        hanging = rows - self.pool_size
        count = (hanging + self.strides - 1) // self.strides + 1
        return max(count, 1) if isinstance(rows, int) else ops.maximum(count, 1)

    def compute_output_shape(self, input_shape):
        """(B, h', w', c)."""
        sides = [None if rows is None else self._windows(rows) for rows in input_shape[1:3]]
        return (input_shape[0], *sides, input_shape[3])


@keras.saving.register_keras_serializable("tfdml")
class LocalResponseNormalization(SavedByArguments, keras.layers.Layer):
    """Divides each activation by those of neighbouring channels at its position, in float32.

    y_c = x_c / (k + alpha / n * sum of x_j^2 over |j - c| <= n // 2)^beta

    as in Caffe and PyTorch, which divide alpha by n (`tf.nn.local_response_normalization` does not).

    Args:
        size: n, how many channels count; odd.
        alpha: As above.
        beta: As above.
        k: As above.

    Raises:
        ValueError: `size` is not odd and positive.

    Example:
        >>> tuple(LocalResponseNormalization()(keras.ops.ones((1, 2, 2, 64))).shape)
        (1, 2, 2, 64)

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NeurIPS 2012,
    sec. 3.3.
    """

    def __init__(self, size=5, alpha=1e-4, beta=0.75, k=1.0, **kwargs):
        super().__init__(**kwargs)
        self.size = integer("size", size, at_least=1)
        if self.size % 2 == 0:
            raise ValueError(f"{self.name}: size must be odd and positive, not {size}")
        self.alpha = number("alpha", alpha, at_least=0)
        self.beta = number("beta", beta, at_least=0)
        self.k = number("k", k, above=0)

    def call(self, x):
        """(B, h, w, c) -> (B, h, w, c)."""
        wide = ops.cast(x, "float32")
        channels, reach = x.shape[-1], self.size // 2
        squares = ops.pad(ops.square(wide), [[0, 0]] * 3 + [[reach, reach]])
        total = sum(squares[..., shift : shift + channels] for shift in range(self.size))
        scale = ops.power(self.k + self.alpha / self.size * total, -self.beta)
        return ops.cast(wide * scale, x.dtype)

    def compute_output_shape(self, input_shape):
        """The input's."""
        return input_shape
