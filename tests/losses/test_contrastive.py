"""Contrastive, binomial deviance, margin, ranked list and VICReg losses."""

import numpy as np
import pytest

from tests.losses.cases import CASES
from tests.mathematics import assert_close, degenerate_batches, finite_differences, value_and_gradients
from tfdml import losses
from tfdml.losses import VICRegLoss


def rounding(loss):
    """What the gradients of a batch's pairs, that should cancel, leave in float32: a few units in the last place."""
    steepest = loss.alpha * max(loss.negative_cost, 1.0) if isinstance(loss, losses.BinomialDevianceLoss) else 2.0
    pairs = 30.0 if loss.reduction == "sum" else 1.0
    return 4 * float(np.finfo("float32").eps) * steepest * pairs


SMOOTH = (losses.ContrastiveLoss, losses.CosineContrastiveLoss, losses.BinomialDevianceLoss)
SMOOTH_CASES = {name: case for name, case in CASES.items() if isinstance(case.loss, SMOOTH)}


@pytest.mark.parametrize("case", SMOOTH_CASES.values(), ids=SMOOTH_CASES)
def test_degenerate_batches_have_the_formula_s_gradient(case):
    for name, (labels, x) in degenerate_batches().items():
        _, (gradient,) = value_and_gradients(lambda e, y=labels: case.loss(y, e), x)
        angular = "cosine" in repr(case.loss.get_config()) or isinstance(case.loss, losses.BinomialDevianceLoss)
        if "zero" in name and angular:
            # The cosine has no derivative at 0; nothing may be learned there.
            np.testing.assert_array_equal(gradient[np.all(x == 0, axis=1)], 0.0)
        else:
            (expected,) = finite_differences(case.differentiable(labels, x), x)
            assert_close(gradient, expected, floor=rounding(case.loss))


def test_the_default_weights_are_those_of_the_authors_code_on_two_views():
    views = np.random.default_rng(3).normal(size=(2, 5, 3)) * 0.5
    views[1] = views[0]  # with equal views, both batches have the statistics of one

    def statistics(z):
        covariances = np.cov(z.T)
        shortfall = np.mean(np.maximum(1 - np.sqrt(np.diag(covariances) + 1e-4), 0))
        return shortfall, (np.sum(covariances**2) - np.sum(np.diag(covariances) ** 2)) / z.shape[1]

    deviations, squares = zip(*map(statistics, views), strict=True)
    authors = 25 * np.mean((views[0] - views[1]) ** 2) + 25 * sum(deviations) / 2 + 1 * sum(squares)
    # Of 10 images in place of 5, a variance is divided by 9 and not by 8.
    batch = np.concatenate(views) * np.sqrt(9 / 8)
    assert_close(VICRegLoss()(np.tile(np.arange(5), 2), batch.astype("float32")), authors)
