"""The statistics network of a run with RankMI, and the numbers of its figure."""

import itertools

import keras
import numpy as np
import pytest

from tests import references
from tests.mathematics import random_batch
from tests.objectives import references_rankmi
from tfdml import losses
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import MetricLoss, RankMI
from tfdml.training.run.results import describe_statistics, rank_mi_of, statistics_model


@pytest.fixture(scope="module")
def trained():
    """RankMI whose V has a root within the distances below: at first it is a line through 0."""
    objective = RankMI(margin=0.1, hidden=8, depth=1, initial_beta=0.9, seed=1)
    objective.build_from({})
    generator = np.random.default_rng(4)
    for variable in objective.statistics_variables:
        variable.assign(variable.numpy() + 0.1 * generator.normal(size=variable.shape))
    # The last bias moves V up and down.
    objective.network.biases[-1].assign([0.0])
    objective.network.biases[-1].assign([-float(objective.network(np.float32(0.8)))])
    return objective


@pytest.fixture(scope="module")
def batch():
    labels, x = random_batch(3, 14, 3, 3)
    return np.asarray(labels), np.asarray(x)


def test_the_curves_are_v_and_the_losses_of_a_pair(trained, batch):
    labels, x = batch
    figure = describe_statistics(trained, {"test": (x, labels)}, epoch=7)
    weights = [w.numpy() for w in trained.statistics_variables]
    assert (figure["epoch"], figure["margin"], figure["has_root"]) == (7, 0.1, True)
    assert (figure["distances"][0], figure["distances"][-1]) == (0, 2)
    for place in range(0, 201, 25):
        v = references_rankmi.statistic(weights, figure["distances"][place])
        assert figure["v"][place] == pytest.approx(v, abs=1e-5)
        assert figure["positive_loss"][place] == pytest.approx(references.softplus(-v) - np.log(2), abs=1e-5)
        assert figure["negative_loss"][place] == pytest.approx(references.softplus(v) - np.log(2), abs=1e-5)
    # There, by bisection on the reference, V is 0.
    assert references_rankmi.statistic(weights, figure["beta"]) == pytest.approx(0, abs=1e-5)


def test_the_pairs_are_counted_and_their_losses_are_the_means_over_them(trained, batch):
    labels, x = batch
    figure = describe_statistics(trained, {"test": (5 * x, labels)}, epoch=1)
    pairs, beta = figure["pairs"]["test"], figure["beta"]
    weights = [w.numpy() for w in trained.statistics_variables]
    distances = {True: [], False: []}
    for i, j in itertools.combinations(range(len(labels)), 2):
        one, other = references_rankmi.unit(x[i]), references_rankmi.unit(x[j])
        distances[bool(labels[i] == labels[j])].append(references.distance(one, other, "euclidean"))
    edges = np.array(pairs["edges"])
    for kind, found in (("positive", distances[True]), ("negative", distances[False])):
        assert sum(pairs[kind]) == len(found)
        assert pairs[f"mean_{kind}"] == pytest.approx(np.mean(found), abs=1e-5)
        # A distance next to an edge may fall to either side.
        cumulative = np.cumsum(pairs[kind])
        for edge, count in zip(edges[1:], cumulative, strict=True):
            assert np.sum(np.array(found) < edge - 1e-4) <= count <= np.sum(np.array(found) < edge + 1e-4)

    def v(d):
        return references_rankmi.statistic(weights, d)

    loss = references_rankmi.divergence(v, distances[True], distances[False])
    assert pairs["statistics_loss"] == pytest.approx(loss, abs=2e-4)
    assert pairs["jsd"] == pytest.approx(-loss / 2, abs=1e-4)
    hard = ([d for d in distances[True] if d > beta - 0.1], [d for d in distances[False] if d < beta + 0.1])
    assert 0 < len(hard[0]) < len(distances[True])
    assert 0 < len(hard[1]) < len(distances[False])
    assert pairs["embedder_loss"] == pytest.approx(references_rankmi.divergence(v, *hard), abs=2e-4)


def test_images_of_one_class_have_no_pairs_of_two(trained, batch):
    labels, x = batch
    figure = describe_statistics(trained, {"test": (x, np.zeros_like(labels)), "seen": (x, labels)}, epoch=1)
    assert list(figure["pairs"]) == ["seen"]


def test_the_network_is_saved_and_loaded(trained, tmp_path):
    statistics_model(trained).save(tmp_path / "network.keras")
    loaded = keras.saving.load_model(tmp_path / "network.keras")
    distances = np.linspace(0, 2, 7, dtype=np.float32)
    expected = trained.network(distances).numpy()
    np.testing.assert_array_equal(loaded(distances), expected)
    np.testing.assert_allclose(loaded.predict(distances, verbose=0), expected, atol=1e-6)


def test_one_network_is_described_and_no_other_number():
    embedder = Embedder("conv4", embedding_dim=4, image_size=16)
    one, other = RankMI(name="one"), RankMI(name="other")
    assert rank_mi_of(MetricLearner(embedder, [one])) is one
    assert rank_mi_of(MetricLearner(embedder, [one, other])) is None
    assert rank_mi_of(MetricLearner(embedder, [MetricLoss(losses.ContrastiveLoss())])) is None
