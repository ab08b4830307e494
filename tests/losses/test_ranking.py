"""Losses that approximate a measure of ranking."""

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
from tfdml.losses import FastAPLoss, HistogramLoss, RecallAtKLoss, SmoothAPLoss
from tfdml.losses.ranking import soft_histograms


def cases(make, reference, bins):
    def value(labels, x, reduction):
        return reference(labels, x, bins, reduction)

    return both_reductions(f"{make.__name__} {bins}", make, value, bins=bins)


CASES = {
    **cases(HistogramLoss, references.histogram, 100),
    **cases(HistogramLoss, references.histogram, 7),
    **cases(FastAPLoss, references.fast_ap, 10),
    **cases(FastAPLoss, references.fast_ap, 25),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_default = pytest.mark.parametrize("loss", [HistogramLoss(), FastAPLoss()], ids=lambda loss: loss.name)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    # A bin's width divides the rounding of a cosine: 1e-7 of the unit is 1e-5 of a bin of 1/50.
    check_gradient(case, mode, relative=3e-5)


@every_case
def test_contract(case):
    check_contract(case.loss)


@by_mode({name: case for name, case in CASES.items() if name.endswith("mean")})
def test_degenerate_batches(case, mode):
    check_degenerate(case, mode, floor=2e-5)


@every_default
def test_a_batch_without_positives_teaches_nothing(loss):
    check_nothing_to_learn(loss, "no positive", "one image", "two images of two classes")


@pytest.mark.slow
@every_default
def test_a_batch_of_four_thousand(loss):
    check_large(loss)


def test_soft_histograms_share_between_neighbours_and_keep_the_mass():
    positions = np.array([[0.25, 1.0, 2.0], [1.5, 9.0, -1.0]], "float32")
    mask = np.array([[True, True, False], [True, True, True]])
    np.testing.assert_allclose(soft_histograms(positions, mask, 2), [[0.75, 1.25, 0.0], [1.0, 0.5, 1.5]])


def test_histogram_loss_is_the_probability_of_a_reversed_pair():
    generator = np.random.default_rng(0)
    angles = generator.uniform(0, np.pi, 40)
    x = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
    labels = generator.integers(0, 4, 40)
    cosines, upper = x @ x.T, np.triu(np.ones((40, 40), bool), 1)
    same = labels[:, None] == labels[None]
    reversed_pairs = np.mean(cosines[upper & same][:, None] <= cosines[upper & ~same][None])
    assert_close(HistogramLoss(bins=2000)(labels, x), reversed_pairs, 0.01)


@pytest.mark.parametrize(("first", "expected"), [(0.9, 0.0), (-0.9, 0.5)])
def test_fast_ap_is_one_minus_the_average_precision(first, expected):
    """One positive, ranked before or after the one negative: an average precision of 1 or of 1/2."""
    others = [[first, np.sqrt(1 - first**2)], [0.0, 1.0]]
    value = FastAPLoss(bins=200).call([0, 0, 1], np.array([[1.0, 0.0], *others], "float32"))
    assert_close(value[0] * 2 / 3, expected, floor=1e-5)


def test_worked_examples_of_the_docstrings():
    x = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    assert_close(HistogramLoss(bins=2)([0, 0, 1], x), 1.0, 1e-6)
    assert_close(FastAPLoss(bins=2)([0, 0, 1], x), 0.5, 1e-6)


@pytest.mark.parametrize("make", [HistogramLoss, FastAPLoss])
@pytest.mark.parametrize("bins", [0, -3, 2.5])
def test_bins_that_are_no_count_are_refused(make, bins):
    with pytest.raises(ValueError, match="bins must be a positive integer"):
        make(bins=bins)


def smooth_ap(temperature):
    def value(labels, x, reduction):
        return references.smooth_ap(labels, x, temperature, reduction)

    return both_reductions(f"smooth ap {temperature}", SmoothAPLoss, value, temperature=temperature)


def recall_at_k(k, t_rank, t_recall):
    def value(labels, x, reduction):
        return references.recall_at_k(labels, x, k, t_rank, t_recall, reduction)

    arguments = {"k": k, "rank_temperature": t_rank, "recall_temperature": t_recall}
    return both_reductions(f"recall at {k} {t_rank}", RecallAtKLoss, value, **arguments)


SMOOTH_RANKS_CASES = {
    **smooth_ap(0.01),
    **smooth_ap(0.2),
    **recall_at_k((1, 2, 4, 8, 16), 0.01, 1.0),
    **recall_at_k((1, 3), 0.2, 0.5),
}
SMOOTH = {name: case for name, case in SMOOTH_RANKS_CASES.items() if "0.2" in name}
every_smooth_ranks_case = pytest.mark.parametrize("case", SMOOTH_RANKS_CASES.values(), ids=SMOOTH_RANKS_CASES)
every_smooth_ranks_default = pytest.mark.parametrize(
    "loss", [SmoothAPLoss(), RecallAtKLoss()], ids=lambda loss: loss.name
)


@every_smooth_ranks_case
def test_smooth_ranks_equals_the_formula(case):
    check_formula(case)


@pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)
def test_smooth_ranks_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_smooth_ranks_case
def test_smooth_ranks_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)
def test_smooth_ranks_degenerate_batches(case):
    check_degenerate(case, "eager")


@every_smooth_ranks_default
def test_smooth_ranks_a_batch_without_positives_teaches_nothing(loss):
    check_nothing_to_learn(loss, "one image", "no positive", "two images of two classes")


@pytest.mark.slow
@every_smooth_ranks_default
def test_smooth_ranks_a_batch_of_four_thousand(loss):
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
