"""Boundaries, centers, linear heads and the objectives of face recognition."""

import math

import keras
import numpy as np

from tests.objectives import references_classes as references
from tests.support.mathematics import assert_close, random_batch, value_and_gradients
from tests.support.played_replicas import play
from tfdml.objectives import CurricularFace, RegularizedSoftTriple, SphereFace2


def of_vectors(objective, labels):
    return lambda x: objective({"embedding": x}, labels)


def soft_triple(centers=3, tau=0.2):
    objective = RegularizedSoftTriple(4, centers, scale=5.0, tau=tau)
    objective.build({"embedding": (None, 4)})
    return objective


def test_centers_that_coincide_are_finite_and_cost_nothing():
    labels, x = random_batch(5, 7, 4, 4)
    objective = soft_triple()
    one = np.random.default_rng(0).normal(size=(4, 1, 4))
    objective.class_proxies.proxies.assign(np.repeat(one, 3, axis=1))
    assert objective.regularizer() == 0.0
    _, (_, gradient) = value_and_gradients(
        of_vectors(objective, labels), x, weights=[objective.class_proxies.proxies]
    )
    assert np.all(np.isfinite(gradient))


CLASSES = 4


def built(objective, dim=4, **start):
    objective.build({"embedding": (None, dim)})
    for name, value in start.items():
        getattr(objective, name).assign(value)
    return objective


def test_t_follows_the_mean_cosine_in_training_alone():
    objective = built(CurricularFace(CLASSES, momentum=0.25), t=0.5)
    labels, x = random_batch(5, 9, CLASSES, 4)
    own = references.cosines(x, np.asarray(objective.class_proxies.proxies))[np.arange(9), labels]
    objective({"embedding": x}, labels)
    assert float(objective.t) == 0.5
    objective({"embedding": x}, labels, training=True)
    assert_close(objective.t, 0.75 * 0.5 + 0.25 * own.mean())
    # A label without a proxy does not count, and no label at all changes nothing.
    objective.t.assign(0.5)
    two = objective.represent({"embedding": x[:2]})
    objective.update(two, keras.ops.array([labels[0], CLASSES]))
    assert_close(objective.t, 0.75 * 0.5 + 0.25 * own[0])
    objective.t.assign(0.5)
    objective.update(two, keras.ops.array([-1, CLASSES]))
    assert float(objective.t) == 0.5
    assert not objective.t.trainable


def test_t_is_that_of_the_images_of_all_replicas():
    labels, x = random_batch(5, 10, CLASSES, 4)
    whole = built(CurricularFace(CLASSES, momentum=0.25))
    proxies = np.asarray(whole.class_proxies.proxies)
    whole({"embedding": x}, labels, training=True)

    def moved(labels, x):
        objective = built(CurricularFace(CLASSES, momentum=0.25))
        objective.class_proxies.proxies.assign(proxies)
        objective.update(objective.represent({"embedding": x}), keras.ops.convert_to_tensor(labels))
        return keras.ops.convert_to_tensor(objective.t)

    for value in play(moved, (labels[:7], x[:7]), (labels[7:], x[7:])):
        assert_close(value, whole.t)


def test_the_bias_of_sphere_face_2_balances_pull_and_push():
    for classes in (2, 3, 100, 80_000):
        for scale, margin, balance in ((40.0, 0.4, 0.7), (1.0, 0.0, 0.5), (64.0, 1.0, 0.9)):
            objective = SphereFace2(classes, scale, margin, balance)
            b, zero = objective.balanced_bias(), 2 * 0.5**3 - 1
            pull = balance / (1 + math.exp(scale * (zero - margin) + b))
            push = (1 - balance) * (classes - 1) / (1 + math.exp(-scale * (zero + margin) - b))
            assert math.isclose(pull, push, rel_tol=1e-6)
    assert math.isfinite(SphereFace2(1).balanced_bias())
