"""The protocol of disjoint parts: how images are dealt, and the interval of the parts' mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval, part_protocol, split_into_parts


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_parts_are_disjoint_even_and_hold_every_class(parts, more, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(more)) - 3, parts + np.array(more)))
    part = split_into_parts(labels, parts, seed)
    assert part.shape == labels.shape
    sizes = np.bincount(part, minlength=parts)
    assert sizes.max() - sizes.min() <= 1
    for label in set(labels):
        shares = np.bincount(part[labels == label], minlength=parts)
        assert shares.min() >= 1
        assert shares.max() - shares.min() <= 1


def test_images_are_dealt_at_random_and_by_seed():
    labels = np.repeat([0, 1], 100)
    one = split_into_parts(labels, 10, seed=1)
    np.testing.assert_array_equal(one, split_into_parts(labels, 10, seed=1))
    assert (one != split_into_parts(labels, 10, seed=2)).mean() > 0.7
    assert len(set(one[:10])) < 10  # not in the order of the rows


def made():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(6), 40))
    return rng.normal(size=(6, 4))[labels] + 0.9 * rng.normal(size=(240, 4)), labels


def test_mean_and_student_interval_of_parts_measured_each_by_itself():
    points, labels = made()
    metrics = ("recall", "map@r", "nmi")
    found = part_protocol(points, labels, parts=5, ks=(1, 2), metrics=metrics, seed=4)
    part = split_into_parts(labels, 5, seed=4)
    measured = [
        evaluate_retrieval(points[part == i], labels[part == i], ks=(1, 2), metrics=metrics, seed=0) for i in range(5)
    ]
    assert set(found) == {"recall@1", "recall@2", "map@r", "nmi"}
    for name, interval in found.items():
        values = [one[name] for one in measured]
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert interval.mean == pytest.approx(np.mean(values))
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
        assert interval.standard_error == pytest.approx(stats.sem(values))
        assert 0 < interval.standard_error < 0.1


def test_a_part_is_harder_than_the_whole():
    """A query finds fewer images of its class in its part: values compare with others of the protocol alone."""
    points, labels = made()
    whole = evaluate_retrieval(points, labels, metrics=["recall@1"])["recall@1"]
    assert part_protocol(points, labels, metrics=["recall@1"])["recall@1"].high < whole


def test_levels_and_equal_parts():
    points, labels = made()
    narrow, wide = (part_protocol(points, labels, ks=[1], level=level)["recall@1"] for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.mean == wide.mean < narrow.high < wide.high
    perfect = part_protocol(labels[:, None].astype(float), labels, ks=[1])["recall@1"]
    assert perfect == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": 1}, "at least 2; got 1"),
        ({"parts": 41}, "41 parts need 41 images of every class; 6 of 6 classes have fewer .the smallest 40"),
        ({"labels": np.arange(240)}, "240 of 240 classes have fewer .the smallest 1.. Take fewer parts, or bootstrap"),
        ({"labels": np.arange(10)}, "one class id per embedding, 240"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"embeddings": np.zeros((0, 3)), "labels": []}, "neither of them 0"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    points, labels = made()
    with pytest.raises(UserError, match=message):
        part_protocol(**{"embeddings": points, "labels": labels, **arguments})


def test_no_image_at_all():
    with pytest.raises(UserError, match="0 of 0 classes"):
        split_into_parts(np.zeros(0, int))
