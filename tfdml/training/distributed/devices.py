"""Where a run trains: one device, several GPUs, logical CPU devices, or several hosts; checks of the backend."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdml.errors import UserError, user_errors
from tfdml.training.distributed.processes import JaxProcesses, Processes, TensorFlowWorkers
from tfdml.training.settings import RunSettings

BACKENDS = ("tensorflow", "jax")


def rank_and_count() -> tuple[int, int]:
    """Which process this is, and how many train together, by the variables of the environment.

    Raises:
        UserError: The variables are wrong.

    Example:
        >>> rank_and_count()
        (0, 1)
    """
    index, addresses = _kind().from_environment()
    return index, len(addresses)


def join(logical_devices: int = 0) -> Processes:
    """Meet the other processes that the environment names; to be called before the backend does anything else.

    Args:
        logical_devices: Into how many devices the CPU is split, on JAX.

    Raises:
        UserError: The environment is wrong, or the others do not come.
    """
    if keras.backend.backend() == "jax":
        prepare_devices(logical_devices)
    kind = _kind()
    index, addresses = kind.from_environment()
    return kind.join(index, addresses) if len(addresses) > 1 else Processes()


def _kind() -> type[JaxProcesses | TensorFlowWorkers]:
    return JaxProcesses if keras.backend.backend() == "jax" else TensorFlowWorkers


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
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() != "cpu"
    return bool(tf.config.list_physical_devices("GPU"))


class JaxDevices:
    """What training asks of a `tf.distribute.Strategy`, of the devices of JAX.

    Args:
        names: Those of all devices.
    """

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.num_replicas_in_sync = len(self.names)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Where models are made; the distribution is that of the whole process."""
        yield


def prepare_devices(logical_devices: int = 0) -> None:
    """Split the CPU, and leave to JAX what it trains on. To be called before the processes meet.

    Args:
        logical_devices: Into how many devices the CPU of this process is split; 0: as it is.

    Raises:
        UserError: JAX runs already, with another number of devices.
    """
    import jax

    # TensorFlow makes the batches, on the CPU.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    if logical_devices < 2:
        return
    try:
        jax.config.update("jax_num_cpu_devices", logical_devices)
    except RuntimeError as error:
        if jax.local_device_count("cpu") != logical_devices:
            raise UserError(f"--logical_devices={logical_devices}: JAX runs already; start a new process") from error


def make_devices() -> JaxDevices:
    """Take all devices of all processes into use."""
    devices = keras.distribution.list_devices()
    several = len(devices) > 1
    # Each process makes its own part of the batch.
    distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False) if several else None
    keras.distribution.set_distribution(distribution)
    return JaxDevices(devices)


def make_strategy(logical_devices: int = 0, processes: Processes | None = None) -> Any:
    """Return the strategy for the devices there are; TensorFlow's default one on a single device.

    Several GPUs, or `logical_devices` CPU devices if that is 2 or more, are mirrored. On Keras's JAX backend a
    `JaxDevices` stands in its place.

    Args:
        logical_devices: Into how many devices the CPU is split, where that is 2 or more.
        processes: Who trains; by default this process alone.

    Raises:
        UserError: The CPU cannot be split.
    """
    if keras.backend.backend() == "jax":
        prepare_devices(logical_devices)
        return make_devices()
    if isinstance(processes, TensorFlowWorkers):
        if logical_devices > 1:
            raise UserError(f"--logical_devices={logical_devices} is of one process: leave it out under TF_CONFIG")
        return processes.strategy
    if logical_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        late = f"--logical_devices={logical_devices}: TensorFlow runs already; start a new process"
        with user_errors(RuntimeError, late):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * logical_devices)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(logical_devices)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    gpus = tf.config.list_logical_devices("GPU")
    return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()


def device_names(strategy: Any, processes: Processes | None = None) -> list[str]:
    """Return the devices that train."""
    if isinstance(strategy, JaxDevices):
        return strategy.names
    if processes is not None and not processes.alone:
        return [f"{device} of {host}" for host in processes.addresses for device in strategy.extended.worker_devices]
    if strategy.num_replicas_in_sync > 1:
        return list(strategy.extended.worker_devices)
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]


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
            raise UserError("KERAS_DISTRIBUTION_NUM_PROCESSES is for JAX, and this is TensorFlow: unset it")
        return
    if os.environ.get("TF_CONFIG"):
        raise UserError("TF_CONFIG is for TensorFlow, and KERAS_BACKEND is jax: name processes as Keras does")
    if not run.deterministic:
        raise UserError("--nodeterministic is for TensorFlow; on JAX a step gives the same bits as it is: leave it out")


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
        raise UserError(f"--resume: the run was started on {recorded}, this is {backend}: set KERAS_BACKEND={recorded}")
