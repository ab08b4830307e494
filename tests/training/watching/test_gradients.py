"""The gradients of a sample against finite differences in float64, and against the step itself."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.training import runs
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import Objective
from tfdml.training.watching.gradients import GradientSampler

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
    "memory": {"objectives": "contrastive", "cross_batch_memory": 32},
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
        learner.train_on_batch(images, labels)
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
