"""The reduced embedders: what they give, and that they are saved as embedders are."""

import keras
import numpy as np
import pytest
from sklearn.decomposition import PCA

from tests.models.networks import SIZE, config_of, images, tiny_embedder
from tests.support.mathematics import assert_close
from tfdml import losses
from tfdml.embeddings.backends import load_backend, load_embedder
from tfdml.embeddings.files import truncate
from tfdml.errors import UserError
from tfdml.export import export_saved_model
from tfdml.export.conversion import convert_litert
from tfdml.export.saved_model import in_float32
from tfdml.models import (
    Embedder,
    Head,
    MetricLearner,
    MomentEmbedder,
    TruncatedEmbedder,
    stack,
    with_whitening,
)
from tfdml.objectives import HighOrderMomentLoss
from tfdml.retrieval import fit_whitening


def learner(*names, **options):
    keras.utils.set_random_seed(0)
    terms = [
        HighOrderMomentLoss(losses.ContrastiveLoss(), 4, 32, name=name, **options) for name in names
    ]
    built = MetricLearner(
        tiny_embedder(resize=14, resize_mode="squash"), [losses.ContrastiveLoss(), *terms]
    )
    built.build((None, SIZE, SIZE, 3))
    return built


@pytest.fixture(scope="module")
def model():
    built = MomentEmbedder.from_learner(learner("horde"))
    built.adapt(np.asarray(built.features(images(1, 40))))
    return built


@pytest.mark.parametrize("mode", ["cascaded", "random"])
def test_features_by_order_are_what_each_order_was_trained_on(mode):
    trained = learner("horde", mode=mode)
    model, x = MomentEmbedder.from_learner(trained), images()
    parts = model.by_order(np.asarray(model.features(x)))
    np.testing.assert_array_equal(np.concatenate(list(parts.values()), axis=1), model.features(x))
    assert [part.shape[1] for part in parts.values()] == [5, *[32 if mode == "random" else 5] * 3]
    representations = trained.embedder.represent(x)
    moments = trained.objectives[1].represent(representations)
    np.testing.assert_allclose(parts[1], representations["embedding"], atol=1e-6)
    for order in (2, 3, 4):
        np.testing.assert_allclose(parts[order], moments[f"horde_{order}"], atol=1e-6)


@pytest.mark.parametrize("whiten", [False, True])
def test_equals_scikit_learns_components_of_unit_length(whiten):
    model = MomentEmbedder.from_learner(learner("horde"), whiten=whiten)
    training = np.asarray(model.features(images(1, 40)), "float64")
    model.adapt(training)
    pca = PCA(5, whiten=whiten, svd_solver="full").fit(training)
    x = images()
    expected = pca.transform(np.asarray(model.features(x), "float64"))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = np.asarray(model(x))
    # Cosines do not depend on the directions of the components.
    assert_close(found @ found.T, expected @ expected.T)
    assert found.dtype == np.float32


def test_saved_model_gives_the_same_embeddings_once_it_is_adapted(model, tmp_path):
    with pytest.raises(ValueError, match="adapt"):
        MomentEmbedder.from_learner(learner("horde"))(images())
    model.save(tmp_path / "moments.keras")
    again = keras.saving.load_model(tmp_path / "moments.keras")
    assert config_of(again) == config_of(model)
    np.testing.assert_array_equal(
        again.predict(images(), verbose=0), model.predict(images(), verbose=0)
    )


# Whitening


@pytest.fixture(scope="module")
def made():
    embedder = tiny_embedder(resize=14, resize_mode="squash", pad_color=(1, 2, 3))
    train = np.asarray(embedder(images(1, 60)))
    return embedder, train, with_whitening(embedder, train, dim=3, power=0.5, shrinkage=0.1)


def test_gives_the_embeddings_whitened(made):
    embedder, train, model = made
    whitening = fit_whitening(train, 3, power=0.5, shrinkage=0.1)
    found = np.asarray(model(images()))
    np.testing.assert_allclose(found, whitening(np.asarray(embedder(images()))), atol=2e-6)
    assert found.dtype == np.float32
    assert model.compute_output_shape((4, SIZE, SIZE, 3)) == (4, 3)
    assert (model.embedding_dim, model.image_size, model.resize) == (3, SIZE, 14)
    assert (model.resize_mode, model.pad_color) == ("squash", [1, 2, 3])
    np.testing.assert_array_equal(model(images(), training=True), found)


@pytest.mark.slow
def test_saves_loads_and_is_exported(made, tmp_path):
    _, _, model = made
    model.save(tmp_path / "whitened.keras")
    loaded = load_embedder(tmp_path / "whitened.keras")
    np.testing.assert_array_equal(loaded(images()), model(images()))
    assert in_float32(loaded) is loaded
    version = export_saved_model(model, tmp_path / "served")
    assert load_backend(version).kind == "saved_model"
    served = keras.layers.TFSMLayer(str(version), call_endpoint="embed_images")
    views = np.random.default_rng(0).integers(0, 256, (2, 14, 14, 3)).astype("uint8")
    cut = views[:, 1:13, 1:13]
    np.testing.assert_allclose(served(views)["embedding"], model(cut), atol=2e-5)
    assert len(convert_litert(model)) > 1000
    with pytest.raises(UserError, match="int8 takes no moments"):
        convert_litert(model, "int8", cut)


def test_a_truncated_embedder_gives_the_first_dimensions_and_is_saved(model, tmp_path):
    x = images()
    for whole in (
        tiny_embedder(),
        model,
        with_whitening(model, np.asarray(model(images(1, 40))), dim=4),
    ):
        cut = TruncatedEmbedder(whole, 3)
        vectors = np.asarray(whole(x))
        expected = vectors[:, :3] / np.linalg.norm(vectors[:, :3], axis=1, keepdims=True)
        np.testing.assert_allclose(cut(x), expected, atol=1e-6)
        np.testing.assert_allclose(truncate(vectors, 3), expected, atol=1e-6)
        assert cut.embedding_dim == 3
    cut.save(tmp_path / "cut.keras")
    np.testing.assert_array_equal(load_embedder(tmp_path / "cut.keras")(x), cut(x))


def test_truncation_leaves_zero_vectors_and_refuses_more_dimensions_than_there_are():
    vectors = np.array([[0.0, 0.0, 5.0], [3e38, 4e38, 0.0]])
    np.testing.assert_allclose(truncate(vectors, 2), [[0, 0], [0.6, 0.8]])
    with pytest.raises(UserError, match="truncate_dim=4"):
        truncate(vectors, 4)
    with pytest.raises(ValueError, match="dim must be"):
        TruncatedEmbedder(tiny_embedder(), 6)


@pytest.mark.parametrize("representation", ["embedding", "pooled"])
def test_a_stack_gives_the_heads_vectors_of_the_embedders_vectors(representation, tmp_path):
    embedder = Embedder("conv4", embedding_dim=8, image_size=16)
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    vectors = np.array(embedder.represent(images)[representation])
    head = Head(vectors.shape[1], embedding_dim=3)
    expected = np.array(head(vectors))
    model = stack(embedder, head, representation)
    np.testing.assert_array_equal(model(images), expected)
    assert (model.embedding_dim, model.image_size, model.view_shape) == (3, 16, (16, 16, 3))
    model.save(tmp_path / "stacked.keras")
    loaded = load_embedder(tmp_path / "stacked.keras")
    np.testing.assert_array_equal(loaded(images), expected)
