"""The processes that train together: which of them this is, what they exchange, and how they meet.

On TensorFlow each is a worker on a host of its own, as TF_CONFIG names them. On Keras's JAX backend several processes
are started with the same flags, and each with Keras's three environment variables: `KERAS_DISTRIBUTION_JOB_ADDRESSES`
(host:port of process 0), `KERAS_DISTRIBUTION_NUM_PROCESSES` and `KERAS_DISTRIBUTION_PROCESS_ID`. What changes a
variable must then happen in all of them, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.errors import REASON, UserError, user_errors
from tfdml.workarounds import bound_waiting, forget_layout, multi_worker_strategy

# Bytes that are sent at once.
_CHUNK = 2**26
# How long the first of them waits for the last, and without a sign of life of another before it counts as lost.
_MEETING_SECONDS, _SILENCE_SECONDS = 600, 20
_JOBS = ("chief", "worker")
# What collective operations raise where a worker is lost.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'
_ADDRESS, _COUNT, _INDEX = _VARIABLES = (
    "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "KERAS_DISTRIBUTION_PROCESS_ID",
)


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train together, and which of them this is. By default there is no other.

    Process 0, the chief, alone writes. What one process asks of the others, all have to ask at the same point. Several
    processes need a subclass with `gather`: `TensorFlowWorkers` or `JaxProcesses`.

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
        """Which of so many rows this process works on: with those of the others, in order, all of them.

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
            parts.append(self.gather(np.frombuffer(chunk + b"\0" * (-len(chunk) % 8), np.int64)).tobytes())
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
        value, raised = None, None
        if self.is_chief:
            try:
                value = compute()
            except UserError as error:
                raised = error
        told = {"value": value, "error": None if raised is None else str(raised)}
        told = json.loads(self.bytes_of_chief(lambda: json.dumps(told).encode()))
        if told["error"] is not None:
            raise raised or UserError(told["error"])
        return value if self.is_chief else told["value"]

    def distribute(self, batches: Any, batch_size: int) -> Any:
        """Return the batches of this process, as `fit` takes them.

        Args:
            batches: A `tf.data.Dataset` of this process's rows of each batch.
            batch_size: Images of a step over all processes.
        """
        return batches

    def leave(self, variables: Sequence[Any]) -> Processes | None:
        """Part after the last step, where the results are the chief's alone; returns who makes them, None elsewhere.

        Args:
            variables: Those that are still needed.
        """
        return self

    def is_loss(self, error: Exception) -> bool:
        """Whether an error means that another process is lost."""
        return False

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Enter a block in which the loss of another process is one clear line."""
        yield


class WorkerLost(UserError):
    """Another worker has ended, or cannot be reached: the run can resume with all of them started again."""


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
        per_replica = batches.rebatch(batch_size // self.strategy.num_replicas_in_sync).prefetch(tf.data.AUTOTUNE)
        return self.strategy.distribute_datasets_from_function(lambda _: per_replica)

    def is_loss(self, error: Exception) -> bool:
        """See `Processes.is_loss`."""
        return isinstance(error, LOST)

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """See `Processes.ending_together`.

        Raises:
            WorkerLost: Another worker has ended, or cannot be reached.
        """
        try:
            yield
        except LOST as error:
            raise WorkerLost(
                f"{self._lost(str(error))} ended or cannot be reached: see what is written there; this is worker "
                f"{self.index} of {self.count}. Start all of them again, with --resume"
            ) from error

    def _lost(self, message: str) -> str:
        """Return the workers that an error of a collective operation names, or that it can only mean, and a verb."""
        named = message.partition("unhealthy")[2] or message
        tasks = re.findall(r"/job:(chief|worker)/(?:replica:\d+/)?task:(\d+)", named)
        chiefs = any(job == "chief" for job, _ in tasks)
        found = {int(task) + (job == "worker" and chiefs) for job, task in tasks} - {self.index}
        found = {index for index in found if index < self.count}
        word, verb = (" and ", "have" if len(found) > 1 else "has") if found else (" or ", "has")
        suspects = found or set(range(self.count)) - {self.index}
        return word.join(f"worker {index} ({self.addresses[index]})" for index in sorted(suspects)) + f" {verb}"

    @classmethod
    def from_environment(cls) -> tuple[int, tuple[str, ...]]:
        """Return this process's number and all workers' addresses, by TF_CONFIG; (0, ("",)) where it names no other.

        Raises:
            UserError: TF_CONFIG is no such description.

        Example:
            >>> TensorFlowWorkers.from_environment()
            (0, ('',))
        """
        text = os.environ.get("TF_CONFIG", "")
        if not text:
            return 0, ("",)
        wrong = f"TF_CONFIG does not say who trains ({REASON}): {_EXAMPLE}"
        with user_errors((ValueError, KeyError, TypeError, AttributeError), wrong):
            config = json.loads(text)
            cluster = config.get("cluster", {})
            jobs = [job for job in _JOBS if cluster.get(job)]
            addresses = tuple(str(address) for job in jobs for address in cluster[job])
            if len(addresses) < 2:
                return 0, ("",)
            if others := ", ".join(sorted(set(cluster) - set(_JOBS))):
                raise UserError(f"TF_CONFIG names jobs that do not train here ({others}): {_EXAMPLE}")
            job, index = config["task"]["type"], int(config["task"]["index"])
            if not 0 <= index < len(cluster[job]):
                raise UserError(f"TF_CONFIG: there is no {job} {index} among {len(cluster[job])}")
        return index + (len(cluster["chief"]) if job == "worker" and "chief" in jobs else 0), addresses

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
        logging.info("%s: waiting for the others (%s)", here, ", ".join(addresses[:index] + addresses[index + 1 :]))
        with (
            user_errors(tf.errors.OpError, f"{here} cannot listen at its address: {REASON}", keep="first"),
            user_errors(LOST, f"{here}: not all of the others came: {REASON}", keep="first"),
            user_errors(RuntimeError, f"{here}: TensorFlow runs already; start a new process"),
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

    @classmethod
    def from_environment(cls) -> tuple[int, tuple[str, ...]]:
        """Return the number of this process and the names of all, by Keras's variables; (0, ("",)) without them.

        Raises:
            UserError: Only some of the variables are set, or one is no number that fits.

        Example:
            >>> JaxProcesses.from_environment()
            (0, ('',))
        """
        given = {name: os.environ.get(name, "") for name in _VARIABLES}
        if not any(given.values()):
            return 0, ("",)
        if missing := [name for name, value in given.items() if not value]:
            raise UserError(f"{missing[0]} is not set, but others of {', '.join(_VARIABLES)} are")
        try:
            index, count = int(given[_INDEX]), int(given[_COUNT])
        except ValueError:
            index, count = 0, 0
        if not 0 <= index < count:
            raise UserError(f"{_INDEX}={given[_INDEX]} is not one of {given[_COUNT]} from 0 on")
        return index, (given[_ADDRESS], *(f"process {i}" for i in range(1, count)))

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
            keras.utils.set_random_seed(0)  # else Keras has the processes agree on one; the run sets its own later
            lost = f"the processes of {_ADDRESS} do not find one another: {REASON}"
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
