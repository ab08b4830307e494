import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.neighbors import KNeighborsClassifier

from tfdml.errors import UserError
from tfdml.evaluation import evaluate_divergence
from tfdml.evaluation.generalisation import divergence


def groups(seed, classes, per_class, noise, shift=0.0, dim=6):
    """Classes around random means, all moved by `shift` along the first axis."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    points = rng.normal(size=(classes, dim))[labels] + noise * rng.normal(size=(len(labels), dim))
    points[:, 0] += shift
    return points.astype(np.float32), labels


def reference(seen, seen_labels, unseen, unseen_labels, splits):
    """Errors of scikit-learn's 1-NN classifiers, for the splits given as masks over seen and unseen images."""
    points = np.concatenate([seen, unseen]).astype(np.float64)
    sides = np.repeat([0, 1], [len(seen), len(unseen)])
    classes = np.concatenate([seen_labels, unseen_labels]) + 1000 * sides
    lambdas, divergences = [], []
    for labelled in splits:
        joint = KNeighborsClassifier(1, algorithm="brute").fit(points[labelled], classes[labelled])
        domain = KNeighborsClassifier(1, algorithm="brute").fit(points[labelled], sides[labelled])
        wrong = {"class": [[], []], "side": [[], []]}
        rest = np.flatnonzero(~labelled)
        for i, c, side in zip(rest, joint.predict(points[rest]), domain.predict(points[rest]), strict=True):
            wrong["class"][sides[i]].append(c != classes[i])
            wrong["side"][sides[i]].append(side != sides[i])
        lambdas.append(np.mean(wrong["class"][0]) + np.mean(wrong["class"][1]))
        divergences.append(1 - (np.mean(wrong["side"][0]) + np.mean(wrong["side"][1])) / 2)
    return np.array(lambdas), np.array(divergences)


def splits_of(monkeypatch):
    """The splits that are drawn, as they are drawn."""
    drawn, split = [], divergence._split

    def recorded(*arguments):
        drawn.append(split(*arguments))
        return drawn[-1]

    monkeypatch.setattr(divergence, "_split", recorded)
    return drawn


@pytest.mark.parametrize("labelled", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("deepest", [1, 64])
def test_errors_are_those_of_nearest_neighbour_classifiers(labelled, deepest, monkeypatch):
    """Whether the labelled neighbour is in the list of the nearest or is searched for."""
    monkeypatch.setattr(divergence, "_DEEPEST", deepest)
    drawn = splits_of(monkeypatch)
    seen, unseen = groups(0, 7, 8, 0.5), groups(1, 5, 12, 0.7, shift=0.5)
    figures = evaluate_divergence(*seen, *unseen, labelled=labelled, repeats=3, seed=5)
    lambdas, divergences = reference(*seen, *unseen, drawn)
    assert figures["lambda"] == pytest.approx(lambdas.mean())
    assert figures["h_divergence"] == pytest.approx(divergences.mean())
    assert figures["lambda_plus_h_divergence"] == pytest.approx(lambdas.mean() + divergences.mean())
    assert figures["joint_error"] == pytest.approx(lambdas.mean() / 2)
    assert figures["joint_error_seen"] + figures["joint_error_unseen"] == pytest.approx(figures["lambda"])
    assert figures["domain_error"] == pytest.approx(1 - divergences.mean())
    assert figures["proxy_a_distance"] == pytest.approx(2 * (1 - 2 * (1 - divergences.mean())))
    assert (figures["held_out_seen"], figures["held_out_unseen"]) == (
        (~drawn[0][:56]).sum(),
        (~drawn[0][56:]).sum(),
    )
    low, high = stats.t.interval(0.95, 2, lambdas.mean(), stats.sem(lambdas))
    assert figures["lambda_ci95"] == pytest.approx((high - low) / 2)
    low, high = stats.t.interval(0.95, 2, divergences.mean(), stats.sem(divergences))
    assert figures["h_divergence_ci95"] == pytest.approx((high - low) / 2)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=8), labelled=st.floats(0.01, 0.99), seed=st.integers(0, 99)
)
def test_each_class_is_split_by_its_share(counts, labelled, seed):
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    mask = divergence._split(classes, labelled, rng)
    for c, count in enumerate(counts):
        chosen = mask[classes == c].sum()
        if count == 1:
            assert chosen == 1
        else:
            assert 1 <= chosen <= count - 1
            assert abs(chosen - labelled * count) <= 0.5 + 1e-9 or chosen in (1, count - 1)


