"""What `tfdml.workarounds` is still needed for."""

import ctypes
import sys

import keras
import numpy as np
import pytest

from tfdml import workarounds

# Where a library has one of these public names now, use it in place of the private one in
# `tfdml.workarounds`.


def test_keras_shows_the_outermost_layers_alone():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((3,)), inner])
    assert inner.layers[0] not in model.layers
    assert inner.layers[0] in workarounds.layers_of(model)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere symbols are looked for in one library"
)
def test_the_symbols_of_tensorflows_openssl_are_global():
    assert hasattr(ctypes.CDLL(None), "SSL_CTX_free")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="it is TensorFlow's sum")
def test_no_gradient_depends_on_the_order_of_operations():
    import tensorflow as tf

    workarounds.sum_gradients_in_order()
    x = tf.constant(np.random.default_rng(0).normal(size=1000), tf.float32)

    @tf.function(autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.exp(x)) + tf.reduce_sum(tf.sin(x)) + tf.reduce_sum(tf.tanh(x))
        return tape.gradient(loss, x)

    operations = gradient.get_concrete_function(x).graph.get_operations()
    assert not [each for each in operations if each.type == "AddN" and len(each.inputs) > 2]
    exact = np.exp(x) + np.cos(x) + 1 - np.tanh(x) ** 2
    np.testing.assert_allclose(gradient(x), exact, rtol=1e-5, atol=1e-6)
