"""What release 0.1.0 wrote is read: models with their embeddings, indices.

The files in `tests/saved/0.1.0` were written by that release and stay as they are; `embeddings.npz` has the images and
what the models made of them.
"""

import pathlib
import shutil

import keras
import numpy as np
import pytest

from tfdml import models
from tfdml.evaluation import load_index, nearest_neighbours
from tfdml.export.retriever.version import INDEX, read_index

SAVED = pathlib.Path(__file__).parent / "saved" / "0.1.0"
STORED = np.load(SAVED / "embeddings.npz")
IMAGES = STORED["images"].astype(np.float32)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("embedder", models.Embedder), ("ensemble", models.AttentionEnsemble), ("moments", models.MomentEmbedder)],
)
def test_a_saved_model_gives_the_same_embeddings(name, kind):
    model = keras.saving.load_model(SAVED / f"{name}.keras")
    assert type(model) is kind
    np.testing.assert_allclose(model(IMAGES), STORED[name], rtol=1e-5, atol=1e-6)


def test_a_saved_embedder_has_its_settings():
    embedder = keras.saving.load_model(SAVED / "embedder.keras")
    assert (embedder.image_size, embedder.resize, embedder.resize_mode, embedder.pooling_mode) == (32, 40, "pad", "max")
    assert (embedder.pad_color, embedder.drop, embedder.dense.use_bias) == ([0, 0, 0], None, True)


def gallery():
    vectors = np.random.default_rng(0).normal(size=(100, 4))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_an_index_is_read():
    index = load_index(SAVED / "cosine.index")
    np.testing.assert_array_equal(
        index.search(gallery(), k=3, effort=5)[0], nearest_neighbours(gallery(), gallery(), k=3, distance="cosine")[0]
    )


def test_the_index_of_a_retriever_is_read(tmp_path):
    shutil.copyfile(SAVED / "gallery.faiss", tmp_path / INDEX)
    index = read_index(tmp_path)
    np.testing.assert_array_equal(index.vectors(), gallery())
    rows, squares = index.search(gallery()[:3], k=5, effort=2)
    assert rows.tolist() == [[0, 16, 88, 67, 15], [1, 89, 85, 9, 67], [2, 95, 68, 32, 86]]
    np.testing.assert_allclose(squares[0], [0, 0.26798493, 0.30703428, 0.41149971, 0.43191156], rtol=1e-6)