def test_which_images_are_labelled_is_even():
    classes = np.repeat([0, 1], [6, 10])
    drawn = [divergence._split(classes, 0.5, np.random.default_rng([0, i])) for i in range(2000)]
    np.testing.assert_allclose(np.mean(drawn, axis=0), 0.5, atol=0.05)


def test_the_right_class_implies_the_right_side():
    """So 1 - d_H is at most lambda / 2."""
    for noise in (0.1, 0.5, 2.0):
        figures = evaluate_divergence(*groups(2, 9, 6, noise), *groups(3, 9, 6, noise))
        assert figures["domain_error"] <= figures["joint_error"] + 1e-12


def test_ends_of_the_scales():
    apart = evaluate_divergence(*groups(4, 6, 8, 0.01), *groups(5, 6, 8, 0.01, shift=50))
    assert (apart["lambda"], apart["h_divergence"], apart["proxy_a_distance"]) == (0, 1, 2)
    rng = np.random.default_rng(6)
    noise, labels = rng.normal(size=(1500, 3)), np.arange(1500) % 50
    chance = evaluate_divergence(noise, labels, rng.normal(size=(500, 3)), labels[:500])
    assert chance["h_divergence"] == pytest.approx(0.5, abs=0.03)
    assert chance["lambda"] > 1.8


def test_collapsed_embeddings_tell_nothing():
    """Equal distances go to the lower row, a seen image: right of seen images, wrong of unseen ones."""
    labels = np.repeat([0, 1], 40)
    figures = evaluate_divergence(np.ones((80, 3)), labels, np.ones((80, 3)), labels)
    assert figures["h_divergence"] == 0.5
    assert figures["joint_error_unseen"] == 1


def test_class_ids_of_the_two_sides_are_apart():
    seen, unseen = groups(7, 5, 8, 0.6), groups(8, 5, 8, 0.6)
    moved = (unseen[0], unseen[1] + 2**40)
    assert evaluate_divergence(*seen, *unseen) == evaluate_divergence(*seen, *moved)


def test_seeded_and_without_interval_for_one_split():
    seen, unseen = groups(9, 6, 8, 0.8), groups(10, 6, 8, 0.8)
    assert evaluate_divergence(*seen, *unseen, seed=1) == evaluate_divergence(*seen, *unseen, seed=1)
    assert evaluate_divergence(*seen, *unseen, seed=1) != evaluate_divergence(*seen, *unseen, seed=2)
    once = evaluate_divergence(*seen, *unseen, repeats=1)
    assert once["splits"] == 1
    assert not [name for name in once if name.endswith("ci95")]


def test_classes_of_one_image_are_labelled_and_not_measured():
    seen = np.array([[0.0], [0.1], [100.0]]), np.array([0, 0, 1])
    unseen = np.array([[50.0], [50.1], [100.1], [100.2]]), np.array([0, 0, 1, 2])
    figures = evaluate_divergence(*seen, *unseen)
    assert (figures["held_out_seen"], figures["held_out_unseen"]) == (1, 1)
    assert (figures["lambda"], figures["h_divergence"]) == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seen": [[0.0]]}, "seen_labels must be one class id"),
        ({"unseen": [[0.0, 1.0], [2.0, 3.0]]}, "unseen 2"),
        ({"unseen_labels": [0, 1]}, "unseen classes: none has two images"),
        ({"seen": [[0.0], [np.nan]]}, "seen embeddings: 1 of 2 rows hold NaN"),
        ({"labelled": 0.0}, "labelled must be"),
        ({"labelled": 1.0}, "labelled must be"),
        ({"repeats": 0}, "repeats must be"),
        ({"distance": "manhattan"}, "unknown distance"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {"seen": [[0.0], [1.0]], "seen_labels": [0, 0], "unseen": [[5.0], [6.0]], "unseen_labels": [0, 0]}
    with pytest.raises(UserError, match=message):
        evaluate_divergence(**(arguments | change))
