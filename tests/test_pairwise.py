import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support import references
from tests.support.far_vectors import NAMES, far_vectors
from tests.support.mathematics import (
    MODES,
    assert_close,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml import pairwise
from tfdml.errors import UserError
from tfdml.labels import integer_labels
from tfdml.losses import ContrastiveLoss
from tfdml.pairs import Pairs
from tfdml.registry import DISTANCES

KINDS = DISTANCES


def distances(kind, x, y=None):
    return (Pairs.of_batch(x) if y is None else Pairs.between(x, y)).distances(kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 10_000))
def test_distances_equal_the_loops(kind, rows, columns, dim, seed):
    x, y = (
        random_batch(seed, rows + columns, 1, dim, unit=False)[1][:rows],
        random_batch(seed + 1, columns, 1, dim)[1],
    )
    expected = references.matrix(lambda a, b: references.distance(a, b, kind), x, y)
    # Rounding is relative to the operands of the subtraction, not to a difference that may vanish.
    scale = 1e-6 * float(np.max(np.abs(x)) ** 2 * dim + 1)
    assert_close(
        distances(kind, x, y),
        expected,
        1e-5,
        floor=np.sqrt(scale) if kind == "euclidean" else scale,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_distances_reaches_both_sides(kind, mode):
    x, y = random_batch(0, 5, 1, 4, unit=False)[1], random_batch(1, 3, 1, 4, unit=False)[1]
    weights = np.random.default_rng(2).normal(size=(5, 3))

    def reference(a, b):
        return float(
            np.sum(weights * references.matrix(lambda p, q: references.distance(p, q, kind), a, b))
        )

    _, gradients = value_and_gradients(
        lambda a, b: ops.sum(ops.convert_to_tensor(weights, "float32") * distances(kind, a, b)),
        x,
        y,
        mode=mode,
    )
    for actual, expected in zip(gradients, finite_differences(reference, x, y), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("size", "dim"), [(3, 1), (33, 127), (100, 64), (129, 300)])
def test_duplicates_are_at_distance_exactly_zero(size, dim, jitted):
    x = random_batch(0, size, 1, dim, unit=False)[1]
    squared = tf.function(pairwise.squared_distances, jit_compile=jitted, autograph=False)(
        tf.constant(np.concatenate([x, x]))
    )
    assert np.all(np.diagonal(squared.numpy(), size) == 0)
    assert np.all(np.diagonal(squared.numpy()) == 0)


@pytest.mark.parametrize("name", NAMES)
def test_no_vector_blurs_the_distances_of_others_nor_their_gradient(name):
    x = far_vectors(name, size=24)
    exact = x.astype(np.float64)
    difference = exact[:, None] - exact[None]
    expected = np.square(difference).sum(axis=-1)
    # Weights in proportion to nearness, so that far pairs do not drown the gradient of near ones.
    weights = 1 / np.maximum(expected, 1e-20)
    np.fill_diagonal(weights, 0)
    slopes = (2 * weights[..., None] * difference).sum(axis=1)
    largest = (2 * weights[..., None] * np.abs(difference)).sum(axis=1)
    for arguments in ((x,), (x, x)):
        np.testing.assert_allclose(pairwise.squared_distances(*arguments), expected, rtol=2e-4)
        _, gradients = value_and_gradients(
            lambda *a: ops.sum(weights.astype("float32") * pairwise.squared_distances(*a)),
            *arguments,
        )
        assert np.all(np.abs(sum(gradients) - 2 * slopes) <= 1e-3 * largest)
    itself = np.eye(len(x), dtype=bool)
    assert np.all(np.diagonal(pairwise.squared_distances(x, x, itself)) == 0)


def rounded_to_ten_bits(x):
    """What a GPU makes of a factor where TF32 is allowed."""
    bits = tf.bitcast(tf.convert_to_tensor(x), tf.int32) + 2**12
    return tf.bitcast(tf.bitwise.bitwise_and(bits, -(2**13)), tf.float32)


@pytest.mark.parametrize("allowed", [True, False])
def test_products_are_of_float32_on_a_gpu_that_rounds_factors(monkeypatch, allowed):
    x = random_batch(0, 40, 8, 64)[1]
    exact = x.astype("float64")
    matmul = ops.matmul
    monkeypatch.setattr(
        pairwise.ops, "matmul", lambda a, b: matmul(rounded_to_ten_bits(a), rounded_to_ten_bits(b))
    )
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: ["GPU"] * (kind == "GPU")
    )
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        variable = tf.Variable(x)
        with tf.GradientTape() as tape:
            products = pairwise.dot_products(variable)
            value = tf.reduce_sum(tf.sin(3.0 * products))
        gradient = tape.gradient(value, variable)
        between = pairwise.dot_products(x[:7], x[7:])
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    errors = (
        np.abs(products - exact @ exact.T).max(),
        np.abs(between - exact[:7] @ exact[7:].T).max(),
    )
    if allowed:
        expected = 6 * np.cos(3 * exact @ exact.T) @ exact
        assert max(*errors, np.abs(gradient - expected).max() / np.abs(expected).max()) < 2e-6
    else:  # where a GPU would not round, nothing is done against it, and what is planted shows
        assert min(errors) > 2e-5


