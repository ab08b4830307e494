import keras
import numpy as np
import pytest
from sklearn.decomposition import PCA

from tests.mathematics import assert_close
from tests.models.networks import values
from tfdml.layers import PrincipalComponents, principal_components


def vectors(count=50, size=8, seed=0):
    """Correlated vectors about a mean, with variances well apart."""
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(size, size))
    scales = 1.5 ** -np.arange(size)
    return ((generator.normal(size=(count, size)) * scales) @ mixing + generator.normal(size=size)).astype("float32")


def adapted(x, *arguments, **options):
    layer = PrincipalComponents(*arguments, **options)
    layer.adapt(x)
    return layer


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("shape", [(50, 8), (9000, 5), (8, 8), (7, 30)], ids=str)
def test_equals_scikit_learn(shape, whiten):
    x = vectors(*shape)
    dim = min(4, shape[0] - 1)
    layer = adapted(x, dim, whiten)
    pca = PCA(dim, whiten=whiten, svd_solver="full").fit(x.astype("float64"))
    expected = pca.transform(x.astype("float64"))
    found = np.asarray(layer(x))
    signs = np.sign(np.sum(found * expected, axis=0))
    assert_close(found * signs, expected, 2e-5)
    assert found.dtype == np.float32


def check_leading(x, dim, whiten=False):
    """The randomised components are as orthogonal, catch as much variance and give the same cosines as the exact."""
    layer = adapted(x, dim, whiten)
    centred = x.astype("float64") - x.mean(axis=0, dtype="float64")
    variances = np.linalg.svd(centred, compute_uv=False)[:dim] ** 2 / (len(x) - 1)
    found = np.asarray(layer(x), "float64")
    assert_close(found.mean(axis=0), np.zeros(dim), floor=1e-3)
    assert_close(found.var(axis=0, ddof=1), np.ones(dim) if whiten else variances, 1e-3)
    assert_close(np.corrcoef(found.T), np.eye(dim), 2e-3)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("shape", [(300, 60), (60, 300)], ids=str)
def test_randomised_components_catch_the_variance_of_the_exact_ones(shape, whiten, monkeypatch):
    monkeypatch.setattr(principal_components, "_EXACT", 20)
    check_leading(vectors(*shape), 6, whiten)


def test_many_vectors_of_many_dimensions_need_no_covariance():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4100, 3)).astype("float32") @ generator.normal(size=(3, 4100)).astype("float32")
    first, second = (adapted(x, 3) for _ in range(2))
    np.testing.assert_array_equal(first.components, second.components)
    # Three directions are all that there is to be found.
    assert_close(np.sum(np.var(np.asarray(first(x)), axis=0)), np.sum(np.var(x, axis=0, dtype="float64")), 1e-4)


def test_components_point_where_their_largest_entry_is_positive():
    components = values([adapted(vectors(), 5).components])[0]
    assert np.all(components[np.abs(components).argmax(axis=0), np.arange(5)] > 0)


@pytest.mark.parametrize("whiten", [False, True])
def test_directions_without_variance_are_finite(whiten):
    x = np.repeat(vectors(20, 2), 2, axis=1)
    found = np.asarray(adapted(x, 4, whiten)(x))
    assert np.all(np.isfinite(found))
    assert np.abs(found[:, 2:]).max() < 1e-5


def test_is_not_trained():
    assert not adapted(vectors(), 3).trainable_variables


def test_saves_and_loads_what_it_was_adapted_to(tmp_path):
    x = vectors()
    model = keras.Sequential([keras.Input((8,)), adapted(x, 3)])
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(x), model(x))


def test_is_refused_before_it_is_adapted():
    with pytest.raises(ValueError, match="adapt"):
        PrincipalComponents(3)(vectors())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (vectors(3), "more than 3 vectors"),
        (vectors()[0], "more than 3 vectors"),
        (np.full((9, 8), np.nan), "finite"),
        (vectors(size=2), "3 components of vectors of size 2"),
    ],
    ids=["few", "one", "nan", "small"],
)
def test_vectors_that_do_not_do_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        PrincipalComponents(3).adapt(x)


def test_adapting_again_needs_vectors_of_the_same_size():
    layer = adapted(vectors(), 3)
    with pytest.raises(ValueError, match="size 9, not 8"):
        layer.adapt(vectors(size=9))
