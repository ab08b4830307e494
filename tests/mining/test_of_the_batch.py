import math

import numpy as np
import pytest

from tests.mathematics import degenerate_batches, random_batch
from tests.mining.test_batch_easy_hard import masks
from tfdml import pairwise
from tfdml.mining import AngularMiner, HardAwareMiner, UniformHistogramMiner


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


@pytest.mark.parametrize("angle", [0.0, 20.0, 35.0, 60.0, 90.0])
@pytest.mark.parametrize("squared", [True, False])
def test_angular_keeps_the_pairs_of_wide_triplets(angle, squared):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    near, far = set(), set()
    for a, p in pairs_of(labels, True):
        for b, n in pairs_of(labels, False):
            if a == b:
                to_centre = np.linalg.norm(x[n] - (x[a] + x[p]) / 2)
                if math.degrees(math.atan(np.linalg.norm(x[a] - x[p]) / (2 * to_centre))) > angle:
                    near.add((a, p))
                    far.add((a, n))
    distances = pairwise.distances(x, distance="sqeuclidean" if squared else "euclidean")
    kept = AngularMiner(angle, squared)(distances, *masks(labels))
    assert [kept_pairs(mask) for mask in kept] == [near, far]
    assert 0 < len(near) < len(pairs_of(labels, True)) or angle not in (35.0, 60.0)


@pytest.mark.parametrize("miner", [HardAwareMiner(), UniformHistogramMiner(5, 2, 2), AngularMiner()])
def test_every_degenerate_batch_gives_pairs_of_the_batch(miner):
    for labels, x in degenerate_batches().values():
        pairs = masks(labels)
        for mask, pair in zip(miner(pairwise.distances(x), *pairs), pairs, strict=True):
            assert not np.any(np.asarray(mask) & ~np.asarray(pair))
            assert isinstance(miner, AngularMiner) or np.any(mask) == np.any(pair)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HardAwareMiner(0), "fraction must be above 0 and at most 1"),
        (lambda: UniformHistogramMiner(bins=0), "bins must be a positive integer"),
        (lambda: UniformHistogramMiner(seed=-1), "seed must be"),
        (lambda: AngularMiner(angle_degrees=91), "angle_degrees must be at least 0 and at most 90"),
        (lambda: AngularMiner(squared=1), "squared must be true or false"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
