"""Steps that compare with the batch's classes and a random share of the others: values, gradients,
and rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.models.networks import images, tiny_embedder, values
from tests.support.mathematics import assert_close, random_batch, value_and_gradients
from tests.support.played_replicas import play
from tfdml import losses, objectives
from tfdml.layers.vectors import draw_classes
from tfdml.models import MetricLearner
from tfdml.objectives.base import CLASS_COLUMNS
from tfdml.training import averaged, build_optimizer
from tfdml.training.optimizers import OPTIMIZERS

CLASSES = 30
# A share of which every class is drawn, in another order.
ALL = 0.999
LABELS = np.array([4, 9, 4, 0, 9, 29, 4, 0])


def test_draws_hold_the_batch_and_every_other_class_equally_often():
    generator, counts = keras.random.SeedGenerator(0), np.zeros(23)
    draw = tf.function(lambda: draw_classes(ops.array([5, 9, 5, 100, -3, 22]), 23, 8, generator))
    for _ in range(1500):
        classes, places = map(np.asarray, draw())
        assert len(set(classes.tolist()) & set(range(23))) == 8
        assert places[[3, 4]].tolist() == [-1, -1]
        assert classes[places[[0, 1, 2, 5]]].tolist() == [5, 9, 5, 22]
        counts[classes] += 1
    others = np.delete(counts, [5, 9, 22])
    # Each of 20 is drawn with a chance of 1/4: 375 times, give or take 17.
    assert np.abs(others - 375).max() < 80


def objective_of(loss, sample, **options):
    objective = objectives.ProxyLoss(loss, CLASSES, sample=sample, **options)
    objective.build_from({"embedding": (None, 5)})
    return objective


LOSSES = {
    "am": losses.AMSoftmaxLoss(),
    "arc": losses.ArcFaceLoss(scale=8.0, label_smoothing=0.1),
    "sub-center": losses.SubCenterArcFaceLoss(scale=8.0),
    "soft triple": losses.SoftTripleLoss(),
    "norm": losses.NormSoftmaxLoss(),
    "nca": losses.ProxyNCALoss(),
    "nca++": losses.ProxyNCAPlusPlusLoss(),
    "anchor": losses.ProxyAnchorLoss(),
    "sphere": losses.SphereFaceLoss(scale=8.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_sampled_loss_is_that_of_the_drawn_columns(name):
    loss = LOSSES[name]
    sampled, dense = objective_of(loss, 0.4), objective_of(loss, 1.0)
    _, x = random_batch(3, len(LABELS), 4, 5)
    dense.class_proxies.proxies.assign(sampled.class_proxies.proxies)
    state = sampled.draws
    before = ops.convert_to_numpy(state)
    own = {**sampled.represent_labeled({"embedding": x}, LABELS, training=True), "embedding": x}
    state.assign(before)
    value = sampled({"embedding": x}, LABELS, training=True)
    classes, columns = draw_classes(ops.array(LABELS), CLASSES, 12, seed_at(before))
    every = dense.represent({"embedding": x})["class"]
    assert_close(own["class"], ops.take(every, classes, axis=1))
    np.testing.assert_array_equal(own[CLASS_COLUMNS], columns)
    assert_close(value, loss(columns, ops.take(every, classes, axis=1)))
    # All classes are compared in evaluation.
    assert_close(sampled({"embedding": x}, LABELS), dense({"embedding": x}, LABELS))


def test_replicas_draw_the_same_classes_of_which_the_whole_batch_has_its_own():
    _, x = random_batch(3, len(LABELS), 4, 5)
    objective = objective_of(losses.AMSoftmaxLoss(), 0.4)
    before = ops.convert_to_numpy(objective.draws)

    def drawn(labels, x):
        objective.draws.assign(before)
        return objective.represent_labeled({"embedding": x}, labels, training=True)

    whole, parts = drawn(LABELS, x), play(drawn, (LABELS[:5], x[:5]), (LABELS[5:], x[5:]))
    for name, value in whole.items():
        assert_close(np.concatenate([part[name] for part in parts]), value)


def seed_at(state):
    generator = keras.random.SeedGenerator(0)
    generator.state.assign(state)
    return generator


def make(sample, name="adam", terms=(), weights=None, gradient_cache=0, loss=None, **options):
    keras.utils.set_random_seed(1)
    proxies = objectives.ProxyLoss(loss or losses.AMSoftmaxLoss(), CLASSES, sample=sample)
    learner = MetricLearner(tiny_embedder(), [proxies, *terms], gradient_cache=gradient_cache)
    learner.build((None, 12, 12, 3))
    settings = {"weight_decay": 0.01, "clip_norm": 0.3, "ema": 0.9}
    learner.compile(build_optimizer(name, learner, 0.05, **settings), **options)
    for variable, value in zip(learner.trainable_variables, weights or [], strict=bool(weights)):
        variable.assign(value)
    return learner


def train(learner, seeds):
    for seed in seeds:
        learner.train_on_batch(images(seed), LABELS)
    return values(learner.trainable_variables)


@pytest.mark.parametrize("name", LOSSES)
def test_the_value_and_gradients_where_all_are_drawn_are_the_dense_ones(name):
    _, x = random_batch(3, len(LABELS), 4, 5)
    terms = [objective_of(LOSSES[name], share) for share in (1.0, ALL)]
    proxies = ops.convert_to_numpy(terms[0].class_proxies.proxies)
    level = objectives.JointRepresentationSimilarity(levels=["embedding", "class"])

    def of(term):
        def function(vectors, rows):
            with keras.StatelessScope([(term.class_proxies.proxies, rows * 1.0)]):
                vectors = {"embedding": vectors}
                vectors |= term.represent(vectors) | term.represent_labeled(
                    vectors, LABELS, training=True
                )
                return term.term(vectors, LABELS, training=True).value + level(vectors, LABELS)

        return value_and_gradients(function, x, proxies)

    (dense, gradients), (lazy, others) = map(of, terms)
    assert_close(lazy, dense)
    for one, other in zip(gradients, others, strict=True):
        assert_close(other, one, floor=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_as_the_whole_where_all_are_drawn(name):
    dense = make(1.0, name)
    lazy = make(ALL, name, weights=values(dense.trainable_variables))
    for one, other in zip(train(dense, range(3)), train(lazy, range(3)), strict=True):
        # The order of the columns rounds sums otherwise; a sign that it changes moves a weight of
        # Lion by its rate.
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"jit_compile": True}, marks=pytest.mark.slow)], ids=str
)
def test_a_step_changes_what_it_drew_and_nothing_else(options):
    learner = make(0.4, **options)
    proxies = learner.objectives[0].class_proxies.proxies
    state = [v for v in learner.optimizer.variables if tuple(v.shape) == tuple(proxies.shape)]
    start = values([proxies])[0]
    train(learner, [0])
    with averaged(learner):
        undrawn = np.all(values([proxies])[0] == start, axis=1)
    assert undrawn.sum() == CLASSES - 12
    tables = values([proxies, *state])
    train(learner, [1])
    changed = [
        np.any(old != new, axis=1)
        for old, new in zip(tables, values([proxies, *state]), strict=True)
    ]
    assert changed[0].sum() == 12
    assert changed[0][LABELS].all()
    assert [np.array_equal(rows, changed[0]) for rows in changed] == [True] * 4


def test_a_saved_learner_draws_what_the_uninterrupted_one_draws(tmp_path):
    learner = make(0.4, terms=[objectives.JointRepresentationSimilarity()], run_eagerly=True)
    train(learner, range(2))
    learner.save(tmp_path / "learner.keras")
    loaded = keras.saving.load_model(tmp_path / "learner.keras")
    assert loaded.objectives[0].sample == 0.4
    for one, other in zip(train(learner, [2, 3]), train(loaded, [2, 3]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_gradient_cache_makes_the_plain_step():
    terms = [objectives.JointRepresentationSimilarity()]
    plain = make(0.4, terms=terms, run_eagerly=True)
    weights = values(plain.trainable_variables)
    expected = train(plain, range(2))
    terms = [objectives.JointRepresentationSimilarity()]
    learner = make(0.4, terms=terms, weights=weights, gradient_cache=3, run_eagerly=True)
    cached = train(learner, [0])
    table = cached[-1]
    cached = train(learner, [1])
    assert np.any(cached[-1] != table, axis=1).sum() == 12
    for one, other in zip(expected, cached, strict=True):
        assert_close(one, other, floor=1e-5)


def test_prefixes_and_methods_of_faces_are_sampled_too():
    _, x = random_batch(3, len(LABELS), 4, 5)
    for objective in (
        objectives.MatryoshkaProxyLoss(losses.AMSoftmaxLoss(), CLASSES, dims=[2, 5], sample=0.3),
        objectives.CurricularFace(CLASSES, sample=0.3),
        objectives.SphereFace2(CLASSES, sample=0.3),
    ):
        value = objective({"embedding": x}, LABELS, training=True)
        assert np.isfinite(float(value))
        provided = objective.represent_labeled({"embedding": x}, LABELS, training=True)
        assert all(tuple(provided[name].shape) == (8, 9) for name in objective.provides)


class OwnSimilarity(objectives.Objective):
    """Minus the similarity to the own class, by the labels that it gets."""

    per_image = True
    reads = ("class",)

    def compute(self, representations, labels):
        return -ops.take_along_axis(
            representations["class"], ops.cast(labels, "int32")[:, None], axis=1
        )[:, 0]


def test_an_objective_that_reads_the_similarities_gets_columns_as_labels():
    loss = losses.AMSoftmaxLoss(scale=1e4, margin=0.0)
    learner = make(0.4, terms=[OwnSimilarity()], loss=loss, run_eagerly=True)
    # To the own class all are alike, to the others opposite.
    learner.objectives[0].class_proxies.proxies.assign(np.ones((CLASSES, 5)))
    logs = learner.train_on_batch(images(0), LABELS, return_dict=True)
    assert logs["own_similarity"] == pytest.approx(logs["loss"] - logs["am_softmax_loss"], rel=1e-3)
