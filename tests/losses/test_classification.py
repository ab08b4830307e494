"""Losses on class similarities: what every one does, and the softmax family."""

import math

import keras
import numpy as np
import pytest

from tests import references as plain_references
from tests.losses import references
from tests.losses.references import arc_face, cross_entropy
from tests.mathematics import assert_close, finite_differences, value_and_gradients
from tests.references import mean, total
from tfdml import losses
from tfdml.losses import (
    AMSoftmaxLoss,
    ArcFaceLoss,
    NormSoftmaxLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
    ProxyNCAPlusPlusLoss,
    SoftTripleLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
)
from tfdml.objectives import ProxyLoss
from tfdml.objectives.terms import build_objectives


def sphere_face(labels, cosines, scale=30.0, margin=4, reduction="mean"):
    values = []
    for label, row in zip(labels, cosines, strict=True):
        logits = [scale * float(c) for c in row]
        theta = math.acos(float(row[int(label)]))
        k = next(k for k in range(margin) if theta <= (k + 1) * math.pi / margin + 1e-12)
        logits[int(label)] = scale * ((-1) ** k * math.cos(margin * theta) - 2 * k)
        values.append(cross_entropy(label, logits))
    return total(values) if reduction == "sum" else mean(values)


def sub_center(labels, similarities, reduction="mean", **arguments):
    nearest = [[max(float(s) for s in centers) for centers in classes] for classes in similarities]
    return arc_face(labels, nearest, reduction=reduction, **arguments)


def proxy_nca_plus_plus(labels, cosines, temperature=1 / 9, reduction="mean"):
    values = []
    for label, row in zip(labels, cosines, strict=True):
        values.append(cross_entropy(label, [-(2 - 2 * float(c)) / temperature for c in row]))
    return total(values) if reduction == "sum" else mean(values)


PLAIN = plain_references
CASES = {
    "am": (AMSoftmaxLoss, PLAIN.am_softmax, {}),
    "am cars": (AMSoftmaxLoss, PLAIN.am_softmax, {"scale": 20.0, "margin": 0.05}),
    "am steep": (AMSoftmaxLoss, PLAIN.am_softmax, {"scale": 64.0, "margin": 0.35}),
    "norm": (NormSoftmaxLoss, PLAIN.norm_softmax, {}),
    "norm flat": (NormSoftmaxLoss, PLAIN.norm_softmax, {"scale": 1.0}),
    "arc face": (ArcFaceLoss, references.arc_face, {}),
    "arc face gentle": (ArcFaceLoss, references.arc_face, {"scale": 10.0, "margin": 0.2}),
    "arc face wide": (ArcFaceLoss, references.arc_face, {"scale": 8.0, "margin": 1.5}),
    "proxy nca": (ProxyNCALoss, references.proxy_nca, {}),
    "proxy nca unit": (ProxyNCALoss, references.proxy_nca, {"scale": 2.0}),
    "proxy anchor": (ProxyAnchorLoss, references.proxy_anchor, {}),
    "proxy anchor soft": (ProxyAnchorLoss, references.proxy_anchor, {"alpha": 4.0, "margin": 0.3}),
    "soft triple": (SoftTripleLoss, references.soft_triple, {}),
    "soft triple flat": (SoftTripleLoss, references.soft_triple, {"scale": 5.0, "gamma": 1.0, "margin": 0.1}),
    "sphere face": (SphereFaceLoss, sphere_face, {}),
    "sphere face odd": (SphereFaceLoss, sphere_face, {"scale": 3.0, "margin": 3}),
    "sphere face ten": (SphereFaceLoss, sphere_face, {"scale": 1.0, "margin": 10}),
    "sub-center": (SubCenterArcFaceLoss, sub_center, {}),
    "sub-center gentle": (SubCenterArcFaceLoss, sub_center, {"scale": 8.0, "margin": 0.2}),
    "proxy nca ++": (ProxyNCAPlusPlusLoss, proxy_nca_plus_plus, {}),
    "proxy nca ++ warm": (ProxyNCAPlusPlusLoss, proxy_nca_plus_plus, {"temperature": 1.0}),
}
every_case = pytest.mark.parametrize(("make", "reference", "arguments"), CASES.values(), ids=CASES)
LOSSES = list(dict.fromkeys(make for make, _, _ in CASES.values()))
every_loss = pytest.mark.parametrize("make", LOSSES)


