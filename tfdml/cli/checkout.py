"""Commands that run other commands of a checkout: its root, and how one is run there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> int:
    """Print a command of `bin/`, run it in the root of the checkout, and return its status.

    Example:
        >>> run("bin/train", "--help")
        <BLANKLINE>
        $ bin/train --help
        0
    """
    print(f"\n$ {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
