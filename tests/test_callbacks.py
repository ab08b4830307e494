"""`RetrievalEvaluation` within plain `fit`; the same again on JAX, in a process of its own."""

import sys

import keras
import numpy as np
import pytest

import tfdml
from tests.support.marks import JAX
from tests.support.processes import run_python
from tfdml.callbacks import RetrievalEvaluation
from tfdml.errors import UserError

# Before anything is trained: Keras imports it for its data adapters.
IMPORTED = "tensorflow" in sys.modules


def clusters(seed, classes, per_class=6, dim=5):
    """Points of classes that a trained projection separates: noise lies in the other dimensions."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), per_class)
    x = rng.normal(size=(len(y), dim)).astype("float32")
    x[:, :2] = rng.normal(size=(classes, 2))[y]
    return x, y


def small_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3), keras.layers.UnitNormalization()]
    )
    model.compile(
        keras.optimizers.Adam(0.02), loss=tfdml.losses.ContrastiveLoss(), run_eagerly=EAGERLY
    )
    return model


# On TensorFlow these models train for a few steps, and compiling takes longer.
EAGERLY = keras.backend.backend() == "tensorflow"
HELD_OUT = clusters(1, 4)


def fit(model, callbacks, epochs=4, **options):
    x, y = clusters(0, 6)
    return model.fit(x, y, batch_size=36, epochs=epochs, verbose=0, callbacks=callbacks, **options)


def test_logs_hold_what_evaluate_retrieval_gives_of_the_weights_of_the_epoch():
    model, (x, y) = small_model(), HELD_OUT
    expected = []

    class Reference(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            vectors = keras.ops.convert_to_numpy(self.model(x))
            expected.append(
                tfdml.evaluation.evaluate_retrieval(
                    vectors, y, ks=(1, 2), metrics=("recall", "map@r")
                )
            )

    history = fit(model, [RetrievalEvaluation(x, y, ks=(1, 2), batch_size=5), Reference()]).history
    assert {name for name in history if name.startswith("val_")} == {
        "val_recall@1",
        "val_recall@2",
        "val_map@r",
    }
    for name in ("recall@1", "recall@2", "map@r"):
        assert history[f"val_{name}"] == [values[name] for values in expected]
    assert len(set(history["val_map@r"])) > 1


def test_batches_give_what_the_arrays_give_and_a_gallery_is_searched():
    model, (x, y) = small_model(), HELD_OUT
    expected = RetrievalEvaluation(x, y).evaluate(model)
    assert RetrievalEvaluation([(x[:9], y[:9, None]), (x[9:], y[9:])]).evaluate(model) == expected
    rows = np.arange(len(y)) % 2 == 0
    found = RetrievalEvaluation(
        x[rows], y[rows], gallery=x[~rows], gallery_labels=y[~rows]
    ).evaluate(model)
    vectors = keras.ops.convert_to_numpy(model(x))
    expected = tfdml.evaluation.evaluate_retrieval(
        vectors[rows], y[rows], vectors[~rows], y[~rows], metrics=["recall@1", "map@r"]
    )
    assert found == {name: expected[name] for name in found}


def test_a_metric_learner_is_measured_by_its_embedder():
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    embedder = tfdml.models.Embedder(backbone, embedding_dim=4, image_size=8)
    learner = tfdml.models.MetricLearner(embedder, tfdml.losses.ContrastiveLoss())
    learner.build((None, 8, 8, 3))
    learner.compile("adam", run_eagerly=EAGERLY)
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    labels = np.repeat(np.arange(4), 3)
    evaluation = RetrievalEvaluation(images, labels, batch_size=5)
    history = learner.fit(images, labels, epochs=1, verbose=0, callbacks=[evaluation]).history
    vectors = learner.predict(images, verbose=0)
    expected = tfdml.evaluation.evaluate_retrieval(vectors, labels, metrics=["recall@1", "map@r"])
    for name in ("recall@1", "map@r"):
        assert history[f"val_{name}"] == [expected[name]]


def test_what_cannot_be_measured_is_refused_before_training():
    x, y = HELD_OUT
    cases = [
        ({"x": x}, "give y"),
        ({"x": x, "y": y, "ks": (24,)}, "recall@24"),
        ({"x": iter([HELD_OUT])}, "generator"),
    ]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        cases.append(({"x": tf.data.Dataset.from_tensors(HELD_OUT).repeat()}, "never end"))
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            RetrievalEvaluation(**arguments)


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="imports TensorFlow itself")
def test_other_backends_import_no_tensorflow():
    assert not IMPORTED


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="calls itself")
def test_all_of_this_on_jax():
    pytest.importorskip("jax")
    command = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    assert "passed" in run_python(*command, environment=JAX).stdout


def with_averages(order, tmp_path, **options):
    """The logged Recall@1 of a run with averaged weights, and that of each checkpoint."""
    model, (x, y) = small_model(), HELD_OUT
    model.compile(
        keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.8),
        loss=tfdml.losses.ContrastiveLoss(),
        run_eagerly=EAGERLY,
    )
    callbacks = {
        "swap": keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        "evaluation": RetrievalEvaluation(x, y, metrics=("map@r",)),
        "save": keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
    }
    history = fit(model, [callbacks[name] for name in order], **options).history["val_map@r"]
    saved = [
        keras.saving.load_model(tmp_path / f"{epoch + 1}.keras", compile=False)
        for epoch in range(len(history))
    ]
    return history, [
        RetrievalEvaluation(x, y, metrics=("map@r",)).evaluate(one)["map@r"] for one in saved
    ]


def test_the_logged_metrics_are_those_of_the_averages_that_are_saved(tmp_path):
    if keras.backend.backend() == "jax":
        with pytest.raises(UserError, match="use_ema on JAX"):
            with_averages(("swap", "evaluation", "save"), tmp_path)
        return
    logged, saved = with_averages(("swap", "evaluation", "save"), tmp_path)
    assert logged == pytest.approx(saved, abs=1e-6)
    assert len(set(logged)) > 1
    with pytest.raises(UserError, match="list SwapEMAWeights before it"):
        with_averages(("evaluation", "swap", "save"), tmp_path)


class SeenSteps(keras.Sequential):
    """Keeps the first labels of the batches that it is trained on."""

    def train_step(self, *state_and_data):
        self.seen.append(int(np.asarray(state_and_data[-1][1])[0]))
        return super().train_step(*state_and_data)


class InOrder:
    """Step i has image i alone."""

    batch_size, steps_per_epoch = 1, 3

    def batch(self, step):
        return np.array([step])


def steps_seen(**options):
    model = SeenSteps([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("sgd", loss=tfdml.losses.ContrastiveLoss(), run_eagerly=True)
    model.seen = []
    batches = tfdml.data.ArrayBatches(np.ones((30, 5), "float32"), np.arange(30), InOrder())
    callbacks = [batches, *options.pop("callbacks", [])]
    model.fit(batches, verbose=0, callbacks=callbacks, **{"shuffle": False, **options})
    return model.seen


def test_array_batches_follow_the_epochs_of_fit(tmp_path):
    assert steps_seen(epochs=2) == list(range(6))
    with pytest.raises(Exception, match="have an order: give fit shuffle=False"):
        steps_seen(epochs=9, shuffle=True)
    assert steps_seen(initial_epoch=2, epochs=4) == list(range(6, 12))

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(KeyboardInterrupt):
        steps_seen(epochs=4, callbacks=[backup, Killed()])
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    assert steps_seen(epochs=4, callbacks=[backup]) == list(range(6, 12))
