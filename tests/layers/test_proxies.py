import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.mathematics import assert_close, finite_differences, random_batch
from tfdml.layers import CosineProxies


@pytest.mark.parametrize("per_class", [1, 3])
def test_equals_the_cosines_to_every_proxy(per_class):
    x = random_batch(0, 5, 1, 6, unit=False)[1]
    layer = CosineProxies(4, per_class)
    output = layer(x)
    proxies = keras.ops.convert_to_numpy(layer.proxies)
    assert proxies.shape == ((4, 6) if per_class == 1 else (4, 3, 6))
    expected = references.class_similarities(x, proxies.reshape(-1, 6))
    assert_close(output, expected.reshape((5, 4) if per_class == 1 else (5, 4, 3)))
    assert layer.compute_output_shape((5, 6)) == tuple(output.shape)


@pytest.mark.parametrize("per_class", [1, 2])
def test_gradient_reaches_embeddings_and_proxies(per_class):
    x = random_batch(0, 4, 1, 3, unit=False)[1]
    layer = CosineProxies(2, per_class)
    layer.build((None, 3))
    weights = np.random.default_rng(1).normal(size=(4, 2 * per_class)).astype("float32")
    with tf.GradientTape() as tape:
        embeddings = tf.constant(x)
        tape.watch(embeddings)
        value = tf.reduce_sum(weights * tf.reshape(layer(embeddings), (4, -1)))
    gradients = tape.gradient(value, [embeddings, layer.proxies.value])
    proxies = keras.ops.convert_to_numpy(layer.proxies)
    expected = finite_differences(
        lambda e, p: float(np.sum(weights * references.class_similarities(e, p.reshape(-1, 3)))), x, proxies
    )
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_close(actual, wanted)


def test_starts_uniform_within_one_over_root_d():
    keras.utils.set_random_seed(0)
    layer = CosineProxies(500)
    layer.build((None, 64))
    proxies = keras.ops.convert_to_numpy(layer.proxies)
    assert np.abs(proxies).max() <= 1 / 8
    # The variance of a uniform variable on +-b is b^2 / 3.
    assert_close(proxies.std(), 1 / 8 / np.sqrt(3), 0.02)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_weights_and_cosines_are_float32_under_a_mixed_policy(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        layer = CosineProxies(4)
        output = layer(tf.cast(random_batch(0, 5, 1, 6)[1], policy.removeprefix("mixed_")))
    finally:
        keras.config.set_dtype_policy(before)
    assert output.dtype == tf.float32
    assert layer.proxies.dtype == "float32"


def test_zero_embedding_and_zero_proxy_have_cosine_zero_and_finite_gradients():
    layer = CosineProxies(2)
    layer.build((None, 3))
    layer.proxies.assign(np.array([[0, 0, 0], [1, 2, 3]], "float32"))
    with tf.GradientTape() as tape:
        embeddings = tf.constant([[0.0, 0, 0], [1, 1, 1]])
        tape.watch(embeddings)
        value = layer(embeddings)
    gradients = tape.gradient(value, [embeddings, layer.proxies.value])
    np.testing.assert_array_equal(value[0], [0, 0])
    assert value[1, 0] == 0
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    np.testing.assert_array_equal(gradients[0][0], [0, 0, 0])
    np.testing.assert_array_equal(gradients[1][0], [0, 0, 0])


@pytest.mark.parametrize("arguments", [(0,), (-2,), (3, 0)])
def test_counts_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match="must be a positive integer"):
        CosineProxies(*arguments)


@pytest.mark.parametrize("per_class", [1, 3])
def test_saves_and_loads_with_its_weights(tmp_path, per_class):
    x = random_batch(0, 5, 1, 6)[1]
    model = keras.Sequential([keras.Input((6,)), CosineProxies(4, per_class)])
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(x), model(x))
