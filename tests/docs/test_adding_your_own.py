"""What docs/adding_your_own.md adds works from the command line, in what it saves, and in
Python."""

import json
import shlex

import numpy as np
import pytest

from tests.docs.pages import ROOT, blocks, joined_lines
from tests.support import fork_server
from tests.support.processes import run_python

PAGE = ROOT / "docs" / "adding_your_own.md"
MODULE, *PYTHON = (block.code for block in blocks(PAGE, "python"))
_BASH = [block.code for block in blocks(PAGE, "bash")]
TRAIN, EVALUATE = (shlex.split(line) for code in _BASH for line in joined_lines(code) if line)


def run(folder, words, status=0):
    """Run a command in a folder; returns what it wrote to its second stream."""
    done = fork_server.run(*words, cwd=folder, timeout=900)
    assert done.returncode == status, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    labels = np.repeat(np.arange(12), 8)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    np.savez(tmp_path / "shop.npz", images=images, labels=labels)
    (tmp_path / "my_own.py").write_text(MODULE)
    run(tmp_path, TRAIN)
    assert "--import=my_own" in (tmp_path / "runs/shop/flags.txt").read_text()
    run(tmp_path, EVALUATE)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert 0 <= metrics.get("metrics", metrics)["found@5"] <= 1
    again = (
        "\nagain = keras.saving.load_model('learner.keras')\nassert type(again.objectives[0].loss) "
        "is type(loss)\n"
    )
    run_python("-c", "\n".join([PYTHON[0], again, *PYTHON[1:]]), cwd=tmp_path)
    # What the run names is not imported unless it is typed, and elsewhere it is missing.
    untyped = [word for word in EVALUATE if not word.startswith("--import")]
    assert "add --import=my_own" in run(tmp_path, untyped, 2).strip().splitlines()[-1]
    (tmp_path / "my_own.py").rename(tmp_path / "renamed.py")
    assert "--import=my_own" in run(tmp_path, EVALUATE, 2).strip().splitlines()[-1]
