"""Boundaries, centers, linear heads and the objectives of face recognition."""

import functools
import math

import keras
import numpy as np
import pytest

from tests.losses.references import cross_entropy, draw_probabilities
from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tests.models.networks import images, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_config,
    check_formula,
    check_saved_with_its_learner,
    total_loss,
)
from tests.played_replicas import play
from tests.references import mean, softplus
from tfdml import models
from tfdml.objectives import CurricularFace, InstanceLoss, LearnedMargin, RegularizedSoftTriple, SphereFace2
from tfdml.objectives.terms import build_objectives

BETA = [1.2, 0.9, 1.0, 1.1, 0.8, 1.3, 0.7, 1.0, 1.1]
CASES = {"mean": {}, "sum": {"reduction": "sum"}, "nu": {"nu": 0.3}, "nu sum": {"nu": 0.3, "reduction": "sum"}}
every_case = pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)


def margin(beta=BETA, **arguments):
    objective = LearnedMargin(len(beta), **arguments)
    objective.build({})
    objective.beta.assign(beta)
    return objective


def on_embedding(objective):
    return lambda labels, x: objective({"embedding": x}, labels)


def of_vectors(objective, labels):
    return lambda x: objective({"embedding": x}, labels)


@every_case
def test_margin_equals_the_formula(arguments):
    reference = functools.partial(references.learned_margin, beta=BETA, **arguments)
    check_formula(on_embedding(margin(**arguments)), reference)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_margin_gradients_equal_finite_differences(arguments, mode):
    labels, x = random_batch(11, 8, 3, 4)
    objective = margin(BETA[:3], **arguments)
    start, drawn = np.asarray(objective.beta), draw_probabilities(labels, x)
    value, actual = value_and_gradients(of_vectors(objective, labels), x, mode=mode, weights=[objective.beta])
    assert_close(value, references.learned_margin(labels, x, start, **arguments))
    expected = finite_differences(
        lambda e, b: references.learned_margin(labels, e, b, probabilities=drawn, **arguments), x, start
    )
    for found, wanted in zip(actual, expected, strict=True):
        # By beta, the gradient of a mean of as many pulls as pushes may vanish; by x it does not.
        assert_close(found, wanted, floor=1e-6)
    assert np.any(expected[0])


def soft_triple(centers=3, tau=0.2):
    objective = RegularizedSoftTriple(4, centers, scale=5.0, tau=tau)
    objective.build({"embedding": (None, 4)})
    return objective


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("tau", [0.2, 0.0])
def test_soft_triple_equals_the_formula(mode, tau):
    labels, x = random_batch(5, 7, 4, 4, unit=False)
    objective = soft_triple(tau=tau)
    proxies = objective.class_proxies.proxies
    start = values([proxies])[0]

    def reference(x, centers):
        return references.regularized_soft_triple(labels, x, centers, tau, scale=5.0)

    value, actual = value_and_gradients(of_vectors(objective, labels), x, mode=mode, weights=[proxies])
    assert_close(value, reference(x, start))
    for found, wanted in zip(actual, finite_differences(reference, x, start), strict=True):
        assert_close(found, wanted)


def test_centers_that_coincide_are_finite_and_cost_nothing():
    labels, x = random_batch(5, 7, 4, 4)
    objective = soft_triple()
    one = np.random.default_rng(0).normal(size=(4, 1, 4))
    objective.class_proxies.proxies.assign(np.repeat(one, 3, axis=1))
    assert objective.regularizer() == 0.0
    _, (_, gradient) = value_and_gradients(of_vectors(objective, labels), x, weights=[objective.class_proxies.proxies])
    assert np.all(np.isfinite(gradient))


CLASSES = 4


def cosines(x, proxies):
    x, proxies = (np.asarray(a, np.float64) for a in (x, proxies))
    norms = [np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-300) for a in (x, proxies)]
    return (x / norms[0]) @ (proxies / norms[1]).T


def curricular(labels, x, proxies, t=0.0, scale=64.0, margin=0.5):
    values = []
    for label, row in zip(labels, cosines(x, proxies), strict=True):
        own = float(row[int(label)])
        shifted = math.cos(math.acos(max(-1.0, min(1.0, own))) + margin)
        logits = [scale * (c * (t + c) if c > shifted else c) for c in map(float, row)]
        beyond = own <= math.cos(math.pi - margin)
        logits[int(label)] = scale * (own - margin * math.sin(margin) if beyond else shifted)
        values.append(cross_entropy(label, logits))
    return mean(values)


def sphere_face2(labels, x, proxies, bias, scale=40.0, margin=0.4, balance=0.7, adjustment=3.0, at=None):
    """`at`, an x and proxies, is where g is taken: what it adds to the cosine is then a constant."""
    values, found = [], cosines(x, proxies)
    fixed = found if at is None else cosines(*at)
    for label, row, fixed_row in zip(labels, found, fixed, strict=True):
        value = 0.0
        for j, (c, there) in enumerate(zip(map(float, row), map(float, fixed_row), strict=True)):
            g = c + (2 * ((there + 1) / 2) ** adjustment - 1 - there)
            if j == int(label):
                value += balance / scale * softplus(-(scale * (g - margin) + bias))
            else:
                value += (1 - balance) / scale * softplus(scale * (g + margin) + bias)
        values.append(value)
    return mean(values)


def instance(labels, x, head, bias=None):
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T + (0 if bias is None else bias)
    return mean([cross_entropy(label, [float(v) for v in row]) for label, row in zip(labels, logits, strict=True)])


