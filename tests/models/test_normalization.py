"""A convolution that applies the BatchNorm behind it: maps and gradients are those of both."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.mathematics import dtype_policy
from tfdml.models import AttentionEnsemble, Embedder
from tfdml.models.normalization import batch_norms, keep_statistics
from tfdml.workarounds import layers_of

SIDE = 20


def network():
    """Convolutions of every kind, each with BatchNorm or with a reason to keep its own map."""
    layers = keras.layers
    inner_input = keras.Input((None, None, 6))
    inner = layers.Conv2D(6, 1, name="inner")(inner_input)
    inner = keras.Model(inner_input, layers.BatchNormalization(name="inner_bn")(inner))
    twice = layers.Conv2D(8, 3, padding="same", name="twice")

    x = inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False, name="strided")(x)
    x = layers.ReLU()(layers.BatchNormalization(scale=False)(x))
    x = layers.ZeroPadding2D(((0, 1), (0, 1)), name="as same")(x)
    x = layers.Conv2D(4, 3, strides=2, name="behind zeros")(x)
    x = layers.BatchNormalization()(x)
    x = layers.ZeroPadding2D(2, name="wider")(x)
    x = layers.DepthwiseConv2D((3, 2), name="behind more zeros")(x)
    x = layers.BatchNormalization()(x)
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", name="depthwise")(x)
    x = layers.BatchNormalization(center=False)(x)
    x = layers.Conv2D(6, 3, dilation_rate=2, padding="same", name="dilated")(x)
    x = layers.BatchNormalization(epsilon=1e-5)(x)
    x = inner(x)
    x = layers.Conv2D(8, 1, groups=2, name="grouped")(x)
    x = layers.BatchNormalization()(x)
    x = layers.BatchNormalization()(layers.Conv2D(8, 1, activation="relu", name="active")(x))
    read_twice = layers.Conv2D(8, 1, name="read twice")(x)
    x = layers.Add()([read_twice, layers.BatchNormalization()(read_twice)])
    x = layers.BatchNormalization()(twice(x))
    x = layers.BatchNormalization()(twice(x))
    end = layers.Conv2D(8, 1, name="end")(x)
    return keras.Model(inputs, [layers.BatchNormalization()(end), end])


JOINED = {
    "strided",
    "behind zeros",
    "behind more zeros",
    "depthwise",
    "dilated",
    "inner",
    "grouped",
}


def two_alike(make=network):
    """Two networks of the same random weights; the statistics are positive."""
    one, other = make(), make()
    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.2, 1.5, weight.shape) for weight in one.weights]
    for model in (one, other):
        model.set_weights(weights)
    return one, other


def images(size=3, channels=3):
    return np.random.default_rng(1).normal(size=(size, SIDE, SIDE, channels)).astype("float32")


def values_and_gradients(model, training):
    with tf.GradientTape() as tape:
        outputs = model(images(), training=training)
        value = tf.add_n([tf.reduce_mean(tf.cast(x, "float32") ** 2) for x in outputs])
    gradients = tape.gradient(value, model.trainable_variables)
    return [*outputs, *map(tf.convert_to_tensor, gradients)]


@pytest.mark.parametrize("mode", ["frozen", "statistics"])
def test_maps_and_gradients_are_those_of_both_layers(mode):
    joined, plain = two_alike()
    keep_statistics(joined, mode)
    for layer in batch_norms(plain):
        layer.trainable = mode == "statistics"
    pairs = zip(values_and_gradients(joined, True), values_and_gradients(plain, False), strict=True)
    for value, expected in pairs:
        scale = np.abs(expected).max()
        np.testing.assert_allclose(value, expected, atol=1e-5 * scale)


def test_only_convolutions_whose_map_nothing_else_reads_apply_a_norm():
    model = network()
    keep_statistics(model, "frozen")
    convolutions = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Conv2D | keras.layers.DepthwiseConv2D)
    ]
    assert {layer.name for layer in convolutions if "call" in vars(layer)} == JOINED
    keep_statistics(model, "frozen", separate=("dilated",))
    names = {layer.name for layer in convolutions if "call" in vars(layer)}
    assert names == JOINED - {"dilated"}
    keep_statistics(model, "train")
    assert not any("call" in vars(layer) for layer in layers_of(model))


class OwnCall(keras.Model):
    """A model that reads the map of a convolution where its graph does not."""

    def call(self, inputs):
        return self.layers[1](inputs)


@pytest.mark.parametrize("kind", ["sequential", "own call"])
def test_only_a_model_that_follows_its_graph_has_layers_joined(kind):
    layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization()]
    if kind == "sequential":
        model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), *layers])
    else:
        inputs = keras.Input((SIDE, SIDE, 3))
        model = OwnCall(inputs, layers[1](layers[0](inputs)))
    model.set_weights([weight + 0.5 for weight in model.get_weights()])
    expected = model(images(), training=False)
    keep_statistics(model, "frozen")
    assert ("call" in vars(layers[0])) == (kind == "sequential")
    np.testing.assert_allclose(model(images(), training=True), expected, atol=1e-5)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_as_near_as_that_of_both_layers(policy):
    exact, _ = two_alike()
    with dtype_policy(policy):
        joined, plain = two_alike()
    keep_statistics(joined, "frozen")
    expected = exact(images(), training=False)[0]

    def error(model):
        return np.abs(np.asarray(model(images(), training=False)[0], np.float32) - expected).max()

    assert joined(images(), training=False)[0].dtype == policy.removeprefix("mixed_")
    assert error(joined) <= 2 * error(plain) + 1e-6


def test_a_saved_embedder_holds_both_layers_and_trains_them_again_when_told(tmp_path):
    embedder = Embedder("conv4", embedding_dim=4, image_size=32)
    x = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype("float32")
    embedder(x)
    embedder.save(tmp_path / "embedder.keras")
    again = keras.models.load_model(tmp_path / "embedder.keras")
    np.testing.assert_allclose(again(x), embedder(x), atol=1e-6)
    rebuilt = type(embedder.backbone).from_config(again.backbone.get_config())
    rebuilt.set_weights(again.backbone.get_weights())
    scaled = again.input_scaling(x)
    np.testing.assert_allclose(rebuilt(scaled), again.backbone(scaled), atol=1e-5)


def trunk_and_rest():
    """A network of three convolutions, each with BatchNorm."""
    x = inputs = keras.Input((SIDE, SIDE, 3))
    for name in "abc":
        x = keras.layers.Conv2D(4, 3, padding="same", name=name)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, x)


def test_an_ensemble_may_be_cut_at_a_convolution():
    joined, plain = (
        AttentionEnsemble(
            trunk_and_rest(), ("a", "b"), 2, 4, image_size=SIDE, scaling="none", batch_norm=mode
        )
        for mode in ("frozen", "train")
    )
    x = images()
    for model in (joined, plain):
        model(x)
    rng = np.random.default_rng(2)
    # Of both signs, or the attention would be 1 everywhere; the root of a variance is not.
    weights = [rng.normal(size=weight.shape) for weight in plain.weights]
    for place, weight in enumerate(plain.weights):
        if "variance" in weight.path:
            weights[place] = weights[place] ** 2
    for model in (joined, plain):
        model.set_weights(weights)
    np.testing.assert_allclose(joined(x, training=True), plain(x, training=False), atol=1e-5)
