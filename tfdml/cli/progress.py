"""How far a command has come, on the error stream."""

from __future__ import annotations

import sys
import time


class StatusLine:
    """One line, rewritten; now and then a new one where the error stream is no terminal.

    Args:
        every: Seconds between two states of the line on a terminal.
    """

    def __init__(self, every: float):
        self._live = sys.stderr.isatty()
        self._every = every if self._live else 20.0
        self._last = self._started = time.monotonic()
        self._width = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=sys.stderr)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def due(self) -> bool:
        """Whether it is time to show another state."""
        now = time.monotonic()
        if now - self._last < self._every:
            return False
        self._last = now
        return True

    def show(self, text: str) -> None:
        """Show a state."""
        if self._live:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)


class Progress(StatusLine):
    """Images done, and how fast.

    Args:
        total: How many images there are.
        done: How many were done before.
    """

    def __init__(self, total: int, done: int = 0):
        super().__init__(every=0.5)
        self._total, self._first = total, done

    def images_of(self, done: int, total: int) -> None:
        """So many images are done, of so many."""
        self._total = total
        self.images(done)

    def images(self, done: int) -> None:
        """So many images are done."""
        if self.due():
            rate = (done - self._first) / max(self.seconds, 1e-9)
            self.show(f"{done:,} of {self._total:,} images, {rate:,.0f} a second")
