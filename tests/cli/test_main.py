"""What a command leaves and says when it is told to end, and when its own output cannot be written."""

import collections
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from tfdml.cli import main
from tfdml.cli.command_line import Command, Flags
from tfdml.io import files


def ended(command, tmp_path, begun=None, output=os.devnull, ignored=()):
    """(status, error output) of a command run as a process forked from this one.

    `begun` is called with the number of the process once the command has made `begun` in the folder.
    """
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.chdir(tmp_path)
            for number, target in ((1, output), (2, "errors.txt")):
                os.dup2(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            main.run(Command("try", lambda _: command(), Flags(), ""), [])
        except SystemExit as end:
            status = end.code
        finally:
            sys.stderr.flush()
            os._exit(status)
    if begun:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        begun(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, (tmp_path / "errors.txt").read_text()


def writing():
    """A command in the midst of writing a file."""
    with files.atomic_write("result.json") as temporary:
        open(temporary, "w").close()
        open("begun", "w").close()
        time.sleep(60)


def deep_in_a_library():
    """A command whose main thread does not come back to Python once `begun` is there.

    Both are called from C, one after the other: between two lines of Python the first signal would already be raised.
    """
    hashing = map(hashlib.pbkdf2_hmac, ["sha256"], [b""], [b""], [10**9])
    collections.deque(itertools.chain(map(os.mkdir, ["begun"]), hashing), maxlen=0)


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGTERM, 143, "try: ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "try: ended by SIGHUP\n"),
        (signal.SIGINT, 130, "try: interrupted\n"),
    ],
)
def test_a_signal_ends_a_command_in_one_line_and_leaves_no_half_file(number, status, says, tmp_path):
    assert ended(writing, tmp_path, lambda pid: os.kill(pid, number)) == (status, says)
    assert sorted(os.listdir(tmp_path)) == ["begun", "errors.txt"]


def test_a_second_signal_ends_it_at_once_wherever_it_is(tmp_path):
    def twice(pid):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGTERM)

    assert ended(deep_in_a_library, tmp_path, twice) == (143, "try: ended at once\n")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    def both(pid):
        os.kill(pid, signal.SIGHUP)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)

    assert ended(writing, tmp_path, both, ignored=[signal.SIGHUP]) == (143, "try: ended by SIGTERM\n")


def test_the_handlers_are_gone_after_the_command():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(main.Stopped), main.signals_as_exceptions("try"):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_output_to_a_full_disk_is_told_in_one_line(tmp_path):
    status, error = ended(lambda: print("metrics"), tmp_path, output="/dev/full")
    assert status == 2
    assert error == (
        "try: error: the output cannot be written: the disk is full; what was finished is kept: free some space and "
        "run the same command again\n"
    )


def test_a_full_disk_that_only_a_library_knows_of_is_told_in_one_line(tmp_path):
    def command():
        raise RuntimeError("write failed\n(No space left on device)")

    status, error = ended(command, tmp_path)
    assert status == 2
    assert error.startswith("try: error: the disk is full (write failed (No space left on device)); what was finished")
    assert error.count("\n") == 1


def test_a_command_whose_launch_is_interrupted_leaves_no_traceback(tmp_path):
    program = """
import builtins, os, signal
from tfdml_command import main
def interrupted(name, *rest):
    if name == "tensorflow":
        os.kill(os.getpid(), signal.SIGINT)
    return before(name, *rest)
before, builtins.__import__ = builtins.__import__, interrupted
main(["export"])
"""
    # Python's own handler is only there where SIGINT is not ignored.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
