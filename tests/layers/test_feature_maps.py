"""Scaling, pooling, attention, and what Caffe networks need."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mathematics import (
    MODES,
    assert_close,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml.layers import (
    AttentionHeads,
    AttentionPooling2D,
    CeilMaxPooling2D,
    GeneralizedMeanPooling2D,
    InputScaling,
    LocalResponseNormalization,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))


@pytest.mark.parametrize(
    ("mode", "application"), [("tf", "tf"), ("torch", "torch"), ("caffe", "caffe")]
)
def test_scaling_is_that_of_keras_applications(mode, application):
    expected = keras.applications.imagenet_utils.preprocess_input(
        PIXELS.astype("float32"), mode=application
    )
    assert_close(InputScaling(mode)(PIXELS.astype("float32")), expected)


def test_other_scalings():
    assert_close(InputScaling("none")(PIXELS), PIXELS)
    assert_close(InputScaling("unit")(PIXELS), PIXELS / 255)
    assert_close(
        InputScaling("bn_inception")(PIXELS), PIXELS[..., ::-1] - np.array([104, 117, 128])
    )
    assert_close(InputScaling("googlenet")(PIXELS), PIXELS[..., ::-1] - np.array([104, 117, 123]))


@pytest.mark.parametrize("mode", InputScaling.MODES)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "float64", "float16"])
def test_pixels_of_every_dtype_are_scaled_alike(mode, dtype):
    expected = InputScaling(mode)(PIXELS.astype("float32"))
    np.testing.assert_array_equal(InputScaling(mode)(PIXELS.astype(dtype)), expected)


@pytest.mark.parametrize("mode", InputScaling.MODES)
def test_fractions_of_pixels_are_rounded_once_only(mode, policy):
    pixels = np.random.default_rng(1).uniform(0, 255, (2, 4, 4, 3)).astype("float32")
    exact = InputScaling(mode, dtype="float32")(pixels)
    output = InputScaling(mode)(pixels)
    assert output.dtype == keras.config.dtype_policy().compute_dtype
    np.testing.assert_array_equal(output, tf.cast(exact, output.dtype))


def ceil_pool(x, size, stride, cover=False):
    """Caffe's formula with loops: windows from 0, clipped at the edge."""
    batch, height, width, channels = x.shape

    def windows(n):
        return -(-n // stride) if cover else max(-(-(n - size) // stride) + 1, 1)

    out = np.zeros((batch, windows(height), windows(width), channels), x.dtype)
    for b, i, j, c in np.ndindex(out.shape):
        out[b, i, j, c] = x[
            b, i * stride : i * stride + size, j * stride : j * stride + size, c
        ].max()
    return out


def response(x):
    out = np.zeros(x.shape, np.float64)
    for *place, c in np.ndindex(x.shape):
        place = tuple(place)
        reach = range(max(c - 2, 0), min(c + 3, x.shape[-1]))
        total = sum(float(x[(*place, j)]) ** 2 for j in reach)
        out[(*place, c)] = x[(*place, c)] / (1 + 1e-4 / 5 * total) ** 0.75
    return out


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    windows=st.sampled_from([(3, 2), (2, 2), (3, 3), (3, 1), (4, 3), (1, 1)]),
    cover=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ceil_pooling_takes_the_maximum_of_what_lies_inside(height, width, windows, cover, seed):
    x = np.random.default_rng(seed).normal(size=(2, height, width, 3)).astype("float32")
    layer = CeilMaxPooling2D(*windows, cover=cover)
    expected = ceil_pool(x, *windows, cover)
    np.testing.assert_array_equal(layer(x), expected)
    assert layer.compute_output_shape(x.shape) == expected.shape


@pytest.mark.parametrize("sides", [(None, None), (7, None), (8, 7)])
def test_ceil_pooling_of_sizes_that_are_not_known_beforehand(sides):
    inputs = keras.Input((*sides, 2))
    model = keras.Model(inputs, CeilMaxPooling2D()(inputs))
    height, width = (side or 10 for side in sides)
    x = np.random.default_rng(0).normal(size=(3, height, width, 2)).astype("float32")
    np.testing.assert_array_equal(model(x), ceil_pool(x, 3, 2))
    np.testing.assert_array_equal(model.predict(x, verbose=0), ceil_pool(x, 3, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cover", [False, True])
def test_gradient_of_ceil_pooling(cover, mode):
    x = np.random.default_rng(1).permutation(2 * 5 * 6).reshape(1, 5, 6, 2).astype("float32")
    weight = np.random.default_rng(2).normal(size=ceil_pool(x, 3, 2, cover).shape).astype("float32")
    layer = CeilMaxPooling2D(3, 2, cover)
    _, (gradient,) = value_and_gradients(lambda v: keras.ops.sum(layer(v) * weight), x, mode=mode)
    (expected,) = finite_differences(lambda v: np.sum(ceil_pool(v, 3, 2, cover) * weight), x)
    assert_close(gradient, expected)


@pytest.mark.parametrize("mode", MODES)
def test_local_response_normalization_equals_the_formula(mode):
    x = 90 * np.random.default_rng(3).normal(size=(2, 2, 1, 9)).astype("float32")
    weight = np.random.default_rng(4).normal(size=x.shape).astype("float32")
    layer = LocalResponseNormalization()
    assert_close(layer(x), response(x))
    _, (gradient,) = value_and_gradients(lambda v: keras.ops.sum(layer(v) * weight), x, mode=mode)
    (expected,) = finite_differences(lambda v: np.sum(response(v) * weight), x)
    assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_squares_do_not_overflow(dtype):
    x = 300.0 * random_batch(0, 4, 1, 8)[1].reshape(1, 2, 2, 8)
    half = keras.ops.cast(x, dtype)
    output = LocalResponseNormalization(dtype=dtype)(half)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    exact = response(keras.ops.convert_to_numpy(keras.ops.cast(half, "float32")))
    assert_close(keras.ops.cast(output, "float32"), exact, 1e-2)


def gem_reference(x, p, epsilon=1e-6):
    pooled = np.zeros((x.shape[0], x.shape[3]))
    for b in range(x.shape[0]):
        for c in range(x.shape[3]):
            values = [
                max(float(x[b, i, j, c]), epsilon)
                for i in range(x.shape[1])
                for j in range(x.shape[2])
            ]
            pooled[b, c] = (sum(value**p for value in values) / len(values)) ** (1 / p)
    return pooled


def attention_reference(x, query):
    pooled = np.zeros((x.shape[0], x.shape[3]))
    for b in range(x.shape[0]):
        rows = [x[b, i, j].astype("float64") for i in range(x.shape[1]) for j in range(x.shape[2])]
        fits = np.array([float(row @ query) / x.shape[3] ** 0.5 for row in rows])
        weights = np.exp(fits - fits.max())
        pooled[b] = sum(
            weight * row for weight, row in zip(weights / weights.sum(), rows, strict=True)
        )
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


@pytest.mark.parametrize("scale", [1e-4, 1e8])
def test_gem_does_not_leave_the_range_of_float32(scale):
    x = features(scale=scale)
    np.testing.assert_allclose(gem(30.0)(x), gem_reference(x, 30.0, 1e-6), rtol=1e-4)


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
    for gradient, expected in zip(
        found, finite_differences(exact, x, np.array(weight)), strict=True
    ):
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("layer", [gem(3.0), attention()], ids=["gem", "attention"])
@pytest.mark.parametrize(
    "x", [np.zeros((1, 4, 5, 6)), np.full((2, 4, 5, 6), -7.0), np.ones((1, 4, 5, 6)) * 1e6]
)
def test_constant_maps_have_finite_values_and_gradients(layer, x):
    with tf.GradientTape() as tape:
        tensor = tf.constant(x, tf.float32)
        tape.watch(tensor)
        value = tf.reduce_sum(layer(tensor))
    gradients = tape.gradient(
        value, [tensor, *(weight.value for weight in layer.trainable_variables)]
    )
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


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


def maps(seed=0, batch=2, side=3, channels=4, context=5):
    generator = np.random.default_rng(seed)
    shapes = [(batch, side, side + 1, channels), (batch, side, side + 1, context)]
    return [generator.normal(size=shape).astype("float32") for shape in shapes]


def reference(features, context, kernel, bias, heads):
    """Position by position, with one matrix for each head."""
    batch, height, width, channels = features.shape
    out = np.zeros((batch, heads, height, width, channels))
    for b, m, i, j in np.ndindex(out.shape[:4]):
        own = slice(m * channels, (m + 1) * channels)
        scores = context[b, i, j].astype("float64") @ kernel[0, 0, :, own] + bias[own]
        out[b, m, i, j] = features[b, i, j] / (1.0 + np.exp(-scores))
    return out


def weights_of(layer):
    return [keras.ops.convert_to_numpy(weight) for weight in layer.weights]


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_each_head_has_its_own_mask(heads):
    features, context = maps()
    layer = AttentionHeads(heads)
    output = layer([features, context])
    assert layer.compute_output_shape((features.shape, context.shape)) == output.shape
    layer.convolution.bias.assign(np.linspace(-1, 1, 4 * heads))
    assert_close(
        layer([features, context]), reference(features, context, *weights_of(layer), heads)
    )
    masks = keras.ops.convert_to_numpy(layer.masks(context))
    assert masks.shape == (2, heads, 3, 4, 4)
    assert np.all((masks > 0) & (masks < 1))
