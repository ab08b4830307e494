"""Programs of Python, each in a process of its own, and the workers of one training."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import traceback

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


def tf_configs(count):
    """TF_CONFIG of each of several workers; None where there is but one process."""
    if count == 1:
        return [None]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    tasks = [{"type": "worker", "index": index} for index in range(count)]
    return [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]


def descendants(word):
    """Ids of the processes below this one whose command line contains a word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if word in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def fork(function, *args, config=None):
    """The process id of a child that calls the function under this TF_CONFIG, and exits with what
    it returns. `sys.exit` would take apart all that tests have built, for seconds."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        if config is not None:
            os.environ["TF_CONFIG"] = config
        status = function(*args) or 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(children):
    """Exit status of each child; of one that a signal ended, its number, negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
