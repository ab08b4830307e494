"""The process that runs an exported file ends with the one that waits for it."""

import fcntl
import os
import signal
import sys
import time

from tfdml.export import exporter

HANGING = """
import fcntl, os, sys, time
sys.path.insert(0, sys.argv[1])
import fresh_process

def hang(path):
    held = open(path, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    open(path + " begun", "w").close()
    time.sleep(60)

fresh_process.saved_model = hang
fresh_process.main("saved_model", sys.argv[2], "in.npz", "out.npy")
"""


def is_held(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_killed_export_leaves_no_process_behind(tmp_path):
    path = str(tmp_path / "held")
    exporting = os.fork()
    if exporting == 0:
        exporter._run_until_closed([sys.executable, "-c", HANGING, str(exporter._RUNNER.parent), path])
        os._exit(0)
    while not os.path.exists(path + " begun"):
        time.sleep(0.02)
    assert is_held(path)
    os.kill(exporting, signal.SIGKILL)
    os.waitpid(exporting, 0)
    until = time.monotonic() + 30
    while is_held(path) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_held(path)
