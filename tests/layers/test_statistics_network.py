"""V of RankMI."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.objectives.references_rankmi import slope as slope_of
from tests.objectives.references_rankmi import statistic
from tests.support.mathematics import MODES, assert_close, finite_differences
from tfdml.layers import StatisticsNetwork, statistics_network


def network_with(weights, **arguments):
    """A network with the kernels and biases given, in turn."""
    network = StatisticsNetwork(len(weights[1]), len(weights) // 2 - 2, **arguments)
    network.build()
    for variable, value in zip(variables(network), weights, strict=True):
        variable.assign(value)
    return network


def variables(network):
    return [
        variable for pair in zip(network.kernels, network.biases, strict=True) for variable in pair
    ]


def random_weights(seed, hidden=5, depth=1, scale=1.0):
    generator = np.random.default_rng(seed)
    sizes = [1, *[hidden] * (depth + 1), 1]
    shapes = [shape for a, b in itertools.pairwise(sizes) for shape in ((a, b), (b,))]
    return [(scale * generator.normal(size=shape)).astype("float32") for shape in shapes]


def through(points):
    """The weights of a V that joins the points (d, V) by straight lines."""
    d, v = (np.array(values, np.float64) for values in zip(*points, strict=True))
    # As many hidden units as there are pieces, with their kinks where the pieces begin.
    reach = d[:, None] - d[None, :-1]
    basis = np.concatenate([np.where(reach > 0, reach, 0.1 * reach), np.ones((len(d), 1))], axis=1)
    solution = np.linalg.solve(basis, v + d)
    return [np.ones((1, len(d) - 1)), -d[:-1], solution[:-1, None], solution[-1:]]


@pytest.mark.parametrize(("hidden", "depth"), [(128, 2), (5, 1), (3, 0)])
def test_equals_the_formula(hidden, depth):
    weights = random_weights(0, hidden, depth, 0.5)
    network = network_with(weights)
    d = np.random.default_rng(1).uniform(0, 2, (3, 4)).astype("float32")
    values = network(d)
    expected = [[statistic(weights, x) for x in row] for row in d]
    assert_close(values, expected)
    assert network.compute_output_shape((3, 4)) == (3, 4)
    assert_close(network(d[0]), expected[0])


@pytest.mark.one_quick_case
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [4, 2**17])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_reaches_distances_and_weights(mode, chunk, frozen, monkeypatch):
    monkeypatch.setattr(statistics_network, "_CHUNK", chunk)
    weights = random_weights(2)
    network = network_with(weights)
    d = np.random.default_rng(3).uniform(0, 2, 10).astype("float32")
    factors = np.random.default_rng(4).normal(size=10)

    def run(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            value = tf.reduce_sum(tf.constant(factors, tf.float32) * network(x, frozen=frozen))
        return (
            value,
            tape.gradient(value, x),
            tape.gradient(value, [v.value for v in variables(network)]),
        )

    run = run if mode == "eager" else tf.function(run, jit_compile=mode == "xla", autograph=False)

    def slow(x, *weights):
        return sum(f * statistic(weights, float(a)) for f, a in zip(factors, x, strict=True))

    value, by_distance, by_weight = run(tf.constant(d))
    expected = finite_differences(slow, d, *weights)
    assert_close(value, slow(d, *weights))
    assert_close(by_distance, expected[0])
    if frozen:
        assert by_weight == [None] * len(weights)
    else:
        for actual, wanted in zip(by_weight, expected[1:], strict=True):
            assert_close(actual, wanted)


def test_value_and_slope():
    weights = random_weights(6, depth=2)
    network = network_with(weights)
    d = np.linspace(0.013, 1.9, 7).astype("float32")
    value, slope = network.value_and_slope(d)
    assert_close(value, [statistic(weights, float(x)) for x in d])
    assert_close(slope, [slope_of(weights, float(x)) for x in d])
    (expected,) = finite_differences(lambda x: sum(statistic(weights, float(a)) for a in x), d)
    assert_close(slope, expected)


THREE = [(0.0, 1.0), (0.5, -1.0), (1.0, 1.0), (2.0, -1.0)]
HAND_MADE = {
    "one root": ([(0.0, 1.0), (0.7, 0.3), (2.0, -1.0)], 1.0, 1.0, True),
    "one root, rising": ([(0.0, -1.0), (2.0, 1.0)], 0.1, 1.0, True),
    "three roots, from the left": (THREE, 0.0, 0.25, True),
    "three roots, from the middle": (THREE, 0.7, 0.75, True),
    "three roots, from the right": (THREE, 2.0, 1.5, True),
    "a root at the start": ([(0.0, 0.0), (2.0, -1.0)], 1.0, 0.0, True),
    "a root at the end": ([(0.0, 1.0), (2.0, 0.0)], 1.0, 2.0, True),
    "all positive": ([(0.0, 1.0), (1.0, 0.1), (2.0, 0.5)], 0.8, 0.8, False),
    "all negative": ([(0.0, -1.0), (2.0, -3.0)], 1.3, 1.3, False),
    "a cliff": ([(0.0, 5.0), (1.2345, 5.0), (1.2346, -900.0), (2.0, -901.0)],
                1.0, 1.2345 + 5e-4 / 905, True),
    "a plateau before it": ([(0.0, 1.0), (0.9, 1e-3), (0.9031, 9e-4), (0.904, -1.0), (2.0, -2.0)],
                            0.5, 0.9031, True),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HAND_MADE)
def test_root_of_hand_made_functions(name, mode):
    points, initial, expected, has_root = HAND_MADE[name]
    weights = through(points)
    root = network_with(weights).find_root
    run = root if mode == "eager" else tf.function(root, jit_compile=mode == "xla", autograph=False)
    beta, found = run(tf.constant(initial, tf.float32))
    assert bool(found) == has_root
    assert beta.dtype == tf.float32
    assert float(beta) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_root_of_what_is_no_number_is_the_last_one(bad):
    weights = random_weights(8)
    weights[0][0, 0] = bad
    beta, found = network_with(weights).find_root(0.6)
    assert np.isfinite(beta)
    assert 0 <= float(beta) <= 2
    if np.isnan(bad):
        assert not found
        assert float(beta) == np.float32(0.6)


def test_root_has_no_gradient():
    network = network_with(through(HAND_MADE["one root"][0]))
    with tf.GradientTape() as tape:
        initial = tf.constant(0.5)
        tape.watch(initial)
        beta = network.root(initial)
    assert tape.gradient(beta, [initial, *[v.value for v in variables(network)]]) == [None] * 5
