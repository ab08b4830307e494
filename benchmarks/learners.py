"""Learners whose steps are timed."""

import keras

from tfdml import backbones
from tfdml.models import Embedder, MetricLearner
from tfdml.training.expressions import parse_call


def make_learner(backbone, size, objectives):
    """Return a compiled learner, whose embedder is the same for all objectives.

    Args:
        backbone: Its name and options, as in tfdml train.
        size: Height and width of its images.
        objectives: What it is trained with.
    """
    keras.utils.set_random_seed(0)
    call = parse_call(backbone, "--backbone")
    built = backbones.resolve(call.name, size, **call.arguments)
    learner = MetricLearner(Embedder(built, embedding_dim=128, image_size=size), objectives)
    learner.build((None, size, size, 3))
    learner.compile(keras.optimizers.Adam(1e-4))
    return learner


class FeatureEmbedder(Embedder):
    """A projection of features that a backbone has made, which it takes as if they were images.

    Args:
        shape: (h, w, c) of a feature map; (1, 1, D) for pooled features.
        embedding_dim: d.
        layer: What is trained on the map before it is pooled: `Factor`, `Adapter`; None for nothing.
    """

    def __init__(self, shape, embedding_dim, layer=None):
        features = keras.Sequential([keras.Input(shape), layer or keras.layers.Identity()])
        super().__init__(features, embedding_dim=embedding_dim, image_size=shape[0], scaling="none")
        self.build((None, *shape))
        self.built = True

    @property
    def view_shape(self):
        """(h, w, c)."""
        return tuple(self.backbone.input_shape[1:])


class Factor(keras.layers.Layer):
    """One trained number times everything: the least for which the gradient of the features is computed."""

    def build(self, input_shape):
        """Create the number."""
        del input_shape
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        """Of the same shape."""
        return self.factor * x


class Adapter(keras.layers.Layer):
    """x + U relu(V x) of the features x at each position, U from zeros: at first the features themselves.

    Args:
        rank: Rows of V.

    Source: Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", ICML 2019, sec. 2.1.
    """

    def __init__(self, rank):
        super().__init__(name="adapter")
        self.down = keras.layers.Dense(rank, activation="relu")
        self.rank = rank

    def build(self, input_shape):
        """Create V and U."""
        self.down.build(input_shape)
        self.up = keras.layers.Dense(input_shape[-1], kernel_initializer="zeros")
        self.up.build((*input_shape[:-1], self.rank))

    def call(self, x):
        """Of the same shape."""
        return x + self.up(self.down(x))
