"""What a batch shows: gradients, spread, triplets and proxies."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from tests.training import runs
from tfdml.losses import AMSoftmaxLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.models.auto_weights import AutoWeights
from tfdml.objectives import Objective, ProxyLoss
from tfdml.training.watching.measures import (
    GradientSampler,
    ProxyWatch,
    gradient_shares,
    pair_distances,
    spread,
)

SIZE, DIM = 4, 3


class Long(Objective):
    """The mean squared length of projections."""

    reads = ("projection",)

    def compute_pairs(self, pairs):
        return ops.mean(ops.sum(ops.square(pairs["projection"].anchors), axis=1))


class Alike(Objective):
    """The mean cosine of images of different classes."""

    def compute_pairs(self, pairs):
        batch = pairs["embedding"]
        return batch.mean(batch.products(), batch.negatives)


def linear_learner():
    inputs = keras.Input((SIZE, SIZE, 3))
    backbone = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    embedder = Embedder(backbone, embedding_dim=DIM, image_size=SIZE, scaling="tf")
    learner = MetricLearner(embedder, [Long(weight=0.5, name="long"), Alike(weight=2.0, name="alike")])
    learner.build((None, SIZE, SIZE, 3))
    learner.compile("sgd")
    return learner


def test_terms_norms_and_shares_are_those_of_the_formulas():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, SIZE, SIZE, 3)).astype(np.uint8)
    labels = np.array([0, 0, 1, 1, 2, 2])
    learner = linear_learner()
    weights = [np.asarray(v, np.float64) for v in learner.embedder.dense.get_weights()]
    weights[1] = np.array([0.3, -0.2, 0.5])
    learner.embedder.dense.set_weights(weights)
    weights = [np.asarray(v, np.float64) for v in learner.embedder.dense.get_weights()]
    pooled = (images.astype(np.float64) / 127.5 - 1).mean(axis=(1, 2))

    def terms(kernel, bias):
        y = pooled @ kernel + bias
        x = y / np.linalg.norm(y, axis=1, keepdims=True)
        pairs = [(i, j) for i in range(6) for j in range(6) if labels[i] != labels[j]]
        return np.array([0.5 * (y**2).sum(axis=1).mean(), 2.0 * np.mean([x[i] @ x[j] for i, j in pairs])])

    gradients = []
    for which, weight in enumerate(weights):
        for place in np.ndindex(weight.shape):
            ends = []
            for move in (1e-6, -1e-6):
                moved = [w.copy() for w in weights]
                moved[which][place] += move
                ends.append(terms(*moved))
            gradients.append((ends[0] - ends[1]) / 2e-6)
    gradients = np.array(gradients).T  # (terms, weights)

    found = GradientSampler(learner)(images, labels)
    assert list(found.terms.values()) == pytest.approx(terms(*weights), rel=1e-5)
    assert found.norms == {"projection": pytest.approx(np.linalg.norm(gradients.sum(axis=0)), rel=1e-4)}
    np.testing.assert_allclose(found.gram, gradients @ gradients.T, rtol=1e-3, atol=1e-5)


CASES = {
    "proxies": {"objectives": "am_softmax + jrs", "dropout": 0.5},
    "memory": {"objectives": "xbm(loss=contrastive, size=32)"},
    "alternation": {"objectives": "rank_mi"},
    "gradient cache": {"objectives": "contrastive + horde(loss=contrastive, orders=2, dim=8)", "gradient_cache": 4},
    "moving state": {"objectives": "curricular_face"},
    "measured weight": {"objectives": "contrastive + auto(steps=1) * entropy"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_the_step_to_come_and_changes_nothing(case, tmp_path):
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0, "batch_norm": "statistics"}
    settings = runs.experiment(tmp_path, **plain, **CASES[case])
    learner = runs.learner(settings, 8)
    learner.run_eagerly = True
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (8, runs.SIZE, runs.SIZE, 3)).astype(np.uint8)
    labels = np.repeat(np.arange(4), 2)
    if case == "measured weight":
        learner.fit(images, labels, batch_size=8, verbose=0, callbacks=AutoWeights.of(learner))
        assert learner.term_weights()[learner.objectives[1].name] > 0
    before = [np.array(v) for v in learner.variables]
    found = GradientSampler(learner)(images, labels)
    for value, variable in zip(before, learner.variables, strict=True):
        np.testing.assert_array_equal(value, np.array(variable), err_msg=variable.path)
    own = {id(variable) for variable in learner.statistics_variables}
    parts = {part: [v for v in members if id(v) not in own] for part, members in learner.parts().items()}
    old = {part: [np.array(v, np.float64) for v in members] for part, members in parts.items()}
    logs = learner.train_on_batch(images, labels, return_dict=True)
    for part, members in parts.items():
        if members:
            moved = sum(((np.array(v, np.float64) - w) ** 2).sum() for v, w in zip(members, old[part], strict=True))
            assert found.norms[part] == pytest.approx(np.sqrt(moved), rel=1e-3, abs=1e-6), part
    assert set(found.norms) == {part for part, members in parts.items() if members}
    for objective in learner.objectives:
        weight = learner.term_weights()[objective.name]
        assert found.terms[objective.name] == pytest.approx(weight * float(logs[objective.name]), rel=1e-4)


def batch(seed=0, size=12, dim=5, classes=4):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, dim)) * np.arange(1, dim + 1)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), rng.integers(0, classes, size)


def looped_distances(x):
    return np.array(
        [[math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(r, s, strict=True))) for s in x] for r in x]
    )


@pytest.mark.parametrize(("size", "dim"), [(12, 5), (4, 9)])
def test_spread_is_that_of_the_covariance(size, dim):
    x = batch(size=size, dim=dim)[0].astype(np.float64)
    centre = [sum(float(row[j]) for row in x) / size for j in range(dim)]
    covariance = np.zeros((dim, dim))
    for row in x:
        for i in range(dim):
            for j in range(dim):
                covariance[i, j] += (row[i] - centre[i]) * (row[j] - centre[j]) / size
    values = [value for value in np.linalg.eigvalsh(covariance) if value > 1e-15]
    total = sum(values)
    entropy = -sum(value / total * math.log(value / total) for value in values)
    found = spread(x)
    assert found["variance"] == pytest.approx(np.trace(covariance), rel=1e-9)
    assert found["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-6)
    assert found["participation_ratio"] == pytest.approx(total**2 / sum(v**2 for v in values), rel=1e-6)
    assert 1 <= found["participation_ratio"] <= found["effective_rank"] <= min(size - 1, dim)
    # Of unit vectors half the mean squared distance.
    assert found["variance"] == pytest.approx((looped_distances(x) ** 2).mean() / 2, rel=1e-6)


@pytest.mark.parametrize("x", [np.ones((5, 3)), np.zeros((4, 2)), np.ones((1, 3)), np.full((8, 3), 1 / 3, np.float32)])
def test_a_point_has_no_spread(x):
    assert spread(x) == {"variance": pytest.approx(0, abs=1e-12), "effective_rank": 1.0, "participation_ratio": 1.0}


def test_distances_of_pairs_each_once():
    x, labels = batch()
    x[3] = x[7]
    matrix = looped_distances(x)
    positive, negative = [], []
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            (positive if labels[i] == labels[j] else negative).append(matrix[i, j])
    found = pair_distances(x, labels)
    np.testing.assert_allclose(sorted(found[0]), sorted(positive), atol=1e-7)
    np.testing.assert_allclose(sorted(found[1]), sorted(negative), atol=1e-7)


def test_shares_add_up_and_tell_a_conflict():
    gradients = np.random.default_rng(0).normal(size=(3, 20))
    gram, total = gradients @ gradients.T, gradients.sum(axis=0)
    shares = gradient_shares(gram)
    assert shares == pytest.approx([sum(g * total) / sum(total**2) for g in gradients])
    assert shares.sum() == pytest.approx(1)
    assert gradient_shares(np.array([[4.0, -2.0], [-2.0, 1.0]])) == pytest.approx([2, -1])
    assert gradient_shares(np.array([[1.0, -1.0], [-1.0, 1.0]])).tolist() == [0, 0]


CLASSES = 6


def watch_of(proxies, per_class=1):
    objective = ProxyLoss(AMSoftmaxLoss(), num_classes=CLASSES, proxies_per_class=per_class, name="am")
    objective.build({"embedding": (None, proxies.shape[-1])})
    objective.class_proxies.proxies.assign(proxies)
    return ProxyWatch(objective)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_unmoved_has_not_turned_whatever_its_length(decay):
    rng = np.random.default_rng(0)
    proxies = rng.normal(size=(CLASSES, 4)).astype(np.float32)
    watch = watch_of(proxies)
    assert watch.dead() == ""
    watch.begin_epoch()
    moved = proxies + 0.1 * rng.normal(size=proxies.shape).astype(np.float32)
    moved[2] = decay * proxies[2]
    watch.objective.class_proxies.proxies.assign(moved)
    assert watch.unmoved().tolist() == [2]
    assert watch.dead() == "1 proxies (classes 2) got no gradient in an epoch, of the 6 proxies of am"


def test_where_none_moves_none_is_told():
    watch = watch_of(np.eye(CLASSES, dtype=np.float32))
    watch.begin_epoch()
    assert watch.dead() == ""
