"""Losses of a positive against all negatives of its anchor."""

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
from tests.mathematics import assert_close, random_batch
from tfdml.losses import (
    AngularLoss,
    CircleLoss,
    GeneralizedLiftedStructureLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NPairLoss,
    NTXentLoss,
    SoftNearestNeighborLoss,
    SupConLoss,
    TupletMarginLoss,
)


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


def nt_xent(temperature):
    def value(labels, x, reduction):
        return references.nt_xent(labels, x, temperature, reduction)

    return both_reductions(f"nt-xent {temperature}", NTXentLoss, value, temperature=temperature)


def soft_nearest_neighbor(temperature, kind):
    def value(labels, x, reduction):
        return references.soft_nearest_neighbor(labels, x, temperature, kind, reduction)

    arguments = {"temperature": temperature, "distance": kind}
    return both_reductions(f"soft neighbour {kind}", SoftNearestNeighborLoss, value, **arguments)


def tuplet(degrees, scale, weight, slack=0.01):
    def value(labels, x, reduction):
        return references.tuplet_margin(labels, x, degrees, scale, weight, slack, reduction)

    arguments = {"margin_degrees": degrees, "scale": scale, "variance_weight": weight, "variance_slack": slack}
    return both_reductions(f"tuplet {degrees} {weight}", TupletMarginLoss, value, **arguments)


SOFTMAX_CASES = {
    **nt_xent(0.07),
    **soft_nearest_neighbor(0.2, "sqeuclidean"),
    **soft_nearest_neighbor(0.5, "euclidean"),
    **tuplet(5.73, 64.0, 0.0),
    **tuplet(20.0, 64.0, 0.5, 0.1),
}
DEFAULTS = {name: case for name, case in SOFTMAX_CASES.items() if name.split()[-2] in ("0.07", "sqeuclidean", "0.5")}
MEANS = {name: case for name, case in DEFAULTS.items() if name.endswith("mean")}
every_softmax_case = pytest.mark.parametrize("case", SOFTMAX_CASES.values(), ids=SOFTMAX_CASES)
every_default = pytest.mark.parametrize(
    "loss", [NTXentLoss(), SoftNearestNeighborLoss(), TupletMarginLoss(variance_weight=0.0)], ids=lambda loss: loss.name
)


@every_softmax_case
def test_softmax_equals_the_formula(case):
    check_formula(case)


@pytest.mark.parametrize("case", DEFAULTS.values(), ids=DEFAULTS)
def test_softmax_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_softmax_case
def test_softmax_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("case", MEANS.values(), ids=MEANS)
def test_softmax_degenerate_batches(case):
    # A cosine of 1 in float32 is off by 1e-7, which a scale of 64 multiplies.
    check_degenerate(case, "eager", floor=2e-5)


@every_default
def test_a_batch_without_both_kinds_teaches_nothing(loss):
    check_nothing_to_learn(loss, "one image", "no positive", "two images of two classes", "no negative")


@pytest.mark.slow
@every_default
def test_softmax_a_batch_of_four_thousand(loss):
    check_large(loss)


def test_nt_xent_is_n_pair_of_one_length_and_sup_con_where_classes_have_two_images():
    labels, x = random_batch(3, 12, 4, 5)
    assert_close(NTXentLoss(0.25)(labels, x), NPairLoss(scale=2.0)(labels, x))
    assert float(NTXentLoss(0.25)(labels, x)) < float(SupConLoss(0.25)(labels, x))
    pairs = np.repeat(np.arange(6), 2)
    assert_close(NTXentLoss(0.25)(pairs, x), SupConLoss(0.25)(pairs, x))


def test_a_positive_within_the_slack_is_pushed_outwards():
    angles = np.radians([0.0, 3.0, 40.0])
    x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
    further = np.stack([np.cos(angles), np.sin(angles + np.radians([0, 2, 0]))], 1).astype("float32")
    loss = TupletMarginLoss(margin_degrees=10, scale=8.0, variance_weight=0.0)
    assert loss.call([0, 0, 1], further)[0] < loss.call([0, 0, 1], x)[0]


def test_small_angles_follow_the_formula_without_a_jump():
    values = []
    for angle in np.geomspace(1e-4, 1e-2, 41):
        angles = np.array([0.0, angle, 0.2])
        x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
        values.append(float(TupletMarginLoss(variance_weight=0.0)([0, 0, 1], x)))
        exact = references.tuplet_margin([0, 0, 1], np.stack([np.cos(angles), np.sin(angles)], 1), scale=32.0)
        assert_close(values[-1], exact, 2e-3)
    # The formula's value falls by less than 0.2 % from one angle to the next up to the last few.
    assert np.max(np.abs(np.diff(values[:25])) / values[0]) < 1.5e-3


def test_defaults_are_those_of_the_papers():
    labels, x = random_batch(4, 9, 3, 4)
    # Yu and Tao: a margin of 0.1 rad, s = 32 on CUB-200 and Cars-196, an intra-pair variance of weight 0.5.
    paper = references.tuplet_margin(labels, x, math.degrees(0.1), 32.0, 0.5, 0.01)
    assert_close(TupletMarginLoss()(labels, x), paper, 1e-3)
    # SimCLR's temperature on cosines; Frosst et al.'s own, 100, gives unit vectors ln(neighbors / positives).
    unlearned = references.soft_nearest_neighbor(labels, x, 100.0)
    assert_close(SoftNearestNeighborLoss(temperature=100)(labels, x), unlearned)
    blind = np.mean([np.log(8 / (np.sum(labels == label) - 1)) for label in labels if np.sum(labels == label) > 1])
    assert abs(unlearned - blind) < 0.02
    simclr = references.soft_nearest_neighbor(labels, x, 0.1, "cosine")
    assert_close(SoftNearestNeighborLoss()(labels, x), simclr)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NTXentLoss(temperature=0), "temperature must be positive"),
        (lambda: SoftNearestNeighborLoss(distance="l2"), "distance must be one of"),
        (lambda: TupletMarginLoss(margin_degrees=91), "margin_degrees must be at least 0 and at most 90"),
        (lambda: TupletMarginLoss(variance_weight=-1), "variance_weight must not be negative"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
        return references.generalized_lifted(labels, x, margin, positive_margin, kind, reduction)

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


STRUCTURED_CASES = {
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
every_structured_case = pytest.mark.parametrize("case", STRUCTURED_CASES.values(), ids=STRUCTURED_CASES)
every_structured_default = pytest.mark.parametrize(
    "loss",
    [MultiSimilarityLoss(), LiftedStructureLoss(), GeneralizedLiftedStructureLoss(), CircleLoss(), SupConLoss()],
    ids=lambda loss: loss.name,
)


@every_structured_case
def test_structured_equals_the_formula(case):
    check_formula(case)


@by_mode(STRUCTURED_CASES)
def test_structured_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@every_structured_case
def test_structured_contract(case):
    check_contract(case.loss)


@by_mode({name: case for name, case in STRUCTURED_CASES.items() if name.endswith("mean")})
def test_structured_degenerate_batches(case, mode):
    # A cosine of 1 in float32 is off by 1e-7, which a scale of 256 multiplies.
    check_degenerate(case, mode, floor=1e-4 if isinstance(case.loss, CircleLoss) else 5e-6)


@every_structured_default
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
@every_structured_default
def test_structured_a_batch_of_four_thousand(loss):
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
    assert_close(loss(labels, x), references.generalized_lifted(labels, x, 3.0, 0.5, "sqeuclidean"))


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


def test_structured_worked_examples_of_the_docstrings():
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
def test_structured_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
