"""Where a run trains: one device, several GPUs, or logical CPU devices."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdml.errors import UserError
from tfdml.training import jax_devices


def split_cpu(count: int) -> None:
    """Split the CPU into `count` logical devices; to be called before TensorFlow does anything else.

    Raises:
        UserError: TensorFlow has started already.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise UserError(f"--logical_devices={count}: TensorFlow runs already; start a new process") from error


def one_operation_at_a_time() -> None:
    """Make CPU training reproducible bit by bit.

    Operations that run side by side share threads, and some then sum in another order; one at a time, each still using
    every core, none does. To be called before TensorFlow does anything else; a GPU is not affected.
    """
    if keras.backend.backend() != "tensorflow" or tf.config.list_physical_devices("GPU"):
        return
    try:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        logging.warning("TensorFlow runs already: --deterministic has no effect in this process")


def on_gpu() -> bool:
    """Whether training is on a device with a memory of its own."""
    return jax_devices.on_gpu() if keras.backend.backend() == "jax" else bool(tf.config.list_physical_devices("GPU"))


def own_threads(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, made by threads of their own, so that the input never waits for the one that runs the model."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = os.cpu_count() or 1
    return batches.with_options(options)


def make_strategy(logical_devices: int = 0) -> Any:
    """The strategy for the devices there are; TensorFlow's default one on a single device.

    Several GPUs, or `logical_devices` CPU devices if that is 2 or more, are mirrored. On Keras's JAX backend a
    `JaxDevices` stands in its place.
    """
    if keras.backend.backend() == "jax":
        return jax_devices.make_devices(logical_devices)
    if logical_devices > 1:
        split_cpu(logical_devices)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(logical_devices)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    gpus = tf.config.list_logical_devices("GPU")
    return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()


def describe(strategy: Any) -> list[str]:
    """The devices that train."""
    if isinstance(strategy, jax_devices.JaxDevices):
        return strategy.names
    if strategy.num_replicas_in_sync > 1:
        return list(strategy.extended.worker_devices)
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]
