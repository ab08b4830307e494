"""The processes that train together on TensorFlow, each on a host of its own, as TF_CONFIG names them."""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.errors import REASON, UserError, user_errors
from tfdml.training.distributed.processes import Processes
from tfdml.workarounds import bound_waiting, multi_worker_strategy

# How long the first of them waits for the last, and without a sign of life of another before it counts as lost.
_MEETING_SECONDS, _SILENCE_SECONDS = 600, 20
_JOBS = ("chief", "worker")
# What collective operations raise where a worker is lost.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'


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


def from_environment() -> tuple[int, tuple[str, ...]]:
    """Return this process's number and all workers' addresses, by TF_CONFIG; (0, ("",)) where it names no other.

    Raises:
        UserError: TF_CONFIG is no such description.

    Example:
        >>> from_environment()
        (0, ('',))
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return 0, ("",)
    with user_errors(
        (ValueError, KeyError, TypeError, AttributeError), f"TF_CONFIG does not say who trains ({REASON}): {_EXAMPLE}"
    ):
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
    return index + (len(cluster["chief"]) if job == "worker" and "chief" in jobs else 0), addresses


@functools.cache
def join(index: int, addresses: tuple[str, ...]) -> TensorFlowWorkers:
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
