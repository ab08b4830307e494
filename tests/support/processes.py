"""Programs of Python, each in a process of its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_python(*words, environment=(), cwd=ROOT, timeout=1800, status=0):
    """Run Python with these words.

    Args:
        *words: As on the command line.
        environment: Variables next to those of this process.
        cwd: Where it runs.
        timeout: After how many seconds it is killed.
        status: With which it must end.

    Returns:
        The finished process.
    """
    command = [sys.executable, *map(str, words)]
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **dict(environment)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == status, done.stdout[-1000:] + done.stderr[-3000:]
    return done
