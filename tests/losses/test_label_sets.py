"""Losses whose positives are made by a relation of label rows: label sets and hierarchies."""

import json

import keras
import numpy as np
import pytest

from tests import references
from tests.losses import references_pairs
from tests.mathematics import assert_close, random_batch, value_and_gradients
from tests.models.networks import coloured_batch, tiny_embedder
from tests.played_replicas import sum_and_gradient
from tfdml import interop, losses, models, objectives
from tfdml.losses.base import PairLoss
from tfdml.mining import AngularMiner, EasyPositiveMiner, SameLabel, shares_a_label

ON_PAIRS = [
    getattr(losses, name)
    for name in losses.__all__
    if issubclass(getattr(losses, name), PairLoss) and getattr(losses, name) is not PairLoss
]
every_loss = pytest.mark.parametrize("make", ON_PAIRS, ids=lambda make: make.__name__)


def label_sets(seed=0, size=9, labels=4):
    """Rows of 0 and 1, among them an image without any label, and vectors."""
    sets = (np.random.default_rng(seed).random((size, labels)) < 0.35).astype("int64")
    sets[0], sets[1], sets[2] = 0, [1, 1, 0, 0], [0, 1, 1, 0]
    return sets, random_batch(seed, size, 3, 5)[1]


def pairs_of(sets):
    """The ordered pairs of two images with a label in common, and all others."""
    pairs = [(i, j) for i in range(len(sets)) for j in range(len(sets)) if i != j]
    together = [(i, j) for i, j in pairs if np.any(sets[i] & sets[j])]
    return together, [pair for pair in pairs if pair not in together]


@every_loss
def test_the_equality_of_labels_is_what_losses_do_without(make):
    labels, x = random_batch(3, 10, 3, 5)
    loss = make()
    expected, (expected_gradient,) = value_and_gradients(lambda e: loss(labels, e), x)
    again = loss.with_positives(SameLabel())
    others = np.arange(10) % 4
    for rows, relation in ((labels, again), (np.stack([others, labels], 1), loss.with_positives(SameLabel(column=1)))):
        value, (gradient,) = value_and_gradients(lambda e, y=rows, f=relation: f(y, e), x)
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(gradient, expected_gradient)
    assert loss.positives is None


@pytest.mark.one_quick_case
@every_loss
def test_label_sets_have_finite_values_and_gradients(make):
    sets, x = label_sets()
    loss = make().with_positives(shares_a_label)
    for rows in (sets, np.zeros_like(sets), np.ones_like(sets)):
        value, (gradient,) = value_and_gradients(lambda e, y=rows: loss(y, e), x)
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(loss(sets.astype("float32"), x), loss(sets, x))


def test_pairs_are_those_that_share_a_label():
    sets, x = label_sets()
    together, apart = pairs_of(sets)
    # The second and the third share a label with each other, and no class is made of such pairs.
    assert (1, 2) in together
    distances = {pair: references.squared_distance(x[pair[0]], x[pair[1]]) for pair in together + apart}
    pushes = [1.0 - distances[pair] for pair in apart if distances[pair] < 1.0]
    expected = references.mean([distances[pair] for pair in together]) + references.mean(pushes)
    assert_close(losses.ContrastiveLoss().with_positives(shares_a_label)(sets, x), expected)
    values = []
    for a, p in together:
        near = references.cosine(x[a], x[p]) / 0.5
        others = [references.cosine(x[a], x[n]) / 0.5 - near for b, n in apart if b == a]
        values.append(references_pairs.log1p_sum_exp(others))
    assert_close(losses.NTXentLoss(0.5).with_positives(shares_a_label)(sets, x), references.mean(values))


def test_miners_choose_among_the_pairs_of_the_relation():
    sets, x = label_sets()
    together, apart = pairs_of(sets)
    seen = []

    @keras.saving.register_keras_serializable("tests.label_sets")
    def everything(pairs):
        seen.append([np.argwhere(mask).tolist() for mask in (pairs.positives, pairs.negatives)])
        return pairs

    losses.ContrastiveLoss(mining=everything).with_positives(shares_a_label)(sets, x)
    assert seen == [[[list(pair) for pair in together], [list(pair) for pair in apart]]]
    for miner in (EasyPositiveMiner(), AngularMiner()):
        assert np.isfinite(losses.TripletLoss(mining=miner).with_positives(shares_a_label)(sets, x))


@pytest.mark.parametrize("make", [losses.TripletLoss, losses.NTXentLoss, losses.HistogramLoss])
def test_replicas_of_unequal_size_have_the_gradient_of_one_device(make):
    sets, x = label_sets(size=10)
    loss = make().with_positives(shares_a_label)
    expected = sum_and_gradient(loss, (sets, x), [10])[1]
    assert np.any(expected)
    assert_close(sum_and_gradient(loss, (sets, x), [7, 3])[1], expected)


def test_a_relation_is_saved_with_its_loss():
    sets, x = label_sets()
    for relation in (shares_a_label, SameLabel(column=2)):
        loss = losses.TripletLoss(0.3, mining=EasyPositiveMiner("all")).with_positives(relation)
        stored = json.loads(json.dumps(keras.losses.serialize(loss)))
        again = keras.losses.deserialize(stored)
        assert again.get_config() == loss.get_config()
        assert repr(again) == repr(loss)
        np.testing.assert_array_equal(again(sets, x), loss(sets, x))
    assert "positives=SameLabel(column=2)" in repr(loss)
    assert "positives" not in losses.TripletLoss().get_config()


