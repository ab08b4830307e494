import math

import keras
import numpy as np
import pytest

from tests.losses.references import arc_face, cross_entropy
from tests.mathematics import assert_close, finite_differences, value_and_gradients
from tests.references import mean, total
from tfdml.losses import (
    ArcFaceLoss,
    NormSoftmaxLoss,
    ProxyNCAPlusPlusLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
)
from tfdml.objectives import ProxyLoss
from tfdml.training.terms import build_objectives


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
    nearest = [[max(float(s) for s in centres) for centres in classes] for classes in similarities]
    return arc_face(labels, nearest, reduction=reduction, **arguments)


def proxy_nca_plus_plus(labels, cosines, temperature=1 / 9, reduction="mean"):
    values = []
    for label, row in zip(labels, cosines, strict=True):
        values.append(cross_entropy(label, [-(2 - 2 * float(c)) / temperature for c in row]))
    return total(values) if reduction == "sum" else mean(values)


CASES = {
    "sphere face": (SphereFaceLoss, sphere_face, {}),
    "sphere face odd": (SphereFaceLoss, sphere_face, {"scale": 3.0, "margin": 3}),
    "sphere face ten": (SphereFaceLoss, sphere_face, {"scale": 1.0, "margin": 10}),
    "sub-center": (SubCenterArcFaceLoss, sub_center, {}),
    "sub-center gentle": (SubCenterArcFaceLoss, sub_center, {"scale": 8.0, "margin": 0.2}),
    "proxy nca ++": (ProxyNCAPlusPlusLoss, proxy_nca_plus_plus, {}),
    "proxy nca ++ warm": (ProxyNCAPlusPlusLoss, proxy_nca_plus_plus, {"temperature": 1.0}),
}
every_case = pytest.mark.parametrize(("make", "reference", "arguments"), CASES.values(), ids=CASES)
every_loss = pytest.mark.parametrize("make", [SphereFaceLoss, SubCenterArcFaceLoss, ProxyNCAPlusPlusLoss])


def similarities(make, seed=0, size=6, classes=5):
    generator = np.random.default_rng(seed)
    shape = (size, classes, 3) if make is SubCenterArcFaceLoss else (size, classes)
    return generator.integers(0, classes, size), generator.uniform(-0.98, 0.98, shape).astype("float32")


@every_case
def test_equals_the_formula(make, reference, arguments):
    for seed, (size, classes) in enumerate([(1, 1), (1, 2), (8, 3), (5, 40), (30, 2)]):
        labels, cosines = similarities(make, seed, size, classes)
        assert_close(make(**arguments)(labels, cosines), reference(labels, cosines, **arguments), floor=1e-6)
        total_loss = make(**arguments, reduction="sum")(labels, cosines)
        assert_close(total_loss, reference(labels, cosines, reduction="sum", **arguments), floor=1e-6)


@every_case
def test_gradient_equals_finite_differences(make, reference, arguments):
    labels, cosines = similarities(make, 3)
    (expected,) = finite_differences(lambda c: reference(labels, c, **arguments), cosines)
    # The other arguments of a loss take the same path.
    for mode in ("eager",) if arguments else ("eager", "xla"):
        _, (gradient,) = value_and_gradients(lambda c: make(**arguments)(labels, c), cosines, mode=mode)
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
    half = loss(labels, keras.ops.cast(cosines, "bfloat16"))
    assert keras.backend.standardize_dtype(half.dtype) == "float32"
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is make
    assert again.get_config() == loss.get_config()
    np.testing.assert_array_equal(again.call(labels, cosines), values)
    labels[2] = 5
    values = np.asarray(loss.call(labels, cosines))
    assert np.isnan(values[2])
    assert np.all(np.isfinite(np.delete(values, 2)))


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


def test_special_cases_are_other_losses():
    labels, cosines = similarities(SphereFaceLoss)
    assert_close(SphereFaceLoss(20.0, 1)(labels, cosines), NormSoftmaxLoss(20.0)(labels, cosines))
    assert_close(ProxyNCAPlusPlusLoss(1 / 9)(labels, cosines), NormSoftmaxLoss(18.0)(labels, cosines))
    assert_close(SubCenterArcFaceLoss()(labels, cosines), ArcFaceLoss()(labels, cosines))


def test_of_equal_centres_one_learns():
    same = np.zeros((1, 2, 3), "float32")
    _, (gradient,) = value_and_gradients(lambda s: SubCenterArcFaceLoss(scale=1.0)([0], s), same)
    assert (gradient != 0).sum() == 2


@pytest.mark.parametrize(
    ("text", "make", "proxies_per_class"),
    [
        ("sphere_face(margin=2)", SphereFaceLoss, 1),
        ("sub_center_arc_face(scale=30)", SubCenterArcFaceLoss, 3),
        ("sub_center_arc_face(proxies_per_class=5)", SubCenterArcFaceLoss, 5),
        ("proxy_nca_plus_plus", ProxyNCAPlusPlusLoss, 1),
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
    # JRS reads one similarity per class, the nearest centre's.
    represented = objective.represent(x)
    assert tuple(represented["class"].shape) == (4, 7)
    assert math.isfinite(jrs({**x, **represented}, labels))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SphereFaceLoss(margin=1.5), "margin must be a positive integer"),
        (lambda: SphereFaceLoss(margin=11), "margin must be at most 10"),
        (lambda: SubCenterArcFaceLoss(margin=28.6), "margin must be at least 0 and at most 1.57"),
        (lambda: ProxyNCAPlusPlusLoss(0), "temperature must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
