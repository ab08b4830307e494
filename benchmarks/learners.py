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
        scaled: Whether a trained factor multiplies the features, so that their gradient is computed.
    """

    def __init__(self, shape, embedding_dim, scaled=False):
        layer = Factor() if scaled else keras.layers.Activation("linear")
        features = keras.Sequential([keras.Input(shape), layer])
        super().__init__(features, embedding_dim=embedding_dim, image_size=shape[0], scaling="none")
        self._shape = shape
        self.build((None, *shape))
        self.built = True

    @property
    def representations(self):
        """The names that `represent` gives."""
        return tuple(self.representation_shapes((None, *self._shape)))


class Factor(keras.layers.Layer):
    """One trained number times everything."""

    def build(self, input_shape):
        """Create the number."""
        del input_shape
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        """Of the same shape."""
        return self.factor * x
