import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mathematics import MODES, assert_close, finite_differences, random_batch, value_and_gradients
from tfdml.layers import CeilMaxPooling2D, LocalResponseNormalization


def ceil_pool(x, size, stride, cover=False):
    """Caffe's formula with loops: windows from 0, clipped at the edge."""
    batch, height, width, channels = x.shape

    def windows(n):
        return -(-n // stride) if cover else max(-(-(n - size) // stride) + 1, 1)

    out = np.zeros((batch, windows(height), windows(width), channels), x.dtype)
    for b, i, j, c in np.ndindex(out.shape):
        out[b, i, j, c] = x[b, i * stride : i * stride + size, j * stride : j * stride + size, c].max()
    return out


def response(x, size=5, alpha=1e-4, beta=0.75, k=1.0):
    out = np.zeros(x.shape, np.float64)
    for *place, c in np.ndindex(x.shape):
        place = tuple(place)
        reach = range(max(c - size // 2, 0), min(c + size // 2 + 1, x.shape[-1]))
        total = sum(float(x[(*place, j)]) ** 2 for j in reach)
        out[(*place, c)] = x[(*place, c)] / (k + alpha / size * total) ** beta
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


@pytest.mark.parametrize("options", [{}, {"size": 3, "alpha": 0.5, "beta": 0.6, "k": 2.0}, {"size": 1, "alpha": 1.0}])
@pytest.mark.parametrize("mode", MODES)
def test_local_response_normalisation_equals_the_formula(options, mode):
    x = 5 * np.random.default_rng(3).normal(size=(2, 2, 1, 9)).astype("float32")
    weight = np.random.default_rng(4).normal(size=x.shape).astype("float32")
    layer = LocalResponseNormalization(**options)
    assert_close(layer(x), response(x, **options))
    _, (gradient,) = value_and_gradients(lambda v: keras.ops.sum(layer(v) * weight), x, mode=mode)
    (expected,) = finite_differences(lambda v: np.sum(response(v, **options) * weight), x)
    assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_squares_do_not_overflow(dtype):
    x = 300.0 * random_batch(0, 4, 1, 8)[1].reshape(1, 2, 2, 8)
    half = keras.ops.cast(x, dtype)
    output = LocalResponseNormalization(dtype=dtype)(half)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    exact = response(keras.ops.convert_to_numpy(keras.ops.cast(half, "float32")))
    assert_close(keras.ops.cast(output, "float32"), exact, 1e-2)


@pytest.mark.parametrize(
    "layer", [CeilMaxPooling2D(3, 2, cover=True), LocalResponseNormalization(3, 0.1, 0.5, 2.0)], ids=["pool", "lrn"]
)
def test_serialisation_restores_the_layer(layer):
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert again.get_config() == layer.get_config()
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 6)).astype("float32")
    np.testing.assert_array_equal(again(x), layer(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CeilMaxPooling2D(2, 3), "pool_size >= strides >= 1, not 2 and 3"),
        (lambda: CeilMaxPooling2D(3, 0), "strides must be a positive integer, not 0"),
        (lambda: LocalResponseNormalization(4), "odd and positive, not 4"),
        (lambda: LocalResponseNormalization(-1), "size must be a positive integer, not -1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
