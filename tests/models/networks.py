"""Small networks and images for the tests of the models."""

import json

import keras
import numpy as np

from tfdml import losses, models, objectives

SIZE = 12


def tiny_backbone(seed=0):
    """A convolution with BatchNorm: (B, h, w, 3) -> (B, h/2, w/2, 6)."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(6, 3, strides=2, padding="same")(x)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = keras.layers.ReLU()(x)
    return keras.Model(inputs, x, name="tiny")


def shallow(input_shape=(None, None, 3), width=4):
    """Two convolutions with BatchNorm: (B, h, w, 3) -> (B, h/16, w/16, width), in half as many
    layers as conv4."""
    x = inputs = keras.Input(input_shape)
    for block in ("first", "second"):
        x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"{block}_conv")(x)
        x = keras.layers.BatchNormalization(name=f"{block}_bn")(x)
        x = keras.layers.MaxPooling2D(4)(keras.layers.ReLU()(x))
    return keras.Model(inputs, x, name="shallow")


def tiny_embedder(seed=0, dim=5, **options):
    return models.Embedder(tiny_backbone(seed), embedding_dim=dim, image_size=SIZE, **options)


def images(seed=0, size=8, dtype="float32"):
    return np.random.default_rng(seed).integers(0, 256, (size, SIZE, SIZE, 3)).astype(dtype)


def colored_batch(seed=0, classes=3, per_class=4):
    """Labels and images whose color is their class."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    colors = np.array([[220, 40, 40], [40, 220, 40], [40, 40, 220], [200, 200, 40]])[labels]
    noise = generator.normal(0, 40, (len(labels), SIZE, SIZE, 3))
    return labels, np.clip(colors[:, None, None] + noise, 0, 255).astype("uint8")


def jrd(num_classes=3, scale=20.0, weight=1.0):
    """The objectives of the JRD paper."""
    return [
        objectives.ProxyLoss(losses.AMSoftmaxLoss(scale, 0.1), num_classes),
        objectives.JointRepresentationSimilarity(weight=weight),
    ]


def values(variables):
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def config_of(model):
    """Its config as a file would hold it, where tuples are lists."""
    return json.loads(json.dumps(model.get_config()))


@keras.saving.register_keras_serializable("tests")
class Taking(keras.optimizers.SGD):
    """Leaves each gradient in the place of its variable; those without one stay as they are."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, keras.ops.cast(gradient, variable.dtype))
