import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.losses import references_ranking as references
from tests.mathematics import assert_close, degenerate_batches, random_batch, value_and_gradients
from tfdml.mining import negative_probabilities, sample_negatives
from tfdml.pairs import Pairs


@pytest.mark.parametrize("dim", [2, 3, 16, 128])
def test_equals_the_formula(dim):
    labels, x = random_batch(dim, 14, 4, dim)
    assert_close(negative_probabilities(Pairs.of_batch(x, labels)), references.draw_probabilities(labels, x))
    assert_close(negative_probabilities(Pairs.of_batch(5 * x, labels)), references.draw_probabilities(labels, x))


@pytest.mark.parametrize("batch", degenerate_batches())
def test_rows_sum_to_one_or_to_zero_without_negatives(batch):
    labels, x = degenerate_batches()[batch]
    rows = np.asarray(negative_probabilities(Pairs.of_batch(x, labels)))
    assert_close(rows, references.draw_probabilities(labels, x), floor=1e-6)
    has_negative = (labels[:, None] != labels[None]).any(axis=1)
    np.testing.assert_allclose(rows.sum(axis=1), has_negative, rtol=1e-6)
    assert np.all(rows[labels[:, None] == labels[None]] == 0)


def test_each_row_has_its_own_maximum():
    """With one maximum for the batch, the row of negatives at 1.3 would underflow beside the one at 0.5."""
    x = np.zeros((4, 512), "float32")
    x[0, 0] = x[1, 0] = 1.0
    x[2, 1], x[3, 1], x[3, 2] = 1.0, 1 - 1.3**2 / 2, np.sqrt(1 - (1 - 1.3**2 / 2) ** 2)
    rows = np.asarray(negative_probabilities(Pairs.of_batch(x, [0, 1, 2, 3])))
    np.testing.assert_allclose(rows[2], [0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(rows[0], [0, 1, 0, 0], atol=1e-6)


def test_an_anchor_without_a_near_negative_draws_uniformly():
    x = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]], "float32")
    np.testing.assert_allclose(negative_probabilities(Pairs.of_batch(x, [0, 0, 1, 1]))[0], [0, 0, 0.5, 0.5])


def test_no_gradient_flows_through():
    labels, x = random_batch(0, 6, 2, 4)
    _, (gradient,) = value_and_gradients(
        lambda e: tf.reduce_sum(negative_probabilities(Pairs.of_batch(e, labels)) ** 2), x
    )
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize(("cutoff", "last"), [(0.0, 1.4), (1.5, 1.4), (0.5, 2.0)])
def test_cutoffs_out_of_order_are_refused(cutoff, last):
    with pytest.raises(ValueError, match="0 < cutoff < nonzero_loss_cutoff < 2"):
        negative_probabilities(Pairs.of_batch(np.eye(3), [0, 1, 2]), cutoff, last)


def test_draws_follow_the_probabilities():
    probabilities = np.tile(np.array([[0.0, 0.1, 0.2, 0.7]], "float32"), (4000, 1))
    indices, valid = sample_negatives(probabilities, seed=1)
    assert np.all(valid)
    np.testing.assert_allclose(np.bincount(np.asarray(indices)[:, 0], minlength=4) / 4000, probabilities[0], atol=0.03)


def test_several_draws_differ_and_say_when_candidates_run_out():
    indices, valid = sample_negatives([[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], count=3, seed=0)
    assert set(np.asarray(indices)[0, :2]) == {0, 2}
    np.testing.assert_array_equal(valid, [[True, True, False], [False, False, False]])


def test_a_seed_repeats_and_a_generator_does_not():
    probabilities = np.full((50, 50), 0.02, "float32")
    again = [np.asarray(sample_negatives(probabilities, seed=3)[0]) for _ in range(2)]
    np.testing.assert_array_equal(*again)
    generator = keras.random.SeedGenerator(3)
    fresh = [np.asarray(sample_negatives(probabilities, seed=generator)[0]) for _ in range(2)]
    assert np.any(fresh[0] != fresh[1])


def test_works_under_jit():
    labels, x = random_batch(1, 6, 3, 4)
    jit = tf.function(
        lambda e: sample_negatives(negative_probabilities(Pairs.of_batch(e, labels)), 2, 5),
        jit_compile=True,
        autograph=False,
    )
    indices, valid = jit(tf.constant(x))
    chosen = labels[np.asarray(indices)]
    assert np.all((chosen != labels[:, None]) | ~np.asarray(valid))
