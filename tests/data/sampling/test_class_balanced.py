"""Batches are pure functions of (seed, step), and distinct and complete where they promise it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.sampling import ClassBalancedSampler, ShuffleSampler, permute
from tfdml.errors import UserError


def labels_of(counts, rng=None):
    labels = np.repeat(np.arange(len(counts)) * 10 + 3, counts)
    return labels if rng is None else rng.permutation(labels)


def keys(seed, *shape):
    return np.random.default_rng(seed).integers(0, 2**64, (12, *shape), dtype=np.uint64)


@given(st.integers(1, 300), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_permute_is_a_bijection(size, seed):
    assert sorted(permute(np.arange(size), size, keys(seed))) == list(range(size))


def test_permute_handles_several_sizes_at_once():
    """Cycle walking must stop for each permutation at its own range."""
    sizes = np.array([1, 2, 5, 17])
    for place in range(17):
        wanted = np.minimum(place, sizes - 1)
        together = permute(wanted, sizes, keys(0, 4))
        alone = [permute(wanted[i : i + 1], int(sizes[i]), keys(0, 4)[:, i : i + 1])[0] for i in range(4)]
        assert together.tolist() == alone
        assert (together < sizes).all()


@pytest.mark.parametrize("size", [3, 5, 7])
def test_permutations_of_a_few_are_uniform(size):
    """With too few rounds some orders of 5 or 7 items come several times as often as others."""
    draws = 20_000
    orders = permute(np.tile(np.arange(size), (draws, 1)), size, keys(size, draws, 1))
    pairs = np.zeros((size, size))
    np.add.at(pairs, (orders[:, 0], orders[:, 1]), 1)
    expected = draws / (size * (size - 1))
    deviation = ((pairs - expected) ** 2 / expected)[~np.eye(size, dtype=bool)]
    assert deviation.sum() / (deviation.size - 1) < 2.2


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=40),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_class_balanced_batches(counts, classes_per_batch, images_per_class, step):
    classes_per_batch = min(classes_per_batch, len(counts))
    labels = labels_of(counts, np.random.default_rng(step))
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


def test_class_balanced_is_a_pure_function_of_seed_and_step():
    labels = labels_of([5] * 50)
    one, other = (ClassBalancedSampler(labels, 8, 3, seed=1) for _ in range(2))
    backwards = {step: one.batch(step) for step in reversed(range(40))}
    for step in range(40):
        np.testing.assert_array_equal(other.batch(step), backwards[step])
    assert not np.array_equal(ClassBalancedSampler(labels, 8, 3, seed=2).batch(0), backwards[0])


def test_a_pass_uses_every_class_at_most_once_and_leaves_out_others_each_time():
    labels = labels_of([2] * 23)
    sampler = ClassBalancedSampler(labels, 5, 2, seed=0)
    left_out = set()
    for number in range(150):
        used = np.concatenate([np.unique(labels[sampler.batch(number * 4 + i)]) for i in range(4)])
        assert len(used) == len(set(used)) == 20
        left_out |= set(labels) - set(used)
    assert left_out == set(labels)


def test_images_of_a_class_are_drawn_evenly_and_in_new_company():
    sampler = ClassBalancedSampler(labels_of([6, 6]), 2, 2, seed=0)
    batches = np.array([sampler.batch(step) for step in range(3000)])
    share = np.bincount(batches.reshape(-1), minlength=12) / len(batches)
    np.testing.assert_allclose(share, 1 / 3, atol=0.04)
    companies = {tuple(sorted(batch[:2])) for batch in batches.tolist()}
    assert len(companies) == 2 * 15


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
    assert seen == {3, 23, 43}
    assert sampler.steps_per_epoch == 12 // 9
    with pytest.raises(
        UserError, match=r"`classes_per_batch=4`.*3 classes with at least `images_per_class=3`.*\(of 5\)"
    ):
        ClassBalancedSampler(labels, 4, 3, short_classes="drop")


def test_an_epoch_is_as_many_batches_as_hold_the_images():
    assert ClassBalancedSampler(labels_of([10] * 10), 4, 4).steps_per_epoch == 6
    assert ClassBalancedSampler(labels_of([1, 1]), 2, 4).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes_per_batch": 6}, "`classes_per_batch=6`, but the data has 5 classes"),
        ({"classes_per_batch": 0}, "`classes_per_batch` must be at least 1, not 0"),
        ({"images_per_class": 0}, "`images_per_class` must be at least 1, not 0"),
        ({"seed": -1}, "`seed` must not be negative"),
        ({"short_classes": "pad"}, "repeat or drop, not 'pad'"),
        ({"labels": np.array([0.5])}, "float64"),
        ({"labels": np.zeros(0, np.int64)}, r"\(0,\)"),
    ],
)
def test_class_balanced_says_what_is_wrong(arguments, message):
    defaults = {"labels": labels_of([2] * 5), "classes_per_batch": 2, "images_per_class": 2}
    with pytest.raises(UserError, match=message):
        ClassBalancedSampler(**{**defaults, **arguments})


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


def test_shuffle_differs_between_epochs_and_seeds():
    sampler = ShuffleSampler(100, 100, seed=0)
    assert not np.array_equal(sampler.batch(0), sampler.batch(1))
    assert not np.array_equal(sampler.batch(0), ShuffleSampler(100, 100, seed=1).batch(0))
    np.testing.assert_array_equal(sampler.batch(1), ShuffleSampler(100, 100, seed=0).batch(1))


def test_shuffle_refuses_batches_larger_than_the_data():
    with pytest.raises(UserError, match="`batch_size=11`, but the data has 10 images"):
        ShuffleSampler(10, 11)
    with pytest.raises(UserError, match="`batch_size` must be at least 1"):
        ShuffleSampler(10, 0)


def test_the_bits_of_a_seed_do_not_change():
    """A resumed run of an older version must get the same batches."""
    assert ClassBalancedSampler(labels_of([3] * 10), 3, 2, seed=7).batch(4).tolist() == [19, 20, 28, 27, 15, 16]
    assert ShuffleSampler(1000, 6, seed=7).batch(4).tolist() == [382, 782, 827, 661, 618, 806]
