"""Trained pooling against slow float64 references, its gradients against finite differences."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import MODES, value_and_gradients
from tfdml.layers import AttentionPooling2D, GeneralizedMeanPooling2D


def gem_reference(x, p, epsilon=1e-6):
    pooled = np.zeros((x.shape[0], x.shape[3]))
    for b in range(x.shape[0]):
        for c in range(x.shape[3]):
            values = [max(float(x[b, i, j, c]), epsilon) for i in range(x.shape[1]) for j in range(x.shape[2])]
            pooled[b, c] = (sum(value**p for value in values) / len(values)) ** (1 / p)
    return pooled


def attention_reference(x, query):
    pooled = np.zeros((x.shape[0], x.shape[3]))
    for b in range(x.shape[0]):
        rows = [x[b, i, j].astype("float64") for i in range(x.shape[1]) for j in range(x.shape[2])]
        fits = np.array([float(row @ query) / x.shape[3] ** 0.5 for row in rows])
        weights = np.exp(fits - fits.max())
        pooled[b] = sum(weight * row for weight, row in zip(weights / weights.sum(), rows, strict=True))
    return pooled


def features(seed=0, shape=(3, 4, 5, 6), scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype("float32")


def gem(p):
    layer = GeneralizedMeanPooling2D(power=p)
    layer.build((None, 4, 5, 6))
    return layer


def attention(seed=1):
    layer = AttentionPooling2D()
    layer.build((None, 4, 5, 6))
    layer.query.assign(np.random.default_rng(seed).normal(size=6))
    return layer


@pytest.mark.parametrize("power", [1.0, 3.0, 17.5])
def test_gem_is_the_formula(power):
    x = features()
    np.testing.assert_allclose(gem(power)(x), gem_reference(x, power), rtol=2e-5)


def test_gem_of_power_1_is_the_average_and_of_a_high_one_nearly_the_maximum():
    x = np.abs(features()) + 0.1
    np.testing.assert_allclose(gem(1.0)(x), x.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(gem(100.0)(x), x.max(axis=(1, 2)), rtol=0.05)


@pytest.mark.parametrize("scale", [1e-4, 1e8])
def test_gem_does_not_leave_the_range_of_float32(scale):
    x = features(scale=scale)
    np.testing.assert_allclose(gem(30.0)(x), gem_reference(x, 30.0, 1e-6), rtol=1e-4)


def test_attention_is_the_formula():
    x, layer = features(), attention()
    np.testing.assert_allclose(layer(x), attention_reference(x, np.array(layer.query, "float64")), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(layer.weights_of(x)).sum(axis=(1, 2)), 1.0, rtol=1e-6)


def test_untrained_attention_is_the_average():
    x = features()
    np.testing.assert_allclose(AttentionPooling2D()(x), x.mean(axis=(1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gem", "attention"])
def test_gradients_are_those_of_the_reference(kind, mode):
    layer = gem(3.0) if kind == "gem" else attention()
    weight = layer.p if kind == "gem" else layer.query
    reference = gem_reference if kind == "gem" else attention_reference
    x = np.abs(features(shape=(2, 2, 3, 6))) + 0.2
    factors = features(2, (2, 6))

    def loss(x, value):
        with keras.StatelessScope([(weight, value)]):
            return tf.reduce_sum(layer(x) * factors)

    value, found = value_and_gradients(loss, x, np.array(weight), mode=mode)

    def exact(x, value):
        return float((reference(x, value) * factors).sum())

    np.testing.assert_allclose(value, exact(x, np.array(weight)), rtol=1e-5)
    for number, (array, gradient) in enumerate(zip((x, np.array(weight)), found, strict=True)):
        given = [x.astype("float64"), np.array(weight, "float64")]
        expected = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            steps = []
            for step in (1e-5, -1e-5):
                moved = [part.copy() for part in given]
                moved[number][index] += step
                steps.append(exact(*moved))
            expected[index] = (steps[0] - steps[1]) / 2e-5
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("layer", [gem(3.0), attention()], ids=["gem", "attention"])
@pytest.mark.parametrize("x", [np.zeros((1, 4, 5, 6)), np.full((2, 4, 5, 6), -7.0), np.ones((1, 4, 5, 6)) * 1e6])
def test_constant_maps_have_finite_values_and_gradients(layer, x):
    with tf.GradientTape() as tape:
        tensor = tf.constant(x, tf.float32)
        tape.watch(tensor)
        value = tf.reduce_sum(layer(tensor))
    gradients = tape.gradient(value, [tensor, *(weight.value for weight in layer.trainable_variables)])
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("made", [gem(4.5), attention()], ids=["gem", "attention"])
def test_saving_keeps_values(made, tmp_path):
    inputs = keras.Input((4, 5, 6))
    model = keras.Model(inputs, made(inputs))
    model.save(tmp_path / "pool.keras")
    x = features()
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "pool.keras")(x), model(x))


@pytest.mark.parametrize("made", [GeneralizedMeanPooling2D, AttentionPooling2D])
def test_mixed_precision_computes_in_float32(made):
    x = features(scale=100.0)
    layer = made(dtype="mixed_float16")
    pooled = layer(tf.cast(x, tf.float16))
    assert pooled.dtype == tf.float16
    assert layer.weights[0].dtype == "float32"
    exact = made()(tf.cast(tf.cast(x, tf.float16), tf.float32))
    np.testing.assert_allclose(tf.cast(pooled, tf.float32), exact, rtol=2e-3, atol=1e-2)


def test_a_trained_power_stays_within_its_bounds():
    layer = gem(1.0)
    optimizer = keras.optimizers.SGD(100.0)
    optimizer.apply([tf.constant(1.0)], [layer.p])
    assert float(layer.p) == 1.0
    optimizer.apply([tf.constant(-5.0)], [layer.p])
    assert float(layer.p) == 100.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"power": 0.5}, "power must be at least 1 and at most 100, not 0.5"),
        ({"epsilon": 0.0}, "epsilon must be positive, not 0"),
    ],
)
def test_wrong_arguments_are_told(arguments, told):
    with pytest.raises(ValueError, match=told):
        GeneralizedMeanPooling2D(**arguments)
