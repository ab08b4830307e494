"""Workers of one training, forked from a process that has loaded TensorFlow but not used it. Ports
and processes."""

import contextlib
import json
import os
import socket
import sys
import traceback

import psutil


def free_ports(count):
    """Ports of this machine that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def tf_configs(count):
    """TF_CONFIG of each of several workers; None where there is but one process."""
    if count == 1:
        return [None]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    return [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})
        for i in range(count)
    ]


def descendants(word, of=None):
    """Ids of the processes below one, this one by default, whose command line contains a word."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if word in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def fork(function, *args, config=None):
    """The process id of a child that calls the function under this TF_CONFIG, and exits with what
    it returns."""
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
