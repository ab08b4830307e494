import json

import numpy as np
import pytest
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
    """Errors of scikit-learn's 1-NN classifiers, for the splits given as masks over seen and unseen
    images."""
    points = np.concatenate([seen, unseen]).astype(np.float64)
    sides = np.repeat([0, 1], [len(seen), len(unseen)])
    classes = np.concatenate([seen_labels, unseen_labels]) + 1000 * sides
    lambdas, divergences = [], []
    for labeled in splits:
        joint = KNeighborsClassifier(1, algorithm="brute").fit(points[labeled], classes[labeled])
        domain = KNeighborsClassifier(1, algorithm="brute").fit(points[labeled], sides[labeled])
        wrong = {"class": [[], []], "side": [[], []]}
        rest = np.flatnonzero(~labeled)
        for i, c, side in zip(
            rest, joint.predict(points[rest]), domain.predict(points[rest]), strict=True
        ):
            wrong["class"][sides[i]].append(c != classes[i])
            wrong["side"][sides[i]].append(side != sides[i])
        lambdas.append(np.mean(wrong["class"][0]) + np.mean(wrong["class"][1]))
        divergences.append(1 - (np.mean(wrong["side"][0]) + np.mean(wrong["side"][1])) / 2)
    return np.array(lambdas), np.array(divergences)


@pytest.mark.parametrize("labeled", [0.15, 0.5, 0.9])
def test_errors_are_those_of_nearest_neighbor_classifiers(labeled, monkeypatch):
    splits, split = [], generalization._split
    monkeypatch.setattr(
        generalization, "_split", lambda *arguments: splits.append(split(*arguments)) or splits[-1]
    )
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
    assert figures["joint_error_seen"] + figures["joint_error_unseen"] == pytest.approx(
        figures["lambda"]
    )
    assert figures["domain_error"] == pytest.approx(1 - divergences.mean())
    assert figures["proxy_a_distance"] == pytest.approx(2 * (1 - 2 * (1 - divergences.mean())))
    assert (figures["held_out_seen"], figures["held_out_unseen"]) == (
        (~splits[0][:56]).sum(),
        (~splits[0][56:]).sum(),
    )


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
