"""Batches of a few super-classes: distinct, complete and in proportion."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tfdml.data.sampling import HierarchicalSampler
from tfdml.errors import UserError


def data_of(classes_per_kind, images=3, seed=0):
    """Labels and super-labels, shuffled; ids neither contiguous nor in the order of the super-classes."""
    kinds = np.repeat(np.arange(len(classes_per_kind)) * 5 - 4, classes_per_kind)
    labels = np.random.default_rng(seed).permutation(len(kinds)) * 3 + 1
    order = np.random.default_rng(seed + 1).permutation(len(kinds) * images)
    return np.repeat(labels, images)[order], np.repeat(kinds, images)[order]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["proportional", "uniform"]),
    st.sampled_from(["merge", "drop"]),
    st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_batches(classes_per_kind, group, rows, images_per_class, weights, short, step):
    labels, kinds = data_of(classes_per_kind)
    kind_of = dict(zip(labels.tolist(), kinds.tolist(), strict=True))
    pool = sum(count for count in classes_per_kind if count < group)
    is_short = {k for k, count in Counter(kind_of.values()).items() if count < group}
    enough = sum(count >= group for count in classes_per_kind) + (short == "merge" and pool >= group)
    arguments = (labels, kinds, group * rows, images_per_class, rows)
    if enough < rows:
        with pytest.raises(UserError, match=f"`super_classes_per_batch={rows}`, but the data has {enough} super-cl"):
            HierarchicalSampler(*arguments, weights=weights, short_super_classes=short)
        return
    sampler = HierarchicalSampler(*arguments, seed=5, weights=weights, short_super_classes=short)
    batch = sampler.batch(step)
    assert batch.dtype == np.int64
    assert batch.shape == (sampler.batch_size,) == (group * rows * images_per_class,)
    groups = labels[batch].reshape(rows, group, images_per_class)
    assert (groups == groups[..., :1]).all(), "rows are grouped by class"
    assert len(set(groups.reshape(-1).tolist())) == group * rows, "classes are distinct"
    # Merged super-classes count as one.
    of = [{"rest" if kind_of[c] in is_short else kind_of[c] for c in row[:, 0].tolist()} for row in groups]
    assert all(len(kind) == 1 for kind in of), "each part of a batch is of one super-class"
    assert len(set().union(*of)) == rows, "super-classes are distinct"
    assert short == "merge" or "rest" not in set().union(*of)
    np.testing.assert_array_equal(
        HierarchicalSampler(*arguments, seed=5, weights=weights, short_super_classes=short).batch(step), batch
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_in_proportion_every_class_comes_equally_often(rows):
    classes_per_kind = [4, 6, 8, 12, 10, 2]
    labels, kinds = data_of(classes_per_kind)
    sampler = HierarchicalSampler(labels, kinds, 2 * rows, 1, rows, seed=1)
    per_pass = sum(classes_per_kind) // 2 // rows
    for number in range(20):
        seen = [int(c) for i in range(per_pass) for c in set(labels[sampler.batch(number * per_pass + i)].tolist())]
        assert len(seen) == len(set(seen)), "no class comes twice in a pass"
        assert len(seen) >= sum(classes_per_kind) - 2 * (rows - 1)


@pytest.mark.slow
def test_uniformly_every_super_class_comes_equally_often_and_in_all_company():
    labels, kinds = data_of([4, 6, 8, 12, 10])
    sampler = HierarchicalSampler(labels, kinds, 4, 2, 2, seed=1, weights="uniform")
    batches = [sampler.batch(step) for step in range(2000)]
    pairs = Counter(tuple(sorted(set(kinds[batch].tolist()))) for batch in batches)
    assert set(pairs) == set(itertools.combinations(sorted(set(kinds.tolist())), 2))
    share = np.array(list(pairs.values())) / 2000
    np.testing.assert_allclose(share, 0.1, atol=0.03)
    # Within a super-class, all classes come equally often too.
    small = Counter(labels[np.concatenate(batches)].tolist())
    of_smallest = np.array([small[c] for c in set(labels[kinds == -4].tolist())])
    assert of_smallest.min() > 0.85 * of_smallest.max()


@pytest.mark.slow
def test_pairs_in_proportion_meet_all_others():
    labels, kinds = data_of([8, 8, 8, 8, 8])
    sampler = HierarchicalSampler(labels, kinds, 4, 1, 2, seed=2)
    pairs = Counter(tuple(sorted(set(kinds[sampler.batch(step)].tolist()))) for step in range(3000))
    assert len(pairs) == 10
    assert min(pairs.values()) > 3000 / 10 * 0.7


def test_a_dominant_super_class_is_in_every_batch_and_no_more():
    labels, kinds = data_of([30, 2, 4])
    sampler = HierarchicalSampler(labels, kinds, 4, 1, 2, seed=0)
    dominant = np.unique(labels[kinds == -4])
    seen = Counter()
    for step in range(600):
        classes = labels[sampler.batch(step)].tolist()
        assert len(set(classes) & set(dominant.tolist())) == 2
        seen.update(set(classes) & set(dominant.tolist()))
    times = np.array([seen[c] for c in dominant.tolist()])
    assert times.sum() == 1200
    assert times.max() - times.min() <= 1, "its classes take turns over the passes"


def test_short_super_classes_are_merged_or_counted(caplog):
    labels, kinds = data_of([6, 6, 2, 1])
    with caplog.at_level("WARNING", logger="absl"):
        merged = HierarchicalSampler(labels, kinds, 3, 1)
    assert caplog.text == ""
    assert {int(c) for step in range(100) for c in labels[merged.batch(step)]} == set(labels.tolist())
    with caplog.at_level("WARNING", logger="absl"):
        HierarchicalSampler(labels, kinds, 3, 1, short_super_classes="drop")
    assert "3 of 15 classes are never sampled" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="absl"):
        HierarchicalSampler(labels, kinds, 4, 1)
    assert "3 of 15 classes are never sampled" in caplog.text, "merged, they are still too few"


def test_short_classes_are_dropped_before_super_classes_are_counted():
    labels = np.repeat(np.arange(6), [4, 4, 4, 4, 1, 1])
    kinds = np.repeat([0, 0, 1, 1, 0, 1], [4, 4, 4, 4, 1, 1])
    sampler = HierarchicalSampler(labels, kinds, 2, 2, short_classes="drop")
    assert {int(c) for step in range(50) for c in labels[sampler.batch(step)]} == {0, 1, 2, 3}
    assert sampler.steps_per_epoch == 4
    with pytest.raises(UserError, match=r"has 0 super-classes with at least 2 classes \(of 0\)"):
        HierarchicalSampler(labels, kinds, 2, 5, short_classes="drop")


def test_extreme_ids_stay_apart():
    labels = np.repeat([-(2**63), 2**63 - 1, 0, 2**53 + 1], 2)
    kinds = np.repeat([-(2**63), -(2**63), 2**63 - 1, 2**63 - 1], 2)
    sampler = HierarchicalSampler(labels, kinds, 2, 2)
    for step in range(10):
        assert len(set(kinds[sampler.batch(step)].tolist())) == 1
        assert len(set(labels[sampler.batch(step)].tolist())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"super_classes_per_batch": 3}, "`classes_per_batch=4` is no multiple of `super_classes_per_batch=3`"),
        ({"super_classes_per_batch": 4}, "=4`, but the data has 3 super-classes with at least 1 classes"),
        ({"classes_per_batch": 12}, "`super_classes_per_batch=2`, but the data has 1 super-classes with at least 6"),
        ({"super_classes_per_batch": 0}, "`super_classes_per_batch` must be at least 1"),
        ({"images_per_class": 0}, "`images_per_class` must be at least 1"),
        ({"weights": "sqrt"}, "`weights` must be proportional or uniform, not 'sqrt'"),
        ({"short_super_classes": "repeat"}, "`short_super_classes` must be merge or drop, not 'repeat'"),
        ({"short_classes": "pad"}, "`short_classes` must be repeat or drop, not 'pad'"),
        ({"super_labels": np.zeros(3, int)}, r"super_labels must be \(45,\) integers"),
        ({"super_labels": np.zeros(45)}, "not float64"),
        ({"super_labels": np.arange(45)}, r"15 classes lie in more than one super-class: class 1 in \d+ and \d+"),
    ],
)
def test_hierarchical_says_what_is_wrong(arguments, message):
    labels, kinds = data_of([5, 5, 5])
    defaults = {"labels": labels, "super_labels": kinds, "classes_per_batch": 4, "images_per_class": 2}
    with pytest.raises(UserError, match=message):
        HierarchicalSampler(**{**defaults, "super_classes_per_batch": 2, **arguments})


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_a_pass_is_as_long_as_it_can_be(classes_per_kind, rows):
    """In steps_per_pass batches, no schedule with distinct super-classes can do more."""
    assume(len(classes_per_kind) >= rows)
    labels, kinds = data_of(classes_per_kind, images=1)
    sampler = HierarchicalSampler(labels, kinds, rows, 1, rows)
    longest = max(
        length
        for length in range(sum(classes_per_kind) // rows + 1)
        if sum(min(count, length) for count in classes_per_kind) >= rows * length
    )
    seen = [c for step in range(longest) for c in labels[sampler.batch(step)].tolist()]
    assert len(seen) == len(set(seen)) == rows * longest


def test_the_bits_of_a_seed_do_not_change():
    """A resumed run of an older version must get the same batches."""
    labels, kinds = np.arange(48) // 2, np.arange(48) // 8
    assert HierarchicalSampler(labels, kinds, 4, 1, 2, seed=7).batch(4).tolist() == [10, 12, 33, 38]
