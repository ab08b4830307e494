import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon
from sklearn.metrics import roc_auc_score

from tests.evaluation.generalisation.test_pair_histogram import all_distances
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_overlap
from tfdml.evaluation.generalisation import (
    default_bins,
    jensen_shannon_bits,
    overlap_coefficient,
    probability_nearer,
    sample_pair_histogram,
    share_ordered,
)

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(p=COUNTS, q=COUNTS)
def test_measures_of_histograms_match_references(p, q):
    size = min(len(p), len(q))
    p, q = np.array(p[:size]), np.array(q[:size])
    assume(p.any() and q.any())
    p_share, q_share = p / p.sum(), q / q.sum()
    assert overlap_coefficient(p, q) == pytest.approx(sum(min(a, b) for a, b in zip(p_share, q_share, strict=True)))
    assert jensen_shannon_bits(p, q) == pytest.approx(jensenshannon(p_share, q_share, base=2) ** 2, abs=1e-7)
    assert jensen_shannon_bits(q, p) == pytest.approx(jensen_shannon_bits(p, q), abs=1e-12)
    # As a classifier that is sure of "one class" the nearer the bin.
    truth = np.repeat([1, 0], [p.sum(), q.sum()])
    nearness = np.concatenate([np.repeat(-np.arange(size), p), np.repeat(-np.arange(size), q)])
    assert probability_nearer(p, q) == pytest.approx(roc_auc_score(truth, nearness), abs=1e-9)


def test_same_and_separate_histograms_give_the_ends_of_the_scales():
    assert overlap_coefficient([2, 3], [4, 6]) == pytest.approx(1)
    assert jensen_shannon_bits([2, 3], [4, 6]) == pytest.approx(0, abs=1e-12)
    assert probability_nearer([2, 3], [4, 6]) == pytest.approx(0.5)
    assert overlap_coefficient([2, 0], [0, 7]) == 0
    assert jensen_shannon_bits([2, 0], [0, 7]) == 1
    assert probability_nearer([2, 0], [0, 7]) == 1
    assert probability_nearer([0, 2], [7, 0]) == 0


