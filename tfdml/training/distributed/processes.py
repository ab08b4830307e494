"""The processes that train together: which of them this is, and what they exchange."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tfdml.errors import UserError

# Bytes that are sent at once.
_CHUNK = 2**26


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
