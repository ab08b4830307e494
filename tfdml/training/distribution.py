"""Where a run trains: one device, several GPUs, or logical CPU devices."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfdml.errors import UserError


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


def make_strategy(logical_devices: int = 0) -> Any:
    """The strategy for the devices there are; None on a single device.

    Several GPUs, or `logical_devices` CPU devices if that is 2 or more, are mirrored.
    """
    if logical_devices > 1:
        split_cpu(logical_devices)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(logical_devices)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    gpus = tf.config.list_logical_devices("GPU")
    return tf.distribute.MirroredStrategy() if len(gpus) > 1 else None


def scope(strategy: Any):
    """The strategy's scope; one that does nothing for None."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def describe(strategy: Any) -> list[str]:
    """The devices that train."""
    if strategy is not None:
        return list(strategy.extended.worker_devices)
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]
