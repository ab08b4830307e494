"""What every loss does, with and without label sets."""

import functools
import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.losses import cases
from tests.losses import references as loss_references
from tests.losses.references import log1p_sum_exp
from tests.support import references
from tests.support.mathematics import (
    assert_close,
    compiled_by,
    degenerate_batches,
    finite_differences,
    public_classes,
    random_batch,
    related,
    value_and_gradients,
)
from tfdml import losses, objectives
from tfdml.losses.base import PairLoss
from tfdml.mining import EasyPositiveMiner, GivenPairs, Jaccard, SameLabel, shares_a_label
from tfdml.pairs import Pairs
from tfdml.registry import registered

MAKE = {
    "contrastive": losses.ContrastiveLoss,
    "contrastive euclidean": lambda **k: losses.ContrastiveLoss(0.7, "euclidean", "all", **k),
    "binomial": losses.BinomialDevianceLoss,
    "am": losses.AMSoftmaxLoss,
    "norm": losses.NormSoftmaxLoss,
}
every_loss = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def batch(seed=1):
    labels, x = random_batch(seed, 9, 4, 6)
    return labels, x


# The mathematics of every loss on pairs


SIZES = [(8, 3, 5), (15, 6, 16)]
# Of the first of each class: two images, two classes, and no positive or no negative.
MORE_SIZES = [*SIZES, (2, 2, 3), (12, 2, 2), (9, 9, 4), (6, 1, 4)]


@pytest.mark.parametrize("name", cases.CASES)
def test_equals_the_formula(name):
    case, sizes = cases.CASES[name], MORE_SIZES if name in cases.FIRST else SIZES
    for seed, (size, classes, dim) in enumerate(sizes):
        labels, x = random_batch(seed, size, classes, dim)
        # Near a cosine of 1 or a distance of 0, float32 carries about 1e-7 of the unit, hence the
        # floor.
        assert_close(case.loss(labels, x), case.reference(labels, x), floor=1e-6)
    labels, x = random_batch(5, 10, 3, 6, unit=False)
    assert_close(case.loss(labels, x), case.reference(labels, x))


@cases.by_mode({name: case for name, case in cases.CASES.items() if not case.steep})
def test_gradient_equals_finite_differences(case, mode):
    labels, x = random_batch(11, 7, 3, 4)
    (expected,) = finite_differences(case.differentiable(labels, x), x)
    assert np.any(expected)
    value, (gradient,) = value_and_gradients(lambda e: case.loss(labels, e), x, mode=mode)
    assert_close(value, case.reference(labels, x))
    assert_close(gradient, expected, case.relative)


