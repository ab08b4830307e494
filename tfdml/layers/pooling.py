"""Pooling of feature maps with weights of its own: a trained power mean, and trained attention."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml.arguments import number
from tfdml.saving import SavedByArguments

_LARGEST_POWER = 100.0


@keras.saving.register_keras_serializable("tfdml")
class GeneralizedMeanPooling2D(SavedByArguments, keras.layers.Layer):
    """The generalised mean of each channel over the positions, with a trained power p (GeM).

    f_c = (1/N sum_i max(x_ic, epsilon)^p)^(1/p)

    p = 1 is the average, p -> infinity the maximum; one p for all channels, kept between 1 and 100 in training.
    Features below epsilon count as epsilon: of a network whose features have both signs, such as a transformer, the
    negative ones have no part in it. Computed in float32 under every dtype policy.

    Args:
        power: p at the start, 1 to 100.
        epsilon: As in the formula.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> x = keras.ops.reshape(keras.ops.array([1.0, 3.0]), (1, 1, 2, 1))
        >>> float(GeneralizedMeanPooling2D(power=1.0)(x)[0, 0])
        2.0

    Source: Radenovic, Tolias and Chum, "Fine-Tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019, eq. 3.
    """

    def __init__(self, power=3.0, epsilon=1e-6, **kwargs):
        super().__init__(**{**kwargs, "autocast": False})
        self.power = number("power", power, at_least=1, at_most=_LARGEST_POWER)
        self.epsilon = number("epsilon", epsilon, above=0)

    def build(self, input_shape):
        """Create p."""
        del input_shape
        self.p = self.add_weight(
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(self.power),
            constraint=_within_powers,
            name="power",
        )

    def call(self, x):
        """(B, h, w, c) -> (B, c)."""
        x = ops.maximum(ops.cast(x, "float32"), self.epsilon)
        # The mean of x / m, times m: powers of features stay in float32's range. Its value does not depend on m.
        largest = ops.stop_gradient(ops.max(x, axis=(1, 2), keepdims=True))
        p = ops.convert_to_tensor(self.p)
        mean = ops.mean(ops.power(x / largest, p), axis=(1, 2))
        return ops.cast(ops.power(mean, 1.0 / p) * largest[:, 0, 0], self.compute_dtype)

    def compute_output_shape(self, input_shape):
        """(B, c)."""
        return (input_shape[0], input_shape[-1])


def _within_powers(p):
    return ops.clip(p, 1.0, _LARGEST_POWER)


@keras.saving.register_keras_serializable("tfdml")
class AttentionPooling2D(keras.layers.Layer):
    """The mean over the positions, weighted by how well each fits a trained query q.

    f = sum_i a_i x_i,  a = softmax_i(<q, x_i> / sqrt(c))

    q starts at zero, so that the first weights are those of the average. Computed in float32 under every dtype policy.

    Example:
        >>> x = keras.random.normal((2, 7, 7, 16))
        >>> tuple(AttentionPooling2D()(x).shape)
        (2, 16)

    Source: Lee et al., "Set Transformer", ICML 2019, sec. 3.2: pooling by attention to one seed, without projections of
    its own (those of the network before it and the embedder's after it are there already).
    """

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "autocast": False})

    def build(self, input_shape):
        """Create q."""
        self.query = self.add_weight(shape=(input_shape[-1],), dtype="float32", initializer="zeros", name="query")

    def weights_of(self, x):
        """The weight of each position: (B, h, w, c) -> (B, h, w) float32, of sum 1 in each image."""
        sizes = ops.shape(x)
        fits = ops.matmul(ops.cast(x, "float32"), self.query) / math.sqrt(x.shape[-1])
        return ops.reshape(ops.softmax(ops.reshape(fits, (-1, sizes[1] * sizes[2])), axis=-1), (-1, *sizes[1:3]))

    def call(self, x):
        """(B, h, w, c) -> (B, c)."""
        pooled = ops.sum(self.weights_of(x)[..., None] * ops.cast(x, "float32"), axis=(1, 2))
        return ops.cast(pooled, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        """(B, c)."""
        return (input_shape[0], input_shape[-1])
