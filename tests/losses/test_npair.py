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
from tests.mathematics import assert_close, random_batch
from tfdml.losses import AngularLoss, NPairLoss


def n_pair(l2):
    return both_reductions(
        f"n pair {l2}", NPairLoss, lambda y, x, reduction: references.n_pair(y, x, l2, reduction), l2=l2
    )


def scaled_n_pair(scale):
    def value(labels, x, reduction):
        return references.n_pair(labels, scale * np.stack(references.unit(x)), 0.0, reduction)

    return both_reductions(f"n pair scaled {scale}", NPairLoss, value, scale=scale)


def angular(degrees):
    def value(labels, x, reduction):
        return references.angular(labels, x, degrees, reduction)

    return both_reductions(f"angular {degrees}", AngularLoss, value, alpha_degrees=degrees)


CASES = {
    **n_pair(0.0),
    **n_pair(0.003),
    **scaled_n_pair(2.0),
    **scaled_n_pair(10.0),
    **angular(45.0),
    **angular(36.0),
    **angular(40.0),
    **angular(65.0),
}
DEGENERATE = ("n pair 0.0 mean", "n pair scaled 10.0 mean", "angular 45.0 mean", "angular 65.0 mean")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@by_mode({name: case for name, case in CASES.items() if name in DEGENERATE})
def test_degenerate_batches(case, mode):
    check_degenerate(case, mode)


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("loss", [NPairLoss(), AngularLoss()])
def test_a_batch_without_pairs_of_either_kind_teaches_nothing(loss):
    check_nothing_to_learn(loss, "no positive", "no negative", "one image", "two images of two classes")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [NPairLoss(), AngularLoss()])
def test_a_batch_of_four_thousand(loss):
    check_large(loss)


def test_angular_at_65_degrees_keeps_opposite_negatives():
    # The negatives of each end of the pair are nearest to one and furthest from the other: the smallest products.
    x = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], "float32")
    assert_close(AngularLoss(65.0)([0, 0, 1, 2], x), references.angular([0, 0, 1, 2], x, 65.0))


def test_n_pair_survives_long_vectors():
    labels, x = random_batch(0, 8, 3, 4, unit=False)
    assert_close(NPairLoss()(labels, 30 * x), references.n_pair(labels, 30 * x.astype("float64")))


def test_n_pair_with_two_images_per_class_is_eq_9_of_ecaml():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    expected = 0.0
    for i in range(6):
        others = [j for j in range(6) if j // 2 != i // 2]
        expected += np.log(1 + sum(np.exp(x[i] @ x[j] - x[i] @ x[i ^ 1]) for j in others))
    assert_close(NPairLoss(reduction="sum")([0, 0, 1, 1, 2, 2], x), expected)


def test_worked_examples_of_the_docstrings():
    x = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert_close(NPairLoss()([0, 0, 1, 1], x), 0.5514447, 1e-6)
    assert_close(NPairLoss(scale=2.0)([0, 0, 1, 1], x), 0.0359763, 1e-5)
    assert_close(AngularLoss()([0, 0, 1], x[:3]), 0.0181499, 1e-5)


@pytest.mark.parametrize("degrees", [0, -45, 66, 90])
def test_an_angle_out_of_range_is_refused(degrees):
    with pytest.raises(ValueError, match="alpha_degrees must be above 0 and at most 65"):
        AngularLoss(degrees)


def test_a_negative_l2_is_refused():
    with pytest.raises(ValueError, match="l2 must not be negative"):
        NPairLoss(l2=-1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_length_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale must be (positive|a finite number)"):
        NPairLoss(scale=scale)


def test_a_fixed_length_leaves_nothing_for_l2():
    with pytest.raises(ValueError, match="give one of the two"):
        NPairLoss(l2=0.002, scale=10.0)


def test_the_scaled_mean_is_that_of_the_ecaml_authors():
    """Per image: softmax over its partner and all images of other classes, of unit vectors times 10; then the mean."""
    x = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")
    unit = 10 * x.astype("float64") / np.linalg.norm(x, axis=1, keepdims=True)
    expected = []
    for i in range(6):
        exponents = np.array([unit[i] @ unit[i ^ 1], *(unit[i] @ unit[j] for j in range(6) if j // 2 != i // 2)])
        expected.append(np.log(np.exp(exponents - exponents.max()).sum()) + exponents.max() - exponents[0])
    assert_close(NPairLoss(scale=10.0)([0, 0, 1, 1, 2, 2], x), np.mean(expected))
