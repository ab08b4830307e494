"""Triplet and quadruplet loss."""

import math

import numpy as np
import pytest

from tests.losses import references
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
from tests.mathematics import MODES, assert_close, random_batch, value_and_gradients
from tfdml.layers import QuadrupletStatistic
from tfdml.losses import QuadrupletLoss, TripletLoss
from tfdml.mining import negative_probabilities, sample_negatives
from tfdml.objectives.mutual_information import divergence_loss
from tfdml.pairs import Pairs

MINING = ("all", "hard", "semi_hard", "distance_weighted")


def cases(mining, kind="sqeuclidean", margin=0.5, average="active"):
    def value(labels, x, reduction, chosen=None):
        return references.triplet(labels, x, margin, mining, kind, average, reduction, chosen)

    def frozen(labels, x, reduction):
        chosen = references.triplets(labels, x, mining, kind)
        return lambda e: value(labels, e, reduction, chosen)

    name = f"{mining} {kind} {average}"
    arguments = {"margin": margin, "mining": mining, "distance": kind, "average": average}
    return both_reductions(name, TripletLoss, value, frozen, **arguments)


CASES = {
    **{key: case for mining in MINING for key, case in cases(mining).items()},
    **{key: case for mining in MINING for key, case in cases(mining, "euclidean", 0.2, "all").items()},
    **{key: case for kind in ("cosine", "dot") for key, case in cases("all", kind, 0.3).items()},
    **cases("semi_hard", "cosine"),
}
SOFT = {key: case for mining in MINING for key, case in cases(mining, margin="soft").items() if key.endswith("mean")}
SOFT |= {key: case for key, case in cases("all", "euclidean", "soft").items() if key.endswith("sum")}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_mining = pytest.mark.parametrize("mining", MINING)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@every_mining
@pytest.mark.parametrize("kind", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_degenerate_batches(mining, kind, mode):
    check_degenerate(cases(mining, kind)[f"{mining} {kind} active mean"], mode)


@every_mining
def test_a_batch_without_triplets_teaches_nothing(mining):
    check_nothing_to_learn(
        TripletLoss(mining=mining), "no positive", "no negative", "one image", "two images of two classes"
    )


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.slow
@every_mining
def test_a_batch_of_four_thousand(mining):
    check_large(TripletLoss(mining=mining))


def test_the_distance_is_that_of_the_source_by_default():
    labels, x = random_batch(3, 9, 3, 4)
    # Schroff et al.'s squared distances; Hermans et al.'s soft margin on plain ones.
    hinges = references.triplet(labels, x, margin=0.1, mining="all", kind="sqeuclidean")
    assert_close(TripletLoss()(labels, x), hinges)
    soft = references.triplet(labels, x, margin="soft", mining="hard", kind="euclidean")
    assert_close(TripletLoss("soft", "hard")(labels, x), soft)


@pytest.mark.parametrize("case", SOFT.values(), ids=SOFT)
def test_the_soft_margin_equals_the_formula(case):
    check_formula(case)
    check_gradient(case, "eager")
    check_degenerate(case, "eager", floor=5e-6)
    check_contract(case.loss)


@pytest.mark.slow
def test_a_batch_of_four_thousand_with_the_soft_margin():
    check_large(TripletLoss("soft"))


@pytest.mark.parametrize("margin", ["hard", "0.1", ""])
def test_a_margin_that_is_neither_a_number_nor_soft_is_refused(margin):
    with pytest.raises(ValueError, match="margin must be a number or 'soft'"):
        TripletLoss(margin)


def test_all_triplets_keep_their_digits_in_a_batch_of_hundreds():
    labels, x = random_batch(4, 300, 20, 32)
    squared = np.maximum(2 - 2 * x.astype("float64") @ x.T.astype("float64"), 0)
    same = labels[:, None] == labels[None, :]
    hinges = []
    for i in range(300):
        near, far = same[i] & (np.arange(300) != i), ~same[i]
        hinges.append(np.maximum(squared[i, near][:, None] - squared[i, far][None, :] + 0.1, 0).ravel())
    hinges = np.concatenate(hinges)
    assert_close(TripletLoss(margin=0.1)(labels, x), hinges.sum() / np.count_nonzero(hinges), 1e-6)
    assert_close(TripletLoss(margin=0.1, average="all")(labels, x), hinges.mean(), 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_hinge_of_exactly_zero_is_not_active(mode):
    # d_ap = 1, d_an = 2 and a margin of 1: the only violated triplet is that of the second anchor.
    x = np.array([[0.0], [1.0], [2.0]])
    loss = TripletLoss(margin=1.0, distance="euclidean")
    value, (gradient,) = value_and_gradients(lambda e: loss([0, 0, 1], e), x, mode=mode)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [[-1.0], [2.0], [-1.0]])


def test_averages_over_active_or_over_all_triplets():
    x = np.array([[0.0], [1.0], [1.5], [9.0]], "float32")
    labels = [0, 0, 1, 2]
    # Hinges: anchor 0: [1 - 1.5 + 1]_+ = 0.5 and 0; anchor 1: [1 - 0.5 + 1]_+ = 1.5 and 0.
    assert_close(TripletLoss(1.0, distance="euclidean")(labels, x), 1.0)
    assert_close(TripletLoss(1.0, distance="euclidean", average="all")(labels, x), 0.5)
    assert_close(TripletLoss(1.0, "hard", "euclidean", "all")(labels, x), 1.0)
    assert_close(TripletLoss(1.0, distance="euclidean", reduction="sum")(labels, x), 2.0)


def test_distance_weighted_is_the_mean_of_many_draws():
    labels, x = random_batch(1, 8, 3, 4)
    probabilities = negative_probabilities(Pairs.of_batch(x, labels))
    squared = ((x[:, None] - x[None]) ** 2).sum(-1)
    total, draws = 0.0, 500
    pairs = references.positive_pairs(labels)
    for seed in range(draws):
        drawn = np.asarray(sample_negatives(probabilities, seed=seed)[0])[:, 0]
        for a, p in pairs:
            total += max(squared[a, p] - squared[a, drawn[a]] + 0.5, 0.0)
    loss = TripletLoss(0.5, "distance_weighted", reduction="sum")
    assert_close(loss(labels, x), total / draws, 0.05)


def test_not_a_number_is_not_hidden():
    x = np.array([[np.nan, 0.0], [1.0, 0.0], [0.0, 1.0]], "float32")
    for mining in MINING:
        assert np.isnan(TripletLoss(mining=mining)([0, 0, 1], x)), mining


def test_worked_example_of_the_docstring():
    assert_close(TripletLoss(margin=0.1)([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), 0.5, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mining": "easy"}, "mining must be one of all, hard"),
        ({"distance": "l2"}, "distance must be one of"),
        ({"average": "some"}, "average must be 'active' or 'all'"),
    ],
)
def test_unknown_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TripletLoss(**arguments)


def quadruplet_cases(kind, average, margin=0.3, pair_margin=0.2):
    def value(labels, x, reduction):
        return references.quadruplet(labels, x, margin, pair_margin, kind, average, reduction)

    arguments = {"margin": margin, "pair_margin": pair_margin, "distance": kind, "average": average}
    return both_reductions(f"{kind} {average}", QuadrupletLoss, value, **arguments)


QUADRUPLET_CASES = {
    **quadruplet_cases("euclidean", "all"),
    **quadruplet_cases("euclidean", "active"),
    **quadruplet_cases("sqeuclidean", "all"),
    **quadruplet_cases("cosine", "active"),
    **quadruplet_cases("dot", "all"),
}
every_quadruplet_case = pytest.mark.parametrize("case", QUADRUPLET_CASES.values(), ids=QUADRUPLET_CASES)


@every_quadruplet_case
def test_quadruplet_equals_the_formula(case):
    check_formula(case)


@by_mode(QUADRUPLET_CASES)
def test_quadruplet_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@pytest.mark.one_quick_case
@by_mode(
    {name: QUADRUPLET_CASES[name] for name in ("euclidean all mean", "euclidean active mean", "cosine active mean")}
)
def test_quadruplet_degenerate_batches(case, mode):
    check_degenerate(case, mode)


@every_quadruplet_case
def test_quadruplet_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("average", ["all", "active"])
def test_a_batch_without_pairs_of_either_kind_teaches_nothing(average):
    loss = QuadrupletLoss(average=average)
    check_nothing_to_learn(loss, "no positive", "no negative", "one image", "two images of two classes")


def test_a_batch_of_a_thousand():
    check_large(QuadrupletLoss(), size=1024)


def test_a_thousand_images_lose_no_digits():
    labels, x = np.arange(600) % 200, np.random.default_rng(3).normal(size=(600, 16)).astype("float32")
    d = np.linalg.norm(x[:, None].astype("float64") - x[None], axis=2)
    same = labels[:, None] == labels
    far = np.sort(d[~same])
    expected = np.mean([np.maximum(p + 0.1 - far, 0.0).mean() for p in d[same & ~np.eye(600, dtype=bool)]])
    assert_close(QuadrupletLoss(margin=-100.0)(labels, x), expected, 1e-5)


def test_quadruplet_worked_example_of_the_docstring():
    loss = QuadrupletLoss(margin=0.1, pair_margin=0.0, distance="sqeuclidean")
    assert_close(loss([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), (0.5 + 0.2 + 0.2) / 3, 1e-6)


def test_rank_mi_with_v_fixed_to_eq_13_is_the_quadruplet_term():
    """Sec. 3.4: negatives enter as d - gamma, with gamma beyond all distances, so that no quadruplet is dropped."""
    gamma = 2.5
    _, x = random_batch(4, 12, 4, 5)
    labels = np.arange(12) % 4
    d = np.array([[math.dist(a, b) for b in x.astype("float64")] for a in x.astype("float64")])
    positive = (labels[:, None] == labels) & ~np.eye(12, dtype=bool)
    negative = labels[:, None] != labels
    values = QuadrupletStatistic()(np.where(negative, d - gamma, d).astype("float32"))
    bound = divergence_loss(values, positive, negative)
    without_triplets = QuadrupletLoss(margin=-100.0, pair_margin=gamma)
    assert_close(bound + 2 * math.log(2), without_triplets(labels, x), 1e-5)


def test_an_average_that_is_none_is_refused():
    with pytest.raises(ValueError, match="average must be 'active' or 'all', not 'mean'"):
        QuadrupletLoss(average="mean")
