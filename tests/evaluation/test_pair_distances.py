import importlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from sklearn.metrics import roc_auc_score

from tests import references
from tests.far_vectors import NAMES, far_vectors
from tfdml.evaluation.generalization import default_bins, jensen_shannon_bits, overlap_coefficient
from tfdml.evaluation.verification import AllPairs, PairHistogram, probability_nearer
from tfdml.pairwise import DISTANCES

# The package has a function of this name.
module = importlib.import_module("tfdml.evaluation.verification")


def all_distances(embeddings, labels, distance):
    """Every d+ and every d-, by loops in float64."""
    found = {True: [], False: []}
    for i in range(len(embeddings)):
        for j in range(i):
            value = references.distance(embeddings[i], embeddings[j], distance)
            found[bool(labels[i] == labels[j])].append(value)
    return np.array(found[True]), np.array(found[False])


def area_bounds(positive, negative, width):
    """The least and the largest area under the ROC curve, if distances within this share may be in either order, and
    those below 5e-10 of the largest."""
    near, far = positive[:, None], negative[None, :]
    larger = np.maximum(near, far)
    tied = np.abs(near - far) <= width * larger + 1e-14
    tied |= larger <= 5e-10 * larger.max()
    return np.mean((near < far) & ~tied) - 1e-9, np.mean((near < far) | tied) + 1e-9


def assert_same_counts(counts, distances, edges, slack):
    """Cumulated counts are between those of the distances moved by `slack` either way."""
    above = np.cumsum(counts)
    assert counts.sum() == len(distances)
    assert (above <= [(distances <= edge + slack).sum() for edge in edges[1:]]).all()
    assert (above >= [(distances < edge - slack).sum() for edge in edges[1:]]).all()


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("tile", [7, 1024])
def test_every_pair_is_counted_in_its_bin(distance, tile, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(2, 1, size=(60, 5)).astype(np.float32), rng.integers(0, 9, 60) * 10**12
    histogram = AllPairs(embeddings, labels, distance).histogram.rebinned(50)
    positive, negative = all_distances(embeddings, labels, distance)
    slack = 1e-5 * max(abs(histogram.edges[0]), histogram.edges[-1])
    assert_same_counts(histogram.positive, positive, histogram.edges, slack)
    assert_same_counts(histogram.negative, negative, histogram.edges, slack)
    assert histogram.mean_positive == pytest.approx(positive.mean(), rel=1e-5)
    assert histogram.mean_negative == pytest.approx(negative.mean(), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=3, max_size=40),
    scale=st.sampled_from([1e-18, 1e-3, 1.0, 1e12]),
    tile=st.sampled_from([3, 16]),
)
def test_ties_and_duplicates_at_any_scale(values, scale, tile):
    embeddings = np.array([[x] for x, _ in values], np.float32) * np.float32(scale)
    labels = np.array([c for _, c in values])
    assume(1 < len(np.unique(labels)) < len(labels))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE", tile)
        patch.setattr(module, "_BINS", 2**10)
        histogram = AllPairs(embeddings, labels).histogram
    positive, negative = all_distances(embeddings, labels, "euclidean")
    slack = 1e-3 * histogram.edges[-1]
    assert_same_counts(histogram.positive, positive, histogram.edges, slack)
    assert_same_counts(histogram.negative, negative, histogram.edges, slack)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", NAMES)
def test_far_vectors_do_not_blur_the_distances_of_others(name, distance):
    embeddings, labels = far_vectors(name), np.arange(40) % 9
    histogram = AllPairs(embeddings, labels, distance).histogram
    positive, negative = all_distances(embeddings, labels, distance)
    # Each pair is in its bin, or a little beyond, also those that are near.
    for counts, distances in ((histogram.positive, positive), (histogram.negative, negative)):
        places, distances = np.sort(np.repeat(np.arange(len(counts)), counts)), np.sort(distances)
        slack = 1e-4 * np.abs(distances) + 1e-15 + (1e-6 * histogram.edges[-1] if distance == "dot" else 0)
        assert (distances >= histogram.edges[places] - slack).all()
        assert (distances <= histogram.edges[places + 1] + slack).all()
    if distance != "dot":
        least, most = area_bounds(positive, negative, 3e-4)
        assert least <= probability_nearer(histogram.positive, histogram.negative) <= most
    assert histogram.mean_positive == pytest.approx(positive.mean(), rel=1e-5, abs=1e-6)
    assert histogram.mean_negative == pytest.approx(negative.mean(), rel=1e-5, abs=1e-6)


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


@pytest.mark.parametrize(("pairs", "bins"), [(1, 2), (8, 4), (1000, 20), (10**6, 100)])
def test_bins_follow_the_number_of_the_rarer_pairs(pairs, bins):
    histogram = PairHistogram(np.arange(3.0), np.array([pairs, 0]), np.array([0, 2 * pairs]), 0.5, 1.5)
    assert default_bins(histogram) == bins