def similarities(make, seed=0, size=6, classes=5):
    generator = np.random.default_rng(seed)
    shape = (size, classes, 3) if make in (SoftTripleLoss, SubCenterArcFaceLoss) else (size, classes)
    return generator.integers(0, classes, size), generator.uniform(-0.98, 0.98, shape).astype("float32")


@every_case
def test_equals_the_formula(make, reference, arguments):
    for seed, (size, classes) in enumerate([(1, 1), (1, 2), (8, 3), (5, 40), (30, 2)]):
        labels, cosines = similarities(make, seed, size, classes)
        for name, reduction in (("sum_over_batch_size", "mean"), ("sum", "sum")):
            expected = reference(labels, cosines, reduction=reduction, **arguments)
            assert_close(make(**arguments, reduction=name)(labels, cosines), expected, floor=1e-6)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_equals_finite_differences(make, reference, arguments, mode):
    labels, cosines = similarities(make, 3)
    (expected,) = finite_differences(lambda c: reference(labels, c, **arguments), cosines)
    value, (gradient,) = value_and_gradients(lambda c: make(**arguments)(labels, c), cosines, mode=mode)
    assert_close(value, reference(labels, cosines, **arguments))
    assert_close(gradient, expected)


@every_loss
def test_extreme_similarities_are_finite(make):
    for value in (-1.0000002, -1.0, 0.0, 1.0, 1.0000002):
        for classes in (1, 3):
            labels, cosines = similarities(make, size=4, classes=classes)
            cosines = np.full_like(cosines, value)
            result, (gradient,) = value_and_gradients(lambda c, y=labels: make()(y, c), cosines)
            assert np.isfinite(result)
            assert np.all(np.isfinite(gradient))


@every_loss
def test_contract(make):
    labels, cosines = similarities(make)
    loss = make(name="mine")
    values = np.asarray(loss.call(labels, cosines))
    assert values.shape == (6,)
    assert_close(values.mean(), loss(labels, cosines))
    np.testing.assert_array_equal(loss.call(labels.astype("int64")[:, None], cosines), values)
    half = loss(labels, keras.ops.cast(cosines, "bfloat16"))
    assert keras.backend.standardize_dtype(half.dtype) == "float32"
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is make
    assert again.get_config() == loss.get_config()
    np.testing.assert_array_equal(again.call(labels, cosines), values)


@every_loss
@pytest.mark.parametrize("label", [-1, 5, 2**40])
def test_a_label_without_a_proxy_is_not_a_number(make, label):
    labels, cosines = similarities(make)
    labels[2] = label
    values = np.asarray(make().call(labels, cosines))
    assert np.isnan(values[2])
    assert np.all(np.isfinite(np.delete(values, 2)))


@pytest.mark.parametrize(
    ("text", "make", "proxies_per_class"),
    [
        ("arc_face(scale=30, margin=0.3)", ArcFaceLoss, 1),
        ("2 * proxy_anchor(alpha=16)", ProxyAnchorLoss, 1),
        ("soft_triple(gamma=0.2)", SoftTripleLoss, 10),
        ("soft_triple(proxies_per_class=1)", SoftTripleLoss, 1),
        ("sub_center_arc_face(proxies_per_class=5)", SubCenterArcFaceLoss, 5),
    ],
)
def test_objectives_give_them_proxies(text, make, proxies_per_class):
    objective, jrs = build_objectives(f"{text} + jrs", num_classes=7)
    assert isinstance(objective, ProxyLoss)
    assert isinstance(objective.loss, make)
    assert objective.class_proxies.proxies_per_class == proxies_per_class
    x = {"embedding": keras.random.normal((4, 6), seed=0), "pooled": keras.random.normal((4, 8), seed=1)}
    labels = keras.ops.array([0, 1, 6, 6])
    assert math.isfinite(objective(x, labels))
    # JRS reads one similarity per class, the nearest center's.
    represented = objective.represent(x)
    assert tuple(represented["class"].shape) == (4, 7)
    assert math.isfinite(jrs({**x, **represented}, labels))


