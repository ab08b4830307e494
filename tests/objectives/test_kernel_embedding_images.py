"""Joint representation similarity of a pretrained network's features of real images, with every kernel of table 4."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.io import loadmat

from tfdml import backbones
from tfdml.models import Embedder, MetricLearner
from tfdml.training.terms import build_objectives

SIZE = 96
KERNELS = [
    "gaussian_mixture(multipliers=[1])",
    "laplace",
    "polynomial(degree=2)",
    "polynomial(degree=5)",
    "exponential",
]


@pytest.fixture(scope="module")
def cars(shared_data):
    """32 images of eight models of cars, and their labels."""
    folder = shared_data / "data" / "cars196"
    table = loadmat(folder / "devkit" / "cars_train_annos.mat", squeeze_me=True)["annotations"]
    named = [(int(row["class"]), str(row["fname"])) for row in table if row["class"] <= 8]
    chosen = [row for c in range(1, 9) for row in [row for row in named if row[0] == c][:4]]
    encoded = [tf.io.read_file(str(folder / "cars_train" / name)) for _, name in chosen]
    images = [tf.image.resize(tf.io.decode_jpeg(image, channels=3), (SIZE, SIZE)) for image in encoded]
    return tf.stack(images), np.array([c - 1 for c, _ in chosen])


@pytest.fixture(scope="module")
def embedder(shared_data):
    """MobileNetV2 as ImageNet left it."""
    keras.utils.set_random_seed(0)
    weights = shared_data / "weights" / "mnv2_035_notop.weights.h5"
    return Embedder(backbones.resolve("mobilenetv2", SIZE, str(weights), alpha=0.35), 128, SIZE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("unit_length", ["[]", "pooled"])
def test_every_kernel_is_finite_on_real_images(cars, embedder, kernel, unit_length):
    images, labels = cars
    jrs = f"jrs(kernels={kernel}, unit_length={unit_length})"
    learner = MetricLearner(embedder, build_objectives(f"am_softmax + 0.001 * {jrs}", 8))
    learner.build(images.shape)
    with tf.GradientTape() as tape:
        loss = learner.compute_loss(y=labels, y_pred=learner(images, training=True))
    gradients = tape.gradient(loss, learner.trainable_variables)
    pooled = np.asarray(embedder.represent(images)["pooled"])
    assert (pooled @ pooled.T).max() > 159
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    norm = np.sqrt(sum(float(tf.reduce_sum(tf.cast(gradient, tf.float64) ** 2)) for gradient in gradients))
    assert norm > 0
    if unit_length == "pooled":
        # Then the term is no larger than the loss that it stands beside.
        assert norm < 1e3
