"""Where a run trains on Keras's JAX backend: all devices of all processes, as one.

The batch is shared out over the devices and every weight is on each of them; arrays are global, so that a loss over
pairs sees all pairs of the batch as it does on a single device, and XLA divides the work.

Several processes are started with the same flags, and each with Keras's three environment variables:
`KERAS_DISTRIBUTION_JOB_ADDRESSES` (host:port of process 0), `KERAS_DISTRIBUTION_NUM_PROCESSES` and
`KERAS_DISTRIBUTION_PROCESS_ID`. What changes a variable must then happen in all of them, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.errors import UserError

_PREFIX = "KERAS_DISTRIBUTION_"
_NAMES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this is.

    Args:
        index: From 0; process 0 writes the run folder.
        count: How many there are.
    """

    index: int = 0
    count: int = 1


def processes() -> Processes:
    """Which process the environment makes this one.

    Raises:
        UserError: Only some of Keras's variables are set, or one is no number that fits.

    Example:
        >>> processes()
        Processes(index=0, count=1)
    """
    given = {name: os.environ.get(_PREFIX + name, "") for name in _NAMES}
    if not any(given.values()):
        return Processes()
    missing = [_PREFIX + name for name, value in given.items() if not value]
    if missing:
        raise UserError(f"{missing[0]} is not set, but others of {', '.join(_PREFIX + name for name in _NAMES)} are")
    try:
        found = Processes(int(given["PROCESS_ID"]), int(given["NUM_PROCESSES"]))
    except ValueError:
        found = Processes(0, 0)
    if not 0 <= found.index < found.count:
        raise UserError(
            f"{_PREFIX}PROCESS_ID={given['PROCESS_ID']} of {_PREFIX}NUM_PROCESSES={given['NUM_PROCESSES']}: processes "
            "are numbered from 0 to their number less 1"
        )
    return found


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


def make_devices(logical_devices: int = 0) -> JaxDevices:
    """Take all devices into use, and join the other processes if there are any.

    Args:
        logical_devices: Into how many devices the CPU of this process is split; 0: as it is.

    Raises:
        UserError: JAX runs already, with another number of devices; or the processes do not find one another.
    """
    import jax

    # What JAX trains on, TensorFlow must not reserve for itself: it makes the batches, on the CPU.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    if logical_devices > 1:
        _split_cpu(logical_devices)
    if processes().count > 1 and not jax.distributed.is_initialized():
        _join()
    devices = keras.distribution.list_devices()
    several = len(devices) > 1
    # Each process makes its own part of the batch.
    distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False) if several else None
    keras.distribution.set_distribution(distribution)
    return JaxDevices(devices)


def on_gpu() -> bool:
    """Whether JAX computes on something else than the CPU."""
    import jax

    return jax.default_backend() != "cpu"


def _split_cpu(count: int) -> None:
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.device_count("cpu") != count:
            raise UserError(f"--logical_devices={count}: JAX runs already; start a new process") from error


def _join() -> None:
    keras.utils.set_random_seed(0)  # else Keras has the processes agree on one; the run sets its own later
    try:
        keras.distribution.initialize()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of {_PREFIX}JOB_ADDRESSES do not find one another: {error}") from error


def part(variables: Sequence[Any]) -> None:
    """Part from the other processes, after the last step: what follows is each one's own.

    Args:
        variables: Those that shall go on living, on a device of this process.
    """
    import jax

    values = [np.asarray(variable.value.addressable_data(0)) for variable in variables]
    jax.distributed.shutdown()
    keras.distribution.set_distribution(None)
    for variable, value in zip(variables, values, strict=True):
        variable._layout = None
        variable.assign(value)


def assign_here(variable: Any, value: np.ndarray) -> None:
    """Assign a value in this process alone, without a word to the others: see `from_first`."""
    if processes().count == 1:
        variable.assign(value)
        return
    import jax

    sharding = variable.value.sharding
    value = np.asarray(value, keras.backend.standardize_dtype(variable.dtype))
    variable.assign(jax.make_array_from_callback(value.shape, sharding, lambda part: value[part]))


def from_first(variables: Sequence[Any], state: dict | None) -> dict | None:
    """Give all processes the variables and the state that process 0 has.

    Args:
        variables: The same in every process.
        state: A JSON mapping, or None; counts in process 0 alone.

    Returns:
        That of process 0.
    """
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32)))
    text = np.resize(text, size)
    text = np.asarray(multihost_utils.broadcast_one_to_all(text.astype(np.int32)), np.uint8)
    for variable in variables:
        value = np.asarray(variable.value.addressable_data(0))
        assign_here(variable, np.asarray(multihost_utils.broadcast_one_to_all(value)))
    return json.loads(text.tobytes())
