"""Runs of `tfdml train` that are killed at moments named by what is on disk, each in its own
process.

    python -m tests.training.kill_driver '[{"flags": [...], "kill": [...]}, ...]'

Each is forked from one process that has TensorFlow loaded and the images drawn, but not begun to
compute, and trains eagerly. Prints what became of each: its exit status, or the number of the
signal that ended it, negative. A run that has begun is resumed.
"""

import fnmatch
import functools
import json
import os
import signal
import sys

import pytest

import tfdml.cli.command_line
import tfdml.export
import tfdml.report
import tfdml.training
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


def _one(flags: list[str], kill: list | None = None) -> int:
    run_dir = next(flag.partition("=")[2] for flag in flags if flag.startswith("--run_dir="))
    if os.path.exists(os.path.join(run_dir, "flags.txt")):
        flags = [f"--run_dir={run_dir}", "--resume"]
    child = os.fork()
    if child == 0:
        if kill:
            _kill_at(*kill)
        try:
            tfdml.cli.command_line.run(train.COMMAND, flags)
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    run_eagerly(pytest.MonkeyPatch())
    glyphs.draw = functools.cache(glyphs.draw)
    for split in glyphs.split_characters():
        glyphs.read(split=split, images_per_class=4, size=32)  # those of TINY
    print("ENDED" + json.dumps([_one(**run) for run in json.loads(sys.argv[1])]))
