"""What every loss on embeddings must do, as checks that its family's tests apply to their cases."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import (
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)


class Case(NamedTuple):
    """A loss, its float64 reference, and the reference of its gradient where the loss stops some of it."""

    loss: Any
    reference: Callable
    frozen: Callable | None = None

    def differentiable(self, labels, x):
        """The float64 function of the vectors whose derivative the loss's gradient is."""
        if self.frozen is None:
            return lambda e: self.reference(labels, e)
        return self.frozen(labels, np.array(x, np.float64))


def both_reductions(name, make, reference, frozen=None, **arguments):
    """Two cases, of the mean and of the sum, for the same arguments of the loss."""
    loss_reduction = {"mean": "sum_over_batch_size", "sum": "sum"}

    def case(reduction):
        def value(labels, x):
            return reference(labels, x, reduction=reduction)

        gradient = None if frozen is None else (lambda labels, x: frozen(labels, x, reduction))
        return Case(make(reduction=loss_reduction[reduction], **arguments), value, gradient)

    return {f"{name} {reduction}": case(reduction) for reduction in loss_reduction}


def by_mode(cases):
    """Each case eagerly, and those of the mean by XLA too; the sum takes the same path."""
    compiled = {name: case for name, case in cases.items() if case.loss.reduction != "sum"}
    rows = [
        pytest.param(case, mode, id=f"{mode} {name}")
        for mode, chosen in (("eager", cases), ("xla", compiled))
        for name, case in chosen.items()
    ]
    return pytest.mark.parametrize(("case", "mode"), rows)


def check_formula(case):
    for seed, (size, classes, dim) in enumerate([(2, 2, 3), (8, 3, 5), (12, 2, 2), (15, 6, 16), (9, 9, 4), (6, 1, 4)]):
        labels, x = random_batch(seed, size, classes, dim)
        assert_close(case.loss(labels, x), case.reference(labels, x), floor=1e-6)
    labels, x = random_batch(5, 10, 3, 6, unit=False)
    assert_close(case.loss(labels, x), case.reference(labels, x))


def check_gradient(case, mode, relative=1e-5):
    """Against central differences of the reference."""
    labels, x = random_batch(11, 7, 3, 4)
    (expected,) = finite_differences(case.differentiable(labels, x), x)
    assert np.any(expected)
    value, (gradient,) = value_and_gradients(lambda e: case.loss(labels, e), x, mode=mode)
    assert_close(value, case.reference(labels, x))
    assert_close(gradient, expected, relative)


def check_degenerate(case, mode, floor=2e-6):
    """The formula's value and a finite gradient on every degenerate batch."""

    def run(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = case.loss(labels, x)
        return value, tape.gradient(value, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    run = run if mode == "eager" else tf.function(run, jit_compile=mode == "xla", autograph=False)
    for name, (labels, x) in degenerate_batches().items():
        value, gradient = run(tf.constant(labels, tf.int64), tf.constant(x))
        assert_close(value, case.reference(labels, x), floor=floor)
        assert np.all(np.isfinite(gradient)), name


def check_nothing_to_learn(loss, *batches):
    """Value and gradient are exactly 0 on the named degenerate batches."""
    for batch in batches:
        labels, x = degenerate_batches()[batch]
        value, (gradient,) = value_and_gradients(lambda e, y=labels: loss(y, e), x)
        assert value == 0.0, batch
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def check_contract(loss):
    """One value per anchor, order-free, labels as integers of any size, and a configuration that restores it."""
    labels, x = random_batch(2, 12, 4, 6)
    values = np.asarray(loss.call(labels, x))
    assert values.shape == (12,)
    assert_close(np.sum(values) if loss.reduction == "sum" else np.mean(values), loss(labels, x))
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(loss.call(labels[order], x[order]), values[order], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(loss.call(labels.astype("int64") + 2**53, x), values)
    half = loss(labels, keras.ops.cast(x, "bfloat16"))
    assert keras.backend.standardize_dtype(half.dtype) == "float32"
    assert math.isfinite(half)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is type(loss)
    assert again.get_config() == loss.get_config()
    np.testing.assert_array_equal(again.call(labels, x), values)


def check_large(loss, size=4096, dim=128):
    """A batch of four thousand has a finite value and a gradient."""
    labels, x = np.arange(size) % 1000, np.random.default_rng(0).normal(size=(size, dim)).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    value, (gradient,) = value_and_gradients(lambda e: loss(labels, e), x, mode="graph")
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient)
