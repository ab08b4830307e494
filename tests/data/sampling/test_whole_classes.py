"""Batches of whole classes: full, distinct, resumable, and as many a pass as any order can fill."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.sampling import WholeClassSampler
from tfdml.errors import UserError


def labels_of(counts, seed=0):
    labels = np.repeat(np.arange(len(counts)) * 10 - 7, counts)
    return np.random.default_rng(seed).permutation(labels)


def fewest_batches(counts, batch_size):
    """The batches that every order is sure to fill: each uses up what it holds before its last class, and that."""
    counts = sorted((min(count, batch_size) for count in counts), reverse=True)
    before_last = max(size for size in range(0, batch_size, math.gcd(*counts)))
    batches, used = 0, 0
    while used + batch_size <= sum(counts):
        used += before_last + counts[batches]
        batches += 1
    return batches


counts_and_size = st.lists(st.integers(1, 12), min_size=1, max_size=60).flatmap(
    lambda counts: st.tuples(st.just(counts), st.integers(1, sum(counts)))
)


@given(counts_and_size, st.integers(0, 10**6), st.integers(0, 2**40))
@settings(max_examples=200, deadline=None)
def test_a_pass(case, number, seed):
    counts, batch_size = case
    labels = labels_of(counts)
    sizes = dict(zip(*np.unique(labels, return_counts=True), strict=True))
    sampler = WholeClassSampler(labels, batch_size, seed)
    steps = sampler.steps_per_epoch
    assert steps == fewest_batches(counts, batch_size)
    batches = [sampler.batch(number * steps + i) for i in range(steps)]
    seen = set()
    for batch in batches:
        assert batch.dtype == np.int64
        assert batch.shape == (batch_size,)
        classes, first = np.unique(labels[batch], return_index=True)
        classes = classes[np.argsort(first)]
        assert (labels[batch] == np.repeat(classes, [(labels[batch] == c).sum() for c in classes])).all(), "grouped"
        assert all((labels[batch] == c).sum() == sizes[c] for c in classes[:-1]), "whole, save the last"
        assert not seen & set(classes), "no class comes twice"
        seen |= set(classes)
    drawn = np.concatenate(batches)
    assert len(set(drawn.tolist())) == len(drawn) == steps * batch_size
    clipped = np.minimum(counts, batch_size)
    assert clipped.sum() - len(drawn) < batch_size + steps * (clipped.max() - 1)
    # Any step, in any order, in a new sampler.
    for i in reversed(range(steps)):
        np.testing.assert_array_equal(WholeClassSampler(labels, batch_size, seed).batch(number * steps + i), batches[i])


@pytest.mark.parametrize(
    ("counts", "batch_size", "steps"), [([3] * 10, 4, 5), ([2] * 10, 4, 5), ([20] * 964, 100, 192), ([5, 5], 10, 1)]
)
def test_classes_of_one_size_leave_out_only_what_is_cut(counts, batch_size, steps):
    assert WholeClassSampler(labels_of(counts), batch_size).steps_per_epoch == steps


@pytest.mark.slow
def test_images_are_drawn_evenly_over_passes():
    counts = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    labels = labels_of(counts)
    sampler = WholeClassSampler(labels, 20, seed=3)
    passes = 400
    drawn = np.zeros(len(labels))
    for step in range(passes * sampler.steps_per_epoch):
        drawn[sampler.batch(step)] += 1
    assert drawn.max() <= passes
    share = drawn / passes
    # 9 of 10 batches' worth; an image of a large class is cut a little more often than one of a small.
    expected = sampler.steps_per_epoch * 20 / len(labels)
    assert share.mean() == pytest.approx(expected)
    assert share.min() > expected - 0.12
    assert share.max() < expected + 0.12


def test_the_images_that_are_cut_are_random():
    sampler = WholeClassSampler(np.repeat([1, 2], 6), 8, seed=0)
    lasts = [set(sampler.batch(step)[-2:].tolist()) for step in range(300)]
    assert set().union(*lasts) == set(range(12))


def test_a_class_beyond_the_batch_gives_no_more_than_a_batch(caplog):
    labels = np.repeat([1, 2, 3], [50, 3, 3])
    with caplog.at_level("WARNING", logger="absl"):
        sampler = WholeClassSampler(labels, 10)
    assert "1 of 3 classes have `batch_size=10` images or more" in caplog.text
    assert sampler.steps_per_epoch == 1
    seen = {int(i) for step in range(300) for i in sampler.batch(step)}
    assert seen == set(range(56))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 7}, "`batch_size=7`, but the data has 6 images; lower `batch_size`"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, not 0"),
        ({"seed": -1}, "`seed` must not be negative"),
        ({"labels": np.array([0.5])}, "float64"),
    ],
)
def test_whole_classes_say_what_is_wrong(arguments, message):
    with pytest.raises(UserError, match=message):
        WholeClassSampler(**{"labels": np.repeat([1, 2], 3), "batch_size": 4, **arguments})


def test_the_bits_of_a_seed_do_not_change():
    """A resumed run of an older version must get the same batches."""
    assert WholeClassSampler(np.repeat(np.arange(10), 3), 7, seed=7).batch(4).tolist() == [4, 5, 3, 28, 27, 29, 6]
