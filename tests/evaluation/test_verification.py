"""Counts of all pairs by distance, verification over them, calibrated thresholds, and their
intervals."""

import importlib
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from tests.support.far_vectors import NAMES, far_vectors
from tests.support.marks import each_quick_once
from tfdml.data import PairList
from tfdml.errors import UserError
from tfdml.evaluation import (
    Calibration,
    accepted_rates,
    calibrate,
    evaluate_pairs,
    verification,
    verify_pairs,
)
from tfdml.evaluation.verification import AllPairs
from tfdml.registry import DISTANCES

# The package has a function of this name.
module = importlib.import_module("tfdml.evaluation.verification")


def classes(seed, num_classes, num_images, dim=8, spread=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_images)
    return (
        rng.normal(size=(num_classes, dim))[labels] + spread * rng.normal(size=(num_images, dim))
    ), labels


def all_pairs(embeddings, labels, distance):
    """Distances in float64, and whether the pair is of one class."""
    i, j = np.triu_indices(len(labels), 1)
    x, same = np.asarray(embeddings, np.float64), labels[i] == labels[j]
    if distance == "dot":
        return -np.einsum("pd,pd->p", x[i], x[j]), same
    if distance == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    squared = np.square(x[i] - x[j]).sum(axis=1)
    return {"euclidean": np.sqrt(squared), "sqeuclidean": squared, "cosine": squared / 2}[
        distance
    ], same


def check_counts(histogram, distances, same, slack):
    """Each pair is in its bin, or beyond it by at most `slack` of a distance."""
    for counts, of_kind in (
        (histogram.positive, distances[same]),
        (histogram.negative, distances[~same]),
    ):
        places, of_kind = np.repeat(np.arange(len(counts)), counts), np.sort(of_kind)
        assert len(places) == len(of_kind)
        assert (of_kind >= histogram.edges[places] - slack(of_kind)).all()
        assert (of_kind <= histogram.edges[places + 1] + slack(of_kind)).all()


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


@pytest.mark.one_quick_case
@pytest.mark.parametrize("distance", DISTANCES)
def test_rates_equal_those_of_scikit_learn(distance):
    """Of several tiles, and for cosine of a class larger than one."""
    embeddings, labels = (
        classes(0, 25, 300) if distance != "cosine" else classes(1, 6, 1400, dim=3, spread=0.8)
    )
    embeddings, fars = embeddings + 0.3, (0.5, 0.1, 0.01, 1e-3, 1e-4)
    labels[labels > 2] = 0 if distance == "cosine" else labels[labels > 2]
    result = verification(embeddings, labels, distance=distance, fars=fars)
    distances, same = all_pairs(embeddings, labels, distance)
    far, tar, _ = roc_curve(same, -distances, drop_intermediate=False)
    assert (result.num_same, result.num_different) == (same.sum(), (~same).sum())
    assert result.auc == pytest.approx(roc_auc_score(same, -distances), abs=1e-6)
    assert result.eer == pytest.approx(
        brentq(lambda x: 1 - x - interp1d(far, tar)(x), 0, 1), abs=2 / same.sum()
    )
    step = (1 / same.sum(), 1 / (~same).sum())
    for wanted, point in result.points.items():
        place = np.flatnonzero(far <= wanted)[-1]
        # Distances are float32: a pair or two may change sides.
        assert point.tar.mean == pytest.approx(tar[place], abs=2.5 * step[0])
        assert point.far.mean == pytest.approx(far[place], abs=2.5 * step[1])
        assert point.far.mean <= wanted
        below = distances <= point.threshold
        assert np.mean(below[same]) == pytest.approx(point.tar.mean, abs=2.5 * step[0])
        assert np.mean(below[~same]) == pytest.approx(point.far.mean, abs=2.5 * step[1])
        hits, false = point.tar.mean * same.sum(), point.far.mean * (~same).sum()
        assert point.precision.mean == pytest.approx(hits / (hits + false))
    for name, exact in (("far", ~same), ("tar", same)):
        shares = [np.mean(distances[exact] <= t) for t in result.roc["threshold"][::97]]
        np.testing.assert_allclose(result.roc[name][::97], shares, atol=1e-3)
    assert result.counts.positive.sum() == same.sum()
    assert result.counts.negative.sum() == (~same).sum()
    assert result.num_classes == len(np.unique(labels))


