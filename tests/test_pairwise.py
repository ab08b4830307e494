import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tests import references
from tests.far_vectors import NAMES, far_vectors
from tests.mathematics import MODES, assert_close, finite_differences, random_batch, value_and_gradients
from tfdml import pairwise
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval
from tfdml.losses import ContrastiveLoss
from tfdml.mining import shares_a_label
from tfdml.pairs import Pairs

KINDS = pairwise.DISTANCES


def distances(kind, x, y=None):
    return (Pairs.of_batch(x) if y is None else Pairs.between(x, y)).distances(kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 10_000))
def test_distances_equal_the_loops(kind, rows, columns, dim, seed):
    x, y = random_batch(seed, rows + columns, 1, dim, unit=False)[1][:rows], random_batch(seed + 1, columns, 1, dim)[1]
    expected = references.matrix(lambda a, b: references.distance(a, b, kind), x, y)
    # Rounding is relative to the operands of the subtraction, not to a difference that may vanish.
    scale = 1e-6 * float(np.max(np.abs(x)) ** 2 * dim + 1)
    assert_close(distances(kind, x, y), expected, 1e-5, floor=np.sqrt(scale) if kind == "euclidean" else scale)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_distances_reaches_both_sides(kind, mode):
    x, y = random_batch(0, 5, 1, 4, unit=False)[1], random_batch(1, 3, 1, 4, unit=False)[1]
    weights = np.random.default_rng(2).normal(size=(5, 3))

    def reference(a, b):
        return float(np.sum(weights * references.matrix(lambda p, q: references.distance(p, q, kind), a, b)))

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


def test_duplicates_are_at_distance_zero_where_products_depend_on_their_place(monkeypatch):
    """As on some processors: the last digits of a product of equal rows are those of its place in the matrix."""
    x = random_batch(0, 33, 1, 128)[1]
    x = np.concatenate([x, x])
    places = np.random.default_rng(1).choice([-2, 0, 2], (66, 66)) * np.finfo(np.float32).eps
    exact = pairwise.dot_products
    monkeypatch.setattr(pairwise, "dot_products", lambda x, y: exact(x, y) * (1 + places).astype("float32"))
    value, (gradient,) = value_and_gradients(lambda e: ops.sum(ops.diagonal(distances("euclidean", e), 33)), x)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


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
            lambda *a: ops.sum(weights.astype("float32") * pairwise.squared_distances(*a)), *arguments
        )
        assert np.all(np.abs(sum(gradients) - 2 * slopes) <= 1e-3 * largest)
    itself = np.eye(len(x), dtype=bool)
    assert np.all(np.diagonal(pairwise.squared_distances(x, x, itself)) == 0)


def test_a_pair_far_away_leaves_the_loss_and_the_gradient_of_the_others():
    labels = np.array([0, 0, 1, 1, 2, 2])
    near = random_batch(5, 4, 2, 3, unit=False)[1] / 2
    x = np.concatenate([near, np.float32(1e4) + np.array([[0, 0, 0], [0.25, 0.5, 0]], np.float32)])
    loss = ContrastiveLoss(margin=1.0, distance="euclidean", average="all")
    value, (gradient,) = value_and_gradients(lambda e: loss(labels, e), x)

    def reference(e):
        found = [references.distance(e[i], e[j], "euclidean") for i, j in references.positive_pairs(labels)]
        apart = [max(1 - references.distance(e[i], e[j], "euclidean"), 0) for i, j in references.negative_pairs(labels)]
        return np.mean(found) + np.mean(apart)

    assert value == pytest.approx(reference(x), rel=1e-5)
    (expected,) = finite_differences(reference, x)
    assert np.abs(expected[:4]).max() > 0.05
    assert_close(gradient, expected, 1e-3, floor=1e-5)


def rounded_to_ten_bits(x):
    """What a GPU makes of a factor where TF32 is allowed."""
    bits = tf.bitcast(tf.convert_to_tensor(x), tf.int32) + 2**12
    return tf.bitcast(tf.bitwise.bitwise_and(bits, -(2**13)), tf.float32)


@pytest.mark.parametrize("allowed", [True, False])
def test_products_are_of_float32_on_a_gpu_that_rounds_factors(monkeypatch, allowed):
    x = random_batch(0, 40, 8, 64)[1]
    exact = x.astype("float64")
    matmul = ops.matmul
    monkeypatch.setattr(pairwise.ops, "matmul", lambda a, b: matmul(rounded_to_ten_bits(a), rounded_to_ten_bits(b)))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU"] * (kind == "GPU"))
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
    errors = np.abs(products - exact @ exact.T).max(), np.abs(between - exact[:7] @ exact[7:].T).max()
    if allowed:
        expected = 6 * np.cos(3 * exact @ exact.T) @ exact
        assert max(*errors, np.abs(gradient - expected).max() / np.abs(expected).max()) < 2e-6
    else:  # where a GPU would not round, so that nothing is done against it, and what is planted shows
        assert min(errors) > 2e-5


def test_safe_sqrt_has_no_gradient_at_zero():
    value, (gradient,) = value_and_gradients(lambda x: ops.sum(pairwise.safe_sqrt(x)), np.array([0.0, 4.0]))
    assert value == 2.0
    np.testing.assert_array_equal(gradient, [0.0, 0.25])


