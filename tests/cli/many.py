"""Many command lines of one command in one process, which spares the start of all but the first."""

import json
import subprocess
import sys

from tests.cli.conftest import ROOT

_PROGRAM = """
import contextlib, importlib, io, json, sys
sys.path.insert(0, sys.argv[1])
from absl.testing import flagsaver
from tfdml.cli import main
command = importlib.import_module(f"tfdml.cli.{sys.argv[2]}")
answers = []
for argv in json.loads(sys.argv[3]):
    out, err = io.StringIO(), io.StringIO()
    # The flags are as new for each.
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.run(getattr(command, sys.argv[2]), sys.argv[2], command.USAGE, [sys.argv[2], *argv])
        except SystemExit as ended:
            answers.append([ended.code, out.getvalue(), err.getvalue()])
print("ANSWERS" + json.dumps(answers))
"""


def run_many(name, folder, command_lines):
    """(status, output, error) of `bin/<name>` with each command line, run in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(ROOT), name, json.dumps(command_lines)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWERS")[2])
