"""Heat maps of pairs of images, against references and on images whose common part is known."""

import keras
import numpy as np
import pytest

from tests.models.networks import images, tiny_embedder, values
from tests.support.marks import JAX
from tests.support.mathematics import assert_close
from tests.support.processes import run_python
from tfdml import UserError, explain, models

SIDE, PATCH = 32, 8


def blocks(heat):
    """The sums of the positive values in the 4 x 4 places of a patch, as shares."""
    sums = np.maximum(heat, 0).reshape(4, PATCH, 4, PATCH).sum((1, 3)).ravel()
    return sums / sums.sum()


def textures(seed, count):
    return (
        np.random.default_rng(seed).integers(0, 2, (count, 4, 4, 3)).repeat(2, 1).repeat(2, 2)
        * 255.0
    )


def patched(seed, texture, own):
    """A gray image with two textures, and the places of both."""
    image = np.full((SIDE, SIDE, 3), 127.5, "float32")
    places = np.random.default_rng(seed).permutation(16)[:2]
    for place, pixels in zip(places, (texture, own), strict=True):
        row, column = place // 4 * PATCH, place % 4 * PATCH
        image[row : row + PATCH, column : column + PATCH] = pixels
    return image, places


def matched_filters(patterns):
    """A backbone of as many channels as textures, each of which answers to its own."""
    backbone = keras.Sequential(
        [keras.Input((SIDE, SIDE, 3)), keras.layers.Conv2D(8, PATCH, PATCH, activation="relu")]
    )
    kernel = (patterns / 127.5 - 1).transpose(1, 2, 3, 0) / patterns[0].size
    backbone.layers[0].set_weights([kernel, np.full(8, -0.3)])
    return models.Embedder(backbone, embedding_dim=0, image_size=SIDE, scaling="tf")


def test_the_common_patch_is_hot_and_the_other_is_not():
    patterns = textures(0, 8)
    embedder = matched_filters(patterns)
    first, places = patched(1, patterns[0], patterns[1])
    second, others = patched(2, patterns[0], patterns[2])
    assert places[0] != others[0]
    for heat, (common, own) in zip(
        explain.similarity(embedder, first, second), (places, others), strict=True
    ):
        assert blocks(heat).argmax() == common
        assert blocks(heat)[common] > 0.4
        assert blocks(heat)[own] < 0.1


def test_gradients_sum_to_what_the_image_adds_to_the_similarity():
    embedder = tiny_embedder()
    first, second = images(size=2)
    plain = np.broadcast_to(first.mean((0, 1)), first.shape)
    found = embedder.represent(np.stack([first, second, plain]).astype("float32"))
    projection, embedding = (
        values([found[name]])[0].astype("float64") for name in ("projection", "embedding")
    )
    added = (projection[0] - projection[2]) @ embedding[1] / np.linalg.norm(projection[0])
    heat = explain.similarity(embedder, first, second, steps=64)[0]
    assert heat.mean() == pytest.approx(added, rel=0.01)


def test_models_without_a_feature_map_have_gradients():
    inputs = keras.Input((12, 12, 3))
    outputs = keras.layers.UnitNormalization()(
        keras.layers.Dense(4)(keras.layers.Flatten()(inputs))
    )
    model = keras.Model(inputs, outputs, name="plain")
    first, second = images(size=2)
    assert explain.similarity(model, first, second)[1].shape == (12, 12)
    with pytest.raises(UserError, match="second has the shape"):
        explain.similarity(tiny_embedder(), first, second[:6])


def test_an_overlay_is_bright_where_the_map_is_high():
    image, heat = np.full((2, 2, 3), 100, np.uint8), np.array([[-5.0, 0.0], [1.0, 2.0]])
    shown = explain.overlay(image, heat).astype(int).sum(axis=-1)
    assert shown[0, 0] == shown[0, 1] < shown[1, 0] < shown[1, 1]


def maps_of_patches():
    patterns = textures(0, 8)
    pair = patched(1, patterns[0], patterns[1])[0], patched(2, patterns[0], patterns[2])[0]
    embedder = matched_filters(patterns)
    return np.stack(explain.similarity(embedder, *pair))


@pytest.mark.slow
def test_maps_on_jax_are_those_of_tensorflow(tmp_path):
    pytest.importorskip("jax")
    script = (
        "import sys, numpy, tests.test_explain as t; numpy.save(sys.argv[1], t.maps_of_patches())"
    )
    run_python("-c", script, tmp_path / "jax.npy", environment=JAX)
    assert_close(np.load(tmp_path / "jax.npy"), maps_of_patches(), 1e-4)
