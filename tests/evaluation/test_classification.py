"""Classifiers over a gallery, and what they make of queries of unknown classes."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from tfdml.errors import UserError
from tfdml.evaluation import KNNClassifier, calibrate, evaluate_classification
from tfdml.registry import PER_CLASS


def blobs(seed, classes, images, spread=0.4, dim=6):
    rng = np.random.default_rng(seed)
    labels = np.repeat(classes, images)
    centers = np.random.default_rng(99).normal(size=(40, dim))
    return (centers[labels] + spread * rng.normal(size=(len(labels), dim))).astype(
        "float32"
    ), labels


@pytest.mark.parametrize("weights", ["uniform", "distance"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_votes_equal_those_of_scikit_learn(weights, k):
    gallery, labels = blobs(0, range(8), 6, spread=1.2)
    queries, _ = blobs(1, range(8), 9, spread=1.2)
    theirs = KNeighborsClassifier(k, weights=weights).fit(gallery, labels)
    ours = KNNClassifier(gallery, labels, k=k, weights=weights, distance="euclidean").classify(
        queries
    )
    shares = theirs.predict_proba(queries)
    np.testing.assert_allclose(ours.confidences, shares.max(axis=1), rtol=1e-5)
    alone = np.sum(np.isclose(shares, shares.max(axis=1, keepdims=True)), axis=1) == 1
    assert alone.sum() > 30
    np.testing.assert_array_equal(ours.closed[alone], theirs.predict(queries)[alone])
    centers = KNNClassifier(gallery, labels, distance="euclidean", per_class="mean").classify(
        queries
    )
    np.testing.assert_array_equal(
        centers.labels, NearestCentroid().fit(gallery, labels).predict(queries)
    )


def test_softmax_weights_equal_the_formula():
    """exp(-distance / T) is exp(similarity / T) but for a factor, as in the k-NN evaluation of
    DINO."""
    gallery, labels = blobs(0, range(5), 4, spread=1.5)
    query = blobs(3, [2], 1)[0]
    unit = [
        x / np.linalg.norm(x, axis=1, keepdims=True)
        for x in (gallery.astype(float), query.astype(float))
    ]
    distances = 1 - unit[1] @ unit[0].T
    nearest = np.argsort(distances[0])[:7]
    weights = np.exp((1 - distances[0][nearest]) / 0.2)
    votes = [weights[labels[nearest] == c].sum() / weights.sum() for c in range(5)]
    found = KNNClassifier(gallery, labels, k=7, temperature=0.2, distance="cosine").classify(query)
    assert found.closed[0] == np.argmax(votes)
    assert found.confidences[0] == pytest.approx(max(votes), rel=1e-5)


def test_a_class_is_added_by_its_images():
    gallery, labels = blobs(0, range(4), 5)
    new, _ = blobs(1, [9], 5)
    for per_class in PER_CLASS:
        classifier = KNNClassifier(gallery, labels, per_class=per_class)
        assert 9 not in classifier.classify(new).labels
        classifier.add(new[:2], [9, 9])
        # The same as a gallery that has had these rows from the beginning.
        images = np.concatenate([gallery, new[:2]])
        again = KNNClassifier(images, np.append(labels, [9, 9]), per_class=per_class)
        again = again.classify(gallery)
        for name in ("labels", "distances", "confidences"):
            np.testing.assert_array_equal(
                getattr(classifier.classify(gallery), name), getattr(again, name)
            )
        assert classifier.classify(new[2:]).labels.tolist() == [9, 9, 9]
        assert classifier.classes.tolist() == [0, 1, 2, 3, 9]


def test_beyond_the_threshold_is_unknown():
    gallery, labels = blobs(0, range(4), 5, 0.15)
    held_out, held_out_labels = blobs(5, range(20, 32), 8, 0.15)
    calibration = calibrate(
        held_out,
        held_out_labels,
        fpir=0.05,
        gallery=gallery,
        gallery_labels=labels,
        distance="cosine",
    )
    classifier = KNNClassifier(gallery, labels, distance="cosine", threshold=calibration)
    assert classifier.threshold == calibration.threshold
    known, known_labels = blobs(1, range(4), 9, 0.15)
    unknown, unknown_labels = blobs(2, range(8, 14), 9, 0.15)
    found = classifier.classify(np.concatenate([known, unknown]))
    assert (found.labels == classifier.unknown).tolist() == (
        found.distances > calibration.threshold
    ).tolist()
    assert np.mean(found.labels[: len(known)] == known_labels) > 0.9
    assert np.mean(found.labels[len(known) :] == -1) > 0.8
    np.testing.assert_array_equal(found.closed[: len(known)], known_labels)
    measures = evaluate_classification(
        classifier, np.concatenate([known, unknown]), np.concatenate([known_labels, unknown_labels])
    )
    assert measures["unknown_accepted"] == np.mean(found.labels[len(known) :] != -1)
    assert measures["known_accepted"] == np.mean(found.labels[: len(known)] == known_labels)


def test_a_threshold_from_unknown_queries_keeps_to_their_share():
    gallery, labels = blobs(0, range(4), 5)
    unknown, _ = blobs(2, range(8, 18), 20)
    for per_class in PER_CLASS:
        classifier = KNNClassifier(gallery, labels, per_class=per_class)
        threshold = classifier.fit_threshold(unknown, fpir=0.1)
        accepted = classifier.classify(unknown).labels != -1
        assert accepted.mean() == 0.1
        assert classifier.classify(unknown).distances[~accepted].min() > threshold
    with pytest.raises(UserError, match="1,000 queries"):
        classifier.fit_threshold(unknown, fpir=0.001)


def by_hand(right, distances, unknown):
    """AUROC, OSCR and FNIR by stepping through every threshold."""
    thresholds = [-np.inf, *np.unique(np.concatenate([distances, unknown]))]
    correct = [np.mean(right & (distances <= t)) for t in thresholds]
    accepted = [np.mean(unknown <= t) for t in thresholds]
    area = sum(
        (accepted[i + 1] - accepted[i]) * (correct[i + 1] + correct[i]) / 2
        for i in range(len(thresholds) - 1)
    )
    auroc = np.mean([(d < u) + (d == u) / 2 for d in distances for u in unknown])
    fnir = {
        x: min(1 - c for c, a in zip(correct, accepted, strict=True) if a <= x)
        for x in (0.01, 0.1, 0.5)
    }
    return auroc, area, fnir


@pytest.mark.parametrize("ties", [False, True])
def test_open_set_measures_equal_a_walk_through_all_thresholds(ties):
    gallery, labels = blobs(0, range(10), 3, spread=1.0)
    queries, query_labels = blobs(1, range(16), 11, spread=1.0)
    if ties:
        gallery, queries = np.round(gallery), np.round(queries)
    classifier = KNNClassifier(gallery, labels, k=3, distance="euclidean")
    found = classifier.classify(queries)
    known = query_labels < 10
    right = (found.closed == query_labels)[known]
    auroc, area, fnir = by_hand(right, found.distances[known], found.distances[~known])
    measures = evaluate_classification(classifier, queries, query_labels, fpirs=tuple(fnir))
    assert measures["auroc"] == pytest.approx(auroc, abs=1e-12)
    assert measures["oscr"] == pytest.approx(area, abs=1e-12)
    for x, value in fnir.items():
        assert measures[f"fnir@fpir={x:g}"] == pytest.approx(value, abs=1e-12)
    truth, answers = query_labels[known], found.closed[known]
    assert measures["accuracy"] == pytest.approx(accuracy_score(truth, answers))
    assert measures["macro_accuracy"] == pytest.approx(balanced_accuracy_score(truth, answers))
    assert 0.3 < measures["accuracy"] < 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: KNNClassifier([[0.0]], [1]).add([[0.0, 1.0]], [2]), "dimension"),
        (lambda: KNNClassifier([[0.0]], [1], threshold=np.nan), "threshold"),
        (lambda: KNNClassifier([[0.0]], [1], distance="dot", weights="distance"), "negative"),
        (lambda: KNNClassifier([[0.0]], [1]).add([[0.0]], ["b"]), "labels"),
        (lambda: evaluate_classification(KNNClassifier([[0.0]], [1]), [[0.0]], [2]), "no query"),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_a_calibration_goes_with_its_distance_and_with_images():
    images = blobs(0, range(9), 6)
    gallery = np.ones((60, 6))
    calibration = calibrate(*images, fpir=0.05)
    with pytest.raises(UserError, match="euclidean"):
        KNNClassifier(gallery, np.arange(60), distance="cosine", threshold=calibration)
    with pytest.raises(UserError, match="pairs"):
        KNNClassifier(gallery, np.arange(60), threshold=calibrate(*images, far=0.05))
    with pytest.raises(UserError, match="of per_class='nearest', the search of 'mean'"):
        KNNClassifier(gallery, np.arange(60), per_class="mean", threshold=calibration)
    of_means = calibrate(*images, fpir=0.05, per_class="mean")
    with pytest.raises(UserError, match="of per_class='mean', the search of 'nearest'"):
        KNNClassifier(gallery, np.arange(60), threshold=of_means)
    classifier = KNNClassifier(*images, per_class="mean", threshold=of_means)
    assert classifier.threshold == of_means.threshold
