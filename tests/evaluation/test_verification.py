"""Counts of all pairs by distance, verification over them, calibrated thresholds, and their intervals."""

import importlib
import json

import numpy as np
import pytest
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from tests.far_vectors import NAMES, far_vectors
from tfdml.data import PairList
from tfdml.errors import UserError
from tfdml.evaluation import Calibration, accepted_rates, calibrate, evaluate_pairs, verification, verify_pairs
from tfdml.evaluation.verification import AllPairs
from tfdml.pairwise import DISTANCES

# The package has a function of this name.
module = importlib.import_module("tfdml.evaluation.verification")


def classes(seed, num_classes, num_images, dim=8, spread=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_images)
    return (rng.normal(size=(num_classes, dim))[labels] + spread * rng.normal(size=(num_images, dim))), labels


def all_pairs(embeddings, labels, distance):
    """Distances in float64, and whether the pair is of one class."""
    i, j = np.triu_indices(len(labels), 1)
    x, same = np.asarray(embeddings, np.float64), labels[i] == labels[j]
    if distance == "dot":
        return -np.einsum("pd,pd->p", x[i], x[j]), same
    if distance == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    squared = np.square(x[i] - x[j]).sum(axis=1)
    return {"euclidean": np.sqrt(squared), "sqeuclidean": squared, "cosine": squared / 2}[distance], same


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
@pytest.mark.parametrize("name", NAMES)
def test_far_vectors_do_not_blur_the_distances_of_others(name, distance):
    embeddings, labels = far_vectors(name), np.arange(40) % 9
    histogram = AllPairs(embeddings, labels, distance).histogram
    distances, same = all_pairs(embeddings, labels, distance)
    end = 1e-6 * histogram.edges[-1] if distance == "dot" else 0
    check_counts(histogram, distances, same, lambda x: 1e-4 * np.abs(x) + 1e-15 + end)


@pytest.mark.parametrize("distance", DISTANCES)
def test_rates_equal_those_of_scikit_learn(distance):
    """Of several tiles, and for cosine of a class larger than one."""
    embeddings, labels = classes(0, 25, 300) if distance != "cosine" else classes(1, 6, 1400, dim=3, spread=0.8)
    embeddings, fars = embeddings + 0.3, (0.5, 0.1, 0.01, 1e-3, 1e-4)
    labels[labels > 2] = 0 if distance == "cosine" else labels[labels > 2]
    result = verification(embeddings, labels, distance=distance, fars=fars)
    distances, same = all_pairs(embeddings, labels, distance)
    far, tar, _ = roc_curve(same, -distances, drop_intermediate=False)
    assert (result.num_same, result.num_different) == (same.sum(), (~same).sum())
    assert result.auc == pytest.approx(roc_auc_score(same, -distances), abs=1e-6)
    assert result.eer == pytest.approx(brentq(lambda x: 1 - x - interp1d(far, tar)(x), 0, 1), abs=2 / same.sum())
    step = (1 / same.sum(), 1 / (~same).sum())
    for wanted, point in result.points.items():
        place = np.flatnonzero(far <= wanted)[-1]
        # A threshold is exact to the width of a bin, and distances are float32: some pairs may change sides.
        assert point.tar.mean == pytest.approx(tar[place], abs=1e-4 + 2.5 * step[0])
        assert point.far.mean == pytest.approx(far[place], abs=1e-4 + 2.5 * step[1])
        assert point.far.mean <= wanted
        below = distances <= point.threshold
        assert np.mean(below[same]) == pytest.approx(point.tar.mean, abs=1e-4 + 2.5 * step[0])
        assert np.mean(below[~same]) == pytest.approx(point.far.mean, abs=1e-4 + 2.5 * step[1])
    expected = [tar[far <= share + 1e-9].max() for share in result.roc["far"][::97]]
    np.testing.assert_allclose(result.roc["tar"][::97], expected, atol=1e-2)
    assert result.counts.positive.sum() == same.sum()
    assert result.counts.negative.sum() == (~same).sum()
    assert result.num_classes == len(np.unique(labels))


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("name", NAMES)
def test_the_accepted_rate_is_at_most_that_asked_for_and_is_the_one_reported(name, distance):
    embeddings, labels = far_vectors(name), np.arange(40) % 9
    distances, same = all_pairs(embeddings, labels, distance)
    result = verification(embeddings, labels, distance=distance, fars=(0.3, 0.05))
    least, most = area_bounds(distances, same, 1e-4)
    assert least <= result.auc <= most
    for far in (0.3, 0.05):
        allowed = np.sort(distances[~same])[int(far * np.sum(~same))]
        if allowed < 1e-12:
            with pytest.raises(UserError, match="pairs of different classes are at distance 0"):
                calibrate(embeddings, labels, far=far, distance=distance)
            continue
        calibration = calibrate(embeddings, labels, far=far, distance=distance)
        for measured in (distances, distances.astype(np.float32)):
            accepted = calibration.same(measured)
            assert np.mean(accepted[~same]) <= far
            assert calibration.rates["far"].mean == pytest.approx(np.mean(accepted[~same]))
            assert calibration.rates["tar"].mean == pytest.approx(np.mean(accepted[same]))
        point = accepted_rates(embeddings, labels, calibration.threshold, distance=distance)
        assert (point.far.mean, point.tar.mean) == (calibration.rates["far"].mean, calibration.rates["tar"].mean)
        assert result.points[far].threshold == calibration.threshold
        # The largest but for the width of a bin: the next pair would be one too many.
        assert calibration.threshold == pytest.approx(allowed, rel=4e-5)


