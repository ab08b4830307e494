import math

import keras
import numpy as np
import pytest

from tests.losses import references
from tests.mathematics import assert_close, finite_differences, value_and_gradients
from tfdml.losses import AMSoftmaxLoss, ArcFaceLoss, NormSoftmaxLoss, ProxyAnchorLoss, ProxyNCALoss, SoftTripleLoss
from tfdml.objectives import ProxyLoss
from tfdml.training.terms import build_objectives

CASES = {
    "arc face": (ArcFaceLoss, references.arc_face, {}),
    "arc face gentle": (ArcFaceLoss, references.arc_face, {"scale": 10.0, "margin": 0.2}),
    "arc face wide": (ArcFaceLoss, references.arc_face, {"scale": 8.0, "margin": 1.5}),
    "proxy nca": (ProxyNCALoss, references.proxy_nca, {}),
    "proxy nca unit": (ProxyNCALoss, references.proxy_nca, {"scale": 2.0}),
    "proxy anchor": (ProxyAnchorLoss, references.proxy_anchor, {}),
    "proxy anchor soft": (ProxyAnchorLoss, references.proxy_anchor, {"alpha": 4.0, "margin": 0.3}),
    "soft triple": (SoftTripleLoss, references.soft_triple, {}),
    "soft triple flat": (SoftTripleLoss, references.soft_triple, {"scale": 5.0, "gamma": 1.0, "margin": 0.1}),
}
every_case = pytest.mark.parametrize(("make", "reference", "arguments"), CASES.values(), ids=CASES)
every_loss = pytest.mark.parametrize("make", [ArcFaceLoss, ProxyNCALoss, ProxyAnchorLoss, SoftTripleLoss])


def similarities(make, seed=0, size=6, classes=5):
    generator = np.random.default_rng(seed)
    shape = (size, classes, 3) if make is SoftTripleLoss else (size, classes)
    return generator.integers(0, classes, size), generator.uniform(-0.98, 0.98, shape).astype("float32")


@every_case
@pytest.mark.parametrize(("size", "classes"), [(1, 1), (1, 2), (8, 3), (5, 40), (30, 2)])
def test_equals_the_formula(make, reference, arguments, size, classes):
    for seed in range(3):
        labels, cosines = similarities(make, seed, size, classes)
        assert_close(make(**arguments)(labels, cosines), reference(labels, cosines, **arguments), floor=1e-6)
        total = make(**arguments, reduction="sum")(labels, cosines)
        assert_close(total, reference(labels, cosines, reduction="sum", **arguments), floor=1e-6)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_equals_finite_differences(make, reference, arguments, mode):
    labels, cosines = similarities(make, 3)
    (expected,) = finite_differences(lambda c: reference(labels, c, **arguments), cosines)
    _, (gradient,) = value_and_gradients(lambda c: make(**arguments)(labels, c), cosines, mode=mode)
    assert_close(gradient, expected)


@every_loss
@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0, 1.0000002])
@pytest.mark.parametrize("classes", [1, 3])
def test_extreme_similarities_are_finite(make, value, classes):
    labels, cosines = similarities(make, size=4, classes=classes)
    cosines = np.full_like(cosines, value)
    result, (gradient,) = value_and_gradients(lambda c: make()(labels, c), cosines)
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


@every_loss
@pytest.mark.parametrize("shape", [(4,), (4, 2, 2, 2)])
def test_something_other_than_class_similarities_is_refused(make, shape):
    with pytest.raises(ValueError, match="expected class similarities"):
        make()([0, 1, 0, 1], np.zeros(shape, "float32"))


def test_arc_face_falls_with_the_angle_even_past_pi():
    angles = np.linspace(0.0, math.pi, 200)
    cosines = np.stack([np.cos(angles), np.zeros(200)], axis=1).astype("float32")
    values = np.asarray(ArcFaceLoss(scale=4.0, margin=0.5).call(np.zeros(200, int), cosines))
    assert np.all(np.diff(values) > 0)


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


def test_losses_without_a_margin_or_a_choice_are_the_normalised_softmax():
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


@pytest.mark.parametrize(
    ("text", "make", "proxies_per_class"),
    [
        ("arc_face(scale=30, margin=0.3)", ArcFaceLoss, 1),
        ("proxy_nca", ProxyNCALoss, 1),
        ("2 * proxy_anchor(alpha=16)", ProxyAnchorLoss, 1),
        ("soft_triple(gamma=0.2)", SoftTripleLoss, 10),
        ("soft_triple(proxies_per_class=3)", SoftTripleLoss, 3),
        ("soft_triple(proxies_per_class=1)", SoftTripleLoss, 1),
    ],
)
def test_objectives_give_them_proxies(text, make, proxies_per_class):
    (objective,) = build_objectives(text, num_classes=7)
    assert isinstance(objective, ProxyLoss)
    assert isinstance(objective.loss, make)
    assert objective.class_proxies.proxies_per_class == proxies_per_class
    value = objective({"embedding": keras.random.normal((4, 6), seed=0)}, keras.ops.array([0, 1, 6, 6]))
    assert math.isfinite(value)


def test_worked_examples_of_the_docstrings():
    assert_close(ArcFaceLoss(1.0, 0.5)([0], [[1.0, 0.0]]), 0.3476855, 1e-6)
    assert_close(ProxyNCALoss(2.0)([0], [[1.0, 0.0, 0.0]]), -1.3068528, 1e-6)
    assert_close(ProxyAnchorLoss(1.0, 0.0)([0], [[1.0, -1.0]]), 0.4698925, 1e-6)
    assert_close(SoftTripleLoss(1.0, margin=0.0)([0], [[[0.0, 0.0], [0.0, 0.0]]]), 0.6931472, 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArcFaceLoss(margin=28.6), "margin must be at least 0 and at most 1.57"),
        (lambda: ArcFaceLoss(scale=0), "scale must be positive"),
        (lambda: ProxyNCALoss(scale=-1), "scale must be positive"),
        (lambda: ProxyAnchorLoss(alpha=0), "alpha must be positive"),
        (lambda: SoftTripleLoss(gamma=0), "gamma must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
