"""JRD and its baselines."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.mathematics import (
    DEGENERATE,
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tests.objectives import references_classes
from tfdml import kernels
from tfdml.objectives import JointIntra, JointMMD, JointRepresentationSimilarity

DIMS = {"pooled": 7, "embedding": 4, "class": 3}
SUBSETS = [levels for n in (1, 2, 3) for levels in itertools.combinations(DIMS, n)]
MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}
every_subset = pytest.mark.parametrize("levels", SUBSETS, ids="+".join)

# A kernel for all levels, its reference, and the distance whose mean is its bandwidth.
KERNELS = {
    "gaussian": (
        kernels.GaussianMixture((1.0,)),
        lambda x, tau: references.gaussian(x, None, (1.0,), tau),
        references.squared_distance,
    ),
    "laplace": (kernels.Laplace(), lambda x, tau: references.laplace(x, None, 1.0, tau), references.absolute_distance),
    "polynomial 2": (kernels.Polynomial(2), lambda x, tau: references.polynomial(x, None, 2), None),
    "polynomial 5": (kernels.Polynomial(5), lambda x, tau: references.polynomial(x, None, 5), None),
    "exponential": (kernels.Exponential(), lambda x, tau: references.exponential(x), None),
}


def batch(seed=0, size=6, classes=3, levels=tuple(DIMS)):
    """Labels, and one representation per level: pooled features that are not normalized, the others that are."""
    labels = random_batch(seed, size, classes)[0]
    arrays = [random_batch(seed + DIMS[level], size, 1, DIMS[level], unit=level != "pooled")[1] for level in levels]
    return labels, arrays


KINDS = {"similarity": JointRepresentationSimilarity, "mmd": JointMMD, "intra": JointIntra}
NORMS = ("mmd", "intra")
#: Each objective, of the paper's norms and of their squares.
FORMS = [("similarity", {}), *((kind, {"squared": squared}) for kind in NORMS for squared in (False, True))]
every_form = pytest.mark.parametrize(("kind", "form"), FORMS)
every_squared = pytest.mark.parametrize(("kind", "squared"), list(itertools.product(NORMS, (False, True))))


def reference(labels, levels, arrays, taus=None, kind="similarity", **arguments):
    taus = taus or [None] * len(levels)
    grams = [
        references.gaussian(x, None, MULTIPLIERS[level], tau)
        for level, x, tau in zip(levels, arrays, taus, strict=True)
    ]
    if kind == "similarity":
        return references.joint_representation_similarity(labels, grams, **arguments)
    return references_classes.joint_norms(labels, grams, kind, **arguments)


def evaluate(objective, labels, levels, arrays, mode="eager"):
    return value_and_gradients(
        lambda *tensors: objective(dict(zip(levels, tensors, strict=True)), labels), *arrays, mode=mode
    )


@every_form
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_subset
def test_equals_the_paper(kind, form, reduction, levels):
    objective = KINDS[kind](levels, reduction=reduction, **form)
    for seed, (size, classes) in enumerate([(2, 2), (6, 3), (12, 2), (10, 10), (13, 5)]):
        labels, arrays = batch(seed, size, classes, levels)
        expected = reference(labels, levels, arrays, kind=kind, reduction=reduction, **form)
        assert_close(objective(dict(zip(levels, arrays, strict=True)), labels), expected)


@pytest.mark.parametrize(
    ("kind", "form", "levels"),
    [*(("similarity", {}, levels) for levels in SUBSETS), *((*row, tuple(DIMS)) for row in FORMS[1:])],
)
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_reaches_every_level_and_not_the_bandwidth(kind, form, levels, mode):
    labels, arrays = batch(1, 7, 3, levels)
    taus = [references.bandwidth(x) for x in arrays]
    value, gradients = evaluate(KINDS[kind](levels, **form), labels, levels, arrays, mode)
    assert_close(value, reference(labels, levels, arrays, kind=kind, **form))
    expected = finite_differences(lambda *a: reference(labels, levels, a, taus, kind, **form), *arrays)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(actual)
        assert_close(actual, wanted)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_every_kernel_on_every_level(name, mode):
    kernel, gram, spread = KERNELS[name]
    labels, arrays = batch(2, 6, 3)
    arrays[0] = arrays[0] / np.float32(2)
    taus = [references.bandwidth(x, kind=spread) if spread else None for x in arrays]

    def slow(*arrays):
        return references.joint_representation_similarity(
            labels, [gram(x, t) for x, t in zip(arrays, taus, strict=True)]
        )

    objective = JointRepresentationSimilarity(kernels=kernel)
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays, mode)
    assert_close(value, slow(*arrays))
    for actual, expected in zip(gradients, finite_differences(slow, *arrays), strict=True):
        assert_close(actual, expected)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", [None, *KERNELS])
@pytest.mark.parametrize("name_of_batch", DEGENERATE)
def test_degenerate_batches_are_finite(name, name_of_batch):
    labels, x = degenerate_batches()[name_of_batch]
    kernel, gram, _ = KERNELS[name] if name else (None, None, None)
    arrays = [3 * x, x, x[:, :3]]
    if name is None:
        expected = reference(labels, tuple(DIMS), arrays)
    else:
        expected = references.joint_representation_similarity(labels, [gram(a, None) for a in arrays])
    objective = JointRepresentationSimilarity(kernels=kernel)
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays)
    assert_close(value, expected)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    for dtype in ("bfloat16", "float16"):
        half_value, half_gradients = value_and_gradients(
            lambda *t, dtype=dtype: objective({k: tf.cast(a, dtype) for k, a in zip(DIMS, t, strict=True)}, labels),
            *arrays,
        )
        assert half_value.dtype == np.float32
        assert np.isfinite(half_value)
        for gradient, half_gradient in zip(gradients, half_gradients, strict=True):
            # A gradient beyond 65,504 is one that float16 cannot hold: what loss scaling is for.
            assert np.all(np.isfinite(half_gradient) | (np.abs(gradient) > 60_000))


@pytest.mark.parametrize("labels", [[4], [4, 4, 4, 4, 4, 4]], ids=["one image", "one class"])
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_one_class_gives_zero_and_teaches_nothing(labels, mode):
    arrays = batch(0, len(labels), 1)[1]
    value, gradients = evaluate(JointRepresentationSimilarity(), labels, tuple(DIMS), arrays, mode)
    assert value == 0.0
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def bright_features(size=24, products=(159.0, 400.0)):
    """A batch whose pooled features are as those of a network after ReLU and pooling: every product is large."""
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
@pytest.mark.parametrize("kind", [JointRepresentationSimilarity, JointMMD, JointIntra], ids=lambda kind: kind.__name__)
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


@pytest.mark.parametrize(("exponent", "mode"), [(1.0, "eager"), (30.0, "eager"), (69.0, "eager"), (69.0, "xla")])
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


def call(objective, labels, levels, arrays):
    return objective(dict(zip(levels, arrays, strict=True)), labels)


@every_squared
@pytest.mark.parametrize("name", DEGENERATE)
def test_norms_degenerate_batches_are_finite(kind, squared, name):
    labels, x = degenerate_batches()[name]
    arrays = [3 * x, x, x[:, :3]]
    objective = KINDS[kind](squared=squared)
    value, gradients = value_and_gradients(lambda *t: call(objective, labels, DIMS, t), *arrays)
    assert_close(value, reference(labels, tuple(DIMS), arrays, kind=kind, squared=squared), floor=1e-6)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    halves = [a.astype("float16") for a in arrays]
    half = call(objective, labels, DIMS, halves)
    assert half.dtype == "float32"
    assert np.isfinite(half)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_classes_that_coincide_are_not_parted_by_rounding(squared, seed):
    """The root of a rounding error of 1e-7 would be a distance of 3e-4, with a huge slope."""
    x = random_batch(seed, 24, 1, 16)[1]
    both = np.concatenate([x, x[np.random.default_rng(seed).permutation(24)]])
    objective = JointMMD("embedding", squared=squared)
    value, (gradient,) = value_and_gradients(lambda e: objective({"embedding": e}, np.repeat([0, 1], 24)), both)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros_like(both))
