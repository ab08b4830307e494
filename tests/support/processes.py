"""Programs of Python, each in a process of its own, and forks of this one."""

import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import sys

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_python(*words, environment=(), cwd=ROOT, timeout=1800, status=0):
    """Run Python with these words, and variables next to those of this process; returns it,
    finished with this status."""
    command = [sys.executable, *map(str, words)]
    options = {"capture_output": True, "text": True, "check": False}
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **dict(environment)}
    done = subprocess.run(command, cwd=cwd, env=variables, timeout=timeout, **options)
    assert done.returncode == status, done.stdout[-1000:] + done.stderr[-3000:]
    return done


def descendants(word):
    """Ids of the processes below this one whose command line contains a word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if word in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def fork(function, *args):
    """A child that calls the function, started; what it has imported is this process's."""
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    return child


def wait(children):
    """Exit status of each child; of one that a signal ended, its number, negative."""
    for child in children:
        child.join()
    return [child.exitcode for child in children]
