"""Signals that ask a process to end.

A run stops at the end of an execution, of one step or several, with a checkpoint; a second signal
ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdml.training.workers import Processes

# Windows has no SIGHUP.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(KeyboardInterrupt):
    """A signal has asked the process, or the run in it, to end.

    Args:
        number: The signal.
        left: Of a run, what of it is on disk and how to continue it, in words.

    Example:
        >>> str(Interrupted(signal.SIGTERM, "nothing was written"))
        'stopped by SIGTERM: nothing was written'
    """

    def __init__(self, number: int, left: str = ""):
        super().__init__(number)
        self.number, self.left = number, left

    @property
    def status(self) -> int:
        """What the process should exit with: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}" + (
            f": {self.left}" if self.left else ""
        )


class Interruption:
    """Turns the first signal into `Interrupted`, and lets the second end the process at once.

    `Interrupted` is raised where the signal finds the program, and within `deferred()` at the next
    `check()`. Signals that the process ignores (under nohup, say) stay ignored. Outside the main
    thread, where Python allows no handlers, nothing is handled.

    Example:
        >>> with Interruption() as interruption, interruption.deferred():
        ...     for step in range(3):
        ...         interruption.check()
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None: a handler that Python did not set, and could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)

    def agree(self, processes: Processes) -> None:
        """Take a signal that any of the processes has received as received here; each has to call
        this.

        Args:
            processes: Who trains.
        """
        if not processes.alone:
            import numpy as np  # here, as commands handle signals before they load anything

            received = np.array([self.received or 0], np.int64)
            self.received = int(processes.gather(received).max()) or None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Enter a block in which a signal waits for `check()`."""
        self.check()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise Interrupted(number)