def test_safe_sqrt_has_no_gradient_at_zero():
    value, (gradient,) = value_and_gradients(
        lambda x: ops.sum(pairwise.safe_sqrt(x)), np.array([0.0, 4.0])
    )
    assert value == 2.0
    np.testing.assert_array_equal(gradient, [0.0, 0.25])


@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-12])
def test_normalizing_next_to_nothing_gives_nothing(tiny):
    value, (gradient,) = value_and_gradients(
        lambda x: ops.sum(pairwise.l2_normalize(x)), np.full((1, 4), tiny)
    )
    assert abs(value) <= 1e-3
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


NUMBERS = r"np.unique\(labels, return_inverse=True\)\[1\]"


def test_names_and_rows_are_refused_within_a_graph():
    points = tf.ones((4, 3))
    for labels, message in ((tf.constant(list("abab")), "not names"), (tf.eye(4), "argmax")):
        with pytest.raises(ValueError, match=message):
            tf.function(ContrastiveLoss(), autograph=False)(labels, points)


def test_labels_whose_rank_the_graph_does_not_know_are_accepted():
    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)], autograph=False)
    def convert(labels):
        return pairwise.as_labels(labels)

    for labels in ([3, 1, 3], [[3], [1], [3]]):
        np.testing.assert_array_equal(convert(tf.constant(labels, tf.int64)), [3, 1, 3])


@pytest.mark.parametrize("base", [2**24, 2**31, 2**53, 2**62, -(2**53) - 1])
@pytest.mark.parametrize("make", [list, np.array, tf.constant])
def test_large_ids_do_not_collide(base, make):
    labels = make([base, base + 1, base])
    if make is tf.constant:
        labels = tf.constant([base, base + 1, base], tf.int64)
    labels = pairwise.as_labels(labels)
    np.testing.assert_array_equal(pairwise.together(labels, labels)[0], [True, False, True])


def fit_plainly(y, **options):
    """The first loss that plain `fit` reports of labels (8,)."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization()])
    model.compile("sgd", ContrastiveLoss(), **options)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    return model.fit(x, y, batch_size=8, verbose=0).history["loss"][0]


CLASSES = np.arange(8) // 2
# Keras makes them float32 before a loss sees them.
MERGING = {
    "large": 1e8 + CLASSES,
    "fractions": 0.5 + CLASSES,
    "missing": np.where(CLASSES, CLASSES, np.nan),
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("labels", MERGING.values(), ids=MERGING)
def test_labels_that_keras_would_merge_are_refused_by_plain_fit(labels):
    with pytest.raises(UserError, match="must be integers; "):
        fit_plainly(labels, run_eagerly=True)
    refused = pytest.raises(tf.errors.InvalidArgumentError, match=f"must be integers; .*{NUMBERS}")
    with pytest.warns(UserWarning, match="give integers"), refused:
        fit_plainly(labels, jit_compile=False)
    with pytest.warns(UserWarning, match="give integers"):
        loss = fit_plainly(labels, jit_compile=True)
    assert np.isnan(loss)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_floats_are_accepted_up_to_where_ids_merge(kind):
    limit = 2 ** (np.finfo(kind).nmant + 1)
    np.testing.assert_array_equal(
        integer_labels(np.array([limit - 1, 1 - limit], kind)), [limit - 1, 1 - limit]
    )
    for wrong in (limit, -limit):
        with pytest.raises(
            UserError, match=f"as {kind} different ids from {limit:,} on become one"
        ):
            integer_labels(np.array([0, wrong], kind))


@pytest.mark.parametrize("mode", MODES)
def test_the_softmax_of_a_sure_row_keeps_its_digits(mode):
    rng = np.random.default_rng(0)
    logits = rng.uniform(-30, 30, (40, 12))
    positives = rng.random((40, 12)) < 0.3
    positives[10:15] = np.arange(12) == 4
    negatives = ~positives & (rng.random((40, 12)) < 0.7)
    # Sure rows, two equal positives, a row of one positive alone, and one without any.
    logits[:20] = np.where(positives[:20], 40 + logits[:20] / 10, -20 + logits[:20] / 10)
    positives[0] = [True, True] + 10 * [False]
    negatives[0] = ~positives[0]
    logits[0, :2] = 7
    positives[1:3], negatives[1] = False, False
    positives[1, 3] = True
    logits = logits.astype("float32")

    def costs(x):
        return pairwise.softmax_costs(x, positives, negatives)[positives]

    exact = logits.astype("float64")
    compared = positives | negatives
    expected, slopes = np.zeros((40, 12)), np.zeros((40, 12))
    for row, column in np.argwhere(positives):
        others = compared[row].copy()
        others[column] = False
        ratios = np.where(others, np.exp(exact[row] - exact[row, column]), 0)
        expected[row, column] = np.log1p(ratios.sum())
        slopes[row] += ratios / (1 + ratios.sum())
        slopes[row, column] -= ratios.sum() / (1 + ratios.sum())
    value, (gradient,) = value_and_gradients(
        lambda x: keras.ops.sum(pairwise.softmax_costs(x, positives, negatives) * positives),
        logits,
        mode=mode,
    )
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(costs(logits), expected[positives], rtol=1e-5)
    # Those of several positives of a row cancel one another.
    is_alone = positives.sum(axis=1) == 1
    np.testing.assert_allclose(gradient[is_alone], slopes[is_alone], rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(gradient, slopes, atol=1e-6)
