"""Batches are pure functions of (seed, step), and distinct and complete where they promise it."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data import ImageDataset, PairList, TrainTransform
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import (
    ArrayBatches,
    ClassBalancedSampler,
    HierarchicalSampler,
    NeighborSampler,
    PairSampler,
    Share,
    ShuffleSampler,
    WholeClassSampler,
    check_divides,
)
from tfdml.errors import UserError


def labels_of(counts, seed=0):
    """Labels of so many images of each class, shuffled."""
    return np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(counts)) * 10 - 7, counts)
    )


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=40),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_class_balanced_batches(counts, classes_per_batch, images_per_class, step):
    classes_per_batch = min(classes_per_batch, len(counts))
    labels = labels_of(counts, step)
    sampler = ClassBalancedSampler(labels, classes_per_batch, images_per_class, seed=5)
    batch = sampler.batch(step)
    assert batch.dtype == np.int64
    assert batch.shape == (sampler.batch_size,) == (classes_per_batch * images_per_class,)
    groups = batch.reshape(classes_per_batch, images_per_class)
    classes = labels[groups]
    assert (classes == classes[:, :1]).all(), "rows are grouped by class"
    assert len(set(classes[:, 0])) == classes_per_batch, "the classes of a batch are distinct"
    for row in groups:
        available = int((labels == labels[row[0]]).sum())
        # Whole turns through the class first: no image is a turn ahead of another.
        times = np.bincount(np.unique(row, return_inverse=True)[1])
        assert len(times) == min(available, images_per_class)
        assert times.max() - times.min() <= (1 if images_per_class % available else 0)


def test_a_pass_uses_every_class_at_most_once_and_leaves_out_others_each_time():
    labels = labels_of([2] * 23)
    sampler = ClassBalancedSampler(labels, 5, 2, seed=0)
    left_out = set()
    for number in range(150):
        used = np.concatenate([np.unique(labels[sampler.batch(number * 4 + i)]) for i in range(4)])
        assert len(used) == len(set(used)) == 20
        left_out |= set(labels) - set(used)
    assert left_out == set(labels)


def test_a_short_class_comes_in_a_new_order_each_time():
    """Three images in three turns: one order for all of them would be seen in every step, by chance
    in one of 36."""
    sampler = ClassBalancedSampler(labels_of([3, 3]), 2, 9, seed=0)
    orders = np.concatenate([sampler.batch(step).reshape(2, 3, 3) for step in range(300)])
    assert (np.sort(orders, axis=2) == np.sort(orders, axis=2)[:, :1]).all(), (
        "every turn has every image"
    )
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert (orders[:, first] == orders[:, second]).all(axis=1).mean() == pytest.approx(
            1 / 6, abs=0.05
        )


def test_short_classes_are_dropped_on_request():
    labels = labels_of([4, 2, 3, 1, 5])
    sampler = ClassBalancedSampler(labels, 3, 3, seed=0, short_classes="drop")
    seen = {int(label) for step in range(50) for label in labels[sampler.batch(step)]}
    assert seen == {-7, 13, 33}
    assert sampler.steps_per_epoch == 12 // 9
    with pytest.raises(UserError, match="classes_per_batch"):
        ClassBalancedSampler(labels, 4, 3, short_classes="drop")


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_shuffle_visits_distinct_images_in_an_epoch(num_images, batch_size, epoch):
    batch_size = min(batch_size, num_images)
    sampler = ShuffleSampler(num_images, batch_size, seed=3)
    steps = num_images // batch_size
    assert sampler.steps_per_epoch == steps
    seen = np.concatenate([sampler.batch(epoch * steps + i) for i in range(steps)])
    assert seen.dtype == np.int64
    assert len(set(seen.tolist())) == steps * batch_size
    assert seen.min() >= 0
    assert seen.max() < num_images


@pytest.mark.parametrize("width", [2, 3])
def test_a_batch_has_all_images_of_its_pairs_and_an_epoch_each_pair_once(width):
    pairs = np.random.default_rng(width).integers(0, 30, (25, width))
    sampler = PairSampler(pairs, batch_size=4 * width, seed=4)
    assert sampler.steps_per_epoch == 6
    epoch = [tuple(row) for step in range(6) for row in sampler.batch(step).reshape(-1, width)]
    order = ShuffleSampler(25, 4, seed=4)
    assert epoch == [tuple(pairs[row]) for step in range(6) for row in order.batch(step)]


def data_of(classes_per_kind, images=3, seed=0):
    """Labels and super-labels, shuffled; ids neither contiguous nor in the order of the
    super-classes."""
    kinds = np.repeat(np.arange(len(classes_per_kind)) * 5 - 4, classes_per_kind)
    labels = np.random.default_rng(seed).permutation(len(kinds)) * 3 + 1
    order = np.random.default_rng(seed + 1).permutation(len(kinds) * images)
    return np.repeat(labels, images)[order], np.repeat(kinds, images)[order]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(
        lambda classes_per_kind: classes_per_kind != [1]
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["proportional", "uniform"]),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_batches(classes_per_kind, group, rows, images_per_class, weights, step):
    labels, kinds = data_of(classes_per_kind)
    kind_of = dict(zip(labels.tolist(), kinds.tolist(), strict=True))
    pool = sum(count for count in classes_per_kind if count < group)
    is_short = {k for k, count in Counter(kind_of.values()).items() if count < group}
    enough = sum(count >= group for count in classes_per_kind) + (pool >= group)
    arguments = (labels, kinds, group * rows, images_per_class, rows)
    if enough < rows:
        with pytest.raises(
            UserError, match=f"^super_classes_per_batch={rows}: the data has {enough} super-cl"
        ):
            HierarchicalSampler(*arguments, weights=weights)
        return
    sampler = HierarchicalSampler(*arguments, seed=5, weights=weights)
    batch = sampler.batch(step)
    assert batch.dtype == np.int64
    assert batch.shape == (sampler.batch_size,) == (group * rows * images_per_class,)
    groups = labels[batch].reshape(rows, group, images_per_class)
    assert (groups == groups[..., :1]).all(), "rows are grouped by class"
    assert len(set(groups.reshape(-1).tolist())) == group * rows, "classes are distinct"
    # Merged super-classes count as one.
    of = [
        {"rest" if kind_of[c] in is_short else kind_of[c] for c in row[:, 0].tolist()}
        for row in groups
    ]
    assert all(len(kind) == 1 for kind in of), "each part of a batch is of one super-class"
    assert len(set().union(*of)) == rows, "super-classes are distinct"
    np.testing.assert_array_equal(
        HierarchicalSampler(*arguments, seed=5, weights=weights).batch(step), batch
    )


@pytest.mark.parametrize("classes_per_kind", [[7, 4], [7, 4, 9, 5], [5, 6, 10]])
@pytest.mark.parametrize("rows", [1, 2])
def test_in_proportion_the_sizes_of_super_classes_need_not_fit(classes_per_kind, rows):
    labels, kinds = data_of(classes_per_kind, images=1)
    sampler = HierarchicalSampler(labels, kinds, 4 * rows, 1, rows, seed=1)
    drawn = Counter(kinds[np.concatenate([sampler.batch(step) for step in range(2000)])].tolist())
    share = np.array([drawn[kind] for kind in sorted(drawn)]) / drawn.total()
    # No super-class is in a batch twice.
    largest = 1 / rows
    expected = np.array(classes_per_kind) / sum(classes_per_kind)
    if expected.max() > largest:
        rest = np.where(expected == expected.max(), 0, expected)
        expected = np.where(rest > 0, (1 - largest) * rest / rest.sum(), largest)
    np.testing.assert_allclose(share, expected, atol=0.02)


def test_short_classes_are_dropped_before_super_classes_are_counted():
    labels = np.repeat(np.arange(6), [4, 4, 4, 4, 1, 1])
    kinds = np.array([0, 0, 1, 1, 0, 1])[labels]
    sampler = HierarchicalSampler(labels, kinds, 2, 2, short_classes="drop")
    assert {int(c) for step in range(50) for c in labels[sampler.batch(step)]} == {0, 1, 2, 3}
    assert sampler.steps_per_epoch == 4


counts_and_size = st.lists(st.integers(1, 12), min_size=2, max_size=60).flatmap(
    lambda counts: st.tuples(st.just(counts), st.integers(1, sum(counts)))
)


@given(counts_and_size, st.integers(0, 10**6), st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_a_pass(case, number, seed):
    counts, batch_size = case
    labels = labels_of(counts)
    sizes = dict(zip(*np.unique(labels, return_counts=True), strict=True))
    sampler = WholeClassSampler(labels, batch_size, seed)
    steps = sampler.steps_per_epoch
    batches = [sampler.batch(number * steps + i) for i in range(steps)]
    seen = set()
    for batch in batches:
        assert batch.dtype == np.int64
        assert batch.shape == (batch_size,)
        classes, first = np.unique(labels[batch], return_index=True)
        classes = classes[np.argsort(first)]
        assert (
            labels[batch] == np.repeat(classes, [(labels[batch] == c).sum() for c in classes])
        ).all(), "grouped"
        assert all((labels[batch] == c).sum() == sizes[c] for c in classes[:-1]), (
            "whole, save the last"
        )
        assert not seen & set(classes), "no class comes twice"
        seen |= set(classes)
    drawn = np.concatenate(batches)
    assert len(set(drawn.tolist())) == len(drawn) == steps * batch_size
    clipped = np.minimum(counts, batch_size)
    assert clipped.sum() - len(drawn) < batch_size + steps * (clipped.max() - 1)
    # Any step, in any order, in a new sampler.
    for i in reversed(range(steps)):
        np.testing.assert_array_equal(
            WholeClassSampler(labels, batch_size, seed).batch(number * steps + i), batches[i]
        )


LABELS = np.repeat(np.arange(15), 3)
KINDS = np.repeat([0, 1, 2], 15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassBalancedSampler(LABELS, 16, 2), "classes_per_batch"),
        (lambda: HierarchicalSampler(LABELS, KINDS, 4, 2, 3), "super_classes_per_batch"),
        (lambda: HierarchicalSampler(LABELS, np.arange(45), 4, 2), "more than one super-class"),
        (lambda: ShuffleSampler(10, 11), "batch_size"),
        (lambda: PairSampler(np.zeros((25, 2)), 52), "batch_size"),
        (lambda: Share(ShuffleSampler(100, 10), 0, 3), "3 workers"),
        (lambda: Share(ShuffleSampler(100, 10), 2, 2), "worker 2"),
        (lambda: check_divides(10, 4, "replicas"), "replicas"),
        (lambda: PairSampler(np.zeros((0, 2)), 2), "0 pairs"),
        (lambda: WholeClassSampler(LABELS, 46), "batch_size=46: the data has 45 images"),
        (lambda: ShuffleSampler(45, 46), "batch_size=46: the data has 45 images"),
        (lambda: PairSampler([[0, 1], [0, -1]], 2), "row 1"),
        (lambda: PairSampler([[0, 4.7], [0, 1]], 2), "row 0"),
        (lambda: PairSampler([[0, np.nan], [0, 1]], 2), "row 0"),
        (lambda: PairSampler([[0, 1, 2, 3]], 2), "pairs must be"),
        (lambda: PairList([[0, 1], [2]], [1, 1]), "pairs must be"),
        (lambda: PairSampler([["a", "b"]], 2), "pairs must be"),
    ],
)
def test_settings_that_no_batch_can_have_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ClassBalancedSampler(LABELS, 4, 2, seed),
        lambda seed: HierarchicalSampler(LABELS, KINDS, 4, 2, 2, seed),
        lambda seed: NeighborSampler(LABELS, 4, 2, seed),
        lambda seed: WholeClassSampler(LABELS, 8, seed),
        lambda seed: ShuffleSampler(45, 8, seed),
        lambda seed: PairSampler(np.arange(44).reshape(-1, 2), 8, seed),
    ],
)
def test_a_batch_is_a_function_of_seed_and_step(make):
    """Whatever was asked for before."""
    sampler = make(1)
    backwards = [sampler.batch(step).tolist() for step in reversed(range(40))][::-1]
    assert [make(1).batch(step).tolist() for step in range(40)] == backwards
    assert make(2).batch(0).tolist() != backwards[0]
    assert len({tuple(sorted(batch)) for batch in backwards}) > 30
    sampler.batch(3)[:] = 0
    assert sampler.batch(3).tolist() == backwards[3], "what a caller changes is its own"


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_shares_put_together_are_the_batch(count, each, step):
    sampler = ShuffleSampler(100, count * each, seed=2)
    shares = [Share(sampler, index, count) for index in range(count)]
    assert {(part.batch_size, part.steps_per_epoch) for part in shares} == {
        (each, sampler.steps_per_epoch)
    }
    np.testing.assert_array_equal(
        np.concatenate([part.batch(step) for part in shares]), sampler.batch(step)
    )


def test_array_batches_are_those_of_the_sampler():
    x, y = np.arange(12), np.repeat([7, 5, 9, 2], 3)
    sampler = ClassBalancedSampler(y, 2, 2, seed=3)
    batches = ArrayBatches(x, y, sampler)
    assert len(batches) == sampler.steps_per_epoch == 3
    for _ in range(2):
        for index in range(3):
            images, labels = batches[index]
            rows = sampler.batch(3 * batches.epoch + index)
            np.testing.assert_array_equal(images, x[rows])
            np.testing.assert_array_equal(labels, y[rows])
        batches.on_epoch_end()
    batches.on_epoch_begin(7)  # as a callback of `fit`
    batches.on_epoch_end(7)
    batches.on_train_end()
    assert batches.epoch == 8
    with pytest.raises(UserError, match="x: has 12 images and y has 11 labels"):
        ArrayBatches(x, y[1:], sampler)


@pytest.mark.parametrize("short_classes", ["repeat", "drop"])
def test_neighbor_batches_hold_the_classes_of_the_table_after_their_anchors(short_classes):
    counts = [3, 1, 2, 4, 2, 5, 2, 3]
    labels = labels_of(counts)
    ids = np.unique(labels)
    kept = [c for c, count in enumerate(counts) if count >= 2 or short_classes == "repeat"]
    sampler = NeighborSampler(labels, 5, 2, seed=3, short_classes=short_classes, anchor_classes=2)
    before = [sampler.batch(step).tolist() for step in range(12)]
    table = np.array(
        [[1, 2, -1], [0, 2, 3], [3, 1, 0], [2, 1, 5], [5, 6, 7], [4, 6, 7], [7, 4, 5], [6, 5, 1]]
    )
    sampler.update(table, first_step=4)
    anchors = []
    for step in range(12):
        rows = sampler.batch(step)
        if step < 4:
            assert rows.tolist() == before[step]
        classes = [int(np.searchsorted(ids, label)) for label in labels[rows][::2]]
        assert len(set(classes)) == 5
        assert set(classes) <= set(kept)
        assert (labels[rows].reshape(5, 2) == ids[classes][:, None]).all()
        anchors.append(classes[:2])
        if step >= 4:
            wanted = [
                c for rank in range(3) for c in (table[classes[0], rank], table[classes[1], rank])
            ]
            wanted = [c for c in dict.fromkeys(wanted) if c in kept and c not in classes[:2]][:3]
            assert classes[2 : 2 + len(wanted)] == wanted
    # Within a pass no class is an anchor twice.
    passes = len(kept) // 2
    for first in range(0, 12 - passes + 1, passes):
        assert len(set(itertools.chain(*anchors[first : first + passes]))) == 2 * passes
    # The table alone decides: another sampler that is given it, as where a run is resumed, makes
    # the same batches.
    resumed = NeighborSampler(labels, 5, 2, seed=3, short_classes=short_classes, anchor_classes=2)
    resumed.update(table, first_step=4)
    assert all((resumed.batch(step) == sampler.batch(step)).all() for step in range(4, 12))


FORMS = {
    "column": lambda labels: labels[:, None],
    "whole floats": lambda labels: labels.astype("float64"),
    "booleans": lambda labels: labels > labels.min(),
    "list": lambda labels: labels.tolist(),
}
CLASS_SAMPLERS = {
    "balanced": lambda labels: ClassBalancedSampler(labels, 2, 2),
    "neighbor": lambda labels: NeighborSampler(labels, 2, 2, anchor_classes=1),
    "whole classes": lambda labels: WholeClassSampler(labels, 4),
    "hierarchical": lambda labels: HierarchicalSampler(labels, labels, 2, 2, 2),
    "arrays": lambda labels: (
        ArrayBatches(np.zeros((8, 1)), labels, ClassBalancedSampler(labels, 2, 2)).sampler
    ),
}


@pytest.mark.parametrize("make", CLASS_SAMPLERS.values(), ids=CLASS_SAMPLERS)
def test_samplers_take_and_refuse_labels_as_losses_do(make):
    labels = np.repeat([3, 7], 4)
    expected = make(labels).batch(5).tolist()
    for form in FORMS.values():
        assert make(form(labels)).batch(5).tolist() == expected
    merged = labels.astype("float32") + 2**24
    for wrong in (labels + 0.5, np.where(labels > 3, np.nan, 3), merged, np.eye(8), list("ab") * 4):
        with pytest.raises(UserError, match=r"labels must (be integers|have shape)"):
            make(wrong)
    with pytest.raises(
        UserError, match="training needs images of two classes or more; all 8 are of class 3"
    ):
        make(np.full(8, 3))


def test_given_pairs_beyond_the_images_are_refused():
    x, y = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 0, 1])
    sampler = PairSampler([[0, 1], [2, 3]], batch_size=2)
    for whole in (sampler, Share(sampler, 1, 2)):
        with pytest.raises(UserError, match="image 3"):
            ArrayBatches(x, y, whole)
        with pytest.raises(UserError, match="image 3"):
            training_batches(ImageDataset(images=x, labels=y), whole, TrainTransform("none", 4, 4))
    with pytest.raises(UserError, match="pairs: row 1"):
        ImageDataset(images=x, labels=y, pairs=PairList([[0, 1], [2, 3]], [1, 0]))
    for similarities in (None, [1], [1, np.nan]):
        with pytest.raises(UserError, match="similar"):
            PairList([[0, 1], [2, 3]], similarities)
