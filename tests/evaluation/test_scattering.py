import keras
import numpy as np
import pytest

from tests.models.ensembles import tiny_ensemble
from tests.models.networks import coloured_batch, images, tiny_embedder
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval, evaluate_scattering
from tfdml.evaluation.scattering import partial_embeddings
from tfdml.models import Embedder

MAP = 36  # the tiny network's map is 6 x 6


def batches(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


def representations(embedder, data):
    return {name: np.asarray(value, np.float64) for name, value in embedder.represent(data).items()}


def reference(embedder, data, count, seed, pool):
    """Embeddings from the first `count` of each image's positions, by loops."""
    feature_map = representations(embedder, data)["feature_map"]
    kernel, bias = (np.asarray(weight, np.float64) for weight in embedder.dense.weights)
    result = []
    for i, features in enumerate(feature_map):
        flat = features.reshape(-1, features.shape[-1])
        kept = flat[np.random.default_rng([seed, i]).permutation(len(flat))[:count]]
        projection = pool(kept, axis=0) @ kernel + bias
        result.append(projection / np.linalg.norm(projection))
    return np.array(result)


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("pooling", "pool"), [("avg", np.mean), ("max", np.max)])
def test_parts_match_a_slow_reference(pooling, pool):
    embedder, data = tiny_embedder(pooling=pooling), images(size=5)
    for share, count in ((1 / 6, 6), (0.5, 18), (1.0, 36)):
        result = partial_embeddings(embedder, batches(data, 2), share, seed=3)
        assert (result.positions, result.map_positions) == (count, MAP)
        np.testing.assert_allclose(result.part, reference(embedder, data, count, 3, pool), atol=2e-6)
    np.testing.assert_allclose(result.part, result.whole, atol=1e-6)
    np.testing.assert_allclose(result.whole, np.asarray(embedder(data)), atol=1e-6)


def test_dispersion_matches_loops():
    embedder, data = tiny_embedder(), images(size=4)
    result = partial_embeddings(embedder, batches(data, 4))
    feature_map, whole = (representations(embedder, data)[name] for name in ("feature_map", "embedding"))
    kernel, bias = (np.asarray(weight, np.float64) for weight in embedder.dense.weights)
    for i in range(4):
        flat = feature_map[i].reshape(MAP, -1)
        projections = flat @ kernel + bias
        cosines = [p @ whole[i] / np.linalg.norm(p) for p in projections]
        assert result.local_cosine[i] == pytest.approx(np.mean(cosines), abs=1e-5)
        off_mean = np.mean([((x - flat.mean(axis=0)) ** 2).sum() for x in flat])
        assert result.feature_scatter[i] == pytest.approx(off_mean / np.mean((flat**2).sum(axis=1)), abs=1e-5)


@pytest.mark.slow
def test_positions_depend_on_the_image_s_place_and_not_on_the_batches():
    embedder, data = tiny_embedder(), images(size=7, dtype="uint8")
    once = partial_embeddings(embedder, [data], seed=1).part
    # The third batch is smaller than the ones before it, and is filled up on the way.
    uneven = partial_embeddings(embedder, [data[:1], data[1:4], data[4:5], data[5:]], seed=1).part
    np.testing.assert_allclose(uneven, once, atol=1e-6)
    pairs = [(part, np.zeros(len(part))) for part in batches(data, 3)]
    np.testing.assert_allclose(partial_embeddings(embedder, pairs, seed=1).part, once, atol=1e-6)
    other = partial_embeddings(embedder, [data], seed=2).part
    assert np.abs(other - once).max() > 1e-3


def test_copies_of_an_image_lose_different_positions():
    embedder, data = tiny_embedder(), np.repeat(images(size=1), 2, axis=0)
    result = partial_embeddings(embedder, [data])
    np.testing.assert_array_equal(result.whole[0], result.whole[1])
    assert np.abs(result.part[0] - result.part[1]).max() > 1e-3


