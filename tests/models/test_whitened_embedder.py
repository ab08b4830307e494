"""An embedder with a whitening behind it: its vectors, its file, and what it is exported to."""

import keras
import numpy as np
import pytest

from tests.models.networks import SIZE, images, tiny_embedder
from tfdml.embeddings.backends import load_backend, load_embedder
from tfdml.errors import UserError
from tfdml.export import export_saved_model
from tfdml.export.conversion import convert_litert
from tfdml.export.network import in_float32
from tfdml.models import WhitenedEmbedder, with_whitening
from tfdml.retrieval import fit_whitening


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
    assert with_whitening(embedder, train).embedding_dim == 5
    # As in evaluation, whatever is said of training.
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
    with pytest.raises(UserError, match="int8 ends with the projection"):
        convert_litert(model, "int8", cut)


def test_what_cannot_be_is_refused(made):
    embedder, train, _ = made
    with pytest.raises(ValueError, match="more than 5 vectors"):
        with_whitening(embedder, train[:5])
    with pytest.raises(ValueError, match="embedder must be an Embedder"):
        WhitenedEmbedder(keras.Sequential(), 3)
    with pytest.raises(ValueError, match="shrinkage must be at least 0 and at most 1"):
        with_whitening(embedder, train, shrinkage=2)
    with pytest.raises(ValueError, match="adapt"):
        WhitenedEmbedder(embedder, 3)(images())
