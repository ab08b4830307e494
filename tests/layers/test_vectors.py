"""Unit length, class proxies, principal components."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import references
from tests.support.mathematics import assert_close, random_batch, value_and_gradients
from tfdml.layers import CosineProxies, L2Normalize, PrincipalComponents


def test_unit_length_in_float32_under_every_policy(policy):
    x = random_batch(0, 6, 1, 64, unit=False)[1]
    output = L2Normalize()(
        tf.cast(x, "float32" if policy == "float32" else policy.removeprefix("mixed_"))
    )
    assert output.dtype == tf.float32
    assert_close(np.linalg.norm(output, axis=1), np.ones(6), 1e-6)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_zero_vector_stays_zero_and_gets_no_gradient(mode):
    x = np.zeros((2, 4), "float32")
    x[1] = [3, 0, 4, 0]
    value, (gradient,) = value_and_gradients(
        lambda v: tf.reduce_sum(L2Normalize()(v)), x, mode=mode
    )
    assert_close(value, 1.4)
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.all(np.isfinite(gradient))


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


def test_zero_embedding_and_zero_proxy_have_cosine_zero_and_finite_gradients():
    layer = CosineProxies(2)
    layer.build((None, 3))
    layer.proxies.assign(np.array([[0, 0, 0], [1, 2, 3]], "float32"))
    value, gradients = value_and_gradients(layer, [[0.0, 0, 0], [1, 1, 1]], weights=[layer.proxies])
    np.testing.assert_array_equal(value[0], [0, 0])
    assert value[1, 0] == 0
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    np.testing.assert_array_equal(gradients[0][0], [0, 0, 0])
    np.testing.assert_array_equal(gradients[1][0], [0, 0, 0])


def vectors(count=50, size=8, seed=0):
    """Correlated vectors about a mean, with variances well apart."""
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(size, size))
    scales = 1.5 ** -np.arange(size)
    return (
        (generator.normal(size=(count, size)) * scales) @ mixing + generator.normal(size=size)
    ).astype("float32")


def adapted(x, *arguments, **options):
    layer = PrincipalComponents(*arguments, **options)
    layer.adapt(x)
    return layer


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("shape", [(50, 8), (9000, 5), (8, 8), (7, 30)], ids=str)
def test_equals_the_singular_vectors(shape, whiten):
    x = vectors(*shape)
    dim = min(4, shape[0] - 1)
    layer = adapted(x, dim, whiten)
    left, lengths, _ = np.linalg.svd(x - x.mean(axis=0, dtype="float64"), full_matrices=False)
    expected = left[:, :dim] * (np.sqrt(len(x) - 1) if whiten else lengths[:dim])
    found = np.asarray(layer(x))
    signs = np.sign(np.sum(found * expected, axis=0))
    assert_close(found * signs, expected, 2e-5)
    assert found.dtype == np.float32


def check_leading(x, dim, whiten=False):
    """The randomized components are as orthogonal, catch as much variance and give the same cosines
    as the exact."""
    layer = adapted(x, dim, whiten)
    centered = x.astype("float64") - x.mean(axis=0, dtype="float64")
    variances = np.linalg.svd(centered, compute_uv=False)[:dim] ** 2 / (len(x) - 1)
    found = np.asarray(layer(x), "float64")
    assert_close(found.mean(axis=0), np.zeros(dim), floor=1e-3)
    assert_close(found.var(axis=0, ddof=1), np.ones(dim) if whiten else variances, 1e-3)
    assert_close(np.corrcoef(found.T), np.eye(dim), 2e-3)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("shape", [(300, 60), (60, 300)], ids=str)
def test_randomized_components_catch_the_variance_of_the_exact_ones(shape, whiten, monkeypatch):
    monkeypatch.setattr("tfdml.layers.vectors._EXACT", 20)
    check_leading(vectors(*shape), 6, whiten)


@pytest.mark.parametrize("whiten", [False, True])
def test_directions_without_variance_are_finite(whiten):
    x = np.repeat(vectors(20, 2), 2, axis=1)
    found = np.asarray(adapted(x, 4, whiten)(x))
    assert np.all(np.isfinite(found))
    assert np.abs(found[:, 2:]).max() < 1e-5


def test_saves_and_loads_what_it_was_adapted_to(tmp_path):
    x = vectors()
    model = keras.Sequential([keras.Input((8,)), adapted(x, 3)])
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(x), model(x))


@pytest.mark.parametrize(
    ("x", "word"),
    [(vectors(3), "more than 3"), (np.full((9, 8), np.nan), "finite"), (vectors(size=2), "size 2")],
)
def test_vectors_that_do_not_do_are_refused(x, word):
    with pytest.raises(ValueError, match=word):
        PrincipalComponents(3).adapt(x)
    with pytest.raises(ValueError, match="adapt"):
        PrincipalComponents(3)(vectors())
