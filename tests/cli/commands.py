"""The commands in this process."""

from __future__ import annotations

import contextlib
import io
import pathlib
import subprocess

from tfdml.cli import STAGES, command_line, load

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = tuple(STAGES)
__all__ = ["NAMES", "ROOT", "finished", "load", "run"]


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process: its exit status, and what it printed to either stream.

    An exception that leaves `run` is a traceback to a user, and is raised.
    """
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.run(load(name), arguments)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


def finished(name: str, *arguments: object) -> subprocess.CompletedProcess:
    """As `run`, in the form of a process that has ended."""
    words = [str(argument) for argument in arguments]
    return subprocess.CompletedProcess([name, *words], *run(name, *words))
