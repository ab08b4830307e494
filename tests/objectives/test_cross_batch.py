"""The cross-batch memory against float64 references, from its first step on; its state; and which losses it takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tests.models.networks import SIZE, coloured_batch, config_of, tiny_embedder, values
from tests.objectives.memories import REFUSED, all_losses, check_replicas, unit
from tests.objectives.references_memory import binomial_sum, contrastive, multi_similarity, reference, triplet
from tests.played_replicas import play
from tfdml import losses, mining, replicas
from tfdml.models import MetricLearner
from tfdml.objectives import CrossBatchMemory
from tfdml.pairs import pairs_by_name
from tfdml.training import checkpoints
from tfdml.training.checkpoints import TrainingState

PAIRS = {
    "contrastive": (lambda: losses.ContrastiveLoss(1.0, "euclidean"), contrastive),
    "binomial sum": (lambda: losses.BinomialDevianceLoss(reduction="sum"), binomial_sum),
    "triplet": (lambda: losses.TripletLoss(0.3), triplet),
    "multi similarity": (lambda: losses.MultiSimilarityLoss(2.0, 10.0, mining_epsilon=None), multi_similarity),
}


XLA = pytest.param("multi similarity", "xla", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "mode"), [*((name, "eager") for name in PAIRS), XLA])
def test_value_and_gradient_from_the_first_step_on(name, mode):
    make, of_anchors = PAIRS[name]
    objective = CrossBatchMemory(make(), size=10, start=1)
    objective.build({"embedding": (None, 4)})

    def normalised(x):
        return {"embedding": x / tf.norm(x, axis=1, keepdims=True)}

    remember = objective.remember if mode == "eager" else tf.function(objective.remember, jit_compile=mode == "xla")
    memory, sizes = [], []
    # The memory: empty twice, partly filled, full, and smaller than the batch before.
    for step, size in enumerate((4, 4, 7, 6, 13, 5)):
        labels, x = random_batch(step, size, 3, 4)
        sizes.append(len(memory))
        if step != 5:
            (expected,) = finite_differences(
                lambda e, y=labels, m=memory, x=x: reference(of_anchors, y, unit(e), m, compared=unit(x)), x
            )
            value, (gradient,) = value_and_gradients(
                lambda e, y=labels: objective.compute_pairs(pairs_by_name(normalised(e), y)), x, mode=mode
            )
            assert_close(value, reference(of_anchors, labels, unit(x), memory))
            assert_close(gradient, expected)
        remember(normalised(tf.constant(x)), tf.constant(labels))
        if step >= 1:
            memory = (memory + list(zip(labels, unit(x), strict=True)))[-10:]
    assert sizes == [0, 0, 4, 10, 10, 10]


@pytest.mark.parametrize("name", sorted(all_losses()))
def test_what_the_memory_lacks_makes_no_pair_whatever_the_loss(name):
    loss = all_losses()[name]
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"CrossBatchMemory takes a loss of tfdml over pairs .* not {name}"):
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


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine", "dot"])
def test_the_gradient_reaches_an_image_as_an_anchor_alone(distance):
    labels, x = random_batch(1, 9, 3, 5)
    loss = losses.ContrastiveLoss(distance=distance)
    objective = CrossBatchMemory(loss, 3)
    _, (gradient,) = value_and_gradients(lambda e: objective({"embedding": e}, tf.constant(labels)), x)
    _, (both,) = value_and_gradients(lambda e: loss(labels, e), x)
    assert_close(gradient, both / 2)


def sharing(a, b):
    """Whether each of the label sets shares a label with each of the others, one by one."""
    return np.array([[bool(np.any(np.logical_and(one, other))) for other in b] for one in a])


def test_label_sets_are_kept_in_the_memory(tmp_path):
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2, (3, 6, 4))
    x = generator.normal(size=(3, 6, 5)).astype("float32")
    loss = losses.ContrastiveLoss(1.0, "euclidean").with_positives(mining.shares_a_label)
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


def test_label_sets_that_do_not_fit_are_refused_with_what_helps():
    plain = CrossBatchMemory(losses.ContrastiveLoss(), 3, name="xbm")
    with pytest.raises(ValueError, match=r"xbm takes one label .* give it ContrastiveLoss\(...\).with_positives"):
        plain.as_labels(np.zeros((2, 3), "int64"))
    sets = losses.ContrastiveLoss().with_positives(mining.shares_a_label)
    with pytest.raises(ValueError, match=r"xbm keeps 1 labels of each image.*give it label_columns=3"):
        CrossBatchMemory(sets, 3, name="xbm").as_labels(np.zeros((2, 3), "int64"))
    with pytest.raises(ValueError, match="label_columns=3 needs a loss that says which label sets belong together"):
        CrossBatchMemory(losses.ContrastiveLoss(), 3, label_columns=3)


@pytest.mark.parametrize("loss", [losses.AMSoftmaxLoss(), keras.losses.MeanSquaredError()])
def test_other_losses_are_refused(loss):
    with pytest.raises(ValueError, match="takes a loss of tfdml over pairs"):
        CrossBatchMemory(loss)
    with pytest.raises(ValueError, match="must be vectors"):
        CrossBatchMemory(losses.ContrastiveLoss(), representation="feature_map").build({"feature_map": (None, 2, 2, 3)})


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


def made():
    keras.utils.set_random_seed(3)
    model = MetricLearner(
        tiny_embedder(), [CrossBatchMemory(losses.ContrastiveLoss(1.3), 20, start=1, name="xbm")], gradient_cache=8
    )
    model.build((None, SIZE, SIZE, 3))
    model.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
    return model


def fit(model, steps):
    for seed in steps:
        labels, x = coloured_batch(seed)
        model.fit(x, labels, batch_size=12, shuffle=False, verbose=0)
    return model


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_memory_it_had_bit_for_bit(tmp_path):
    unbroken = fit(made(), range(4))
    halfway = fit(made(), range(2))
    (objective,) = halfway.objectives
    assert (int(objective.filled), int(objective.steps)) == (12, 1)
    np.testing.assert_array_equal(objective.memory_labels[-12:], coloured_batch()[0])
    # What evaluation sees is not remembered.
    halfway.evaluate(*reversed(coloured_batch(9)), verbose=0)
    assert int(objective.filled) == 12
    checkpoints.save(tmp_path, halfway, TrainingState(2, []))
    resumed = made()
    checkpoints.restore_latest(tmp_path, resumed)
    fit(resumed, range(2, 4))
    for one, other in zip(values(resumed.variables), values(unbroken.variables), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(resumed.objectives[0].filled) == 20
    resumed.save(tmp_path / "learner.keras")
    loaded = keras.saving.load_model(tmp_path / "learner.keras")
    np.testing.assert_array_equal(loaded.objectives[0].memory, resumed.objectives[0].memory)
    assert config_of(loaded) == config_of(resumed)
    loaded.objectives[0].forget()
    assert not any(np.any(value) for value in values(loaded.objectives[0].variables))
