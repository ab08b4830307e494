"""Running a command: signals, errors as one line, the exit status, and progress on the error stream."""

import contextlib
import logging as python_logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from absl import flags, logging

from tfdml.cli.command_line import Command, Formatter, as_flags
from tfdml.errors import UserError, short_message
from tfdml.io.files import GO_ON, is_disk_full, unwritable

# Windows has no SIGHUP.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def run(command: Command, words: Sequence[str]) -> None:
    """Parse the flags, do the command's work, and exit.

    The status is 0; 2 for what the user can mend; 128 and the signal's number where a signal ended the process (130,
    143, 129 for SIGINT, SIGTERM, SIGHUP), once what it was writing is cleaned up.

    Args:
        command: The command.
        words: The command line without the command.
    """
    flags.FLAGS.mark_as_parsed()  # absl's own, which its logging waits for
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().setFormatter(Formatter(command))
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        python_logging.getLogger(library).setLevel(python_logging.ERROR)
    try:
        with signals_as_exceptions(command.name):
            if any(word in ("--help", "-h", "-help") for word in words):
                print(command.help())
            else:
                command.parse(words)
                command.work(command.flags)
            sys.stdout.flush()
    except flags.Error as error:
        _fail(command, f"{short_message(error, longest=1000)} (see --help)")
    except UserError as error:
        _fail(command, as_flags(str(error), command.flags, command.flag_of))
    except BrokenPipeError:
        _drop_output()  # its reader (`| head`) has had enough
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        reason = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        print(f"{command.name}: {reason}", file=sys.stderr)
        sys.exit(128 + number)
    except Exception as error:
        if is_disk_full(error):
            _fail(command, _full_disk(error))
        if not isinstance(error, OSError) or not error.filename:
            raise
        # A path that is too long, a folder that may not be read: no fault of ours, whoever opened it.
        _fail(command, f"{error.filename}: {error.strerror or error}")
    sys.exit(0)


def _full_disk(error: Exception) -> str:
    """Return the message where a library met a full disk, or our output goes to one."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return f"the output cannot be written: the disk is full; {GO_ON}"
    path = getattr(error, "filename", None)
    if isinstance(path, str):
        return str(unwritable(path, error))
    return f"the disk is full ({short_message(error)}); {GO_ON}"


def _drop_output() -> None:
    """Drop what could not be printed, which is not tried again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(command: Command, message: str) -> None:
    print(f"{command.name}: error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


class Stopped(KeyboardInterrupt):
    """A signal has asked the process to end.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def signals_as_exceptions(name: str) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` in the block, so that what it holds is cleaned up.

    A second signal ends the process at once, even where the main thread is deep in a library. A signal that the process
    was started to ignore, as by `nohup`, stays ignored. Outside the main thread nothing is changed.

    Args:
        name: The command's name, put before the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(target=_end_at_second, args=(receiver, name), daemon=True).start()
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _raise)
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sender.close()  # which ends the thread


def _raise(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _end_at_second(receiver: socket.socket, name: str) -> None:
    """Wait for two signals, of which Python sends the numbers the moment they come."""
    numbers: list[int] = []
    with receiver:
        while byte := receiver.recv(1):
            numbers += [byte[0]] if byte[0] in _SIGNALS else []
            if len(numbers) == 2:
                os.write(2, f"{name}: ended at once\n".encode())
                os._exit(128 + numbers[1])


class Progress:
    """One line of what is done and how fast, rewritten; now and then a new one where the error stream is no terminal.

    Args:
        total: How many images there are.
        done: How many were done before.
    """

    def __init__(self, total: int = 0, done: int = 0):
        self._live = sys.stderr.isatty()
        self._total, self._first = total, done
        self._last = self._started = time.monotonic()
        self._width = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=sys.stderr)

    def rate(self, done: int) -> str:
        """Return the images a second since the start, in words."""
        return f"{(done - self._first) / max(time.monotonic() - self._started, 1e-9):,.0f} images a second"

    def images(self, done: int, total: int | None = None, bad: int | None = None) -> None:
        """Show that so many images are done, of so many, with so many bad ones among them."""
        faults = "" if bad is None else f" {bad:,} bad,"
        self._show(f"{done:,} of {total or self._total:,} images,{faults} {self.rate(done)}")

    def bytes(self, what: str, done: int, total: int) -> None:
        """Show that so many bytes are done."""
        of = f" of {total / 2**20:,.0f}" if total else ""
        self._show(f"{what}: {done / 2**20:,.0f}{of} MB")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.5 if self._live else 20.0):
            return
        self._last = now
        if self._live:
            text, self._width = f"\r{text:<{self._width}}", len(text)
        print(text, end="" if self._live else "\n", file=sys.stderr, flush=True)
