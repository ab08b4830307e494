"""Where a run trains: one device, several GPUs, logical CPU devices, or several hosts; checks of
the backend.

Processes on several hosts know which of them they are, exchange what they find, and part in the
end. On TensorFlow TF_CONFIG names them. On Keras's JAX backend they are started with the same
flags, and each with Keras's three environment variables: `KERAS_DISTRIBUTION_JOB_ADDRESSES`
(host:port of process 0), `KERAS_DISTRIBUTION_NUM_PROCESSES` and `KERAS_DISTRIBUTION_PROCESS_ID`.
There the batch is shared out over all devices of all processes, every weight is on each of them,
and arrays are global, so that a loss over pairs sees all pairs of the batch; what changes a
variable must happen in all processes, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.errors import ERROR_TEXT, UserError, short_message, user_errors
from tfdml.version import __version__, installed
from tfdml.workarounds import (
    bound_waiting,
    forget_layout,
    multi_worker_strategy,
    sum_gradients_in_order,
)

BACKENDS = ("tensorflow", "jax")
_PACKAGES = ("tensorflow", "keras", "numpy", "faiss-cpu", "scikit-learn", "pillow", "matplotlib")
# Bytes that are sent at once.
_CHUNK = 2**26
# How long the first of them waits for the last, and without a sign of life of another before it
# counts as lost.
_MEETING_SECONDS, _SILENCE_SECONDS = 600, 20
_JOBS = ("chief", "worker")
# What collective operations raise where a worker is lost.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", '
    '"index": 0}}'
)
_VARIABLES = (
    "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "KERAS_DISTRIBUTION_PROCESS_ID",
)


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train together, and which of them this is. By default there is no other.

    Process 0, the chief, alone writes. What one process asks of the others, all have to ask at the
    same point. Several processes need a subclass with `gather`: `TensorFlowWorkers` or
    `JaxProcesses`.

    Args:
        index: Which one this process is.
        addresses: `host:port` of all of them, or what else names them in messages.

    Example:
        >>> processes = Processes()
        >>> processes.is_chief, processes.count, processes.of_chief(lambda: "what the chief found")
        (True, 1, 'what the chief found')
    """

    index: int = 0
    addresses: tuple[str, ...] = ("",)
    #: Whether what changes a variable must happen in all processes, in the same order.
    lockstep: ClassVar[bool] = False

    @property
    def count(self) -> int:
        """How many train."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this is the one that writes."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    def part(self, total: int) -> slice:
        """Which of so many rows this process works on: with those of the others, in order, all of
        them.

        Args:
            total: How many there are; where they are fewer than the processes, each works on all.
        """
        if total < self.count:
            return slice(0, total)
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of all processes, in their order.

        Args:
            rows: (n, ...) float32 or int64; n may differ from process to process.
        """
        assert self.alone
        return rows

    def bytes_of_chief(self, read: Callable[[], bytes]) -> bytes:
        """Return what `read` returns on the chief, on every process; it is called there alone."""
        if self.alone:
            return read()
        data = read() if self.is_chief else b""
        size = int(self.gather(np.array([len(data)] if self.is_chief else [], np.int64))[0])
        parts = []
        for start in range(0, size, _CHUNK):
            chunk = data[start : start + _CHUNK]
            parts.append(
                self.gather(np.frombuffer(chunk + b"\0" * (-len(chunk) % 8), np.int64)).tobytes()
            )
        return b"".join(parts)[:size]

    def of_chief(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns on the chief, which alone calls it.

        Args:
            compute: Returns what JSON can hold.

        Raises:
            UserError: It was raised on the chief; it is raised on every process.
        """
        if self.alone:
            return compute()
        answer: dict[str, Any] = {}
        if self.is_chief:
            try:
                answer["value"] = compute()
            except UserError as error:
                answer["error"] = str(error)
        received = json.loads(self.bytes_of_chief(lambda: json.dumps(answer).encode()))
        if "error" in received:
            raise UserError(received["error"])
        return answer["value"] if self.is_chief else received["value"]

    def distribute(self, batches: Any, batch_size: int) -> Any:
        """Return the batches of this process, as `fit` takes them.

        Args:
            batches: A `tf.data.Dataset` of this process's rows of each batch.
            batch_size: Images of a step over all processes.
        """
        return batches

    def leave(self, variables: Sequence[Any]) -> Processes | None:
        """Part after the last step, where the results are the chief's alone; returns who makes
        them, None elsewhere.

        Args:
            variables: Those that are still needed.
        """
        return self

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Enter a block in which the loss of another process is one clear line."""
        yield


class WorkerLost(UserError):
    """Another worker has ended, or cannot be reached: the run can resume with all of them started
    again."""


@dataclasses.dataclass(frozen=True)
class TensorFlowWorkers(Processes):
    """Workers that a `tf.distribute.MultiWorkerMirroredStrategy` joins.

    Args:
        index: See `Processes`.
        addresses: See `Processes`.
        strategy: The strategy.
    """

    strategy: Any = None

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See `Processes.gather`."""
        local = len(self.strategy.extended.worker_devices)

        def rows_of(replica: Any) -> tf.Tensor:
            # What a worker has is given by the first of its replicas.
            return tf.constant(rows if replica.replica_id_in_sync_group % local == 0 else rows[:0])

        values = self.strategy.experimental_distribute_values_from_function(rows_of)
        return self.strategy.gather(values, axis=0).numpy()

    def distribute(self, batches: tf.data.Dataset, batch_size: int) -> Any:
        """See `Processes.distribute`: one element for each replica of this worker, in turn."""
        per_replica = batches.rebatch(batch_size // self.strategy.num_replicas_in_sync).prefetch(
            tf.data.AUTOTUNE
        )
        return self.strategy.distribute_datasets_from_function(lambda _: per_replica)

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """See `Processes.ending_together`.

        Raises:
            WorkerLost: Another worker has ended, or cannot be reached.
        """
        here = f"this is worker {self.index} of {self.count}"
        lost = (
            f"another worker ended or cannot be reached ({ERROR_TEXT}); {here}. Start all of them "
            "again, with --resume"
        )
        try:
            yield
        except LOST as error:
            raise WorkerLost(lost.replace(ERROR_TEXT, short_message(error, longest=200))) from error

    @classmethod
    def from_environment(cls) -> tuple[int, tuple[str, ...]]:
        """Return this process's number and all workers' addresses, by TF_CONFIG; (0, ("",)) where
        it names no other.

        Raises:
            UserError: TF_CONFIG is no such description.

        Example:
            >>> TensorFlowWorkers.from_environment()
            (0, ('',))
        """
        text = os.environ.get("TF_CONFIG", "")
        if not text:
            return 0, ("",)
        wrong = f"TF_CONFIG does not say who trains ({ERROR_TEXT}): {_EXAMPLE}"
        with user_errors((ValueError, KeyError, TypeError, AttributeError), wrong):
            config = json.loads(text)
            cluster = config.get("cluster", {})
            jobs = [job for job in _JOBS if cluster.get(job)]
            addresses = tuple(map(str, itertools.chain(*(cluster[job] for job in jobs))))
            if len(addresses) < 2:
                return 0, ("",)
            job, index = config["task"]["type"], int(config["task"]["index"])
            if set(cluster) - set(_JOBS) or not 0 <= index < len(cluster[job]):
                raise ValueError(
                    f"it has other jobs than {' and '.join(_JOBS)}, or no {job} {index}"
                )
        # The chief is counted before the workers.
        first = len(cluster.get("chief") or ()) if job == "worker" else 0
        return first + index, addresses

    @classmethod
    @functools.cache
    def join(cls, index: int, addresses: tuple[str, ...]) -> TensorFlowWorkers:
        """Meet the other workers; to be called before TensorFlow does anything else.

        Args:
            index: Of `from_environment`.
            addresses: Of `from_environment`; several.

        Raises:
            UserError: The address of this worker cannot be used, or the others do not come.
        """
        here = f"worker {index} of {len(addresses)} ({addresses[index]})"
        others = ", ".join(addresses[:index] + addresses[index + 1 :])
        logging.info("%s: waiting for the others (%s)", here, others)
        deaf = f"{here} cannot listen at its address: {ERROR_TEXT}"
        missing = f"{here}: not all of the others came: {ERROR_TEXT}"
        late = f"{here}: TensorFlow runs already; start a new process"
        with (
            user_errors(tf.errors.OpError, deaf, keep="first"),
            user_errors(LOST, missing, keep="first"),
            user_errors(RuntimeError, late),
        ):
            bound_waiting(_MEETING_SECONDS, _SILENCE_SECONDS)
            strategy = multi_worker_strategy()
        logging.info("%s: all are there", here)
        return TensorFlowWorkers(index, addresses, strategy)


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
        gathered = np.asarray(process_allgather(padded.view(np.int32))).view(rows.dtype)
        gathered = gathered.reshape(self.count, *padded.shape)
        parts = [
            part[:count].reshape(count, *rows.shape[1:])
            for part, count in zip(gathered, counts, strict=True)
        ]
        return np.concatenate(parts)

    def leave(self, variables: Sequence[Any]) -> Processes | None:
        """See `Processes.leave`: what follows is each one's own, and the variables are on a device
        of this process."""
        import jax

        values = [np.asarray(variable.value.addressable_data(0)) for variable in variables]
        jax.distributed.shutdown()
        keras.distribution.set_distribution(None)
        for variable, value in zip(variables, values, strict=True):
            forget_layout(variable)
            variable.assign(value)
        return Processes() if self.is_chief else None

    @classmethod
    def from_environment(cls) -> tuple[int, tuple[str, ...]]:
        """Return the number of this process and the names of all, by Keras's variables; (0, ("",))
        without them.

        Raises:
            UserError: Only some of the variables are set, or one is no number that fits.

        Example:
            >>> JaxProcesses.from_environment()
            (0, ('',))
        """
        address, count_text, index_text = (os.environ.get(name, "") for name in _VARIABLES)
        if not (address or count_text or index_text):
            return 0, ("",)
        wrong = (
            f"{', '.join(_VARIABLES)} are the address of process 0, how many there are, and which "
            "this is, from 0 on"
        )
        with user_errors(ValueError, wrong):
            index, count = int(index_text), int(count_text)
        if not address or not 0 <= index < count:
            raise UserError(wrong)
        # Only the first is called by its address; the others call it, and count.
        others = [f"process {number}" for number in range(1, count)]
        return index, (address, *others)

    @classmethod
    def join(cls, index: int, addresses: tuple[str, ...]) -> JaxProcesses:
        """Meet the other processes.

        Args:
            index: Of `from_environment`.
            addresses: Of `from_environment`; several.

        Raises:
            UserError: The processes do not find one another.
        """
        import jax

        if not jax.distributed.is_initialized():
            keras.utils.set_random_seed(
                0
            )  # else Keras has the processes agree on one; the run sets its own later
            lost = f"the processes of {_VARIABLES[0]} do not find one another: {ERROR_TEXT}"
            with user_errors((RuntimeError, ValueError), lost):
                keras.distribution.initialize()
        return JaxProcesses(index, addresses)


def assign_here(variable: Any, value: np.ndarray) -> None:
    """Assign a value in this process alone, without a word to the others, which assign the same."""
    if keras.backend.backend() != "jax" or variable.value.is_fully_addressable:
        variable.assign(value)
        return
    import jax

    sharding = variable.value.sharding
    value = np.asarray(value, keras.backend.standardize_dtype(variable.dtype))
    variable.assign(jax.make_array_from_callback(value.shape, sharding, lambda part: value[part]))


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
    """Meet the other processes that the environment names; to be called before the backend does
    anything else.

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

    Operations that run side by side share threads, and some then sum in another order; one at a
    time, each still using every core, none does. Gradients are summed in one order, and no graph is
    rewritten, as chains of additions would become sums without an order. To be called before
    TensorFlow does anything else; a GPU is not affected.
    """
    if keras.backend.backend() != "tensorflow" or tf.config.list_physical_devices("GPU"):
        return
    sum_gradients_in_order()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        logging.warning(
            "TensorFlow runs already: --deterministic may not give the same bits in this process"
        )


class ClassParallel(keras.distribution.DataParallel):
    """Data parallelism on JAX whose devices share the classes too: each holds the proxies of an
    equal part of them.

    The weights of `tfdml.layers.CosineProxies`, which a `ProxyLoss` has, are divided along the
    classes, and with them what the optimizer keeps of each. The embeddings of the batch go to every
    device, the similarities stay where their classes are, and the softmax is summed over the parts:
    the step is that of one device, to rounding. All other weights are on every device. Files hold
    whole weights.

    Args:
        devices: Their names; by default all.

    Raises:
        UserError: Where proxies are made whose classes the devices do not divide.

    Example:
        >>> keras.distribution.set_distribution(ClassParallel())  # doctest: +SKIP
        >>> proxies = tfdml.objectives.ProxyLoss(tfdml.losses.AMSoftmaxLoss(), 1_000_000)
        >>> learner = tfdml.models.MetricLearner(embedder, proxies)  # doctest: +SKIP
    """

    def get_variable_layout(self, variable):
        """Return how a variable lies on the devices."""
        if not variable.path.endswith("/proxies"):
            return super().get_variable_layout(variable)
        (classes, *sizes), devices = variable.shape, self.num_model_replicas
        if classes % devices:
            advice = f"leave out {classes % devices}"
            raise UserError(
                f"{variable.path}: {devices} devices cannot share {classes:,} classes equally; "
                f"{advice}"
            )
        return keras.distribution.TensorLayout(
            [self.batch_dim_name, *(None for _ in sizes)], self.device_mesh
        )


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
            raise UserError(
                "JAX runs already; start a new process", logical_devices=logical_devices
            ) from error


def make_devices(shard_classes: bool = False) -> JaxDevices:
    """Take all devices of all processes into use; each for a part of the classes, where that is
    asked for."""
    devices = keras.distribution.list_devices()
    several = len(devices) > 1
    # Each process makes its own part of the batch.
    kind = ClassParallel if shard_classes else keras.distribution.DataParallel
    distribution = kind(devices=devices, auto_shard_dataset=False) if several else None
    keras.distribution.set_distribution(distribution)
    return JaxDevices(devices)


def make_strategy(
    logical_devices: int = 0, processes: Processes | None = None, shard_classes: bool = False
) -> Any:
    """Return the strategy for the devices there are; TensorFlow's default one on a single device.

    Several GPUs, or `logical_devices` CPU devices if that is 2 or more, are mirrored. On Keras's
    JAX backend a `JaxDevices` stands in its place.

    Args:
        logical_devices: Into how many devices the CPU is split, where that is 2 or more.
        processes: Who trains; by default this process alone.
        shard_classes: Whether each device has a part of the classes: `ClassParallel`.

    Raises:
        UserError: The CPU cannot be split, or the classes cannot be shared.
    """
    if shard_classes and (keras.backend.backend() != "jax" or not (processes or Processes()).alone):
        raise UserError(
            "works in one process on JAX: KERAS_BACKEND=jax in front of the command",
            shard_classes=True,
        )
    if keras.backend.backend() == "jax":
        prepare_devices(logical_devices)
        return make_devices(shard_classes)
    if isinstance(processes, TensorFlowWorkers):
        if logical_devices > 1:
            raise UserError(
                "is of one process: leave it out under TF_CONFIG", logical_devices=logical_devices
            )
        return processes.strategy
    if logical_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        late = f"--logical_devices={logical_devices}: TensorFlow runs already; start a new process"
        with user_errors(RuntimeError, late):
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * logical_devices
            )
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(logical_devices)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    gpus = tf.config.list_logical_devices("GPU")
    return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()


def device_names(strategy: Any, processes: Processes | None = None) -> list[str]:
    """Return the devices that train."""
    if isinstance(strategy, JaxDevices):
        return strategy.names
    if processes is not None and not processes.alone:
        devices = strategy.extended.worker_devices
        return [
            f"{device} of {host}"
            for host, device in itertools.product(processes.addresses, devices)
        ]
    if strategy.num_replicas_in_sync > 1:
        return list(strategy.extended.worker_devices)
    gpus = tf.config.list_logical_devices("GPU")
    return [device.name for device in gpus or tf.config.list_logical_devices("CPU")]


def environment(devices: list[str]) -> dict[str, Any]:
    """Return what trains: versions, machine, devices.

    Args:
        devices: Of `device_names`.
    """
    backend = keras.backend.backend()
    packages = (*_PACKAGES, "jax") if backend == "jax" else _PACKAGES
    python = sys.version.split()[0]
    return {
        "tfdml": __version__,
        "backend": backend,
        "python": python,
        "platform": platform.platform(),
        "cpus": _cpu_count(),
        "devices": devices,
        "packages": installed(packages),
    }


def _cpu_count() -> int | None:
    """Return the cores that this process may use, as TensorFlow counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def check_backend() -> None:
    """Refuse a backend that does not train, and variables that mean nothing on the one that is set.

    Raises:
        UserError: `KERAS_BACKEND` names another backend; or a variable belongs to the other one.

    Example:
        >>> check_backend()
    """
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise UserError(f"KERAS_BACKEND={backend}: training runs on {' or '.join(BACKENDS)}")
    if backend == "tensorflow":
        if os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES"):
            raise UserError(
                "KERAS_DISTRIBUTION_NUM_PROCESSES is for JAX, and this is TensorFlow: unset it"
            )
        return
    if os.environ.get("TF_CONFIG"):
        raise UserError(
            "TF_CONFIG is for TensorFlow, and KERAS_BACKEND is jax: name processes as Keras does"
        )
