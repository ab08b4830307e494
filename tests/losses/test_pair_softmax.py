import math

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
from tests.mathematics import assert_close, random_batch
from tfdml.losses import NPairLoss, NTXentLoss, SoftNearestNeighborLoss, SupConLoss, TupletMarginLoss


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


CASES = {
    **nt_xent(0.07),
    **soft_nearest_neighbor(0.2, "sqeuclidean"),
    **soft_nearest_neighbor(0.5, "euclidean"),
    **tuplet(5.73, 64.0, 0.0),
    **tuplet(20.0, 64.0, 0.5, 0.1),
}
DEFAULTS = {name: case for name, case in CASES.items() if name.split()[-2] in ("0.07", "sqeuclidean", "0.5")}
MEANS = {name: case for name, case in DEFAULTS.items() if name.endswith("mean")}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_default = pytest.mark.parametrize(
    "loss", [NTXentLoss(), SoftNearestNeighborLoss(), TupletMarginLoss(variance_weight=0.0)], ids=lambda loss: loss.name
)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@pytest.mark.parametrize("case", DEFAULTS.values(), ids=DEFAULTS)
def test_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("case", MEANS.values(), ids=MEANS)
def test_degenerate_batches(case):
    # A cosine of 1 in float32 is off by 1e-7, which a scale of 64 multiplies.
    check_degenerate(case, "eager", floor=2e-5)


@every_default
def test_a_batch_without_both_kinds_teaches_nothing(loss):
    check_nothing_to_learn(loss, "one image", "no positive", "two images of two classes", "no negative")


@pytest.mark.slow
@every_default
def test_a_batch_of_four_thousand(loss):
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
