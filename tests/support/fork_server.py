"""Runs commands and scripts, each in a process of its own as a user does, without importing
TensorFlow for each.

    python -m tests.support.fork_server

imports once what every command imports, draws the glyphs of a tiny run, forks for each request (a
line of JSON on its standard input), and answers with a line that holds the exit status. What a fork
must not inherit, TensorFlow's threads and devices, nobody has started.
"""

import atexit
import functools
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
_IMPORTED = ("tensorflow", "keras", "faiss", "PIL.Image", "sklearn.metrics", "scipy.stats")
_IMPORTED += tuple(
    f"tfdml.{part}" for part in ("data", "evaluation", "export", "report", "training")
)
# The function that draws a glyph, with those that it has drawn.
_DRAW: list = []


class ForkServer:
    """A process that holds what the commands import.

    Args:
        python: The Python of an environment, which sees nothing of the checkout; None: this one,
            with the checkout.
    """

    def __init__(self, python=None):
        command = (
            [str(python), "-I", __file__]
            if python
            else [sys.executable, "-m", "tests.support.fork_server"]
        )
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
        )
        self._requests, self._answers, self._wait = process.stdin, process.stdout, process.wait

    def close(self):
        """End the process."""
        self._requests.close()
        self._wait()
        self._answers.close()

    def run(self, name, *flags, cwd=ROOT, timeout=300):
        """Run `bin/<name>`, or the program at a path, with flags.

        Returns:
            The finished process, killed by SIGALRM where it took too long.
        """
        command = [str(ROOT / "bin" / name), *(str(flag) for flag in flags)]
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/out", f"{folder}/err"]
            request = {"command": command, "cwd": str(cwd), "timeout": timeout, "paths": paths}
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            status = json.loads(self._answers.readline())
            out, err = (pathlib.Path(path).read_text() for path in paths)
        return subprocess.CompletedProcess(command, status, out, err)

    def run_script(self, text, timeout=300):
        """Run the text of a Python program; returns the finished process."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "script.py"
            path.write_text(textwrap.dedent(text))
            return self.run(path, timeout=timeout)


class ForkedServer(ForkServer):
    """A fork of this process, which has called `import_all` and not begun to compute."""

    def __init__(self):
        requests, answers = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            os.close(requests[1])
            os.close(answers[0])
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
            serve(os.fdopen(requests[0]), os.fdopen(answers[1], "w"))
            os._exit(0)
        os.close(requests[0])
        os.close(answers[1])
        self._requests, self._answers = os.fdopen(requests[1], "w"), os.fdopen(answers[0])
        self._wait = lambda: os.waitpid(pid, 0)


_SERVERS: list[ForkServer] = []


def fork_server(kind=ForkServer):
    """The one server of this process, started where it is first asked for."""
    if not _SERVERS:
        _SERVERS.append(kind())
        atexit.register(_SERVERS[0].close)
    return _SERVERS[0]


def _become(request):
    """Turn this fork into the command; does not return."""
    os.chdir(request["cwd"])
    for descriptor, path in zip((1, 2), request["paths"], strict=True):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(os.dup(n), "r" if n == 0 else "w") for n in range(3)
    )
    signal.alarm(request["timeout"])
    importlib.import_module("tfdml.data.readers.glyphs").draw = _DRAW[0]
    program, *_ = sys.argv = request["command"]
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
    sys.exit(0)


def hear_signals():
    """Tests send signals to themselves and to children: `nohup` has them ignore SIGHUP, a `&` of a
    shell SIGINT."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def import_all():
    """Import what every command imports, and draw what a tiny run reads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # see conftest.py
    for module in _IMPORTED:
        importlib.import_module(module)
    glyphs = importlib.import_module("tfdml.data.readers.glyphs")
    _DRAW.append(functools.cache(glyphs.draw))
    for character in glyphs.CHARACTERS:
        for instance in range(4):
            _DRAW[0](character, instance, size=32, seed=0)


def serve(requests, answers):
    """Run each request in a fork until they end."""
    for line in requests:
        pid = os.fork()
        if not pid:
            requests.close()
            answers.close()
            _become(json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


if __name__ == "__main__":
    import_all()
    serve(sys.stdin, os.fdopen(os.dup(1), "w"))
