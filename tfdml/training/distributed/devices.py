"""Where a run trains: one device, several GPUs, logical CPU devices, or several hosts; checks of the backend."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdml.errors import UserError
from tfdml.training.distributed import jax_processes
from tfdml.training.distributed.jax_processes import processes
from tfdml.training.distributed.tensorflow_workers import Workers, from_environment
from tfdml.training.settings import RunSettings


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
    return jax_processes.on_gpu() if keras.backend.backend() == "jax" else bool(tf.config.list_physical_devices("GPU"))


def own_threads(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, made by threads of their own, so that the input never waits for the one that runs the model."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = os.cpu_count() or 1
    return batches.with_options(options)


def share_of(batches: tf.data.Dataset, batch_size: int, workers: Workers) -> Any:
    """A worker's part of the batches, as `fit` takes it.

    Args:
        batches: Of one process: the batches themselves; of several workers: this one's share of each.
        batch_size: Images of a step over all workers.
        workers: Who trains.
    """
    if workers.alone:
        return batches
    # One element for each replica of this worker, in turn.
    per_replica = batches.rebatch(batch_size // workers.strategy.num_replicas_in_sync).prefetch(tf.data.AUTOTUNE)
    return workers.strategy.distribute_datasets_from_function(lambda _: per_replica)


def make_strategy(logical_devices: int = 0, workers: Workers | None = None) -> Any:
    """The strategy for the devices there are; TensorFlow's default one on a single device.

    Several GPUs, or `logical_devices` CPU devices if that is 2 or more, are mirrored. On Keras's JAX backend a
    `JaxDevices` stands in its place.

    Args:
        logical_devices: Into how many devices the CPU is split, where that is 2 or more.
        workers: Who trains; by default this process alone.

    Raises:
        UserError: The CPU cannot be split.
    """
    if keras.backend.backend() == "jax":
        return jax_processes.make_devices(logical_devices)
    if workers is not None and not workers.alone:
        if logical_devices > 1:
            raise UserError(f"--logical_devices={logical_devices} is of one process: leave it out under TF_CONFIG")
        return workers.strategy
    if logical_devices > 1:
        split_cpu(logical_devices)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(logical_devices)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    gpus = tf.config.list_logical_devices("GPU")
    return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()


def describe(strategy: Any, workers: Workers | None = None) -> list[str]:
    """The devices that train."""
    if isinstance(strategy, jax_processes.JaxDevices):
        return strategy.names
    if workers is not None and not workers.alone:
        return [f"{device} of {host}" for host in workers.addresses for device in _local(strategy)]
    if strategy.num_replicas_in_sync > 1:
        return _local(strategy)
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]


def _local(strategy: tf.distribute.Strategy) -> list[str]:
    return list(strategy.extended.worker_devices)


BACKENDS = ("tensorflow", "jax")


def check_backend(run: RunSettings) -> None:
    """Refuse a backend that does not train, and settings that mean nothing on the one that is set.

    Args:
        run: The devices.

    Raises:
        UserError: `KERAS_BACKEND` names another backend; or a flag or variable belongs to the other one.

    Example:
        >>> check_backend(RunSettings(run_dir="runs/first"))
    """
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise UserError(f"KERAS_BACKEND={backend}: training runs on {' or '.join(BACKENDS)}")
    if backend == "tensorflow":
        if os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES"):
            raise UserError(
                "KERAS_DISTRIBUTION_NUM_PROCESSES names processes of JAX, and this is TensorFlow: set "
                "KERAS_BACKEND=jax, or unset it"
            )
        return
    if os.environ.get("TF_CONFIG"):
        raise UserError(
            "TF_CONFIG names workers of TensorFlow, and KERAS_BACKEND is jax: name processes by "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, _NUM_PROCESSES and _PROCESS_ID, or unset it"
        )
    if processes().count > 1 and run.stops_on() - {"nan"}:
        raise UserError(
            f"--stop_on={run.stop_on}: several processes of JAX, of which one looks, do not end together; leave it "
            "out, and read the alarms of watch.json"
        )
    if not run.deterministic:
        raise UserError("--nodeterministic is for TensorFlow; on JAX a step gives the same bits as it is: leave it out")


def require_one_process(flag: str) -> None:
    """Refuse what trains several runs one after another where several processes train together.

    Args:
        flag: What asks for it.

    Raises:
        UserError: This process is one of several.

    Example:
        >>> require_one_process("seeds")
    """
    if len(from_environment()[1]) > 1 or processes().count > 1:
        raise UserError(f"--{flag} trains run after run in one process: leave it out where several train together")


def check_same_backend(recorded: str | None) -> None:
    """Refuse to continue a run on another backend than the one that began it.

    Args:
        recorded: What the run's folder says; None if it says nothing.

    Raises:
        UserError: It is another.

    Example:
        >>> check_same_backend("tensorflow")
    """
    backend = keras.backend.backend()
    if recorded not in (None, backend):
        raise UserError(
            f"--resume: the run was started on {recorded} and this is {backend}, which rounds otherwise: set "
            f"KERAS_BACKEND={recorded}, or start a new run, from these weights with --start_from"
        )