def test_a_learner_trains_on_two_levels_of_a_hierarchy(tmp_path):
    labels, images = coloured_batch()
    rows = np.stack([labels, labels // 2], axis=1)
    terms = [
        objectives.MetricLoss(losses.ContrastiveLoss().with_positives(SameLabel()), name="fine"),
        objectives.MetricLoss(losses.NTXentLoss().with_positives(SameLabel(1)), name="coarse", weight=0.5),
    ]
    learner = models.MetricLearner(tiny_embedder(), terms)
    learner.compile("sgd", jit_compile=False)
    logs = learner.evaluate(images, rows, batch_size=12, verbose=0, return_dict=True)
    x = learner(images)["embedding"]
    fine, coarse = losses.ContrastiveLoss()(labels, x), losses.NTXentLoss()(labels // 2, x)
    assert_close([logs["fine"], logs["coarse"], logs["loss"]], [fine, coarse, fine + 0.5 * coarse])
    pulls = [np.sqrt(references.squared_distance(x[i], x[j])) for i, j in references.positive_pairs(labels)]
    assert_close(logs["d_pos"], np.mean(pulls))
    assert np.isfinite(learner.fit(images, rows, batch_size=12, verbose=0).history["loss"][0])
    learner.save(tmp_path / "learner.keras")
    again = keras.models.load_model(tmp_path / "learner.keras")
    assert repr(again.objectives[1].loss) == repr(terms[1].loss)
    assert_close(again.objectives[1]({"embedding": x}, rows), coarse)


def test_a_normalized_loss_has_the_relation_of_its_loss_or_one_of_its_own():
    sets, x = label_sets()
    expected = losses.ContrastiveLoss().with_positives(shares_a_label)(sets, x)
    inner = interop.NormalizedLoss(losses.ContrastiveLoss().with_positives(shares_a_label))
    outer = interop.NormalizedLoss(losses.ContrastiveLoss()).with_positives(shares_a_label)
    for loss in (inner, outer):
        again = keras.losses.deserialize(json.loads(json.dumps(keras.losses.serialize(loss))))
        assert_close([loss(sets, 3.0 * x), again(sets, 3.0 * x)], [expected, expected])


def neighbors(a, b):
    return keras.ops.abs(a[:, 0][:, None] - b[:, 0][None, :]) <= 1


@pytest.mark.parametrize(
    ("make", "representation"),
    [
        (objectives.MetricLoss, {"embedding": (9, 5)}),
        (objectives.CrossBatchMemory, {"embedding": (9, 5)}),
        (objectives.HeadwiseLoss, {"heads": (9, 1, 5)}),
        (
            lambda loss: objectives.HighOrderMomentLoss(loss, 2, 8, embedding_dim=5, seed=0),
            {"feature_map": (9, 1, 1, 5)},
        ),
    ],
)
def test_objectives_on_a_loss_over_pairs_have_its_relation(make, representation):
    ((name, shape),) = representation.items()
    sets, x = label_sets()
    ordered, vectors = np.arange(9) // 2, {name: x.reshape(shape)}
    for relation, labels in ((neighbors, ordered), (shares_a_label, sets)):
        # A memory takes rows of as many labels as it is told; the others take any.
        options = {"label_columns": 4} if make is objectives.CrossBatchMemory and labels is sets else {}
        objective = make(losses.ContrastiveLoss().with_positives(relation), **options)
        value = objective(vectors, labels)
        e = {**vectors, **objective.represent(vectors)}[objective.reads[0]]
        assert_close(value, objective.loss(labels, keras.ops.reshape(e, (9, -1))))
    assert abs(value - make(losses.ContrastiveLoss())(vectors, np.arange(9) % 3)) > 1e-3


def test_label_rows_without_a_relation_are_refused():
    labels, images = coloured_batch()
    rows = np.stack([labels, labels // 2], axis=1)
    with pytest.raises(ValueError, match=r"labels must have shape \(B,\) or \(B, 1\), not \(12, 2\)"):
        losses.ContrastiveLoss()(rows, np.zeros((12, 4), "float32"))
    terms = [losses.ContrastiveLoss().with_positives(SameLabel()), objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3)]
    learner = models.MetricLearner(tiny_embedder(), terms)
    learner.compile("sgd", run_eagerly=True)
    with pytest.raises(ValueError, match="am_softmax_loss takes one label for each image, not labels"):
        learner.evaluate(images, rows, batch_size=12, verbose=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loss: loss.with_positives("same"), r"positives must be an object called with \(a, b\), not 'same'"),
        (
            lambda loss: loss.with_positives(SameLabel),
            r"an object and not the class SameLabel: write SameLabel\(",
        ),
        (
            lambda loss: loss.with_positives(SameLabel(3))([[0, 1], [0, 1]], np.eye(2)),
            "column=3, but the labels have",
        ),
        (lambda loss: loss.with_positives(lambda a, b: a[:, 0])([0, 1], np.eye(2)), r"a relation must return a matrix"),
        (lambda loss: loss.with_positives(SameLabel())(np.zeros((2, 2, 2)), np.eye(2)), r"shape \(B,\) or \(B, L\)"),
    ],
)
def test_what_is_no_relation_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(losses.ContrastiveLoss())