@pytest.mark.parametrize("make", [AMSoftmaxLoss, NormSoftmaxLoss, ArcFaceLoss, SubCenterArcFaceLoss])
def test_smoothing_is_keras_s_own(make):
    labels, cosines = similarities(make, 2)
    loss, target = make(scale=10.0, label_smoothing=0.3), np.eye(5, dtype=bool)[labels]
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.3)

    def by_keras(c):
        return expected(target, loss.logits(loss.class_similarities(c), target))

    results = [value_and_gradients(function, cosines) for function in (lambda c: loss(labels, c), by_keras)]
    (value, (gradient,)), (wanted, (slope,)) = results
    assert_close(value, wanted)
    assert_close(gradient, slope)


def test_confident_images_keep_their_digits():
    labels, cosines = [0], np.array([[1.0, -1.0, -1.0]], "float32")
    assert_close(
        losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines), plain_references.am_softmax(labels, cosines, 20.0, 0.0)
    )
    assert losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines) > 0


@pytest.mark.parametrize("margin", [1, 2, 3, 4, 7])
def test_sphere_face_falls_with_the_angle_without_a_jump(margin):
    angles = np.linspace(0.0, math.pi, 400)
    cosines = np.stack([np.cos(angles), np.zeros(400)], axis=1).astype("float32")
    loss = SphereFaceLoss(scale=1.0, margin=margin)
    logits = np.asarray(loss.logits(cosines, np.array([[True, False]] * 400)))[:, 0]
    # Rounding of the angle at a boundary, where the slope is 0.
    assert np.all(np.diff(logits) < 1e-5)
    assert np.abs(np.diff(logits)).max() < 1.01 * margin * math.pi / 399
    assert_close(logits[[0, -1]], [1.0, 1.0 - 2.0 * margin], 1e-5)


def test_of_equal_centers_one_learns():
    same = np.zeros((1, 2, 3), "float32")
    _, (gradient,) = value_and_gradients(lambda s: SubCenterArcFaceLoss(scale=1.0)([0], s), same)
    assert (gradient != 0).sum() == 2


def test_arc_face_goes_on_beyond_pi_as_the_authors_do():
    """On either side of pi - margin, values and slopes are those of the two forms."""
    own = np.concatenate([np.linspace(-0.999, -0.885, 6), np.linspace(-0.87, -0.7, 6)])  # -cos(0.5) = -0.8776
    cosines = np.stack([own, np.full(12, 0.3)], axis=1).astype("float32")
    loss, labels = ArcFaceLoss(scale=4.0, margin=0.5, reduction="sum"), np.zeros(12, int)

    def reference(c):
        return references.arc_face(labels, c, scale=4.0, margin=0.5, reduction="sum")

    value, (gradient,) = value_and_gradients(lambda c: loss(labels, c), cosines)
    assert_close(value, reference(cosines))
    assert_close(gradient, finite_differences(reference, cosines)[0], 1e-4)


def test_losses_without_a_margin_or_a_choice_are_the_normalized_softmax():
    labels, cosines = similarities(ArcFaceLoss)
    expected = NormSoftmaxLoss(20.0)(labels, cosines)
    assert_close(ArcFaceLoss(20.0, 0.0)(labels, cosines), expected)
    assert_close(SoftTripleLoss(20.0, margin=0.0)(labels, cosines), expected)
    same = np.repeat(cosines[:, :, None], 4, axis=2)
    assert_close(SoftTripleLoss(20.0, margin=0.1)(labels, same), AMSoftmaxLoss(20.0, 0.1)(labels, cosines))


def test_proxy_nca_is_the_paper_s_on_squared_distances():
    generator = np.random.default_rng(2)
    x, proxies = generator.normal(size=(4, 3)), generator.normal(size=(5, 3))
    x, proxies = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, proxies))
    squared = ((3 * x[:, None] - 3 * proxies[None]) ** 2).sum(-1)
    labels = np.array([0, 1, 4, 4])
    own = np.eye(5, dtype=bool)[labels]
    expected = np.log(np.where(own, 0, np.exp(-squared)).sum(1)) + squared[own]
    assert_close(ProxyNCALoss(scale=18.0).call(labels, (x @ proxies.T).astype("float32")), expected)