def test_uniform_maps_lose_nothing():
    """A black image has the same features wherever the borders are not seen; a 1 x 1 network sees none."""
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential([keras.layers.Input((12, 12, 3)), keras.layers.Conv2D(4, 1)])
    embedder = Embedder(backbone, embedding_dim=3, image_size=12)
    data = np.stack([np.full((12, 12, 3), value, np.uint8) for value in (10, 200)])
    result = partial_embeddings(embedder, [data])
    np.testing.assert_allclose(result.part, result.whole, atol=1e-6)
    np.testing.assert_allclose(result.local_cosine, 1, atol=1e-6)
    np.testing.assert_allclose(result.feature_scatter, 0, atol=1e-6)


def test_an_ensemble_s_heads_lose_the_same_positions():
    ensemble, data = tiny_ensemble(heads=3, dim=6), images(size=3)
    everything = partial_embeddings(ensemble, [data], 1.0, seed=4)
    np.testing.assert_allclose(everything.part, everything.whole, atol=1e-6)
    result = partial_embeddings(ensemble, [data], 0.3, seed=4)
    np.testing.assert_allclose(np.linalg.norm(result.part, axis=1), 1, atol=1e-6)
    feature_map = representations(ensemble, data)["feature_map"]
    kernel, bias = (np.asarray(weight, np.float64) for weight in ensemble.dense.weights)
    for i, features in enumerate(feature_map):
        flat = features.reshape(-1, features.shape[-1])
        kept = np.random.default_rng([4, i]).permutation(len(flat))[: result.positions]
        heads = []
        for head in np.split(flat[kept].mean(axis=0), 3):
            projection = head @ kernel + bias
            heads.append(projection / np.linalg.norm(projection) / 3**0.5)
        np.testing.assert_allclose(result.part[i], np.concatenate(heads), atol=2e-6)


def test_mixed_precision_gives_float32_unit_vectors():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        result = partial_embeddings(tiny_embedder(), [images(size=3, dtype="uint8")])
    finally:
        keras.config.set_dtype_policy(before)
    assert result.part.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(result.part, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 2])
def test_small_embeddings_are_told_from_the_statistics(dim):
    result = partial_embeddings(tiny_embedder(dim=dim), [images(size=3)], 0.5)
    assert result.whole.shape == result.part.shape == (3, dim)
    assert result.local_cosine.shape == result.feature_scatter.shape == (3,)


def test_means_over_the_images():
    labels, data = coloured_batch(per_class=6)
    embedder = tiny_embedder()
    figures = evaluate_scattering(embedder, batches(data, 5), labels, seed=2)
    parts = partial_embeddings(embedder, batches(data, 5), seed=2)
    recall = [
        evaluate_retrieval(x, labels, ks=(1,), metrics=("recall",))["recall@1"] for x in (parts.whole, parts.part)
    ]
    assert [figures["whole_recall@1"], figures["part_recall@1"]] == recall
    assert (figures["part_positions"], figures["map_positions"]) == (6, MAP)
    cosines = [float(a @ b) for a, b in zip(parts.part, parts.whole, strict=True)]
    assert figures["part_cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert figures["local_cosine"] == pytest.approx(parts.local_cosine.mean())
    assert figures["feature_scatter"] == pytest.approx(parts.feature_scatter.mean())
    one = evaluate_scattering(embedder, batches(data, 5), labels, share=0.01, seed=2)
    assert (one["part_positions"], one["part_cosine"] < figures["part_cosine"] < 1) == (1, True)


def test_bad_input_is_refused():
    embedder, data = tiny_embedder(), images(size=2)
    for share in (0.0, 1.2):
        with pytest.raises(UserError, match="share must be"):
            partial_embeddings(embedder, [data], share)
    with pytest.raises(UserError, match="no represent"):
        partial_embeddings(keras.Sequential([keras.layers.Flatten()]), [data])
    vectors = keras.Sequential([keras.Input((12, 12, 3)), keras.layers.GlobalAveragePooling2D()])
    with pytest.raises(UserError, match="Embedder has no pool: give an Embedder, with a feature map"):
        partial_embeddings(Embedder(vectors, embedding_dim=2, image_size=12), [data])
    with pytest.raises(UserError, match="no image"):
        partial_embeddings(embedder, [])
    with pytest.raises(UserError, match="of one size"):
        partial_embeddings(embedder, [data, np.zeros((2, 8, 8, 3))])
    with pytest.raises(UserError, match="one class id per embedding"):
        evaluate_scattering(embedder, [data], [0, 0, 1])
