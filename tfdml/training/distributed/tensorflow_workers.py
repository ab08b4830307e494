"""The processes that train together, each on a host of its own, as TF_CONFIG names them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from tfdml.errors import UserError, short_message
from tfdml.models.several_workers import multi_worker_strategy

# How long the first of them waits for the last, and without a sign of life of another before it counts as lost.
_MEETING_SECONDS, _SILENCE_SECONDS = 600, 20
# Bytes that are sent at once.
_CHUNK = 2**26
_JOBS = ("chief", "worker")
# What collective operations raise where a worker is lost.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'


class WorkerLost(UserError):
    """Another worker has ended, or cannot be reached: the run can go on with all of them started anew."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who trains together, and which of them this process is; by default it is alone.

    Worker 0, the chief, alone writes. What one worker asks of the others, all have to ask at the same point.

    Args:
        index: Which one this process is.
        addresses: `host:port` of all of them.
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` that joins them; None where it is alone.

    Example:
        >>> workers = Workers()
        >>> workers.is_chief, workers.count, workers.of_chief(lambda: "what the chief found")
        (True, 1, 'what the chief found')
    """

    index: int = 0
    addresses: tuple[str, ...] = ("",)
    strategy: Any = None

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
        """Which of so many rows this worker works on: with those of the others, in order, all of them.

        Args:
            total: How many there are; where they are fewer than the workers, each works on all.
        """
        if total < self.count:
            return slice(0, total)
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The rows of all workers, in their order.

        Args:
            rows: (n, ...) float32 or int64; n may differ from worker to worker.
        """
        if self.alone:
            return rows
        local = len(self.strategy.extended.worker_devices)

        def rows_of(replica: Any) -> tf.Tensor:
            # What a worker has is given by the first of its replicas.
            return tf.constant(rows if replica.replica_id_in_sync_group % local == 0 else rows[:0])

        values = self.strategy.experimental_distribute_values_from_function(rows_of)
        return self.strategy.gather(values, axis=0).numpy()

    def bytes_of_chief(self, read: Callable[[], bytes]) -> bytes:
        """What `read` returns on the chief, on every worker; it is called there alone."""
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
        """What `compute` returns on the chief, which alone calls it.

        Args:
            compute: Returns what JSON can hold.

        Raises:
            UserError: It was raised on the chief; it is raised on every worker.
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

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """A block in which the loss of another worker is one clear line.

        Raises:
            WorkerLost: Another worker has ended, or cannot be reached.
        """
        try:
            yield
        except tf.errors.OpError as error:
            if self.alone or not isinstance(error, LOST):
                raise
            raise WorkerLost(
                f"{self._lost(str(error))} has ended or cannot be reached: see what it has written; this is worker "
                f"{self.index} of {self.count}. Start all of them again, with --resume"
            ) from error

    def _lost(self, message: str) -> str:
        """The workers that an error of a collective operation names."""
        named = message.partition("unhealthy")[2] or message
        tasks = re.findall(r"/job:(chief|worker)/(?:replica:\d+/)?task:(\d+)", named)
        chiefs = any(job == "chief" for job, _ in tasks)
        found = {int(task) + (job == "worker" and chiefs) for job, task in tasks} - {self.index}
        found = {index for index in found if index < self.count}
        if not found:
            return "another worker" if self.is_chief or self.count > 2 else f"worker 0 ({self.addresses[0]})"
        return " and ".join(f"worker {index} ({self.addresses[index]})" for index in sorted(found))


def from_environment() -> tuple[int, tuple[str, ...]]:
    """The number of this process and the addresses of all workers, by TF_CONFIG; (0, ("",)) where it names no other.

    Raises:
        UserError: TF_CONFIG is no such description.

    Example:
        >>> from_environment()
        (0, ('',))
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return 0, ("",)
    try:
        config = json.loads(text)
        cluster = config.get("cluster", {})
        jobs = [job for job in _JOBS if cluster.get(job)]
        addresses = tuple(str(address) for job in jobs for address in cluster[job])
        if len(addresses) < 2:
            return 0, ("",)
        if others := set(cluster) - set(_JOBS):
            raise UserError(f"TF_CONFIG names jobs that do not train here ({', '.join(sorted(others))}): {_EXAMPLE}")
        job, index = config["task"]["type"], int(config["task"]["index"])
        if not 0 <= index < len(cluster[job]):
            raise UserError(f"TF_CONFIG: there is no {job} {index} among {len(cluster[job])}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"TF_CONFIG does not say who trains ({short_message(error, named=True)}): {_EXAMPLE}"
        ) from error
    return index + (len(cluster["chief"]) if job == "worker" and "chief" in jobs else 0), addresses


def join() -> Workers:
    """Meet the other workers that TF_CONFIG names; to be called before TensorFlow does anything else.

    Raises:
        UserError: TF_CONFIG is wrong, the address of this worker cannot be used, or the others do not come.
    """
    index, addresses = from_environment()
    return _join(index, addresses) if len(addresses) > 1 else Workers()


@functools.cache
def _join(index: int, addresses: tuple[str, ...]) -> Workers:
    here = f"worker {index} of {len(addresses)} ({addresses[index]})"
    logging.info("%s: waiting for the others (%s)", here, ", ".join(addresses[:index] + addresses[index + 1 :]))
    try:
        _bound_waiting()
        strategy = multi_worker_strategy()
    except RuntimeError as error:
        raise UserError(f"{here}: TensorFlow runs already; start a new process") from error
    except tf.errors.OpError as error:
        if isinstance(error, LOST):
            raise UserError(f"{here}: not all of the others came: {short_message(error, 'first')}") from error
        raise UserError(
            f"{here} cannot listen at its address; free the port or change TF_CONFIG: {short_message(error, 'first')}"
        ) from error
    logging.info("%s: all are there", here)
    return Workers(index, addresses, strategy)


def _bound_waiting() -> None:
    """Bound how long the strategy waits for the other workers, which is an hour otherwise."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(cluster),
        cluster_register_timeout_in_ms=1000 * _MEETING_SECONDS,
        heartbeat_timeout_in_ms=1000 * _SILENCE_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=cluster.num_tasks(job))
            for job in _JOBS
            if job in cluster.jobs
        ],
    )
