"""Bootstrap intervals: what they are by definition, and that they cover what they claim to."""

import numpy as np
import pytest
from scipy import stats

from tfdml.errors import UserError
from tfdml.evaluation import (
    confidence_intervals,
    paired_differences,
    seed_difference,
    student_interval,
)
from tfdml.evaluation.intervals import rate_interval


def reference(per_query, labels, over, resamples, level, seed):
    """Resample by resample, image by image, from the same draws."""
    keep = [i for i, value in enumerate(next(iter(per_query.values()))) if not np.isnan(value)]
    if over == "classes":
        groups = [[i for i in keep if labels[i] == y] for y in sorted({labels[i] for i in keep})]
    else:
        groups = [[i] for i in keep]
    rng = np.random.default_rng(seed)
    means = {name: [] for name in per_query}
    for _ in range(resamples):
        drawn = [i for group in rng.integers(len(groups), size=len(groups)) for i in groups[group]]
        for name, values in per_query.items():
            means[name].append(sum(values[i] for i in drawn) / len(drawn))
    result = {}
    for name, values in means.items():
        values.sort()
        ends = []
        for share in ((1 - level) / 2, (1 + level) / 2):
            place = share * (resamples - 1)  # between two order statistics, by how far
            below = int(place)
            ends.append(
                values[below]
                + (place - below) * (values[min(below + 1, resamples - 1)] - values[below])
            )
        center = sum(values) / resamples
        error = (sum((v - center) ** 2 for v in values) / (resamples - 1)) ** 0.5
        result[name] = (sum(per_query[name][i] for i in keep) / len(keep), *ends, error)
    return result


@pytest.mark.parametrize("over", ["classes", "queries"])
@pytest.mark.parametrize("level", [0.95, 0.5])
def test_matches_a_slow_reference(over, level):
    rng = np.random.default_rng(0)
    labels = rng.integers(-4, 5, 60) * 2**40
    per_query = {"recall@1": (rng.random(60) < 0.6).astype(float), "map@r": rng.random(60)}
    for column in per_query.values():
        column[[7, 31]] = np.nan
    found = confidence_intervals(per_query, labels, over=over, resamples=99, level=level, seed=5)
    expected = reference(per_query, labels, over, 99, level, 5)
    for name, interval in found.items():
        np.testing.assert_allclose(interval, expected[name], rtol=1e-12)
        assert interval.low < interval.mean < interval.high


def test_the_interval_of_a_rate_is_that_of_its_log_odds():
    error, t = 0.05, stats.t.ppf(0.95, 7)
    expected = [1 / (1 + (0.8 / 0.2) * np.exp(sign * t * error / (0.2 * 0.8))) for sign in (1, -1)]
    found = rate_interval(0.2, error**2, 7, 0.9, 8)
    np.testing.assert_allclose(found, [0.2, *expected, error], rtol=1e-12)
    # Of eight groups without a case: the rate that would leave all without one in a share of 0.05.
    assert rate_interval(0.0, 0.0, 7, 0.9, 8)[:3] == (0, 0, pytest.approx(1 - 0.05 ** (1 / 8)))


def test_what_has_no_interval_is_refused_and_one_over_one_class_says_so():
    ones, labels = np.ones(4), [0, 0, 1, 1]
    for values in ({"m": ones[:3]}, {"m": ones, "n": [1, 1, np.nan, 1]}):
        with pytest.raises(UserError, match=r"shape|which queries"):
            confidence_intervals(values, labels)
    with pytest.raises(UserError, match="on the same queries"):
        paired_differences({"a": ones}, {"a": np.ones(3)}, labels)
    with pytest.warns(UserWarning, match="there is one alone"):
        assert confidence_intervals({"m": [1.0, 0.0]}, [3, 3])["m"][1:3] == (0.5, 0.5)


@pytest.mark.parametrize("seeds", [(1, 1), (3, 2)])
def test_differences_are_those_of_the_means_over_seeds(seeds):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 9, 70) * 2**33
    sides = [
        [{"recall@1": rng.random(70).round(), "map@r": rng.random(70)} for _ in range(count)]
        for count in seeds
    ]
    for run in sides[0] + sides[1]:
        for column in run.values():
            column[[3, 40]] = np.nan
    found = paired_differences(*sides, labels, resamples=60, seed=4)
    means = [{name: sum(run[name] for run in side) / len(side) for name in found} for side in sides]
    differences = {name: means[0][name] - means[1][name] for name in found}
    for name, expected in reference(differences, labels, "classes", 60, 0.95, 4).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-12, atol=1e-15)
    if seeds == (1, 1):
        assert paired_differences(sides[0][0], sides[1][0], labels, resamples=60, seed=4) == found


def test_intervals_over_seeds_are_those_of_scipy():
    first, second = [0.41, 0.44, 0.46], [0.38, 0.42]
    found = seed_difference(first, second)
    theirs = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    np.testing.assert_allclose(found[1:3], theirs, rtol=1e-10)
    one = student_interval(first, level=0.9)
    np.testing.assert_allclose(
        one[1:3], stats.t.interval(0.9, 2, np.mean(first), stats.sem(first)), rtol=1e-10
    )
    assert seed_difference([0.5, 0.5], [0.25, 0.25]) == (0.25, 0.25, 0.25, 0.0)


@pytest.mark.parametrize("values", [[], [0.5], [[0.5, 0.6], [0.7, 0.8]]])
def test_an_interval_over_seeds_needs_a_row_of_several(values):
    for interval in (student_interval, lambda first: seed_difference([0.5, 0.6], first)):
        with pytest.raises(UserError, match="at least 2 values"):
            interval(values)