@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-12])
def test_normalizing_next_to_nothing_gives_nothing(tiny):
    value, (gradient,) = value_and_gradients(lambda x: ops.sum(pairwise.l2_normalize(x)), np.full((1, 4), tiny))
    assert abs(value) <= 1e-3
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@pytest.mark.parametrize(
    "labels",
    [
        [[3], [1], [3]],
        np.array([3.0, 1.0, 3.0], "float64"),
        tf.constant([3, 1, 3]),
        tf.constant([[3.0], [1.0], [3.0]]),
        np.array([3, 1, 3], object),
    ],
    ids=lambda labels: f"{type(labels).__name__}{getattr(labels, 'dtype', '')}{np.shape(labels)}",
)
def test_labels_of_every_usual_form_are_accepted(labels):
    result = pairwise.as_labels(labels)
    assert "int" in keras.backend.standardize_dtype(result.dtype)
    np.testing.assert_array_equal(np.asarray(result), [3, 1, 3])


@pytest.mark.parametrize("labels", [np.eye(3), [[0, 1], [1, 0]], np.zeros((2, 2, 1)), 3])
def test_labels_that_are_no_vector_are_refused(labels):
    with pytest.raises(ValueError, match="labels must have shape"):
        pairwise.as_labels(labels)


FORMS = [np.array, tf.constant]
NUMBERS = r"np.unique\(labels, return_inverse=True\)\[1\]"
WRONG_LABELS = {
    "names": (["cat", "dog", "cat", "dog"], f"must be integers, not names.*{NUMBERS}"),
    "halves": ([0.5, 0.5, 1.5, 1.5], rf"must be integers; 0\.5 is not a whole number.*{NUMBERS}"),
    "not finite": ([0.0, 0.0, np.nan, np.nan], "must be integers; nan is not a whole number"),
    "one-hot": (np.eye(4), r"not \(4, 4\): labels.argmax\(axis=1\) makes such of one-hot rows"),
    "multi-hot": (np.tri(4, dtype=bool), r"positives=tfdml.mining.shares_a_label .*evaluation.* not offered"),
}


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize(("labels", "message"), WRONG_LABELS.values(), ids=WRONG_LABELS)
def test_wrong_labels_are_refused_with_advice_by_training_and_evaluation(labels, message, make):
    points = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(points, make(labels), metrics=["recall@1"])
    if make is tf.constant and np.ndim(labels) == 2:
        message = "argmax.*shares_a_label"  # of a tensor only the shape is looked at
    with pytest.raises(UserError, match=message):
        ContrastiveLoss()(make(labels), points)


def test_names_and_rows_are_refused_within_a_graph():
    points = tf.ones((4, 3))
    for labels, message in ((tf.constant(list("abab")), "not names"), (tf.eye(4), "argmax")):
        with pytest.raises(ValueError, match=message):
            tf.function(ContrastiveLoss(), autograph=False)(labels, points)


def test_multi_hot_rows_of_booleans_train_by_their_relation():
    points, rows = np.eye(3, dtype="float32"), np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
    loss = ContrastiveLoss(positives=shares_a_label)
    for make in FORMS:
        assert float(loss(make(rows.astype(bool)), points)) == float(loss(rows, points))


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


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_masked_mean_of_nothing_is_zero(axis):
    values, mask = ops.convert_to_tensor([[np.nan, 2.0], [np.inf, 4.0]], "float32"), np.array([[0, 1], [0, 1]], bool)
    assert np.all(np.asarray(pairwise.masked_mean(values, np.zeros((2, 2), bool), axis)) == 0)
    if axis is None:
        assert float(pairwise.masked_mean(values, mask)) == 3.0


def fit_plainly(y, **options):
    """The first loss that plain `fit` reports of labels (8,)."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization()])
    model.compile("sgd", ContrastiveLoss(), **options)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    return model.fit(x, y, batch_size=8, verbose=0).history["loss"][0]


CLASSES = np.arange(8) // 2
# Keras makes them float32 before a loss sees them.
MERGING = {"large": 1e8 + CLASSES, "fractions": 0.5 + CLASSES, "missing": np.where(CLASSES, CLASSES, np.nan)}


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


def test_whole_floats_booleans_and_columns_train_in_plain_fit_as_integers_do():
    expected = fit_plainly(CLASSES, jit_compile=False)
    assert_close(fit_plainly(CLASSES[:, None], jit_compile=False), expected)
    with pytest.warns(UserWarning, match="give integers"):
        of_floats = fit_plainly(CLASSES.astype("float64"), jit_compile=False)
    assert_close(of_floats, expected)
    flags = CLASSES > 1
    assert_close(fit_plainly(flags, jit_compile=False), fit_plainly(flags.astype("int32"), jit_compile=False))


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_floats_are_accepted_up_to_where_ids_merge(kind):
    limit = 2 ** (np.finfo(kind).nmant + 1)
    np.testing.assert_array_equal(
        pairwise.integer_labels(np.array([limit - 1, 1 - limit], kind)), [limit - 1, 1 - limit]
    )
    for wrong in (limit, -limit):
        with pytest.raises(UserError, match=f"as {kind} different ids from {limit:,} on become one"):
            pairwise.integer_labels(np.array([0, wrong], kind))
