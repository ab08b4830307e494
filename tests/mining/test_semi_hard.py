import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import MODES, random_batch
from tests.mining.given_pairs import given_pairs
from tfdml import pairwise
from tfdml.mining import semi_hard_negatives


def run(distances, labels, mode):
    def function(distances):
        return semi_hard_negatives(given_pairs(distances, labels))

    if mode != "eager":
        function = tf.function(function, jit_compile=mode == "xla", autograph=False)
    return np.asarray(function(tf.constant(distances, tf.float32)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "classes"), [(12, 3), (25, 10), (4, 2)])
def test_is_the_nearest_beyond_the_positive_or_the_furthest(mode, size, classes):
    labels, x = random_batch(size, size, classes, 3)
    distances = np.asarray(pairwise.distances(x))
    chosen = run(distances, labels, mode)
    for a in range(size):
        far = np.flatnonzero(labels != labels[a])
        for p in np.flatnonzero((labels == labels[a]) & (np.arange(size) != a)):
            beyond = [n for n in far if distances[a, n] > distances[a, p]]
            expected = min(beyond, key=lambda n: distances[a, n]) if beyond else max(far, key=lambda n: distances[a, n])
            assert distances[a, chosen[a, p]] == distances[a, expected]
            assert labels[chosen[a, p]] != labels[a]


@pytest.mark.parametrize("mode", MODES)
def test_a_negative_at_the_positive_s_distance_is_not_beyond_it(mode):
    distances = np.tile([0.0, 0.5, 0.5, 0.5, 0.8], (5, 1))
    assert run(distances, [0, 0, 1, 1, 1], mode)[0, 1] == 4


def test_rows_without_negatives_stay_in_range():
    chosen = np.asarray(semi_hard_negatives(given_pairs(np.ones((3, 3)), [0, 0, 0])))
    assert np.all((chosen >= 0) & (chosen < 3))
    assert np.asarray(semi_hard_negatives(given_pairs(np.zeros((1, 1)), [0]))).shape == (1, 1)
