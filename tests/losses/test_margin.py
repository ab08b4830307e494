import numpy as np
import pytest

from tests.losses import references_ranking as references
from tests.losses.checks import (
    both_reductions,
    by_mode,
    check_contract,
    check_degenerate,
    check_formula,
    check_gradient,
    check_large,
    check_nothing_to_learn,
)
from tests.mathematics import assert_close
from tfdml.losses import MarginLoss


def cases(alpha, beta):
    def value(labels, x, reduction):
        return references.margin_loss(labels, x, alpha, beta, reduction)

    def frozen(labels, x, reduction):
        probabilities = references.draw_probabilities(labels, x)
        return lambda e: references.margin_loss(labels, e, alpha, beta, reduction, probabilities)

    return both_reductions(f"{alpha} {beta}", MarginLoss, value, frozen, alpha=alpha, beta=beta)


CASES = {**cases(0.2, 1.2), **cases(0.5, 0.9), **cases(0.0, 1.0)}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_degenerate_batches(mode):
    check_degenerate(CASES["0.2 1.2 mean"], mode)


def test_a_batch_without_positives_teaches_nothing():
    check_nothing_to_learn(MarginLoss(), "no positive", "one image", "two images of two classes")


def test_one_class_is_pulled_together():
    x = np.array([[1.0, 0.0], [-1.0, 0.0]], "float32")
    assert_close(MarginLoss()([0, 0], x), 1.0, 1e-6)


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    check_large(MarginLoss())


def test_worked_example_of_the_docstring():
    assert_close(MarginLoss()([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), 0.7675445, 1e-6)


def test_a_negative_margin_is_refused():
    with pytest.raises(ValueError, match="alpha must not be negative"):
        MarginLoss(alpha=-0.1)
