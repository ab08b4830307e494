"""Losses on class similarities: what every one does, and the softmax family."""

import math

import keras
import numpy as np
import pytest

from tests.losses import references
from tests.losses.references import arc_face, cross_entropy
from tests.support import references as plain_references
from tests.support.mathematics import assert_close, finite_differences, value_and_gradients
from tests.support.references import mean, total
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
    "soft triple flat": (
        SoftTripleLoss,
        references.soft_triple,
        {"scale": 5.0, "gamma": 1.0, "margin": 0.1},
    ),
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
    shape = (
        (size, classes, 3) if make in (SoftTripleLoss, SubCenterArcFaceLoss) else (size, classes)
    )
    return generator.integers(0, classes, size), generator.uniform(-0.98, 0.98, shape).astype(
        "float32"
    )


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
    value, (gradient,) = value_and_gradients(
        lambda c: make(**arguments)(labels, c), cosines, mode=mode
    )
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


@pytest.mark.parametrize("make", [make for make in LOSSES if make is not ProxyAnchorLoss])
def test_a_nan_of_an_image_is_that_of_this_image_alone(make):
    labels, cosines = similarities(make)
    cosines[2].flat[0] = np.nan
    values = np.asarray(make().call(labels, cosines))
    assert np.isnan(values[2])
    assert np.all(np.isfinite(np.delete(values, 2)))


@pytest.mark.parametrize(
    "make", [AMSoftmaxLoss, NormSoftmaxLoss, ArcFaceLoss, SubCenterArcFaceLoss]
)
def test_smoothing_is_keras_s_own(make):
    labels, cosines = similarities(make, 2)
    loss, target = make(scale=10.0, label_smoothing=0.3), np.eye(5, dtype=bool)[labels]
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.3)

    def by_keras(c):
        return expected(target, loss.logits(loss.class_similarities(c), target))

    results = [
        value_and_gradients(function, cosines) for function in (lambda c: loss(labels, c), by_keras)
    ]
    (value, (gradient,)), (wanted, (slope,)) = results
    assert_close(value, wanted)
    assert_close(gradient, slope)


def test_confident_images_keep_their_digits():
    labels, cosines = [0], np.array([[1.0, -1.0, -1.0]], "float32")
    assert_close(
        losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines),
        plain_references.am_softmax(labels, cosines, 20.0, 0.0),
    )
    assert losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines) > 0
