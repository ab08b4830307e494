"""Runs of `tfdml train` that are killed at moments named by what is on disk, each in its own process.

    python -m tests.training.kill_driver '[{"flags": [...], "kill": ["after", "flags.txt", 1]}, ...]'

Each is forked from one process that has TensorFlow loaded and the images drawn, but not begun to compute. Prints what
became of each: its exit status, or the number of the signal that ended it, negative.

A kill leaves a folder as it is. So a run may also go on, and leave copies of its folder as kills at many moments would
have: `"copies": [[["after", "flags.txt", 1], "copy"], ...]`.

A run that has begun is gone on with where it says `"go_on": true`.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import shutil
import signal
import sys

import tfdml.cli.command_line
import tfdml.export
import tfdml.report
import tfdml.training
from tfdml.cli import train
from tfdml.data.readers import glyphs


def _at(when: str, pattern: str, nth: int, act) -> None:
    """Call `act(truncated)` at the nth time that a file of this name is written; `truncated`: a path to cut in half."""
    seen = 0
    inner = os.replace

    def replace(source, target):
        nonlocal seen
        here = fnmatch.fnmatch(os.path.basename(target), pattern)
        seen += here
        mine = here and seen == nth
        if mine and when != "after":
            act(source if when == "half of" else None)
        inner(source, target)
        if mine and when == "after":
            act(None)

    os.replace = replace


def _halve(path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def _kill(truncated) -> None:
    if truncated:
        _halve(truncated)
    os.kill(os.getpid(), signal.SIGKILL)


def _copy(run_dir: str, to: str):
    def act(truncated):
        if os.path.isdir(run_dir):
            shutil.copytree(run_dir, to, symlinks=True)
        if truncated:
            _halve(os.path.join(to, os.path.relpath(truncated, run_dir)))

    return act


def _one(
    flags: list[str],
    kill: list | None = None,
    copies: list | None = None,
    go_on: bool = False,
) -> int:
    if go_on and os.path.exists(os.path.join(_value_of("run_dir", flags), "flags.txt")):
        flags = [f"--run_dir={_value_of('run_dir', flags)}", "--resume"]
    child = os.fork()
    if child == 0:
        if kill:
            _at(*kill, _kill)
        for moment, to in copies or []:
            _at(*moment, _copy(_value_of("run_dir", flags), to))
        try:
            tfdml.cli.command_line.run(train.COMMAND, flags)
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _value_of(name: str, flags: list[str]) -> str:
    return next(flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}="))


if __name__ == "__main__":
    glyphs.draw = functools.cache(glyphs.draw)
    for split in glyphs.split_characters():
        glyphs.read(split=split, images_per_class=4, size=32)  # those of TINY
    print("ENDED" + json.dumps([_one(**run) for run in json.loads(sys.argv[1])]))