# A quarter of them by XLA: each compiles three times, and the operations are those of the gradients
# above.
@cases.by_mode({name: case for name, case in cases.MEANS.items() if not case.steep}, 4)
def test_degenerate_batches_have_the_formula_s_value_and_a_finite_gradient(case, mode):
    def run(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = case.loss(labels, x)
        return value, tape.gradient(value, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    run = compiled_by(mode, run)
    for name, (labels, x) in degenerate_batches().items():
        value, gradient = run(tf.constant(labels, tf.int64), tf.constant(x))
        assert_close(value, case.reference(labels, x), floor=case.floor)
        assert np.all(np.isfinite(gradient)), name
        if (
            name == "one image"
            and not isinstance(case.loss, losses.VICRegLoss)
            and not getattr(case.loss, "l2", 0)
        ):
            assert not np.any(gradient)


@cases.by_class(cases.CASES)
def test_contract(case):
    cases.check_contract(case.loss)


class ReducesItself(losses.PairLoss):
    def anchor_losses(self, pairs):
        return keras.ops.mean(pairs.anchors)


PLAIN, ONES = losses.ContrastiveLoss(), np.eye(4, dtype="float32")
REFUSED = [
    ("distance", lambda: losses.ContrastiveLoss(distance="l2")),
    ("high", lambda: losses.CosineSimilarityLoss(low=1.0)),
    ("negative_margin", lambda: losses.ThresholdConsistentMarginLoss(negative_margin=1.5)),
    ("boundary", lambda: losses.RankedListLoss(margin=0.4, boundary=0.3)),
    ("mining", lambda: losses.TripletLoss(mining="easy")),
    ("one of the two", lambda: losses.NPairLoss(l2=0.002, scale=10.0)),
    ("k must", lambda: losses.RecallAtKLoss(k=4)),
    ("embeddings", lambda: PLAIN([0, 0, 1, 1], np.zeros((4, 2, 2)))),
    ("labels", lambda: PLAIN([0, 0, 1], ONES)),
    ("labels", lambda: losses.AMSoftmaxLoss()([0], ONES)),
    ("labels", lambda: PLAIN(np.eye(4, 2, dtype=int), ONES)),
    (
        "label",
        lambda: objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3)(
            {"embedding": ONES}, np.eye(4, 2, dtype=int)
        ),
    ),
    ("anchor_losses", lambda: ReducesItself()([0, 0, 1, 1], ONES)),
    ("positives", lambda: related(PLAIN, "same")),
    ("column", lambda: related(PLAIN, SameLabel(3))(np.eye(4, 2, dtype=int), ONES)),
    ("matrix", lambda: related(PLAIN, lambda a, b: a[:, 0])([0, 1, 0, 1], ONES)),
    ("shape", lambda: related(PLAIN, SameLabel())(np.zeros((4, 2, 2)), ONES)),
]


@pytest.mark.parametrize(("word", "call"), REFUSED)
def test_what_makes_no_sense_is_refused(word, call):
    with pytest.raises(ValueError, match=word):
        call()


# Reductions, labels and precision


@every_loss
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
def test_sample_weights_weigh_the_images(make, reduction):
    labels, x = batch()
    loss = make(reduction=reduction)
    np.testing.assert_array_equal(make(reduction="none")(labels, x), make().call(labels, x))
    weights = np.linspace(0.0, 2.0, 9).astype("float32")
    values = np.asarray(loss.call(labels, x)) * weights
    divisor = {"sum_over_batch_size": 9, "mean_with_sample_weight": weights.sum(), "sum": 1}[
        reduction
    ]
    assert_close(loss(labels, x, sample_weight=weights), values.sum() / divisor)
    assert_close(loss(labels, x, sample_weight=weights[:, None]), values.sum() / divisor)
    if reduction == "mean_with_sample_weight":
        assert float(loss(labels, x, sample_weight=np.zeros(9, "float32"))) == 0.0


@pytest.mark.slow
def test_large_ids_do_not_collide_on_their_way_through_fit_and_the_loss_is_saved(tmp_path):
    labels, x = batch()
    large = labels.astype("int64") + 2**53
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(6, use_bias=False, kernel_initializer="identity")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.0),
        loss=losses.ContrastiveLoss(0.7, "euclidean"),
        jit_compile=False,
    )
    expected = float(model.loss(labels, x))
    dataset = tf.data.Dataset.from_tensor_slices((x, large)).batch(9)
    for data in (
        {"x": x, "y": large, "batch_size": 9},
        {"x": x, "y": large[:, None], "batch_size": 9},
        {"x": dataset},
    ):
        assert_close(model.evaluate(**data, verbose=0), expected)
        assert_close(model.fit(**data, verbose=0, shuffle=False).history["loss"][0], expected)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_close(again.evaluate(dataset, verbose=0), expected, 1e-6)


