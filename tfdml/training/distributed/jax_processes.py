"""Where a run trains on Keras's JAX backend: all devices of all processes, as one.

The batch is shared out over the devices and every weight is on each of them; arrays are global, so that a loss over
pairs sees all pairs of the batch as it does on a single device, and XLA divides the work.

Several processes are started with the same flags, and each with Keras's three environment variables:
`KERAS_DISTRIBUTION_JOB_ADDRESSES` (host:port of process 0), `KERAS_DISTRIBUTION_NUM_PROCESSES` and
`KERAS_DISTRIBUTION_PROCESS_ID`. What changes a variable must then happen in all of them, in the same order.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.errors import REASON, UserError, user_errors
from tfdml.training.distributed.processes import Processes
from tfdml.workarounds import forget_layout

_PREFIX = "KERAS_DISTRIBUTION_"
_NAMES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")


class JaxProcesses(Processes):
    """Processes that `jax.distributed` joins."""

    lockstep = True

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See `Processes.gather`."""
        from jax.experimental.multihost_utils import process_allgather

        counts = np.asarray(process_allgather(np.array([len(rows)], np.int32))).ravel()
        padded = np.zeros((counts.max(), max(1, math.prod(rows.shape[1:]))), rows.dtype)
        padded[: len(rows)] = rows.reshape(len(rows), padded.shape[1])
        # JAX would shorten integers of 64 bits.
        found = np.asarray(process_allgather(padded.view(np.int32))).view(rows.dtype)
        found = found.reshape(self.count, *padded.shape)
        parts = [part[:count].reshape(count, *rows.shape[1:]) for part, count in zip(found, counts, strict=True)]
        return np.concatenate(parts)

    def leave(self, variables: Sequence[Any]) -> Processes | None:
        """See `Processes.leave`: what follows is each one's own, and the variables are on a device of this process."""
        import jax

        values = [np.asarray(variable.value.addressable_data(0)) for variable in variables]
        jax.distributed.shutdown()
        keras.distribution.set_distribution(None)
        for variable, value in zip(variables, values, strict=True):
            forget_layout(variable)
            variable.assign(value)
        return Processes() if self.is_chief else None


def from_environment() -> tuple[int, tuple[str, ...]]:
    """Return the number of this process and the names of all, by Keras's variables; (0, ("",)) where they are not set.

    Raises:
        UserError: Only some of the variables are set, or one is no number that fits.

    Example:
        >>> from_environment()
        (0, ('',))
    """
    given = {name: os.environ.get(_PREFIX + name, "") for name in _NAMES}
    if not any(given.values()):
        return 0, ("",)
    missing = [_PREFIX + name for name, value in given.items() if not value]
    if missing:
        raise UserError(f"{missing[0]} is not set, but others of {', '.join(_PREFIX + name for name in _NAMES)} are")
    try:
        index, count = int(given["PROCESS_ID"]), int(given["NUM_PROCESSES"])
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise UserError(f"{_PREFIX}PROCESS_ID={given['PROCESS_ID']} is not one of {given['NUM_PROCESSES']} from 0 on")
    return index, (given["JOB_ADDRESSES"], *(f"process {i}" for i in range(1, count)))


def join(index: int, addresses: tuple[str, ...]) -> JaxProcesses:
    """Meet the other processes.

    Args:
        index: Of `from_environment`.
        addresses: Of `from_environment`; several.

    Raises:
        UserError: The processes do not find one another.
    """
    import jax

    if not jax.distributed.is_initialized():
        keras.utils.set_random_seed(0)  # else Keras has the processes agree on one; the run sets its own later
        lost = f"the processes of {_PREFIX}JOB_ADDRESSES do not find one another: {REASON}"
        with user_errors((RuntimeError, ValueError), lost):
            keras.distribution.initialize()
    return JaxProcesses(index, addresses)


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


def assign_here(variable: Any, value: np.ndarray) -> None:
    """Assign a value in this process alone, without a word to the others, which assign the same."""
    if keras.backend.backend() != "jax" or variable.value.is_fully_addressable:
        variable.assign(value)
        return
    import jax

    sharding = variable.value.sharding
    value = np.asarray(value, keras.backend.standardize_dtype(variable.dtype))
    variable.assign(jax.make_array_from_callback(value.shape, sharding, lambda part: value[part]))
