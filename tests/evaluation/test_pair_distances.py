"""Counts of all pairs by distance, and the measures of such counts."""

import importlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from tests import references
from tests.far_vectors import NAMES, far_vectors
from tfdml.evaluation.verification import AllPairs, probability_nearer
from tfdml.pairwise import DISTANCES

# The package has a function of this name.
module = importlib.import_module("tfdml.evaluation.verification")


def all_pairs(embeddings, labels, distance):
    """Distances in float64 by loops, and whether the pair is of one class."""
    pairs = [(i, j) for i in range(len(labels)) for j in range(i)]
    distances = [references.distance(embeddings[i], embeddings[j], distance) for i, j in pairs]
    return np.array(distances), np.array([labels[i] == labels[j] for i, j in pairs])


def area_bounds(distances, same, width):
    """The least and the largest area under the ROC curve, if distances within this share may be in either order, and
    those below 5e-10 of the largest."""
    near, far = distances[same][:, None], distances[~same][None, :]
    larger = np.maximum(near, far)
    tied = np.abs(near - far) <= width * larger + 1e-14
    tied |= larger <= 5e-10 * larger.max()
    return np.mean((near < far) & ~tied) - 1e-9, np.mean((near < far) | tied) + 1e-9


def check_counts(histogram, distances, same, slack):
    """Each pair is in its bin, or beyond it by at most `slack` of a distance."""
    for counts, of_kind in ((histogram.positive, distances[same]), (histogram.negative, distances[~same])):
        places, of_kind = np.repeat(np.arange(len(counts)), counts), np.sort(of_kind)
        assert len(places) == len(of_kind)
        assert (of_kind >= histogram.edges[places] - slack(of_kind)).all()
        assert (of_kind <= histogram.edges[places + 1] + slack(of_kind)).all()


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("tile", [7, 1024])
@pytest.mark.parametrize("bins", [50, None])
def test_every_pair_is_counted_in_its_bin(distance, tile, bins, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(2, 1, size=(60, 5)).astype(np.float32), rng.integers(0, 9, 60) * 10**12
    histogram = AllPairs(embeddings, labels, distance).histogram
    histogram = histogram.rebinned(bins) if bins else histogram
    distances, same = all_pairs(embeddings, labels, distance)
    largest = np.abs(distances).max()
    check_counts(histogram, distances, same, lambda x: 1e-5 * largest)
    assert histogram.mean_positive == pytest.approx(distances[same].mean(), rel=1e-5)
    assert histogram.mean_negative == pytest.approx(distances[~same].mean(), rel=1e-5)


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
    distances, same = all_pairs(embeddings, labels, "euclidean")
    check_counts(histogram, distances, same, lambda x: 1e-3 * histogram.edges[-1])


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", NAMES)
def test_far_vectors_do_not_blur_the_distances_of_others(name, distance):
    embeddings, labels = far_vectors(name), np.arange(40) % 9
    histogram = AllPairs(embeddings, labels, distance).histogram
    distances, same = all_pairs(embeddings, labels, distance)
    end = 1e-6 * histogram.edges[-1] if distance == "dot" else 0
    check_counts(histogram, distances, same, lambda x: 1e-4 * np.abs(x) + 1e-15 + end)
    assert histogram.mean_positive == pytest.approx(distances[same].mean(), rel=1e-5, abs=1e-6)
    assert histogram.mean_negative == pytest.approx(distances[~same].mean(), rel=1e-5, abs=1e-6)


COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(p=COUNTS, q=COUNTS)
def test_the_area_under_the_curve_is_that_of_a_classifier(p, q):
    size = min(len(p), len(q))
    p, q = np.array(p[:size]), np.array(q[:size])
    assume(p.any() and q.any())
    # As a classifier that is sure of "one class" the nearer the bin.
    truth = np.repeat([1, 0], [p.sum(), q.sum()])
    nearness = np.concatenate([np.repeat(-np.arange(size), p), np.repeat(-np.arange(size), q)])
    assert probability_nearer(p, q) == pytest.approx(roc_auc_score(truth, nearness), abs=1e-9)
