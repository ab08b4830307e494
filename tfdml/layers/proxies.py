"""Class proxies: learned vectors that stand for the training classes."""

from __future__ import annotations

import math

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer
from tfdml.saving import SavedByArguments


@keras.saving.register_keras_serializable("tfdml")
class CosineProxies(SavedByArguments, keras.layers.Layer):
    """Cosines between embeddings and one or more learned proxies per class.

    s_ic = w_c . x_i / (|w_c| |x_i|), or s_ick for K proxies per class. Weights and arithmetic are float32 under every
    dtype policy. The weight `proxies`, (C, d) or (C, K, d), starts uniform in +-1/sqrt(d) (the initialisation of the
    JRD authors' code: Kaiming uniform with a = sqrt 5).

    Args:
        num_classes: C, the number of training classes.
        proxies_per_class: K.

    Raises:
        ValueError: A count is not positive.

    Example:
        >>> tuple(CosineProxies(num_classes=10)(keras.random.normal((4, 128))).shape)
        (4, 10)

    Source: Chu et al., ICML 2020, sec. 4.1 (x+); Movshovitz-Attias et al., ICCV 2017.
    """

    def __init__(self, num_classes, proxies_per_class=1, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.proxies_per_class = integer("proxies_per_class", proxies_per_class, at_least=1)

    def build(self, input_shape):
        """Create the proxies for embeddings of the size given."""
        size = input_shape[-1]
        per_class = () if self.proxies_per_class == 1 else (self.proxies_per_class,)
        bound = 1.0 / math.sqrt(size)
        self.proxies = self.add_weight(
            name="proxies",
            shape=(self.num_classes, *per_class, size),
            initializer=keras.initializers.RandomUniform(-bound, bound),
        )

    def call(self, embeddings):
        """(B, d) -> (B, C), or (B, C, K) when there are several proxies per class."""
        unit = pairwise.l2_normalize(self.proxies)
        size = self.proxies.shape[-1]
        cosines = pairwise.dot_products(pairwise.l2_normalize(embeddings), ops.reshape(unit, (-1, size)))
        if self.proxies_per_class == 1:
            return cosines
        return ops.reshape(cosines, (-1, self.num_classes, self.proxies_per_class))

    def compute_output_shape(self, input_shape):
        """(B, C) or (B, C, K)."""
        per_class = () if self.proxies_per_class == 1 else (self.proxies_per_class,)
        return (input_shape[0], self.num_classes, *per_class)
