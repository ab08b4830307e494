"""Pairs are the same in every case: one device, replicas, a memory, label sets."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.support.mathematics import assert_close, finite_differences, random_batch, related
from tests.support.played_replicas import play, sum_and_gradient
from tfdml import losses, mining, pairwise, replicas
from tfdml.pairs import Pairs, Scope, pairs_by_name

B = 10
LABELS, X = random_batch(4, B, 4, 5, unit=False)
KINDS = {
    "euclidean": lambda a, b: np.linalg.norm(a - b),
    "sqeuclidean": lambda a, b: np.sum((a - b) ** 2),
    "cosine": lambda a, b: 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "dot": lambda a, b: -a @ b,
}


def expected(measure, anchors, references):
    return np.array([[measure(a, b) for b in references] for a in np.float64(anchors)])


def test_references_beyond_the_batch_have_no_other_representation():
    pairs, other = (Pairs.of_batch(x, LABELS) for x in (X, X[::-1]))
    np.testing.assert_array_equal(pairs.on(X[::-1]).references, X[::-1])
    beyond = pairs.across(other), Pairs.between(X, X), pairs.with_memory(X[:3], LABELS[:3])
    for case in beyond:
        with pytest.raises(ValueError, match="beyond the batch"):
            case.on(X)


@pytest.mark.parametrize("kind", KINDS)
def test_distances_of_each_case_are_those_of_anchors_and_references(kind):
    memory = np.float32(np.random.default_rng(1).normal(size=(3, 5)))
    with_memory = Pairs.of_batch(X, LABELS).with_memory(memory, LABELS[:3])
    cases = {
        "batch": (Pairs.of_batch(X, LABELS), X, X),
        "rows": (Pairs.of_batch(X, LABELS, scope=Scope(3, 4)), X[3:7], X),
        "memory": (with_memory, X, np.concatenate([X, memory])),
        "two sets": (Pairs.between(X[:4], X[4:]), X[:4], X[4:]),
    }
    for name, (pairs, anchors, references) in cases.items():
        np.testing.assert_array_equal(pairs.anchors, anchors)
        np.testing.assert_array_equal(pairs.references, references)
        found = np.array(pairs.distances(kind))
        itself = np.array(pairs.itself)
        assert_close(
            found[~itself], expected(KINDS[kind], anchors, references)[~itself], 1e-5, floor=1e-5
        )
        if kind.endswith("euclidean"):
            assert np.all(found[itself] == 0), name
        assert pairs.distances(kind) is pairs.distances(kind)


@pytest.mark.parametrize(
    "scope", [Scope(), Scope(0, B), Scope(3, 4), Scope(tf.constant(3), tf.constant(4))]
)
def test_masks_of_some_rows_are_those_of_the_batch(scope):
    pairs = Pairs.of_batch(X, LABELS, scope=scope)
    chosen = (
        slice(None)
        if scope.count is None
        else slice(int(scope.first), int(scope.first) + int(scope.count))
    )
    same = LABELS[:, None] == LABELS[None]
    np.testing.assert_array_equal(pairs.positives, (same & ~np.eye(B, dtype=bool))[chosen])
    np.testing.assert_array_equal(pairs.negatives, ~same[chosen])
    np.testing.assert_array_equal(pairs.anchor_labels, LABELS[chosen])
    np.testing.assert_array_equal(pairs.of_anchors(tf.constant(X)), X[chosen])
    assert int(pairs.num_anchors) == B


def test_an_image_is_no_negative_of_itself_though_it_has_no_label():
    sets = np.array([[1, 0], [1, 1], [0, 0]])
    pairs = Pairs.of_batch(np.eye(3), sets, mining.shares_a_label)
    np.testing.assert_array_equal(pairs.positives, [[0, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(pairs.negatives, [[0, 0, 1], [0, 0, 1], [1, 1, 0]])


def test_a_memory_is_compared_with_and_no_gradient_reaches_the_batch_as_references():
    memory, labels = (
        np.float32(np.random.default_rng(1).normal(size=(3, 5))),
        [LABELS[0], 99, LABELS[1]],
    )
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        pairs = Pairs.of_batch(x, LABELS).with_memory(memory, labels)
        total = ops.sum(pairs.products())
    gradient = tape.gradient(total, x)
    assert_close(gradient, np.tile(np.concatenate([X, memory]).sum(0), (B, 1)), 1e-5)
    np.testing.assert_array_equal(pairs.positives[:, B:], LABELS[:, None] == np.array(labels)[None])
    assert not np.any(np.diagonal(np.array(pairs.positives)[:, :B]))
    kept = pairs.keep_images(tf.constant([True] * 9 + [False, True, False, True]))
    for mask in (np.array(kept.positives), np.array(kept.negatives)):
        assert not mask[9].any()
        assert not mask[:, [9, 11]].any()
        assert mask[:9].any()


def test_totals_are_those_of_all_replicas():
    whole = Pairs.of_batch(X, LABELS)

    def on_replica(labels, x):
        named = {"a": replicas.gather(x), "b": replicas.gather(2 * x)}
        pairs = pairs_by_name(named, replicas.gather(labels), None, Scope.of_replica(x.shape[0]))
        a, b = pairs["a"], pairs["b"]
        return [
            a.mean(a.distances(), a.negatives),
            a.count(a.positives),
            b.distances("dot"),
            b.total(ops.sum(x)),
        ]

    parts = play(
        on_replica, (tf.constant(LABELS[:7]), tf.constant(X[:7])), (tf.constant(LABELS[7:]), X[7:])
    )
    mean, count, products, total = zip(*parts, strict=True)
    assert_close(sum(mean), pairwise.masked_mean(whole.distances(), whole.negatives))
    np.testing.assert_array_equal(count, [whole.count(whole.positives)] * 2)
    assert_close(np.concatenate(products), 4 * np.array(whole.distances("dot")), floor=1e-6)
    assert_close(total, [X.sum()] * 2)


def relative_spread(labels, x):
    """The distances of positives over those of negatives, as an objective's part on a replica."""
    named = {"embedding": replicas.gather(x)}
    scope = Scope.of_replica(x.shape[0])
    pairs = pairs_by_name(named, replicas.gather(labels), None, scope)["embedding"]
    distances = pairs.distances("sqeuclidean")
    apart = ops.sum(ops.where(pairs.negatives, distances, 0.0))
    return ops.sum(ops.where(pairs.positives, distances, 0.0)) / pairs.total(apart)


