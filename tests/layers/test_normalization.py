import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, random_batch, value_and_gradients
from tfdml.layers import InputScaling, L2Normalize

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))


@pytest.fixture(params=["float32", "mixed_bfloat16", "mixed_float16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def test_unit_length_in_float32_under_every_policy(policy):
    x = random_batch(0, 6, 1, 64, unit=False)[1]
    output = L2Normalize()(tf.cast(x, "float32" if policy == "float32" else policy.removeprefix("mixed_")))
    assert output.dtype == tf.float32
    assert_close(np.linalg.norm(output, axis=1), np.ones(6), 1e-6)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_zero_vector_stays_zero_and_gets_no_gradient(mode):
    x = np.zeros((2, 4), "float32")
    x[1] = [3, 0, 4, 0]
    value, (gradient,) = value_and_gradients(lambda v: tf.reduce_sum(L2Normalize()(v)), x, mode=mode)
    assert_close(value, 1.4)
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.all(np.isfinite(gradient))


def test_direction_alone_has_a_gradient():
    x = random_batch(0, 5, 1, 8, unit=False)[1]
    _, (gradient,) = value_and_gradients(lambda v: tf.reduce_sum(L2Normalize()(v)[:, 0]), x)
    assert np.max(np.abs(np.sum(gradient * x, axis=1))) < 1e-6


@pytest.mark.parametrize(("mode", "application"), [("tf", "tf"), ("torch", "torch"), ("caffe", "caffe")])
def test_scaling_is_that_of_keras_applications(mode, application):
    expected = keras.applications.imagenet_utils.preprocess_input(PIXELS.astype("float32"), mode=application)
    assert_close(InputScaling(mode)(PIXELS.astype("float32")), expected)


def test_other_scalings():
    assert_close(InputScaling("none")(PIXELS), PIXELS)
    assert_close(InputScaling("unit")(PIXELS), PIXELS / 255)
    assert_close(InputScaling("bn_inception")(PIXELS), PIXELS[..., ::-1] - np.array([104, 117, 128]))
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


def test_symbolic_output_has_the_dtype_of_the_real_one(policy):
    symbolic = InputScaling("torch")(keras.Input((8, 8, 3), dtype="uint8"))
    assert symbolic.dtype == keras.config.dtype_policy().compute_dtype
    assert symbolic.shape == (None, 8, 8, 3)


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be 'none', 'unit', 'tf', 'torch'"):
        InputScaling("imagenet")


@pytest.mark.parametrize("layer", [L2Normalize(name="n"), InputScaling("caffe", name="s")], ids=["l2", "scaling"])
def test_serialisation_restores_the_layer(layer):
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    np.testing.assert_array_equal(again(PIXELS.astype("float32")), layer(PIXELS.astype("float32")))