@pytest.mark.parametrize(("name", "distance"), each_quick_once(NAMES, DISTANCES))
def test_the_accepted_rate_is_at_most_that_asked_for_and_is_the_one_reported(
    name, distance, monkeypatch
):
    embeddings, labels = far_vectors(name), np.arange(40) % 9
    distances, same = all_pairs(embeddings, labels, distance)
    result = verification(embeddings, labels, distance=distance, fars=(0.3, 0.05))
    monkeypatch.setattr(module, "_BINS", 2**12)  # thresholds do not depend on the number of bins
    for far in (0.3, 0.05):
        allowed = np.sort(distances[~same])[int(far * np.sum(~same))]
        if distance != "dot" and allowed < 1e-12:
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
        assert (point.far.mean, point.tar.mean) == (
            calibration.rates["far"].mean,
            calibration.rates["tar"].mean,
        )
        assert result.points[far].threshold == calibration.threshold
        # The largest: the next pair would be one too many.
        assert calibration.threshold == pytest.approx(allowed, rel=1e-6)


def test_more_copies_of_other_classes_than_the_rate_allows_are_refused():
    embeddings, labels = np.array([[0], [0], [0], [4], [4], [8], [8.5]]) / 64, [0, 1, 2, 3, 3, 4, 4]
    for distance in ("euclidean", "sqeuclidean"):
        with pytest.raises(
            UserError, match="more than 1 of the 19 pairs of different classes are at distance 0"
        ):
            calibrate(embeddings, labels, far=0.1, distance=distance)
        threshold = calibrate(embeddings, labels, far=0.2, distance=distance).threshold
        assert 0 <= threshold < 4 / 64
        # Nothing is accepted, rather than all of the copies.
        (point,) = verification(embeddings, labels, distance=distance, fars=[0.1]).points.values()
        assert (point.far.mean, point.tar.mean) == (0, 0)


def dyadic_by_hand(embeddings, labels, distance, threshold, counted):
    """Standard errors from every pair of pairs of classes that share a class, by loops."""
    distances, _ = all_pairs(embeddings, labels, distance)
    i, j = (ends[counted] for ends in np.triu_indices(len(labels), 1))
    distances = distances[counted]
    cells = {}  # of two classes, how many pairs are accepted, and how many there are
    for a, b, hit in zip(labels[i], labels[j], distances <= threshold, strict=True):
        cell = cells.setdefault((min(a, b), max(a, b)), [0, 0])
        cell[0], cell[1] = cell[0] + hit, cell[1] + 1

    def error(numerator, denominator, kinds):
        rate = sum(map(numerator, kinds)) / sum(map(denominator, kinds))
        left = {
            kind: (numerator(kind) - rate * denominator(kind)) / sum(map(denominator, kinds))
            for kind in kinds
        }
        total = sum(left[p] * left[q] for p in kinds for q in kinds if set(p) & set(q))
        count = len({name for kind in kinds for name in kind if denominator(kind)})
        return rate, np.sqrt(total * count / (count - 1))

    hits, pairs = (lambda kind: cells[kind][0]), (lambda kind: cells[kind][1])
    within, across = (
        [kind for kind in cells if (kind[0] == kind[1]) == one_class] for one_class in (True, False)
    )
    return error(hits, pairs, within), error(hits, pairs, across), precision_by_hand(cells)


def precision_by_hand(cells):
    """The precision, and its error from the classes' parts of log hits - log false accepts."""
    names = sorted({name for kind in cells for name in kind})
    hits = sum(cell[0] for kind, cell in cells.items() if kind[0] == kind[1])
    false = sum(cell[0] for kind, cell in cells.items() if kind[0] != kind[1])
    total = own = 0.0
    for name in names:
        accepted = [cell[0] for kind, cell in cells.items() if name in kind and len({*kind}) == 2]
        of_hits = cells[name, name][0] / hits - 1 / len(names)
        of_false = sum(accepted) / false - 2 / len(names)
        total, own = total + (of_hits - of_false) ** 2, own + of_hits**2
    alone = sum((cell[0] / false) ** 2 for kind, cell in cells.items() if kind[0] != kind[1])
    rate = hits / (hits + false)
    variance = max(total - alone, own + alone) * len(names) / (len(names) - 1)
    return rate, rate * (1 - rate) * np.sqrt(variance)


