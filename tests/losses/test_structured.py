import numpy as np
import pytest

from tests.losses import references_pairs
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
from tfdml.losses import (
    CircleLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    SupConLoss,
)


def multi_similarity(alpha=2.0, beta=50.0, base=0.5, epsilon=0.1):
    def value(labels, x, reduction):
        return references.multi_similarity(labels, x, alpha, beta, base, epsilon, reduction)

    arguments = {"alpha": alpha, "beta": beta, "base": base, "mining_epsilon": epsilon}
    return both_reductions(f"multi similarity {alpha} {epsilon}", MultiSimilarityLoss, value, **arguments)


def lifted(margin):
    def value(labels, x, reduction):
        return references.lifted(labels, x, margin, reduction)

    return both_reductions(f"lifted {margin}", LiftedStructureLoss, value, margin=margin)


def generalized_lifted(margin, positive_margin, kind):
    def value(labels, x, reduction):
        return references_pairs.generalized_lifted(labels, x, margin, positive_margin, kind, reduction)

    arguments = {"margin": margin, "positive_margin": positive_margin, "distance": kind}
    return both_reductions(f"generalized lifted {margin} {kind}", GeneralizedLiftedStructureLoss, value, **arguments)


def circle(margin, gamma):
    def value(labels, x, reduction):
        return references.circle(labels, x, margin, gamma, reduction)

    def frozen(labels, x, reduction):
        return lambda e: references.circle(labels, e, margin, gamma, reduction, frozen=x)

    return both_reductions(f"circle {margin} {gamma}", CircleLoss, value, frozen, margin=margin, gamma=gamma)


def sup_con(temperature):
    def value(labels, x, reduction):
        return references.sup_con(labels, x, temperature, reduction)

    return both_reductions(f"sup con {temperature}", SupConLoss, value, temperature=temperature)


CASES = {
    **multi_similarity(),
    **multi_similarity(3.0, 10.0, 0.2, None),
    **lifted(1.0),
    **lifted(0.3),
    **generalized_lifted(1.0, 0.0, "euclidean"),
    **circle(0.4, 80.0),
    **circle(0.25, 256.0),
    **sup_con(0.1),
    **sup_con(1.0),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_default = pytest.mark.parametrize(
    "loss",
    [MultiSimilarityLoss(), LiftedStructureLoss(), GeneralizedLiftedStructureLoss(), CircleLoss(), SupConLoss()],
    ids=lambda loss: loss.name,
)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@every_case
def test_contract(case):
    check_contract(case.loss)


@by_mode({name: case for name, case in CASES.items() if name.endswith("mean")})
def test_degenerate_batches(case, mode):
    # A cosine of 1 in float32 is off by 1e-7, which a scale of 256 multiplies.
    check_degenerate(case, mode, floor=1e-4 if isinstance(case.loss, CircleLoss) else 5e-6)


@every_default
def test_a_batch_without_positives_teaches_nothing(loss):
    check_nothing_to_learn(loss, "one image")
    if not isinstance(loss, MultiSimilarityLoss):
        check_nothing_to_learn(loss, "no positive", "two images of two classes")


@pytest.mark.parametrize(
    "loss",
    [MultiSimilarityLoss(), LiftedStructureLoss(), GeneralizedLiftedStructureLoss(), CircleLoss()],
    ids=lambda loss: loss.name,
)
def test_one_class_without_negatives_teaches_nothing(loss):
    check_nothing_to_learn(loss, "no negative")


@pytest.mark.slow
@every_default
def test_a_batch_of_four_thousand(loss):
    check_large(loss)


def test_lifted_structure_is_tensorflow_addons():
    labels, x = random_batch(8, 9, 3, 4)
    distances = np.sqrt(((x[:, None] - x[None]).astype("float64") ** 2).sum(-1))
    same = labels[:, None] == labels[None]
    push = np.where(same, 0, np.exp(1.0 - distances)).sum(1)
    hinged = np.maximum(np.log(push[:, None] + push[None]) + distances, 0) ** 2
    positive = same & ~np.eye(9, dtype=bool)
    assert_close(LiftedStructureLoss(1.0)(labels, x), 0.25 * hinged[positive].sum() / (positive.sum() / 2))


def test_generalized_lifted_structure_takes_margins_and_any_distance():
    labels, x = random_batch(4, 9, 3, 4, unit=False)
    loss = GeneralizedLiftedStructureLoss(3.0, 0.5, "sqeuclidean")
    assert_close(loss(labels, x), references_pairs.generalized_lifted(labels, x, 3.0, 0.5, "sqeuclidean"))


def test_circle_weights_carry_no_gradient_but_a_pair_at_its_optimum_costs_little():
    x = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], "float32")
    assert float(CircleLoss(0.4, 80.0)([0, 0, 1], x)) < 1e-5


def test_multi_similarity_counts_unmined_anchors_in_its_mean():
    # The third image has no positive and the fourth neither: they mine nothing but count.
    x = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.8]], "float32")
    labels = [0, 0, 1, 2]
    rows = np.asarray(MultiSimilarityLoss(mining_epsilon=0.6).call(labels, x))
    assert np.all(rows[:2] > 0)
    np.testing.assert_array_equal(rows[2:], 0.0)
    assert_close(MultiSimilarityLoss(mining_epsilon=0.6)(labels, x), rows.sum() / 4)


def test_worked_examples_of_the_docstrings():
    pair = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    assert_close(MultiSimilarityLoss(mining_epsilon=None)([0, 0], pair[:2]), 0.1566308, 1e-6)
    assert_close(LiftedStructureLoss(1.0)([0, 0, 1], [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), 0.2402265, 1e-6)
    assert_close(CircleLoss(0.4, 1.0)([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), 0.7890093, 1e-6)
    assert_close(SupConLoss(1.0)([0, 0, 1], pair), 0.3132617, 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiSimilarityLoss(alpha=0), "alpha must be positive"),
        (lambda: CircleLoss(gamma=-1), "gamma must be positive"),
        (lambda: SupConLoss(temperature=0), "temperature must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
