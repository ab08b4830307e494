import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import MODES
from tfdml.layers import streaming


def totals(x):
    """Sums of the rows so far, and each row doubled, by a loop."""

    def body(total, i):
        row = keras.ops.reshape(keras.ops.slice(x, (i, 0), (1, x.shape[1])), (-1,))
        return total + row, (total + row, 2.0 * row)

    return streaming.scan(body, keras.ops.zeros(x.shape[1]), x.shape[0], [x.shape[1:]] * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 5])
def test_carries_a_value_and_stacks_what_each_step_gives(mode, length):
    x = np.random.default_rng(0).normal(size=(length, 3)).astype("float32")
    function = totals if mode == "eager" else tf.function(totals, jit_compile=mode == "xla", autograph=False)
    carry, (sums, doubled) = function(tf.constant(x))
    np.testing.assert_allclose(carry, x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(sums, np.cumsum(x, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(doubled, 2 * x)