def built(objective, dim=4, **values):
    objective.build({"embedding": (None, dim)})
    for name, value in values.items():
        getattr(objective, name).assign(value)
    return objective


def cases():
    face = built(CurricularFace(CLASSES, scale=4.0), t=0.3)
    steep = built(CurricularFace(CLASSES, scale=16.0, margin=1.2), t=0.9)
    two = built(SphereFace2(CLASSES, scale=6.0, detached=False))
    flat = built(SphereFace2(CLASSES, scale=3.0, margin=0.1, balance=0.5, adjustment=1.0), bias=0.7)
    head = built(InstanceLoss(CLASSES))
    biased = built(InstanceLoss(CLASSES, use_bias=True), bias=[0.5, -1.0, 0.0, 2.0])
    plain = {"scale": 3.0, "margin": 0.1, "balance": 0.5, "adjustment": 1.0}
    return {
        "curricular": (face, [face.class_proxies.proxies], lambda y, x, p: curricular(y, x, p, 0.3, 4.0)),
        "curricular wide": (steep, [steep.class_proxies.proxies], lambda y, x, p: curricular(y, x, p, 0.9, 16.0, 1.2)),
        "sphere face 2": (
            two,
            [two.class_proxies.proxies, two.bias],
            lambda y, x, p, b: sphere_face2(y, x, p, float(b), 6.0),
        ),
        "sphere face 2 flat": (
            flat,
            [flat.class_proxies.proxies, flat.bias],
            lambda y, x, p, b: sphere_face2(y, x, p, float(b), **plain),
        ),
        "instance": (head, [head.head], instance),
        "instance biased": (biased, [biased.head, biased.bias], instance),
    }


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_values_and_gradients_equal_the_formulas(mode):
    # The other arguments of an objective take the same path.
    chosen = list(cases().items())[:: 2 if mode == "xla" else 1]
    for name, (objective, weights, reference) in chosen:
        labels, x = random_batch(3, 7, CLASSES, 4, unit=False)
        value, actual = value_and_gradients(of_vectors(objective, labels), x, mode=mode, weights=weights)
        arrays = [x, *(np.asarray(weight) for weight in weights)]
        assert_close(value, reference(labels, *arrays)), name
        expected = finite_differences(lambda *a, y=labels, r=reference: r(y, *a), *arrays)
        for found, wanted in zip(actual, expected, strict=True):
            assert np.any(wanted)
            assert_close(found, wanted, 2e-5), name


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_the_gradient_of_sphere_face_2_passes_its_adjustment_by(mode):
    objective = built(SphereFace2(CLASSES, scale=6.0))
    labels, x = random_batch(3, 7, CLASSES, 4, unit=False)
    proxies, bias = np.asarray(objective.class_proxies.proxies), float(objective.bias)
    weights = [objective.class_proxies.proxies]
    value, actual = value_and_gradients(of_vectors(objective, labels), x, mode=mode, weights=weights)
    assert_close(value, sphere_face2(labels, x, proxies, bias, 6.0))
    expected = finite_differences(lambda *a: sphere_face2(labels, *a, bias, 6.0, at=(x, proxies)), x, proxies)
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, 2e-5)
    check_config(SphereFace2(CLASSES, detached=False))


def test_degenerate_batches_labels_and_configurations():
    for objective, weights, reference in cases().values():
        check_config(objective)
        for rows in (1, 5):
            x = np.zeros((rows, 4), "float32")
            labels = np.arange(rows) % CLASSES
            value, gradients = value_and_gradients(of_vectors(objective, labels), x, weights=weights)
            assert_close(value, reference(labels, x, *(np.asarray(weight) for weight in weights)), 1e-5)
            assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
        half = objective({"embedding": keras.ops.ones((2, 4), "float16")}, [0, 1])
        assert keras.backend.standardize_dtype(half.dtype) == "float32"
        assert math.isfinite(half)
        with pytest.raises(ValueError, match=r"labels must be classes 0 \.\. 3.*; got label 4"):
            objective({"embedding": keras.ops.ones((2, 4))}, [0, CLASSES])


def test_t_follows_the_mean_cosine_in_training_alone():
    objective = built(CurricularFace(CLASSES, momentum=0.25), t=0.5)
    labels, x = random_batch(5, 9, CLASSES, 4)
    own = cosines(x, np.asarray(objective.class_proxies.proxies))[np.arange(9), labels]
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


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("text", "make", "state"),
    [
        ("curricular_face(momentum=0.5) + 0.1 * instance(use_bias=true)", CurricularFace, "t"),
        ("50 * sphere_face2(scale=30)", SphereFace2, "bias"),
    ],
)
def test_a_learner_trains_them_and_keeps_their_state(text, make, state, tmp_path):
    terms = build_objectives(text, 3)
    assert type(terms[0]) is make
    learner = models.MetricLearner(tiny_embedder(), terms)
    learner.compile(optimizer=keras.optimizers.SGD(0.1))
    learner.build((None, 12, 12, 3))
    x, labels = images(1, 8, "uint8"), np.arange(8) % 3
    before = float(getattr(terms[0], state))
    learner.evaluate(x, labels, verbose=0)
    assert float(getattr(terms[0], state)) == before
    learner.fit(x, labels, batch_size=4, epochs=1, verbose=0)
    assert float(getattr(terms[0], state)) != before
    check_saved_with_its_learner(learner, tmp_path / "learner.keras", lambda model: total_loss(model, labels, x))
