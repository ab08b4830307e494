"""Heat maps of pairs of images, against references and on images whose common part is known."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.marks import JAX
from tests.mathematics import assert_close
from tests.models.networks import images, tiny_embedder, values
from tfdml import UserError, explain, losses, models, objectives

SIDE, PATCH = 32, 8


def blocks(heat):
    """The sums of the positive values in the 4 x 4 places of a patch, as shares."""
    sums = np.maximum(heat, 0).reshape(4, PATCH, 4, PATCH).sum((1, 3)).ravel()
    return sums / sums.sum()


def textures(seed, count):
    return np.random.default_rng(seed).integers(0, 2, (count, 4, 4, 3)).repeat(2, 1).repeat(2, 2) * 255.0


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
    backbone = keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Conv2D(8, PATCH, PATCH, activation="relu")])
    kernel = (patterns / 127.5 - 1).transpose(1, 2, 3, 0) / patterns[0].size
    backbone.layers[0].set_weights([kernel, np.full(8, -0.3)])
    return models.Embedder(backbone, embedding_dim=0, image_size=SIDE, scaling="tf")


def shares(feature_map, pooling, layer):
    """(n, c): what each position has in the pooled features, by the formulas of the poolings, float64."""
    x = np.asarray(feature_map, "float64").reshape(-1, feature_map.shape[-1])
    if pooling == "avg":
        return x / len(x)
    if pooling == "max":
        return np.where(x == x.max(0), x, 0) / np.maximum((x == x.max(0)).sum(0), 1)
    if pooling == "gem":
        cubes = np.maximum(x, 1e-6) ** 3
        return np.mean(cubes, axis=0) ** (1 / 3) * cubes / cubes.sum(0)
    fits = np.exp(x @ np.asarray(layer.query, "float64") / np.sqrt(x.shape[1]))
    return fits[:, None] / fits.sum() * x


@pytest.mark.parametrize("pooling", ["avg", "max", "gem", "attention"])
def test_positions_contribute_what_they_have_in_the_pooled_features(pooling):
    embedder = tiny_embedder(pooling=pooling)
    first, second = images(size=2)
    embedder(images(size=2))
    embedder.dense.bias.assign(np.linspace(-1, 1, 5))
    if pooling == "attention":
        embedder.pool.query.assign(np.linspace(-2, 2, 6))
    found = {name: values([x])[0] for name, x in embedder.represent(np.stack([first, second])).items()}
    maps = explain.similarity(embedder, first, second, "local")
    kernel, bias = (x.astype("float64") for x in values(embedder.dense.weights))
    cosine = float(np.prod(found["embedding"], axis=0, dtype="float64").sum())
    for place, heat in enumerate(maps):
        parts = shares(found["feature_map"][place], pooling, embedder.pool) @ kernel + bias / 36
        assert_close(parts.sum(0), found["projection"][place], 1e-4)
        expected = parts @ found["embedding"][1 - place] / np.linalg.norm(found["projection"][place])
        assert heat.shape == (12, 12)
        assert heat.dtype == np.float32
        assert heat.mean() == pytest.approx(cosine, abs=1e-5)
        # Each position has 2 x 2 pixels, between it and its neighbors; their weights are those of the interpolation.
        enlarged = np.kron(np.eye(6), [[0.75], [0.75]]) + np.kron(np.eye(6, k=-1), [[0.25], [0]])
        enlarged += np.kron(np.eye(6, k=1), [[0], [0.25]])
        enlarged[0, 0] = enlarged[-1, -1] = 1
        assert_close(heat, enlarged @ (36 * expected.reshape(6, 6)) @ enlarged.T, 1e-4)


def test_a_head_of_several_layers_is_replaced_by_its_derivative():
    head = keras.Sequential([keras.layers.Dense(7, activation="relu", use_bias=False), keras.layers.Dense(4)])
    embedder, (first, second) = tiny_embedder(dim=None, head=head), images(size=2)
    embedder(images(size=2))
    found = {name: values([x])[0] for name, x in embedder.represent(np.stack([first, second])).items()}
    one, two, _ = values(head.weights)
    slope = (one * (found["pooled"][0] @ one > 0)) @ two @ found["embedding"][1]
    expected = found["feature_map"][0] @ slope / np.linalg.norm(found["projection"][0])
    heat = explain.similarity(embedder, first, second, "local")[0]
    assert heat.mean() == pytest.approx(np.prod(found["embedding"], axis=0).sum(), abs=1e-5)
    assert np.corrcoef(heat.reshape(6, 2, 6, 2).mean((1, 3)).ravel(), expected.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("method", explain.METHODS)
def test_the_common_patch_is_hot_and_the_other_is_not(method):
    patterns = textures(0, 8)
    embedder = matched_filters(patterns)
    first, places = patched(1, patterns[0], patterns[1])
    second, others = patched(2, patterns[0], patterns[2])
    assert places[0] != others[0]
    for heat, (common, own) in zip(explain.similarity(embedder, first, second, method), (places, others), strict=True):
        assert blocks(heat).argmax() == common
        assert blocks(heat)[common] > 0.4
        assert blocks(heat)[own] < 0.1


def test_gradients_sum_to_what_the_image_adds_to_the_similarity():
    embedder = tiny_embedder()
    first, second = images(size=2)
    plain = np.broadcast_to(first.mean((0, 1)), first.shape)
    found = embedder.represent(np.stack([first, second, plain]).astype("float32"))
    projection, embedding = (values([found[name]])[0].astype("float64") for name in ("projection", "embedding"))
    added = (projection[0] - projection[2]) @ embedding[1] / np.linalg.norm(projection[0])
    heat = explain.similarity(embedder, first, second, "gradient", steps=64)[0]
    assert heat.mean() == pytest.approx(added, rel=0.01)


def test_models_without_a_feature_map_have_gradients():
    inputs = keras.Input((12, 12, 3))
    outputs = keras.layers.UnitNormalization()(keras.layers.Dense(4)(keras.layers.Flatten()(inputs)))
    model = keras.Model(inputs, outputs, name="plain")
    first, second = images(size=2)
    assert explain.similarity(model, first, second)[1].shape == (12, 12)
    with pytest.raises(
        UserError, match="plain: its vectors are not pooled from one feature map; use method='gradient'"
    ):
        explain.similarity(model, first, second, "local")


def test_what_does_not_fit_is_refused():
    embedder, (first, second) = tiny_embedder(), images(size=2)
    with pytest.raises(UserError, match=r"second has the shape \(6, 12, 3\); the embedder takes .* \(12, 12, 3\)"):
        explain.similarity(embedder, first, second[:6])
    with pytest.raises(ValueError, match="method must be 'local' or 'gradient', not 'lime'"):
        explain.similarity(embedder, first, second, "lime")


def test_an_overlay_is_bright_where_the_map_is_high():
    image, heat = np.full((2, 2, 3), 100, np.uint8), np.array([[-5.0, 0.0], [1.0, 2.0]])
    shown = explain.overlay(image, heat).astype(int).sum(axis=-1)
    assert shown[0, 0] == shown[0, 1] < shown[1, 0] < shown[1, 1]
    np.testing.assert_array_equal(explain.overlay(image, 0 * heat), explain.overlay(image, 0 * heat - 1))
    picture = explain.draw(tiny_embedder(), *images(size=2))
    assert picture.size == (24, 12)


@pytest.mark.slow
def test_a_trained_transformer_looks_at_the_common_patch():
    pytest.importorskip("keras_hub")
    from tests.backbones import hub_networks
    from tfdml.backbones.hub import TokenBackbone

    patterns, generator = textures(0, 8), np.random.default_rng(0)
    labels = generator.integers(0, 8, 1024)
    own = textures(1, 1024)
    data = np.stack([patched(row, patterns[label], own[row])[0] for row, label in enumerate(labels)])
    backbone = TokenBackbone(hub_networks.network("vit"))
    embedder = models.Embedder(backbone, embedding_dim=16, image_size=SIDE, pooling="cls")
    learner = models.MetricLearner(embedder, objectives.ProxyLoss(losses.NormSoftmaxLoss(10.0), 8))
    learner.compile(keras.optimizers.Adam(3e-3))
    learner.fit(data, labels, batch_size=64, epochs=6, verbose=0)
    peaks = []
    for row in range(4):
        first, places = patched(2000 + row, patterns[row], textures(3, 1)[0])
        second, others = patched(3000 + row, patterns[row], textures(4, 1)[0])
        maps = explain.similarity(embedder, first, second, "gradient")
        peaks += [blocks(maps[0]).argmax() == places[0], blocks(maps[1]).argmax() == others[0]]
    assert np.mean(peaks) > 0.8


def maps_of_patches():
    patterns = textures(0, 8)
    pair = patched(1, patterns[0], patterns[1])[0], patched(2, patterns[0], patterns[2])[0]
    embedder = matched_filters(patterns)
    return np.stack([explain.similarity(embedder, *pair, method) for method in explain.METHODS])


@pytest.mark.slow
def test_maps_on_jax_are_those_of_tensorflow(tmp_path):
    pytest.importorskip("jax")
    script = "import sys, numpy, tests.test_explain as t; numpy.save(sys.argv[1], t.maps_of_patches())"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "jax.npy")],
        cwd=pathlib.Path(__file__).resolve().parents[1],
        env=JAX,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(np.load(tmp_path / "jax.npy"), maps_of_patches(), 1e-4)
