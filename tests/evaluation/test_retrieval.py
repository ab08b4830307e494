"""Retrieval metrics of classes, with their intervals, and of parts of the test set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.evaluation.rankings import METRICS as METRICS_BY_HAND
from tests.evaluation.rankings import check, slow
from tfdml.errors import UserError
from tfdml.evaluation import (
    confidence_intervals,
    evaluate_clustering,
    evaluate_retrieval,
    part_protocol,
    retrieval_per_query,
    split_into_parts,
)
from tfdml.evaluation.metrics import METRICS


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_duplicates_ties_and_lonely_classes(data):
    """Integer embeddings in one or two dimensions: most distances are tied, many images
    coincide."""
    with_gallery, dim = data.draw(st.booleans()), data.draw(st.integers(1, 2))
    images = st.lists(
        st.tuples(st.integers(-2, 2), *[st.integers(-2, 2)] * dim), min_size=6, max_size=16
    )
    queries = np.array(data.draw(images))
    gallery = np.array(data.draw(images)) if with_gallery else queries
    labels, gallery_labels, sides = queries[:, 0], gallery[:, 0], (queries[:, 1:], gallery[:, 1:])
    arguments = [sides[0], labels, sides[1], gallery_labels] if with_gallery else [sides[0], labels]
    lonely = np.sum(labels[:, None] == gallery_labels, axis=1) == (0 if with_gallery else 1)
    if lonely.all() or (not with_gallery and len({*labels}) == 1):
        with pytest.raises(UserError, match="class"):
            evaluate_retrieval(*arguments, metrics=METRICS_BY_HAND)
        return
    own = (lambda query: None) if with_gallery else (lambda query: query)
    expected = slow(*sides, lambda query, row: labels[query] == gallery_labels[row], own=own)
    check(retrieval_per_query(*arguments, metrics=METRICS_BY_HAND), expected)
    result = evaluate_retrieval(*arguments, metrics=METRICS_BY_HAND)
    check(result, {name: np.nanmean(values) for name, values in expected.items()})
    assert result["queries_without_match"] == sum(lonely)


def test_every_metric_by_default_and_any_subset_by_name():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(5), 8)
    points = rng.normal(size=(5, 4))[labels] + 0.7 * rng.normal(size=(40, 4))
    everything = evaluate_retrieval(points, labels)
    counts = {"num_queries", "num_gallery", "queries_without_match"}
    recalls = {f"recall@{k}" for k in (1, 2, 4, 8)}
    assert (
        set(everything)
        == recalls | {"precision@1", "map@r", "r_precision", "nmi", "ami", "f1"} | counts
    )
    assert everything["precision@1"] == everything["recall@1"]
    names = [name.replace("@K", "@3") for name in METRICS]
    everything = evaluate_retrieval(points, labels, metrics=names)
    clustering = evaluate_clustering(points, labels)
    assert {name: everything[name] for name in clustering} == clustering
    for name in names:
        part = evaluate_retrieval(points, labels, metrics=name)
        assert set(part) == counts | {name}
        assert part == pytest.approx({key: everything[key] for key in part}, abs=1e-12)


def test_intervals_come_with_the_metrics_of_the_same_search():
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(8), 6)
    points = rng.normal(size=(8, 4))[labels] + 0.7 * rng.normal(size=(48, 4))
    metrics = ("recall@1", "map@r", "nmi")
    result = evaluate_retrieval(points, labels, metrics=metrics, intervals="classes", seed=3)
    values = retrieval_per_query(points, labels, metrics=("recall@1", "map@r"))
    assert result.pop("intervals") == confidence_intervals(values, labels, over="classes", seed=3)
    assert result == evaluate_retrieval(points, labels, metrics=metrics, seed=3)


POINTS = np.random.default_rng(4).normal(size=(6, 3))
LABELS = np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": LABELS[:5]}, "one class id"),
        ({"gallery": POINTS, "gallery_labels": LABELS + 3, "ks": (1,)}, "no class in common"),
        ({"ks": (1, 6)}, "recall@6"),
        ({"gallery": POINTS, "gallery_labels": LABELS, "own_rows": np.arange(1, 7)}, "own_rows"),
        ({"distance": "l2", "ks": (1,)}, "distance"),
        ({"embeddings": np.where(np.arange(6)[:, None] == 4, np.nan, POINTS)}, "row 4"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(**{"embeddings": POINTS, "labels": LABELS, **arguments})


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_parts_are_disjoint_even_and_hold_every_class(parts, more, seed):
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(more)) - 3, parts + np.array(more))
    )
    part = split_into_parts(labels, parts, seed)
    assert part.shape == labels.shape
    sizes = np.bincount(part, minlength=parts)
    assert sizes.max() - sizes.min() <= 1
    for label in set(labels):
        shares = np.bincount(part[labels == label], minlength=parts)
        assert shares.min() >= 1
        assert shares.max() - shares.min() <= 1


def test_mean_and_student_interval_of_parts_measured_each_by_itself():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(6), 40))
    points, metrics = (
        rng.normal(size=(6, 4))[labels] + 0.9 * rng.normal(size=(240, 4)),
        ("recall", "map@r", "nmi"),
    )
    means = part_protocol(points, labels, parts=5, ks=(1, 2), metrics=metrics, seed=4)
    part = split_into_parts(labels, 5, seed=4)
    measured = [
        evaluate_retrieval(points[part == i], labels[part == i], ks=(1, 2), metrics=metrics, seed=0)
        for i in range(5)
    ]
    assert set(means) == {"recall@1", "recall@2", "map@r", "nmi"}
    for name, interval in means.items():
        values = [one[name] for one in measured]
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert interval.mean == pytest.approx(np.mean(values))
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
        assert interval.standard_error == pytest.approx(stats.sem(values))
        assert 0 < interval.standard_error < 0.1
    for parts, message in (
        (41, "41 parts need 41 images of every class; the smallest has 40"),
        (2.5, "parts"),
    ):
        with pytest.raises(ValueError, match=message):
            part_protocol(points, labels, parts=parts)
