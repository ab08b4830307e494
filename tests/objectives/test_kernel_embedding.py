"""JRD and its baselines."""

import numpy as np
import pytest

from tests.objectives.cases import KERNELS
from tests.support import references
from tests.support.mathematics import (
    assert_close,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml import kernels
from tfdml.objectives import JointIntra, JointMMD, JointRepresentationSimilarity

DIMS = {"pooled": 7, "embedding": 4, "class": 3}


def batch(seed=0, size=6, classes=3, levels=tuple(DIMS)):
    """Labels, and one representation per level: pooled features that are not normalized, the others
    that are."""
    labels = random_batch(seed, size, classes)[0]
    arrays = [
        random_batch(seed + DIMS[level], size, 1, DIMS[level], unit=level != "pooled")[1]
        for level in levels
    ]
    return labels, arrays


def evaluate(objective, labels, levels, arrays, mode="eager"):
    return value_and_gradients(
        lambda *tensors: objective(dict(zip(levels, tensors, strict=True)), labels),
        *arrays,
        mode=mode,
    )


def bright_features(size=24, products=(159.0, 400.0)):
    """A batch whose pooled features are as those of a network after ReLU and pooling: every product
    is large."""
    labels, arrays = batch(3, size, 6)
    pooled = np.random.default_rng(0).uniform(0.5, 1.5, (size, 16))
    found = pooled @ pooled.T
    pooled *= np.sqrt(products[0] / found.min())
    arrays[0] = pooled.astype("float32")
    assert (arrays[0] @ arrays[0].T).min() >= products[0] - 1e-3
    assert (arrays[0] @ arrays[0].T).max() < products[1]
    return labels, arrays


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("unit_length", [(), "pooled"], ids=["as they are", "unit length"])
@pytest.mark.parametrize(
    "kind", [JointRepresentationSimilarity, JointMMD, JointIntra], ids=lambda kind: kind.__name__
)
def test_large_pooled_products_have_a_finite_value_and_gradient(name, unit_length, kind):
    labels, arrays = bright_features()
    objective = kind(kernels=KERNELS[name][0], unit_length=unit_length)
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays, "graph")
    assert np.isfinite(value)
    assert value != 0
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient)
        # There is room for the gradient's way through a network, and for a square.
        assert np.all(np.isfinite(gradient * np.float32(1e4)))


@pytest.mark.parametrize(
    ("exponent", "mode"), [(1.0, "eager"), (30.0, "eager"), (69.0, "eager"), (69.0, "xla")]
)
def test_a_joint_exponent_is_exact_up_to_seventy(exponent, mode):
    labels, arrays = bright_features(8)
    largest = max((arrays[0] @ arrays[0].T)[labels[:, None] != labels[None, :]])
    # Both other levels of unit vectors can add 1 each.
    arrays[0] *= np.float32(np.sqrt(max(exponent - 2.0, 0.5) / largest))
    objective = JointRepresentationSimilarity(kernels=kernels.Exponential())
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays, mode)
    # float32 products of this size are right to about 1e-6 of the exponent.
    tolerance = 1e-5 * max(1.0, exponent / 10)
    assert_close(value, np.exp(references.joint_exponential(labels, arrays)), tolerance)
    steps = finite_differences(lambda *a: references.joint_exponential(labels, a), *arrays)
    for gradient, step in zip(gradients, steps, strict=True):
        assert_close(gradient / value, step, 10 * tolerance)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_beyond_seventy_the_gradient_keeps_its_direction(mode):
    labels, arrays = bright_features(8)
    objective = JointRepresentationSimilarity(kernels=kernels.Exponential())
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays, mode)
    assert 60 < np.log(value) <= 70
    expected = finite_differences(lambda *a: references.joint_exponential(labels, a), *arrays)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert_close(gradient / value, wanted, 1e-3)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_classes_that_coincide_are_not_parted_by_rounding(squared, seed):
    """The root of a rounding error of 1e-7 would be a distance of 3e-4, with a huge slope."""
    x = random_batch(seed, 24, 1, 16)[1]
    both = np.concatenate([x, x[np.random.default_rng(seed).permutation(24)]])
    objective = JointMMD("embedding", squared=squared)
    value, (gradient,) = value_and_gradients(
        lambda e: objective({"embedding": e}, np.repeat([0, 1], 24)), both
    )
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros_like(both))
