import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.decomposition import PCA

from tests.mathematics import assert_close
from tests.models.ensembles import ensemble_learner, tiny_ensemble
from tests.models.networks import SIZE, config_of, images, tiny_embedder
from tfdml import evaluation, export, layers, losses
from tfdml.models import MetricLearner, MomentEmbedder
from tfdml.objectives import HighOrderMomentLoss


def learner(*names, **options):
    keras.utils.set_random_seed(0)
    terms = [HighOrderMomentLoss(losses.ContrastiveLoss(), 4, 32, name=name, **options) for name in names]
    built = MetricLearner(tiny_embedder(resize=14, resize_mode="squash"), [losses.ContrastiveLoss(), *terms])
    built.build((None, SIZE, SIZE, 3))
    return built


@pytest.fixture(scope="module")
def model():
    built = MomentEmbedder.from_learner(learner("horde"))
    built.adapt(np.asarray(built.features(images(1, 40))))
    return built


def test_concatenates_the_embedding_and_those_of_every_order():
    trained = learner("horde")
    model = MomentEmbedder.from_learner(trained)
    x = images()
    representations = trained.embedder.represent(x)
    parts = [representations["embedding"], *trained.objectives[1].represent(representations).values()]
    assert [part.shape for part in parts] == [(8, 5)] * 4
    np.testing.assert_allclose(model.features(x), np.concatenate(parts, axis=1), atol=1e-6)


@pytest.mark.parametrize("mode", ["cascaded", "random"])
def test_features_by_order_are_what_each_order_was_trained_on(mode):
    trained = learner("horde", mode=mode)
    model, x = MomentEmbedder.from_learner(trained), images()
    parts = model.by_order(np.asarray(model.features(x)))
    assert {order: part.shape[1] for order, part in parts.items()} == {1: 5} | dict.fromkeys(
        (2, 3, 4), 32 if mode == "random" else 5
    )
    representations = trained.embedder.represent(x)
    moments = trained.objectives[1].represent(representations)
    np.testing.assert_allclose(parts[1], representations["embedding"], atol=1e-6)
    for order in (2, 3, 4):
        np.testing.assert_allclose(parts[order], moments[f"horde_{order}"], atol=1e-6)


def test_takes_the_moments_of_what_the_objective_takes_them_of():
    ensemble = tiny_ensemble()
    moments = HighOrderMomentLoss(losses.ContrastiveLoss(), 3, 8, representation="heads")
    trained = MetricLearner(ensemble, [moments])
    trained.build((None, SIZE, SIZE, 3))
    model = MomentEmbedder.from_learner(trained)
    assert model.representation == "heads"
    x = images(size=3)
    representations = ensemble.represent(x)
    parts = [representations["embedding"], *moments.represent(representations).values()]
    np.testing.assert_allclose(model.features(x), np.concatenate(parts, axis=1), atol=1e-6)


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


def test_size_may_differ_from_the_embedders():
    model = MomentEmbedder.from_learner(learner("horde"), embedding_dim=12)
    model.adapt(np.asarray(model.features(images(1, 40))))
    assert model(images()).shape == (8, 12)
    assert model.embedding_dim == 12
    assert (model.image_size, model.resize, model.resize_mode) == (SIZE, 14, "squash")


def test_evaluation_embeds_with_it(model):
    x = images()
    np.testing.assert_allclose(evaluation.embed(model, [x[:5], x[5:]]), model(x), atol=1e-6)
    np.testing.assert_allclose(evaluation.embed(model.features, [x[:5], x[5:]]), model.features(x), atol=1e-6)


def test_saved_model_gives_the_same_embeddings(model, tmp_path):
    model.save(tmp_path / "moments.keras")
    again = keras.saving.load_model(tmp_path / "moments.keras")
    assert config_of(again) == config_of(model)
    np.testing.assert_array_equal(again.predict(images(), verbose=0), model.predict(images(), verbose=0))


@pytest.mark.slow
def test_export_gives_the_same_embeddings(model, tmp_path):
    version = export.export_saved_model(model, tmp_path)
    encoded = [tf.io.encode_png(image).numpy() for image in images(dtype="uint8")]
    assert export.compare(model, version, encoded) < 1e-6


def test_random_moments_need_no_dense_layer():
    model = MomentEmbedder.from_learner(learner("horde", mode="random"))
    training = np.asarray(model.features(images(1, 40)))
    assert training.shape == (40, 5 + 3 * 32)
    model.adapt(training)
    assert model(images()).shape == (8, 5)


def test_on_an_ensemble(tmp_path):
    trained = ensemble_learner()
    trained.build((None, SIZE, SIZE, 3))
    model = MomentEmbedder.from_learner(trained)
    training = np.asarray(model.features(images(1, 40)))
    assert training.shape == (40, 6 + 2 * 4)
    model.adapt(training)
    model.save(tmp_path / "moments.keras")
    again = keras.saving.load_model(tmp_path / "moments.keras")
    np.testing.assert_array_equal(again(images()), model(images()))


def test_objective_is_chosen_by_its_name():
    trained = learner("first", "second")
    chosen = MomentEmbedder.from_learner(trained, "second")
    assert chosen.moments is trained.objectives[2].moments
    for name in (None, "third"):
        with pytest.raises(ValueError, match=r"first.*second"):
            MomentEmbedder.from_learner(trained, name)


def test_learner_without_moments_is_refused():
    with pytest.raises(ValueError, match="moment losses"):
        MomentEmbedder.from_learner(MetricLearner(tiny_embedder(), losses.ContrastiveLoss()))


def test_is_refused_before_it_is_adapted():
    with pytest.raises(ValueError, match="adapt"):
        MomentEmbedder.from_learner(learner("horde"))(images())


def test_arguments_that_make_no_sense_are_refused():
    moments = layers.MomentEmbeddings(3, 8, 4)
    with pytest.raises(ValueError, match="must be an Embedder"):
        MomentEmbedder(keras.Sequential(), moments)
    with pytest.raises(ValueError, match="MomentEmbeddings"):
        MomentEmbedder(tiny_embedder(), layers.L2Normalize())
    with pytest.raises(ValueError, match="one of feature_map"):
        MomentEmbedder(tiny_embedder(), moments, "maps")
