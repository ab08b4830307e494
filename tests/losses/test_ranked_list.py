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
    check_nothing_to_learn,
)
from tfdml.losses import RankedListLoss


def ranked_list(*numbers):
    def value(labels, x, reduction):
        return references.ranked_list(labels, x, *numbers, reduction)

    def frozen(labels, x, reduction):
        return lambda e: references.ranked_list(labels, e, *numbers, reduction, frozen=x)

    names = ("margin", "boundary", "negative_temperature", "positive_temperature", "balance")
    arguments = dict(zip(names, numbers, strict=True))
    return both_reductions(f"ranked list {numbers}", RankedListLoss, value, frozen, **arguments)


CASES = {**ranked_list(0.4, 1.2, 10.0, 0.0, 0.5), **ranked_list(0.6, 1.4, 0.0, 3.0, 0.3)}
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


def test_pairs_on_their_side_of_the_spheres_teach_nothing():
    check_nothing_to_learn(RankedListLoss(), "one image")
    apart = np.array([[0.0, 0.0], [0.5, 0.0], [2.0, 0.0]], "float32")
    np.testing.assert_array_equal(RankedListLoss().call([0, 0, 1], apart), 0.0)


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    check_large(RankedListLoss())


def test_a_boundary_within_the_margin_is_refused():
    with pytest.raises(ValueError, match=r"boundary must be at least 0\.4, not 0\.3"):
        RankedListLoss(margin=0.4, boundary=0.3)
    with pytest.raises(ValueError, match="balance must be at least 0 and at most 1"):
        RankedListLoss(balance=2)
