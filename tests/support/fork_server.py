"""Runs commands, each in a process of its own as a user does, as a fork of one that has imported
TensorFlow and not used it."""

import atexit
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The connection to the one server of this process.
_SERVERS: list = []


def start(context):
    """Start the server: `"fork"` from a process that has imported all and not begun to compute,
    `"spawn"` from any other."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(context).Process
    process(target=_serve_checkout, args=(theirs, ours), daemon=True).start()
    _SERVERS.append(ours)


def start_in(python, modules):
    """Start a server in another environment, which sees nothing of the checkout; returns the
    connection to it."""
    ours, theirs = multiprocessing.Pipe()
    command = [python, "-I", __file__, str(theirs.fileno()), *modules]
    subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def run(name, *flags, cwd=ROOT, timeout=300, server=None):
    """Run `bin/<name>`, or the program at a path, with flags, by a server of another environment
    where one is given.

    Returns:
        The finished process, killed by SIGALRM where it took too long.
    """
    if server is None and not _SERVERS:
        start("spawn")
    server = server or _SERVERS[0]
    command = [str(ROOT / "bin" / name), *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, name) for name in ("out", "err")]
        server.send((command, cwd, paths, timeout))
        status = server.recv()
        out, err = (path.read_text() for path in paths)
    return subprocess.CompletedProcess(command, status, out, err)


def _serve_checkout(connection, other_end):
    other_end.close()
    _serve(connection, ["tests.support.imported"])


def _serve(connection, modules):
    """Run each command in a fork, until the process that asks has ended."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            connection.close()
            _become(*request)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _become(command, cwd, paths, timeout):
    """Turn this fork into the command; does not return."""
    os.chdir(cwd)
    for descriptor, path in enumerate((os.devnull, *paths)):
        os.dup2(os.open(path, os.O_CREAT | os.O_RDWR), descriptor)
    signal.alarm(timeout)
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
    sys.exit()


if __name__ == "__main__":
    _serve(multiprocessing.connection.Connection(int(sys.argv[1])), sys.argv[2:])
