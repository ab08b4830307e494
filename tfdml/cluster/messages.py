"""What the processes of a cluster tell whoever has started them."""

from __future__ import annotations

import contextlib
import logging as python_logging
import threading
from collections.abc import Iterator
from typing import Any

from absl import logging

_POLL_SECONDS = 0.5


class Outbox:
    """What the workers tell whoever has started the run; an actor."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told: dict[str, Any] = {}

    def write(self, line: str) -> None:
        """Add a line of the log."""
        self._lines.append(line)

    def lines(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def tell(self, name: str, value: Any) -> None:
        """Leave the `"result"`, or an `"error"` that another start would meet again."""
        self._told.setdefault(name, value)

    def read(self, name: str) -> Any:
        """What was told; None where nothing was."""
        return self._told.get(name)


@contextlib.contextmanager
def shown(ray: Any, outbox: Any) -> Iterator[None]:
    """Log what the workers write, as long as the block lasts, in the place of what Ray has to say of those it lost."""
    ended = threading.Event()

    def show() -> None:
        for line in ray.get(outbox.lines.remote()):
            logging.info("%s", line)

    def poll() -> None:
        while not ended.wait(_POLL_SECONDS):
            show()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        with _rays_own_hushed():
            yield
    finally:
        ended.set()
        thread.join()
        show()


@contextlib.contextmanager
def _rays_own_hushed() -> Iterator[None]:
    from ray._private import worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


class ToOutbox(python_logging.Handler):
    """Sends what a process logs.

    Args:
        outbox: The actor.
        prefix: Put before every line.
    """

    def __init__(self, outbox: Any, prefix: str = ""):
        super().__init__()
        self.outbox, self.prefix = outbox, prefix

    def emit(self, record: python_logging.LogRecord) -> None:
        """Send a line."""
        self.outbox.write.remote(self.prefix + record.getMessage())

    @classmethod
    def install(cls, outbox: Any, prefix: str = "") -> None:
        """Send what this process logs from now on."""
        logging.set_verbosity(logging.INFO)
        python_logging.getLogger("absl").addHandler(cls(outbox, prefix))
