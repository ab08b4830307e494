import numpy as np
import pytest

from tests.losses import references_pairs as references
from tests.losses.checks import (
    both_reductions,
    check_contract,
    check_degenerate,
    check_formula,
    check_gradient,
    check_large,
)
from tests.mathematics import assert_close, random_batch
from tfdml.losses import VICRegLoss


def vic_reg(*numbers):
    def value(labels, x, reduction):
        return references.vic_reg(labels, x, *numbers, reduction)

    names = ("invariance", "variance", "covariance", "deviation")
    return both_reductions(f"vicreg {numbers}", VICRegLoss, value, **dict(zip(names, numbers, strict=True)))


CASES = {**vic_reg(25.0, 25.0, 1.0, 1.0), **vic_reg(1.0, 0.5, 2.0, 0.3)}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@every_case
def test_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_case
def test_contract(case):
    check_contract(case.loss)


@every_case
def test_degenerate_batches(case):
    check_degenerate(case, "eager")


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    check_large(VICRegLoss())


def test_each_weight_is_that_of_its_term():
    labels, x = random_batch(2, 10, 3, 4, unit=False)
    terms = [VICRegLoss(*weights)(labels, x) for weights in np.eye(3)]
    assert_close(VICRegLoss(2.0, 3.0, 5.0)(labels, x), np.dot([2.0, 3.0, 5.0], terms))
    # In any place, the coordinates vary alike.
    assert_close(VICRegLoss()(labels, x + 100.0), VICRegLoss()(labels, x), 1e-4)
    # One coordinate alone has no covariance.
    assert float(VICRegLoss(0.0, 0.0, 1.0)(labels, x[:, :1])) == 0.0


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


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="covariance must not be negative"):
        VICRegLoss(covariance=-1)
