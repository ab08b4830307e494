"""Runs of `bin/train` that kill themselves at a moment named by what is on disk, each in a process of its own.

    python -m tests.training.kill_driver '[{"flags": [...], "moment": ["after", "flags.txt", 1]}, ...]'

Each is forked from one process that has TensorFlow loaded, but not begun to use it. Prints what became of each: its
exit status, or the number of the signal that ended it, negative.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import sys

from tfdml.cli import train

_replace = os.replace


def _kill_at(when: str, pattern: str, nth: int) -> None:
    """Kill this process at the nth time that a file of this name is written."""
    seen = 0

    def replace(source, target):
        nonlocal seen
        here = fnmatch.fnmatch(os.path.basename(target), pattern)
        seen += here
        if here and seen == nth and when != "after":
            if when == "half of":
                os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        _replace(source, target)
        if here and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace


def _one(flags: list[str], moment: list | None) -> int:
    child = os.fork()
    if child == 0:
        if moment:
            _kill_at(*moment)
        sys.argv = ["train", *flags]
        try:
            train.main()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    print("ENDED" + json.dumps([_one(**run) for run in json.loads(sys.argv[1])]))
