"""On replicas of unequal size, every loss has the gradient of one device."""

import functools
import inspect
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

from tests.mathematics import assert_close, public_classes, random_batch
from tests.played_replicas import play, sum_and_gradient
from tfdml import losses
from tfdml.losses.classification import ClassSimilarityLoss

MAKE = public_classes(losses) | {
    f"TripletLoss {mining}": functools.partial(losses.TripletLoss, 0.5, mining)
    for mining in ("hard", "semi_hard", "distance_weighted")
}
MAKE["TripletLoss soft"] = functools.partial(losses.TripletLoss, "soft")


def make(name, reduction):
    # Losses that draw do so by a seed of their own.
    options = {"seed": 3} if "seed" in inspect.signature(MAKE[name]).parameters else {}
    return MAKE[name](reduction=reduction, **options)


def batch(loss):
    labels, x = random_batch(4, 10, 4, 4)
    return labels, 0.9 * x if isinstance(loss, ClassSimilarityLoss) else x


@pytest.mark.one_quick_case
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
@pytest.mark.parametrize("name", MAKE)
def test_the_gradient_is_that_of_one_device(name, reduction):
    loss = make(name, reduction)
    arrays = batch(loss)
    expected = sum_and_gradient(loss, arrays, [10])
    assert np.any(expected[1])
    value, gradient = sum_and_gradient(loss, arrays, [7, 3])
    assert_close(gradient, expected[1], floor=1e-7)
    if reduction != "sum":
        # A mean is reported as Keras's logs expect it: the mean of the replicas' means, whatever their sizes.
        value, _ = sum_and_gradient(loss, arrays, [5, 5])
    assert_close(value, expected[0])


@pytest.mark.parametrize("name", ["AMSoftmaxLoss", "ContrastiveLoss"])
def test_a_weighted_mean_is_that_of_all_weights(name):
    loss = make(name, "mean_with_sample_weight")
    labels, x = batch(loss)
    weights = np.linspace(0.0, 2.0, 10).astype("float32")

    def weighted(labels, weights, x):
        return loss(labels, x, sample_weight=weights)

    expected = sum_and_gradient(weighted, (labels, weights, x), [10])[1]
    assert_close(sum_and_gradient(weighted, (labels, weights, x), [7, 3])[1], expected)


@pytest.mark.parametrize("name", ["ContrastiveLoss", "ProxyAnchorLoss"])
def test_every_replica_keeps_the_values_of_its_own_images(name):
    loss = make(name, "sum_over_batch_size")
    labels, x = batch(loss)
    parts = [(labels[:3], x[:3]), (labels[3:4], x[3:4]), (labels[4:], x[4:])]
    values = [keras.ops.convert_to_numpy(value) for value in play(loss.call, *parts)]
    assert [len(value) for value in values] == [3, 1, 6]
    assert_close(np.concatenate(values), loss.call(labels, x))


CHILD = """
    import numpy as np
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    from tfdml import losses

    makers = list(public_classes(losses).values())
    makers = [make for make in makers if issubclass(make, (losses.PairLoss, losses.ProxyAnchorLoss))]
    makers = [make for make in makers if make not in (losses.TripletLoss, losses.ContrastiveLoss)]
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
            values, parts = tf.function(strategy.run, autograph=False)(gradient, (part(labels), part(x)))
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