def test_model_with_a_compiled_loss_saves_and_loads(tmp_path):
    labels, x = batch()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    loss = losses.ContrastiveLoss(0.7, "euclidean", reduction="sum")
    model.compile(optimizer="sgd", loss=loss, jit_compile=False)
    expected = model.evaluate(x, labels, batch_size=9, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.loss.get_config() == model.loss.get_config()
    assert_close(again.evaluate(x, labels, batch_size=9, verbose=0), expected, 1e-6)


@functools.cache
def with_minings(name):
    """A loss, and the same with each mining of its own and with two miners, each with its name.

    Each loss in turn takes the next miners, so that all are taken.
    """
    make = getattr(losses, name)
    if "mining" not in inspect.signature(make).parameters:
        return {name: make()}
    miners, first = list(registered("miner")), list(public_classes(losses)).index(name)
    taken = {miners[(first + offset) % len(miners)] for offset in (0, 1)}
    return {
        name: make(),
        **{
            f"{name} {mining}": make(mining=mining) for mining in (*make.own_mining, *sorted(taken))
        },
    }


every_name = pytest.mark.parametrize("name", public_classes(losses))


@pytest.mark.one_quick_case
@every_name
def test_a_nan_is_not_hidden(name):
    for key, loss in with_minings(name).items():
        labels, x = batch()
        for image in (0, 8):
            hidden = x.copy()
            hidden[image, 2] = np.nan
            assert np.isnan(loss(labels, hidden)), key
        of_one = np.isnan(loss.call(labels, hidden))
        assert np.all(of_one) or list(np.flatnonzero(of_one)) == [8], key


@every_name
def test_a_batch_without_images_costs_nothing_and_has_no_gradient(name):
    for key, loss in with_minings(name).items():
        value, (gradient,) = value_and_gradients(
            lambda x, loss=loss: loss(np.zeros(0, "int64"), x), np.zeros((0, 5))
        )
        assert value == 0.0, key
        assert gradient.shape == (0, 5), key


@every_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32_on_every_path(name, dtype):
    labels, x = batch()
    half = tf.cast(x, dtype)
    exact = tf.cast(half, "float32")
    for loss in (
        getattr(losses, name)(),
        *([losses.NPairLoss(l2=0.1)] if name == "NPairLoss" else []),
    ):
        np.testing.assert_array_equal(loss.call(labels, half), loss.call(labels, exact))
        if isinstance(loss, losses.PairLoss):
            expected = loss.of_pairs(Pairs.of_batch(exact, labels))
            term = objectives.MetricLoss(loss, representation="projection")
            for value in (
                loss.of_pairs(Pairs.of_batch(half, labels)),
                term({"projection": half}, labels),
            ):
                assert value.dtype == tf.float32
                np.testing.assert_array_equal(value, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases.FIRST))
