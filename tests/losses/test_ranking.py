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
from tfdml.losses import FastAPLoss, HistogramLoss
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
