import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.neighbors import KNeighborsClassifier

from tfdml.errors import UserError
from tfdml.evaluation import (
    evaluate_divergence,
    evaluate_generalization,
    evaluate_retrieval,
    generalization,
)


def groups(seed, classes, per_class, noise, shift=0.0, dim=6):
    """Classes around random means, all moved by `shift` along the first axis."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    points = rng.normal(size=(classes, dim))[labels] + noise * rng.normal(size=(len(labels), dim))
    points[:, 0] += shift
    return points.astype(np.float32), labels


def divergence_by_hand(seen, seen_labels, unseen, unseen_labels, splits):
    """Errors of scikit-learn's 1-NN classifiers, for the splits given as masks over seen and unseen images."""
    points = np.concatenate([seen, unseen]).astype(np.float64)
    sides = np.repeat([0, 1], [len(seen), len(unseen)])
    classes = np.concatenate([seen_labels, unseen_labels]) + 1000 * sides
    lambdas, divergences = [], []
    for labeled in splits:
        joint = KNeighborsClassifier(1, algorithm="brute").fit(points[labeled], classes[labeled])
        domain = KNeighborsClassifier(1, algorithm="brute").fit(points[labeled], sides[labeled])
        wrong = {"class": [[], []], "side": [[], []]}
        rest = np.flatnonzero(~labeled)
        for i, c, side in zip(rest, joint.predict(points[rest]), domain.predict(points[rest]), strict=True):
            wrong["class"][sides[i]].append(c != classes[i])
            wrong["side"][sides[i]].append(side != sides[i])
        lambdas.append(np.mean(wrong["class"][0]) + np.mean(wrong["class"][1]))
        divergences.append(1 - (np.mean(wrong["side"][0]) + np.mean(wrong["side"][1])) / 2)
    return np.array(lambdas), np.array(divergences)


@pytest.mark.parametrize("labeled", [0.15, 0.5, 0.9])
def test_errors_are_those_of_nearest_neighbor_classifiers(labeled, monkeypatch):
    splits, split = [], generalization._split
    monkeypatch.setattr(generalization, "_split", lambda *arguments: splits.append(split(*arguments)) or splits[-1])
    seen, unseen = groups(0, 7, 8, 0.5), groups(1, 5, 12, 0.7, shift=0.5)
    figures = evaluate_divergence(*seen, *unseen, labeled=labeled, repeats=3, seed=5)
    lambdas, divergences = divergence_by_hand(*seen, *unseen, splits)
    for name, values in (
        ("lambda", lambdas),
        ("h_divergence", divergences),
        ("lambda_plus_h_divergence", lambdas + divergences),
        ("joint_error", lambdas / 2),
    ):
        assert figures[name] == pytest.approx(values.mean())
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        assert figures[f"{name}_ci95"] == pytest.approx((high - low) / 2)
    assert figures["joint_error_seen"] + figures["joint_error_unseen"] == pytest.approx(figures["lambda"])
    assert figures["domain_error"] == pytest.approx(1 - divergences.mean())
    assert figures["proxy_a_distance"] == pytest.approx(2 * (1 - 2 * (1 - divergences.mean())))
    assert (figures["held_out_seen"], figures["held_out_unseen"]) == ((~splits[0][:56]).sum(), (~splits[0][56:]).sum())


def test_all_that_applies_is_there_under_its_name_and_no_more():
    train, test = groups(0, 10, 9, 0.7, dim=4), groups(1, 10, 9, 0.7, dim=4)
    expected = evaluate_divergence(*train, *test, seed=3, repeats=4)
    for side, (embeddings, labels) in (("seen", train), ("unseen", test)):
        measures = evaluate_retrieval(embeddings, labels, ks=(1,), metrics=("recall",))
        expected[f"{side}_recall@1"] = measures["recall@1"]
    measured = evaluate_generalization(*test, *train, seed=3, repeats=4)
    assert measured == expected == json.loads(json.dumps(measured, allow_nan=False))
    assert set(evaluate_generalization(np.eye(4), [0, 1, 2, 3], *train)) == {"seen_recall@1"}
    assert evaluate_generalization(np.eye(4), [0, 0, 0, 0]) == {}
    with pytest.raises(UserError, match="unseen classes: none has two images"):
        evaluate_divergence(*train, np.eye(4), [0, 1, 2, 3])
    with pytest.raises(UserError, match="labeled must be"):
        evaluate_divergence(*train, *test, labeled=1.0)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=8), labeled=st.floats(0.01, 0.99), seed=st.integers(0, 99)
)
def test_each_class_is_split_by_its_share(counts, labeled, seed):
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    mask = generalization._split(classes, labeled, rng)
    for c, count in enumerate(counts):
        chosen = mask[classes == c].sum()
        if count == 1:
            assert chosen == 1
        else:
            assert 1 <= chosen <= count - 1
            assert abs(chosen - labeled * count) <= 0.5 + 1e-9 or chosen in (1, count - 1)


def test_ends_of_the_scales():
    apart = evaluate_divergence(*groups(4, 6, 8, 0.01), *groups(5, 6, 8, 0.01, shift=50))
    assert (apart["lambda"], apart["h_divergence"], apart["proxy_a_distance"]) == (0, 1, 2)
    rng = np.random.default_rng(6)
    noise, labels = rng.normal(size=(1500, 3)), np.arange(1500) % 50
    chance = evaluate_divergence(noise, labels, rng.normal(size=(500, 3)), labels[:500])
    assert chance["h_divergence"] == pytest.approx(0.5, abs=0.03)
    assert chance["lambda"] > 1.8