@pytest.mark.parametrize("across", [False, True], ids=["all pairs", "across views"])
def test_standard_errors_equal_the_sum_over_pairs_that_share_a_class(across):
    # Some classes are nearer to all others than the rest are.
    rng = np.random.default_rng(3)
    labels = rng.integers(12, size=360)
    away = np.linspace(0.1, 2, 12)[:, None] * rng.normal(size=(12, 4))
    embeddings = 1.5 + away[labels] + 0.4 * rng.normal(size=(360, 4))
    views = rng.random(360) < 0.3 if across else None
    counted = np.ones((360, 360), bool) if views is None else views[:, None] != views
    counted = counted[np.triu_indices(360, 1)]
    distances, same = (values[counted] for values in all_pairs(embeddings, labels, "cosine"))
    ordered = np.sort(distances[~same])
    # Distances are float32: the first one refused is well above the last one accepted.
    k = len(ordered) // 5 + int(np.argmax(np.diff(ordered[len(ordered) // 5 :])[:50]))
    far = (k + 1.5) / len(ordered)
    result = verification(embeddings, labels, distance="cosine", fars=[far], views=views)
    assert (result.num_same, result.num_different) == (same.sum(), (~same).sum())
    assert result.auc == pytest.approx(roc_auc_score(same, -distances), abs=1e-4)
    calibration = calibrate(embeddings, labels, far=far, distance="cosine", views=views)
    assert calibration.threshold == result.points[far].threshold
    (point,) = result.points.values()
    expected = dyadic_by_hand(embeddings, labels, "cosine", ordered[k + 1] - 1e-6, counted)
    for interval, (rate, error) in zip(
        (point.tar, point.far, point.precision), expected, strict=True
    ):
        assert interval.mean == pytest.approx(rate)
        assert interval.standard_error == pytest.approx(error, rel=1e-6)
        assert interval.low < interval.mean < interval.high


def test_classes_of_one_pair_have_an_interval():
    labels = np.arange(20).repeat(2)
    embeddings = np.random.default_rng(0).normal(size=(40, 3))
    (point,) = verification(embeddings, labels, fars=[0.3]).points.values()
    assert 0 < point.tar.low < point.tar.mean < point.tar.high < 1


def test_the_variance_of_far_is_at_least_that_of_independent_pairs_of_classes():
    """Of three classes the estimate over classes is often below it, and may be negative."""
    floors = 0
    for seed in range(10):
        embeddings, labels = classes(seed, 3, 45, dim=2)
        distances, same = all_pairs(embeddings, labels, "euclidean")
        i, j = np.triu_indices(45, 1)
        threshold = float(np.median(distances))
        kinds = np.sort(np.stack([labels[i], labels[j]]), axis=0)[:, ~same]
        left = (distances[~same] <= threshold) - np.mean(distances[~same] <= threshold)
        of_pair = [
            left[(kinds[0] == a) & (kinds[1] == b)].sum() for b in range(3) for a in range(b)
        ]
        of_class = [left[(kinds == a).any(axis=0)].sum() for a in range(3)]
        alone, shared = np.square(of_pair).sum(), np.square(of_class).sum()
        floors += shared - alone < alone
        error = np.sqrt(max(shared - alone, alone) * 3 / 2) / len(left)
        point = accepted_rates(embeddings, labels, threshold)
        assert point.far.standard_error == pytest.approx(error, rel=1e-6)
    assert floors


def test_a_calibrated_threshold_keeps_to_the_precision_and_is_the_largest():
    embeddings, labels = classes(4, 30, 500, spread=0.5)
    distances, same = all_pairs(embeddings, labels, "cosine")
    calibration = calibrate(embeddings, labels, precision=0.8, distance="cosine")
    order = np.argsort(distances)
    precision = np.cumsum(same[order]) / np.arange(1, len(order) + 1)
    last = np.flatnonzero(precision >= 0.8)[-1]
    assert distances[order[last]] - 1e-6 < calibration.threshold < distances[order[last + 1]] + 1e-6
    assert calibration.rates["precision"].mean == pytest.approx(precision[last], abs=1e-4)
    with pytest.raises(UserError, match="no threshold reaches precision"):
        calibrate(*classes(4, 30, 500, spread=9.0), precision=0.9999)