def test_more_copies_of_other_classes_than_the_rate_allows_are_refused():
    embeddings, labels = np.array([[0], [0], [0], [4], [4], [8], [8.5]]) / 64, [0, 1, 2, 3, 3, 4, 4]
    for distance in ("euclidean", "sqeuclidean"):
        with pytest.raises(UserError, match="more than 1 of the 19 pairs of different classes are at distance 0"):
            calibrate(embeddings, labels, far=0.1, distance=distance)
        threshold = calibrate(embeddings, labels, far=0.2, distance=distance).threshold
        assert 0 <= threshold < 4 / 64
        # Nothing is accepted, rather than all of the copies.
        (point,) = verification(embeddings, labels, distance=distance, fars=[0.1]).points.values()
        assert (point.far.mean, point.tar.mean) == (0, 0)


def test_a_calibration_survives_json():
    calibration = calibrate(*classes(5, 20, 200), far=0.01, distance="euclidean")
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert (again.threshold, again.rates, again.target) == (calibration.threshold, calibration.rates, "far=0.01")
    with pytest.raises(UserError, match="a calibration has the values"):
        Calibration.from_dict({"threshold": 1.0})


def test_standard_errors_are_those_of_a_jackknife_over_classes():
    embeddings, labels = classes(3, 12, 90, dim=4)
    distances, same = all_pairs(embeddings, labels, "euclidean")
    threshold = float(np.quantile(distances, 0.3))
    ends = labels[np.stack(np.triu_indices(90, 1))]
    point = accepted_rates(embeddings, labels, threshold)
    for rate, kind in ((point.tar, same), (point.far, ~same)):
        without = [np.mean(distances[kind & (ends != label).all(axis=0)] <= threshold) for label in range(12)]
        assert rate.mean == np.mean(distances[kind] <= threshold)
        assert rate.standard_error == pytest.approx(np.std(without) * 11**0.5, rel=1e-6)
        assert rate.low < rate.mean < rate.high


