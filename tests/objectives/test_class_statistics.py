import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, random_batch
from tfdml.objectives.regularizers import (
    means_and_spreads,
    of_own_class,
)


def test_a_large_offset_costs_no_digits():
    labels, x = random_batch(3, 11, 4, 6)
    x = np.round(x * 1024) / 1024
    _, expected = means_and_spreads(x, tf.constant(labels))
    _, spreads = means_and_spreads(x + 1000.0, tf.constant(labels))
    assert_close(spreads, expected, 1e-4)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_values_of_the_own_class_have_a_dense_gradient(dtype):
    labels = tf.constant([2, 0, 2, 1, 3, -1], dtype)
    variable = tf.Variable([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        values = of_own_class(variable, labels)
        total = tf.reduce_sum(values[:4])
    np.testing.assert_array_equal(values, [3.0, 1.0, 3.0, 2.0, np.nan, np.nan])
    gradient = tape.gradient(total, variable)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient, [1.0, 1.0, 2.0])
