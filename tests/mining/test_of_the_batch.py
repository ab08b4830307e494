import inspect
import math

import numpy as np
import pytest

from tests.mathematics import degenerate_batches, random_batch
from tests.mining.given_pairs import given_pairs, masks
from tfdml import losses, pairwise
from tfdml.mining import AngularMiner, HardAwareMiner, UniformHistogramMiner
from tfdml.mining.composing import named_miners
from tfdml.pairs import Pairs, Rows


def pairs_of(labels, same):
    size = len(labels)
    return [(i, j) for i in range(size) for j in range(size) if i != j and (labels[i] == labels[j]) == same]


def kept_pairs(mask):
    return {tuple(pair) for pair in np.argwhere(mask).tolist()}


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_hard_aware_keeps_the_hardest_share(fraction):
    labels, x = random_batch(5, 11, 4, 3)
    distances = np.asarray(pairwise.distances(x))
    # Pairs at one distance, such as those from both ends, are kept together.
    kept = HardAwareMiner(fraction)(given_pairs(distances, labels))
    for mask, same, sign in zip(masks(kept), (True, False), (-1, 1), strict=True):
        pairs = sorted(pairs_of(labels, same), key=lambda pair: sign * distances[pair])
        last = sign * distances[pairs[math.ceil(fraction * len(pairs)) - 1]]
        assert kept_pairs(mask) == {pair for pair in pairs if sign * distances[pair] <= last}


@pytest.mark.parametrize(
    ("fraction", "count", "wanted"), [(0.6, 50, 30), (0.3, 10, 3), (0.15, 20, 3), (1 / 3, 9, 3), (0.301, 10, 4)]
)
def test_hard_aware_rounds_no_exact_share_up(fraction, count, wanted):
    pairs = given_pairs(np.arange(64, dtype="float32").reshape(8, 8), np.zeros(8, "int64"))
    pairs.positives = pairs.negatives = pairs.distances() < count
    for mask in masks(HardAwareMiner(fraction)(pairs)):
        assert np.sum(mask) == wanted


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_uniform_histogram_keeps_as_many_of_each_bin(most):
    labels, x = random_batch(1, 40, 3, 3)
    distances = np.asarray(pairwise.distances(x))
    miner = UniformHistogramMiner(bins=6, positives_per_bin=most, negatives_per_bin=2 * most)
    kept = masks(miner(given_pairs(distances, labels)))
    for mask, same, limit in zip(kept, (True, False), (most, 2 * most), strict=True):
        pairs = pairs_of(labels, same)
        values = np.array([distances[pair] for pair in pairs])
        edges = np.linspace(values.min(), values.max(), 7)
        chosen = np.array([distances[pair] for pair in kept_pairs(mask)])
        there, drawn = (np.histogram(part, edges)[0] for part in (values, chosen))
        np.testing.assert_array_equal(drawn, np.minimum(there, limit))
        assert kept_pairs(mask) <= set(pairs)
    again = masks(UniformHistogramMiner(6, most, 2 * most)(given_pairs(distances, labels)))
    np.testing.assert_array_equal(again[0], kept[0])
    if most == 4:
        other = masks(UniformHistogramMiner(6, most, 2 * most, seed=1)(given_pairs(distances, labels)))
        assert np.any(np.asarray(other[0]) != np.asarray(kept[0]))


def wide_triplets(labels, x, angle):
    """The positives and the negatives of triplets whose negative sees the two positives under more than `angle`."""
    x = np.asarray(x, np.float64)
    near, far = np.zeros((2, len(x), len(x)), bool)
    for a, p in pairs_of(labels, True):
        for b, n in pairs_of(labels, False):
            if a == b:
                to_centre = np.linalg.norm(x[n] - (x[a] + x[p]) / 2)
                if math.degrees(math.atan(np.linalg.norm(x[a] - x[p]) / (2 * to_centre))) > angle:
                    near[a, p] = far[a, n] = True
    return near, far


@pytest.mark.parametrize("angle", [0.0, 20.0, 35.0, 60.0, 90.0])
def test_angular_keeps_the_pairs_of_wide_triplets(angle):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    near, far = wide_triplets(labels, x, angle)
    kept = AngularMiner(angle)(Pairs.of_batch(x, labels))
    assert [kept_pairs(mask) for mask in masks(kept)] == [kept_pairs(near), kept_pairs(far)]
    assert 0 < near.sum() < len(pairs_of(labels, True)) or angle not in (35.0, 60.0)


def mined_losses():
    """Each loss that takes a miner, with each distance from which the angle follows: (class, arguments, on cosines)."""
    for name in losses.__all__:
        make = getattr(losses, name)
        parameters = inspect.signature(make).parameters
        if "mining" in parameters and "distance" in parameters:
            for distance in ("euclidean", "sqeuclidean", "cosine", "dot", pairwise.absolute_distances):
                kind = distance if isinstance(distance, str) else "object"
                yield pytest.param(make, {"distance": distance}, distance == "cosine", id=f"{name} {kind}")
        elif "mining" in parameters:
            yield pytest.param(make, {}, name not in ("RankedListLoss", "LiftedStructureLoss"), id=name)


@pytest.mark.parametrize(("make", "arguments", "on_cosines"), list(mined_losses()))
def test_angular_mining_is_by_the_angle_whatever_the_distance_of_the_loss(make, arguments, on_cosines):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    kept = []

    class Recorded(AngularMiner):
        def __call__(self, pairs):
            kept.append(masks(super().__call__(pairs)))
            return pairs

    make(mining=Recorded(angle_degrees=35), **arguments).call(labels, x)
    lengths = np.linalg.norm(x, axis=1, keepdims=True) if on_cosines else 1.0
    right = wide_triplets(labels, x / lengths, 35.0)
    np.testing.assert_array_equal(kept[0], right)
    assert 0 < right[0].sum() < len(pairs_of(labels, True))
    assert type(make(mining="angular", **arguments).mining) is AngularMiner


def test_angular_mining_of_some_rows_is_that_of_the_batch():
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    for distance in ("euclidean", "cosine"):
        whole = masks(AngularMiner(35)(Pairs.of_batch(x, labels).using(distance)))
        rows = masks(AngularMiner(35)(Pairs.of_batch(x, labels, rows=Rows(4, 6)).using(distance)))
        for one, other in zip(rows, whole, strict=True):
            np.testing.assert_array_equal(one, other[4:10])


@pytest.mark.parametrize("miner", [HardAwareMiner(), UniformHistogramMiner(5, 2, 2), AngularMiner()])
def test_every_degenerate_batch_gives_pairs_of_the_batch(miner):
    for labels, x in degenerate_batches().values():
        pairs = Pairs.of_batch(x, labels)
        for mask, pair in zip(masks(miner(pairs)), masks(pairs), strict=True):
            assert not np.any(mask & ~pair)
            assert isinstance(miner, AngularMiner) or np.any(mask) == np.any(pair)


@pytest.mark.parametrize("name", sorted(named_miners()))
def test_every_miner_keeps_nothing_of_a_batch_without_images(name):
    empty = Pairs.of_batch(np.zeros((0, 3), "float32"), np.zeros(0, "int64"))
    for mask in masks(named_miners()[name]()(empty)):
        assert mask.shape == (0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HardAwareMiner(0), "fraction must be above 0 and at most 1"),
        (lambda: UniformHistogramMiner(bins=0), "bins must be a positive integer"),
        (lambda: UniformHistogramMiner(seed=-1), "seed must be"),
        (lambda: AngularMiner(angle_degrees=91), "angle_degrees must be at least 0 and at most 90"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
