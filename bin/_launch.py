"""Finds the command of this checkout, and the environment that `make install` made if there is
one."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
python = os.path.join(ROOT, ".venv", "bin", "python")
if os.path.exists(python) and os.path.dirname(python) != os.path.join(sys.prefix, "bin"):
    os.execv(python, [python, *sys.argv])
sys.path.insert(0, ROOT)

from tfdml.cli import main  # noqa: E402, F401
