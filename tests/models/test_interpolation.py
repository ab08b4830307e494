"""Interpolated embedders: their weights, what is left as it is, and what is refused."""

import keras
import numpy as np
import pytest

from tests.models.networks import SIZE, images, tiny_embedder
from tfdml.embeddings.backends import load_embedder
from tfdml.models import Embedder, interpolate
from tfdml.models.interpolation import SHARES, choose_share


def built(seed, embedding_dim=4, **options):
    """An embedder with random weights, statistics among them, and a counter."""
    keras.utils.set_random_seed(seed)
    backbone = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=seed),
        ]
    )
    embedder = Embedder(backbone, embedding_dim, SIZE, **options)
    embedder.build((None, SIZE, SIZE, 3))
    rng = np.random.default_rng(seed)
    for weight in embedder.weights:
        if "float" in str(weight.dtype):
            weight.assign(rng.uniform(0.5, 2, weight.shape))
    return embedder


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_weights_and_statistics_lie_between_and_integers_stay(share, tmp_path):
    one, other = built(0), built(1, batch_norm="train")
    before = [model.get_weights() for model in (one, other)]
    merged = interpolate(one, other, share)
    for weight, first, second in zip(merged.weights, *before, strict=True):
        is_float = "float" in str(weight.dtype)
        expected = (1 - share) * first + share * second if is_float else second
        np.testing.assert_allclose(np.asarray(weight), expected, rtol=1e-6)
    for model, arrays in zip((one, other), before, strict=True):
        np.testing.assert_equal(model.get_weights(), arrays)
    assert merged.batch_norm == "train"
    merged.save(tmp_path / "merged.keras")
    loaded = load_embedder(tmp_path / "merged.keras")
    np.testing.assert_array_equal(loaded(images()), merged(images()))
    if share == 1:
        np.testing.assert_array_equal(merged(images()), other(images()))


def test_a_backbone_alone_leaves_the_projection_of_the_other():
    one, other = built(0, embedding_dim=6), built(1)
    merged = interpolate(one, other, 0.5, backbone_alone=True)
    np.testing.assert_array_equal(merged.dense.kernel, other.dense.kernel)
    kernels = [np.asarray(model.backbone.layers[0].kernel) for model in (one, merged, other)]
    np.testing.assert_allclose(kernels[1], (kernels[0] + kernels[2]) / 2, rtol=1e-6)


def test_other_networks_and_shares_are_refused():
    one = built(0)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            interpolate(one, one, share)
    with pytest.raises(ValueError, match="backbone_alone takes that of other"):
        interpolate(built(0, embedding_dim=6), one, 0.5)
    tiny = tiny_embedder()
    tiny.build((None, SIZE, SIZE, 3))
    with pytest.raises(ValueError, match="same shapes"):
        interpolate(tiny, one, 0.5, backbone_alone=True)
    with pytest.raises(ValueError, match="must be built"):
        interpolate(one, tiny_embedder(), 0.5)


def test_statistics_are_estimated_on_batches():
    one, other = built(0, batch_norm="train"), built(1, batch_norm="train")
    batches = [images(seed) for seed in (1, 2, 3)]
    merged = interpolate(one, other, 0.5, batches=batches)
    maps = [merged.backbone.layers[0](merged.input_scaling(batch)) for batch in batches]
    means = np.mean([np.mean(batch_maps, axis=(0, 1, 2)) for batch_maps in maps], axis=0)
    variances = np.mean([np.var(batch_maps, axis=(0, 1, 2)) for batch_maps in maps], axis=0)
    norm = merged.backbone.layers[1]
    np.testing.assert_allclose(norm.moving_mean, means, rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, variances, rtol=1e-4)
    assert norm.momentum == other.backbone.layers[1].momentum
    kernels = [np.asarray(model.backbone.layers[0].kernel) for model in (one, merged, other)]
    np.testing.assert_allclose(kernels[1], (kernels[0] + kernels[2]) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="leave out batches"):
        interpolate(built(0), built(1), 0.5, batches=batches)


def choose(targets, seconds):
    """The share of metrics of the target and the second data set, in the order of shares."""
    metrics = iter(zip(targets, seconds, strict=True))
    one = built(0)
    share, by_share = choose_share(one, one, lambda _: next(metrics))
    assert list(by_share) == [0.0, *SHARES, 1.0]
    return share


def test_the_share_keeps_most_of_both():
    assert choose([0.4, 0.5, 0.7, 0.85, 0.88, 0.9], [0.5, 0.5, 0.49, 0.48, 0.42, 0.4]) == 0.75
    learned_nothing = [0.4, 0.5, 0.7, 0.6, 0.5, 0.4]
    assert choose(learned_nothing, [0.5, 0.5, 0.49, 0.48, 0.42, 0.4]) == 1
    assert choose([0.4, 0.5, 0.7, 0.85, 0.88, 0.9], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]) == 1
