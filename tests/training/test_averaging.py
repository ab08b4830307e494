"""The averages of the weights: by their formula, in place within the block and gone after it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import images, tiny_embedder
from tests.training import runs
from tests.training.stopping import make_quick
from tfdml.losses import ContrastiveLoss
from tfdml.models import MetricLearner
from tfdml.objectives import RankMI
from tfdml.training import averaged, build_optimizer
from tfdml.training.evaluating import Evaluator
from tfdml.training.monitor import TrainingMonitor

LABELS = np.arange(6) % 3


def made(terms, name="sgd", ema=0.9, **options):
    keras.utils.set_random_seed(1)
    learner = MetricLearner(tiny_embedder(**options), terms)
    learner.build((None, 12, 12, 3))
    learner.compile(build_optimizer(name, learner, 0.05, {}, ema=ema))
    return learner


def weights(learner):
    return [keras.ops.convert_to_numpy(variable) for variable in learner.trainable_variables]


def test_averages_follow_the_formula_and_go_after_the_block():
    learner = made(ContrastiveLoss(1.3, "euclidean"))
    x = images(1, 6, "uint8")
    expected = None
    for step in range(14):
        learner.train_on_batch(x, LABELS)
        kept = 0.0 if step == 0 else min(0.9, (1 + step) / (10 + step))
        now = [value.astype(np.float64) for value in weights(learner)]
        old = now if expected is None else expected
        expected = [kept * a + (1 - kept) * w for a, w in zip(old, now, strict=True)]
    trained = weights(learner)
    with averaged(learner):
        for value, mean in zip(weights(learner), expected, strict=True):
            np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-6)
        assert any((a != b).any() for a, b in zip(weights(learner), trained, strict=True))
    for value, before in zip(weights(learner), trained, strict=True):
        np.testing.assert_array_equal(value, before)


def test_the_weights_come_back_after_an_error():
    learner = made(ContrastiveLoss(1.3, "euclidean"))
    learner.train_on_batch(images(1, 6, "uint8"), LABELS)
    learner.train_on_batch(images(1, 6, "uint8"), LABELS)
    trained = weights(learner)
    with pytest.raises(ZeroDivisionError), averaged(learner):
        raise ZeroDivisionError
    for value, before in zip(weights(learner), trained, strict=True):
        np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_nothing_changes_before_the_first_step_or_without_averages(ema):
    learner = made(ContrastiveLoss(1.3, "euclidean"), ema=ema)
    if not ema:
        learner.train_on_batch(images(1, 6, "uint8"), LABELS)
    trained = weights(learner)
    with averaged(learner):
        for value, before in zip(weights(learner), trained, strict=True):
            np.testing.assert_array_equal(value, before)


def test_fit_leaves_the_weights_as_it_trained_them_and_averages_do_not_change_training():
    x = images(1, 6, "uint8")
    plain, kept = (made(ContrastiveLoss(1.3, "euclidean"), "adam", ema=ema) for ema in (0.0, 0.99))
    for learner in (plain, kept):
        learner.fit(x, LABELS, batch_size=6, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(weights(plain), weights(kept), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_both_phases_have_their_averages():
    learner = made([RankMI(1.5, statistics_steps=1, hidden=8, depth=1, seed=7)])
    x = images(1, 6, "uint8")
    for _ in range(6):
        learner.train_on_batch(x, LABELS)
    trained = weights(learner)
    with averaged(learner):
        changed = [(a != b).any() for a, b in zip(weights(learner), trained, strict=True)]
    own = {id(variable) for variable in learner.statistics_variables}
    kinds = [id(variable) in own for variable in learner.trainable_variables]
    assert any(c for c, k in zip(changed, kinds, strict=True) if k)
    assert any(c for c, k in zip(changed, kinds, strict=True) if not k)


def average_of(history, share):
    """The average of a weight after each step, in float64, from its values after each step."""
    average = None
    for step, now in enumerate(history):
        kept = 0.0 if step == 0 else min(share, (1 + step) / (10 + step))
        average = now.astype(np.float64) if average is None else kept * average + (1 - kept) * now
    return average


@pytest.mark.parametrize("selection", ["last", "validation"])
def test_a_run_measures_selects_and_reports_the_averages(selection, tmp_path, monkeypatch):
    make_quick(monkeypatch)
    trained, measured, reported = [], [], []
    ended, embed = TrainingMonitor.on_train_batch_end, Evaluator.embed

    def kernel(embedder):
        return keras.ops.convert_to_numpy(embedder.dense.kernel).copy()

    def step(self, batch, logs=None):
        ended(self, batch, logs)
        trained.append(kernel(self.model.embedder))

    def record(self, embedder, name):
        measured.append((len(trained), name, kernel(embedder)))
        return embed(self, embedder, name)

    monkeypatch.setattr(TrainingMonitor, "on_train_batch_end", step)
    monkeypatch.setattr(Evaluator, "embed", record)
    monkeypatch.setattr(runs, "write_run_report", lambda folder, images, embeddings: reported.append(embeddings))
    # The first epoch is the best on held-out classes.
    worse = iter((0.9, 0.5, 0.4))
    measure = Evaluator.measure

    def ranked(self, embeddings, name, *arguments, **options):
        found = measure(self, embeddings, name, *arguments, **options)
        return {**found, "map@r": next(worse)} if name == "validation" else found

    monkeypatch.setattr(Evaluator, "measure", ranked)
    chosen = {} if selection == "last" else {"selection": selection, "holdout_classes": 0.3}
    result = runs.train(tmp_path / "run", ema=0.5, report=True, **chosen)
    expected = {0: measured[0][2]} | {n: average_of(trained[:n], 0.5) for n in (runs.STEPS, 2 * runs.STEPS)}
    kept = runs.STEPS if selection == "validation" else 2 * runs.STEPS
    assert {steps for steps, *_ in measured} == set(expected)
    final = [value for _, name, value in measured if name == "test"][-1]
    for steps, _, value in measured:
        if value is not final:
            np.testing.assert_allclose(value, expected[steps], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(final, expected[kept], rtol=1e-5, atol=1e-7)
    assert np.abs(expected[kept] - trained[kept - 1]).max() > 1e-4
    embedder = keras.saving.load_model(tmp_path / "run" / "embedder.keras", compile=False)
    np.testing.assert_allclose(kernel(embedder), expected[kept], rtol=1e-5, atol=1e-7)
    (embeddings,) = reported
    test = runs.SPLITS.test
    pixels = np.stack([tf.io.decode_png(test.images.encoded(i)) for i in range(len(test))])
    np.testing.assert_allclose(embeddings, embedder.predict(pixels, verbose=0), atol=1e-5)
    assert result["epoch"] == kept // runs.STEPS
