"""Attention masks: several views of one feature map, one for each learner of an ensemble."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml.arguments import integer
from tfdml.saving import SavedByArguments


@keras.saving.register_keras_serializable("tfdml")
class AttentionHeads(SavedByArguments, keras.layers.Layer):
    """The feature map as each of M heads sees it.

    z_m = x * sigmoid(V_m u + b_m), m = 1 .. M, at every position

    with x the features, u the context (what an attention network makes of x), and V_m a 1 x 1 convolution to as many
    channels as x has. The M convolutions are one with M c channels; each head's weights start Glorot-uniform.

    Args:
        heads: M.

    Raises:
        ValueError: `heads` is not positive, or the maps differ in height or width.

    Example:
        >>> x, u = keras.random.normal((2, 14, 14, 480)), keras.random.normal((2, 14, 14, 832))
        >>> tuple(AttentionHeads(8)([x, u]).shape)
        (2, 8, 14, 14, 480)

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.2.
    """

    def __init__(self, heads=8, **kwargs):
        super().__init__(**kwargs)
        self.heads = integer("heads", heads, at_least=1)

    def build(self, input_shape):
        """Create the convolutions."""
        features, context = input_shape
        # One convolution's own initialiser would take all heads for one layer and start them too small.
        bound = math.sqrt(6.0 / (context[-1] + features[-1]))
        self.convolution = keras.layers.Conv2D(
            self.heads * features[-1],
            1,
            activation="sigmoid",
            kernel_initializer=keras.initializers.RandomUniform(-bound, bound),
            name="masks",
            dtype=self.dtype_policy,
        )
        self.convolution.build(context)

    def masks(self, context):
        """The masks of a context (B, h, w, c'): (B, M, h, w, c), between 0 and 1."""
        masks = self.convolution(context)
        sizes = ops.shape(masks)
        channels = masks.shape[-1] // self.heads
        return ops.transpose(ops.reshape(masks, (-1, *sizes[1:3], self.heads, channels)), (0, 3, 1, 2, 4))

    def call(self, inputs):
        """Features (B, h, w, c) and context (B, h, w, c') -> (B, M, h, w, c)."""
        features, context = inputs
        return self.masks(context) * features[:, None]

    def compute_output_shape(self, input_shape):
        """(B, M, h, w, c)."""
        features, context = input_shape
        if tuple(features[1:3]) != tuple(context[1:3]):
            raise ValueError(f"{self.name}: the masks are {context[1:3]}, the features {features[1:3]} in size")
        return (features[0], self.heads, *features[1:])
