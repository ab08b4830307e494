"""What every objective on one representation must do, as checks that their tests apply.

An objective is given as function(labels, x), its reference likewise.
"""

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mathematics import (
    assert_close,
    random_batch,
)

quick = settings(max_examples=10, deadline=None, derandomize=True)


def check_symmetries(function, rotations=True, relabeling=True):
    """The order of the images does not count, nor (where said) which class has which label, nor a rotation."""

    @quick
    @given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 4))
    def run(seed, size, classes):
        generator = np.random.default_rng(seed)
        labels, x = random_batch(seed, size, classes, 5)
        value = function(labels, x)
        assert keras.ops.isfinite(value)
        order = generator.permutation(size)
        assert_close(function(labels[order], x[order]), value, floor=2e-6)
        if relabeling:
            assert_close(function(7 - labels, x), value, floor=2e-6)
        if rotations:
            rotation = np.linalg.qr(generator.normal(size=(5, 5)))[0]
            assert_close(function(labels, (x @ rotation).astype("float32")), value, floor=2e-6)

    run()


def check_labels(function):
    """Labels of any integer type, and large ids where the objective has no weight for each class."""
    labels, x = random_batch(2, 12, 3, 6)
    expected = function(labels, x)
    for form in (labels.tolist(), labels.astype("int32"), tf.constant(labels)[:, None], labels.astype("float64")):
        np.testing.assert_array_equal(function(form, x), expected)


def check_config(objective):
    """A configuration, free of weights, that restores the objective."""
    for again in (
        type(objective).from_config(objective.get_config()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(objective)),
    ):
        assert type(again) is type(objective)
        assert again.get_config() == objective.get_config()
        assert (again.name, again.weight, again.reads) == (objective.name, objective.weight, objective.reads)
        assert getattr(again, "calibrates_on", None) == getattr(objective, "calibrates_on", None)


def check_saved_with_its_learner(learner, path, probe):
    """Saved and loaded, the learner's objectives have their weights, and `probe(learner)` its value."""
    learner.save(path)
    again = keras.saving.load_model(path)
    for old, new in zip(learner.objectives, again.objectives, strict=True):
        assert len(old.weights) == len(new.weights)
        for before, after in zip(old.weights, new.weights, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(before), keras.ops.convert_to_numpy(after))
    assert_close(probe(again), probe(learner), 1e-6)


def total_loss(learner, labels, x):
    """The learner's loss on a batch."""
    return learner.compute_loss(x, tf.constant(labels), learner(x, training=False), training=False)
