"""Cross-batch memory and PRISM."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import values
from tests.objectives.references_memory import (
    PrismReference,
    binomial_sum,
    contrastive,
    multi_similarity,
    reference,
    triplet,
)
from tests.support.mathematics import (
    assert_close,
    finite_differences,
    public_classes,
    random_batch,
    value_and_gradients,
)
from tests.support.played_replicas import play, sum_and_gradient
from tfdml import losses, mining, replicas
from tfdml.objectives import CrossBatchMemory, Prism
from tfdml.pairs import Pairs, Scope, pairs_by_name


def all_losses():
    return {
        name: cls()
        for name, cls in public_classes(losses).items()
        if issubclass(cls, losses.PairLoss)
    }


REFUSED = {"LiftedStructureLoss", "AngularLoss", "QuadrupletLoss", "VICRegLoss"}


def unit(x):
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def check_replicas(objective, labels, x, sizes):
    """Replicas of these sizes make the value and the gradient of one device."""

    def share(own_labels, own):
        every, all_labels = {"embedding": replicas.gather(own)}, replicas.gather(own_labels)
        whole = objective.whole_batch
        pairs = pairs_by_name(
            every,
            all_labels,
            objective.positives,
            Scope() if whole else Scope.of_replica(own.shape[0]),
        )
        return objective.compute_pairs(pairs) / (replicas.count() if whole else 1)

    expected = sum_and_gradient(share, (labels, x), [sum(sizes)])
    actual = sum_and_gradient(share, (labels, x), sizes)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


PAIRS = {
    "contrastive": (lambda: losses.ContrastiveLoss(1.0, "euclidean"), contrastive),
    "binomial sum": (lambda: losses.BinomialDevianceLoss(reduction="sum"), binomial_sum),
    "triplet": (lambda: losses.TripletLoss(0.3), triplet),
    "multi similarity": (
        lambda: losses.MultiSimilarityLoss(2.0, 10.0, mining_epsilon=None),
        multi_similarity,
    ),
}


XLA = pytest.param("multi similarity", "xla", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "mode"), [*((name, "eager") for name in PAIRS), XLA])
def test_value_and_gradient_from_the_first_step_on(name, mode):
    make, of_anchors = PAIRS[name]
    objective = CrossBatchMemory(make(), size=10, start=1)
    objective.build({"embedding": (None, 4)})

    def normalized(x):
        return {"embedding": x / tf.norm(x, axis=1, keepdims=True)}

    remember = (
        objective.remember
        if mode == "eager"
        else tf.function(objective.remember, jit_compile=mode == "xla")
    )
    memory, sizes = [], []
    # The memory: empty twice, partly filled, full, and smaller than the batch before.
    for step, size in enumerate((4, 4, 7, 6, 13, 5)):
        labels, x = random_batch(step, size, 3, 4)
        sizes.append(len(memory))
        if step != 5:
            (expected,) = finite_differences(
                lambda e, y=labels, m=memory, x=x: reference(
                    of_anchors, y, unit(e), m, compared=unit(x)
                ),
                x,
            )
            value, (gradient,) = value_and_gradients(
                lambda e, y=labels: objective.compute_pairs(pairs_by_name(normalized(e), y)),
                x,
                mode=mode,
            )
            assert_close(value, reference(of_anchors, labels, unit(x), memory))
            assert_close(gradient, expected)
        remember(normalized(tf.constant(x)), tf.constant(labels))
        if step >= 1:
            memory = (memory + list(zip(labels, unit(x), strict=True)))[-10:]
    assert sizes == [0, 0, 4, 10, 10, 10]


@pytest.mark.parametrize("name", sorted(all_losses()))
def test_what_the_memory_lacks_makes_no_pair_whatever_the_loss(name):
    loss = all_losses()[name]
    if name in REFUSED:
        with pytest.raises(
            ValueError,
            match=f"CrossBatchMemory takes a loss of each anchor's own pairs, not {name}",
        ):
            CrossBatchMemory(loss)
        return
    labels, x = random_batch(1, 9, 3, 5)
    earlier = random_batch(2, 7, 3, 5)

    def of_memory(size, batches):
        objective = CrossBatchMemory(loss, size)
        for earlier_labels, vectors in batches:
            objective({"embedding": tf.constant(vectors)}, earlier_labels, training=True)
        return value_and_gradients(lambda e: objective({"embedding": e}, tf.constant(labels)), x)

    value, _ = of_memory(3, [])
    alone = float(loss(labels, x))
    assert_close(value, alone, floor=1e-6)
    full, (expected,) = of_memory(7, [earlier])
    partly, (gradient,) = of_memory(30, [earlier])
    assert_close(partly, full)
    assert_close(gradient, expected, floor=1e-6)
    assert abs(full - alone) > 1e-4


def sharing(a, b):
    """Whether each of the label sets shares a label with each of the others, one by one."""
    return np.array([[bool(np.any(np.logical_and(one, other))) for other in b] for one in a])


def test_label_sets_are_kept_in_the_memory(tmp_path):
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2, (3, 6, 4))
    x = generator.normal(size=(3, 6, 5)).astype("float32")
    loss = losses.ContrastiveLoss(1.0, "euclidean", positives=mining.shares_a_label)
    objective = CrossBatchMemory(loss, size=10, label_columns=4)
    for labels, vectors in zip(rows[:2], x[:2], strict=True):
        objective({"embedding": tf.constant(vectors)}, labels, training=True)
    np.testing.assert_array_equal(objective.memory_labels, rows[:2].reshape(12, 4)[2:])
    value = float(objective({"embedding": tf.constant(x[2])}, rows[2]))
    columns = np.concatenate([x[2], x[:2].reshape(12, 5)[2:]]).astype("float64")
    together = sharing(rows[2], np.concatenate([rows[2], rows[:2].reshape(12, 4)[2:]]))
    distances = np.linalg.norm(x[2][:, None] - columns[None], axis=2)
    other = np.arange(16)[None] != np.arange(6)[:, None]
    expected = np.mean(distances[together & other])
    expected += np.mean([1 - d for d in distances[~together & other] if d < 1] or [0.0])
    assert_close(value, expected)
    again = CrossBatchMemory.from_config(objective.get_config())
    assert again.label_columns == 4
    assert again.loss.positives is mining.shares_a_label


def test_replicas_share_one_memory_and_make_one_devices_gradient():
    labels, x = random_batch(3, 12, 3, 5)
    objective = CrossBatchMemory(losses.ContrastiveLoss(1.2, "euclidean"), size=9)
    earlier_labels, earlier = random_batch(4, 7, 3, 5)
    objective({"embedding": tf.constant(earlier)}, earlier_labels, training=True)

    check_replicas(objective, labels, x, [7, 5])

    def remember(own_labels, own):
        objective.forget()
        objective.remember({"embedding": replicas.gather(own)}, replicas.gather(own_labels))
        return objective.memory.numpy(), objective.memory_labels.numpy()

    for memory, kept in play(remember, (labels[:7], x[:7]), (labels[7:], x[7:])):
        np.testing.assert_array_equal(memory, x[-9:])
        np.testing.assert_array_equal(kept, labels[-9:])


CLASSES, DIM = 4, 5


def rounds(seed):
    """Batches of different sizes, from few classes at first; some labels wrong."""
    generator = np.random.default_rng(seed)
    centers = 1.5 * generator.normal(size=(CLASSES, DIM))
    for step, size in enumerate((4, 6, 9, 12, 7, 11, 2, 10)):
        of = generator.integers(0, 2 if step < 2 else CLASSES, size)
        x = centers[of] + generator.normal(size=(size, DIM))
        wrong = generator.random(size) < 0.3
        yield np.where(wrong, (of + 1) % CLASSES, of), unit(x).astype("float32")


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    "of_anchors", [contrastive, multi_similarity], ids=["contrastive", "multi similarity"]
)
@pytest.mark.parametrize(
    ("noise_rate", "window", "start", "pairs"),
    [(0.3, 3, 0, "memory"), (0.5, 1, 2, "memory"), (0.0, 5, 0, "memory"), (0.3, 5, 1, "batch")],
)
def test_equals_the_procedure_image_by_image(of_anchors, noise_rate, window, start, pairs):
    loss = losses.ContrastiveLoss(1.0, "euclidean") if of_anchors is contrastive else None
    loss = loss or losses.MultiSimilarityLoss(2.0, 10.0, mining_epsilon=None)
    objective = Prism(loss, CLASSES, noise_rate, window, size=15, start=start, pairs=pairs)
    objective.build({"embedding": (None, DIM)})
    expected, dropped = PrismReference(noise_rate, window, 15, start), 0
    for labels, x in rounds(1):
        before = list(expected.memory)
        kept = expected.step(labels, x)
        objective.update({"embedding": tf.constant(x)}, tf.constant(labels))
        np.testing.assert_array_equal(objective.kept(tf.constant(labels), tf.constant(x)), kept)
        dropped += np.sum(~kept)

        def value_of(e, kept=kept, labels=labels, before=before, x=x):
            # Next to a memory all that an image is compared with is constant.
            memory, compared = (before, unit(x)[kept]) if pairs == "memory" else ([], None)
            images = reference(of_anchors, labels[kept], unit(e)[kept], memory, compared)
            # A mean over images is over all of the batch.
            return images * (1.0 if of_anchors is contrastive else kept.mean())

        def normalized(e):
            return {"embedding": e / tf.norm(e, axis=1, keepdims=True)}

        value, (gradient,) = value_and_gradients(
            lambda e, y=labels: objective.compute_pairs(pairs_by_name(normalized(e), y)), x
        )
        assert_close(value, value_of(x))
        assert_close(gradient, finite_differences(value_of, x)[0])
        np.testing.assert_array_equal(gradient[~kept], 0.0)
        objective.remember({"embedding": tf.constant(x)}, tf.constant(labels))
        filled = int(objective.filled)
        assert filled == len(expected.memory)
        if filled:
            np.testing.assert_array_equal(
                objective.memory[-filled:], [vector for _, vector in expected.memory]
            )
            np.testing.assert_array_equal(
                objective.memory_labels[-filled:], [label for label, _ in expected.memory]
            )
        known = int(objective.known)
        assert_close(objective.thresholds.numpy()[window - known :], expected.thresholds)
    assert (dropped > 5) == (noise_rate > 0)


@pytest.mark.parametrize("name", sorted(set(all_losses()) - REFUSED))
def test_what_does_not_count_is_as_if_it_were_not_there_whatever_the_loss(name):
    loss = all_losses()[name]
    labels, x = random_batch(1, 10, 3, DIM)
    counted = np.array([True, True, False, True, True, True, False, True, True, True])

    def of_some(e):
        return loss.of_pairs(Pairs.of_batch(e, labels).keep_images(tf.constant(counted)))

    value, (gradient,) = value_and_gradients(of_some, x)
    alone, (expected,) = value_and_gradients(lambda e: loss(labels[counted], e), x[counted])
    # A mean over pairs, or one over all images of the batch.
    share = next(
        share for share in (1.0, 0.8) if abs(value - share * alone) < 1e-5 * (1 + abs(alone))
    )
    assert abs(alone) > 1e-3
    assert_close(gradient[counted], share * expected, floor=1e-6)
    np.testing.assert_array_equal(gradient[~counted], 0.0)


def test_prism_replicas_share_one_memory_and_make_one_devices_gradient():
    objective = Prism(losses.ContrastiveLoss(1.2, "euclidean"), CLASSES, 0.3, size=20)
    *earlier, (labels, x) = list(rounds(3))
    for before, vectors in earlier:
        objective({"embedding": tf.constant(vectors)}, before, training=True)
    # The last batch as it was in its step, in which it was not remembered yet.
    state = values(objective.variables)

    assert not np.all(objective.kept(tf.constant(labels), tf.constant(x)))
    check_replicas(objective, labels, x, [6, 4])

    def step(own_labels, own):
        for variable, value in zip(objective.variables, state, strict=True):
            variable.assign(value)
        every, all_labels = {"embedding": replicas.gather(own)}, replicas.gather(own_labels)
        objective.update(every, all_labels)
        objective.remember(every, all_labels)
        return values(objective.variables)

    one = step(tf.constant(labels), tf.constant(x))
    for other in play(step, (labels[:6], x[:6]), (labels[6:], x[6:])):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
