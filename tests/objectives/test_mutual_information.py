import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.objectives import references_rankmi as slow
from tests.objectives.cases import rank_mi, v_of, weights_of_v
from tests.support import references
from tests.support.marks import first_quick
from tests.support.mathematics import (
    DEGENERATE,
    MODES,
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml.objectives import RankMI
from tfdml.objectives.mutual_information import divergence_loss
from tfdml.pairs import Pairs, pairs_by_name


def call(objective, labels, x):
    return objective({"embedding": x}, labels)


def of_statistics(objective, labels, x):
    return objective.statistics_loss(pairs_by_name({"embedding": x}, labels))


def beta_of(objective):
    return float(objective.network.root(objective.beta))


@pytest.mark.parametrize("mode", first_quick(MODES))
@pytest.mark.parametrize("monotonicity", first_quick([3.0, 0.0]))
def test_gradient_of_the_statistics_step(mode, monotonicity):
    objective = rank_mi(3, monotonicity=monotonicity)
    labels, x = random_batch(12, 8, 3, 4)
    # V rises, at some distances and not at others.
    objective.network.kernels[-1].assign([[-7.0], [-0.7], [-3.7], [-2.2], [-1.6], [-0.9]])

    def run(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            value = of_statistics(objective, labels, x)
        network = objective.network
        pairs = zip(network.kernels, network.biases, strict=True)
        return (
            value,
            tape.gradient(value, x),
            tape.gradient(value, [w.value for pair in pairs for w in pair]),
        )

    run = run if mode == "eager" else tf.function(run, jit_compile=mode == "xla", autograph=False)
    value, by_embedding, by_weight = run(tf.constant(x))

    def expected(*weights):
        loss = slow.all_pairs(labels, x, lambda d: slow.statistic(weights, d))
        return loss + monotonicity * slow.rise(x, weights)

    weights = weights_of_v(objective)
    assert slow.rise(x, weights) > 0.1
    assert by_embedding is None
    assert_close(value, expected(*weights))
    for actual, wanted in zip(by_weight, finite_differences(expected, *weights), strict=True):
        # The last bias moves no slope: what is left where both parts cancel is rounding.
        assert_close(actual, wanted, floor=1e-6)


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "eager") for name in DEGENERATE), ("no positive", "xla"), ("one image", "xla")],
)
def test_degenerate_batches_are_finite(name, mode):
    labels, x = degenerate_batches()[name]
    objective = rank_mi(negatives="distance_weighted", monotonicity=1.0)
    for function in (call, of_statistics):
        value, (gradient,) = value_and_gradients(
            lambda e, f=function: f(objective, labels, e), x, mode=mode
        )
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))


# The Jensen-Shannon bound


def test_minus_half_the_loss_of_the_best_v_is_the_jensen_shannon_divergence():
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.35, 0.2, 0.05])
    mixture = (p + q) / 2
    divergence = 0.5 * np.sum(p * np.log(p / mixture)) + 0.5 * np.sum(q * np.log(q / mixture))
    values = np.log(p / q).astype("float32")
    assert_close(-0.5 * divergence_loss(values, 100 * p, 100 * q), divergence)
    for seed in range(5):
        other = values + 0.3 * np.random.default_rng(seed).normal(size=4).astype("float32")
        assert -0.5 * float(divergence_loss(other, 100 * p, 100 * q)) < divergence


# Negatives


def test_each_image_draws_as_many_different_negatives_as_it_has_positives():
    labels, x = random_batch(3, 16, 4, 5)
    objective = rank_mi(negatives="distance_weighted", root=1.5)
    distances = slow.distances(x)
    pairs = Pairs.of_batch(x, labels)
    seen = np.zeros((16, 16))
    for _ in range(30):
        positives, negatives = (np.asarray(part) for part in objective.pairs_around(1.5, pairs))
        for i in range(16):
            same = int(np.sum(labels == labels[i])) - 1
            possible = [j for j in range(16) if labels[j] != labels[i] and distances[i, j] < 1.7]
            assert np.sum(negatives[i]) <= same
            assert set(np.flatnonzero(negatives[i])) <= set(possible)
            near = [j for j in possible if distances[i, j] < 1.4]
            assert np.sum(negatives[i]) == min(same, len(near) if near else len(possible))
            expected = [
                j for j in range(16) if labels[j] == labels[i] and j != i and distances[i, j] > 1.3
            ]
            assert list(np.flatnonzero(positives[i])) == expected
        seen += negatives
    assert len(np.unique(seen[seen > 0])) > 1


