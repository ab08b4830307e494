"""JMMD and JIntra, the baselines of joint representation similarity."""

import itertools

import numpy as np
import pytest

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
from tests.objectives.checks import check_config, check_labels, check_large, check_nothing_to_learn, check_symmetries
from tfdml import kernels
from tfdml.objectives import JointIntra, JointMMD, JointRepresentationSimilarity
from tfdml.training.terms import build_objectives

DIMS = {"pooled": 7, "embedding": 4, "class": 3}
MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}
KINDS = {"mmd": JointMMD, "intra": JointIntra}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_form = pytest.mark.parametrize(("kind", "squared"), list(itertools.product(KINDS, (False, True))))


def batch(seed=0, size=6, classes=3, levels=tuple(DIMS)):
    labels = random_batch(seed, size, classes)[0]
    return labels, [random_batch(seed + DIMS[n], size, 1, DIMS[n], unit=n != "pooled")[1] for n in levels]


def reference(labels, levels, arrays, kind, taus=None, **arguments):
    taus = taus or [None] * len(levels)
    grams = [references.gaussian(x, None, MULTIPLIERS[n], t) for n, x, t in zip(levels, arrays, taus, strict=True)]
    return references_classes.joint_norms(labels, grams, kind, **arguments)


def call(objective, labels, levels, arrays):
    return objective(dict(zip(levels, arrays, strict=True)), labels)


@every_form
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("levels", [tuple(DIMS), ("embedding",), ("pooled", "embedding")], ids="+".join)
def test_equals_the_paper(kind, squared, reduction, levels):
    objective = KINDS[kind](levels, squared=squared, reduction=reduction)
    for seed, (size, classes) in enumerate([(2, 2), (6, 3), (12, 2), (10, 10), (13, 5)]):
        labels, arrays = batch(seed, size, classes, levels)
        expected = reference(labels, levels, arrays, kind, squared=squared, reduction=reduction)
        assert_close(call(objective, labels, levels, arrays), expected)


@every_form
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_reaches_every_level_and_not_the_bandwidth(kind, squared, mode):
    labels, arrays = batch(1, 7, 3)
    taus = [references.bandwidth(x) for x in arrays]
    objective = KINDS[kind](squared=squared)
    value, gradients = value_and_gradients(lambda *t: call(objective, labels, DIMS, t), *arrays, mode=mode)
    assert_close(value, reference(labels, tuple(DIMS), arrays, kind, squared=squared))
    expected = finite_differences(lambda *a: reference(labels, tuple(DIMS), a, kind, taus, squared=squared), *arrays)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(actual)
        assert_close(actual, wanted)


@every_kind
@pytest.mark.parametrize("kernel", ["laplace", "polynomial"])
def test_other_kernels(kind, kernel):
    labels, arrays = batch(2, 8, 3, ("embedding", "class"))
    gram = {"laplace": references.laplace, "polynomial": lambda x: references.polynomial(x, degree=2)}[kernel]
    objective = KINDS[kind](
        ("embedding", "class"), {"laplace": kernels.Laplace(), "polynomial": kernels.Polynomial(2)}[kernel]
    )
    expected = references_classes.joint_norms(labels, [gram(x) for x in arrays], kind)
    assert_close(call(objective, labels, ("embedding", "class"), arrays), expected)


@every_form
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_batches_are_finite(kind, squared, name):
    labels, x = degenerate_batches()[name]
    arrays = [3 * x, x, x[:, :3]]
    objective = KINDS[kind](squared=squared)
    value, gradients = value_and_gradients(lambda *t: call(objective, labels, DIMS, t), *arrays)
    assert_close(value, reference(labels, tuple(DIMS), arrays, kind, squared=squared), floor=1e-6)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    halves = [a.astype("float16") for a in arrays]
    half = call(objective, labels, DIMS, halves)
    assert half.dtype == "float32"
    assert np.isfinite(half)


@every_kind
def test_one_class_teaches_nothing(kind):
    check_nothing_to_learn(lambda y, x: KINDS[kind]("embedding")({"embedding": x}, y), "no negative", "one image")


def test_the_squared_distance_is_made_of_the_norms_and_the_similarity():
    labels, arrays = batch(3, 12, 4)
    mmd, intra = (call(KINDS[kind](squared=True), labels, DIMS, arrays) for kind in KINDS)
    similarity = call(JointRepresentationSimilarity(), labels, DIMS, arrays)
    assert_close(mmd, intra + 2 * similarity)


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


@pytest.mark.parametrize("squared", [False, True])
def test_classes_that_all_but_coincide_are_apart(squared):
    x = random_batch(1, 24, 1, 16)[1]
    both = np.concatenate([x, x + 0.02 * random_batch(2, 24, 1, 16)[1]])
    labels = np.repeat([0, 1], 24)
    expected = reference(labels, ("embedding",), [both], "mmd", squared=squared)
    assert 0 < -expected < 0.05
    assert_close(JointMMD("embedding", squared=squared)({"embedding": both}, labels), expected, 0.02)


@every_kind
def test_descending_draws_each_class_together(kind):
    labels, x = random_batch(3, 12, 3, 5)
    _, (gradient,) = value_and_gradients(lambda e: KINDS[kind]("embedding")({"embedding": e}, labels), x)
    moved = x - 0.05 * gradient / np.abs(gradient).max()

    def spread(x):
        return sum(references_classes.density(labels, x, c) for c in range(3))

    assert spread(moved) < spread(x)


@every_form
def test_symmetries(kind, squared):
    objective = KINDS[kind]("embedding", squared=squared)
    check_symmetries(lambda labels, x: objective({"embedding": x}, labels))


@every_kind
def test_labels(kind):
    check_labels(lambda labels, x: KINDS[kind]("embedding")({"embedding": x}, labels))


@pytest.mark.slow
@every_kind
def test_a_batch_of_two_thousand(kind):
    check_large(lambda labels, x: KINDS[kind]("embedding")({"embedding": x}, labels), size=2048)


@every_kind
def test_configuration(kind):
    check_config(KINDS[kind]())
    check_config(KINDS[kind](("embedding", "class"), kernels.Laplace(), True, "sum", 0.1, "rival"))
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        KINDS[kind](reduction="max")


def test_command_line_names_them():
    mmd, intra = build_objectives("0.1 * joint_mmd(squared=true) + joint_intra(levels=[embedding])", 3)
    assert isinstance(mmd, JointMMD)
    assert isinstance(intra, JointIntra)
    assert (mmd.weight, mmd.squared, intra.levels) == (0.1, True, ("embedding",))
