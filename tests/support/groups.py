"""Runs the tests by folder, three at a time: each is a fork of a process that has imported what
most of them import, and shows what it printed when it ends.

    python -m tests.support.groups "not slow" [GROUP ...]
"""

import atexit
import contextlib
import gc
import os
import sys
import tempfile

import pytest

from tests.support import fork_server, imported  # noqa: F401
from tests.support.processes import fork

TESTS = fork_server.ROOT / "tests"
# On two cores: a third fills the time in which tests wait, for Ray, servers and other processes.
LANES = 3
# The longest first; "" are the files that lie in no folder.
LONGEST = ("training", "docs", "models", "", "objectives", "losses", "cli", "data", "cluster")
LONGEST += ("export",)
GROUPS = {**dict.fromkeys(LONGEST), **dict.fromkeys(p.parent.name for p in TESTS.glob("*/test_*"))}
# pytest rewrites the whole package of a plugin that it discovers: two seconds for Hypothesis, in
# every process.
_PLUGINS = ("--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin")


def run(group, marks, log):
    """Run a group in this fork; returns its exit status."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    fork_server.start("fork")
    paths = [TESTS / group] if group else sorted(TESTS.glob("test_*.py"))
    sys.argv = ["pytest", "-m", marks, *_PLUGINS, *map(str, paths)]
    status = pytest.main(sys.argv[1:])
    atexit._run_exitfuncs()
    return status


def main(marks, groups):
    """Run groups; returns whether one failed."""
    gc.collect()
    gc.freeze()
    waiting, running, failed = list(groups), {}, False
    with contextlib.ExitStack() as logs:
        while waiting or running:
            if waiting and len(running) < LANES:
                log = logs.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                group = waiting.pop(0)
                running[fork(run, group, marks, log)] = group, log
                continue
            pid, status, usage = os.wait3(0)
            group, log = running.pop(pid)
            status = os.waitstatus_to_exitcode(status)
            seconds = usage.ru_utime + usage.ru_stime  # with those of its children
            log.seek(0)
            end = f"\ntests/{group}: exit status {status}, {seconds:.0f} s of processor time"
            print(log.read(), end, flush=True)
            failed |= status not in (0, 5)  # 5: there are no such tests
    return failed


if __name__ == "__main__":
    os.chdir(fork_server.ROOT)
    sys.exit(main(sys.argv[1], sys.argv[2:] or GROUPS))
