"""Measures the time from an empty environment to a printed Recall@1, as installed from the wheel.

    python -m tools.first_result --json=docs/numbers/first_result.json

Builds the wheel of this checkout, makes an empty environment in a temporary folder, installs the
wheel with the versions of `constraints.txt`, and trains the quickstart there, from an empty folder.
Packages come from where pip is set to find them.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _run(*command: object, cwd: pathlib.Path) -> tuple[float, str]:
    """Return the seconds that a command takes, without the checkout on its path, and what it
    prints."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.perf_counter()
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True, check=True
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    """Entry point."""
    results = Results(command_line(__doc__ or "").parse_args().json)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
        wheel = next(folder.glob("*.whl"))
        environment, empty = folder / "environment", folder / "empty"
        empty.mkdir()
        pip = [
            environment / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            wheel,
            "-c",
            ROOT / "constraints.txt",
        ]
        train = [
            environment / "bin" / "tfdml",
            "train",
            "--flagfile=configs/quickstart.flags",
            "--run_dir=runs/glyphs",
        ]
        seconds = {
            "create an empty environment": _run(
                sys.executable, "-m", "venv", environment, cwd=folder
            )[0],
            "install the wheel and what it requires": _run(*pip, cwd=folder)[0],
        }
        duration, output = _run(*train, cwd=empty)
        seconds |= {
            "train, and print Recall@1": duration,
            "together": sum(seconds.values()) + duration,
        }
        add = results.table("steps", "step", "seconds")
        for step, value in seconds.items():
            add(step, f"{value:.0f}")
        print("\n" + "\n".join(line for line in output.splitlines() if "->" in line))


if __name__ == "__main__":
    main()
