"""Signals that ask a run to stop: it stops at the end of a step, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from tfdml.training.distributed import Processes

# Windows has no SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal has asked the process to end.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupted(Stopped):
    """A run was asked to stop, and did.

    Args:
        number: The signal.
        left: What of the run is on disk and how to continue it, in words.

    Example:
        >>> str(Interrupted(signal.SIGTERM, "nothing was written"))
        'stopped by SIGTERM: nothing was written'
    """

    def __init__(self, number: int, left: str = ""):
        super().__init__(number)
        self.left = left

    @property
    def status(self) -> int:
        """What the process should exit with: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}" + (f": {self.left}" if self.left else "")


class Interruption:
    """Turns the first signal into `Interrupted`, and lets the second end the process at once.

    `Interrupted` is raised where the signal finds the program, and within `deferred()` at the next `check()`. Signals
    that the process ignores (under nohup, say) stay ignored. Outside the main thread, where Python allows no handlers,
    nothing is handled.

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
        self._previous.clear()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)

    def agree(self, processes: Processes) -> None:
        """Take a signal that any of the processes has received as received here; each has to call this.

        Args:
            processes: Who trains.
        """
        if not processes.alone:
            self.received = int(processes.gather(np.array([self.received or 0], np.int64)).max()) or None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Enter a block in which a signal waits for `check()`, or for the end of the block."""
        with self._deferring(True):
            yield
        self.check()

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Enter a block within a deferred one in which a signal does not wait."""
        with self._deferring(False):
            self.check()
            yield

    @contextlib.contextmanager
    def _deferring(self, value: bool) -> Iterator[None]:
        before, self._deferred = self._deferred, value
        try:
            yield
        finally:
            self._deferred = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise Interrupted(number)
