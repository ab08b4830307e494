"""Runs of `tfdml train` that are killed at moments named by what is on disk, each in its own
process.

    python -m tests.training.kill_driver '[{"flags": [...], "kill": [...]}, ...]'

Each is forked from one process that has its backend loaded and the images drawn, but not begun to
compute; on TensorFlow it trains eagerly. Prints what became of each: its exit status, or the number
of the signal that ended it, negative. A run that has begun is resumed. One with `environments` is
trained by several processes at once, each with variables of its own.
"""

import atexit
import fnmatch
import functools
import json
import os
import signal
import sys
from multiprocessing.process import BaseProcess

import keras
import pytest

import tfdml.cli.command_line
import tfdml.export
import tfdml.report
import tfdml.training
from tests.support import processes
from tests.training.stopping import run_eagerly
from tfdml.cli import train
from tfdml.data.readers import glyphs


def _kill_at(when: str, pattern: str, nth: int) -> None:
    """End this process at the nth time that a file of this name is written: half of it, or after
    it."""
    seen = 0
    inner = os.replace

    def replace(source, target):
        nonlocal seen
        here = fnmatch.fnmatch(os.path.basename(target), pattern)
        seen += here
        mine = here and seen == nth
        if mine and when == "half of":
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        inner(source, target)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace


def _fork(flags: list[str], kill: list | None, environment: dict[str, str]) -> BaseProcess:
    """Return the process that trains this run, or resumes it."""
    run_dir = next(flag.partition("=")[2] for flag in flags if flag.startswith("--run_dir="))
    if os.path.exists(os.path.join(run_dir, "flags.txt")):
        flags = [f"--run_dir={run_dir}", "--resume"]

    def train_run() -> None:
        os.environ.update(environment)
        if kill:
            _kill_at(*kill)
        try:
            tfdml.cli.command_line.run(train.COMMAND, flags)
        finally:
            atexit._run_exitfuncs()  # processes that train together leave together

    return processes.fork(train_run)


def _statuses(flags: list[str], kill: list | None = None, environments=({},)) -> list[int]:
    """Return how each process of a run ended."""
    return processes.wait([_fork(flags, kill, environment) for environment in environments])


def drive(runs: list[dict], **environment: str) -> tuple[list[int], str]:
    """Return how each process of these runs ended, and what they wrote to their second stream."""
    words = ("-m", "tests.training.kill_driver", json.dumps(runs))
    done = processes.run_python(*words, environment=environment)
    return json.loads(done.stdout.partition("ENDED")[2]), done.stderr


if __name__ == "__main__":
    if keras.backend.backend() == "tensorflow":
        run_eagerly(pytest.MonkeyPatch())
    glyphs.draw = functools.cache(glyphs.draw)
    for split in glyphs.split_characters():
        glyphs.read(split=split, images_per_class=4, size=32)  # those of TINY
    ended = [status for run in json.loads(sys.argv[1]) for status in _statuses(**run)]
    print("ENDED" + json.dumps(ended))