@pytest.mark.parametrize("sizes", [[B], [7, 3]])
def test_gradients_flow_through_a_total_to_all_replicas(sizes):
    def reference(x):
        distances = np.sum((x[:, None] - x[None]) ** 2, axis=-1)
        same = LABELS[:, None] == LABELS[None]
        return distances[same].sum() / distances[~same].sum()

    value, gradient = sum_and_gradient(relative_spread, (LABELS, X), sizes)
    assert_close(value, reference(np.float64(X)))
    (expected,) = finite_differences(reference, X)
    assert_close(gradient, expected)


def test_only_booleans_are_counted():
    pairs = Pairs.of_batch(X, LABELS)
    weights = ops.cast(pairs.positives, "float32") * 0.5
    for count in (pairs.count, lambda mask: pairs.mean(pairs.distances(), mask)):
        with pytest.raises(ValueError, match=r"must be booleans, not .*float32.*pairs\.total"):
            count(weights)


def test_no_gradient_flows_through_a_miner():
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        pairs = Pairs.of_batch(x, LABELS)
        pairs.distances()
        fixed = pairs.without_gradient()
        value = ops.sum(fixed.distances()) + ops.sum(fixed.cosines())
    assert tape.gradient(value, x) is None
    assert_close(fixed.distances(), pairs.distances())


def test_pairs_that_are_kept_are_no_others():
    pairs = Pairs.of_batch(X, LABELS).using("dot")
    kept = pairs.keep(ops.ones((B, B)), pairs.distances() < 0)
    np.testing.assert_array_equal(kept.positives, pairs.positives)
    np.testing.assert_array_equal(
        kept.negatives, np.array(pairs.negatives) & (np.array(pairs.distances()) < 0)
    )
    assert kept.distances() is pairs.distances("dot")
    with pytest.raises(
        ValueError, match=r"negatives to keep must have shape \(10, 10\), not \(10,\)"
    ):
        pairs.keep(pairs.positives, pairs.negatives[0])


@keras.saving.register_keras_serializable("tests.pairs")
class NearestNegativeLoss(losses.PairLoss):
    """The loss of docs/adding_your_own.md."""

    def __init__(self, margin=0.5, **kwargs):
        super().__init__(**kwargs)
        self.margin = margin

    def anchor_losses(self, pairs):
        distances = pairs.distances()
        nearest = ops.min(ops.where(pairs.negatives, distances, self.margin), axis=1)
        return self.over_pairs(pairs, distances, pairs.positives) + ops.relu(self.margin - nearest)


def test_a_loss_of_ones_own_works_in_every_case(tmp_path):
    from tests.models.networks import SIZE, tiny_embedder
    from tfdml.models import MetricLearner
    from tfdml.objectives import CrossBatchMemory

    loss = NearestNegativeLoss(2.0)
    value, gradient = sum_and_gradient(loss, (LABELS, X), [B])
    assert_close(sum_and_gradient(loss, (LABELS, X), [7, 3])[1], gradient)
    memory = CrossBatchMemory(loss, 20)
    memory({"embedding": X}, LABELS, training=True)
    assert np.isfinite(memory({"embedding": X}, LABELS))
    sets = np.eye(4, dtype="int64")[LABELS]
    assert_close(related(loss, mining.shares_a_label)(sets, X), value)
    learner = MetricLearner(tiny_embedder(), loss, gradient_cache=4)
    learner.build((None, SIZE, SIZE, 3))
    learner.compile("sgd", run_eagerly=True)
    images = np.random.default_rng(0).integers(0, 255, (B, SIZE, SIZE, 3)).astype("float32")
    assert np.isfinite(learner.fit(images, LABELS, batch_size=B, verbose=0).history["loss"][0])
    learner.save(tmp_path / "learner.keras")
    keras.saving.load_model(tmp_path / "learner.keras")
