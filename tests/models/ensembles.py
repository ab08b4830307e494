"""A small network with places to cut it, and the ensemble on it."""

import keras

from tests.models.networks import SIZE
from tfdml import losses, models, objectives


def cuttable_backbone(seed=0, size=None):
    """(B, h, w, 3) -> `first` (B, h/2, w/2, 4) -> `second`, of the same size, 5 -> `third` (B, h/4,
    w/4, 6)."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((size, size, 3), name="images")
    for name, width, strides in (("first", 4, 2), ("second", 5, 1), ("third", 6, 2)):
        skip = keras.layers.Conv2D(width, 1, strides=strides, padding="same", name=f"{name}_skip")(
            x
        )
        x = keras.layers.Conv2D(width, 3, strides=strides, padding="same", name=f"{name}_conv")(x)
        x = keras.layers.BatchNormalization(momentum=0.5, name=f"{name}_bn")(x)
        x = keras.layers.ReLU(name=name)(keras.layers.Add(name=f"{name}_add")([x, skip]))
    # A last layer, so that `third` is a place to cut at too.
    return keras.Model(inputs, keras.layers.Activation("tanh", name="last")(x), name="cuttable")


def tiny_ensemble(seed=0, heads=3, dim=6, cut=("first", "second"), **options):
    return models.AttentionEnsemble(
        cuttable_backbone(seed), cut=cut, heads=heads, embedding_dim=dim, image_size=SIZE, **options
    )


def ensemble_learner(**options):
    """An ensemble with a loss for each head, divergence, and HORDE on the heads' maps."""
    terms = [
        objectives.HeadwiseLoss(losses.ContrastiveLoss(0.5, "cosine")),
        objectives.HeadDivergence(margin=0.2),
        objectives.HighOrderMomentLoss(
            losses.BinomialDevianceLoss(), orders=3, dim=16, embedding_dim=4, reduce_to=8
        ),
    ]
    return models.MetricLearner(tiny_ensemble(**options), terms)
