"""Eq. 13 of RankMI: the statistic that is fixed."""

import math

import keras
import numpy as np
import pytest

from tests.mathematics import MODES, assert_close, value_and_gradients
from tfdml.layers import QuadrupletStatistic

POINTS = [-30.0, -2.0, -0.5, -0.01, -1e-4, 1e-4, 0.01, 0.5, 2.0, 30.0]


def statistic(x):
    """Eq. 13 as it is printed."""
    return math.log(math.exp(-x) - 1) if x < 0 else -math.log(math.exp(x) - 1)


def test_equals_the_formula():
    np.testing.assert_allclose(QuadrupletStatistic()(np.array(POINTS)), [statistic(x) for x in POINTS], rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_finite_differences(mode):
    x = np.array([point for point in POINTS if abs(point) > 1e-3], "float32")
    _, (gradient,) = value_and_gradients(lambda points: keras.ops.sum(QuadrupletStatistic()(points)), x, mode=mode)
    step = 1e-6
    expected = [(statistic(float(p) + step) - statistic(float(p) - step)) / (2 * step) for p in x]
    assert_close(gradient, expected, 1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_costs_are_the_distances_themselves(mode):
    def costs(x):
        value = QuadrupletStatistic()(x)
        return keras.ops.sum(keras.ops.where(x >= 0, keras.ops.softplus(-value), keras.ops.softplus(value)))

    x = np.array([0.0, 0.001, 0.3, 1.9, -0.001, -0.3, -50.0], "float32")
    value, (gradient,) = value_and_gradients(costs, x, mode=mode)
    assert_close(value, np.abs(x).sum(), 1e-5)
    # At 0 there is no gradient; elsewhere it is that of |x|.
    np.testing.assert_allclose(gradient, np.sign(x), rtol=2e-3)


def test_is_finite_everywhere():
    x = np.array([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 1e30], "float32")
    value, (gradient,) = value_and_gradients(lambda points: keras.ops.sum(QuadrupletStatistic()(points)), x)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert keras.backend.standardize_dtype(QuadrupletStatistic()(keras.ops.cast(x[:5], "bfloat16")).dtype) == "float32"


def test_serialisation_restores_the_layer():
    layer = QuadrupletStatistic(name="v")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == layer.get_config()
