"""Low-rank changes of attention, on a small network of Keras's own layers."""

import keras
import numpy as np
import pytest

from tests.mathematics import assert_close
from tests.models.networks import values
from tfdml.backbones import enable_lora
from tfdml.backbones.lora import plain_weights

WIDTH, HEADS, RANK = 12, 3, 2


def network(seed=0):
    """Attention with projections of (d, heads, k), and one without heads, as in Swin."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((5, WIDTH))
    x = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
    x = keras.layers.Dense(3 * WIDTH, name="attention_qkv")(x)
    return keras.Model(inputs, x)


def adapted_layers(model):
    return [layer for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]


@pytest.fixture
def adapted():
    """A network, and the same one with changes that are not zero."""
    plain, model = network(), network()
    assert enable_lora(model, RANK) == 3
    generator = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape))
    return plain, model


def test_the_matrix_of_all_heads_changes_by_the_rank(adapted):
    _, model = adapted
    sizes = {}
    for layer in adapted_layers(model):
        before, after = (np.asarray(kernel).reshape(WIDTH, -1) for kernel in (layer._kernel, layer.kernel))
        assert np.linalg.matrix_rank(after - before, tol=1e-4) == RANK
        a, b = values([layer.lora_kernel_a, layer.lora_kernel_b])
        assert_close(after - before, a.astype("float64") @ b, floor=1e-5)
        sizes[layer.name] = sum(int(np.prod(v.shape)) for v in layer.trainable_variables if "lora" in v.name)
    # r (d + k), of queries and values alone.
    assert sizes == {"query": 48, "value": 48, "attention_qkv": 96}
    assert len(model.trainable_variables) == 6


def test_a_network_starts_as_it_was():
    plain, model = network(), network()
    enable_lora(model, RANK)
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype("float32")
    np.testing.assert_array_equal(model(x), plain(x))


def test_the_changes_are_merged_in_what_is_saved_and_exported(adapted, tmp_path):
    plain, model = adapted
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype("float32")
    expected = np.asarray(model(x))
    assert np.abs(expected - np.asarray(plain(x))).max() > 0.1
    model.save_weights(tmp_path / "x.weights.h5")
    plain.load_weights(tmp_path / "x.weights.h5")
    assert_close(plain(x), expected)
    other = network(1)
    other.set_weights(plain_weights(model))
    assert_close(other(x), expected)