def test_value_with_drawn_negatives_equals_the_paper():
    labels, x = random_batch(6, 12, 4, 5)
    objective, twin = rank_mi(negatives="distance_weighted"), rank_mi(negatives="distance_weighted")
    beta = beta_of(objective)
    drawn = np.asarray(twin.pairs_around(beta, Pairs.of_batch(x, labels))[1])
    assert 0 < drawn.sum() < len(references.negative_pairs(labels))
    assert_close(
        call(objective, labels, x),
        slow.violating_pairs(labels, x, v_of(objective), beta, 0.2, drawn),
    )


# beta


def observed(objective, labels, x):
    observations = objective.term({"embedding": x}, labels, training=True).observations
    return {key: (float(total), float(count)) for key, (total, count) in observations.items()}


def test_beta_is_the_root_of_v_after_its_step_and_is_reported():
    objective = rank_mi(root=0.7)
    labels, x = random_batch(0, 8, 3, 4)
    found = observed(objective, labels, x)
    assert float(objective.beta) == pytest.approx(beta_of(objective), abs=1e-6)
    assert float(objective.beta) == pytest.approx(0.7, abs=0.02)
    bound = -slow.all_pairs(labels, x, v_of(objective)) / 2
    assert found == {
        "jsd": (pytest.approx(bound, rel=1e-5), 1.0),
        "beta": (float(objective.beta), 1),
        "no_root": (0, 1),
    }


def test_without_a_root_beta_stays_and_is_counted():
    objective = rank_mi(root=0.7)
    labels, x = random_batch(0, 8, 3, 4)
    observed(objective, labels, x)
    beta = float(objective.beta)
    objective.network.biases[-1].assign([50.0])
    assert observed(objective, labels, x)["no_root"] == (1.0, 1.0)
    assert float(objective.beta) == beta
    assert np.isfinite(float(call(objective, labels, x)))


# The steps of V


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_v_takes_its_steps_of_adam_and_nothing_else_changes(mode):
    options = {
        "monotonicity": 3.0,
        "statistics_steps": 2,
        "learning_rate": 0.02,
        "weight_decay": 0.1,
    }
    objective, twin = rank_mi(3, **options), rank_mi(3, **options)
    labels, x = random_batch(12, 8, 3, 4)
    adam, weights = keras.optimizers.Adam(0.02), twin.network.weights
    for _ in range(3 * 2):
        with tf.GradientTape() as tape:
            decay = sum(tf.reduce_sum(weight.value**2) for weight in weights)
            loss = of_statistics(twin, labels, x) + 0.05 * decay
        adam.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = objective({"embedding": x}, labels, training=True)
        return tape.gradient(value, x)

    step = (
        step if mode == "eager" else tf.function(step, jit_compile=mode == "xla", autograph=False)
    )
    for _ in range(3):
        gradient = step(tf.constant(x))
    for actual, expected in zip(objective.network.weights, weights, strict=True):
        assert_close(actual, expected, 1e-4, floor=1e-6)
    assert_close(objective.beta, twin.network.root(1.0))
    # The embedder's gradient is that of the value alone, by V as it is after its steps.
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(x))
        value = call(objective, labels, x)
    assert_close(gradient, tape.gradient(value, x), floor=1e-6)
    assert not objective.trainable_variables


# The objective as a layer


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beta", [0.5, 0.9, 1.4])
def test_training_starts_with_a_boundary_near_the_one_given(beta, seed):
    keras.utils.set_random_seed(seed)
    objective = RankMI(initial_beta=beta)
    objective.build_from({})
    assert beta_of(objective) == pytest.approx(beta, rel=0.3)
    # A positive costs more the further it is, a negative the nearer.
    near, far = np.asarray(objective.network(np.array([0.5 * beta, 1.5 * beta])))
    assert near > 0 > far
