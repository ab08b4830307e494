"""How a command ends that is told to: by Ctrl-C, a job scheduler, a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# Windows has no SIGHUP.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal has told the process to end.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def raised_as_exceptions(name: str) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` in the block, so that what it holds is cleaned up.

    A second signal ends the process at once, even where the main thread is deep in a library. A signal that the process
    was started to ignore, as by `nohup`, stays ignored. Outside the main thread nothing is changed.

    Args:
        name: The command's name, put before what is said.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    read_end, write_end = os.pipe()
    if hasattr(os, "set_blocking"):  # Windows has it since Python 3.12
        os.set_blocking(write_end, False)
    threading.Thread(target=_end_at_second, args=(read_end, name), daemon=True).start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _raise)
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(write_end)  # which ends the thread


def _raise(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _end_at_second(read_end: int, name: str) -> None:
    """Wait for two signals, of which Python writes the numbers into a pipe the moment they come."""
    numbers: list[int] = []
    while byte := os.read(read_end, 1):
        numbers += [byte[0]] if byte[0] in _SIGNALS else []
        if len(numbers) == 2:
            os.write(2, f"{name}: ended at once\n".encode())
            os._exit(128 + numbers[1])
    os.close(read_end)
