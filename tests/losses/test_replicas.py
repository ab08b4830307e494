"""On replicas of unequal size, every loss of tuples has the gradient of one device."""

import subprocess
import sys
import textwrap

import pytest

CHILD = """
    import numpy as np
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    from tfdml import losses

    names = ["NPairLoss", "AngularLoss", "MarginLoss", "MultiSimilarityLoss", "LiftedStructureLoss", "CircleLoss"]
    names += ["SupConLoss", "HistogramLoss", "FastAPLoss", "ProxyAnchorLoss"]
    makers = [getattr(losses, name) for name in names]
    for mining in ("all", "hard", "semi_hard", "distance_weighted"):
        makers.append(lambda mining=mining, **options: losses.TripletLoss(0.5, mining, **options))

    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, 10)
    x = generator.uniform(-1, 1, (10, 4)).astype("float32")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    splits = [(0, 6), (6, 10)]

    def part(array):
        def of(context):
            first, last = splits[context.replica_id_in_sync_group]
            return tf.constant(array[first:last])
        return strategy.experimental_distribute_values_from_function(of)

    for make in makers:
        for reduction in ("sum", "sum_over_batch_size"):
            loss = make(reduction=reduction)

            def gradient(y, e):
                with tf.GradientTape() as tape:
                    tape.watch(e)
                    value = loss(y, e)
                return value, tape.gradient(value, e)

            value, expected = gradient(labels, tf.constant(x))
            values, parts = tf.function(strategy.run)(gradient, (part(labels), part(x)))
            total = sum(v.numpy() for v in strategy.experimental_local_results(values))
            actual = np.concatenate([p.numpy() for p in strategy.experimental_local_results(parts)])
            if reduction == "sum":
                # A mean is reported as Keras's logs expect it: the replicas' means, whatever their sizes.
                np.testing.assert_allclose(total, value, rtol=1e-5, err_msg=loss.name)
            scale = float(np.abs(expected).max())
            np.testing.assert_allclose(actual, expected, atol=1e-5 * scale, err_msg=loss.name)
    print("equal")
"""


@pytest.mark.slow
def test_replicas_of_unequal_size_equal_one_device():
    """In a process of its own: logical devices must be set before TensorFlow starts."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "equal" in result.stdout, result.stderr[-3000:]