@pytest.mark.slow
def test_the_interval_holds_the_rate_of_other_classes():
    """Classes of unequal width, so that rates vary with the classes; about 95 of 100 intervals hold."""
    rng = np.random.default_rng(6)
    held = {"far": 0, "tar": 0}
    for _ in range(100):
        halves = []
        for _ in range(2):
            spreads, labels = rng.uniform(0.3, 1.2, 40), np.repeat(np.arange(40), 8)
            points = rng.normal(size=(40, 6))[labels] + spreads[labels, None] * rng.normal(size=(320, 6))
            halves.append((points, labels))
        calibration = calibrate(*halves[0], far=0.01, distance="cosine")
        distances, same = all_pairs(*halves[1], "cosine")
        accepted = calibration.same(distances)
        held["far"] += calibration.rates["far"].low <= np.mean(accepted[~same]) <= calibration.rates["far"].high
        held["tar"] += calibration.rates["tar"].low <= np.mean(accepted[same]) <= calibration.rates["tar"].high
    # Of 100 with 95 %, fewer than 88 come once in 300 times; the seed is fixed.
    assert min(held.values()) >= 88, held


def test_accuracy_by_folds_is_that_of_thresholds_of_the_other_folds():
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.5
    distances = np.round(rng.normal(np.where(same, 0.4, 0.7), 0.15), 2)
    expected = []
    for k in range(10):
        test = np.arange(200) * 10 // 200 == k
        candidates = np.unique(distances[~test])
        between = np.concatenate([[candidates[0] - 1], (candidates[1:] + candidates[:-1]) / 2, candidates[-1:]])
        accuracies = [np.mean((distances[~test] <= t) == same[~test]) for t in between]
        best = between[int(np.argmax(accuracies))]
        expected.append(np.mean((distances[test] <= best) == same[test]))
    measures = verify_pairs(distances, same)
    assert measures["accuracy"] == pytest.approx(np.mean(expected))
    assert measures["accuracy_std"] == pytest.approx(np.std(expected, ddof=1) / np.sqrt(10))
    assert measures["auc"] == pytest.approx(roc_auc_score(same, -distances))
    assert measures == verify_pairs(distances, same, folds=np.arange(200) * 10 // 200)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 1], far=0.1, fpir=0.9), "give one of fpir="),
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 1], far=0.01), "far=0.01 needs at least 100 pairs"),
        (lambda: verify_pairs([0.1, np.nan], [True, False]), "1 of the distances are not finite"),
        (lambda: accepted_rates([[0.0], [1.0], [2.0]], [0, 0, 1], np.nan), "threshold"),
    ],
)
def test_what_makes_no_sense_is_refused(act, says):
    with pytest.raises(ValueError, match=says):
        act()


@pytest.mark.parametrize("distance", DISTANCES)
def test_given_pairs_have_the_rates_of_their_distances(distance):
    x, labels = classes(0, 5, 20)
    distances, same = all_pairs(x, labels, distance)
    found = evaluate_pairs(x, PairList(np.stack(np.triu_indices(20, 1), axis=1), same.astype(float)), distance)
    assert {*found} == {"accuracy", "auc", "eer"}
    assert found["auc"] == pytest.approx(roc_auc_score(same, -distances), abs=1e-4)


def test_triplets_are_counted_and_given_pairs_are_checked():
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(20, 4)), np.arange(20).reshape(10, 2)
    triplets = rng.permuted(np.tile(np.arange(20), (30, 1)), axis=1)[:, :3]
    nearer = [np.linalg.norm(x[a] - x[p]) < np.linalg.norm(x[a] - x[n]) for a, p, n in triplets]
    assert evaluate_pairs(x, PairList(triplets))["triplet_accuracy"] == np.mean(nearer)
    with pytest.raises(UserError, match=r"row 0 is .*the images have the rows 0 to 9"):
        evaluate_pairs(x[:10], PairList(rows[::-1], np.ones(10)))
    with pytest.raises(UserError, match="0 pairs, of which 0 are similar, are too few to measure"):
        evaluate_pairs(x, PairList(rows[:0], []))
