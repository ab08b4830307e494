import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, random_batch
from tests.objectives import references_classes as references
from tfdml.objectives.kernel_embedding import averaging_matrix
from tfdml.objectives.regularizers import (
    class_index,
    class_pairs,
    means_and_spreads,
    of_own_class,
)
from tfdml.pairs import Pairs, Scope


def test_means_and_spreads_of_each_image_s_class():
    labels, x = random_batch(3, 11, 4, 6, unit=False)
    means, spreads = means_and_spreads(x, tf.constant(labels))
    for i, label in enumerate(labels):
        rows = x[labels == label].astype("float64")
        assert_close(means[i], rows.mean(axis=0), floor=1e-6)
        assert_close(spreads[i], references.density(labels, x, label), floor=1e-6)


def test_a_large_offset_costs_no_digits():
    labels, x = random_batch(3, 11, 4, 6)
    x = np.round(x * 1024) / 1024
    _, expected = means_and_spreads(x, tf.constant(labels))
    _, spreads = means_and_spreads(x + 1000.0, tf.constant(labels))
    assert_close(spreads, expected, 1e-4)


def test_classes_are_counted_once():
    labels = tf.constant([4, 2, 4, 2, 9, 4])
    index, first = class_index(labels)
    np.testing.assert_array_equal(index, [1, 0, 1, 0, 2, 1])
    np.testing.assert_array_equal(first, [True, True, False, False, True, False])
    whole = np.asarray(class_pairs(Pairs.of_batch(tf.zeros((6, 2)), labels)))
    np.testing.assert_array_equal(np.argwhere(whole), [[0, 1], [0, 4], [1, 0], [1, 4], [4, 0], [4, 1]])
    rows = class_pairs(Pairs.of_batch(tf.zeros((6, 2)), labels, scope=Scope(3, 2)))
    np.testing.assert_array_equal(rows, whole[3:5])
    np.testing.assert_allclose(np.asarray(averaging_matrix(labels)).sum(axis=1), 1.0, rtol=1e-6)


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