@pytest.mark.parametrize("measure", [overlap_coefficient, jensen_shannon_bits, probability_nearer])
def test_histograms_that_do_not_fit_are_refused(measure):
    with pytest.raises(UserError, match="same bins"):
        measure([1, 2], [1, 2, 3])
    with pytest.raises(UserError, match="hold a pair"):
        measure([0, 0], [1, 2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_order_of_distances_counts_ties_half(positive, negative):
    positive, negative = np.array(positive, np.float32) / 3, np.array(negative, np.float32) / 3
    pairs = [(a < b) + (a == b) / 2 for a in positive for b in negative]
    assert share_ordered(positive, negative) == pytest.approx(np.mean(pairs), abs=1e-12)
    truth = np.r_[np.zeros(len(positive)), np.ones(len(negative))]
    assert share_ordered(positive, negative) == pytest.approx(roc_auc_score(truth, np.r_[positive, negative]), abs=1e-9)


def test_distances_however_close_are_no_ties():
    assert share_ordered([1.0], [1.0 + 1e-15]) == 1
    assert share_ordered([1.0 + 1e-15], [1.0]) == 0
    with pytest.raises(UserError, match="hold a pair"):
        share_ordered([], [1.0])


def test_figures_match_those_of_all_pairs():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 10)
    embeddings = rng.normal(size=(12, 6))[labels] + 0.6 * rng.normal(size=(120, 6))
    figures = evaluate_overlap(embeddings, labels, bins=20)
    positive, negative = all_distances(embeddings, labels, "euclidean")
    edges = np.linspace(min(positive.min(), negative.min()), max(positive.max(), negative.max()) + 1e-9, 21)
    p, q = np.histogram(positive, edges)[0], np.histogram(negative, edges)[0]
    truth = np.repeat([1, 0], [len(positive), len(negative)])
    # The edges are those of the fine bins nearest to the reference's.
    assert figures["overlap"] == pytest.approx(np.minimum(p / p.sum(), q / q.sum()).sum(), abs=5e-3)
    assert figures["jsd_bits"] == pytest.approx(jensenshannon(p, q, base=2) ** 2, abs=5e-3)
    assert figures["auc"] == pytest.approx(roc_auc_score(truth, -np.concatenate([positive, negative])), abs=1e-4)
    assert figures["mean_positive_distance"] == pytest.approx(positive.mean(), rel=1e-5)
    assert figures["mean_negative_distance"] == pytest.approx(negative.mean(), rel=1e-5)
    assert (figures["num_positive_pairs"], figures["num_negative_pairs"]) == (len(positive), len(negative))
    assert figures["all_pairs"] is True
    assert figures["bins"] == 20


def test_normal_distributions_give_their_known_overlap():
    rng = np.random.default_rng(1)
    positive, negative = rng.normal(0, 1, 400_000), rng.normal(1, 1, 400_000)
    edges = np.linspace(-5, 6, 101)
    counts = [np.histogram(d, edges)[0] for d in (positive, negative)]
    assert overlap_coefficient(*counts) == pytest.approx(2 * stats.norm.cdf(-0.5), abs=5e-3)
    assert probability_nearer(*counts) == pytest.approx(stats.norm.cdf(2**-0.5), abs=5e-3)


def test_scaled_embeddings_have_the_same_figures():
    rng = np.random.default_rng(2)
    embeddings, labels = rng.normal(size=(90, 4)), rng.integers(0, 6, 90)
    once, scaled = evaluate_overlap(embeddings, labels), evaluate_overlap(1024 * embeddings, labels)
    for name in ("overlap", "jsd_bits", "auc"):
        assert once[name] == scaled[name]
    assert scaled["mean_negative_distance"] == pytest.approx(1024 * once["mean_negative_distance"])


def test_a_sample_comes_near_all_pairs_and_says_so():
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(20), 15)
    embeddings = rng.normal(size=(20, 5))[labels] + rng.normal(size=(300, 5))
    every = evaluate_overlap(embeddings, labels, bins=20)
    drawn = evaluate_overlap(embeddings, labels, num_pairs=50_000, bins=20, seed=1)
    assert drawn["all_pairs"] is False
    assert drawn["num_positive_pairs"] == drawn["num_negative_pairs"] == 50_000
    for name in ("overlap", "auc", "mean_positive_distance", "mean_negative_distance"):
        assert drawn[name] == pytest.approx(every[name], abs=0.03)
    assert drawn == evaluate_overlap(embeddings, labels, num_pairs=50_000, bins=20, seed=1)


@pytest.mark.parametrize(("pairs", "bins"), [(1, 2), (8, 4), (1000, 20), (10**6, 100)])
def test_bins_follow_the_number_of_the_rarer_pairs(pairs, bins):
    histogram = sample_pair_histogram([[0.0], [1.0], [2.0]], [0, 0, 1], num_pairs=pairs)
    assert default_bins(histogram) == bins


@pytest.mark.parametrize(("labels", "bins"), [([0, 0, *range(1, 20)], 2), ([0] * 20 + [1], 6)])
def test_few_pairs_of_either_kind_ask_for_wide_bins(labels, bins):
    """One positive pair of 210; 20 negative ones."""
    figures = evaluate_overlap(np.random.default_rng(0).normal(size=(21, 3)), labels)
    assert min(figures["num_positive_pairs"], figures["num_negative_pairs"]) in (1, 20)
    assert figures["bins"] == bins


def test_collapsed_embeddings_overlap_wholly():
    figures = evaluate_overlap(np.ones((6, 3)), [0, 0, 1, 1, 2, 2])
    assert (figures["overlap"], figures["jsd_bits"], figures["auc"], figures["bins"]) == (1, 0, 0.5, 1)


def test_bad_arguments_are_refused():
    with pytest.raises(UserError, match="bins must be"):
        evaluate_overlap([[0.0], [1.0], [2.0]], [0, 0, 1], bins=0)
    with pytest.raises(UserError, match="no pair of images"):
        evaluate_overlap([[0.0], [1.0]], [0, 1])
