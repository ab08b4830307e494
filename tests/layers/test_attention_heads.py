import keras
import numpy as np
import pytest

from tests.mathematics import MODES, assert_close, value_and_gradients
from tfdml.layers import AttentionHeads


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
    assert_close(layer([features, context]), reference(features, context, *weights_of(layer), heads))
    masks = keras.ops.convert_to_numpy(layer.masks(context))
    assert masks.shape == (2, heads, 3, 4, 4)
    assert np.all((masks > 0) & (masks < 1))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_reaches_features_and_context(mode):
    features, context = maps()
    layer = AttentionHeads(2)
    layer.build((features.shape, context.shape))
    eager = value_and_gradients(lambda x, u: keras.ops.sum(layer([x, u]) ** 2), features, context)
    value, gradients = value_and_gradients(lambda x, u: keras.ops.sum(layer([x, u]) ** 2), features, context, mode=mode)
    assert_close(value, eager[0])
    for actual, expected in zip(gradients, eager[1], strict=True):
        assert np.any(expected)
        assert_close(actual, expected)


def test_heads_start_different_and_glorot_uniform():
    keras.utils.set_random_seed(0)
    layer = AttentionHeads(8)
    layer.build(((None, 14, 14, 480), (None, 14, 14, 832)))
    kernel = weights_of(layer)[0][0, 0]
    assert kernel.shape == (832, 8 * 480)
    bound = np.sqrt(6 / (832 + 480))
    assert 0.99 * bound < np.abs(kernel).max() <= bound
    assert_close(kernel.std(), bound / np.sqrt(3), 1e-2)
    assert np.abs(kernel[:, :480] - kernel[:, 480:960]).max() > bound


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    features, context = maps()
    layer = AttentionHeads(2, dtype=policy)
    output = layer([features, context])
    assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")
    assert layer.convolution.kernel.dtype == "float32"
    expected = reference(features, context, *weights_of(layer), 2)
    assert_close(keras.ops.cast(output, "float32"), expected, 2e-2)


def test_saves_and_loads(tmp_path):
    inputs = [keras.Input((None, None, 4)), keras.Input((None, None, 5))]
    model = keras.Model(inputs, AttentionHeads(3)(inputs))
    assert model.output_shape == (None, 3, None, None, 4)
    model.save(tmp_path / "x.keras")
    again = keras.saving.load_model(tmp_path / "x.keras")
    np.testing.assert_array_equal(again(maps()), model(maps()))


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="heads must be a positive integer"):
        AttentionHeads(0)
    with pytest.raises(ValueError, match="in size"):
        AttentionHeads(2).compute_output_shape(((2, 3, 4, 4), (2, 9, 9, 5)))
