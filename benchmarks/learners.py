"""Learners whose steps are timed."""

import keras

from tfdml import backbones
from tfdml.models import Embedder, MetricLearner
from tfdml.training.expressions import parse_call


def make_learner(backbone, size, objectives):
    """A compiled learner; equal embedders whatever the objectives.

    Args:
        backbone: Its name and options, as in bin/train.
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
