import itertools

import numpy as np
import pytest

from tests import references
from tests.mathematics import MODES, assert_close, finite_differences, random_batch, value_and_gradients
from tfdml import losses
from tfdml.objectives import HeadDivergence, HeadwiseLoss

HEADS, SIZE = 3, 4
CHOICES = list(itertools.product(["all", "image"], ["active", "all"]))
every_choice = pytest.mark.parametrize(("pairs", "average"), CHOICES)


def batch(seed=0, size=6, heads=HEADS, classes=3):
    """Labels, and the unit vectors of each image's heads (B, M, d/M)."""
    labels, x = random_batch(seed, size * heads, classes, SIZE)
    return labels[:size], x.reshape(size, heads, SIZE)


def divergence(x, margin=0.5, pairs="all", average="active"):
    """Kim et al., sec. 3.3, on cosines: over heads p != q in either order, and images (i, j) or (i, i)."""
    images, heads = x.shape[:2]
    values = [
        max(references.cosine(x[i, p], x[j, q]) - margin, 0.0)
        for i in range(images)
        for j in range(images)
        if pairs == "all" or i == j
        for p in range(heads)
        for q in range(heads)
        if p != q
    ]
    if average == "active":
        values = [value for value in values if value > 0]
    return references.mean(values)


def evaluate(objective, labels, x, mode="eager"):
    value, (gradient,) = value_and_gradients(lambda heads: objective({"heads": heads}, labels), x, mode=mode)
    return value, gradient


@every_choice
@pytest.mark.parametrize("margin", [0.5, 0.0, -1.0, 0.9])
def test_divergence_equals_the_paper(pairs, average, margin):
    for seed, (size, heads) in enumerate([(1, 2), (6, 3), (5, 8), (12, 2)]):
        labels, x = batch(seed, size, heads)
        value, gradient = evaluate(HeadDivergence(margin, pairs, average), labels, x)
        assert_close(value, divergence(x, margin, pairs, average), floor=1e-7)
        assert np.all(np.isfinite(gradient))


@pytest.mark.one_quick_case
@every_choice
@pytest.mark.parametrize("mode", MODES)
def test_divergence_has_the_gradient_of_the_formula(pairs, average, mode):
    labels, x = batch(3)
    value, gradient = evaluate(HeadDivergence(0.2, pairs, average), labels, x, mode)
    assert_close(value, divergence(x, 0.2, pairs, average))
    (expected,) = finite_differences(lambda heads: divergence(heads, 0.2, pairs, average), x)
    assert np.any(expected)
    assert_close(gradient, expected)


def contrastive_of_heads(labels, x, **options):
    return references.mean([references.contrastive(labels, x[:, m], **options) for m in range(x.shape[1])])


@pytest.mark.parametrize("mode", MODES)
def test_headwise_loss_is_the_mean_of_the_heads_losses(mode):
    labels, x = batch(4, 7)
    value, gradient = evaluate(HeadwiseLoss(losses.ContrastiveLoss(1.3, "euclidean")), labels, x, mode)
    assert_close(value, contrastive_of_heads(labels, x, margin=1.3, kind="euclidean"))
    (expected,) = finite_differences(lambda heads: contrastive_of_heads(labels, heads, margin=1.3, kind="euclidean"), x)
    assert_close(gradient, expected)


def degenerate():
    labels, x = batch(5)
    zero = x.copy()
    zero[1, 0] = 0.0
    return {
        "one image": (labels[:1], x[:1]),
        "one head": (labels, x[:, :1]),
        "one class": (np.zeros(6, int), x),
        "no positive": (np.arange(6), x),
        "identical heads": (labels, np.repeat(x[:, :1], HEADS, axis=1)),
        "identical images": (labels, np.repeat(x[:1], 6, axis=0)),
        "a zero head": (labels, zero),
        "all zero": (labels, np.zeros_like(x)),
        "opposite heads": (labels, np.stack([x[:, 0], -x[:, 0]], axis=1)),
    }


@pytest.mark.parametrize("name", degenerate())
@pytest.mark.parametrize("objective", ["divergence all", "divergence image", "headwise"])
def test_degenerate_batches_are_finite(objective, name):
    labels, x = degenerate()[name]
    if objective == "headwise":
        # A margin that no distance meets exactly.
        built, expected = HeadwiseLoss(losses.ContrastiveLoss(1.3)), contrastive_of_heads(labels, x, margin=1.3)
    else:
        pairs = objective.split()[1]
        built, expected = HeadDivergence(pairs=pairs), divergence(x, pairs=pairs)
    value, gradient = evaluate(built, labels, x)
    assert_close(value, expected, floor=1e-6)
    assert np.all(np.isfinite(gradient))
