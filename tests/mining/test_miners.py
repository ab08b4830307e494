"""Miners and the functions that choose negatives."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.losses import references
from tests.support.mathematics import MODES, assert_close, degenerate_batches, random_batch
from tfdml import losses, pairwise
from tfdml.mining import (
    AngularMiner,
    BatchEasyHardMiner,
    EasyPositiveMiner,
    HardAwareMiner,
    negative_probabilities,
    sample_negatives,
    semi_hard_negatives,
)
from tfdml.pairs import Pairs, Scope


def pairs_at(distances, labels):
    """The pairs of a batch of these labels (N,), whose `distances()` are (N, N)."""
    matrix = tf.convert_to_tensor(distances, tf.float32)
    return Pairs.of_batch(np.zeros((len(labels), 1), "float32"), np.asarray(labels)).using(
        lambda a, b: matrix
    )


def masks(pairs):
    """The positives and the negatives as NumPy arrays."""
    return np.asarray(pairs.positives), np.asarray(pairs.negatives)


def run(distances, labels, mode):
    def function(distances):
        return semi_hard_negatives(pairs_at(distances, labels))

    if mode != "eager":
        function = tf.function(function, jit_compile=mode == "xla", autograph=False)
    return np.asarray(function(tf.constant(distances, tf.float32)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "classes"), [(12, 3), (25, 10), (4, 2)])
def test_is_the_nearest_beyond_the_positive_or_the_furthest(mode, size, classes):
    labels, x = random_batch(size, size, classes, 3)
    distances = np.asarray(Pairs.of_batch(x).distances())
    chosen = run(distances, labels, mode)
    for a in range(size):
        far = np.flatnonzero(labels != labels[a])
        for p in np.flatnonzero((labels == labels[a]) & (np.arange(size) != a)):
            beyond = [n for n in far if distances[a, n] > distances[a, p]]
            expected = (
                min(beyond, key=lambda n: distances[a, n])
                if beyond
                else max(far, key=lambda n: distances[a, n])
            )
            assert distances[a, chosen[a, p]] == distances[a, expected]
            assert labels[chosen[a, p]] != labels[a]


@pytest.mark.parametrize("mode", MODES)
def test_a_negative_at_the_positive_s_distance_is_not_beyond_it(mode):
    distances = np.tile([0.0, 0.5, 0.5, 0.5, 0.8], (5, 1))
    assert run(distances, [0, 0, 1, 1, 1], mode)[0, 1] == 4


def test_a_positive_at_the_negative_s_distance_is_not_within_it():
    distances = np.tile([0.0, 0.2, 0.5, 0.5, 0.8], (5, 1))
    kept = masks(BatchEasyHardMiner("semi_hard", "hard")(pairs_at(distances, [0, 0, 0, 1, 1])))
    assert [np.flatnonzero(mask[0]).tolist() for mask in kept] == [[1], [3]]


@pytest.mark.parametrize("dim", [2, 128])
def test_probabilities_equal_the_formula_whatever_the_length(dim):
    labels, x = random_batch(dim, 14, 4, dim)
    assert_close(
        negative_probabilities(Pairs.of_batch(5 * x, labels)),
        references.draw_probabilities(labels, x),
    )


@pytest.mark.parametrize("batch", degenerate_batches())
def test_rows_sum_to_one_or_to_zero_without_negatives(batch):
    labels, x = degenerate_batches()[batch]
    rows = np.asarray(negative_probabilities(Pairs.of_batch(x, labels)))
    assert_close(rows, references.draw_probabilities(labels, x), floor=1e-6)
    has_negative = (labels[:, None] != labels[None]).any(axis=1)
    np.testing.assert_allclose(rows.sum(axis=1), has_negative, rtol=1e-6)
    assert np.all(rows[labels[:, None] == labels[None]] == 0)


def test_draws_follow_the_probabilities():
    probabilities = np.tile(np.array([[0.0, 0.1, 0.2, 0.7]], "float32"), (4000, 1))
    indices, valid = sample_negatives(probabilities, seed=1)
    assert np.all(valid)
    np.testing.assert_allclose(
        np.bincount(np.asarray(indices)[:, 0], minlength=4) / 4000, probabilities[0], atol=0.03
    )


PAIRS = [
    (positives, negatives)
    for positives in ("easy", "hard", "semi_hard", "all")
    for negatives in ("easy", "hard", "semi_hard", "all")
    if "semi_hard" not in (positives, negatives) or {positives, negatives} & {"easy", "hard"}
]


def chosen(d, a, near, far, positives, negatives):
    """What an anchor keeps, in the words of the strategies."""
    by_distance = d[a].__getitem__
    easy = {"easy": lambda: min(near, key=by_distance), "hard": lambda: max(near, key=by_distance)}
    hard = {"easy": lambda: max(far, key=by_distance), "hard": lambda: min(far, key=by_distance)}
    if positives == "all" or negatives == "all":
        kept = near if positives == "all" else [easy[positives]()] if near else []
        return kept, far if negatives == "all" else [hard[negatives]()] if far else []
    if not near or not far:
        return [], []
    if positives == "semi_hard":
        n = hard[negatives]()
        within = [p for p in near if d[a][p] < d[a][n]]
        return ([max(within, key=by_distance)], [n]) if within else ([], [])
    p = easy[positives]()
    if negatives == "semi_hard":
        beyond = [n for n in far if d[a][n] > d[a][p]]
        return ([p], [min(beyond, key=by_distance)]) if beyond else ([], [])
    return [p], [hard[negatives]()]


@pytest.mark.parametrize(("positives", "negatives"), PAIRS)
def test_keeps_what_the_strategies_say(positives, negatives):
    dropped = 0
    for seed, (size, classes) in enumerate([(14, 4), (9, 8), (6, 1), (1, 1)]):
        labels, x = random_batch(seed, size, classes, 2)
        distances = np.asarray(Pairs.of_batch(x).distances())
        kept = masks(BatchEasyHardMiner(positives, negatives)(pairs_at(distances, labels)))
        for a in range(size):
            near = [j for j in range(size) if labels[j] == labels[a] and j != a]
            far = [j for j in range(size) if labels[j] != labels[a]]
            expected = chosen(distances, a, near, far, positives, negatives)
            assert [np.flatnonzero(mask[a]).tolist() for mask in kept] == [
                sorted(part) for part in expected
            ]
            dropped += not expected[0]
    assert dropped


def test_losses_know_miners_by_name():
    labels, x = random_batch(4, 12, 4, 5)
    by_name = losses.NTXentLoss(mining="easy_positive")
    np.testing.assert_array_equal(
        by_name(labels, x), losses.NTXentLoss(mining=EasyPositiveMiner())(labels, x)
    )
    # The loss's own name for the same pairs comes first.
    assert losses.TripletLoss(mining="hard").mining == "hard"
    own, object_ = losses.TripletLoss(mining="hard"), losses.TripletLoss(mining="batch_hard")
    np.testing.assert_allclose(own(labels, x), object_(labels, x), rtol=1e-6)


def pairs_of(labels, same):
    size = len(labels)
    return [
        (i, j)
        for i in range(size)
        for j in range(size)
        if i != j and (labels[i] == labels[j]) == same
    ]


def kept_pairs(mask):
    return {tuple(pair) for pair in np.argwhere(mask).tolist()}


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_hard_aware_keeps_the_hardest_share(fraction):
    labels, x = random_batch(5, 11, 4, 3)
    distances = np.asarray(Pairs.of_batch(x).distances())
    # Pairs at one distance, such as those from both ends, are kept together.
    kept = HardAwareMiner(fraction)(pairs_at(distances, labels))
    for mask, same, sign in zip(masks(kept), (True, False), (-1, 1), strict=True):
        pairs = sorted(pairs_of(labels, same), key=lambda pair: sign * distances[pair])
        last = sign * distances[pairs[math.ceil(fraction * len(pairs)) - 1]]
        assert kept_pairs(mask) == {pair for pair in pairs if sign * distances[pair] <= last}


def wide_triplets(labels, x, angle):
    """The positives and the negatives of triplets whose negative sees the two positives under more
    than `angle`."""
    x = np.asarray(x, np.float64)
    near, far = np.zeros((2, len(x), len(x)), bool)
    for a, p in pairs_of(labels, True):
        for b, n in pairs_of(labels, False):
            if a == b:
                to_center = np.linalg.norm(x[n] - (x[a] + x[p]) / 2)
                if math.degrees(math.atan(np.linalg.norm(x[a] - x[p]) / (2 * to_center))) > angle:
                    near[a, p] = far[a, n] = True
    return near, far


@pytest.mark.parametrize(
    "distance", ["euclidean", "sqeuclidean", "cosine", "dot", pairwise.absolute_distances]
)
def test_angular_mining_is_by_the_angle_whatever_the_distance_and_the_rows(distance):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    near, far = wide_triplets(
        labels, x / (np.linalg.norm(x, axis=1, keepdims=True) if distance == "cosine" else 1), 35.0
    )
    for scope, rows in ((Scope(), slice(None)), (Scope(4, 6), slice(4, 10))):
        kept = masks(AngularMiner(35)(Pairs.of_batch(x, labels, scope=scope).using(distance)))
        np.testing.assert_array_equal(kept, (near[rows], far[rows]))
    assert 0 < near.sum() < len(pairs_of(labels, True))
    assert type(losses.TripletLoss(mining="angular").mining) is AngularMiner


@pytest.mark.parametrize("angle", [0.0, 20.0, 35.0, 60.0, 90.0])
def test_angular_keeps_the_pairs_of_wide_triplets(angle):
    labels, x = random_batch(3, 13, 4, 3, unit=False)
    near, far = wide_triplets(labels, x, angle)
    kept = AngularMiner(angle)(Pairs.of_batch(x, labels))
    assert [kept_pairs(mask) for mask in masks(kept)] == [kept_pairs(near), kept_pairs(far)]
    assert 0 < near.sum() < len(pairs_of(labels, True)) or angle not in (35.0, 60.0)
