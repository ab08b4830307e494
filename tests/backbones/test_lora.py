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


def test_queries_and_values_alone_change_by_the_rank(adapted):
    _, model = adapted
    layers = adapted_layers(model)
    for layer in layers:
        before, after = (np.asarray(kernel) for kernel in (layer._kernel, layer.kernel))
        a, b = values([layer.lora_kernel_a, layer.lora_kernel_b])
        assert a.shape[-1] == b.shape[0] == RANK
        assert_close(after - before, a.astype("float64") @ b, floor=1e-5)
    assert {layer.name for layer in layers} == {"query", "value", "attention_qkv"}
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
