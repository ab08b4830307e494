import inspect
import math

import numpy as np
import pytest

from tests.mathematics import degenerate_batches, random_batch
from tests.mining.test_batch_easy_hard import masks
from tfdml import losses, pairwise
from tfdml.mining import AngularMiner, HardAwareMiner, UniformHistogramMiner
from tfdml.mining.composing import named_miners


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
    kept = HardAwareMiner(fraction)(distances, *masks(labels))
    for mask, same, sign in zip(kept, (True, False), (-1, 1), strict=True):
        pairs = sorted(pairs_of(labels, same), key=lambda pair: sign * distances[pair])
        last = sign * distances[pairs[math.ceil(fraction * len(pairs)) - 1]]
        assert kept_pairs(mask) == {pair for pair in pairs if sign * distances[pair] <= last}


@pytest.mark.parametrize(
    ("fraction", "count", "wanted"), [(0.6, 50, 30), (0.3, 10, 3), (0.15, 20, 3), (1 / 3, 9, 3), (0.301, 10, 4)]
)
def test_hard_aware_rounds_no_exact_share_up(fraction, count, wanted):
    distances = np.arange(64, dtype="float32").reshape(8, 8)
    for mask in HardAwareMiner(fraction)(distances, distances < count, distances < count):
        assert np.sum(mask) == wanted


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_uniform_histogram_keeps_as_many_of_each_bin(most):
    labels, x = random_batch(1, 40, 3, 3)
    distances = np.asarray(pairwise.distances(x))
    miner = UniformHistogramMiner(bins=6, positives_per_bin=most, negatives_per_bin=2 * most)
    kept = miner(distances, *masks(labels))
    for mask, same, limit in zip(kept, (True, False), (most, 2 * most), strict=True):
        pairs = pairs_of(labels, same)
        values = np.array([distances[pair] for pair in pairs])
        edges = np.linspace(values.min(), values.max(), 7)
        chosen = np.array([distances[pair] for pair in kept_pairs(mask)])
        there, drawn = (np.histogram(part, edges)[0] for part in (values, chosen))
        np.testing.assert_array_equal(drawn, np.minimum(there, limit))
        assert kept_pairs(mask) <= set(pairs)
    again = UniformHistogramMiner(6, most, 2 * most)(distances, *masks(labels))
    np.testing.assert_array_equal(again[0], kept[0])
    if most == 4:
        other = UniformHistogramMiner(6, most, 2 * most, seed=1)(distances, *masks(labels))
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
    kept = AngularMiner(angle)(pairwise.squared_distances(x), *masks(labels))
    assert [kept_pairs(mask) for mask in kept] == [kept_pairs(near), kept_pairs(far)]
    assert 0 < near.sum() < len(pairs_of(labels, True)) or angle not in (35.0, 60.0)


def mined_losses():
    """Each loss that takes a miner, with each distance from which the angle follows: (class, arguments, on cosines)."""
    for name in losses.__all__:
        make = getattr(losses, name)
        parameters = inspect.signature(make).parameters
        if "mining" in parameters and "distance" in parameters:
            for distance in ("euclidean", "sqeuclidean", "cosine"):
                yield pytest.param(make, {"distance": distance}, distance == "cosine", id=f"{name} {distance}")
        elif "mining" in parameters:
            yield pytest.param(make, {}, name not in ("RankedListLoss", "LiftedStructureLoss"), id=name)


@pytest.mark.parametrize(("make", "arguments", "on_cosines"), list(mined_losses()))
def test_angular_mining_is_by_the_angle_whatever_the_distance_of_the_loss(make, arguments, on_cosines):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    kept = []

    class Recorded(AngularMiner):
        def __call__(self, *pairs):
            kept.append(super().__call__(*pairs))
            return kept[-1]

    make(mining=Recorded(angle_degrees=35), **arguments).call(labels, x)
    lengths = np.linalg.norm(x, axis=1, keepdims=True) if on_cosines else 1.0
    right = wide_triplets(labels, x / lengths, 35.0)
    np.testing.assert_array_equal(kept[0], right)
    assert 0 < right[0].sum() < len(pairs_of(labels, True))
    assert type(make(mining="angular", **arguments).mining) is AngularMiner


@pytest.mark.parametrize("distance", ["dot", pairwise.absolute_distances], ids=["dot", "an object"])
def test_angular_mining_without_an_angle_is_refused(distance):
    for mining in ("angular", AngularMiner(30)):
        with pytest.raises(ValueError, match=r"mining=AngularMiner needs squared Euclidean .* one of sqeuclidean"):
            losses.ContrastiveLoss(distance=distance, mining=mining)


@pytest.mark.parametrize("miner", [HardAwareMiner(), UniformHistogramMiner(5, 2, 2), AngularMiner()])
def test_every_degenerate_batch_gives_pairs_of_the_batch(miner):
    for labels, x in degenerate_batches().values():
        pairs = masks(labels)
        for mask, pair in zip(miner(pairwise.distances(x), *pairs), pairs, strict=True):
            assert not np.any(np.asarray(mask) & ~np.asarray(pair))
            assert isinstance(miner, AngularMiner) or np.any(mask) == np.any(pair)


@pytest.mark.parametrize("name", sorted(named_miners()))
def test_every_miner_keeps_nothing_of_a_batch_without_images(name):
    empty = np.zeros((0, 0))
    for mask in named_miners()[name]()(empty.astype("float32"), empty.astype(bool), empty.astype(bool)):
        assert tuple(mask.shape) == (0, 0)


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