def test_the_probability_of_same_falls_and_is_that_of_the_pairs():
    embeddings, labels = classes(5, 20, 400, spread=0.7)
    distances, same = all_pairs(embeddings, labels, "cosine")
    calibration = calibrate(embeddings, labels, far=0.01, distance="cosine")
    probabilities = calibration.probability(distances)
    assert np.all(np.diff(calibration.probability(np.linspace(0, 2, 500))) <= 0)
    for part in np.array_split(np.argsort(distances), 12):
        assert probabilities[part].mean() == pytest.approx(same[part].mean(), abs=0.02)
    assert calibration.prior == pytest.approx(same.mean())
    even = calibrate(embeddings, labels, far=0.01, distance="cosine", prior=0.5).probability(
        distances
    )
    odds = probabilities / (1 - probabilities) * (1 - same.mean()) / same.mean()
    inner = (probabilities > 0.01) & (probabilities < 0.9)
    np.testing.assert_allclose(even[inner], (odds / (1 + odds))[inner], atol=0.02)


def test_a_calibration_survives_json():
    calibration = calibrate(*classes(5, 20, 200), far=0.01, distance="euclidean")
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert (again.threshold, again.rates, again.target) == (
        calibration.threshold,
        calibration.rates,
        "far=0.01",
    )
    np.testing.assert_array_equal(
        again.probability([0.5, 2.0]), calibration.probability([0.5, 2.0])
    )
    with pytest.raises(UserError, match="it is of another version"):
        Calibration.from_dict({"threshold": 1.0})


def test_accuracy_by_folds_is_that_of_thresholds_of_the_other_folds():
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.5
    distances = np.round(rng.normal(np.where(same, 0.4, 0.7), 0.15), 2)
    expected = []
    for k in range(10):
        test = np.arange(200) * 10 // 200 == k
        candidates = np.unique(distances[~test])
        between = np.concatenate(
            [[candidates[0] - 1], (candidates[1:] + candidates[:-1]) / 2, candidates[-1:]]
        )
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
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 1], far=0.1, precision=0.9), "give one"),
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 1], far=0.01), "100 pairs"),
        (lambda: verify_pairs([0.1, np.nan], [True, False]), "finite"),
        (lambda: verify_pairs([0.1, 0.2, 0.3, 0.4], [1, -1, 1, -1], 2), "same: value 1 is -1"),
        (lambda: verify_pairs([0.1, 0.2], [1.0, 0.5]), "same: value 1 is 0.5"),
        (lambda: verify_pairs([0.1, 0.2], [1.0, np.nan]), "same: value 1 is nan"),
        (lambda: verify_pairs([0.1, 0.2], ["same", "no"]), "same: value 0 is 'same'"),
        (lambda: verify_pairs([0.1, 0.2], [1]), "same must be 2 of true or false"),
        (lambda: verification(np.eye(4), [0, 0, 1, 1], views=[1, 2, 1, 2]), "views: value 1 is 2"),
        (lambda: PairList([[0, 1], [0, 2]], [1, -1]), "is_similar: value 1 is -1"),
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
    found = evaluate_pairs(
        x, PairList(np.stack(np.triu_indices(20, 1), axis=1), same.astype(float)), distance
    )
    assert {*found} == {"accuracy", "auc", "eer"}
    assert found["auc"] == pytest.approx(roc_auc_score(same, -distances), abs=1e-4)


def test_triplets_are_counted_and_given_pairs_are_checked():
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(20, 4)), np.arange(20).reshape(10, 2)
    triplets = rng.permuted(np.tile(np.arange(20), (30, 1)), axis=1)[:, :3]
    nearer = [np.linalg.norm(x[a] - x[p]) < np.linalg.norm(x[a] - x[n]) for a, p, n in triplets]
    assert evaluate_pairs(x, PairList(triplets))["triplet_accuracy"] == np.mean(nearer)
    with pytest.raises(
        UserError, match=r"row 0 is .*give whole numbers from 0 to 9, the rows of the images"
    ):
        evaluate_pairs(x[:10], PairList(rows[::-1], np.ones(10)))
    with pytest.raises(UserError, match="0 pairs, of which 0 are similar, are too few to measure"):
        evaluate_pairs(x, PairList(rows[:0], []))
