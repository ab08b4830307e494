"""How far a command has come, on the error stream."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line, rewritten; now and then a new one where the error stream is no terminal.

    Args:
        total: How many images there are.
        done: How many were done before.
    """

    def __init__(self, total: int, done: int = 0):
        self._total, self._first = total, done
        self._live = sys.stderr.isatty()
        self._every = 0.5 if self._live else 20.0
        self._last = self._started = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=sys.stderr)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def images(self, done: int) -> None:
        """So many images are done."""
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        rate = (done - self._first) / max(self.seconds, 1e-9)
        text = f"{done:,} of {self._total:,} images, {rate:,.0f} a second"
        if self._live:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)
