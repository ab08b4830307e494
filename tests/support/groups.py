"""Runs the tests by folder, each in a process of its own, two or three at a time and the longest
first.

    python -m tests.support.groups "not slow" [GROUP ...]

What most tests import is imported once, and each folder is a fork, which shows what it prints when
it ends.
"""

import atexit
import contextlib
import gc
import os
import sys
import tempfile

import hypothesis  # noqa: F401 imported once, for all forks
import pytest

from tests.support.fork_server import ROOT, ForkedServer, fork_server, hear_signals, import_all

# The folders that are processes of their own, the longest of either suite first: a folder without
# those in it that are named as well.
GROUPS = (
    *("objectives", "", "docs", "training", "models", "export", "losses", "data", "retrieval"),
    *("cli", "layers", "backbones", "report", "embeddings"),
    *("data/readers", "evaluation", "mining", "tools"),
    "web",
    "cluster",
)
# Whose processes mostly wait for one another: it takes half of a place, and is a third process.
WAITING = ("cluster",)
_PLACES = 5
# pytest rewrites the whole package of a plugin that it discovers: two seconds for Hypothesis, in
# every process.
_PLUGINS = ("--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin")


def places(group):
    """Return how many of the places a group takes."""
    return 1 if group in WAITING else 2


def arguments(group):
    """Return the arguments of pytest for a group."""
    inside = f"tests/{group}".rstrip("/")
    others = (f"tests/{other}".rstrip("/") for other in GROUPS if other != group)
    return [
        inside,
        *(f"--ignore={other}" for other in others if other.startswith(f"{inside}/")),
        *_PLUGINS,
    ]


def start(group, marks, log):
    """Fork a process that runs a group; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    hear_signals()
    fork_server(ForkedServer)
    sys.argv = ["pytest", "-m", marks, *arguments(group)]
    status = pytest.main(sys.argv[1:])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # sys.exit would take apart all that the tests have built, which takes seconds


def main(marks, groups):
    """Run groups; returns whether one failed."""
    import_all()
    gc.collect()
    gc.freeze()
    left, running, failed = list(groups), {}, False
    with contextlib.ExitStack() as logs:
        while left or running:
            free = _PLACES - sum(places(group) for group, _ in running.values())
            following = next((group for group in left if places(group) <= free), None)
            if following is not None:
                left.remove(following)
                log = logs.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                running[start(following, marks, log)] = following, log
                continue
            pid, status = os.wait()
            _, log = running.pop(pid)
            log.seek(0)
            print(log.read(), flush=True)
            failed |= os.waitstatus_to_exitcode(status) not in (0, 5)  # 5: there are no such tests
    return failed


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1], sys.argv[2:] or GROUPS))