def test_a_batch_of_unknown_size(name):
    loss = cases.MEANS[name].loss
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 5], tf.float32)]

    @tf.function(input_signature=signature)
    def run(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(labels, x)
        return value, tape.gradient(value, x)

    for seed, size in enumerate((9, 6)):
        labels, x = random_batch(seed, size, 3, 5)
        expected, (expected_gradient,) = value_and_gradients(lambda e, y=labels: loss(y, e), x)
        value, gradient = run(labels.astype("int64"), x)
        assert_close(value, expected)
        assert_close(gradient, expected_gradient, 2e-5, floor=1e-6)
        assert np.any(expected_gradient)


ON_PAIRS = [make for make in public_classes(losses).values() if issubclass(make, PairLoss)]
every_label_sets_loss = pytest.mark.parametrize("make", ON_PAIRS, ids=lambda make: make.__name__)


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


@every_label_sets_loss
def test_the_equality_of_labels_is_what_losses_do_without(make):
    labels, x = random_batch(3, 10, 3, 5)
    loss = make()
    expected, (expected_gradient,) = value_and_gradients(lambda e: loss(labels, e), x)
    again = related(loss, SameLabel())
    others = np.arange(10) % 4
    for rows, relation in (
        (labels, again),
        (np.stack([others, labels], 1), related(loss, SameLabel(column=1))),
    ):
        value, (gradient,) = value_and_gradients(lambda e, y=rows, f=relation: f(y, e), x)
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(gradient, expected_gradient)
    assert loss.positives is None


@pytest.mark.one_quick_case
@every_label_sets_loss
def test_label_sets_have_finite_values_and_gradients(make):
    sets, x = label_sets()
    loss = make(positives=shares_a_label)
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
    distances = {
        pair: references.squared_distance(x[pair[0]], x[pair[1]]) for pair in together + apart
    }
    pushes = [1.0 - distances[pair] for pair in apart if distances[pair] < 1.0]
    expected = references.mean([distances[pair] for pair in together]) + references.mean(pushes)
    assert_close(losses.ContrastiveLoss(positives=shares_a_label)(sets, x), expected)
    values = []
    for a, p in together:
        near = references.cosine(x[a], x[p]) / 0.5
        others = [references.cosine(x[a], x[n]) / 0.5 - near for b, n in apart if b == a]
        values.append(log1p_sum_exp(others))
    assert_close(losses.NTXentLoss(0.5, positives=shares_a_label)(sets, x), references.mean(values))


def test_a_relation_is_saved_with_its_loss():
    sets, x = label_sets()
    for relation in (shares_a_label, SameLabel(column=2)):
        loss = losses.TripletLoss(0.3, mining=EasyPositiveMiner("all"), positives=relation)
        stored = json.loads(json.dumps(keras.losses.serialize(loss)))
        again = keras.losses.deserialize(stored)
        assert again.get_config() == loss.get_config()
        np.testing.assert_array_equal(again(sets, x), loss(sets, x))


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
        # A memory takes rows of `label_columns` labels; the others take any.
        options = (
            {"label_columns": 4} if make is objectives.CrossBatchMemory and labels is sets else {}
        )
        objective = make(losses.ContrastiveLoss(positives=relation), **options)
        value = objective(vectors, labels)
        e = {**vectors, **objective.represent(vectors)}[objective.reads[0]]
        assert_close(value, objective.loss(labels, keras.ops.reshape(e, (9, -1))))
    assert abs(value - make(losses.ContrastiveLoss())(vectors, np.arange(9) % 3)) > 1e-3


IDS = np.array([40, 3, 17, 8, 25, 2, 31, 12, 9, 50])


def given_pairs(labels, share, ids=IDS):
    """A share of the pairs of different images, one by one, and which they are; the last image is
    in none."""
    count, kept = len(labels), np.random.default_rng(5).random((len(labels),) * 2) < share
    pairs = [(i, j) for i in range(count - (share < 1)) for j in range(i) if kept[i, j]]
    return GivenPairs([(ids[i], ids[j], labels[i] == labels[j]) for i, j in pairs]), {
        frozenset(pair) for pair in pairs
    }


@pytest.mark.parametrize("name", sorted(cases.FIRST))
def test_pairs_that_are_not_given_are_neither_positive_nor_negative(name, monkeypatch):
    case, (labels, x) = cases.MEANS[name], random_batch(3, 10, 3, 5)
    relation, known = given_pairs(labels, 0.6)
    loss = related(case.loss, relation)
    value, (gradient,) = value_and_gradients(lambda e: loss(IDS, e), x)
    for module in (references, loss_references):
        for kind in ("positive", "negative"):
            of, among = getattr(loss_references, f"{kind}s"), getattr(references, f"{kind}_pairs")
            monkeypatch.setattr(
                module,
                f"{kind}s",
                lambda y, i, of=of: [j for j in of(y, i) if {i, j} in known],
                raising=False,
            )
            monkeypatch.setattr(
                module,
                f"{kind}_pairs",
                lambda y, among=among: [pair for pair in among(y) if {*pair} in known],
            )
    assert_close(value, case.reference(labels, np.float64(x)), 2e-5, floor=1e-5)
    of_each_image = isinstance(loss, losses.VICRegLoss) or getattr(loss, "l2", 0)
    assert np.any(gradient)
    if not of_each_image:
        np.testing.assert_array_equal(gradient[-1], 0.0)


def test_given_similarities_are_targets_and_have_a_threshold():
    x = random_batch(0, 6, 3, 5)[1]
    grades = {(0, 1): 4.5, (1, 2): 1.0, (2, 5): 3.0, (0, 3): 0.0}
    relation = GivenPairs([(*pair, grade) for pair, grade in grades.items()], threshold=2.5)
    loss = losses.CosineSimilarityLoss(high=5.0, positives=relation)
    expected = np.mean(
        [(references.cosine(x[i], x[j]) - grade / 5) ** 2 for (i, j), grade in grades.items()]
    )
    value, (gradient,) = value_and_gradients(lambda e: loss(np.arange(6), e), x)
    assert_close(value, expected)
    np.testing.assert_array_equal(gradient[4], 0.0)
    pairs = Pairs.of_batch(x, np.arange(6)[:, None], relation)
    assert {(int(i), int(j)) for i, j in np.argwhere(pairs.positives)} == {
        (0, 1),
        (1, 0),
        (2, 5),
        (5, 2),
    }
    assert int(np.sum(pairs.negatives)) == 4
    sets = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]])
    overlaps = Pairs.of_batch(np.eye(3), sets, Jaccard(0.5))
    assert_close(np.array(overlaps.similarities)[0], [0.0, 2 / 3, 0.0])
    assert np.argwhere(overlaps.positives).tolist() == [[0, 1], [1, 0]]
    assert np.array(overlaps.negatives)[2].tolist() == [True, True, False]
