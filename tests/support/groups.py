"""Runs the tests by folder, three at a time: each is a fork of a process that has imported what
most of them import, and shows what it printed when it ends.

    python -m tests.support.groups "not slow" [GROUP ...]

A group is a folder, or several that run in one process: `"layers mining"`. `.` are the files that
lie in no folder.
"""

import atexit
import contextlib
import functools
import gc
import os
import sys
import tempfile
from multiprocessing.connection import wait

import hypothesis  # noqa: F401
import keras  # noqa: F401
import pytest
import sklearn.metrics  # noqa: F401
import tensorflow  # noqa: F401

from tests.support.processes import ROOT, fork
from tfdml import data, evaluation, export, report, training  # noqa: F401
from tfdml.data.readers import glyphs

TESTS = ROOT / "tests"
# On two cores: a third fills the time in which tests wait, for Ray, servers and other processes.
LANES = 3
# The longest first.
LONGEST = ("docs", "training", "models", ".", "objectives", "losses", "cli", "data", "cluster")
LONGEST += ("export",)
GROUPS = {**dict.fromkeys(LONGEST), **dict.fromkeys(p.parent.name for p in TESTS.glob("*/test_*"))}
# What TensorFlow and Keras do once in a process takes seconds: quick tests share it.
SHARED = ("docs .", "losses layers mining", "evaluation retrieval report web")
SHARED += ("embeddings io tools cluster backbones parity",)
# pytest rewrites the whole package of a plugin that it discovers: two seconds for Hypothesis, in
# every process.
_PLUGINS = ("--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin")


def prepare():
    """Draw the glyphs of a tiny run; the collector need not go through what all groups share."""
    glyphs.draw = functools.cache(glyphs.draw)
    for character in glyphs.CHARACTERS:
        for instance in range(4):
            glyphs.draw(character, instance, size=32, seed=0)
    gc.collect()
    gc.freeze()


def run(group, marks, log):
    """Run a group in this fork, and exit with its status."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    paths = []
    for folder in group.split():
        paths += sorted(TESTS.glob("test_*.py")) if folder == "." else [TESTS / folder]
    sys.argv = ["pytest", "-m", marks, *_PLUGINS, *map(str, paths)]
    status = pytest.main(sys.argv[1:])
    atexit._run_exitfuncs()
    # With that of its children.
    print(f"{sum(os.times()[:4]):.0f} s of processor time", flush=True)
    sys.exit(status)


def groups_of(marks):
    """Return the groups that have all tests with these marks."""
    if marks != "not slow":
        return [*GROUPS]
    shared = {folder: group for group in SHARED for folder in group.split()}
    return [*dict.fromkeys(shared.get(folder, folder) for folder in GROUPS)]


def main(marks, groups):
    """Run groups; returns whether one failed."""
    waiting, running, failed = list(groups), {}, False
    with contextlib.ExitStack() as logs:
        while waiting or running:
            if waiting and len(running) < LANES:
                group = waiting.pop(0)
                log = logs.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                process = fork(run, group, marks, log)
                running[process.sentinel] = process, group, log
                continue
            for sentinel in wait(running):
                process, group, log = running.pop(sentinel)
                process.join()
                log.seek(0)
                print(log.read(), f"\ntests/{group}: exit status {process.exitcode}", flush=True)
                failed |= process.exitcode not in (0, 5)  # 5: there are no such tests
    return failed


if __name__ == "__main__":
    os.chdir(ROOT)
    prepare()
    sys.exit(main(sys.argv[1], sys.argv[2:] or groups_of(sys.argv[1])))
