"""Batches are pure functions of (seed, step), and distinct and complete where they promise it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data import ImageDataset, PairList
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
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)) * 10 - 7, counts))


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(1, 6), st.integers(1, 7), st.integers(0, 10**6)
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
    """Three images in three turns: one order for all of them would be seen in every step, by chance in one of 36."""
    sampler = ClassBalancedSampler(labels_of([3, 3]), 2, 9, seed=0)
    orders = np.concatenate([sampler.batch(step).reshape(2, 3, 3) for step in range(300)])
    assert (np.sort(orders, axis=2) == np.sort(orders, axis=2)[:, :1]).all(), "every turn has every image"
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert (orders[:, first] == orders[:, second]).all(axis=1).mean() == pytest.approx(1 / 6, abs=0.05)


def test_short_classes_are_dropped_on_request():
    labels = labels_of([4, 2, 3, 1, 5])
    sampler = ClassBalancedSampler(labels, 3, 3, seed=0, short_classes="drop")
    seen = {int(label) for step in range(50) for label in labels[sampler.batch(step)]}
    assert seen == {-7, 13, 33}
    assert sampler.steps_per_epoch == 12 // 9
    with pytest.raises(
        UserError,
        match=r"`classes_per_batch=4`.*3 classes with at least `images_per_class=3`.*'repeat'`",
    ):
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
    """Labels and super-labels, shuffled; ids neither contiguous nor in the order of the super-classes."""
    kinds = np.repeat(np.arange(len(classes_per_kind)) * 5 - 4, classes_per_kind)
    labels = np.random.default_rng(seed).permutation(len(kinds)) * 3 + 1
    order = np.random.default_rng(seed + 1).permutation(len(kinds) * images)
    return np.repeat(labels, images)[order], np.repeat(kinds, images)[order]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_hierarchical_batches(classes_per_kind, group, rows, step):
    labels, kinds = data_of(classes_per_kind)
    enough = sum(count >= group for count in classes_per_kind)
    arguments = (labels, kinds, group * rows, 2, rows)
    if enough < rows:
        with pytest.raises(UserError, match=f"`super_classes_per_batch={rows}`, but the data has {enough} super-cl"):
            HierarchicalSampler(*arguments)
        return
    sampler = HierarchicalSampler(*arguments, seed=5)
    batch = sampler.batch(step)
    assert batch.shape == (sampler.batch_size,) == (group * rows * 2,)
    groups = labels[batch].reshape(rows, group, 2)
    assert (groups == groups[..., :1]).all(), "rows are grouped by class"
    assert len(set(groups.reshape(-1).tolist())) == group * rows, "classes are distinct"
    of = kinds[batch].reshape(rows, -1)
    assert (of == of[:, :1]).all(), "each part of a batch is of one super-class"
    assert len(set(of[:, 0].tolist())) == rows, "super-classes are distinct"


def test_super_classes_come_in_proportion_and_those_too_small_are_counted(caplog):
    labels, kinds = data_of([7, 4, 9, 1], images=1)
    with caplog.at_level("WARNING", logger="absl"):
        sampler = HierarchicalSampler(labels, kinds, 2, 1, seed=1)
    assert "1 of 4 super-classes are never sampled" in caplog.text
    drawn = kinds[np.concatenate([sampler.batch(step) for step in range(2000)])]
    np.testing.assert_allclose(np.unique(drawn, return_counts=True)[1] / len(drawn), [0.35, 0.2, 0.45], atol=0.03)


def test_short_classes_are_dropped_before_super_classes_are_counted():
    labels = np.repeat(np.arange(6), [4, 4, 4, 4, 1, 1])
    kinds = np.array([0, 0, 1, 1, 0, 1])[labels]
    sampler = HierarchicalSampler(labels, kinds, 2, 2, short_classes="drop")
    assert {int(c) for step in range(50) for c in labels[sampler.batch(step)]} == {0, 1, 2, 3}
    assert sampler.steps_per_epoch == 4
    with pytest.raises(UserError, match="has 0 super-classes with at least 2 classes; lower"):
        HierarchicalSampler(labels, kinds, 2, 5, short_classes="drop")


@given(st.lists(st.integers(1, 12), min_size=2, max_size=60), st.data(), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_batches_of_whole_classes(counts, data, step):
    batch_size = data.draw(st.integers(1, sum(counts)))
    labels = labels_of(counts)
    sampler = WholeClassSampler(labels, batch_size, 3)
    assert sampler.steps_per_epoch == sum(counts) // batch_size
    batch = sampler.batch(step)
    assert len(batch) == len(set(batch.tolist())) == batch_size
    classes = list(dict.fromkeys(labels[batch].tolist()))
    numbers = [int((labels[batch] == c).sum()) for c in classes]
    assert (labels[batch] == np.repeat(classes, numbers)).all(), "grouped"
    assert all(number == (labels == c).sum() for c, number in zip(classes[:-1], numbers, strict=False)), "whole"


def test_a_class_beyond_the_batch_gives_no_more_than_a_batch(caplog):
    labels = np.repeat([1, 2, 3], [50, 3, 3])
    with caplog.at_level("WARNING", logger="absl"):
        sampler = WholeClassSampler(labels, 10)
    assert "1 of 3 classes have `batch_size=10` images or more" in caplog.text
    seen = {int(i) for step in range(300) for i in sampler.batch(step)}
    assert seen == set(range(56))


LABELS = np.repeat(np.arange(15), 3)
KINDS = np.repeat([0, 1, 2], 15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassBalancedSampler(LABELS, 16, 2), "`classes_per_batch=16`, but the data has 15 classes"),
        (lambda: HierarchicalSampler(LABELS, KINDS, 4, 2, 3), "`classes_per_batch=4` is no multiple of `super_cla"),
        (lambda: HierarchicalSampler(LABELS, np.arange(45), 4, 2), "lies in more than one super-class"),
        (lambda: ShuffleSampler(10, 11), "`batch_size=11`, but the data has 10 images"),
        (lambda: PairSampler(np.zeros((25, 2), int), 52), "`batch_size=52` must be a multiple of 2, up to 50"),
        (lambda: Share(ShuffleSampler(100, 10), 0, 3), "10 images cannot be shared out evenly over 3 workers"),
        (lambda: check_divides(10, 4, "replicas"), r"4 replicas: make `batch_size` "),
        (lambda: Share(ShuffleSampler(100, 10), 2, 2), "worker 2 of 2: workers are numbered from 0 to 1"),
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
    assert {(part.batch_size, part.steps_per_epoch) for part in shares} == {(each, sampler.steps_per_epoch)}
    np.testing.assert_array_equal(np.concatenate([part.batch(step) for part in shares]), sampler.batch(step))


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
    # As a callback it follows the epochs of `fit`, and continues after the last one.
    batches.on_epoch_begin(7)
    batches.on_epoch_end(7)
    batches.on_train_end()
    assert batches.epoch == 8
    with pytest.raises(UserError, match="`x` has 12 images and `y` has 11 labels"):
        ArrayBatches(x, y[1:], sampler)


def test_neighbor_batches_hold_the_classes_of_the_table_after_their_anchors():
    counts = [3, 1, 2, 4, 2, 5, 2, 3]
    labels = labels_of(counts)
    ids = np.unique(labels)
    kept = [c for c, count in enumerate(counts) if count >= 2]
    sampler = NeighborSampler(labels, 5, 2, seed=3, short_classes="drop", anchor_classes=2)
    before = [sampler.batch(step).tolist() for step in range(12)]
    table = np.array([[1, 2, -1], [0, 2, 3], [3, 1, 0], [2, 1, 5], [5, 6, 7], [4, 6, 7], [7, 4, 5], [6, 5, 1]])
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
            wanted = [c for rank in range(3) for c in (table[classes[0], rank], table[classes[1], rank])]
            wanted = [c for c in dict.fromkeys(wanted) if c in kept and c not in classes[:2]][:3]
            assert classes[2 : 2 + len(wanted)] == wanted
    # Within a pass no class is an anchor twice.
    passes = len(kept) // 2
    for first in range(0, 12 - passes + 1, passes):
        assert len(set(itertools.chain(*anchors[first : first + passes]))) == 2 * passes
    # The table alone decides: another sampler that is given it, as where a run is resumed, makes the same batches.
    resumed = NeighborSampler(labels, 5, 2, seed=3, short_classes="drop", anchor_classes=2)
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
    "arrays": lambda labels: ArrayBatches(np.zeros((8, 1)), labels, ClassBalancedSampler(labels, 2, 2)).sampler,
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
    with pytest.raises(UserError, match="training needs images of two classes or more; all 8 are of class 3"):
        make(np.full(8, 3))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [0, -1]], r"pairs: row 1 is \[0, -1\], but"),
        ([[0, 4.7], [0, 1]], r"pairs must be integers .* not float64"),
        ([[0, 1, 2, 3]], r"pairs must be integers \(G, 2\) or \(G, 3\), .* not int64 of shape"),
        (np.zeros((0, 2), int), "up to 0, as there are 0 pairs"),
    ],
)
def test_given_pairs_that_are_no_rows_are_refused(pairs, message):
    with pytest.raises(UserError, match=message):
        PairSampler(pairs, batch_size=2)
    if len(pairs):
        with pytest.raises(UserError, match=message):
            PairList(pairs, np.zeros(len(pairs)))


def test_given_pairs_beyond_the_images_are_refused():
    x, y = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 0, 1])
    with pytest.raises(UserError, match=r"images: pairs: row 1 is \[2, 3\], but the images have the rows 0 to 2"):
        ImageDataset(images=x, labels=y, pairs=PairList([[0, 1], [2, 3]], [1, 0]))
    for similarities in (None, [1], [1, np.nan]):
        with pytest.raises(UserError, match="similar"):
            PairList([[0, 1], [2, 3]], similarities)
