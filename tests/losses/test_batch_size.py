"""Every loss of tuples can be traced before the batch size is known, as `fit` does, with and without XLA."""

import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import assert_close, random_batch, value_and_gradients
from tfdml import losses

LOSSES = {
    **{mining: losses.TripletLoss(0.5, mining) for mining in ("all", "hard", "semi_hard", "distance_weighted")},
    "soft": losses.TripletLoss("soft"),
    **{
        name: getattr(losses, name)()
        for name in losses.__all__
        if name not in ("TripletLoss", "SoftTripleLoss") and issubclass(getattr(losses, name), losses.base.PairLoss)
    },
    "ProxyAnchorLoss": losses.ProxyAnchorLoss(),
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_batch_of_unknown_size(name, mode):
    loss = LOSSES[name]
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 5], tf.float32)]

    @tf.function(input_signature=signature, jit_compile=mode == "xla")
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
