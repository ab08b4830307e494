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
from tests.mathematics import random_batch
from tfdml.losses import RecallAtKLoss, SmoothAPLoss


def smooth_ap(temperature):
    def value(labels, x, reduction):
        return references.smooth_ap(labels, x, temperature, reduction)

    return both_reductions(f"smooth ap {temperature}", SmoothAPLoss, value, temperature=temperature)


def recall_at_k(k, t_rank, t_recall):
    def value(labels, x, reduction):
        return references.recall_at_k(labels, x, k, t_rank, t_recall, reduction)

    arguments = {"k": k, "rank_temperature": t_rank, "recall_temperature": t_recall}
    return both_reductions(f"recall at {k} {t_rank}", RecallAtKLoss, value, **arguments)


CASES = {
    **smooth_ap(0.01),
    **smooth_ap(0.2),
    **recall_at_k((1, 2, 4, 8, 16), 0.01, 1.0),
    **recall_at_k((1, 3), 0.2, 0.5),
}
SMOOTH = {name: case for name, case in CASES.items() if "0.2" in name}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_default = pytest.mark.parametrize("loss", [SmoothAPLoss(), RecallAtKLoss()], ids=lambda loss: loss.name)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)
def test_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)
def test_degenerate_batches(case):
    check_degenerate(case, "eager")


@every_default
def test_a_batch_without_positives_teaches_nothing(loss):
    check_nothing_to_learn(loss, "one image", "no positive", "two images of two classes")


@pytest.mark.slow
@every_default
def test_a_batch_of_four_thousand(loss):
    check_large(loss)


def test_smooth_ap_of_a_small_temperature_is_one_minus_the_average_precision():
    labels, x = random_batch(6, 20, 4, 5)
    order = np.argsort(-x @ x.T, axis=1)[:, 1:]
    hits = labels[order] == labels[:, None]
    precisions = np.cumsum(hits, axis=1) / np.arange(1, 20)
    exact = 1 - (precisions * hits).sum(1) / hits.sum(1)
    np.testing.assert_allclose(SmoothAPLoss(temperature=1e-6).call(labels, x), exact, atol=1e-5)


def test_recall_of_small_temperatures_is_one_minus_the_recall():
    labels, x = random_batch(6, 20, 4, 5)
    order = np.argsort(-x @ x.T, axis=1)[:, 1:]
    hits = labels[order] == labels[:, None]
    # Of a positive at rank k one half is found.
    found = hits[:, :2].sum(1) + 0.5 * hits[:, 2]
    exact = 1 - found / np.minimum(3, hits.sum(1))
    np.testing.assert_allclose(RecallAtKLoss([3], 1e-6, 1e-2).call(labels, x), exact, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SmoothAPLoss(temperature=0), "temperature must be positive"),
        (lambda: RecallAtKLoss(k=4), r"k must be a list of positive integers such as \[1, 2, 4\], not 4"),
        (lambda: RecallAtKLoss(k=[]), "k must be a list"),
        (lambda: RecallAtKLoss(k=[1, 0]), "k must be a positive integer"),
        (lambda: RecallAtKLoss(rank_temperature=-1), "rank_temperature must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
